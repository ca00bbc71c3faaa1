"""LongBench (Bai et al. 2024): its published files, tasks and metrics.

From the published set-up: which metric and how many new tokens a task has, that the prompt is instruction,
context, question and a cue for the answer in this order, and which tasks are scored on the first line.
The instructions are this repository's own wording and no chat template is applied, so scores compare methods
here, and only roughly with published ones.

Each metric is of one prediction against one reference answer, in [0, 1]. Two differ from the published
scripts, so that nothing beyond the standard library is needed: Chinese text is compared by character, where
the scripts segment words with `jieba`; rouge-L and edit similarity are computed here (longest common
subsequence; `difflib`'s ratio, which the `fuzzywuzzy` package is built on).
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import msgspec

from krul_backend.errors import KrulError


class LongBenchError(KrulError):
    """A data folder or a line of a file that is not in LongBench's format."""


class Example(msgspec.Struct, frozen=True, rename={"task": "dataset"}):
    """One line. ``all_classes`` is None for tasks that do not classify."""

    task: str
    input: str
    context: str
    answers: Annotated[tuple[str, ...], msgspec.Meta(min_length=1)]
    all_classes: tuple[str, ...] | None = None


def task_files(folder: Path) -> dict[str, Path]:
    """``<task>.jsonl`` files of ``folder`` by task. Raises LongBenchError if there is none."""
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        raise LongBenchError(f"{folder} holds no LongBench files (expected <task>.jsonl)")
    return files


def read_examples(path: Path) -> Iterator[Example]:
    """The examples of one file. Raises LongBenchError naming file, line and field."""
    decoder = msgspec.json.Decoder(Example)
    for number, line in enumerate(path.read_bytes().splitlines(), start=1):
        if line.strip():
            try:
                yield decoder.decode(line)
            except msgspec.MsgspecError as error:
                raise LongBenchError(f"{path.name}, line {number}: {error}") from None


_CHINESE_PUNCTUATION = (
    "！？｡。＂＃＄％＆＇（）＊＋，－／：；＜＝＞＠［＼］＾＿｀｛｜｝～、《》「」『』【】“”‘’…—·"  # noqa: RUF001
)
_ARTICLES = re.compile(r"\b(a|an|the)\b")

Metric = Callable[[str, str, Sequence[str]], float]
"""Of a prediction, a reference answer, and the names of all classes."""


def qa_f1(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """F1 of the words in common, without case, punctuation and articles."""
    return _overlap_f1(_english_words(prediction), _english_words(answer))


def qa_f1_chinese(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """F1 of the characters in common, without case, punctuation and white space."""
    return _overlap_f1(_chinese_characters(prediction), _chinese_characters(answer))


def rouge_l(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Rouge-L F1 over words separated by white space."""
    return _rouge_l(prediction.split(), answer.split())


def rouge_l_chinese(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Rouge-L F1 over characters other than white space."""
    return _rouge_l([c for c in prediction if not c.isspace()], [c for c in answer if not c.isspace()])


def classification(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """1 / n if the answer is among the n class names found in the prediction.

    A name found only because it is part of the answer's name does not count.
    """
    named = [name for name in classes if name in prediction and (name == answer or name not in answer)]
    return 1 / len(named) if answer in named else 0.0


def retrieval(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Share of the numbers in the prediction that are the paragraph's."""
    return _share_of_numbers(prediction, answer)


count = retrieval
"""Share of the numbers in the prediction that are the count."""


def code_similarity(prediction: str, answer: str, classes: Sequence[str]) -> float:
    """Edit similarity of the prediction's first line of code with the answer."""
    lines = prediction.lstrip("\n").split("\n")
    first = next((line for line in lines if not any(mark in line for mark in ("`", "#", "//"))), "")
    return difflib.SequenceMatcher(None, first, answer).ratio()


def best_score(metric: Metric, prediction: str, example: Example) -> float:
    """The best over the example's reference answers."""
    return max(metric(prediction, answer, example.all_classes or ()) for answer in example.answers)


def _english_words(text: str) -> list[str]:
    bare = "".join(c for c in text.lower() if c not in string.punctuation)
    return _ARTICLES.sub(" ", bare).split()


def _chinese_characters(text: str) -> list[str]:
    dropped = set(string.punctuation + _CHINESE_PUNCTUATION)
    return [c for c in text.lower() if c not in dropped and not c.isspace()]


def _overlap_f1(prediction: Sequence[str], answer: Sequence[str]) -> float:
    num_common = sum((Counter(prediction) & Counter(answer)).values())
    return _f1(num_common, len(prediction), len(answer))


def _rouge_l(prediction: Sequence[str], answer: Sequence[str]) -> float:
    return _f1(_common_subsequence(prediction, answer), len(prediction), len(answer))


def _f1(num_common: int, num_predicted: int, num_expected: int) -> float:
    # 2pr / (p + r) with p = common / predicted and r = common / expected
    return 2 * num_common / (num_predicted + num_expected) if num_common else 0.0


def _common_subsequence(a: Sequence[str], b: Sequence[str]) -> int:
    """Length of the longest common subsequence, row by row."""
    row = [0] * (len(b) + 1)
    for item in a:
        diagonal = 0
        for j, other in enumerate(b, start=1):
            diagonal, row[j] = row[j], diagonal + 1 if item == other else max(row[j], row[j - 1])
    return row[-1]


def _share_of_numbers(prediction: str, answer: str) -> float:
    wanted = re.search(r"\d+", answer)
    numbers = re.findall(r"\d+", prediction)
    if wanted is None or not numbers:
        return 0.0
    return numbers.count(wanted.group()) / len(numbers)


@dataclass(frozen=True)
class Task:
    """``prompt`` has the places ``{context}`` and ``{input}``."""

    prompt: str
    metric: Metric
    max_new_tokens: int
    first_line_only: bool = False

    def prompt_of(self, example: Example) -> str:
        # Not str.format: contexts are full of braces.
        before, after = self.prompt.split("{context}")
        return before + example.context + after.replace("{input}", example.input)

    def score(self, prediction: str, example: Example) -> float:
        if self.first_line_only:
            prediction = prediction.lstrip("\n").split("\n")[0]
        return best_score(self.metric, prediction, example)


_ONE_TEXT = (
    "Read the text and answer the question about it as briefly as you can, with no explanation.\n\n"
    "Text: {context}\n\nQuestion: {input}\nAnswer:"
)
_ONE_TEXT_CHINESE = (
    "请阅读下面的文章，然后用尽量简短的话回答问题。\n\n文章：{context}\n\n问题：{input}\n回答："  # noqa: RUF001
)
_PASSAGES = (
    "Use the passages to answer the question. Give nothing but the answer.\n\n"
    "{context}\n\nQuestion: {input}\nAnswer:"
)
_CODE = "Write the line of code that comes next.\n\n{context}{input}Next line:\n"

TASKS: dict[str, Task] = {
    "narrativeqa": Task(_ONE_TEXT, qa_f1, 128),
    "qasper": Task(
        "Read the paper and answer the question about it briefly. Say 'unanswerable' if it does not tell, "
        "and 'yes' or 'no' if that is the answer.\n\nPaper: {context}\n\nQuestion: {input}\nAnswer:",
        qa_f1,
        128,
    ),
    "multifieldqa_en": Task(_ONE_TEXT, qa_f1, 64),
    "multifieldqa_zh": Task(_ONE_TEXT_CHINESE, qa_f1_chinese, 64),
    "hotpotqa": Task(_PASSAGES, qa_f1, 32),
    "2wikimqa": Task(_PASSAGES, qa_f1, 32),
    "musique": Task(_PASSAGES, qa_f1, 32),
    "dureader": Task(
        "请根据下面的几篇文章回答问题。\n\n文章：{context}\n\n问题：{input}\n回答：",  # noqa: RUF001
        rouge_l_chinese,
        128,
    ),
    "gov_report": Task(
        "Summarise this government report on one page.\n\nReport:\n{context}\n\nSummary:",
        rouge_l,
        512,
    ),
    "qmsum": Task(
        "Here is the transcript of a meeting. Answer the request about it in a few sentences.\n\n"
        "Transcript:\n{context}\n\nRequest: {input}\nAnswer:",
        rouge_l,
        512,
    ),
    "multi_news": Task(
        "Summarise these news articles together on one page.\n\nArticles:\n{context}\n\nSummary:",
        rouge_l,
        512,
    ),
    "vcsum": Task(
        "请为下面的会议记录写一份总结。\n\n会议记录：\n{context}\n\n会议总结：",  # noqa: RUF001
        rouge_l_chinese,
        512,
    ),
    "trec": Task(
        "Name the type of the last question, as in the examples.\n\n{context}\n{input}",
        classification,
        64,
        first_line_only=True,
    ),
    "triviaqa": Task(
        "Answer the last question from its passage, as in the examples. Give nothing but the answer.\n\n"
        "{context}\n\n{input}",
        qa_f1,
        32,
        first_line_only=True,
    ),
    "samsum": Task(
        "Summarise the last dialogue in a few short sentences, as in the examples.\n\n{context}\n\n{input}",
        rouge_l,
        128,
        first_line_only=True,
    ),
    "lsht": Task(
        "请像例子那样，写出最后一条新闻的类别。\n\n{context}\n{input}",  # noqa: RUF001
        classification,
        64,
        first_line_only=True,
    ),
    "passage_count": Task(
        "Some of these paragraphs repeat others. Count how many different paragraphs there are, and "
        "give only the number.\n\n{context}\n\nNumber of different paragraphs:",
        count,
        32,
    ),
    "passage_retrieval_en": Task(
        "One of these 30 numbered paragraphs is the source of the abstract. Answer in the form "
        "'Paragraph 1', 'Paragraph 2' and so on.\n\n{context}\n\nAbstract: {input}\n\nThe source is:",
        retrieval,
        32,
    ),
    "passage_retrieval_zh": Task(
        "下面有若干编号的段落，请找出摘要出自哪一段，用“段落1”、“段落2”这样的格式回答。\n\n"  # noqa: RUF001
        "{context}\n\n摘要：{input}\n\n答案：",  # noqa: RUF001
        retrieval,
        32,
    ),
    "lcc": Task(_CODE, code_similarity, 64),
    "repobench-p": Task(_CODE, code_similarity, 64),
}


def task_of(name: str) -> Task:
    """Raises LongBenchError for an unknown name."""
    if name not in TASKS:
        raise LongBenchError(f"task {name!r} is unknown (accepted: {', '.join(TASKS)})")
    return TASKS[name]


def truncate_middle(ids: list[int], max_tokens: int) -> list[int]:
    """Drops tokens from the middle, as the published set-up does: the ends hold instruction and question."""
    if len(ids) <= max_tokens:
        return ids
    head = max_tokens // 2
    return ids[:head] + ids[len(ids) - (max_tokens - head) :]
