"""LongBench's tasks: prompt, metric and length of the answer.

From the published set-up: which metric and how many new tokens a task has, that the prompt is instruction,
context, question and a cue for the answer in this order, and which tasks are scored on the first line.
The instructions are this repository's own wording and no chat template is applied, so scores compare methods
here, and only roughly with published ones.
"""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.longbench import metrics
from benchmarks.longbench.loader import Example, LongBenchError
from benchmarks.longbench.metrics import Metric


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
        return metrics.best_score(self.metric, prediction, example)


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
    "narrativeqa": Task(_ONE_TEXT, metrics.qa_f1, 128),
    "qasper": Task(
        "Read the paper and answer the question about it briefly. Say 'unanswerable' if it does not tell, "
        "and 'yes' or 'no' if that is the answer.\n\nPaper: {context}\n\nQuestion: {input}\nAnswer:",
        metrics.qa_f1,
        128,
    ),
    "multifieldqa_en": Task(_ONE_TEXT, metrics.qa_f1, 64),
    "multifieldqa_zh": Task(_ONE_TEXT_CHINESE, metrics.qa_f1_chinese, 64),
    "hotpotqa": Task(_PASSAGES, metrics.qa_f1, 32),
    "2wikimqa": Task(_PASSAGES, metrics.qa_f1, 32),
    "musique": Task(_PASSAGES, metrics.qa_f1, 32),
    "dureader": Task(
        "请根据下面的几篇文章回答问题。\n\n文章：{context}\n\n问题：{input}\n回答：",  # noqa: RUF001
        metrics.rouge_l_chinese,
        128,
    ),
    "gov_report": Task(
        "Summarise this government report on one page.\n\nReport:\n{context}\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "qmsum": Task(
        "Here is the transcript of a meeting. Answer the request about it in a few sentences.\n\n"
        "Transcript:\n{context}\n\nRequest: {input}\nAnswer:",
        metrics.rouge_l,
        512,
    ),
    "multi_news": Task(
        "Summarise these news articles together on one page.\n\nArticles:\n{context}\n\nSummary:",
        metrics.rouge_l,
        512,
    ),
    "vcsum": Task(
        "请为下面的会议记录写一份总结。\n\n会议记录：\n{context}\n\n会议总结：",  # noqa: RUF001
        metrics.rouge_l_chinese,
        512,
    ),
    "trec": Task(
        "Name the type of the last question, as in the examples.\n\n{context}\n{input}",
        metrics.classification,
        64,
        first_line_only=True,
    ),
    "triviaqa": Task(
        "Answer the last question from its passage, as in the examples. Give nothing but the answer.\n\n"
        "{context}\n\n{input}",
        metrics.qa_f1,
        32,
        first_line_only=True,
    ),
    "samsum": Task(
        "Summarise the last dialogue in a few short sentences, as in the examples.\n\n{context}\n\n{input}",
        metrics.rouge_l,
        128,
        first_line_only=True,
    ),
    "lsht": Task(
        "请像例子那样，写出最后一条新闻的类别。\n\n{context}\n{input}",  # noqa: RUF001
        metrics.classification,
        64,
        first_line_only=True,
    ),
    "passage_count": Task(
        "Some of these paragraphs repeat others. Count how many different paragraphs there are, and "
        "give only the number.\n\n{context}\n\nNumber of different paragraphs:",
        metrics.count,
        32,
    ),
    "passage_retrieval_en": Task(
        "One of these 30 numbered paragraphs is the source of the abstract. Answer in the form "
        "'Paragraph 1', 'Paragraph 2' and so on.\n\n{context}\n\nAbstract: {input}\n\nThe source is:",
        metrics.retrieval,
        32,
    ),
    "passage_retrieval_zh": Task(
        "下面有若干编号的段落，请找出摘要出自哪一段，用“段落1”、“段落2”这样的格式回答。\n\n"  # noqa: RUF001
        "{context}\n\n摘要：{input}\n\n答案：",  # noqa: RUF001
        metrics.retrieval,
        32,
    ),
    "lcc": Task(_CODE, metrics.code_similarity, 64),
    "repobench-p": Task(_CODE, metrics.code_similarity, 64),
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
