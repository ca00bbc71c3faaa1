"""Kept results can be measured again: their commands are ones that the code takes today."""

from __future__ import annotations

import runpy
import shlex
import sys
from pathlib import Path

import orjson
import pytest

from benchmarks import runner

RESULTS = sorted((Path(__file__).parents[2] / "benchmarks" / "results").glob("*.json"))
COMMANDS = {path.name: orjson.loads(path.read_bytes()).get("command") for path in RESULTS}
MODULES = {
    name: shlex.split(command) for name, command in COMMANDS.items() if "-m benchmarks." in (command or "")
}


@pytest.mark.parametrize("name", MODULES)
def test_the_command_of_a_result_is_still_taken(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    words = MODULES[name]
    arguments = words[words.index("-m") + 1 :]
    monkeypatch.setattr(sys, "argv", arguments)
    monkeypatch.setattr(runner, "run", lambda *_: 0)
    with pytest.raises(SystemExit) as ended:
        runpy.run_module(arguments[0], run_name="__main__")
    assert ended.value.code == 0, COMMANDS[name]


def test_most_results_have_commands() -> None:
    assert len(MODULES) > 15
