"""How large the project may become: a limit for each part, which docs/architecture.md shows.

A change that needs more says so by raising a limit here. ``python -m tests.unit.test_size`` prints what there
is now.
"""

from __future__ import annotations

import ast
from collections.abc import Iterable
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "architecture.md"

PRODUCT = ("krul_sglang", "backend/krul_backend")
LIMITS = {
    "product": (PRODUCT, 50_500),
    "engine, with all that touches SGLang": (("krul_sglang/engine", "krul_sglang/adapter"), 16_190),
    "codec, strategy, attention": (
        tuple(f"backend/krul_backend/{room}" for room in ("codec", "strategy", "attention")),
        8_242,
    ),
    "store, tiers, daemon": (
        tuple(f"backend/krul_backend/{room}" for room in ("store", "tiers", "daemon")),
        17_430,
    ),
    "demo": (("demo",), 1_910),
    "benchmarks": (("benchmarks",), 11_005),
    "tests": (("tests",), 67_875),
    "tests/support": (("tests/support",), 6_604),
}
"""Folders of each part, and the most lines of Python that they may have together."""


def files_of(folders: Iterable[str]) -> list[Path]:
    return [path for folder in folders for path in sorted((ROOT / folder).rglob("*.py"))]


def num_lines(folders: Iterable[str]) -> int:
    return sum(len(path.read_text().splitlines()) for path in files_of(folders))


def num_classes(folders: Iterable[str]) -> int:
    trees = (ast.parse(path.read_text()) for path in files_of(folders))
    return sum(isinstance(node, ast.ClassDef) for tree in trees for node in ast.walk(tree))


def page_rows() -> dict[str, str]:
    """The limits that the page shows, by part."""
    rows = (line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| "))
    return {cells[1].strip(): cells[2].strip() for cells in rows if len(cells) == 5}


@pytest.mark.parametrize("part", LIMITS)
def test_no_part_outgrows_its_limit(part: str) -> None:
    folders, limit = LIMITS[part]
    assert files_of(folders), folders
    assert num_lines(folders) <= limit


@pytest.mark.parametrize("part", LIMITS)
def test_the_page_shows_the_limits(part: str) -> None:
    assert page_rows()[part] == f"{LIMITS[part][1]:,}"


if __name__ == "__main__":
    for name, (places, most) in LIMITS.items():
        print(
            f"{name}: {num_lines(places):,} of {most:,} lines, "
            f"{len(files_of(places))} files, {num_classes(places)} classes"
        )
