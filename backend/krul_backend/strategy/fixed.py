"""Selectors that choose the same layers for every conversation: none, MiniCache's, and Krul's fixed ones."""

from __future__ import annotations

from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.krul import check_layer_ratio, num_shared_pairs
from krul_backend.strategy.strategy import Precision, Strategy


class UnsharedSelector(StrategySelector):
    """Stores every layer alone, all at one precision."""

    name = "none"

    def __init__(self, precision: Precision = Precision.NATIVE) -> None:
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        return Strategy.from_pairs(evidence.num_layers, precision=self._precision)


class MiniCacheSelector(StrategySelector):
    """Shares neighbours ``(m, m + 1), (m + 2, m + 3), ...`` from the middle layer ``m = N // 2`` to the last.

    MiniCache (Liu et al., 2024) shares from a start layer, the middle of the model, to the last layer. To be
    comparable at equal bytes, at most as many pairs are taken as ``r_l`` asks for, the deepest first: that is
    MiniCache with a later start layer. The deep half sets the upper bound, about ``r_l = 0.5``.

    Raises:
        StrategyError: the ratio is out of [0, 1].
    """

    name = "minicache"

    def __init__(self, layer_ratio: float, precision: Precision = Precision.NATIVE) -> None:
        check_layer_ratio(layer_ratio)
        self._layer_ratio = layer_ratio
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        deep_pairs = [(i, i + 1) for i in range(num_layers // 2, num_layers - 1, 2)]
        num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), len(deep_pairs))
        return Strategy.from_pairs(num_layers, deep_pairs[len(deep_pairs) - num_pairs :], self._precision)


class FixedSelector(StrategySelector):
    """Shares neighbours around the middle of the model, as many layers as ``r_l`` asks for.

    This is the paper's "Krul (Fix)". Its table 4 takes layers 9 to 24 of 32, half of the layers, about the
    middle of the model.

    Raises:
        StrategyError: the ratio is out of [0, 1].
    """

    name = "krul-fixed"

    def __init__(self, layer_ratio: float, precision: Precision = Precision.NATIVE) -> None:
        check_layer_ratio(layer_ratio)
        self._layer_ratio = layer_ratio
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), num_layers // 2)
        first = (num_layers - 2 * num_pairs) // 2
        pairs = [(i, i + 1) for i in range(first, first + 2 * num_pairs, 2)]
        return Strategy.from_pairs(num_layers, pairs, self._precision)
