"""How well estimators that see fewer rows, or see them elsewhere, agree with the exact one."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from scipy.stats import spearmanr

from benchmarks.baselines import ExactEstimator, SampledEstimator
from krul_backend.attention.rows import Phase, sample_positions
from krul_backend.attention.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from krul_backend.attention.statistics import AttentionStatistics
from krul_sglang.learning.reader import CapturedAttention

Pairs = frozenset[tuple[int, int]]


@dataclass(frozen=True)
class Agreement:
    """One estimate beside the exact statistics of the same conversation.

    ``spearman`` is over the distances of all pairs of layers. ``overlap`` is the share of the exact choice of
    pairs that the estimate chooses, too; ``excess_distance`` is by how much the exact distances of the pairs
    chosen exceed those of the exact choice, relative to it: what an exchange of nearly equal pairs costs.
    ``ir_mass_error`` is the largest difference of a layer's initial-recent mass.
    """

    estimator: str
    num_rows: int
    spearman: float
    overlap: float
    excess_distance: float
    ir_mass_error: float


def closest_pairs(distances: torch.Tensor, num_layers: int) -> Pairs:
    """Disjoint pairs by ascending distance until they hold ``num_layers`` layers (Krul, Algorithm 1)."""
    total = len(distances)
    chosen: set[tuple[int, int]] = set()
    taken: set[int] = set()
    every_pair = [(i, j) for i in range(total) for j in range(i + 1, total)]
    for i, j in sorted(every_pair, key=lambda pair: float(distances[pair])):
        if len(taken) >= num_layers:
            break
        if taken.isdisjoint((i, j)):
            chosen.add((i, j))
            taken |= {i, j}
    return frozenset(chosen)


def agreements(
    captured: CapturedAttention, row_counts: Sequence[int], worker: SimilarityWorker
) -> list[Agreement]:
    """All estimators on one conversation, of which every row was captured."""
    rows = captured.rows()
    num_layers, num_heads = rows.num_layers, rows.num_heads
    exact_estimator = ExactEstimator(num_layers, num_heads)
    exact_estimator.add(rows, Phase.PREFILL, captured.read_keys)
    exact = exact_estimator.finish(captured.read_keys)

    heterogeneous = HeterogeneousEstimator(num_layers, num_heads, worker)
    middle = captured.num_tokens // 2
    for phase, start, end in ((Phase.PREFILL, 0, middle), (Phase.DECODE, middle, captured.num_tokens)):
        heterogeneous.add(captured.rows(torch.arange(start, end)), phase, captured.read_keys)
    results = [_compare("heterogeneous", heterogeneous.finish(captured.read_keys), exact)]

    for count in row_counts:
        sampled = SampledEstimator(num_layers, num_heads, max_rows=count)
        positions = sample_positions(0, captured.num_tokens, count)
        sampled.add(captured.rows(positions), Phase.PREFILL, captured.read_keys)
        results.append(_compare(f"sampled-{count}", sampled.finish(captured.read_keys), exact))
    return results


def _compare(name: str, estimate: AttentionStatistics, exact: AttentionStatistics) -> Agreement:
    expected, actual = exact.distances(), estimate.distances()
    upper = torch.triu_indices(exact.num_layers, exact.num_layers, offset=1).unbind()
    correlation = spearmanr(actual[upper].numpy(), expected[upper].numpy()).statistic
    best = closest_pairs(expected, exact.num_layers // 2)
    chosen = closest_pairs(actual, exact.num_layers // 2)
    best_distance = sum(float(expected[pair]) for pair in best)
    chosen_distance = sum(float(expected[pair]) for pair in chosen)
    mass_error = (estimate.initial_recent_mass() - exact.initial_recent_mass()).abs().max()
    return Agreement(
        name,
        estimate.num_rows,
        float(correlation),
        len(best & chosen) / len(best),
        chosen_distance / best_distance - 1,
        float(mass_error),
    )


def summarise(results: Sequence[Agreement]) -> list[dict[str, Any]]:
    """Mean, minimum, quartiles and maximum of every measure, per estimator."""
    summary = []
    for name in dict.fromkeys(result.estimator for result in results):
        chosen = [result for result in results if result.estimator == name]
        row: dict[str, Any] = {"estimator": name, "conversations": len(chosen)}
        for measure in ("num_rows", "spearman", "overlap", "excess_distance", "ir_mass_error"):
            values = torch.tensor([getattr(result, measure) for result in chosen], dtype=torch.float64)
            shares = torch.tensor([0, 0.25, 0.5, 0.75, 1], dtype=torch.float64)
            labels = ("min", "q25", "median", "q75", "max")
            quantiles = dict(zip(labels, values.quantile(shares).tolist(), strict=True))
            row[measure] = {"mean": float(values.mean()), **quantiles}
        summary.append(row)
    return summary
