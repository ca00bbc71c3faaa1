"""Chooses strategies within an error budget; on each conversation it measures only likely choices."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from krul_backend.attention.rows import QueryRows
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import ReadLayer
from krul_backend.strategy.budget import BudgetSelector
from krul_backend.strategy.interface import Evidence, UnitOption
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Pair, Precision, Strategy
from krul_sglang.engine.budget.damage import (
    DamageMeter,
    MeasuredUnit,
    RoundTrip,
    UnitAndPrecision,
    nearest_pairs,
)

logger = logging.getLogger(__name__)

Agree = Callable[[Sequence[float] | None, int], Sequence[float] | None]
"""Mean over tensor-parallel ranks of so many numbers each; None if one rank has none."""

OfferedPairs = Callable[[], Collection[tuple[Pair, Precision]]]
"""The pairs, each with a precision, that can be stored now; more may come, none goes."""

SURVEY_TURNS = 4
SURVEY_INTERVAL = 32
"""All options are measured on the first ``SURVEY_TURNS`` turns, then on every ``SURVEY_INTERVAL``-th."""

_MAX_ROUNDS = 4
_LEARNING_RATE = 0.2

_SMALLEST_ERROR = 1e-12
"""Stands for no error at all, which has no logarithm: the native layer of a pair."""


@dataclass(frozen=True)
class ConversationKV:
    """The KV and the query rows of a conversation on which damage is measured.

    ``rows`` lie inside the tokens that ``read`` returns; ``round_trip`` encodes and decodes them, or those of
    them that are to be stored now: their ``share``. ``is_exact`` unless some of these came back lossy
    themselves: encoding them once more costs little, which says nothing about other conversations.
    """

    rows: QueryRows
    read: ReadLayer
    round_trip: RoundTrip
    share: float = 1.0
    is_exact: bool = True


@dataclass
class _Typical:
    """The mean of an option over earlier conversations: logarithm of each layer's error, bytes per token.

    Errors are those of a whole conversation. Where a share of its tokens was stored, the error of that share
    is taken as that share of the error: rounding adds up over tokens.
    """

    log_errors: list[float]
    num_bytes: float

    def errors(self, share: float = 1.0) -> list[float]:
        return [share * math.exp(value) for value in self.log_errors]


class BudgetedChoice:
    """Chooses the strategy with the fewest bytes whose measured damage stays within a limit in nats.

    Every layer alone is an option, and of the ``offered`` pairs the ``max_pairs`` with the most similar
    attention. Measuring every option of every turn would cost more than it is worth: only a survey turn
    does. On other turns only new options are measured; the errors of the others are first taken from earlier
    conversations, a choice is made, the chosen units are measured on this conversation, and if they are worse
    than thought it is chosen again. What is chosen in the end was measured on this conversation; if no such
    choice is found in a few rounds, what was not measured is left out, and native KV, which costs nothing,
    takes its place.

    Ranks of one model call it with the same statistics and offers in the same order, and choose the same:
    errors go through ``agree``.
    """

    def __init__(
        self,
        meter: DamageMeter,
        table: SensitivityTable,
        *,
        native_token_bytes: float,
        max_pairs: int,
        offered: OfferedPairs,
        agree: Agree,
    ) -> None:
        self._meter = meter
        self._table = table
        self._native_token_bytes = native_token_bytes
        self._max_pairs = max_pairs
        self._offered = offered
        self._agree = agree
        self._ever_measured: set[UnitAndPrecision] = set()
        self._typical: dict[UnitAndPrecision, _Typical] = {}
        self._num_turns = 0

    def choose(
        self, statistics: AttentionStatistics, kv: ConversationKV, limit: float
    ) -> tuple[Strategy, float]:
        """The strategy for one conversation, and its predicted damage: at most ``limit`` nats.

        Native throughout, without damage, if it cannot be measured.
        """
        selector = BudgetSelector(limit, self._native_token_bytes)
        native = Strategy.from_pairs(self._table.num_layers)
        candidates = self._candidates(statistics)
        number, self._num_turns = self._num_turns, self._num_turns + 1
        is_survey = number < SURVEY_TURNS or number % SURVEY_INTERVAL == 0
        measured: dict[UnitAndPrecision, MeasuredUnit] = {}
        new = [key for key in candidates if is_survey or key not in self._ever_measured]
        if new and not self._measure(new, kv, measured):
            return native, 0.0
        for _ in range(_MAX_ROUNDS):
            options = self._options(measured) + self._guesses(candidates, measured, kv.share)
            strategy = selector.select(Evidence(self._table.num_layers, options=options))
            unmeasured = [key for key in _keys_of(strategy) if key not in measured]
            if unmeasured and not self._measure(unmeasured, kv, measured):
                return native, 0.0
            if not unmeasured or self._damage_of(strategy, measured) <= limit:
                return strategy, self._damage_of(strategy, measured)
        strategy = selector.select(Evidence(self._table.num_layers, options=self._options(measured)))
        return strategy, self._damage_of(strategy, measured)

    def _candidates(self, statistics: AttentionStatistics) -> list[UnitAndPrecision]:
        offered = set(self._offered())
        offered_pairs = {pair for pair, _ in offered}
        num_layers = statistics.num_layers
        pairs = [pair for pair in nearest_pairs(statistics, num_layers**2) if pair in offered_pairs]
        return [
            (unit, precision)
            for unit, precision in self._meter.units_of(num_layers, pairs[: self._max_pairs])
            if len(unit) == 1 or (unit, precision) in offered
        ]

    def _options(self, measured: Mapping[UnitAndPrecision, MeasuredUnit]) -> list[UnitOption]:
        return [unit.option for unit in measured.values()]

    def _guesses(
        self,
        candidates: Sequence[UnitAndPrecision],
        measured: Collection[UnitAndPrecision],
        share: float,
    ) -> list[UnitOption]:
        """Estimates from earlier conversations for the candidates that were not measured on this one."""
        guesses = []
        for unit, precision in candidates:
            typical = self._typical.get((unit, precision))
            if typical is not None and (unit, precision) not in measured:
                damage = self._meter.damage_of(unit, precision, typical.errors(share))
                guesses.append(UnitOption(unit, precision, typical.num_bytes, damage))
        return guesses

    def _damage_of(self, strategy: Strategy, measured: dict[UnitAndPrecision, MeasuredUnit]) -> float:
        return sum(measured[key].option.damage for key in _keys_of(strategy))

    def _measure(
        self,
        units: Sequence[UnitAndPrecision],
        kv: ConversationKV,
        measured: dict[UnitAndPrecision, MeasuredUnit],
    ) -> bool:
        """Add what the units cost on this conversation; False if one of the ranks could not measure."""
        found: list[MeasuredUnit] | None = None
        try:
            found = self._meter.measure(units, kv.rows, kv.read, kv.round_trip)
        except Exception:
            logger.exception("krul: the damage of a turn's compression could not be measured")
        mine = None if found is None else [error.error for unit in found for error in unit.errors]
        errors = self._agree(mine, sum(len(unit) for unit, _ in units))
        if found is None or errors is None:
            return False
        values = iter(errors)
        for unit in found:
            agreed = self._meter.with_errors(unit, [next(values) for _ in unit.errors])
            key = (unit.option.unit, unit.option.precision)
            measured[key] = agreed
            self._ever_measured.add(key)
            if kv.is_exact:
                self._learn(key, agreed, kv.share)
        return True

    def _learn(self, key: UnitAndPrecision, unit: MeasuredUnit, share: float) -> None:
        if not all(error.error < math.inf for error in unit.errors):
            return
        logs = [math.log(max(error.error / share, _SMALLEST_ERROR)) for error in unit.errors]
        typical = self._typical.get(key)
        if typical is not None:
            logs = [
                old + _LEARNING_RATE * (new - old) for old, new in zip(typical.log_errors, logs, strict=True)
            ]
        self._typical[key] = _Typical(logs, unit.option.num_bytes)

    def next_probe(self, last_strategy: Strategy | None) -> Strategy | None:
        """The strategy whose damage, measured end to end, would teach most; None if nothing would.

        A single unit at some precision, or ``last_strategy`` as a whole.
        """
        strategies, candidates = [], []
        for (unit, precision), typical in self._typical.items():
            strategies.append(Strategy.of_unit(self._table.num_layers, unit, precision))
            candidates.append(self._meter.layer_errors(unit, precision, typical.errors()))
        if last_strategy is not None and all(key in self._typical for key in _keys_of(last_strategy)):
            strategies.append(last_strategy)
            candidates.append(
                tuple(
                    error
                    for unit, precision in _keys_of(last_strategy)
                    for error in self._meter.layer_errors(
                        unit, precision, self._typical[unit, precision].errors()
                    )
                )
            )
        chosen = self._table.next_probe(candidates)
        return None if chosen is None else strategies[chosen]


def errors_of(strategy: Strategy, errors: Mapping[int, float]) -> list[LayerError]:
    """The measured errors of a strategy's layers, each with its kind of damage."""
    return [
        LayerError(layer, DamageKind.of(unit, strategy.layers[layer].precision), errors[layer])
        for unit in strategy.units
        for layer in unit
        if layer in errors
    ]


def _keys_of(strategy: Strategy) -> list[UnitAndPrecision]:
    """The compressed units of a strategy; native layers alone cost nothing and need no measurement."""
    keys = [(unit, strategy.layers[unit[0]].precision) for unit in strategy.units]
    return [key for key in keys if len(key[0]) > 1 or key[1] is not Precision.NATIVE]
