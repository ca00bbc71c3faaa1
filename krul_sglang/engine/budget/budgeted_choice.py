"""Chooses strategies within an error budget; on each conversation it measures only likely choices."""

from __future__ import annotations

import itertools
import logging
import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.interface import ReadLayer
from krul_backend.strategy.budget import BudgetSelector
from krul_backend.strategy.interface import Evidence, LayerOption
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine.budget.damage import DamageMeter, LayerAndPrecision, MeasuredLayer, RoundTrip

logger = logging.getLogger(__name__)

Agree = Callable[[Sequence[float] | None, int], Sequence[float] | None]
"""Mean over tensor-parallel ranks of so many numbers each; None if one rank has none."""

SURVEY_TURNS = 4
SURVEY_INTERVAL = 32
"""All options are measured on the first ``SURVEY_TURNS`` turns, then on every ``SURVEY_INTERVAL``-th, and as
long as nothing is known of other conversations."""

_MAX_ROUNDS = 4
_LEARNING_RATE = 0.2

_SMALLEST_ERROR = 1e-12
"""Stands for no error at all, which has no logarithm."""


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
    """The mean of an option over earlier conversations: logarithm of the layer's error, bytes per token.

    The error is that of a whole conversation. Where a share of its tokens was stored, the error of that share
    is taken as that share of the error: rounding adds up over tokens.
    """

    log_error: float
    num_bytes: float

    def error(self, share: float = 1.0) -> float:
        return share * math.exp(self.log_error)


class BudgetedChoice:
    """Chooses the strategy with the fewest bytes whose measured damage stays within a limit in nats.

    Every layer at each of ``precisions`` is an option. Measuring every option of every turn would cost more
    than it is worth: only a survey turn does. On other turns errors are first taken from earlier
    conversations, a choice is made, the chosen options are measured on this conversation, and if they are
    worse than thought it is chosen again. What is chosen in the end was measured on this conversation; if no
    such choice is found in a few rounds, what was not measured is left out, and native KV, which costs
    nothing, takes its place.

    Ranks of one model call it for the same turns in the same order, and choose the same: errors go through
    ``agree``.
    """

    def __init__(
        self,
        meter: DamageMeter,
        table: SensitivityTable,
        *,
        native_token_bytes: float,
        precisions: Sequence[Precision],
        agree: Agree,
    ) -> None:
        self._meter = meter
        self._table = table
        self._native_token_bytes = native_token_bytes
        self._options = list(itertools.product(range(table.num_layers), precisions))
        self._agree = agree
        self._typical: dict[LayerAndPrecision, _Typical] = {}
        self._num_turns = 0

    def choose(self, kv: ConversationKV, limit: float) -> tuple[Strategy, float]:
        """The strategy for one conversation, and its predicted damage: at most ``limit`` nats.

        Native throughout, without damage, if it cannot be measured.
        """
        selector = BudgetSelector(limit, self._native_token_bytes)
        num_layers = self._table.num_layers
        native = Strategy.from_pairs(num_layers)
        number, self._num_turns = self._num_turns, self._num_turns + 1
        measured: dict[LayerAndPrecision, MeasuredLayer] = {}
        is_survey = number < SURVEY_TURNS or number % SURVEY_INTERVAL == 0 or not self._typical
        if is_survey and not self._measure(self._options, kv, measured):
            return native, 0.0
        for _ in range(_MAX_ROUNDS):
            options = _options_of(measured) + self._guesses(measured, kv.share)
            strategy = selector.select(Evidence(num_layers, options=options))
            unmeasured = [key for key in _compressed(strategy) if key not in measured]
            if unmeasured and not self._measure(unmeasured, kv, measured):
                return native, 0.0
            if not unmeasured or _damage_of(strategy, measured) <= limit:
                return strategy, _damage_of(strategy, measured)
        strategy = selector.select(Evidence(num_layers, options=_options_of(measured)))
        return strategy, _damage_of(strategy, measured)

    def _guesses(self, measured: Collection[LayerAndPrecision], share: float) -> list[LayerOption]:
        """Estimates from earlier conversations for the options that were not measured on this one."""
        return [
            self._meter.option(*key, typical.num_bytes, typical.error(share))
            for key, typical in self._typical.items()
            if key not in measured
        ]

    def _measure(
        self,
        options: Sequence[LayerAndPrecision],
        kv: ConversationKV,
        measured: dict[LayerAndPrecision, MeasuredLayer],
    ) -> bool:
        """Add what the options cost on this conversation; False if one of the ranks could not measure."""
        found: list[MeasuredLayer] | None = None
        try:
            found = self._meter.measure(options, kv.rows, kv.read, kv.round_trip)
        except Exception:
            logger.exception("krul: the damage of a turn's compression could not be measured")
        errors = self._agree(None if found is None else [each.error for each in found], len(options))
        if found is None or errors is None:
            return False
        for key, mine, error in zip(options, found, errors, strict=True):
            num_bytes = mine.option.num_bytes
            measured[key] = MeasuredLayer(self._meter.option(*key, num_bytes, error), error)
            if kv.is_exact and error < math.inf:
                self._learn(key, error / kv.share, num_bytes)
        return True

    def _learn(self, key: LayerAndPrecision, error: float, num_bytes: float) -> None:
        log_error = math.log(max(error, _SMALLEST_ERROR))
        typical = self._typical.get(key)
        if typical is not None:
            log_error = typical.log_error + _LEARNING_RATE * (log_error - typical.log_error)
        self._typical[key] = _Typical(log_error, num_bytes)

    def next_probe(self, last_strategy: Strategy | None) -> Strategy | None:
        """The strategy whose damage, measured end to end, would teach most; None if nothing would.

        A single layer at some precision, or ``last_strategy`` as a whole.
        """
        num_layers = self._table.num_layers
        strategies, candidates = [], []
        for layer, precision in self._typical:
            strategies.append(Strategy.of_unit(num_layers, (layer,), precision))
            candidates.append([self._typical_error((layer, precision))])
        if last_strategy is not None and all(key in self._typical for key in _compressed(last_strategy)):
            strategies.append(last_strategy)
            candidates.append([self._typical_error(key) for key in _compressed(last_strategy)])
        chosen = self._table.next_probe(candidates)
        return None if chosen is None else strategies[chosen]

    def _typical_error(self, key: LayerAndPrecision) -> LayerError:
        layer, precision = key
        return LayerError(layer, DamageKind.of(precision), self._typical[key].error())


def errors_of(strategy: Strategy, errors: Mapping[int, float]) -> list[LayerError]:
    """The measured errors of a strategy's layers, each with its kind of damage."""
    return [
        LayerError(layer, DamageKind.of(precision), errors[layer])
        for layer, precision in _compressed(strategy)
        if layer in errors
    ]


def _compressed(strategy: Strategy) -> list[LayerAndPrecision]:
    """The layers that are compressed; native ones cost nothing and need no measurement."""
    return [
        (layer, of_layer.precision)
        for layer, of_layer in enumerate(strategy.layers)
        if of_layer.precision is not Precision.NATIVE
    ]


def _options_of(measured: Mapping[LayerAndPrecision, MeasuredLayer]) -> list[LayerOption]:
    return [each.option for each in measured.values()]


def _damage_of(strategy: Strategy, measured: Mapping[LayerAndPrecision, MeasuredLayer]) -> float:
    return sum(measured[key].option.damage for key in _compressed(strategy))
