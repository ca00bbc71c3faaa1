"""Entry point of group ``sglang.srt.plugins``."""

from __future__ import annotations


def register() -> None:
    """Register the ``krul`` radix cache backend (filled in below)."""
