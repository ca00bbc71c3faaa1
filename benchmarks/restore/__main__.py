"""``python -m benchmarks.restore --json FILE``: methods of restoring a conversation's KV, side by side.

Random weights; needs torch and krul_backend only. With ``--device cuda`` host memory is pinned, loads run on
a stream of their own, and times are those of events. With ``--segments 1,5,20`` only the host's cost of a
returning prefix is measured, by the number of turns that it was stored in.
"""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from benchmarks.restore.configuration import Configuration, TierSpec
from benchmarks.restore.rows import summarize
from benchmarks.restore.run import run
from benchmarks.restore.segment_cost import (
    SegmentCostConfiguration,
    run_segment_cost,
    summarize_segment_cost,
)
from benchmarks.restore.shapes import SHAPES
from krul_backend.errors import KrulError
from krul_sglang.json_file import write_result

_DEFAULTS = Configuration()


def main() -> int:
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        if arguments.segments is not None:
            result = run_segment_cost(SegmentCostConfiguration(arguments.segments))
            write_result(result, summarize_segment_cost(result), json=arguments.json, raw=arguments.raw)
            return 0
        configuration = Configuration(
            shapes=tuple(arguments.shape.split(",")),
            tiers=tuple(TierSpec.parse(tier, arguments.bandwidth) for tier in arguments.tier.split(",")),
            history_tokens=arguments.history,
            new_tokens=arguments.new_tokens,
            turns=arguments.turns,
            page_size=arguments.page_size,
            repeats=arguments.repeats,
            max_load_s=arguments.max_load_s,
            device=arguments.device,
            dtype=arguments.dtype,
            is_one_layer=arguments.one_layer,
            threads=arguments.threads,
            ssd_folder=arguments.ssd_folder,
        )
        result = run(configuration)
        write_result(result, summarize(result), json=arguments.json, raw=arguments.raw)
    except KrulError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.restore", description="Methods of restoring a conversation's KV."
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, help="file for the summary of the result")
    add("--raw", type=Path, help="file for the result with every sample")
    add("--device", choices=("cpu", "cuda"), default=_DEFAULTS.device)
    add("--dtype", choices=("bfloat16", "float16", "float32"), default=_DEFAULTS.dtype)
    add("--shape", default=",".join(_DEFAULTS.shapes), help=f"some of {', '.join(SHAPES)}")
    add("--tier", default="dram", help="some of dram, ssd; dram:0.2 is limited to 0.2 GB/s")
    add("--bandwidth", type=float, help="GB/s to which tiers without a limit of their own are limited")
    add("--history", type=_numbers, default=_DEFAULTS.history_tokens, help="stored tokens, as 512,1024,2048")
    add("--new-tokens", type=int, default=_DEFAULTS.new_tokens, help="tokens of the returning turn")
    add("--turns", type=int, default=_DEFAULTS.turns, help="segments that the history is stored as")
    add("--segments", type=_numbers, help="only the host's cost of prefixes of 1,5,20 segments: no model")
    add("--page-size", type=int, default=_DEFAULTS.page_size, help="heads end at a multiple of it")
    add("--repeats", type=int, default=_DEFAULTS.repeats, help="timed restores of each method")
    add("--max-load-s", type=float, default=_DEFAULTS.max_load_s, help="no setting with longer full loads")
    add("--one-layer", action="store_true", help="all layers share one layer's weights, to save memory")
    add("--threads", type=int, default=_DEFAULTS.threads, help="that compute on a CPU; one more loads")
    add("--ssd-folder", type=Path, help="where the tier ssd keeps its file (default: a temporary folder)")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    """Raises ValueError, which argparse turns into its own message."""
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
