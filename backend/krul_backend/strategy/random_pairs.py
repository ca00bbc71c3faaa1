"""Random pairs: what sharing costs when nothing is known about the layers."""

from __future__ import annotations

import random

from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.layer_ratio import check_layer_ratio, num_shared_pairs
from krul_backend.strategy.strategy import Precision, Strategy


class RandomSelector(StrategySelector):
    """Disjoint pairs drawn uniformly from all layers, as many as ``r_l`` asks for.

    ``seed`` and the evidence's ``conversation_seed`` decide the draw: the same on every rank
    and in every run.

    Raises:
        StrategyError: the ratio is out of [0, 1].
    """

    name = "random"

    def __init__(self, layer_ratio: float, seed: int = 0, precision: Precision = Precision.NATIVE) -> None:
        check_layer_ratio(layer_ratio)
        self._layer_ratio = layer_ratio
        self._seed = seed
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), num_layers // 2)
        # Seeded by text: Python hashes it with SHA-512, the same in every process.
        layers = random.Random(f"{self._seed}/{evidence.conversation_seed}").sample(
            range(num_layers), 2 * num_pairs
        )
        pairs = [(min(pair), max(pair)) for pair in zip(layers[::2], layers[1::2], strict=True)]
        return Strategy.from_pairs(num_layers, pairs, self._precision)
