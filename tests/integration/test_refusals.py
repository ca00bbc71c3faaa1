"""A wrong set-up stops the server with one clear line; it never serves without krul."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from krul_sglang.demo.server import default_device_args, find_free_port
from tests.integration.scenario import KRUL

CONFIG = "--unified-cache-external-linker-config"

CASES: dict[str, tuple[tuple[str, ...], tuple[str, ...]]] = {
    "unknown key": (
        (CONFIG, '{"host_memmory": "1GiB"}'),
        ("unknown key 'host_memmory'", "did you mean 'host_memory'"),
    ),
    "negative budget": ((CONFIG, '{"host_memory": "-1GiB"}'), ("host_memory = '-1GiB'", "positive size")),
    "budget over the machine": ((CONFIG, '{"host_memory": "100TiB"}'), ("larger than the memory",)),
    "second tier": (("--enable-hierarchical-cache",), ("--enable-hierarchical-cache",)),
    "second linker": (
        ("--enable-unified-cache-external-linker",),
        ("--enable-unified-cache-external-linker",),
    ),
}


def launch(model: Path | str, *args: str) -> subprocess.CompletedProcess[str]:
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--port", str(find_free_port())),
        *default_device_args(),
        *KRUL,
        *args,
    ]
    return subprocess.run(command, capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize("case", CASES)
def test_bad_arguments_stop_the_launch_with_one_line(case: str, tiny_models: dict[str, Path]) -> None:
    args, expected = CASES[case]
    result = launch(tiny_models["float32"], *args)
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("krul-sglang: ")]
    assert len(lines) == 1
    for part in expected:
        assert part in lines[0]
    assert "Traceback" not in result.stderr


def test_a_missing_model_path_is_named() -> None:
    result = launch("/no/such/model")
    assert result.returncode != 0
    assert "krul-sglang: --model-path /no/such/model: no such file or directory" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_server_whose_hooks_are_missing_does_not_serve(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """As after an engine upgrade that renamed a hook's target: SGLang itself would only log it and go on."""
    (tmp_path / "sitecustomize.py").write_text(
        "from krul_sglang.engine import hook_targets\n"
        "hook_targets.SCHEDULER_INIT = 'sglang.srt.managers.scheduler.Scheduler.renamed_init'\n"
    )
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(tiny_models["float32"])),
        *("--port", str(find_free_port())),
        *default_device_args(),
        *("--max-total-tokens", "1024"),
        *KRUL,
    ]
    import os

    env = {**os.environ, "PYTHONPATH": str(tmp_path), "HF_HUB_OFFLINE": "1"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=300, env=env)
    assert result.returncode != 0
    assert "IncompatibleEngineError" in result.stdout + result.stderr
    assert "Scheduler.__init__" in result.stdout + result.stderr
