"""``python -m benchmarks.restore --json FILE``: methods of restoring a conversation's KV, side by side.

Random weights; needs torch and krul_backend only. With ``--device cuda`` host memory is pinned, loads run on
a stream of their own, and times are those of events. With ``--segments 1,5,20`` only the host's cost of a
returning prefix is measured, by the number of turns that it was stored in.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Mapping
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import torch

from benchmarks.options import names, numbers
from benchmarks.restore.configuration import Configuration, TierSpec
from benchmarks.restore.model import SHAPES
from benchmarks.restore.rows import summarize
from benchmarks.restore.segment_cost import (
    SegmentCostConfiguration,
    run_segment_cost,
    summarize_segment_cost,
)
from benchmarks.restore.setting import METHODS, strategies
from benchmarks.restore.shape_run import ShapeRun
from krul_backend.device import Device
from krul_backend.errors import KrulError
from krul_sglang.demo.environment import about_run
from krul_sglang.json_file import write_result


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
        **about_run(("torch",)),
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


_DEFAULTS = Configuration()


def main() -> int:
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        if arguments.segments is not None:
            result = run_segment_cost(SegmentCostConfiguration(arguments.segments))
            write_result(result, summarize_segment_cost(result), json=arguments.json, raw=arguments.raw)
            return 0
        options = {option.name: getattr(arguments, option.name) for option in fields(Configuration)}
        options["tiers"] = tuple(TierSpec.parse(tier, arguments.bandwidth) for tier in arguments.tiers)
        configuration = Configuration(**options)
        result = run(configuration)
        write_result(result, summarize(result), json=arguments.json, raw=arguments.raw)
    except KrulError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    """A parser whose destinations are the fields of ``Configuration``, and some more."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restore", description="Methods of restoring a conversation's KV."
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, help="file for the summary of the result")
    add("--raw", type=Path, help="file for the result with every sample")
    add("--device", choices=("cpu", "cuda"), default=_DEFAULTS.device)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default=_DEFAULTS.dtype)
    add("--shape", dest="shapes", type=names, default=_DEFAULTS.shapes, help=f"some of {', '.join(SHAPES)}")
    tiers = "some of dram, ssd; dram:0.2 is limited to 0.2 GB/s"
    add("--tier", dest="tiers", type=names, default=("dram",), help=tiers)
    add("--bandwidth", type=float, help="GB/s to which tiers without a limit of their own are limited")
    history = "stored tokens, as 512,1024,2048"
    add("--history", dest="history_tokens", type=numbers, default=_DEFAULTS.history_tokens, help=history)
    add("--new-tokens", type=int, default=_DEFAULTS.new_tokens, help="tokens of the returning turn")
    add("--turns", type=int, default=_DEFAULTS.turns, help="segments that the history is stored as")
    add("--segments", type=numbers, help="only the host's cost of prefixes of 1,5,20 segments: no model")
    add("--page-size", type=int, default=_DEFAULTS.page_size, help="heads end at a multiple of it")
    add("--repeats", type=int, default=_DEFAULTS.repeats, help="timed restores of each method")
    add("--max-load-s", type=float, default=_DEFAULTS.max_load_s, help="no setting with longer full loads")
    one_layer = "all layers share one layer's weights, to save memory"
    add("--one-layer", dest="is_one_layer", action="store_true", help=one_layer)
    add("--threads", type=int, default=_DEFAULTS.threads, help="that compute on a CPU; one more loads")
    add("--ssd-folder", type=Path, help="where the tier ssd keeps its file (default: a temporary folder)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
