from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig, LlamaForCausalLM

from benchmarks.pages.tables import quality_table
from benchmarks.quality.configuration import BenchmarkError, Configuration, Suite, Turns
from benchmarks.quality.conversation import mean_divergence, segment_bounds
from benchmarks.quality.damage import LearnedDamage
from benchmarks.quality.eviction import (
    accumulated_attention,
    num_kept_tokens,
    stored_bytes,
    visible_tokens,
)
from benchmarks.quality.methods import (
    SLERP,
    Compression,
    Eviction,
    Region,
    all_methods,
    reference,
)
from benchmarks.quality.model import HistoryModel, pooled
from benchmarks.quality.protocol import PAGE_SIZE, Outcome, Protocol
from benchmarks.quality.result import row, summarize
from benchmarks.quality.storage import StoredHistory, token_slice
from benchmarks.quality.teacher_forced import TeacherForced
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.fixed import FixedSelector
from krul_backend.strategy.interface import Evidence
from krul_backend.strategy.strategy import Precision, Strategy

NUM_LAYERS = 4


@cache
def model() -> HistoryModel:
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=64,
        intermediate_size=64,
        num_hidden_layers=NUM_LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=256,
        initializer_range=0.2,
    )
    torch.manual_seed(3)
    return HistoryModel(LlamaForCausalLM(config).train(False))


@cache
def codecs() -> dict[str, SegmentCodec]:
    return {SLERP: SegmentCodec(model().shape, NUM_LAYERS, model().rotary_table(256))}


def ids(num_tokens: int, seed: int = 0) -> tuple[int, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(torch.randint(0, 64, (num_tokens,), generator=generator).tolist())


def conversation(seed: int = 0) -> TeacherForced:
    return TeacherForced("single", 128, ids(85, seed), (30, 37, 85), ids(20, seed + 1), 12, (14, 15))


def protocol() -> Protocol:
    damage = LearnedDamage(model(), codecs(), SLERP, PAGE_SIZE, rows_per_turn=4)
    return Protocol(model(), codecs(), 4, damage.measure)


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
    true, other = torch.tensor([[0.25, 0.75]]), torch.tensor([[0.5, 0.5]])
    expected = 0.25 * math.log(0.25 / 0.5) + 0.75 * math.log(0.75 / 0.5)
    assert mean_divergence(true.log(), other.log()) == pytest.approx(expected, rel=1e-6)
    assert mean_divergence(true, true) == 0


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


def test_generation_is_the_argmax_of_one_forward_after_the_other() -> None:
    history = model().run(ids(40), (), num_logits=1).kv
    prompt = ids(9, seed=5)
    generated, logits = model().generate(prompt, history, max_new_tokens=6, end_ids=frozenset())
    assert logits.shape == (9, 64)
    for number in range(6):
        expected = model().logits((*prompt, *generated[:number]), history, num_logits=1)[0].argmax()
        assert generated[number] == expected
    shorter, _ = model().generate(prompt, history, max_new_tokens=6, end_ids=frozenset(generated[2:3]))
    assert shorter == generated[: generated.index(generated[2])]


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


def test_units_stored_apart_are_the_strategy_stored_as_a_whole() -> None:
    kv = [pooled(layer) for layer in model().run(ids(48), (), num_logits=1).kv]
    history = StoredHistory(codecs())
    for start, end in ((0, 32), (32, 48)):
        history.add_segment(token_slice(kv, start, end))
    precisions = [Precision.INT4, Precision.NATIVE, Precision.INT4, Precision.INT8]
    strategy = Strategy.from_pairs(NUM_LAYERS, [(0, 2)], precisions)
    restored = history.restore(SLERP, [strategy, strategy])
    num_bytes = 0
    for start, end in ((0, 32), (32, 48)):
        segment = token_slice(kv, start, end)
        encoding = codecs()[SLERP].prepare(
            strategy, segment.__getitem__, start_token=start, num_tokens=end - start
        )
        num_bytes += sum(encoding.layer_num_bytes)
        blocks: dict[int, torch.Tensor] = {}
        for unit in strategy.units:
            encoded = codecs()[SLERP].encode_unit(encoding, unit, [segment[layer] for layer in unit])
            blocks |= dict(zip(unit, encoded, strict=True))
        decoder = codecs()[SLERP].open(encoding.params, start_token=start, num_tokens=end - start)
        for layer in range(NUM_LAYERS):
            decoded = decoder.decode(layer, blocks, 0, end - start)
            assert torch.equal(decoded.k, restored.kv[layer].k[start:end])
            assert torch.equal(decoded.v, restored.kv[layer].v[start:end])
    assert restored.num_bytes == num_bytes


def methods() -> list[Compression | Eviction]:
    return [
        method
        for method in all_methods(256, 0.0, (3,), (SLERP,))
        if method.name in ("full", "int8", "int2", "krul r=0.5 native", "budget 0.01", "h2o 4.00x")
    ]


def check(outcomes: dict[str, Outcome], played: Sequence[str]) -> None:
    assert list(outcomes) == list(played)
    full_bytes = 80 * NUM_LAYERS * 256
    assert {outcome.num_tokens for outcome in outcomes.values()} == {80}
    assert outcomes["full"].num_bytes == full_bytes
    assert outcomes["int2"].num_bytes < outcomes["int8"].num_bytes < full_bytes
    kl = {name: outcome.measures["kl"] for name, outcome in outcomes.items()}
    assert kl["full"] == 0 < kl["int8"] < kl["int2"]
    assert outcomes["krul r=0.5 native"].pairs.total() == outcomes["full"].num_segments == 3
    assert outcomes["budget 0.01"].num_bytes <= full_bytes


def test_a_history_stored_at_once() -> None:
    outcomes = protocol().at_once(conversation(), methods()).outcomes
    check(outcomes, [method.name for method in methods()])
    assert outcomes["h2o 4.00x"].num_bytes <= outcomes["full"].num_bytes / 4
    assert outcomes["h2o 4.00x"].measures["kl"] > outcomes["int8"].measures["kl"]


def test_a_history_stored_turn_by_turn() -> None:
    chosen = [method for method in methods() if isinstance(method, Compression)]
    outcomes = protocol().turn_by_turn(conversation(), chosen).outcomes
    check(outcomes, [method.name for method in chosen])


def test_probes_teach_the_table() -> None:
    damage = LearnedDamage(model(), codecs(), SLERP, PAGE_SIZE, rows_per_turn=4)
    damage.learn((conversation(seed) for seed in range(10, 20)), num_probes=6)
    assert damage.num_probes == 6


def test_split_rows_share_the_pairs_between_them() -> None:
    evidence = Evidence(NUM_LAYERS)
    shared = {
        region: Compression(
            "row",
            "row",
            FixedSelector(1.0),
            Precision.NATIVE,
            region=region,
            recall_layers=frozenset((3,)),
        ).strategy(evidence)
        for region in Region
    }
    assert shared[Region.ALL].pairs == ((0, 1), (2, 3))
    assert shared[Region.APART].pairs == ((0, 1),)
    assert shared[Region.INSIDE].pairs == ((2, 3),)


def test_rows_have_names_of_their_own_and_all_precisions() -> None:
    names = [method.name for method in all_methods(256, 0.0, (3,), (SLERP, "predicted"))]
    assert len(set(names)) == len(names)
    assert {"predicted r=0.5 int4", "krul r=0.25 int8", "random r=0.5 native, inside"} <= set(names)
    assert not any("inside" in method.name for method in all_methods(256, 0.0, (), (SLERP,)))


def test_a_row_states_means_pairs_and_samples() -> None:
    outcomes = [
        Outcome({"recall": 1.0, "nll": 0.1, "kl": 0.0}, 80, 800, 3, Counter({(0, 1): 3}), Counter()),
        Outcome({"recall": 0.0, "nll": 0.3, "kl": 0.2}, 20, 1200, 1, Counter(), Counter()),
    ]
    made = row(methods()[0], [conversation(), conversation(1)], outcomes, lambda tokens: 100 * tokens)
    assert (made["recall"], made["nll"], made["bytes_per_token"], made["ratio"]) == (0.5, 0.2, 20, 5)
    assert made["pairs"] == [{"pair": [0, 1], "share": 0.75}]
    assert made["groups"]["single"]["conversations"] == 2
    assert made["samples"]["nll"] == [0.1, 0.3]

    result: dict[str, Any] = {
        "configuration": {"gamma": 0.0},
        "conversations": [
            {"group": "single", "history_tokens": 128},
            {"group": "single", "history_tokens": 64},
        ],
        "probes": 4,
        "rows": [made],
    }
    kept = summarize(result)
    table = quality_table(kept)
    assert "| full | 20 | 5.00x | 50.0% | 0.2000 | 0.1000 | 0+1 (75%) |" in table
    assert "2 held-out conversations, the bundled model, histories up to 128 tokens" in table
    (of_full,) = kept["rows"]
    assert set(of_full["samples"]) == {"nll", "kl"}
    assert of_full["samples"]["nll"] == pytest.approx(
        {"n": 2, "min": 0.1, "q25": 0.15, "median": 0.2, "q75": 0.25, "max": 0.3}
    )
    assert (of_full["answers_lost"], of_full["answers_won"]) == (0, 0)


def test_a_summary_counts_answers_against_full_kv_and_keeps_the_pairs_that_are_drawn() -> None:
    def made(name: str, recall: list[float], layer_ratio: float | None) -> dict[str, Any]:
        pairs = [{"pair": [0, upper], "share": 0.1} for upper in range(1, 6)]
        return {
            "name": name,
            "region": "all",
            "precision": "native",
            "layer_ratio": layer_ratio,
            "limit": None,
            "allowed": None,
            "conversations": 3,
            "pairs": pairs,
            "groups": {"single": {"conversations": 3, "recall": 0.5, "ratio": 2.0}},
            "samples": {"recall": recall, "kl": [0.0, 0.0, 0.0]},
        }

    rows = [made("full", [1.0, 1.0, 0.0], 0.25), made("half", [0.0, 1.0, 1.0], 0.5)]
    full, half = summarize({"rows": rows, "conversations": []})["rows"]
    assert (full["answers_lost"], full["answers_won"]) == (0, 0)
    assert (half["answers_lost"], half["answers_won"]) == (1, 1)
    assert (len(full["pairs"]), len(half["pairs"])) == (3, 5)
    assert half["groups"] == {"single": {"recall": 0.5}}
    assert not {"limit", "allowed", "conversations"} & set(half)


def test_rows_are_chosen_by_pattern_and_eviction_has_no_turns() -> None:
    rows = all_methods(256, 0.0, (), (SLERP,))
    chosen = Configuration(methods=("krul r=0.5*", "h2o*"), turns=Turns.EACH).selected(rows)
    assert [method.name for method in chosen] == [
        "krul r=0.5 native",
        "krul r=0.5 int8",
        "krul r=0.5 int4",
    ]
    with pytest.raises(BenchmarkError, match="no row matches"):
        Configuration(methods=("zip",)).selected(rows)
    with pytest.raises(BenchmarkError, match="--data"):
        Configuration(suite=Suite.LONGBENCH)
    assert reference().strategy(Evidence(NUM_LAYERS)).is_lossless
