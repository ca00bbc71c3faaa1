from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.longbench import (
    TASKS,
    Example,
    LongBenchError,
    classification,
    code_similarity,
    count,
    qa_f1,
    qa_f1_chinese,
    read_examples,
    retrieval,
    rouge_l,
    rouge_l_chinese,
    task_files,
    task_of,
    truncate_middle,
)

LINE = {
    "input": "Who keeps the lamp?",
    "context": "The lamp {on the hill} is kept by Ada.",
    "answers": ["Ada", "Ada of the hill"],
    "all_classes": None,
    "length": 9,
    "dataset": "qasper",
    "language": "en",
    "_id": "1",
}
words = st.lists(st.sampled_from(["red", "fox", "hill", "lamp", "blue"]), max_size=8)


def write_lines(path: Path, *lines: object) -> Path:
    path.write_text("\n".join(json.dumps(line) for line in lines) + "\n", encoding="utf-8")
    return path


def example(answers: tuple[str, ...], classes: tuple[str, ...] = ()) -> Example:
    return Example("trec", "question", "context", answers, classes)


def test_files_in_the_published_format_are_read(tmp_path: Path) -> None:
    chinese = {**LINE, "dataset": "lsht", "language": "zh", "all_classes": ["体育", "财经"]}
    write_lines(tmp_path / "qasper.jsonl", LINE)
    write_lines(tmp_path / "lsht.jsonl", chinese, chinese)
    files = task_files(tmp_path)
    assert list(files) == ["lsht", "qasper"]
    (read,) = read_examples(files["qasper"])
    assert read.answers == ("Ada", "Ada of the hill")
    assert read.all_classes is None
    assert [each.all_classes for each in read_examples(files["lsht"])] == [("体育", "财经")] * 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"answers": "Ada"}, r"Expected `array`, got `str` - at `\$\.answers`"),
        ({"answers": []}, r"length >= 1 - at `\$\.answers`"),
        ({"answers": [1]}, r"Expected `str`, got `int` - at `\$\.answers\[0\]`"),
        ({"context": None}, r"Expected `str`, got `null` - at `\$\.context`"),
        ({"all_classes": [3]}, "all_classes"),
    ],
)
def test_a_line_in_another_format_is_named(tmp_path: Path, change: dict[str, object], message: str) -> None:
    path = write_lines(tmp_path / "qasper.jsonl", LINE, {**LINE, **change})
    with pytest.raises(LongBenchError, match=rf"qasper\.jsonl, line 2: .*{message}"):
        list(read_examples(path))


def test_folders_and_lines_that_are_something_else(tmp_path: Path) -> None:
    with pytest.raises(LongBenchError, match="no LongBench files"):
        task_files(tmp_path)
    (tmp_path / "qasper.jsonl").write_text("{not json\n")
    with pytest.raises(LongBenchError, match=r"qasper\.jsonl, line 1: JSON is malformed"):
        list(read_examples(tmp_path / "qasper.jsonl"))
    with pytest.raises(LongBenchError, match="unknown"):
        task_of("poetry")


def test_prompts_hold_the_context_as_it_is_and_the_question_after_it(tmp_path: Path) -> None:
    (read,) = read_examples(write_lines(tmp_path / "qasper.jsonl", LINE))
    for name, task in TASKS.items():
        prompt = task.prompt_of(read)
        before, after = prompt.split("The lamp {on the hill} is kept by Ada.")
        assert "{" not in before + after, name
        assert (LINE["input"] in after) == ("{input}" in task.prompt)


def test_english_answers_are_compared_by_words_without_articles_and_punctuation() -> None:
    assert qa_f1("The red Fox!", "a red fox", ()) == 1
    # 2 of 4 predicted and 2 of 3 expected words: 2 * 2 / 7
    assert qa_f1("red red fox sleeps", "red fox hill", ()) == pytest.approx(4 / 7)
    assert qa_f1("", "fox", ()) == 0


def test_chinese_answers_are_compared_by_characters() -> None:
    assert qa_f1_chinese("北京。", "北 京", ()) == 1
    assert qa_f1_chinese("北京市", "南京", ()) == pytest.approx(2 / 5)
    # longest common subsequence of 3 of 4 and 3 characters
    assert rouge_l_chinese("今天很好", "今天好", ()) == pytest.approx(6 / 7)


def test_rouge_l_counts_the_longest_common_subsequence() -> None:
    assert rouge_l("the fox sat on the hill", "the fox on hill", ()) == pytest.approx(8 / 10)
    assert rouge_l("hill fox", "fox hill", ()) == pytest.approx(1 / 2)


@given(words, words)
def test_the_subsequence_is_that_of_the_recursive_definition(a: list[str], b: list[str]) -> None:
    def longest(i: int, j: int) -> int:
        if i == len(a) or j == len(b):
            return 0
        if a[i] == b[j]:
            return 1 + longest(i + 1, j + 1)
        return max(longest(i + 1, j), longest(i, j + 1))

    common = longest(0, 0)
    expected = 2 * common / (len(a) + len(b)) if common else 0
    assert rouge_l(" ".join(a), " ".join(b), ()) == pytest.approx(expected)


def test_a_class_counts_by_how_many_classes_are_named() -> None:
    classes = ("Number", "Other number", "Place")
    assert classification("Type: Place", "Place", classes) == 1
    assert classification("Place or Number", "Place", classes) == 1 / 2
    # "Number" alone would be found too, but only inside nothing else: "Other number" is lower case
    assert classification("Number", "Place", classes) == 0
    assert classification("Other Number", "Other Number", ("Number", "Other Number")) == 1


def test_numbers_are_found_in_what_is_said_around_them() -> None:
    assert retrieval("Paragraph 7", "Paragraph 7", ()) == 1
    assert retrieval("Paragraph 7 or 17", "Paragraph 7", ()) == 1 / 2
    assert retrieval("段落3", "段落3", ()) == 1
    assert count("there are many", "4", ()) == 0


def test_code_is_compared_on_its_first_line() -> None:
    text = "```python\n# a comment\nreturn x + 1\nreturn y"
    assert code_similarity(text, "return x + 1", ()) == 1
    assert 0.5 < code_similarity(text, "return x - 1", ()) < 1


def test_the_best_reference_answer_counts_and_few_shot_tasks_end_at_the_line() -> None:
    assert TASKS["qasper"].score("ada", example(("Bob", "Ada"))) == 1
    continued = "\nPlace\nQuestion: and now?\nType: Number"
    assert TASKS["trec"].score(continued, example(("Place",), ("Place", "Number"))) == 1
    assert TASKS["qasper"].score(continued, example(("Place",))) < 1


@given(st.integers(0, 40), st.integers(1, 40))
def test_truncation_keeps_both_ends(num_tokens: int, max_tokens: int) -> None:
    ids = list(range(num_tokens))
    kept = truncate_middle(ids, max_tokens)
    assert len(kept) == min(num_tokens, max_tokens)
    head = math.floor(max_tokens / 2)
    assert kept == (ids if num_tokens <= max_tokens else ids[:head] + ids[num_tokens - (max_tokens - head) :])
