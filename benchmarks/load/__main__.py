"""``python -m benchmarks.load --json FILE``: users side by side, who wait for nothing but their answers."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence
from pathlib import Path

from benchmarks import runner
from benchmarks.load.rows import load_tables
from benchmarks.load.run import CONFIGURATIONS, POOL_SHARE, find_configuration, run
from benchmarks.runner import Result, names, numbers
from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from krul_sglang.models.find import find_model

logger = logging.getLogger(__name__)


def main(argv: Sequence[str] | None = None) -> int:
    given = _parser().parse_args(argv)

    def measure() -> Result:
        for name in given.configurations:
            find_configuration(name)
        if min(given.blocks, *given.users) < 1 or not 0 < given.max_new_tokens < given.turn_tokens:
            raise ServingBenchmarkError(
                "--blocks and --users begin at 1, and --max-new-tokens is less than --turn-tokens; got "
                f"{given.blocks}, {given.users}, {given.max_new_tokens} and {given.turn_tokens}"
            )
        base = Configuration(
            model_path=find_model(given.model, logger.info, option="--model"),
            data=given.data,
            history_tokens=(given.history,),
            turn_tokens=given.turn_tokens,
            rounds=given.turns,
            think_time_s=given.think_time,
            settles=False,
            device_tokens=given.pool_tokens,
            max_tokens=given.max_new_tokens,
            server_args=tuple(given.server_arg),
            seed=given.seed,
        )
        return run(base, given.configurations, given.users, given.dtype, given.blocks)

    return runner.run(given, measure, load_tables, without_turns)


def without_turns(result: Result) -> Result:
    """What is kept of a result."""
    return {name: value for name, value in result.items() if name != "turns"}


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("load", __doc__, model="smollm2", seed=0)
    add = parser.add_argument
    add(
        "--configurations",
        type=names,
        default=[*CONFIGURATIONS],
        help=", ".join([*CONFIGURATIONS, "native:SHARE", "compressed:SHARE"]),
    )
    add("--blocks", type=int, default=2, help="how often each of them runs (2)")
    add("--users", type=numbers, default=[8], help="users side by side, one number or several (8)")
    add("--dtype", type=names, default=["float32"], help="float32, bfloat16 or both (float32)")
    add("--turns", type=int, default=5, help="turns of each user (5)")
    add("--think-time", type=float, default=3.0, help="mean seconds before a turn (3)")
    add("--data", type=Path, help="folder of JSONL files with session_id, timestamp and input, for texts")
    add("--history", type=int, default=800, help="about so many tokens has a first message (800)")
    add("--turn-tokens", type=int, default=100, help="about so many a turn adds to it (100)")
    add("--max-new-tokens", type=int, default=24, help="tokens of an answer (24)")
    add("--pool-tokens", type=int, help=f"device pool, instead of {POOL_SHARE:.0%}% of all tokens")
    add("--server-arg", action="append", default=[], help="one more argument of every server, repeatable")
    return parser


if __name__ == "__main__":
    sys.exit(main())
