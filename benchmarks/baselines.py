"""What the benchmarks compare with and no server runs: attention estimators, and choices of pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import networkx
import torch

from benchmarks.similarity_worker import HeterogeneousEstimator
from krul_backend.attention.rows import Phase, QueryRows, ReadKeys, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.pairs.selectors import Evidence, KrulSelector, StrategySelector, num_shared_pairs
from krul_backend.strategy.strategy import Pair, Precision, Strategy


class ExactEstimator:
    """Reduces every row as soon as it is given, on the device of the rows, and keeps sums only.

    It is the reference that the other estimators are compared with. Given all rows of a prompt, its time
    grows with the square of their number.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self._total = AttentionStatistics.zero(num_layers, num_heads)

    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        self._total += accumulate(rows, read_keys)

    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        return self._total


class SampledEstimator:
    """Keeps some query vectors, and reduces them in one pass over the keys in ``finish``.

    It stands for the server's ``QueryCapture``, without an engine. While the turn runs it only copies. Every
    ``stride``-th row of the turn is kept, starting with the first; the stride doubles whenever more than
    ``max_rows`` rows would be kept. So the rows kept are always spread evenly over the rows given, and there
    are more than ``max_rows / 2`` of them once that many were given.

    Raises:
        ValueError: if ``max_rows`` is not positive.
    """

    def __init__(self, num_layers: int, num_heads: int, max_rows: int) -> None:
        if max_rows <= 0:
            raise ValueError(f"at least one row has to be kept, got max_rows={max_rows}")
        self._zero = AttentionStatistics.zero(num_layers, num_heads)
        self._max_rows = max_rows
        self._kept: list[QueryRows] = []
        self._num_seen = 0
        self._stride = 1

    @property
    def nbytes(self) -> int:
        """Memory of the kept query vectors, in bytes."""
        return sum(part.queries.nbytes for part in self._kept)

    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        num_seen = self._num_seen + rows.num_rows
        thinning = 1
        while -(-num_seen // (self._stride * thinning)) > self._max_rows:
            thinning *= 2
        if thinning > 1:
            self._stride *= thinning
            if self._kept:
                self._kept = [_copy_every(_concatenate(self._kept), 0, thinning)]
        # The first row of these whose number in the turn is a multiple of the stride.
        first = -self._num_seen % self._stride
        if first < rows.num_rows:
            self._kept.append(_copy_every(rows, first, self._stride))
        self._num_seen = num_seen

    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        return accumulate(_concatenate(self._kept), read_keys) if self._kept else self._zero


Estimator = ExactEstimator | SampledEstimator | HeterogeneousEstimator
"""What the benchmark of estimators compares: one object per turn, ``add`` as it runs, ``finish`` once."""


def _copy_every(rows: QueryRows, first: int, step: int) -> QueryRows:
    """A copy of rows ``first``, ``first + step``, ...: it shares no memory with ``rows``."""
    return QueryRows(
        rows.queries[:, first::step].clone(),
        rows.positions[first::step].clone(),
        rows.kv_heads.clone(),
        rows.scaling,
    )


def _concatenate(parts: list[QueryRows]) -> QueryRows:
    """All rows of at least one part, in order. The parts have one model's layers and the same heads."""
    return QueryRows(
        torch.cat([part.queries for part in parts], dim=1),
        torch.cat([part.positions for part in parts]),
        parts[0].kv_heads,
        parts[0].scaling,
    )


@dataclass(frozen=True, eq=False)
class SeededEvidence(Evidence):
    """Evidence with a number that tells conversations apart, for ``RandomSelector``."""

    conversation_seed: int = 0


class RandomSelector(StrategySelector):
    """Shares disjoint pairs drawn uniformly from all layers, as many as ``r_l`` asks for.

    The ``conversation_seed`` of a ``SeededEvidence`` (0 without one) decides the draw.

    Raises:
        StrategyError: the ratio is out of [0, 1].
    """

    name = "random"

    def __init__(self, layer_ratio: float, precision: Precision = Precision.NATIVE) -> None:
        super().__init__(layer_ratio, precision=precision)

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), num_layers // 2)
        conversation_seed = evidence.conversation_seed if isinstance(evidence, SeededEvidence) else 0
        # Seeded by text: Python hashes it with SHA-512, the same in every process.
        layers = random.Random(f"0/{conversation_seed}").sample(range(num_layers), 2 * num_pairs)
        pairs = [(min(pair), max(pair)) for pair in zip(layers[::2], layers[1::2], strict=True)]
        return Strategy.from_pairs(num_layers, pairs, self._precision)


class FixedSelector(StrategySelector):
    """Shares neighbours around the middle of the model, as many layers as ``r_l`` asks for.

    This is the paper's "Krul (Fix)". Its table 4 takes layers 9 to 24 of 32, half of the layers, about the
    middle of the model.
    """

    name = "krul-fixed"

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), num_layers // 2)
        first = (num_layers - 2 * num_pairs) // 2
        pairs = [(i, i + 1) for i in range(first, first + 2 * num_pairs, 2)]
        return Strategy.from_pairs(num_layers, pairs, self._precision)


class MatchingSelector(KrulSelector):
    """Chooses disjoint pairs of I-R layers with the least sum of attention distances.

    Only the search differs from ``KrulSelector``'s: Algorithm 1 takes the nearest pair first, which may leave
    two far layers to each other.
    """

    name = "matching"

    def _choose_pairs(
        self, distances: list[tuple[float, Pair]], layers: list[int], num_pairs: int
    ) -> list[Pair]:
        """The ``num_pairs`` disjoint pairs with the least sum of ``distances``, ascending.

        A perfect matching is found in the graph of the layers and of one stand-in, at no cost, for each layer
        that shall stay alone: stand-ins are not joined to each other, so exactly that many layers meet one.
        """
        graph = networkx.Graph()
        graph.add_nodes_from(layers)
        graph.add_weighted_edges_from((i, j, distance) for distance, (i, j) in distances)
        stand_ins = [f"alone {n}" for n in range(len(layers) - 2 * num_pairs)]
        graph.add_weighted_edges_from((layer, stand_in, 0.0) for layer in layers for stand_in in stand_ins)
        matched = networkx.min_weight_matching(graph)
        return sorted((min(a, b), max(a, b)) for a, b in matched if isinstance(a, int) and isinstance(b, int))
