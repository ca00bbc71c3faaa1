"""Reads the rows of a result, for tables and figures, and makes the summary that is kept; without torch."""

from __future__ import annotations

from typing import Any

from benchmarks.samples import without_samples

Row = dict[str, Any]

_SAID_ELSEWHERE = (
    *("strategy", "planner", "new_tokens", "ideal_s", "head_tokens", "bytes_loaded"),
    *("compute_busy", "load_busy"),
)


def settings(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by shape and tier, in the file's order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["shape"], tier_name(row)), []).append(row)
    return found


def tier_name(row: Row) -> str:
    """The tier, with its limit if it has one."""
    limit = row.get("bandwidth_gbs")
    return str(row["tier"]) if limit is None else f"{row['tier']} at {limit * 1000:g} MB/s"


def drawn_timelines(rows: list[Row]) -> list[Row]:
    """Of the first setting whose tier is limited, or else the first: rows that load and have a timeline."""
    kept = [row for row in rows if "timeline" in row and row["chosen"] == "restore"]
    limited = [row for row in kept if row.get("bandwidth_gbs") is not None] or kept
    place = ("shape", "tier", "bandwidth_gbs", "history_tokens")
    return [row for row in limited if all(row.get(name) == limited[0].get(name) for name in place)]


def summarize(result: dict[str, Any]) -> dict[str, Any]:
    """What is kept of a run's ``result``: spreads without their samples, and the timelines that are drawn.

    What rows repeat of ``methods`` and ``configuration``, or of their own other numbers, is left out, and
    so is what is None. Costs that were fitted stay; of the measurements that they were fitted to only the
    count stays.
    """
    drawn = drawn_timelines(result["rows"])
    rows = []
    for row in result["rows"]:
        kept = {
            name: value for name, value in row.items() if name not in _SAID_ELSEWHERE and value is not None
        }
        kept["ttft_s"] = {name: value for name, value in row["ttft_s"].items() if name != "samples"}
        if not any(row is each for each in drawn):
            kept.pop("timeline", None)
        rows.append(kept)
    return {**result, "models": without_samples(result["models"]), "rows": rows}


def longest(rows: list[Row]) -> list[Row]:
    """Of one setting the rows of the longest history."""
    history_tokens = max(row["history_tokens"] for row in rows)
    return [row for row in rows if row["history_tokens"] == history_tokens]
