"""``python -m benchmarks.launches --json FILE``: what the engine asks of a GPU per operation, counted on any
machine."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch

from benchmarks import runner
from benchmarks.launches.counter import LaunchCounter, counting
from benchmarks.launches.operations import NUM_DECODING, SHAPES, Server, Shape
from benchmarks.runner import Result
from benchmarks.tables import Columns, cell, source, table_of

_EXPLAINED = ("save subspace",)
"""Rows that name the functions which launch and wait most."""
_NUM_PLACES = 12
_OF_STEPS = ("decode step, nothing kept", "decode step, queries kept", "decode step, in a CUDA graph")


def count(
    counter: LaunchCounter, operation: str, num_tokens: int, prepare: Callable[[], Callable[[], None]]
) -> dict[str, Any]:
    """A row: the operation's second run is counted, the first one compiles and fills caches."""
    prepare()()
    run = prepare()
    counter.reset()
    began_s = time.perf_counter()
    run()
    wall_s = time.perf_counter() - began_s
    row: dict[str, Any] = {
        "operation": operation,
        "tokens": num_tokens,
        "launches": counter.launches.total(),
        "syncs": counter.syncs.total(),
        "host_ms": round(1e3 * (wall_s - counter.device_s), 1),
        "bytes_copied": counter.bytes_copied,
        "peak_bytes": counter.peak_bytes,
    }
    if operation in _EXPLAINED:
        row["top_launches"] = dict(counter.launches.most_common(_NUM_PLACES))
        row["top_syncs"] = dict(counter.syncs.most_common(_NUM_PLACES))
    return row


def rows_of(shape: Shape, num_tokens: int, *, captures: bool = True) -> list[dict[str, Any]]:
    """All operations on one shape and length; those of a decode step if ``captures``."""
    with counting() as counter:
        server = Server(shape, num_tokens, counter)
        operations: list[tuple[str, int, Callable[[], Callable[[], None]]]] = [
            ("save native", num_tokens, lambda: server.save(server.plain())),
            ("restore native", num_tokens, lambda: server.restore("native")),
            ("save subspace", num_tokens, lambda: server.save(server.budget(), is_observed=True)),
            ("restore subspace", num_tokens, lambda: server.restore("subspace")),
            ("head recompute", num_tokens, server.heads),
            ("statistics", num_tokens, server.statistics),
        ]
        if captures:
            operations += [
                (_OF_STEPS[0], NUM_DECODING, partial(server.decode_step, is_kept=False)),
                (_OF_STEPS[1], NUM_DECODING, partial(server.decode_step, is_kept=True)),
                (_OF_STEPS[2], NUM_DECODING, server.replay),
            ]
        rows = [count(counter, name, tokens, prepare) for name, tokens, prepare in operations]
        server.close()
    return [{"shape": shape.name, "num_layers": shape.num_layers, **row} for row in rows]


_COLUMNS: Columns = {
    "operation": cell("operation"),
    "model": cell("shape"),
    "tokens": cell("tokens"),
    "launches": cell("launches"),
    "waits": cell("syncs"),
    "host": cell("host_ms", "{:.0f} ms"),
    "copied": cell("bytes_copied", "{:.1f} MB", 1e-6),
    "peak": cell("peak_bytes", "{:.1f} MB", 1e-6),
}

_NOTES = """Counted on a CPU: the engine's own code runs beside a device that counts, with random KV in bf16.

- Launches are operations of torch that start a kernel or a copy, one for each, and krul's Triton kernels.
- Waits are those of the host for the device, those at the end of an operation included. A copy that is
  asked not to block counts as none: the memory that it needs for that is page-locked on a GPU.
- Host is the time of this machine outside of the device's operations. It includes the time of counting.
- Copied is what goes between host and device; peak is the device memory taken beside the pool.
- To save in bases is to copy the turn as it is, to measure its attention (the statistics), and to encode it.
- Head recompute is krul's attention of heads, as long as the turn, in all layers: FlashInfer's kernel
  counts as one launch, and what its plan launches is not counted, nor are the model's layers and SGLang's
  writes.
- A decode step is what capturing queries adds to one of 32 requests. What a CUDA graph contains runs in each
  step."""


def launches_table(result: Result, path: Path | None) -> str:
    """What each operation asks of a GPU, for the longest turns."""
    longest = max(row["tokens"] for row in result["rows"])
    shown = [row for row in result["rows"] if row["tokens"] == longest or row["operation"] in _OF_STEPS]
    shorter = "The counts of shorter turns, and which functions launch most, are in the source."
    return f"{table_of(_COLUMNS, shown, left=(0, 1))}\n\n{_NOTES}\n\n{shorter} {source(path)}"


def measure(lengths: Sequence[int], shapes: Sequence[Shape]) -> dict[str, Any]:
    torch.manual_seed(0)
    rows = []
    for shape in shapes:
        for num_tokens in lengths:
            rows += rows_of(shape, num_tokens, captures=num_tokens == lengths[-1])
    return {"rows": rows}


def main() -> int:
    parser = runner.make_parser("launches", __doc__)
    parser.add_argument("--tokens", type=runner.numbers, default=(100, 1000), help="lengths of a turn")
    parser.add_argument("--shapes", type=runner.numbers, default=tuple(range(len(SHAPES))), help="numbers")
    given = parser.parse_args()
    shapes = [SHAPES[number] for number in given.shapes]
    return runner.run(given, lambda: measure(given.tokens, shapes), launches_table)


if __name__ == "__main__":
    sys.exit(main())
