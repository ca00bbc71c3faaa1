"""Runs the checks of one stage, whatever some of them do, and keeps what each of them found."""

from __future__ import annotations

import json
import os
import platform
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from benchmarks.measured_code import code_of
from demo.environment import git_revision
from krul_backend.device import Device
from krul_sglang.json_file import write_json


@dataclass(frozen=True)
class Setting:
    """Where checks run and write. ``model``: a checkpoint for servers; None for the bundled one.
    ``server_args``: further arguments of every server, before those of the check."""

    device: str
    folder: Path
    model: str | None = None
    server_args: tuple[str, ...] = ()

    @property
    def on_device(self) -> Device:
        return Device(torch.device(self.device))

    @property
    def is_dry(self) -> bool:
        """Whether the checks run on a CPU, only to show that their code runs: sizes are small then."""
        return self.device == "cpu"


class LeftOut(Exception):  # noqa: N818 - it is no error
    """Raised by a check that cannot run here; its text says why."""


Check = Callable[[Setting], Any]
"""Returns plain values for the result file; raises what makes it fail."""

Stage = Sequence[tuple[str, Check]]


def run_stage(name: str, checks: Stage, setting: Setting) -> int:
    """Run all checks in order and return how many failed.

    ``gpu-check-NAME.json`` is written after each check, so that a run that is cut off leaves what it has
    found so far.
    """
    rows: list[dict[str, Any]] = []
    path = _path(name, setting)
    path.unlink(missing_ok=True)
    for check_name, check in checks:
        started = time.monotonic()
        row = {"check": check_name, **_outcome(check, setting)}
        row["duration_s"] = round(time.monotonic() - started, 1)
        rows.append(row)
        print(f"stage {name}: {check_name}: {row['status']} ({row['duration_s']} s)", flush=True)
        if row["status"] == "failed":
            print(row["error"], flush=True)
        write_json({**_environment(setting), "stage": name, "rows": rows}, path)
    return sum(row["status"] == "failed" for row in rows)


def add_failure(name: str, setting: Setting, error: str) -> None:
    """Add a row to what a stage has found that did not come to its end."""
    path = _path(name, setting)
    found = json.loads(path.read_text()) if path.exists() else {"stage": name, "rows": []}
    found["rows"].append({"check": "the whole stage", "status": "failed", "error": error})
    write_json(found, path)
    print(f"stage {name}: failed: {error}", flush=True)


def _path(name: str, setting: Setting) -> Path:
    return setting.folder / f"gpu-check-{name}.json"


def _outcome(check: Check, setting: Setting) -> Mapping[str, Any]:
    try:
        return {"status": "passed", "result": check(setting)}
    except LeftOut as reason:
        return {"status": "left out", "reason": str(reason)}
    except (Exception, SystemExit):
        # The next check may still tell something: time on a GPU is dear.
        return {"status": "failed", "error": traceback.format_exc()}


def _device_name(setting: Setting) -> str:
    try:
        return setting.on_device.name
    except (RuntimeError, AssertionError):
        return f"{setting.device}, which cannot be used"


def _environment(setting: Setting) -> dict[str, Any]:
    return {
        "git_revision": git_revision(),
        "code": code_of("tests.gpu"),
        "device": _device_name(setting),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cores": len(os.sched_getaffinity(0)),
        "system": platform.platform(),
    }
