"""``python -m benchmarks.tiers --json FILE``: the tiers against memcpy, the bare disk and the clock."""

from __future__ import annotations

import argparse
import logging
import sys
from pathlib import Path

from benchmarks.tiers.configuration import Configuration
from benchmarks.tiers.run import run
from benchmarks.tiers.timing import summarize
from krul_backend.errors import KrulError
from krul_sglang.json_file import write_result

_DEFAULTS = Configuration()


def main() -> int:
    arguments = _parser().parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    try:
        configuration = Configuration(
            block_bytes=arguments.block_bytes,
            repeats=arguments.repeats,
            disk_repeats=arguments.disk_repeats,
            folder=arguments.folder,
        )
        result = run(configuration)
    except KrulError as error:
        print(error, file=sys.stderr)
        return 1
    write_result(result, summarize(result), json=arguments.json, raw=arguments.raw)
    for target in result["targets"]:
        verdict = "met" if target["is_met"] else "MISSED"
        print(f"{target['name']}: {target['value']:.3g} (bound {target['bound']:g}): {verdict}")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.tiers",
        description="The tiers against memcpy, the bare disk and the clock.",
    )
    add = parser.add_argument
    add("--json", type=Path, required=True, help="file for the summary of the result")
    add("--raw", type=Path, help="file for the result with every sample")
    add("--block-bytes", type=_numbers, default=_DEFAULTS.block_bytes, help="sizes, as 65536,1048576")
    add("--repeats", type=int, default=_DEFAULTS.repeats, help="timed operations on memory of each size")
    add("--disk-repeats", type=int, default=_DEFAULTS.disk_repeats, help="the same on disk and network")
    add("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    return parser


def _numbers(text: str) -> tuple[int, ...]:
    """Raises ValueError, which argparse turns into its own message."""
    return tuple(int(number) for number in text.split(","))


if __name__ == "__main__":
    sys.exit(main())
