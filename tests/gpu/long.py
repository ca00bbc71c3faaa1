"""Stage c: what takes hours. The restore benchmark at full size, and the server tests on the GPU."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.restore.__main__ import run as run_benchmark
from benchmarks.restore.configuration import Configuration, TierSpec
from tests.gpu.stage import Setting, Stage

_SERVER_TESTS = ("test_lossless.py", "test_restoring.py", "test_serving.py", "test_tiers_serving.py")
_CRASH_ROUNDS = 50


def restore_benchmark(setting: Setting) -> dict[str, Any]:
    """Whole models with random weights, up to 32768 tokens of history, from DRAM and from an SSD."""
    with tempfile.TemporaryDirectory() as folder:
        return run_benchmark(
            Configuration(
                shapes=("small-gqa",) if setting.is_dry else ("llama-7b", "llama3-8b"),
                tiers=(TierSpec("dram"), TierSpec("ssd")),
                history_tokens=(128,) if setting.is_dry else (512, 2048, 8192, 32768),
                repeats=1 if setting.is_dry else 5,
                device=setting.device.partition(":")[0],
                ssd_folder=Path(folder),
            )
        )


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


CHECKS: Stage = (
    ("restore benchmark", restore_benchmark),
    ("server tests", server_tests),
    ("crash rounds", crash_rounds),
)
