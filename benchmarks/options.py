"""Reads options that take several values, for ``argparse``."""

from __future__ import annotations


def names(text: str) -> tuple[str, ...]:
    """The parts between commas."""
    return tuple(text.split(","))


def numbers(text: str) -> tuple[int, ...]:
    """The whole numbers between commas. Raises ValueError, which argparse turns into its own message."""
    return tuple(map(int, names(text)))
