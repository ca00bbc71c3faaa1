"""Operations in turn, and rows of what they took."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.runner import without_samples


def interleaved(operations: Mapping[str, Callable[[], float]], repeats: int) -> dict[str, list[float]]:
    """Seconds that each operation says it took, in turns after one turn that does not count."""
    taken: dict[str, list[float]] = {name: [] for name in operations}
    for turn in range(repeats + 1):
        for name, operation in operations.items():
            seconds = operation()
            if turn:
                taken[name].append(seconds)
    return taken


def seconds_of(operation: Callable[[], object]) -> float:
    start_s = time.perf_counter()
    operation()
    return time.perf_counter() - start_s


def percentile(seconds: Sequence[float], share: float) -> float:
    """The smallest sample that at least ``share`` of all samples do not exceed."""
    ordered = sorted(seconds)
    return ordered[max(0, -int(-share * len(ordered) // 1) - 1)]


def summarize(result: Mapping[str, Any]) -> dict[str, Any]:
    """What is kept of a run's ``result``: of each operation ``p50_us``, ``p99_us`` and ``n`` for its samples.

    Of memcpy and the bare disk beside it quantiles stay.
    """
    rows = [{name: value for name, value in row.items() if name != "samples_s"} for row in result["rows"]]
    return {**result, "rows": [without_samples(row) for row in rows]}


def gbs(num_bytes: int, seconds: float) -> float:
    return num_bytes / seconds / 1e9


def row(op: str, seconds: Sequence[float], **fields: Any) -> dict[str, Any]:
    """Latencies of one operation, with whatever describes it."""
    return {
        "op": op,
        **fields,
        "p50_us": statistics.median(seconds) * 1e6,
        "p99_us": percentile(seconds, 0.99) * 1e6,
        "n": len(seconds),
        "samples_s": list(seconds),
    }


def byte_row(
    op: str,
    seconds: Sequence[float],
    *,
    block_bytes: int,
    num_blocks: int,
    memcpy_s: Sequence[float],
    disk_s: Sequence[float] | None = None,
) -> dict[str, Any]:
    """An operation on ``num_blocks`` blocks beside memcpy of them, and the bare disk if it uses one."""
    num_bytes = block_bytes * num_blocks
    throughput_gbs = gbs(num_bytes, statistics.median(seconds))
    memcpy_gbs = gbs(num_bytes, statistics.median(memcpy_s))
    fields: dict[str, Any] = {
        "size_bytes": block_bytes,
        "num_blocks": num_blocks,
        "throughput_gbs": throughput_gbs,
        "memcpy_gbs": memcpy_gbs,
        "memcpy_samples_s": list(memcpy_s),
        "ratio": throughput_gbs / memcpy_gbs,
    }
    if disk_s is not None:
        disk_gbs = gbs(num_bytes, statistics.median(disk_s))
        fields |= {"disk_gbs": disk_gbs, "disk_samples_s": list(disk_s), "ratio": throughput_gbs / disk_gbs}
    return row(op, seconds, **fields)
