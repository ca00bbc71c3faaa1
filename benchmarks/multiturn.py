"""``python -m benchmarks.multiturn --json FILE``: many conversations, too large for DRAM and disk.

It is ``benchmarks.serving`` with other servers and another load: natively stored and compressed, evicted by
``lru`` and by krul's own order, with and without what is fetched for requests that wait. ``--slow-disk`` asks
one thing more: is what waiting requests need in DRAM when they are admitted?
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.runner import Result
from benchmarks.serving import rows, tables
from benchmarks.serving.__main__ import make_serving_parser, run_serving
from benchmarks.serving.configuration import Configuration
from benchmarks.tables import Columns, cell, mib, ms

_FEW_AT_ONCE = ("--max-running-requests", "2")
"""So that requests wait."""
_PATIENT = {"ssd_timeout": 10.0}
"""The pool holds two conversations: the second of two turns that end at once is stored, too. And a piece that
waits for others on a slow disk is no sign that the disk has failed."""

SPARSE = Configuration(
    model_path="",
    servers=(
        "recompute",
        *(
            f"{stored}{variant}"
            for stored in ("native", "compressed")
            for variant in ("", "+no-prefetch", "+lru", "+lru+no-prefetch")
        ),
    ),
    at_once=5,
    users=12,
    rounds=3,
    rate=1.0,
    device_tokens=3008,
    host_share=0.25,
    ssd_share=0.5,
    ssd_read_mbs=120.0,
    krul_options=_PATIENT,
    server_args=_FEW_AT_ONCE,
)
"""DRAM for a quarter of the conversations as native KV, a disk for half of them."""

SLOW_DISK = Configuration(
    model_path="",
    servers=("native", "native+no-prefetch"),
    users=16,
    rounds=4,
    rotates=True,
    device_tokens=3008,
    host_share=0.25,
    ssd="4GiB",
    ssd_read_mbs=120.0,
    krul_options=_PATIENT,
    server_args=_FEW_AT_ONCE,
)
"""DRAM for 4 of 16 conversations, the others on a slow disk; each asks again as soon as it was answered."""

_KEPT = (
    *("configuration", "returning_turns", "mean_ttft_s", "p50_ttft_s", "p90_ttft_s", "ttft_by_round"),
    *("times_sooner_than_recompute", "hit_rate", "hit_rate_by_tier", "theoretical_hit_rate"),
    *("in_dram_when_admitted", "bytes_by_tier", "conversations_held", "prefetched_bytes", "answers_equal"),
)
_QUARTILES = ("q25", "median", "q75")


def summarize(result: Result) -> dict[str, Any]:
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


def _held(conversations: Mapping[str, float]) -> str:
    return " ".join(f"{tier} {number:.1f}" for tier, number in conversations.items()) or "-"


def _prefetched(num_bytes: Mapping[str, int]) -> str:
    return ", ".join(map(mib, num_bytes.values()))


COLUMNS: Columns = {
    "configuration": tables.COLUMNS["configuration"],
    "TTFT mean": cell("mean_ttft_s", ms),
    "p50": tables.COLUMNS["TTFT p50"],
    **{head: tables.COLUMNS[head] for head in ("p90", "times sooner than recompute")},
    "found": cell("hit_rate", "{:.1%}"),
    "found on": tables.found_on,
    "in DRAM when admitted": cell("in_dram_when_admitted", "{:.0%}"),
    "conversations held": cell("conversations_held", _held),
    "prefetched: found, wasted": cell("prefetched_bytes", _prefetched),
    "answers equal": tables.COLUMNS["answers equal"],
}


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    asked = make_serving_parser(
        "multiturn",
        "Many conversations of several turns, with DRAM and a disk that do not hold them.",
        SLOW_DISK if "--slow-disk" in given else SPARSE,
    )
    asked.add_argument(
        "--slow-disk",
        action="store_true",
        help="16 conversations in rotation, DRAM for 4 of them: other defaults of all options",
    )
    return run_serving(asked.parse_args(given), COLUMNS, summarize)


if __name__ == "__main__":
    sys.exit(main())
