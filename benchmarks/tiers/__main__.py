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

from benchmarks import runner
from benchmarks.runner import Result, numbers
from benchmarks.tables import Columns, cell, source, table_of, us
from benchmarks.tiers.configuration import KIB, MIB, Configuration
from benchmarks.tiers.disk import disk_rows, mooncake_rows, overhead_rows
from benchmarks.tiers.dram import dram_rows, fragmentation_row, index_rows, lookup_rows
from benchmarks.tiers.timing import summarize
from krul_backend.daemon.client.launcher import EmbeddedDaemon

logger = logging.getLogger(__name__)


def run(configuration: Configuration) -> dict[str, Any]:
    """Every operation at every size.

    Raises:
        KrulError: bytes came back wrong, or a tier refused what it has to take.
    """
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
    return {"configuration": configuration.to_json(), "targets": targets(rows), "rows": rows}


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


def _block(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"


_OPERATIONS: Columns = {
    "operation": cell("op"),
    "block": cell("size_bytes", _block),
    "blocks": cell("num_blocks"),
    "GB/s": cell("throughput_gbs", "{:.2f}"),
    "memcpy GB/s": cell("memcpy_gbs", "{:.2f}"),
    "bare disk GB/s": cell("disk_gbs", "{:.2f}"),
    "ratio": cell("ratio", "{:.0%}"),
    "p50": cell("p50_us", us),
    "p99": cell("p99_us", us),
}

_TARGETS: Columns = {
    "target (worst case)": cell("name"),
    "bound": cell("bound", "{:g}"),
    "measured": cell("value", "{:.3g}"),
    "met": cell("is_met", lambda is_met: "yes" if is_met else "no"),
}

_IN_WORDS = {
    "lookup": "lookup of {num_pages} pages: {p50} (p99 {p99}).",
    "index-lookup": "{num_pages} pages among {num_segments} segments, without the socket: {p50} (p99 {p99}).",
    "ssd-metadata": "Metadata on disk at 1/{ratio_to_bf16} of bf16: {share:.2%}.",
    "fragmentation": (
        "A full arena under churn has {free_share_mean:.1%} free that the next segment did not fit into "
        "(p99 {free_share_p99:.1%})."
    ),
}
"""Rows that are lines of text, not of the table of bytes, by their operation."""


def tiers_table(result: Result, path: Path | None) -> str:
    """Bytes of each tier against memcpy and the bare disk, then the targets."""
    rows = [row for row in result["rows"] if "left_out" not in row]
    operations = table_of(_OPERATIONS, (row for row in rows if row["op"] not in _IN_WORDS))
    notes = [
        *(
            f"Missed: {target['name']}: {target['value']:.2f}, the aim being {target['bound']:g}."
            for target in result["targets"]
            if not target["is_met"]
        ),
        "Medians; operations in turn with memcpy of the same blocks, one thread, memory touched before.",
        "ratio: to memcpy, or to O_DIRECT of the same bytes where there is a disk.",
        "dram: through a daemon process, round trips included; verify-read compares checksums, as an engine.",
        *(
            _IN_WORDS[row["op"]].format(
                **row, **{share: us(row.get(f"{share}_us", 0)) for share in ("p50", "p99")}
            )
            for row in rows
            if row["op"] in _IN_WORDS
        ),
        *(f"{row['op']}: {row['left_out']}." for row in result["rows"] if "left_out" in row),
        f"Machine: {result['machine']['cores']} cores. {source(path)}",
    ]
    return f"{operations}\n\n{table_of(_TARGETS, result['targets'])}\n\n{' '.join(notes)}"


_DEFAULTS = Configuration()


def main() -> int:
    given = _parser().parse_args()

    def measure() -> Result:
        options = ("block_bytes", "repeats", "disk_repeats", "folder")
        return run(Configuration(**{name: getattr(given, name) for name in options}))

    return runner.run(given, measure, tiers_table, summarize)


def _parser() -> argparse.ArgumentParser:
    parser = runner.make_parser("tiers", "The tiers against memcpy, the bare disk and the clock.")
    add = parser.add_argument
    add("--block-bytes", type=numbers, default=_DEFAULTS.block_bytes, help="sizes, as 65536,1048576")
    add("--repeats", type=int, default=_DEFAULTS.repeats, help="timed operations on memory of each size")
    add("--disk-repeats", type=int, default=_DEFAULTS.disk_repeats, help="the same on disk and network")
    add("--folder", type=Path, help="on the disk to measure (default: that of temporary files)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
