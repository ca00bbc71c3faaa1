"""Reading the rows of a result file; for tables and figures, without torch."""

from __future__ import annotations

from typing import Any

Row = dict[str, Any]


def settings(rows: list[Row]) -> dict[tuple[str, str], list[Row]]:
    """Rows by shape and tier, in the file's order."""
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        found.setdefault((row["shape"], tier_name(row)), []).append(row)
    return found


def tier_name(row: Row) -> str:
    """The tier, with its limit if it has one."""
    limit = row["bandwidth_gbs"]
    return str(row["tier"]) if limit is None else f"{row['tier']} at {limit * 1000:g} MB/s"


def longest(rows: list[Row]) -> list[Row]:
    """Of one setting the rows of the longest history."""
    history_tokens = max(row["history_tokens"] for row in rows)
    return [row for row in rows if row["history_tokens"] == history_tokens]
