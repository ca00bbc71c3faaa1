"""Shares as many pairs as the paper's selector, with the least total attention distance."""

from __future__ import annotations

import networkx

from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.krul import (
    check_gamma,
    check_layer_ratio,
    initial_recent_layers,
    num_shared_pairs,
    pair_distances,
)
from krul_backend.strategy.strategy import Pair, Precision, Strategy


class MatchingSelector(StrategySelector):
    """Chooses disjoint pairs of I-R layers with the least sum of attention distances.

    Which layers may be shared, and how many pairs are asked for, is as in ``KrulSelector``; only the search
    differs: Algorithm 1 takes the nearest pair first, which may leave two far layers to each other.

    Raises:
        StrategyError: gamma or the ratio is out of [0, 1].
    """

    name = "matching"

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
            pairs = minimum_matching(pair_distances(statistics, layers), layers, num_pairs)
        return Strategy.from_pairs(num_layers, pairs, self._precision)


def minimum_matching(distances: list[tuple[float, Pair]], layers: list[int], num_pairs: int) -> list[Pair]:
    """The ``num_pairs`` disjoint pairs with the least sum of distances, ascending.

    ``distances`` holds every pair of ``layers``; ``num_pairs`` is at most half their number. A perfect
    matching is found in the graph of the layers and of one stand-in, at no cost, for each layer that shall
    stay alone: stand-ins are not joined to each other, so exactly that many layers meet one.
    """
    graph = networkx.Graph()
    graph.add_nodes_from(layers)
    graph.add_weighted_edges_from((i, j, distance) for distance, (i, j) in distances)
    stand_ins = [f"alone {n}" for n in range(len(layers) - 2 * num_pairs)]
    graph.add_weighted_edges_from((layer, stand_in, 0.0) for layer in layers for stand_in in stand_ins)
    matched = networkx.min_weight_matching(graph)
    return sorted((min(a, b), max(a, b)) for a, b in matched if isinstance(a, int) and isinstance(b, int))
