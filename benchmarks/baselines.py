"""What the benchmarks compare with and no server runs by itself: choices of pairs."""

from __future__ import annotations

import random
from dataclasses import dataclass

import networkx

from krul_backend.codec.pairs.selectors import Evidence, KrulSelector, StrategySelector, num_shared_pairs
from krul_backend.strategy.strategy import Pair, Precision, Strategy


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
