"""Rows of the result file."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from benchmarks.restore.methods import Method
from benchmarks.restore.restorer import Measured, Span
from krul_backend.planner.interface import RestorePlan

RECOMPUTE = "recompute"
RESTORE = "restore"


def row(
    method: Method,
    plan: RestorePlan,
    samples: Sequence[Measured],
    *,
    bytes_stored: int,
    relative_error: float,
) -> dict[str, Any]:
    """One method in one setting: medians over ``samples``, and the times of each of them.

    ``bytes_stored``: all that this plan ever reads, so all that has to be kept. ``relative_error``: the
    largest of all samples, against the logits that this method has to give.
    """
    typical = median_sample(samples)
    compute_s = statistics.median(sample.compute_s for sample in samples)
    load_s = statistics.median(sample.load_s for sample in samples)
    return {
        "method": method.name,
        "strategy": method.strategy,
        "planner": method.planner,
        "chosen": RECOMPUTE if plan.is_recompute else RESTORE,
        "ttft_s": spread([sample.ttft_s for sample in samples]),
        "predicted_s": plan.end_s,
        "ideal_s": max(compute_s, load_s),
        "compute_s": compute_s,
        "load_s": load_s,
        "compute_busy": statistics.median(sample.compute_s / sample.length_s for sample in samples),
        "load_busy": statistics.median(sample.load_s / sample.length_s for sample in samples),
        "bytes_loaded": typical.bytes_loaded,
        "bytes_stored": bytes_stored,
        "head_tokens": 0 if plan.is_recompute else sum(plan.head_ends),
        "head_ends": None if plan.is_recompute else list(plan.head_ends),
        "relative_error": relative_error,
    }


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, minimum, 90th percentile (a sample, at or above it), count, and the samples in their order."""
    ordered = sorted(seconds)
    return {
        "median": statistics.median(ordered),
        "min": ordered[0],
        "p90": ordered[-(-9 * len(ordered) // 10) - 1],
        "n": len(ordered),
        "samples": list(seconds),
    }


def median_sample(samples: Sequence[Measured]) -> Measured:
    """The one whose time to the first token is the median, or the next longer."""
    return sorted(samples, key=lambda sample: sample.ttft_s)[len(samples) // 2]


def timeline(sample: Measured) -> dict[str, Any]:
    """What ran when in one restore: ``[start_s, end_s]`` of each layer, from the start of the restore."""

    def spans(of_stage: Sequence[Span]) -> list[list[float]]:
        return [[round(start, 7), round(end, 7)] for start, end in of_stage]

    return {
        "ttft_s": sample.ttft_s,
        "head": spans(sample.heads),
        "load": spans(sample.loads),
        "own": spans(sample.own),
    }
