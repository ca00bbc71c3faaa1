"""What the tiers are meant to reach, and whether a run did."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.tiers.configuration import MIB

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
