from __future__ import annotations

import math
from collections import Counter
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from benchmarks.quality.configuration import Configuration, Suite, Turns
from benchmarks.quality.conversation import BenchmarkError, Samples, compared, segment_bounds
from benchmarks.quality.methods import (
    Compression,
    Eviction,
    Method,
    Stored,
    StoreTurn,
    Turn,
    accumulated_attention,
    all_methods,
    num_kept_tokens,
    stored_bytes,
    visible_tokens,
)
from benchmarks.quality.model import HistoryModel, token_slice
from benchmarks.quality.protocol import Outcome, Played, Protocol
from benchmarks.quality.result import interval, row, summarize
from benchmarks.quality.teacher_forced import TeacherForced
from krul_backend.attention.rows import QueryRows, accumulate
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.strategy.strategy import Strategy
from krul_sglang.learning.model_kv import pooled, rotary_table
from tests.support.codec_builders import encode_all
from tests.support.tiny_model import random_llama

NUM_LAYERS = 4


@cache
def model() -> HistoryModel:
    return HistoryModel(
        random_llama(num_layers=NUM_LAYERS, hidden_size=64, head_dim=32, max_positions=256, init_std=0.2)
    )


@cache
def codec() -> ModelCodecs:
    return ModelCodecs(model().shape, NUM_LAYERS, rotary_table(model().model, 256))


def ids(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 64, (num_tokens,), generator=generator).tolist())


def conversation(seed: int = 0) -> TeacherForced:
    return TeacherForced("single", 128, ids(85, seed), (30, 37, 85), ids(20, seed + 1), 12, (14, 15))


def protocol() -> Protocol:
    return Protocol(model(), rows_per_turn=4)


@given(st.lists(st.integers(1, 60), min_size=1, max_size=8), st.integers(1, 32))
def test_segments_are_whole_pages_and_leave_less_than_one(turns: list[int], page_size: int) -> None:
    turn_ends = [sum(turns[: n + 1]) for n in range(len(turns))]
    bounds = segment_bounds(turn_ends, page_size)
    covered = [position for each in bounds if each is not None for position in range(*each)]
    assert covered == list(range(turn_ends[-1] // page_size * page_size))
    for turn_end, each in zip(turn_ends, bounds, strict=True):
        if each is not None:
            assert each[0] % page_size == each[1] % page_size == 0
            assert turn_end - page_size < each[1] <= turn_end


def test_divergence_is_that_of_the_definition() -> None:
    true, other = torch.tensor([[0.25, 0.75], [0.5, 0.5]]), torch.tensor([[0.75, 0.25], [0.5, 0.5]])
    samples = compared(true.log(), other.log())
    expected = 0.25 * math.log(0.25 / 0.75) + 0.75 * math.log(0.75 / 0.25)
    assert samples["kl"].tolist() == pytest.approx([expected, 0], rel=1e-6, abs=1e-12)
    assert samples["top1"].tolist() == [0, 1]


def test_tokens_after_a_history_are_those_of_one_forward() -> None:
    tokens = ids(50)
    whole = model().run(tokens, (), num_logits=10)
    before = model().run(tokens[:31], (), num_logits=1)
    after = model().run(tokens[31:], before.kv, num_logits=10)
    torch.testing.assert_close(after.logits, whole.logits, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.queries[3], whole.queries[3][31:], rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(after.kv[2].k, whole.kv[2].k[31:], rtol=1e-4, atol=1e-4)


def test_hidden_tokens_are_those_that_attention_does_not_reach() -> None:
    tokens, history = ids(60), model().run(ids(60)[:40], (), num_logits=1).kv
    all_visible = [torch.ones(2, 40, dtype=torch.bool)] * NUM_LAYERS
    plain = model().logits(tokens[40:], history, num_logits=20)
    torch.testing.assert_close(
        model().logits(tokens[40:], history, num_logits=20, visible=all_visible), plain, rtol=1e-4, atol=1e-4
    )
    visible = [torch.rand(2, 40, generator=torch.Generator().manual_seed(layer)) < 0.5 for layer in range(4)]
    hidden = model().logits(tokens[40:], history, num_logits=20, visible=visible)
    assert (hidden - plain).abs().max() > 0.01
    # What is hidden has no influence, whatever it is.
    changed = [
        type(kv)(
            torch.where(seen.T[..., None], kv.k, torch.randn_like(kv.k)),
            torch.where(seen.T[..., None], kv.v, torch.randn_like(kv.v)),
        )
        for kv, seen in zip(history, visible, strict=True)
    ]
    again = model().logits(tokens[40:], changed, num_logits=20, visible=visible)
    torch.testing.assert_close(again, hidden, rtol=1e-4, atol=1e-4)


def test_branches_are_what_each_would_be_alone() -> None:
    history = model().run(ids(40), (), num_logits=1).kv
    shared, branches = ids(5, seed=1), [ids(4, seed=2), ids(1, seed=3), ids(7, seed=4)]
    visible = [torch.rand(2, 40, generator=torch.Generator().manual_seed(layer)) < 0.7 for layer in range(4)]
    for seen in (None, visible):
        found = model().branch_logits(shared, branches, history, num_logits=[2, 1, 3], visible=seen)
        for branch, number, logits in zip(branches, (2, 1, 3), found, strict=True):
            alone = model().logits((*shared, *branch), history, num_logits=number, visible=seen)
            torch.testing.assert_close(logits, alone, rtol=1e-4, atol=1e-4)


def test_evicted_heads_keep_the_latest_and_those_that_got_most_attention() -> None:
    run = model().run(ids(40), (), num_logits=1)
    accumulated = accumulated_attention(run.queries, run.kv, model().kv_heads, model().scaling)
    for layer in accumulated:
        # Each of 40 queries of the two heads of a group gives away 1.
        torch.testing.assert_close(layer.sum(1), torch.full((2,), 80.0))
    for mask, layer in zip(visible_tokens(accumulated, 11), accumulated, strict=True):
        assert mask.sum(1).tolist() == [11, 11]
        assert mask[:, 35:].all()
        for head in range(2):
            kept, dropped = layer[head, :35][mask[head, :35]], layer[head, :35][~mask[head, :35]]
            assert kept.min() >= dropped.max()


@given(st.integers(1, 200), st.floats(1, 40))
def test_evicted_bytes_stay_within_the_ratio(num_tokens: int, ratio: float) -> None:
    shape = model().shape
    num_bytes = num_tokens * NUM_LAYERS * (shape.k_token_bytes + shape.v_token_bytes) / ratio
    kept = num_kept_tokens(num_tokens, num_bytes, shape, NUM_LAYERS)
    assert kept == num_tokens or stored_bytes(kept, shape, NUM_LAYERS) <= num_bytes
    assert kept == num_tokens or stored_bytes(kept + 1, shape, NUM_LAYERS) > num_bytes


ROWS = ("full", "int8", "int4", "int2", "krul r=0.5 native", "h2o 4.00x")


def methods() -> dict[str, Method | Eviction]:
    return {method.name: method for method in all_methods(codec(), 0.0) if method.name in ROWS}


def storing() -> list[Method]:
    return [method for method in methods().values() if isinstance(method, Method)]


@dataclass(frozen=True)
class Changed(Method):
    """Stores everything exactly but one channel of one layer's keys."""

    layer: int
    name: str = "changed"
    family: str = "changed"

    def start(self) -> StoreTurn:
        return self._store

    def _store(self, turn: Turn) -> Stored:
        segment = list(turn.segment)
        k, v = segment[self.layer].k.clone(), segment[self.layer].v
        k[:, 0, 0] += 4
        segment[self.layer] = LayerKV(k, v)
        return Stored(tuple(segment), 1)


@dataclass(frozen=True)
class Counting(Method):
    """Stores exactly, and takes one byte more for each turn."""

    name: str = "counting"
    family: str = "counting"

    def start(self) -> StoreTurn:
        seen: list[Turn] = []

        def store(turn: Turn) -> Stored:
            seen.append(turn)
            assert turn.start_token == sum(len(each.segment[0].k) for each in seen[:-1])
            return Stored(turn.segment, len(seen))

        return store


def mean(outcome: Outcome, name: str) -> float:
    return float(outcome.samples[name].mean())


def check(played: Played) -> None:
    outcomes = played.outcomes
    full_bytes = 80 * NUM_LAYERS * 256
    assert {outcome.num_tokens for outcome in outcomes.values()} == {80}
    assert outcomes["full"].num_bytes == full_bytes
    assert outcomes["krul r=0.5 native"].pairs.total() == outcomes["full"].num_segments == 3
    # Codes of 8, 4 and 2 bits, and fp16 offset and scale of each group of 32 values or 64 tokens.
    for name, bits in (("int8", 8), ("int4", 4), ("int2", 2)):
        assert bits / 16 * full_bytes < outcomes[name].num_bytes < (bits + 2) / 16 * full_bytes
    kl = {name: mean(outcome, "kl") for name, outcome in outcomes.items()}
    assert kl["full"] == 0 < kl["int8"] < kl["int4"] / 4 < kl["int2"] / 16
    assert mean(outcomes["full"], "top1") == 1 > mean(outcomes["int2"], "top1")
    assert torch.equal(outcomes["full"].samples["nll"], played.uncompressed["nll"])
    assert not torch.equal(outcomes["int2"].samples["nll"], played.uncompressed["nll"])


def test_a_history_stored_at_once() -> None:
    played = protocol().at_once(conversation(), list(methods().values()))
    assert tuple(played.outcomes) == ROWS
    check(played)
    h2o = played.outcomes["h2o 4.00x"]
    assert 0.2 * 80 * NUM_LAYERS * 256 < h2o.num_bytes <= 80 * NUM_LAYERS * 256 / 4
    assert mean(h2o, "kl") > mean(played.outcomes["int8"], "kl")


def test_a_history_stored_turn_by_turn() -> None:
    played = protocol().turn_by_turn(conversation(), storing())
    assert tuple(played.outcomes) == ROWS[:-1]
    check(played)


def test_turn_by_turn_a_turn_is_computed_on_what_was_restored() -> None:
    known: list[LayerKV] = []

    @dataclass(frozen=True)
    class Watching(Changed):
        def _store(self, turn: Turn) -> Stored:
            known.append(turn.kv[3])
            return super()._store(turn)

    for play in (protocol().at_once, protocol().turn_by_turn):
        play(conversation(), [Watching(layer=1)])
    once, each = known[:3], known[3:]
    # The first turn is the same; of the second, layer 3 saw what was left of layer 1's first 16 tokens.
    torch.testing.assert_close(each[0].k, once[0].k, rtol=0.02, atol=0.03)
    torch.testing.assert_close(each[1].k[:16], once[1].k[:16], rtol=0.02, atol=0.03)
    assert (each[1].k[30:] - once[1].k[30:]).abs().max() > 0.1


@pytest.mark.parametrize("layer", range(NUM_LAYERS))
def test_one_changed_layer_is_seen(layer: int) -> None:
    for play in (protocol().at_once, protocol().turn_by_turn):
        assert mean(play(conversation(), [Changed(layer)]).outcomes["changed"], "kl") > 1e-3


def test_a_method_has_a_state_of_its_own_in_each_conversation() -> None:
    for play in (protocol().at_once, protocol().turn_by_turn):
        for seed in (0, 1):
            outcome = play(conversation(seed), [Counting()]).outcomes["counting"]
            assert (outcome.num_bytes, outcome.num_segments, mean(outcome, "kl")) == (1 + 2 + 3, 3, 0)


def test_a_turn_is_what_a_server_knows_at_its_end() -> None:
    seen: list[Turn] = []

    @dataclass(frozen=True)
    class Watching(Method):
        name: str = "watching"
        family: str = "watching"

        def start(self) -> StoreTurn:
            def store(turn: Turn) -> Stored:
                seen.append(turn)
                return Stored(turn.segment, 0)

            return store

    run = model().run(conversation().history, (), num_logits=1)
    for play in (protocol().at_once, protocol().turn_by_turn):
        seen.clear()
        play(conversation(), [Watching()])
        assert [(turn.start_token, len(turn.segment[0].k)) for turn in seen] == [(0, 16), (16, 16), (32, 48)]
        assert [len(turn.kv[0].k) for turn in seen] == [30, 37, 85]
        assert seen[1].rows.positions.tolist() == [30, 32, 34, 36]
        assert [turn.statistics.num_rows for turn in seen] == [4, 8, 12]
        expected = torch.stack([layer[[30, 32, 34, 36]] for layer in run.queries])
        torch.testing.assert_close(seen[1].rows.queries, expected, rtol=0.05, atol=0.05)
        assert torch.equal(seen[2].segment[1].v, seen[2].kv[1].v[32:80])


@pytest.mark.parametrize("name", ["full", "int4", "krul r=0.5 native", "random r=0.25 int8"])
def test_a_segment_is_stored_as_the_codec_stores_its_units(name: str) -> None:
    kv = [pooled(layer) for layer in model().run(ids(48), (), num_logits=1).kv]
    rows = QueryRows(
        torch.randn(NUM_LAYERS, 2, 4, 32), torch.tensor([20, 47]), model().kv_heads, model().scaling
    )
    statistics = accumulate(rows, lambda layer: kv[layer].k)
    turn = Turn(16, token_slice(kv, 16, 48), tuple(kv), rows, statistics, 5, 48)
    (method,) = [each for each in all_methods(codec(), 0.0) if each.name == name]
    assert isinstance(method, Compression)
    stored = method.start()(turn)
    strategy = Strategy.from_pairs(NUM_LAYERS, stored.pairs, method.precision)
    encoding, blocks, decoder = encode_all(codec(), strategy, list(turn.segment), start_token=16)
    assert stored.num_bytes == sum(encoding.layer_num_bytes)
    for layer in range(NUM_LAYERS):
        expected = decoder.decode(layer, blocks, 0, 32)
        assert torch.equal(stored.segment[layer].k, expected.k)
        assert torch.equal(stored.segment[layer].v, expected.v)


def test_rows_have_names_of_their_own() -> None:
    names = [method.name for method in all_methods(codec(), 0.0)]
    assert len(set(names)) == len(names)
    assert {"full", "int2", "krul r=0.25 int8", "minicache r=0.5 int4", "h2o 16.00x"} <= set(names)


def samples(kl: list[float], nll: list[float], recall: list[float]) -> Samples:
    values = {"kl": kl, "nll": nll, "recall": recall, "top1": [1.0] * len(kl)}
    return {name: torch.tensor(each, dtype=torch.float64) for name, each in values.items()}


def made_row() -> dict[str, Any]:
    outcomes = [
        Outcome(samples([0.0, 0.2], [0.1, 0.3], [1, 0]), 80, 800, 3, Counter({(0, 1): 3})),
        Outcome(samples([0.4, 0.6], [0.5, 0.5], [0, 1]), 20, 1200, 1),
    ]
    uncompressed = [samples([0, 0], [0.1, 0.1], [1, 1]), samples([0, 0], [0.6, 0.6], [0, 0])]
    conversations = [conversation(), conversation(1)]
    return row(methods()["int4"], conversations, outcomes, uncompressed, token_bytes=100)


def test_a_row_states_means_differences_and_intervals() -> None:
    made = made_row()
    assert (made["kl"], made["nll"], made["recall"]) == pytest.approx((0.3, 0.35, 0.5))
    assert (made["nll_delta"], made["recall_delta"]) == pytest.approx((0.0, 0.0))
    assert made["kl_p95"] == pytest.approx(0.57)
    assert (made["bytes_per_token"], made["ratio"], made["bits"]) == (20, 5, 3.2)
    assert (made["questions"], made["answers_lost"], made["answers_won"]) == (4, 1, 1)
    assert made["pairs"] == [{"pair": [0, 1], "share": 0.75}]
    assert made["groups"]["single"]["conversations"] == 2
    assert made["samples"]["nll_delta"] == pytest.approx([0.1, -0.1])
    assert made["ci"]["kl"] == pytest.approx([0.1, 0.5])
    assert made["ci"]["nll_delta"] == pytest.approx([-0.1, 0.1])


def test_intervals_cover_the_mean_of_what_the_sources_are_drawn_from() -> None:
    generator = torch.Generator().manual_seed(1)
    covered = 0
    for _ in range(40):
        source_means = torch.randn(20, generator=generator)
        # ten values of a source hardly differ: counted one by one they would promise far too much
        values = (source_means[:, None] + 0.01 * torch.randn(20, 10, generator=generator)).flatten()
        found = interval(values.tolist(), [str(place // 10) for place in range(200)])
        assert found is not None
        covered += found[0] <= 0 <= found[1]
    assert covered >= 32
    assert interval([1.0, 2.0], ["a", "a"]) is None
    assert interval([0.0] * 3, ["a", "b", "c"]) == [0, 0]


def test_a_summary_has_quantiles_in_the_place_of_samples() -> None:
    result: dict[str, Any] = {
        "configuration": {"gamma": 0.0},
        "conversations": [{"group": "single", "history_tokens": 128}] * 2,
        "rows": [made_row() | {"layer_ratio": None}],
    }
    kept = summarize(result)
    assert kept["conversations"] == [{"group": "single", "history_tokens": 128, "count": 2}]
    (of_row,) = kept["rows"]
    assert "layer_ratio" not in of_row
    assert set(of_row["samples"]) == {"kl"}
    assert of_row["samples"]["kl"]["median"] == pytest.approx(0.3)


def test_rows_are_chosen_by_pattern_and_eviction_has_no_turns() -> None:
    rows = all_methods(codec(), 0.0)
    chosen = Configuration(methods=("krul r=0.5*", "h2o*"), turns=Turns.EACH).selected(rows)
    assert [method.name for method in chosen] == ["krul r=0.5 native", "krul r=0.5 int8", "krul r=0.5 int4"]
    with pytest.raises(BenchmarkError, match="no row matches"):
        Configuration(methods=("zip",)).selected(rows)
    with pytest.raises(BenchmarkError, match="--data"):
        Configuration(suite=Suite.AGENT)
    with pytest.raises(BenchmarkError, match="--learn-from"):
        Configuration(learn_from=("web",))
    for changes, message in (
        ({"items": 0}, "--items"),
        ({"threads": 0}, "--threads"),
        ({"lengths": (8,)}, "256"),
    ):
        with pytest.raises(BenchmarkError, match=message):
            Configuration(**changes)
