from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.interface import LayerKV
from krul_backend.errors import StrategyError
from krul_backend.strategy.sensitivity import DamageKind, LayerError, SensitivityTable
from krul_backend.strategy.strategy import Precision
from krul_sglang.engine.budget.damage import (
    DamageMeter,
    attention_output,
    attention_output_error,
)

NUM_LAYERS, NUM_TOKENS, NUM_ROWS, QUERY_HEADS, KV_HEADS, HEAD_DIM, V_HEAD_DIM = 3, 12, 5, 4, 2, 8, 6
SCALING = HEAD_DIM**-0.5


def make_kv(num_layers: int = NUM_LAYERS, seed: int = 0) -> list[LayerKV]:
    generator = torch.Generator().manual_seed(seed)
    return [
        LayerKV(
            torch.randn(NUM_TOKENS, KV_HEADS, HEAD_DIM, generator=generator).bfloat16(),
            torch.randn(NUM_TOKENS, KV_HEADS, V_HEAD_DIM, generator=generator).bfloat16(),
        )
        for _ in range(num_layers)
    ]


def make_rows(num_layers: int = NUM_LAYERS, num_rows: int = NUM_ROWS) -> QueryRows:
    generator = torch.Generator().manual_seed(1)
    return QueryRows(
        queries=torch.randn(num_layers, num_rows, QUERY_HEADS, HEAD_DIM, generator=generator),
        positions=torch.arange(NUM_TOKENS - num_rows, NUM_TOKENS),
        kv_heads=torch.arange(QUERY_HEADS) // (QUERY_HEADS // KV_HEADS),
        scaling=SCALING,
    )


def damaged(kv: LayerKV, amount: float) -> LayerKV:
    generator = torch.Generator().manual_seed(2)
    noise = [amount * torch.randn(x.shape, generator=generator) for x in (kv.k, kv.v)]
    return LayerKV((kv.k + noise[0]).to(kv.k.dtype), (kv.v + noise[1]).to(kv.v.dtype))


def naive_output(rows: QueryRows, layer: int, row: int, head: int, kv: LayerKV) -> torch.Tensor:
    """One row of one head in float64, token by token."""
    end = int(rows.positions[row]) + 1
    kv_head = int(rows.kv_heads[head])
    query = rows.queries[layer, row, head].double()
    weights = torch.stack([(query @ kv.k[t, kv_head].double() * rows.scaling).exp() for t in range(end)])
    values = kv.v[:end, kv_head].double()
    return (weights[:, None] * values).sum(0) / weights.sum()


def naive_error(rows: QueryRows, layer: int, kept: range, true: LayerKV, decoded: LayerKV) -> float:
    numerator = denominator = 0.0
    for row in kept:
        for head in range(QUERY_HEADS):
            out = naive_output(rows, layer, row, head, true)
            numerator += float((out - naive_output(rows, layer, row, head, decoded)).square().sum())
            denominator += float(out.square().sum())
    return numerator / denominator


def error_of(rows: QueryRows, true: LayerKV, decoded: LayerKV) -> float:
    return attention_output_error(rows.queries[0], rows.positions, rows.kv_heads, rows.scaling, true, decoded)


def test_the_error_is_that_of_a_naive_attention() -> None:
    rows, kv = make_rows(), make_kv()[0]
    other = damaged(kv, 0.3)
    assert error_of(rows, kv, other) == pytest.approx(
        naive_error(rows, 0, range(NUM_ROWS), kv, other), rel=1e-4
    )


@pytest.mark.parametrize("block_bytes", [1, 4 * NUM_TOKENS * (NUM_ROWS + HEAD_DIM + V_HEAD_DIM) * 3])
def test_every_query_head_counts_whatever_the_memory(
    block_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One head, or three, at a time: damage to what a single query head looks at is seen."""
    monkeypatch.setattr("krul_backend.attention.rows.CPU_BLOCK_BYTES", block_bytes)
    rows, kv = make_rows(), make_kv()[0]
    output = attention_output(rows.queries[0], rows.positions, rows.kv_heads, rows.scaling, kv)
    for head in range(QUERY_HEADS):
        for row in range(NUM_ROWS):
            expected = naive_output(rows, 0, row, head, kv)
            torch.testing.assert_close(output[row, head].double(), expected, rtol=1e-4, atol=1e-4)
    # Only the last query head of its group looks at token 3 with full attention.
    queries = torch.zeros_like(rows.queries[0])
    queries[:, QUERY_HEADS - 1] = 50 * kv.k[3, KV_HEADS - 1].float()
    values = kv.v.clone()
    values[3, KV_HEADS - 1] = 0
    looking = QueryRows(queries[None], rows.positions, rows.kv_heads, rows.scaling)
    assert error_of(looking, kv, LayerKV(kv.k, values)) > 0.3


def test_no_damage_is_no_error_and_lost_values_are_an_error_of_one() -> None:
    rows, kv = make_rows(), make_kv()[0]
    assert error_of(rows, kv, kv) == 0
    assert error_of(rows, kv, LayerKV(kv.k, torch.zeros_like(kv.v))) == pytest.approx(1)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_kv_that_is_not_finite_is_an_infinite_error(bad: float) -> None:
    rows, kv = make_rows(), make_kv()[0]
    values = kv.v.clone()
    values[3, 1, 2] = bad
    assert error_of(rows, kv, LayerKV(kv.k, values)) == math.inf


@settings(max_examples=30, deadline=None)
@given(st.floats(1e-2, 1.0), st.floats(2.0, 4.0))
def test_more_damage_to_the_values_is_more_error(amount: float, factor: float) -> None:
    rows, kv = make_rows(), make_kv()[0]
    generator = torch.Generator().manual_seed(3)
    noise = torch.randn(kv.v.shape, generator=generator)
    errors = [
        error_of(rows, kv, LayerKV(kv.k, kv.v.float() + size * noise)) for size in (amount, amount * factor)
    ]
    assert errors[1] == pytest.approx(errors[0] * factor**2, rel=1e-3)


def test_tokens_after_a_row_do_not_count() -> None:
    rows, kv = make_rows(), make_kv()[0]
    rows = QueryRows(rows.queries, torch.full((NUM_ROWS,), 7), rows.kv_heads, rows.scaling)
    late = LayerKV(kv.k.clone(), kv.v.clone())
    late.k[8:] = late.v[8:] = 9.0
    assert error_of(rows, kv, late) == 0


AMOUNTS = {Precision.INT8: 0.01, Precision.INT4: 0.1, Precision.INT0: 0.5}


class FakeStorage:
    """Round trips that add noise by precision, and counts of what was asked."""

    def __init__(self) -> None:
        self.kv = make_kv()
        self.reads: list[int] = []
        self.trips: list[tuple[int, Precision]] = []

    def read(self, layer: int) -> LayerKV:
        self.reads.append(layer)
        return self.kv[layer]

    def round_trip(self, layer: int, precision: Precision, kv: LayerKV) -> tuple[LayerKV, float]:
        assert kv.k.data_ptr() == self.kv[layer].k.data_ptr()
        self.trips.append((layer, precision))
        bits = precision.bits
        assert bits is not None
        return damaged(kv, AMOUNTS[precision]), 1.5 + bits


def test_the_meter_measures_each_layer_at_each_precision() -> None:
    storage = FakeStorage()
    rows = make_rows()
    table = SensitivityTable("m", NUM_LAYERS)
    table.update([LayerError(1, DamageKind.MERGING, 0.1)], 0.03)
    meter = DamageMeter(table, max_rows=3, deviations=0.5)
    options = [(layer, precision) for layer in (2, 1) for precision in AMOUNTS]
    measured = meter.measure(options, rows, storage.read, storage.round_trip)
    assert storage.reads == [2, 1]
    assert storage.trips == options == [(m.option.layer, m.option.precision) for m in measured]
    last_rows = range(NUM_ROWS - 3, NUM_ROWS)
    for m in measured:
        layer, precision = m.option.layer, m.option.precision
        assert m.option.num_bytes == 1.5 + (precision.bits or 0)
        kv = storage.kv[layer]
        expected = naive_error(rows, layer, last_rows, kv, damaged(kv, AMOUNTS[precision]))
        assert m.error == pytest.approx(expected, rel=1e-3)
        kind = DamageKind.MERGING if precision is Precision.INT0 else DamageKind.ROUNDING
        assert m.option.damage == table.predict(LayerError(layer, kind, m.error), 0.5)
        assert m.option == meter.option(layer, precision, m.option.num_bytes, m.error)
    assert meter.measure([], rows, storage.read, storage.round_trip) == []


def test_a_round_trip_that_breaks_numbers_rules_the_option_out() -> None:
    storage = FakeStorage()

    def broken(layer: int, precision: Precision, kv: LayerKV) -> tuple[LayerKV, float]:
        return LayerKV(kv.k * math.nan, kv.v), 1

    meter = DamageMeter(SensitivityTable("m", NUM_LAYERS))
    options = [(layer, Precision.INT4) for layer in range(NUM_LAYERS)]
    measured = meter.measure(options, make_rows(), storage.read, broken)
    assert [m.option.damage for m in measured] == [math.inf] * NUM_LAYERS


def test_rows_that_do_not_fit_are_refused() -> None:
    storage = FakeStorage()
    meter = DamageMeter(SensitivityTable("m", NUM_LAYERS))
    rows = make_rows()
    options = [(0, Precision.INT4)]
    beyond = QueryRows(rows.queries, rows.positions + 1, rows.kv_heads, rows.scaling)
    with pytest.raises(StrategyError, match="position 12 of 12 tokens"):
        meter.measure(options, beyond, storage.read, storage.round_trip)
    with pytest.raises(StrategyError, match="rows of 2 layers for 3 layers"):
        meter.measure(options, make_rows(num_layers=2), storage.read, storage.round_trip)
    with pytest.raises(StrategyError, match="without query rows"):
        meter.measure(options, make_rows(num_rows=0), storage.read, storage.round_trip)
    with pytest.raises(StrategyError, match="on 0 rows"):
        DamageMeter(SensitivityTable("m", 1), max_rows=0)
