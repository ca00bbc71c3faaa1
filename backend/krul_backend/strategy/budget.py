"""Chooses the strategy with the fewest bytes whose predicted damage stays under a limit."""

from __future__ import annotations

import math

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import csr_array

from krul_backend.errors import StrategyError
from krul_backend.strategy.interface import Evidence, LayerOption, StrategySelector
from krul_backend.strategy.strategy import Precision, Strategy

_RELATIVE_GAP = 2e-3
_TIME_LIMIT_S = 0.4


class BudgetSelector(StrategySelector):
    """Chooses one measured option for every layer, so that the bytes are fewest.

    The sum of the chosen options' damages is at most ``limit``, in nats of predicted KL divergence (within a
    millionth of it, the tolerance of the solver); the bytes are at most 0.2% above the fewest. A layer can
    always be stored natively, in ``native_token_bytes`` bytes per token and without damage: what was not
    measured is not compressed.

    Raises:
        StrategyError: a negative limit, or bytes that are not positive.
    """

    name = "budget"

    def __init__(self, limit: float, native_token_bytes: float) -> None:
        if not 0 <= limit < math.inf:
            raise StrategyError(f"the error budget is {limit} nats: a finite number of at least 0 is needed")
        if not 0 < native_token_bytes < math.inf:
            raise StrategyError(f"a native layer of {native_token_bytes} bytes per token")
        self._limit = limit
        self._native_token_bytes = native_token_bytes

    def select(self, evidence: Evidence) -> Strategy:
        options = [
            LayerOption(layer, Precision.NATIVE, self._native_token_bytes, 0.0)
            for layer in range(evidence.num_layers)
        ]
        options += [option for option in evidence.options if option.damage <= self._limit]
        precisions = [Precision.NATIVE] * evidence.num_layers
        for option in fewest_bytes(options, evidence.num_layers, self._limit):
            precisions[option.layer] = option.precision
        return Strategy.from_pairs(evidence.num_layers, (), precisions)


def fewest_bytes(options: list[LayerOption], num_layers: int, limit: float) -> list[LayerOption]:
    """One option for every layer, with the fewest bytes and a sum of damages up to ``limit``.

    ``options`` holds one without damage for every layer, and none whose damage is over the limit. The integer
    program (a 0/1 variable per option, one equation per layer, one inequality for the damage) is solved by
    branch and bound (HiGHS): 10 to 100 ms for 80 layers and five options each.

    The result has at most 0.2% more bytes than the best there is; that much is not worth the proof. Where
    even this takes longer than the time limit, it is the best choice found until then, or empty.
    """
    columns = np.arange(len(options))
    of_layer = csr_array(
        (np.ones(len(options)), ([option.layer for option in options], columns)),
        shape=(num_layers, len(options)),
    )
    # In units of the limit: the solver's tolerances are absolute. No damage is left if the limit is 0.
    damages = np.array([[option.damage / limit if limit > 0 else 0.0 for option in options]])
    result = milp(
        np.array([option.num_bytes for option in options]),
        integrality=np.ones(len(options)),
        bounds=Bounds(0, 1),
        constraints=[LinearConstraint(of_layer, 1, 1), LinearConstraint(damages, -np.inf, 1)],
        options={"mip_rel_gap": _RELATIVE_GAP, "time_limit": _TIME_LIMIT_S},
    )
    return [] if result.x is None else [options[column] for column in columns[result.x > 0.5]]
