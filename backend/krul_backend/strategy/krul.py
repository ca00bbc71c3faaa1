"""Shares pairs of layers with similar attention, nearest first: the Krul paper's Algorithm 1 and its parts.

The parts are the two parameters, ``gamma`` (which layers may be shared) and ``r_l`` (how many are), and the
pairs in order of their distance. Other selectors use them too.
"""

from __future__ import annotations

import math

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.errors import StrategyError
from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.strategy import Pair, Precision, Strategy


def check_gamma(gamma: float) -> None:
    """Check the I-R threshold. Raises StrategyError unless it is in [0, 1]."""
    if not 0 <= gamma <= 1:
        raise StrategyError(f"the I-R threshold gamma is {gamma}: a number from 0 to 1 is needed")


def check_layer_ratio(layer_ratio: float) -> None:
    """Check the share of layers. Raises StrategyError unless it is in [0, 1]."""
    if not 0 <= layer_ratio <= 1:
        raise StrategyError(f"the share of layers r_l is {layer_ratio}: a number from 0 to 1 is needed")


def num_shared_pairs(num_layers: int, layer_ratio: float) -> int:
    """The smallest number of pairs whose layers reach ``|S| >= N * r_l`` (Krul, Algorithm 1, line 20).

    ``N`` counts all layers, not only those that may be shared. A ratio of 0 asks for no pair at all; the
    listing, which tests after it has added a pair, would share one.
    """
    # Without rounding, 50 * 0.56 = 28.000000000000004 would ask for a pair too many.
    return math.ceil(round(num_layers * layer_ratio, 9) / 2)


def initial_recent_layers(statistics: AttentionStatistics, gamma: float) -> list[int]:
    """Layers whose mean attention on the first and last 10% of tokens is at least ``gamma``, ascending.

    Krul, section 4.2 and Algorithm 1, lines 1 to 9: a layer is left out if that mean is below gamma. The
    paper averages over all heads and all positions of the conversation. Here the mean runs over all heads
    and over the query rows that were kept, and the 10% are those of the tokens that the row sees. The mean
    depends strongly on which rows these are, so a threshold holds only for one way of keeping rows.
    Without any row the list is empty.
    """
    if statistics.num_rows == 0:
        return []
    mass = statistics.initial_recent_mass().tolist()
    return [layer for layer, share in enumerate(mass) if share >= gamma]


def pair_distances(statistics: AttentionStatistics, layers: list[int]) -> list[tuple[float, Pair]]:
    """``(distance, (i, j))`` of all pairs ``i < j`` of the given layers, in ascending order.

    Equal distances are ordered by ``i``, then by ``j``, so that every rank takes the same pairs. Empty if no
    query row was kept.
    """
    if statistics.num_rows == 0:
        return []
    distances = statistics.distances().tolist()
    return sorted((distances[i][j], (i, j)) for i in layers for j in layers if i < j)


class KrulSelector(StrategySelector):
    """Chooses pairs by Krul's Algorithm 1, preemptive compression strategy selection.

    Layers below the I-R threshold ``gamma`` are left out; ``initial_recent_layers`` states which queries
    that mean is taken over. All pairs of the others are visited by ascending attention distance, ties by
    ``(i, j)``; a pair is taken if neither layer is in one yet, until ``|S| >= N * r_l``. If the I-R layers
    run out first, fewer layers are shared. Without statistics nothing is shared.

    ``precision`` is that of all layers, shared or not.

    Raises:
        StrategyError: gamma or the ratio is out of [0, 1].
    """

    name = "krul"

    def __init__(self, gamma: float, layer_ratio: float, precision: Precision = Precision.NATIVE) -> None:
        check_gamma(gamma)
        check_layer_ratio(layer_ratio)
        self._gamma = gamma
        self._layer_ratio = layer_ratio
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        num_layers, statistics = evidence.num_layers, evidence.statistics
        pairs: list[Pair] = []
        if statistics is not None:
            layers = initial_recent_layers(statistics, self._gamma)
            num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), len(layers) // 2)
            pairs = self._choose_pairs(pair_distances(statistics, layers), layers, num_pairs)
        return Strategy.from_pairs(num_layers, pairs, self._precision)

    def _choose_pairs(
        self, distances: list[tuple[float, Pair]], layers: list[int], num_pairs: int
    ) -> list[Pair]:
        """Choose ``num_pairs`` disjoint pairs of ``layers``; at most half as many as there are layers."""
        pairs: list[Pair] = []
        shared: set[int] = set()
        for _, (i, j) in distances:
            if len(pairs) == num_pairs:
                break
            if i not in shared and j not in shared:
                pairs.append((i, j))
                shared |= {i, j}
        return pairs
