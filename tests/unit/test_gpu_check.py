"""The GPU kit, run on a CPU: every line that a CPU can run, so that no typo waits for a GPU."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.gpu import kernels_and_copies
from tests.gpu.__main__ import LONG, STAGES, run_within
from tests.gpu.stage import LeftOut, Setting, run_stage

ROOT = Path(__file__).parents[2]


def test_the_first_stages_run_to_their_ends_on_a_cpu(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--stages", "preflight,kernels", "--device", "cpu"]
    command += ["--out", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 0, finished.stdout + finished.stderr
    preflight = json.loads((tmp_path / "gpu-check-preflight.json").read_text())["rows"]
    assert [row["status"] for row in preflight] == ["passed", "passed"]
    assert preflight[0]["result"]["rows"]
    written = json.loads((tmp_path / "gpu-check-kernels.json").read_text())
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


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_nothing_runs_at_full_size(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.gpu", "--out", str(tmp_path)]
    finished = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert finished.returncode == 1
    assert [path.name for path in tmp_path.iterdir()] == ["gpu-check-preflight.json"]
    rows = json.loads((tmp_path / "gpu-check-preflight.json").read_text())["rows"]
    assert rows[1]["status"] == "failed"


def test_a_stage_that_is_over_its_time_is_ended_and_leaves_what_it_found(tmp_path: Path) -> None:
    found = tmp_path / "gpu-check-x.json"
    found.write_text('{"rows": [{"check": "first", "status": "passed"}]}')
    hangs = [sys.executable, "-c", "import time; time.sleep(600)"]
    assert not run_within(0.2, hangs, "x", Setting("cpu", tmp_path))
    rows = json.loads(found.read_text())["rows"]
    assert [row["status"] for row in rows] == ["passed", "failed"]
    assert "ended after 0.2 s" in rows[1]["error"]
    crashes = [sys.executable, "-c", "import os; os.abort()"]
    assert not run_within(60, crashes, "y", Setting("cpu", tmp_path))
    (row,) = json.loads((tmp_path / "gpu-check-y.json").read_text())["rows"]
    assert "status -6" in row["error"]
    assert run_within(60, [sys.executable, "-c", ""], "x", Setting("cpu", tmp_path))


def test_every_stage_has_checks_and_says_what_it_shows() -> None:
    names = {}
    for stage, planned in STAGES.items():
        checks = getattr(importlib.import_module(planned.module), planned.checks)
        names[stage] = [name for name, _ in checks]
        assert all(check.__doc__ for _, check in checks)
        assert len(set(names[stage])) == len(checks) > 0
    assert names["backends"][0] == "fa3, bf16, pages of 16"
    assert len(names["backends"]) == 12
    assert list(STAGES)[-1] == LONG
