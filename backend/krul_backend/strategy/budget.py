"""Chooses the strategy with the fewest bytes whose predicted damage stays under a limit."""

from __future__ import annotations

import math
from collections.abc import Iterable

import numpy as np
from scipy.optimize import Bounds, LinearConstraint, linprog, milp
from scipy.sparse import csr_array

from krul_backend.errors import StrategyError
from krul_backend.strategy.interface import Evidence, StrategySelector, UnitOption
from krul_backend.strategy.strategy import Precision, Strategy

_RELATIVE_GAP = 2e-3
_FIRST_MARGIN = 0.02
_TIME_LIMIT_S = 0.4


class BudgetSelector(StrategySelector):
    """Chooses one measured option for every layer, alone or in a pair, so that the bytes are fewest.

    The sum of the chosen options' damages is at most ``limit``, in nats of predicted KL divergence (within a
    millionth of it, the tolerance of the solver); the bytes are at most 0.2% above the fewest. A layer can
    always be stored alone and natively, in ``native_token_bytes`` bytes per token and without damage: what
    was not measured is not compressed.

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
        native = [
            UnitOption((layer,), Precision.NATIVE, self._native_token_bytes, 0.0)
            for layer in range(evidence.num_layers)
        ]
        options = worthwhile_options([*evidence.options, *native], self._limit)
        chosen = fewest_bytes(options, evidence.num_layers, self._limit) or native
        precisions = [Precision.NATIVE] * evidence.num_layers
        for option in chosen:
            for layer in option.unit:
                precisions[layer] = option.precision
        pairs = [(option.unit[0], option.unit[1]) for option in chosen if len(option.unit) == 2]
        return Strategy.from_pairs(evidence.num_layers, pairs, precisions)


def worthwhile_options(options: Iterable[UnitOption], limit: float) -> list[UnitOption]:
    """Leave out options that no optimal choice needs, to save the solver time.

    Left out are options over the limit, those that another option of the same unit beats in bytes and in
    damage, and pairs that two options of their layers alone beat.
    """
    by_unit: dict[tuple[int, ...], list[UnitOption]] = {}
    for option in options:
        if option.damage <= limit:
            by_unit.setdefault(option.unit, []).append(option)
    fronts = {unit: _pareto_front(of_unit) for unit, of_unit in by_unit.items()}
    kept = []
    for unit, front in fronts.items():
        if len(unit) == 1:
            kept += front
            continue
        alone = [
            (a.num_bytes + b.num_bytes, a.damage + b.damage)
            for a in fronts.get(unit[:1], [])
            for b in fronts.get(unit[1:], [])
        ]
        kept += [
            option
            for option in front
            if not any(size <= option.num_bytes and damage <= option.damage for size, damage in alone)
        ]
    return kept


def _pareto_front(options: list[UnitOption]) -> list[UnitOption]:
    front: list[UnitOption] = []
    for option in sorted(options, key=lambda option: (option.num_bytes, option.damage)):
        if not front or option.damage < front[-1].damage:
            front.append(option)
    return front


def fewest_bytes(options: list[UnitOption], num_layers: int, limit: float) -> list[UnitOption]:
    """Options that cover every layer exactly once, with the fewest bytes and a sum of damages up to limit.

    ``options`` holds one without damage for every layer alone. The integer program (a 0/1 variable per
    option, one equation per layer, one inequality for the damage) is solved by branch and bound (HiGHS) over
    the few options that matter: an option's reduced cost in the linear relaxation is a lower bound of what
    taking it adds to the relaxation's bytes, so those beyond a known solution's bytes cannot be part of a
    better one.

    The result has at most 0.2% more bytes than the best there is; that much is not worth the proof. Where
    even this takes longer than the time limit, it is the best choice found until then, or empty.
    """
    rows = [layer for option in options for layer in option.unit]
    columns = [column for column, option in enumerate(options) for _ in option.unit]
    cover = csr_array((np.ones(len(rows)), (rows, columns)), shape=(num_layers, len(options)))
    # In units of the limit: the solver's tolerances are absolute. No damage is left if the limit is 0.
    damages = np.array([[option.damage / limit if limit > 0 else 0.0 for option in options]])
    num_bytes = np.array([option.num_bytes for option in options])

    relaxed = linprog(num_bytes, A_ub=damages, b_ub=[1.0], A_eq=cover, b_eq=np.ones(num_layers))
    reduced_cost = num_bytes - cover.T @ relaxed.eqlin.marginals - damages[0] * relaxed.ineqlin.marginals[0]
    # With the options that cost no damage, every program has a solution.
    is_safe = damages[0] == 0

    def solve(max_reduced_cost: float) -> tuple[float, list[UnitOption]]:
        kept = np.flatnonzero((reduced_cost <= max_reduced_cost) | is_safe)
        result = milp(
            num_bytes[kept],
            integrality=np.ones(len(kept)),
            bounds=Bounds(0, 1),
            constraints=[
                LinearConstraint(cover[:, kept], 1, 1),
                LinearConstraint(damages[:, kept], -np.inf, 1),
            ],
            options={"mip_rel_gap": _RELATIVE_GAP, "time_limit": _TIME_LIMIT_S},
        )
        if result.x is None:
            return math.inf, []
        return float(result.fun - relaxed.fun), [options[column] for column in kept[result.x > 0.5]]

    excess, chosen = solve(_FIRST_MARGIN * relaxed.fun)
    if _FIRST_MARGIN * relaxed.fun < excess < math.inf:
        better_excess, better = solve(excess)
        if better_excess < excess:
            return better
    return chosen
