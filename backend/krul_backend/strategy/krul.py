"""The paper's selector: pairs of layers with similar attention, nearest first."""

from __future__ import annotations

from krul_backend.strategy.initial_recent import check_gamma, initial_recent_layers, pair_distances
from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.layer_ratio import check_layer_ratio, num_shared_pairs
from krul_backend.strategy.strategy import Pair, Precision, Strategy


class KrulSelector(StrategySelector):
    """Krul, Algorithm 1: preemptive compression strategy selection.

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
        shared: set[int] = set()
        if statistics is not None:
            num_pairs = num_shared_pairs(num_layers, self._layer_ratio)
            for _, (i, j) in pair_distances(statistics, initial_recent_layers(statistics, self._gamma)):
                if len(pairs) == num_pairs:
                    break
                if i not in shared and j not in shared:
                    pairs.append((i, j))
                    shared |= {i, j}
        return Strategy.from_pairs(num_layers, pairs, self._precision)
