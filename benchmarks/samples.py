"""Leaves samples out of what is kept of a result."""

from __future__ import annotations

from typing import Any

from krul_sglang.json_file import quantiles


def without_samples(value: Any) -> Any:
    """``value`` with quantiles in the place of samples.

    Samples are the lists of numbers at keys ``samples``, ``samples_s`` and ``*_samples_s``, or the lists
    inside an object at such a key; of samples that are no plain numbers only the count stays.
    """
    if isinstance(value, dict):
        return {
            name: _of_samples(each) if _holds_samples(name) else without_samples(each)
            for name, each in value.items()
        }
    return [without_samples(each) for each in value] if isinstance(value, list | tuple) else value


def _holds_samples(name: object) -> bool:
    return isinstance(name, str) and (name in ("samples", "samples_s") or name.endswith("_samples_s"))


def _of_samples(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _of_samples(each) for name, each in value.items()}
    is_plain = all(isinstance(each, int | float) for each in value)
    return quantiles(value) if value and is_plain else {"n": len(value)}
