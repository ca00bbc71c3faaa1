"""The demo from end to end: three real servers, the bundled model and its conversations."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.forked_server import with_forked_servers

CONVERSATIONS = 5
"""So many that each has left the small pool before it returns."""
TURNS = 2


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("demo")


@pytest.fixture(scope="module")
def demo(folder: Path) -> subprocess.CompletedProcess[str]:
    """One run, with all files that it can write."""
    command = [
        *with_forked_servers("demo", "--model-path", "bundled"),
        *("--num-conversations", str(CONVERSATIONS), "--turns", str(TURNS)),
        *("--json", str(folder / "kept.json"), "--raw", str(folder / "raw.json")),
        *("--figure", str(folder / "demo.png")),
        # So short prompts of so small a model are computed again where that is sooner: not in this test.
        *("--option", "planner=full-load"),
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=1200)


@pytest.fixture(scope="module")
def measured(folder: Path, demo: subprocess.CompletedProcess[str]) -> dict[str, Any]:
    path = folder / "raw.json"
    assert path.exists(), demo.stdout + demo.stderr
    result: dict[str, Any] = json.loads(path.read_text())
    return result


def test_it_passes_and_says_so(demo: subprocess.CompletedProcess[str], measured: dict[str, Any]) -> None:
    verdict = measured["summary"]["verdict"]
    assert demo.returncode == 0, demo.stdout
    assert demo.stdout.strip().splitlines()[-len(verdict) :] == verdict
    assert verdict[0].startswith(f"All {CONVERSATIONS * TURNS} answers are those of the server")


def test_every_answer_is_the_same_and_returning_turns_were_restored(measured: dict[str, Any]) -> None:
    turns, summary = measured["turns"], measured["summary"]
    assert [turn["turn"] for turn in turns] == [1] * CONVERSATIONS + [2] * CONVERSATIONS
    for turn in turns:
        assert turn["krul"]["answer"] == turn["device"]["answer"] != ""
        assert turn["krul"]["prompt_tokens"] == turn["device"]["prompt_tokens"]
    restored = [turn["krul"]["host_tokens"] for turn in turns if turn["krul"]["host_tokens"] > 0]
    assert (summary["restored_turns"], summary["restored_tokens"]) == (len(restored), sum(restored))
    assert len(restored) == CONVERSATIONS
    assert turns[-1]["stored"]["num_bytes"] > turns[0]["stored"]["num_bytes"] > 0


def test_what_krul_restored_was_computed_without_it_and_on_the_device_in_a_pool_for_all(
    measured: dict[str, Any],
) -> None:
    for turn in measured["turns"][CONVERSATIONS:]:
        krul, recompute, device = turn["krul"], turn["recompute"], turn["device"]
        assert recompute["host_tokens"] == device["host_tokens"] == 0
        assert recompute["device_tokens"] < krul["host_tokens"] <= device["device_tokens"]


def test_what_is_kept_has_the_rounds_and_the_figure_is_drawn(folder: Path, measured: dict[str, Any]) -> None:
    kept = json.loads((folder / "kept.json").read_text())
    assert [each["turn"] for each in kept["rounds"]] == [1, 2, None]
    assert "turns" not in kept
    assert (folder / "demo.png").read_bytes().startswith(b"\x89PNG")
