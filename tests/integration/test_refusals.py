"""A wrong set-up stops the server with one clear line; it never serves without krul."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from krul_sglang.demo.server import default_device_args, find_free_port
from tests.integration.scenario import KRUL


def launch(model: Path, *args: str, python_path: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--port", str(find_free_port())),
        *default_device_args(),
        *KRUL,
        *args,
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if python_path is not None:
        env["PYTHONPATH"] = str(python_path)
    return subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)


def test_a_wrong_launch_stops_with_one_line(tiny_models: dict[str, Path]) -> None:
    """One real launch; the other cases run on the same check in ``tests/unit/test_launch_check.py``."""
    result = launch(tiny_models["float32"], "--enable-hierarchical-cache")
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("krul-sglang: ")]
    assert len(lines) == 1
    assert "--enable-hierarchical-cache" in lines[0]
    assert "Traceback" not in result.stderr


def test_a_server_whose_hooks_are_missing_does_not_serve(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """As after an engine upgrade that renamed a hook's target: SGLang itself would only log it and go on."""
    (tmp_path / "sitecustomize.py").write_text(
        "from krul_sglang.engine import hook_targets\n"
        "hook_targets.SCHEDULER_INIT = 'sglang.srt.managers.scheduler.Scheduler.renamed_init'\n"
    )
    result = launch(tiny_models["float32"], "--max-total-tokens", "1024", python_path=tmp_path)
    assert result.returncode != 0
    assert "IncompatibleEngineError" in result.stdout + result.stderr
    assert "Scheduler.__init__" in result.stdout + result.stderr
