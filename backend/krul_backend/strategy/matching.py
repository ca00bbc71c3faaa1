"""Shares as many pairs as the paper's selector, with the least total attention distance."""

from __future__ import annotations

import networkx

from krul_backend.strategy.krul import KrulSelector
from krul_backend.strategy.strategy import Pair


class MatchingSelector(KrulSelector):
    """Chooses disjoint pairs of I-R layers with the least sum of attention distances.

    Only the search differs from ``KrulSelector``'s: Algorithm 1 takes the nearest pair first, which may leave
    two far layers to each other.
    """

    name = "matching"

    def _choose_pairs(
        self, distances: list[tuple[float, Pair]], layers: list[int], num_pairs: int
    ) -> list[Pair]:
        return minimum_matching(distances, layers, num_pairs)


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
