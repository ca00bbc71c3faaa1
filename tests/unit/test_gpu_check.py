"""The GPU kit, run on a CPU: every line that a CPU can run, so that no typo waits for a GPU."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu import kernels_and_copies
from tests.gpu.stage import LeftOut, Setting, run_stage

ROOT = Path(__file__).parents[2]


def test_the_first_stage_runs_to_its_end_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--stages", "a", "--device", "cpu", "--out", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    written = json.loads((tmp_path / "gpu-check-a.json").read_text())
    assert written["device"] == "cpu"
    outcomes = {row["check"]: row["status"] for row in written["rows"]}
    assert list(outcomes) == [name for name, _ in kernels_and_copies.CHECKS]
    assert outcomes.pop("restoring waits for nothing") == "left out"
    assert set(outcomes.values()) == {"passed"}
    results = {row["check"]: row.get("result") for row in written["rows"]}
    assert {row["memory"] for row in results["copies"]} == {"pageable", "pinned", "arena"}


def test_a_check_that_fails_stops_no_other_and_is_counted(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def fails(setting: Setting) -> None:
        raise AssertionError("3 GB/s")

    def is_left_out(setting: Setting) -> None:
        raise LeftOut("no disk")

    checks = (("first", fails), ("second", is_left_out), ("third", lambda setting: 7))
    assert run_stage("x", checks, Setting("cpu", tmp_path)) == 1
    rows = json.loads((tmp_path / "gpu-check-x.json").read_text())["rows"]
    assert [row["status"] for row in rows] == ["failed", "left out", "passed"]
    assert "3 GB/s" in rows[0]["error"]
    assert rows[2]["result"] == 7
    assert "stage x: first: failed" in capsys.readouterr().out


def test_later_stages_can_be_loaded() -> None:
    from tests.gpu import long, serving

    for checks in (serving.CHECKS, long.CHECKS):
        assert all(check.__doc__ for _, check in checks)
