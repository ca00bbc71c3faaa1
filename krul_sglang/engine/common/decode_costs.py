"""What decoding a token of one layer costs, by how it is stored."""

from __future__ import annotations

from collections.abc import Mapping

from krul_backend.strategy.strategy import Precision, Strategy

PAIR_FACTOR = 2.0
"""Guess for the layers of a pair where none was measured: two blocks are read for one layer."""


class DecodeCosts:
    """Seconds per token and layer, beyond what copying the bytes costs.

    ``single_s``: of layers on their own, by precision; ``pair_s``: of layers in a pair. What was not measured
    is taken from what was.
    """

    def __init__(self, single_s: Mapping[Precision, float], pair_s: Mapping[Precision, float]) -> None:
        self.single_s = dict(single_s)
        self.pair_s = dict(pair_s)

    def token_s(self, strategy: Strategy) -> tuple[float, ...]:
        """``[L]``, for every layer of a segment that was stored with ``strategy``."""
        return tuple(
            self._single_s(layer.precision) if layer.partner is None else self._pair_s(layer.precision)
            for layer in strategy.layers
        )

    def _single_s(self, precision: Precision) -> float:
        return self.single_s.get(precision, max(self.single_s.values(), default=0.0))

    def _pair_s(self, precision: Precision) -> float:
        measured = self.pair_s.get(precision)
        return PAIR_FACTOR * self._single_s(precision) if measured is None else measured
