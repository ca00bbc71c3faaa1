"""The paper's "Krul (Fix)": neighbouring layers of one range, whatever the conversation."""

from __future__ import annotations

from krul_backend.errors import StrategyError
from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.layer_ratio import check_layer_ratio, num_shared_pairs
from krul_backend.strategy.strategy import Precision, Strategy


class FixedSelector(StrategySelector):
    """Pairs ``(first, first + 1), (first + 2, first + 3), ...`` of the layers ``[first, end)``.

    ``layer_range`` is ``(first, end)``; None stands for the layers around the middle, as many as ``r_l`` asks
    for. The paper's table 4 takes layers 9 to 24 of 32, half of the layers, about the middle of the model.

    Raises:
        StrategyError: the ratio is out of [0, 1] or the range is empty; from ``select``, the range reaches
            beyond the last layer.
    """

    name = "krul-fixed"

    def __init__(
        self,
        layer_ratio: float,
        layer_range: tuple[int, int] | None = None,
        precision: Precision = Precision.NATIVE,
    ) -> None:
        check_layer_ratio(layer_ratio)
        if layer_range is not None and not 0 <= layer_range[0] < layer_range[1]:
            raise StrategyError(f"layers {layer_range[0]} to {layer_range[1]} (excluded) are not a range")
        self._layer_ratio = layer_ratio
        self._layer_range = layer_range
        self._precision = precision

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        first, end = self._layer_range or _middle_layers(num_layers, self._layer_ratio)
        if end > num_layers:
            raise StrategyError(
                f"layers {first} to {end} (excluded) shall be shared, the model has {num_layers} layers"
            )
        pairs = [(i, i + 1) for i in range(first, end - 1, 2)]
        return Strategy.from_pairs(num_layers, pairs, self._precision)


def _middle_layers(num_layers: int, layer_ratio: float) -> tuple[int, int]:
    num_shared = 2 * min(num_shared_pairs(num_layers, layer_ratio), num_layers // 2)
    first = (num_layers - num_shared) // 2
    return first, first + num_shared
