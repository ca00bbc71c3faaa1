"""LongBench's metrics, each of one prediction against one reference answer, in [0, 1].

Two differ from the published scripts, so that nothing beyond the standard library is needed: Chinese text is
compared by character, where the scripts segment words with `jieba`; rouge-L and edit similarity are computed
here (longest common subsequence; `difflib`'s ratio, which the `fuzzywuzzy` package is built on).
"""

from __future__ import annotations

import difflib
import re
import string
from collections import Counter
from collections.abc import Callable, Sequence

from benchmarks.longbench.loader import Example

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
    return max(metric(prediction, answer, example.all_classes) for answer in example.answers)


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
