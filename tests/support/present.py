"""Says that something must be there."""

from __future__ import annotations

from typing import TypeVar

_Value = TypeVar("_Value")


def present(value: _Value | None) -> _Value:
    """Return ``value``, which must not be None."""
    assert value is not None
    return value
