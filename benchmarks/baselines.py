"""What the benchmarks compare with and no server runs: pairs drawn at random."""

from __future__ import annotations

import random
from dataclasses import dataclass

from krul_backend.strategy.selectors import Evidence, StrategySelector, num_shared_pairs
from krul_backend.strategy.strategy import Precision, Strategy


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
