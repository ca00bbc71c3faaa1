"""How many layers are to be shared: the paper's compression ratio ``r_l``."""

from __future__ import annotations

import math

from krul_backend.errors import StrategyError


def check_layer_ratio(layer_ratio: float) -> None:
    """Raises StrategyError unless the ratio is in [0, 1]."""
    if not 0 <= layer_ratio <= 1:
        raise StrategyError(f"the share of layers r_l is {layer_ratio}: a number from 0 to 1 is needed")


def num_shared_pairs(num_layers: int, layer_ratio: float) -> int:
    """The smallest number of pairs whose layers reach ``|S| >= N * r_l`` (Krul, Algorithm 1, line 20).

    ``N`` counts all layers, not only those that may be shared. A ratio of 0 asks for no pair at all; the
    listing, which tests after it has added a pair, would share one.
    """
    # Without rounding, 50 * 0.56 = 28.000000000000004 would ask for a pair too many.
    return math.ceil(round(num_layers * layer_ratio, 9) / 2)
