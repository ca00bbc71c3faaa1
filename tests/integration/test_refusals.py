"""A wrong set-up stops the server with one clear line; it never serves without krul."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from demo.server import default_device_args, find_free_port
from tests.support.scenario import KRUL
from tests.support.tiny_model import configure


def launch(
    model: Path, *args: str, python_path: Path | None = None, path: Path | None = None
) -> subprocess.CompletedProcess[str]:
    """``python_path`` and ``path``: where modules and programs are looked for, these before all others. With
    ``path`` nobody names the device."""
    command = [
        *(sys.executable, "-m", "sglang.launch_server"),
        *("--model-path", str(model)),
        *("--port", str(find_free_port())),
        *(default_device_args() if path is None else ()),
        *KRUL,
        *args,
    ]
    env = {**os.environ, "HF_HUB_OFFLINE": "1"}
    if python_path is not None:
        env["PYTHONPATH"] = os.pathsep.join(filter(None, [str(python_path), env.get("PYTHONPATH")]))
    if path is not None:
        env["PATH"] = f"{path}{os.pathsep}{env['PATH']}"
    # A session of its own, so that every process it started can be told from others.
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env, start_new_session=True
    ) as process:
        try:
            stdout, stderr = process.communicate(timeout=300)
        except subprocess.TimeoutExpired:
            # It serves: nothing of it may outlive the test.
            os.killpg(process.pid, signal.SIGKILL)
            raise
    # The last ones may still be on their way out when the server's pipes are closed.
    deadline = time.monotonic() + 10
    while processes_of_session(process.pid) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert processes_of_session(process.pid) == []
    return subprocess.CompletedProcess(command, process.returncode, stdout, stderr)


def processes_of_session(session: int) -> list[str]:
    commands = []
    for process in psutil.process_iter():
        with contextlib.suppress(ProcessLookupError, psutil.NoSuchProcess):
            if os.getsid(process.pid) == session and process.status() != psutil.STATUS_ZOMBIE:
                commands.append(" ".join(process.cmdline()))
    return commands


WRONG_LAUNCHES = {
    "--enable-hierarchical-cache": ("--enable-hierarchical-cache",),
    "--lora-paths": ("--lora-paths", "name=/no/such/adapter"),
    "--kv-cache-dtype fp8_*": (
        *("--kv-cache-dtype", "fp8_e4m3"),
        *("--unified-cache-external-linker-config", '{"strategy": "krul"}'),
    ),
}


@pytest.mark.long
@pytest.mark.parametrize("named", WRONG_LAUNCHES)
def test_a_wrong_launch_stops_with_one_line(named: str, tiny_models: dict[str, Path]) -> None:
    """More real launches; all cases run on the same check in ``tests/unit/test_unsupported.py``."""
    result = launch(tiny_models["float32"], *WRONG_LAUNCHES[named])
    assert result.returncode != 0
    lines = [line for line in result.stderr.splitlines() if line.startswith("krul-sglang: ")]
    assert len(lines) == 1
    assert named in lines[0]
    assert "Traceback" not in result.stderr


def test_a_model_that_is_refused_stops_the_server(tiny_models: dict[str, Path], tmp_path: Path) -> None:
    """Known from the checkpoint only, whose configuration is read before a process starts."""
    model = tmp_path / "model"
    shutil.copytree(tiny_models["float32"], model)
    configure(model, {"sparse_config": {"block_size": 64}})
    result = launch(model, "--max-total-tokens", "1024")
    assert result.returncode != 0
    [line] = [line for line in result.stderr.splitlines() if line.startswith("krul-sglang: ")]
    assert f"--model-path of a model with chunked or sparse attention ({model})" in line
    assert "Traceback" not in result.stderr


@pytest.mark.skipif(not default_device_args(), reason="torch can use this machine's GPU")
def test_a_server_does_not_fall_back_to_the_cpu_beside_a_gpu(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    program = tmp_path / "nvidia-smi"
    program.write_text("#!/bin/sh\necho 'GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-1)'\n")
    program.chmod(0o755)
    result = launch(tiny_models["float32"], "--max-total-tokens", "1024", path=tmp_path)
    assert result.returncode != 0
    [line] = [line for line in result.stderr.splitlines() if line.startswith("krul-sglang: ")]
    assert "this machine has a GPU (NVIDIA H100 80GB HBM3) that torch cannot use" in line
    assert "--device cpu" in line
    assert "Traceback" not in result.stderr


def test_a_server_whose_hooks_are_missing_does_not_serve(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """As after an engine upgrade that renamed a hook's target: SGLang itself would only log it and go on."""
    (tmp_path / "sitecustomize.py").write_text(
        "from krul_sglang.adapter import hook_targets\n"
        "hook_targets.SCHEDULER_INIT = 'sglang.srt.managers.scheduler.Scheduler.renamed_init'\n"
    )
    result = launch(tiny_models["float32"], "--max-total-tokens", "1024", python_path=tmp_path)
    assert result.returncode != 0
    assert "IncompatibleEngineError" in result.stdout + result.stderr
    assert "Scheduler.__init__" in result.stdout + result.stderr


def test_a_device_without_room_for_krul_stops_the_server(
    tiny_models: dict[str, Path], tmp_path: Path
) -> None:
    """SGLang asks with the memory that it has found for its pool, of which krul's share is taken off."""
    (tmp_path / "sitecustomize.py").write_text(
        "from krul_sglang.adapter.device_share import DeviceShare\n"
        "DeviceShare.of = classmethod(lambda cls, *of_rank: cls(loading=1 << 60))\n"
    )
    result = launch(tiny_models["float32"], "--max-total-tokens", "1024", python_path=tmp_path)
    assert result.returncode != 0
    assert "krul needs 1048576.0 TiB of that: raise --mem-fraction-static" in result.stdout + result.stderr
