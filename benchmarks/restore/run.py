"""Runs one configuration and returns the result file's content."""

from __future__ import annotations

import shlex
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from benchmarks.restore.configuration import Configuration
from benchmarks.restore.methods import METHODS, strategies
from benchmarks.restore.shape_run import ShapeRun
from benchmarks.restore.shapes import SHAPES
from krul_backend.device import Device
from krul_sglang.demo.environment import git_revision, machine, versions, without_cwd


def run(configuration: Configuration) -> dict[str, Any]:
    """Every method in every setting.

    Raises:
        KrulError: a restore was wrong, or costs could not be fitted.
    """
    started = time.monotonic()
    torch.set_num_threads(configuration.threads)
    kind = configuration.device
    device = Device(torch.device(kind) if kind == "cpu" else torch.device(kind, 0))
    rows: list[dict[str, Any]] = []
    models, left_out = [], []
    with tempfile.TemporaryDirectory(dir=configuration.ssd_folder) as folder:
        for name in configuration.shapes:
            with ShapeRun(name, configuration, device, Path(folder)) as shape_run:
                rows += shape_run.rows()
                left_out += shape_run.left_out
                models.append(_model(name, shape_run, configuration.is_one_layer))
    return {
        "git_revision": git_revision(),
        "versions": versions(("torch",)),
        "machine": machine(),
        "command": without_cwd(shlex.join(sys.orig_argv)),
        "configuration": configuration.to_json(),
        "methods": [asdict(method) for method in METHODS],
        "models": models,
        "duration_s": round(time.monotonic() - started, 1),
        "left_out": left_out,
        "rows": rows,
    }


def _model(name: str, shape_run: ShapeRun, is_one_layer: bool) -> dict[str, Any]:
    shape = SHAPES[name]
    return {
        "name": name,
        **asdict(shape),
        "weights": "random; all layers share one layer's matrices" if is_one_layer else "random",
        "weight_bytes": shape_run.weight_bytes,
        "pool_bytes_per_token": shape.kv_token_bytes(shape_run.dtype),
        "pairs": _pairs(shape.num_layers),
        "tolerance": shape_run.tolerance,
        "calibration": shape_run.calibration,
    }


def _pairs(num_layers: int) -> Mapping[str, list[tuple[int, int]]]:
    return {name: list(strategy.pairs) for name, strategy in strategies(num_layers).items()}
