"""``python -m benchmarks.tiers --json FILE``: the tiers against memcpy, the bare disk and the clock."""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.options import numbers
from benchmarks.tiers.configuration import MIB, Configuration
from benchmarks.tiers.disk import disk_rows, mooncake_rows, overhead_rows
from benchmarks.tiers.dram import dram_rows, fragmentation_row, index_rows, lookup_rows
from benchmarks.tiers.timing import summarize
from krul_backend.daemon.client.launcher import EmbeddedDaemon
from krul_backend.errors import KrulError
from krul_sglang.demo.environment import about_run
from krul_sglang.json_file import write_result

logger = logging.getLogger(__name__)


def run(configuration: Configuration) -> dict[str, Any]:
    """Every operation at every size.

    Raises:
        KrulError: bytes came back wrong, or a tier refused what it has to take.
    """
    started = time.monotonic()
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory(dir=configuration.folder) as name:
        folder = Path(name)
        daemon = EmbeddedDaemon(("--host-memory", str(configuration.arena_bytes)))
        try:
            rows += _part("DRAM", lambda: dram_rows(configuration, daemon.runtime_dir))
            rows += _part("lookups", lambda: lookup_rows(configuration, daemon.runtime_dir))
        finally:
            daemon.close()
        rows += _part("index", lambda: index_rows(configuration))
        rows += _part("fragmentation", lambda: [fragmentation_row(configuration)])
        rows += _part("SSD", lambda: disk_rows(configuration, folder))
        rows += _part("metadata", lambda: overhead_rows(configuration, folder))
        rows += _part("Mooncake", lambda: mooncake_rows(configuration, folder))
    return {
        **about_run(("numpy", "pyzmq", "msgspec", "xxhash")),
        "configuration": configuration.to_json(),
        "duration_s": round(time.monotonic() - started, 1),
        "targets": targets(rows),
        "rows": rows,
    }


def _part(name: str, measure: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    started = time.monotonic()
    rows = measure()
    logger.info("%s: %d rows in %.1f s", name, len(rows), time.monotonic() - started)
    return rows


Row = dict[str, Any]


def targets(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """One entry per target that the rows can judge: its worst value, and whether that is good enough."""
    found = [
        _at_least("DRAM write, share of memcpy, blocks of 1-8 MiB", 0.8, _ratios(rows, "dram-write")),
        _at_least("DRAM read, share of memcpy, blocks of 1-8 MiB", 0.8, _ratios(rows, "dram-read")),
        _at_least(
            "SSD read, share of O_DIRECT", 0.8, [row["ratio"] for row in rows if row["op"] == "ssd-read-cold"]
        ),
        _at_most(
            "lookup of 1,000 pages, p50 in ms",
            1.0,
            [row["p50_us"] / 1e3 for row in rows if row["op"] == "lookup" and row["num_pages"] == 1000],
        ),
        _at_most("metadata on disk", 0.01, [row["share"] for row in rows if row["op"] == "ssd-metadata"]),
        _at_most("lookup p99, largest index to smallest", 2.0, _index_growth(rows)),
    ]
    return [target for target in found if target is not None]


def _ratios(rows: Sequence[Row], op: str) -> list[float]:
    """Of whole segments; a single block is in the table, and pays the round trips alone."""
    return [
        row["ratio"]
        for row in rows
        if row["op"] == op and MIB <= row["size_bytes"] <= 8 * MIB and row["num_blocks"] > 1
    ]


def _index_growth(rows: Sequence[Row]) -> list[float]:
    found = sorted((row for row in rows if row["op"] == "index-lookup"), key=lambda row: row["num_segments"])
    return [found[-1]["p99_us"] / found[0]["p99_us"]] if len(found) > 1 else []


def _at_least(name: str, bound: float, values: Sequence[float]) -> dict[str, Any] | None:
    return _target(name, bound, values, min, lambda value: value >= bound)


def _at_most(name: str, bound: float, values: Sequence[float]) -> dict[str, Any] | None:
    return _target(name, bound, values, max, lambda value: value <= bound)


def _target(
    name: str,
    bound: float,
    values: Sequence[float],
    worst_of: Callable[[Sequence[float]], float],
    is_met: Callable[[float], bool],
) -> dict[str, Any] | None:
    if not values:
        return None
    worst = worst_of(values)
    return {"name": name, "bound": bound, "value": worst, "is_met": is_met(worst)}


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
    add("--block-bytes", type=numbers, default=_DEFAULTS.block_bytes, help="sizes, as 65536,1048576")
    add("--repeats", type=int, default=_DEFAULTS.repeats, help="timed operations on memory of each size")
    add("--disk-repeats", type=int, default=_DEFAULTS.disk_repeats, help="the same on disk and network")
    add("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
