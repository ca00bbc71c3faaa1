"""``python -m tests.gpu --stages kernels,users``: checks that need a GPU, and what they measured, as JSON."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
import signal
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from tests.gpu.stage import Setting, add_failure, run_stage

_GRACE_S = 30.0
"""A stage that is over its time may take so long to end its servers."""


@dataclass(frozen=True)
class Planned:
    """Where the checks of a stage are, and how many seconds they may take together.

    A module is imported when its stage runs: that of kernels needs neither SGLang nor pytest.
    """

    module: str
    checks: str
    limit_s: float


STAGES = {
    "preflight": Planned("tests.gpu.kernels_and_copies", "PREFLIGHT", 300),
    "kernels": Planned("tests.gpu.kernels_and_copies", "CHECKS", 480),
    "pinning": Planned("tests.gpu.large", "PINNING", 600),
    "beside": Planned("tests.gpu.beside", "BESIDE", 600),
    "long-prompts": Planned("tests.gpu.large", "LONG_PROMPTS", 600),
    "subspace": Planned("tests.gpu.large", "SUBSPACE", 900),
    "users": Planned("tests.gpu.large", "USERS", 600),
    "backends": Planned("tests.gpu.serving", "BACKENDS", 2400),
    "serving": Planned("tests.gpu.serving", "CHECKS", 1800),
    "hours": Planned("tests.gpu.long", "CHECKS", 6 * 3600),
}
"""In the order in which they run: what tells most in ten minutes comes first."""
LONG = "hours"


def main() -> int:
    arguments = _parser().parse_args()
    setting = Setting(
        arguments.device, arguments.out.absolute(), arguments.model, tuple(arguments.server_args)
    )
    names = arguments.stages.split(",") + ([LONG] if arguments.long else [])
    unknown = [name for name in names if name not in STAGES]
    if unknown:
        print(f"stages {unknown} are unknown (accepted: {', '.join(STAGES)})", file=sys.stderr)
        return 2
    setting.folder.mkdir(parents=True, exist_ok=True)
    if not setting.is_dry and not torch.cuda.is_available():
        print("torch can use no GPU: only the first stage runs, which says why", flush=True)
        names = [next(iter(STAGES))]
    failed = []
    for name in dict.fromkeys(names):
        planned = STAGES[name]
        if arguments.here:
            checks = getattr(importlib.import_module(planned.module), planned.checks)
            is_passed = not run_stage(name, checks, setting)
        else:
            command = [sys.executable, "-m", "tests.gpu", "--here", "--stages", name]
            command += ["--device", setting.device, "--out", str(setting.folder)]
            command += [] if setting.model is None else ["--model", setting.model]
            command += [f"--server-arg={argument}" for argument in setting.server_args]
            is_passed = run_within(planned.limit_s, command, name, setting)
        failed += [] if is_passed else [name]
    if not arguments.here:
        print(f"failed stages: {', '.join(failed) or 'none'}; see {setting.folder}", flush=True)
    return 1 if failed else 0


def run_within(limit_s: float, command: Sequence[str], name: str, setting: Setting) -> bool:
    """Run a stage in a process of its own, and end it after ``limit_s``. Returns whether all of it passed.

    What it has found by then stays in its file.
    """
    process = subprocess.Popen(command, start_new_session=True)
    try:
        status = process.wait(limit_s)
        if status not in (0, 1):
            add_failure(name, setting, f"the stage ended with status {status}")
        return status == 0
    except subprocess.TimeoutExpired:
        add_failure(name, setting, f"the stage was ended after {limit_s:g} s")
        return False
    finally:
        for number in (signal.SIGTERM, signal.SIGKILL):
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(_GRACE_S)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu", description=__doc__)
    add = parser.add_argument
    default = ",".join(name for name in STAGES if name != LONG)
    add("--stages", default=default, help=f"some of {', '.join(STAGES)}; kernels needs no SGLang")
    add("--long", action="store_true", help=f"the stage {LONG} as well")
    add("--device", default="cuda:0", help='"cpu" runs every line that a CPU can run')
    add("--out", type=Path, default=Path("gpu-check"), help="folder for the JSON files")
    add("--model", default=None, help="checkpoint for the servers (default: one that is bundled or made)")
    add(
        "--server-arg",
        dest="server_args",
        action="append",
        default=[],
        help="one more argument of every server, repeatable, such as --server-arg=--attention-backend=triton",
    )
    add("--here", action="store_true", help="in this process, without limits of time")
    return parser


if __name__ == "__main__":
    sys.exit(main())
