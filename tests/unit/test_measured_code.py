"""Digests of measured code, and what a page says of a result whose code has changed."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path

import orjson
import pytest

from benchmarks import measured_code, pages
from benchmarks.measured_code import PARTS, code_of, digest
from benchmarks.tables import RESULTS, ROOT

CODE = '''"""A module."""

SIZE = 4
"""In bytes."""


class Error(Exception):
    """Raised."""


def total(left, right):
    """The sum."""
    # Of both.
    return [left + right, "text", f"{left:<{right}}"]
'''


def digest_of(folder: Path, code: str, name: str = "part/file.py") -> str:
    path = folder / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(code)
    try:
        return digest(["part"], folder)
    finally:
        path.unlink()


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"""A module."""\n\n', ""),
        ('"""In bytes."""', '"""In words."""'),
        ('"""Raised."""', "pass"),
        ("# Of both.", "# Of the two."),
        ('[left + right, "text",', "[\n        (left + right),\n        'text',\n       "),
    ],
)
def test_documentation_and_formatting_do_not_count(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    assert digest_of(tmp_path, CODE.replace(old, new)) == digest_of(tmp_path, CODE)


@pytest.mark.parametrize(
    ("old", "new"), [("left + right", "left - right"), ("text", "texts"), ("SIZE = 4", "SIZE = 8")]
)
def test_code_counts(tmp_path: Path, old: str, new: str) -> None:
    assert old in CODE
    # In every release of Python.
    assert digest_of(tmp_path, CODE) == "a2e7b684"
    assert digest_of(tmp_path, CODE.replace(old, new)) != "a2e7b684"


def test_files_count_by_their_names_and_once(tmp_path: Path) -> None:
    assert digest_of(tmp_path, CODE) != digest_of(tmp_path, CODE, "part/other.py")
    (tmp_path / "part" / "file.py").write_text(CODE)
    assert digest(["part", "part/file.py"], tmp_path) == digest(["part"], tmp_path)


def test_a_path_after_a_minus_leaves_out_what_earlier_ones_named(tmp_path: Path) -> None:
    (tmp_path / "part" / "inner").mkdir(parents=True)
    (tmp_path / "part" / "file.py").write_text(CODE)
    alone = digest(["part"], tmp_path)
    (tmp_path / "part" / "inner" / "other.py").write_text(CODE)
    assert digest(["part", "-part/inner"], tmp_path) == alone != digest(["part"], tmp_path)
    assert digest(["-part/inner", "part"], tmp_path) == digest(["part"], tmp_path)


def test_a_page_says_whether_the_code_is_as_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    code, kept = tmp_path / "benchmarks" / "codec.py", tmp_path / "codec-cpu.json"
    code.parent.mkdir()
    code.write_text(CODE)
    monkeypatch.setattr(measured_code, "digest", partial(digest, root=tmp_path))
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    command = ".venv/bin/python -m benchmarks.codec --json codec-cpu.json"
    kept.write_bytes(orjson.dumps({"command": command, "code": code_of(command)}))
    source = "Source: [`codec-cpu.json`](benchmarks/results/codec-cpu.json)"
    page = f"Before. {source}.\nAfter."
    assert pages.with_remarks(page) == page

    code.write_text(CODE.replace("The sum.", "What both are together."))
    assert pages.with_remarks(page) == page
    code.write_text(CODE.replace("+", "*"))
    changed = f"Before. {source}; the code has changed since.\nAfter."
    assert pages.with_remarks(page) == pages.with_remarks(changed) == changed
    code.write_text(CODE)
    assert pages.with_remarks(changed) == page

    kept.write_bytes(orjson.dumps({"command": command}))
    assert pages.with_remarks(page) == f"Before. {source}; measured with earlier code.\nAfter."


def test_a_kept_page_is_out_of_date_as_soon_as_measured_code_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    made = set()
    for code in (orjson.loads((RESULTS / "tiers-cpu.json").read_bytes())["code"], "00000000"):
        monkeypatch.setattr(measured_code, "digest", lambda _, code=code: code)
        made.add(pages.pages()[pages.MEASURED])
    assert len(made) == 2


def test_every_program_that_writes_a_result_has_its_parts_and_they_exist() -> None:
    written = [orjson.loads(path.read_bytes()).get("command", "tests.gpu") for path in RESULTS.iterdir()]
    assert None not in map(code_of, written)
    sources = "".join(path.read_text() for path in (ROOT / "benchmarks").rglob("*.py"))
    parsers = re.findall(r'make_(?:serving_)?parser\(\s*"(\w+)"', sources)
    assert {f"benchmarks.{name}" for name in parsers} == {name for name in PARTS if "benchmarks." in name}
    for path in {path for paths in PARTS.values() for path in paths}:
        assert (ROOT / path.removeprefix("-")).exists(), path
    assert code_of("python -m pytest tests/unit/test_demo.py") is None
