"""Choices within an error budget on conversations whose damage is known by construction."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.interface import LayerKV
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine.budget.budgeted_choice import (
    SURVEY_INTERVAL,
    SURVEY_TURNS,
    BudgetedChoice,
    ConversationKV,
    errors_of,
)
from krul_sglang.engine.budget.damage import DamageMeter

NUM_LAYERS, NUM_TOKENS, NATIVE_BYTES = 3, 24, 64.0
PRECISIONS = (Precision.INT8, Precision.INT4)
NOISE = {Precision.INT8: 1e-3, Precision.INT4: 3e-2}
NUM_OPTIONS = NUM_LAYERS * len(PRECISIONS)


class Conversation:
    """KV, rows, and round trips that add ``factor`` times the noise of the precision; counts them."""

    def __init__(self, factor: float = 1.0, factor_of_layer: dict[int, float] | None = None) -> None:
        generator = torch.Generator().manual_seed(4)
        self.layers = [
            LayerKV(
                torch.randn(NUM_TOKENS, 1, 8, generator=generator),
                torch.randn(NUM_TOKENS, 1, 8, generator=generator),
            )
            for _ in range(NUM_LAYERS)
        ]
        self.rows = QueryRows(
            torch.randn(NUM_LAYERS, 6, 1, 8, generator=generator),
            torch.arange(NUM_TOKENS - 6, NUM_TOKENS),
            torch.zeros(1, dtype=torch.int64),
            0.35,
        )
        self._factors = dict.fromkeys(range(NUM_LAYERS), factor) | (factor_of_layer or {})
        self.trips: list[tuple[int, Precision]] = []

    @property
    def kv(self) -> ConversationKV:
        return ConversationKV(self.rows, self.layers.__getitem__, self.round_trip)

    def round_trip(self, layer: int, precision: Precision, kv: LayerKV) -> tuple[LayerKV, float]:
        self.trips.append((layer, precision))
        generator = torch.Generator().manual_seed(5)
        size = NOISE[precision] * self._factors[layer]
        bits = precision.bits
        assert bits is not None
        return LayerKV(kv.k, kv.v + size * torch.randn(kv.v.shape, generator=generator)), 2 * bits


def known_table() -> SensitivityTable:
    """Every layer costs about one nat per unit of error, and that is known well."""
    table = SensitivityTable("m", NUM_LAYERS)
    for _ in range(60):
        for layer in range(NUM_LAYERS):
            for kind in DamageKind:
                table.update([LayerError(layer, kind, 0.01)], 0.01)
    return table


class Chooser:
    """A choice for one rank, with its meter and what it asked the other ranks."""

    def __init__(self, limit: float, other_rank: float | None = 1.0) -> None:
        self.meter = DamageMeter(known_table())
        self.other_rank = other_rank
        self.limit = limit
        self.choice = BudgetedChoice(
            self.meter,
            self.meter.table,
            native_token_bytes=NATIVE_BYTES,
            precisions=PRECISIONS,
            agree=self.agree,
        )

    def agree(self, values: Sequence[float] | None, count: int) -> Sequence[float] | None:
        """Another rank measures ``other_rank`` times as much, or nothing at all."""
        assert values is None or len(values) == count
        if values is None or self.other_rank is None:
            return None
        return [value * (1 + self.other_rank) / 2 for value in values]

    def choose(self, conversation: Conversation, **changes: Any) -> Strategy:
        kv = dataclasses.replace(conversation.kv, **changes)
        strategy, damage = self.choice.choose(kv, self.limit)
        assert damage <= self.limit
        if self.other_rank == 1:
            trips = list(conversation.trips)
            assert damage == pytest.approx(self.damage(strategy, conversation))
            conversation.trips = trips
        return strategy

    def damage(self, strategy: Strategy, conversation: Conversation) -> float:
        """What the strategy's layers cost on this conversation, measured anew."""
        layers = [
            (layer, precision)
            for layer, precision in enumerate(precisions(strategy))
            if precision is not Precision.NATIVE
        ]
        measured = self.meter.measure(
            layers, conversation.rows, conversation.kv.read, conversation.round_trip
        )
        return sum(each.option.damage for each in measured)


def precisions(strategy: Strategy) -> list[Precision]:
    return [layer.precision for layer in strategy.layers]


def test_first_turns_measure_every_option_and_later_ones_only_what_is_chosen() -> None:
    chooser = Chooser(limit=0.03)
    counts = []
    for _ in range(SURVEY_INTERVAL + 1):
        conversation = Conversation()
        strategy = chooser.choose(conversation)
        counts.append(len(conversation.trips))
        assert chooser.damage(strategy, conversation) <= chooser.limit
    assert counts[:SURVEY_TURNS] == [NUM_OPTIONS] * SURVEY_TURNS
    assert set(counts[SURVEY_TURNS:SURVEY_INTERVAL]) == {NUM_LAYERS}
    assert counts[SURVEY_INTERVAL] == NUM_OPTIONS


def test_every_option_is_measured_as_long_as_nothing_is_known() -> None:
    """Here the first turns could not be measured on another rank."""
    chooser = Chooser(limit=0.03, other_rank=None)
    for _ in range(SURVEY_TURNS + 1):
        assert chooser.choose(Conversation()).is_lossless
    chooser.other_rank = 1.0
    counts = []
    for _ in range(2):
        conversation = Conversation()
        chooser.choose(conversation)
        counts.append(len(conversation.trips))
    assert counts == [NUM_OPTIONS, NUM_LAYERS]


def test_a_larger_budget_stores_less() -> None:
    chosen = [precisions(Chooser(limit).choose(Conversation())) for limit in (1e-9, 2e-4, 0.1)]
    assert chosen == [[Precision.NATIVE] * 3, [Precision.INT8] * 3, [Precision.INT4] * 3]


def test_a_conversation_worse_than_the_typical_one_is_stored_with_more_care() -> None:
    chooser = Chooser(limit=0.03)
    for _ in range(SURVEY_TURNS + 3):
        assert precisions(chooser.choose(Conversation())) == [Precision.INT4] * 3
    hard = Conversation(factor_of_layer={1: 20.0})
    strategy = chooser.choose(hard)
    assert precisions(strategy) == [Precision.INT4, Precision.INT8, Precision.INT4]
    assert len(hard.trips) < NUM_OPTIONS
    assert chooser.damage(strategy, hard) <= chooser.limit


def test_a_conversation_where_everything_is_worse_ends_native_and_not_over_the_limit() -> None:
    chooser = Chooser(limit=0.03)
    for _ in range(SURVEY_TURNS):
        chooser.choose(Conversation())
    hard = Conversation(factor=1e4)
    strategy = chooser.choose(hard)
    assert chooser.damage(strategy, hard) <= chooser.limit
    assert precisions(strategy) == [Precision.NATIVE] * 3


def test_a_rank_whose_heads_suffer_more_counts() -> None:
    assert precisions(Chooser(0.03).choose(Conversation())) == [Precision.INT4] * 3
    assert precisions(Chooser(0.03, other_rank=1e3).choose(Conversation())) == [Precision.INT8] * 3


def test_what_cannot_be_measured_on_every_rank_is_stored_native() -> None:
    assert Chooser(0.03, other_rank=None).choose(Conversation()).is_lossless
    broken = Conversation()
    broken.layers[1] = LayerKV(broken.layers[1].k[:3], broken.layers[1].v[:3])  # rows reach beyond it
    assert Chooser(0.03).choose(broken).is_lossless


BETWEEN = 5e-4
"""A limit that whole conversations keep with INT8, and a tenth of one with INT4."""


def test_what_is_known_of_whole_conversations_is_guessed_for_a_share_of_one() -> None:
    """A tenth of the tokens is expected to cost a tenth: so the coarser option is tried at once."""
    chooser = Chooser(BETWEEN)
    for _ in range(SURVEY_TURNS):
        assert precisions(chooser.choose(Conversation())) == [Precision.INT8] * 3
    short = Conversation(factor=0.1**0.5)
    assert precisions(chooser.choose(short, share=0.1)) == [Precision.INT4] * 3
    assert len(short.trips) == NUM_LAYERS


@pytest.mark.parametrize(("is_exact", "num_measured"), [(False, NUM_LAYERS), (True, 2 * NUM_LAYERS)])
def test_kv_that_came_back_lossy_says_nothing_about_others(is_exact: bool, num_measured: int) -> None:
    """Rounded before, it has next to no error: learned from, it would make INT4 look harmless."""
    chooser = Chooser(BETWEEN)
    for _ in range(SURVEY_TURNS):
        chooser.choose(Conversation())
    for _ in range(SURVEY_TURNS, SURVEY_INTERVAL + 1):
        chooser.choose(Conversation(factor=1e-4), is_exact=is_exact)
    conversation = Conversation()
    assert precisions(chooser.choose(conversation)) == [Precision.INT8] * 3
    assert len(conversation.trips) == num_measured


def test_probes_start_where_nothing_is_known() -> None:
    table = SensitivityTable("m", NUM_LAYERS)
    choice = BudgetedChoice(
        DamageMeter(table),
        table,
        native_token_bytes=NATIVE_BYTES,
        precisions=PRECISIONS,
        agree=lambda values, count: values,
    )
    assert choice.next_probe(None) is None
    conversation = Conversation()
    choice.choose(conversation.kv, 0.03)
    probed: set[int] = set()
    for _ in range(20):
        strategy = choice.next_probe(None)
        assert strategy is not None
        errors = {n: 1e-3 for n, each in enumerate(precisions(strategy)) if each is not Precision.NATIVE}
        probed |= set(errors)
        table.update(errors_of(strategy, errors), 1e-3)
    assert probed == {0, 1, 2}
    assert all(table.confidence(layer, DamageKind.ROUNDING) > 0 for layer in range(NUM_LAYERS))


def test_measured_errors_get_the_kind_of_their_precision() -> None:
    strategy = Strategy.from_pairs(NUM_LAYERS, [], [Precision.INT0, Precision.INT4, Precision.NATIVE])
    found = {error.layer: error.kind for error in errors_of(strategy, {0: 0.1, 1: 0.2})}
    assert found == {0: DamageKind.MERGING, 1: DamageKind.ROUNDING}
