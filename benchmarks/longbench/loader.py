"""Reads LongBench's published files: one JSON object per line, one file per task."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from krul_backend.errors import KrulError

_FIELDS = {
    "input": str,
    "context": str,
    "answers": list,
    "length": int,
    "dataset": str,
    "language": str,
}


class LongBenchError(KrulError):
    """A data folder or a line of a file that is not in LongBench's format."""


@dataclass(frozen=True)
class Example:
    """One line. ``all_classes`` is empty for tasks that do not classify; ``length`` is in words, or
    characters of Chinese text, as published."""

    task: str
    input: str
    context: str
    answers: tuple[str, ...]
    all_classes: tuple[str, ...]
    length: int
    language: str


def task_files(folder: Path) -> dict[str, Path]:
    """``<task>.jsonl`` files of ``folder`` by task. Raises LongBenchError if there is none."""
    files = {path.stem: path for path in sorted(folder.glob("*.jsonl"))}
    if not files:
        raise LongBenchError(f"{folder} holds no LongBench files (expected <task>.jsonl)")
    return files


def read_examples(path: Path) -> Iterator[Example]:
    """The examples of one file. Raises LongBenchError naming file, line and field."""
    with path.open("rb") as lines:
        for number, line in enumerate(lines, start=1):
            if line.strip():
                yield _parse(line, f"{path.name}, line {number}")


def _parse(line: bytes, place: str) -> Example:
    try:
        value: Any = orjson.loads(line)
    except orjson.JSONDecodeError as error:
        raise LongBenchError(f"{place}: not JSON ({error})") from None
    if not isinstance(value, dict):
        raise LongBenchError(f"{place}: expected an object")
    for field, kind in _FIELDS.items():
        if not isinstance(value.get(field), kind):
            raise LongBenchError(f"{place}: {field} must be {kind.__name__}, got {value.get(field)!r}")
    # null for tasks that do not classify
    classes = value.get("all_classes") or []
    for field, texts in (("answers", value["answers"]), ("all_classes", classes)):
        if not isinstance(texts, list) or not all(isinstance(text, str) for text in texts):
            raise LongBenchError(f"{place}: {field} must be a list of strings, got {texts!r}")
    if not value["answers"]:
        raise LongBenchError(f"{place}: no answer")
    return Example(
        value["dataset"],
        value["input"],
        value["context"],
        tuple(value["answers"]),
        tuple(classes),
        value["length"],
        value["language"],
    )
