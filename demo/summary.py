"""Writes what was measured: all of it, or a summary that is small enough to keep."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import orjson

from krul_backend.atomic_file import replacing
from krul_sglang.json_file import write_json

SIGNIFICANT_DIGITS = 5
"""Of floats below 1 in a summary; larger ones, such as ratios near 1, have one more."""

LINE_WIDTH = 120


def write_summary(value: Any, path: Path) -> None:
    """Write ``value`` like ``write_json``, but shorter.

    Floats are rounded to ``SIGNIFICANT_DIGITS``. An object that fits into ``LINE_WIDTH`` stands on one line,
    and so does each entry of a list, however long: a row of a result is a line.
    """
    with replacing(path) as file:
        file.write((_formatted(_rounded(value), "") + "\n").encode())


def write_result(result: Any, summary: Any, *, json: Path | None, raw: Path | None) -> None:
    """Write the summary of a measurement to ``json`` and the whole of it to ``raw``, where they are given."""
    if raw is not None:
        write_json(result, raw)
    if json is not None:
        write_summary(summary, json)


def quantiles(samples: Sequence[float]) -> dict[str, float]:
    """How many samples there are, the smallest, the quartiles (interpolated), and the largest."""
    cuts = statistics.quantiles(samples, n=4, method="inclusive") if len(samples) > 1 else list(samples) * 3
    names = ("min", "q25", "median", "q75", "max")
    return {"n": len(samples), **dict(zip(names, (min(samples), *cuts, max(samples)), strict=True))}


def _rounded(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _rounded(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_rounded(each) for each in value]
    if isinstance(value, float):
        return float(f"{value:.{SIGNIFICANT_DIGITS + (abs(value) >= 1)}g}")
    return value


def _formatted(value: Any, indent: str) -> str:
    line = _line(value)
    if len(indent) + len(line) <= LINE_WIDTH or not isinstance(value, dict | list) or not value:
        return line
    deeper = indent + " "
    if isinstance(value, dict):
        # A key that is a number is written as text, as JSON wants it.
        parts = [
            f"{orjson.dumps(str(name)).decode()}:{_formatted(each, deeper)}" for name, each in value.items()
        ]
        return "{\n" + ",\n".join(deeper + part for part in parts) + "\n" + indent + "}"
    return "[\n" + ",\n".join(deeper + _line(each) for each in value) + "\n" + indent + "]"


def _line(value: Any) -> str:
    return orjson.dumps(value, option=orjson.OPT_NON_STR_KEYS).decode()
