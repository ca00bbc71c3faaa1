"""What takes hours. Every method's restores on servers, the server tests on the GPU, kill rounds."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.gpu.stage import Setting, Stage

_SERVER_TESTS = ("test_lossless.py", "test_restoring.py", "test_serving.py", "test_tiers_serving.py")
_CRASH_ROUNDS = 50


def restores(setting: Setting) -> dict[str, Any]:
    """``benchmarks.overlap``: a server of each method, through a slow link and from a slow disk."""
    if setting.is_dry:
        options = ["--model", "bundled", "--tokens", "256", "--pair-tokens", "256", "--turns", "2"]
    else:
        options = ["--model", setting.model or "smollm2", "--dtype", "bfloat16"]
        options += ["--settings", "dram:4000,ssd:2000"]
    return _run(["benchmarks.overlap", "--json", str(setting.folder / "overlap.json"), *options])


def server_tests(setting: Setting) -> dict[str, Any]:
    """The integration tests of serving, which take this machine's device."""
    folder = Path(__file__).parents[1] / "integration"
    return _run(["pytest", "-q", *(str(folder / name) for name in _SERVER_TESTS)])


def crash_rounds(setting: Setting) -> dict[str, Any]:
    """Daemon and engines are killed under load."""
    return _run(["tests.crash", "--rounds", str(_CRASH_ROUNDS)])


def _run(module_and_arguments: list[str]) -> dict[str, Any]:
    finished = subprocess.run(
        [sys.executable, "-m", *module_and_arguments], capture_output=True, text=True, check=False
    )
    assert finished.returncode == 0, (finished.stdout + finished.stderr)[-4000:]
    return {"summary": finished.stdout.strip().splitlines()[-1]}


CHECKS: Stage = (("restores", restores), ("server tests", server_tests), ("crash rounds", crash_rounds))
