"""``python -m benchmarks.multiturn --json FILE``: many conversations, too large for DRAM and disk.

``--slow-disk`` asks one thing more: is what waiting requests need in DRAM when they are admitted?
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

from benchmarks.multiturn import rows
from benchmarks.serving.__main__ import measure, parser
from benchmarks.serving.configuration import Configuration

_FEW_AT_ONCE = ("--max-running-requests", "2")
"""So that requests wait."""
_PATIENT = {"max_pending_share": 1.0, "ssd_timeout": 10.0}
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


def main(argv: Sequence[str] | None = None) -> int:
    given = sys.argv[1:] if argv is None else argv
    asked = parser(
        SLOW_DISK if "--slow-disk" in given else SPARSE,
        prog="python -m benchmarks.multiturn",
        description="Many conversations of several turns, with DRAM and a disk that do not hold them.",
    )
    asked.add_argument(
        "--slow-disk",
        action="store_true",
        help="16 conversations in rotation, DRAM for 4 of them: other defaults of all options",
    )
    return measure(asked.parse_args(given), rows.COLUMNS, rows.table_cells, rows.summarize)


if __name__ == "__main__":
    sys.exit(main())
