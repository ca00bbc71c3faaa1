"""What is kept and shown of a run."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from benchmarks.serving import rows

COLUMNS = (
    "configuration",
    "TTFT mean",
    "p50",
    "p90",
    "times sooner than recompute",
    "found",
    "found on",
    "in DRAM when admitted",
    "conversations held",
    "prefetched: found, wasted",
    "answers equal",
)
"""Heads of ``table_cells``."""

_KEPT = (
    *("configuration", "returning_turns", "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "ttft_by_round"),
    *("times_sooner_than_recompute", "hit_rate", "hit_rate_by_tier", "theoretical_hit_rate"),
    *("in_dram_when_admitted", "bytes_by_tier", "conversations_held", "prefetched_bytes", "answers_equal"),
)
_QUARTILES = ("q25", "median", "q75")


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run's ``result``: as for other servings, without what nothing shows."""
    summary = rows.summarize(result)
    restores = {server["configuration"]: server["restores"] for server in summary.pop("servers")}
    summary["configuration"] = {
        name: value for name, value in summary["configuration"].items() if value is not None
    }
    summary["rows"] = [
        {name: _quartiles(row[name]) for name in _KEPT if name in row}
        | ({} if (of_server := restores[row["configuration"]]) is None else {"restores": of_server})
        for row in summary["rows"]
    ]
    return summary


def _quartiles(value: Any) -> Any:
    """Quantiles, or quantiles by something, without their extremes."""
    if not isinstance(value, dict):
        return value
    if set(_QUARTILES) <= value.keys():
        return {name: value[name] for name in _QUARTILES}
    return {name: _quartiles(each) for name, each in value.items()}


def table_cells(row: Mapping[str, Any]) -> list[str]:
    """A row of a summary as text."""
    cells = dict(
        zip(rows.COLUMNS, rows.table_cells({"bytes_stored": None, "tpot_s": None, **row}), strict=True)
    )
    held = " ".join(f"{tier} {number:.1f}" for tier, number in row.get("conversations_held", {}).items())
    prefetched = row.get("prefetched_bytes")
    in_dram = row.get("in_dram_when_admitted")
    return [
        cells["configuration"],
        f"{row['mean_ttft_s'] * 1e3:.0f} ms",
        cells["TTFT p50"],
        cells["p90"],
        cells["times sooner than recompute"],
        f"{row['hit_rate']:.1%}",
        cells["found on"],
        "-" if in_dram is None else f"{in_dram:.0%}",
        held or "-",
        "-" if prefetched is None else ", ".join(f"{each / 2**20:.0f} MiB" for each in prefetched.values()),
        cells["answers equal"],
    ]
