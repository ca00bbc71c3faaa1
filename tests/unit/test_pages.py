"""Generated parts of the documentation are those of the result files and of the configuration."""

from __future__ import annotations

import re
from dataclasses import fields

import pytest

from benchmarks.pages import CONFIGURATION, MEASURED, README, default_text, pages, render
from benchmarks.tables import RESULTS, ROOT
from krul_sglang.config import KrulConfig

LINK = re.compile(r"\]\(([^)#]+)(?:#[^)]*)?\)")


def test_every_page_is_what_would_be_written() -> None:
    made = pages()
    assert {README, MEASURED, CONFIGURATION} < set(made)
    for path, text in made.items():
        assert path.read_text(encoding="utf-8") == text, f"{path.name}: run python -m benchmarks.pages"


def test_a_changed_table_would_be_noticed() -> None:
    text = README.read_text(encoding="utf-8")
    assert render(text, {"demo": "other numbers"}) != text
    with pytest.raises(ValueError, match="no place"):
        render(text, {"no such table": ""})


def test_the_readme_is_short_and_its_options_have_the_defaults_of_the_configuration() -> None:
    text = README.read_text(encoding="utf-8")
    assert len(text.encode()) <= 8192
    rows = [line.split(" | ") for line in text.splitlines() if line.startswith("| `")]
    defaults = {option.name: default_text(option) for option in fields(KrulConfig)}
    assert len(rows) == 10
    for name, default, _ in rows:
        assert default == f"`{defaults[name.strip('| `')]}`"


def test_results_are_summaries() -> None:
    assert sum(path.stat().st_size for path in RESULTS.iterdir()) < 323_000


def test_every_result_and_every_figure_is_shown() -> None:
    text = "\n".join(page.read_text(encoding="utf-8") for page in (README, *(ROOT / "docs").glob("*.md")))
    for path in (*RESULTS.iterdir(), *(ROOT / "docs" / "figures").iterdir()):
        assert path.name in text, path


def test_links_between_pages_lead_somewhere() -> None:
    for page in (README, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md", *(ROOT / "docs").glob("*.md")):
        for target in LINK.findall(page.read_text(encoding="utf-8")):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name} links to {target}"


def test_files_that_the_architecture_names_are_there() -> None:
    text = (ROOT / "docs" / "architecture.md").read_text(encoding="utf-8")
    named = re.findall(r"`((?:krul_sglang|backend|benchmarks|tests)/[\w/.]+)`", text)
    assert len(named) > 20
    for path in named:
        assert (ROOT / path).exists(), path
