"""No sharing: every layer alone."""

from __future__ import annotations

from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.strategy import Precision, Strategy


class UnsharedSelector(StrategySelector):
    """Every layer alone at one precision."""

    name = "none"

    def __init__(self, precision: Precision = Precision.NATIVE) -> None:
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        return Strategy.from_pairs(evidence.num_layers, precision=self._precision)
