"""The commands in the README, in docs/ and in kept results are ones that the code takes today.

tests/integration/test_operating_page.py runs those of docs/operating.md.
"""

from __future__ import annotations

import importlib.util
import json
import re
import runpy
import shlex
import sys
from pathlib import Path

import orjson
import pytest
import typer

from benchmarks import runner
from demo.app import app as demo
from krul_backend.daemon.cli.app import app as backend
from krul_sglang.cli.app import app as frontend
from krul_sglang.config import FLAG, KrulConfig

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), ROOT / "examples" / "README.md", *ROOT.glob("docs/*.md")]
OURS = {"krul-sglang": frontend, "krul-backend": backend}
WITHOUT_RUNNER = ("benchmarks.figures", "benchmarks.quality.texts")
"""Benchmarks that would do their work here."""


def commands() -> list[tuple[str, tuple[str, ...]]]:
    """Of each page, the words of each command in a block."""
    found = []
    for page in PAGES:
        text = page.read_text().replace("\\\n", " ")
        for block in re.findall(r"^```(?:bash)?\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            for line in block.splitlines():
                if re.match(r"(krul-\w+|make|(\.venv/bin/)?python) ", line):
                    words = shlex.split(line.partition("||")[0].replace("...", ""), comments=True)
                    found.append((page.name, tuple(word for word in words if word != "&")))
    return found


COMMANDS = commands()
RESULTS = {
    path.name: orjson.loads(path.read_bytes()).get("command")
    for path in sorted((ROOT / "benchmarks" / "results").glob("*.json"))
}
MODULES = {name: tuple(shlex.split(command)) for name, command in RESULTS.items() if command is not None}
"""The commands of results that a benchmark or the demo has written."""


def take(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command as it would be before it is run."""
    program, *arguments = words
    if program in OURS:
        group = typer.main.get_command(OURS[program])
        parsed = group.make_context(program, [*arguments])
        if not arguments[0].startswith("-"):
            name, command, rest = group.resolve_command(parsed, arguments)  # type: ignore[attr-defined]
            command.make_context(name, rest, parent=parsed)
    elif program == "make":
        targets = re.findall(r"^([\w-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)
        assert arguments[0] in targets
    elif arguments[1].startswith("benchmarks.") and arguments[1] not in WITHOUT_RUNNER:
        monkeypatch.setattr(sys, "argv", arguments[1:])
        monkeypatch.setattr(runner, "run", lambda *_: 0)
        with pytest.raises(SystemExit) as ended:
            runpy.run_module(arguments[1], run_name="__main__")
        assert ended.value.code == 0, words
    elif arguments[1] == "demo":
        typer.main.get_command(demo).make_context("demo", arguments[2:])
    else:
        assert importlib.util.find_spec(arguments[1]) is not None
    if FLAG in arguments:
        KrulConfig.from_mapping(json.loads(arguments[arguments.index(FLAG) + 1]), FLAG)


@pytest.mark.parametrize("name", MODULES)
def test_the_command_of_a_result_is_still_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    take(MODULES[name], monkeypatch)


def test_most_results_have_commands() -> None:
    assert len(MODULES) > 15


@pytest.mark.parametrize("words", [words for _, words in COMMANDS], ids=lambda words: shlex.join(words)[:70])
def test_a_command_of_a_page_is_taken(words: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    take(words, monkeypatch)


def test_pages_have_commands() -> None:
    pages = {page for page, _ in COMMANDS}
    assert pages >= {"README.md", "benchmarking.md", "gpu.md", "operating.md", "serving.md", "tiers.md"}


@pytest.mark.parametrize(
    "line",
    [
        "krul-sglang why --uri http://127.0.0.1:30000",
        "krul-sglang wherefore",
        "krul-backend stats --curve-dir keys",
        "make coffee",
        "python -m benchmarks.serving --histories 40",
        "python -m demo --histories 40",
        f"python -m sglang.launch_server {FLAG} '{{}}'".replace("{}", '{"strategie": "krul"}'),
    ],
)
def test_a_command_that_is_not_taken_is_noticed(line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises((Exception, SystemExit)):
        take(tuple(shlex.split(line)), monkeypatch)
