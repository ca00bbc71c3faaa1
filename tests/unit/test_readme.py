from __future__ import annotations

import pytest

from benchmarks.readme import README, render, tables


def test_the_tables_in_the_readme_are_those_of_the_result_files() -> None:
    text = README.read_text(encoding="utf-8")
    assert render(text, tables()) == text


def test_a_changed_table_would_be_noticed() -> None:
    text = README.read_text(encoding="utf-8")
    assert render(text, {"demo": "other numbers"}) != text
    with pytest.raises(ValueError, match="no place"):
        render(text, {"no such table": ""})
