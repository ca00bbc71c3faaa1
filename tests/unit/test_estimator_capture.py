"""Estimators of every row in the engine, against forward batches made by hand and one direct reduction."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.attention.rows import QueryRows, accumulate
from krul_backend.attention.similarity_worker import SimilarityWorker
from krul_backend.attention.statistics import AttentionStatistics
from krul_sglang.adapter.unsupported import UnsupportedSetupError, check_estimator
from krul_sglang.engine.capture.estimator_capture import EstimatorCapture
from krul_sglang.engine.capture.turn_capture import CapturedTurn, QueryShape, TurnCapture
from tests.support.attention_builders import Sequence, assert_same
from tests.support.forward_builders import decode_batch, extend_batch, mixed_batch

SHAPE = QueryShape(
    num_layers=3, num_query_heads=4, num_kv_heads=2, head_dim=8, dtype=torch.float32, scaling=0.5
)
NUM_SLOTS = 6
CONTEXT = 64


@pytest.fixture(scope="module")
def worker() -> Iterator[SimilarityWorker]:
    with SimilarityWorker(1 << 20) as worker:
        yield worker


class Attention(torch.nn.Module):
    """Writes its tokens' keys to the pool as SGLang's attention does: when it runs, after pre-hooks."""

    def __init__(self, engine: Engine, layer: int) -> None:
        super().__init__()
        self._engine = engine
        self._layer = layer

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, forward_batch: Any) -> torch.Tensor:
        self._engine.keys[self._layer, self._engine.out_slots] = k
        result = q.clone()
        # The engine uses the memory of queries again.
        q.fill_(torch.nan)
        return result


class Engine:
    """A KV pool with scattered slots and three layers, driven as the scheduler would."""

    def __init__(self, worker: SimilarityWorker, *, max_requests: int = NUM_SLOTS) -> None:
        generator = torch.Generator().manual_seed(0)
        order = torch.randperm(NUM_SLOTS * CONTEXT, generator=generator)
        self.req_to_token = order.view(NUM_SLOTS, CONTEXT).to(torch.int32)
        self.keys = torch.full((3, NUM_SLOTS * CONTEXT, 2, 8), torch.nan)
        self.sequences: dict[str, Sequence] = {}
        self.out_slots = torch.empty(0, dtype=torch.int64)
        self.capture = EstimatorCapture(
            SHAPE,
            worker,
            self.read_keys,
            self.req_to_token,
            max_requests=max_requests,
        )
        self.unreadable_slot: torch.Tensor | None = None
        self.layers = [Attention(self, layer) for layer in range(3)]
        self.capture.install(self.layers)
        self.recorder: TurnCapture = self.capture

    def read_keys(self, layer: int, slots: torch.Tensor) -> torch.Tensor:
        if self.unreadable_slot is not None and self.unreadable_slot in slots:
            raise RuntimeError("no more memory")
        return self.keys[layer, slots]

    def sequence(self, rid: str) -> Sequence:
        if rid not in self.sequences:
            self.sequences[rid] = Sequence.random(3, CONTEXT, seed=sum(rid.encode()))
        return self.sequences[rid]

    def restore(self, rid: str, slot: int, num_tokens: int) -> None:
        """The prefix that a cache hit has put into the pool already."""
        self.keys[:, self.req_to_token[slot, :num_tokens].long()] = self.sequence(rid).keys[:, :num_tokens]

    def extend(self, *chunks: tuple[str, int, int, int]) -> None:
        self._forward(extend_batch(*chunks), list(chunks))

    def decode(self, *requests: tuple[str, int, int]) -> None:
        self._forward(decode_batch(*requests), [(rid, slot, p, p + 1) for rid, slot, p in requests])

    def mixed(self, chunk: tuple[str, int, int, int], *decoding: tuple[str, int, int]) -> None:
        tokens = [chunk, *((rid, slot, p, p + 1) for rid, slot, p in decoding)]
        self._forward(mixed_batch([chunk], *decoding), tokens)

    def _forward(self, batch: Any, chunks: list[tuple[str, int, int, int]]) -> None:
        with self.recorder.recording(batch):
            self.run_modules(*chunks)

    def run_modules(self, *chunks: tuple[str, int, int, int]) -> None:
        """``(rid, slot, start, end)`` of each request."""
        self.out_slots = torch.cat([self.req_to_token[slot, s:e] for _, slot, s, e in chunks]).long()
        for number, layer in enumerate(self.layers):
            q = torch.cat([self.sequence(rid).queries[number, s:e] for rid, _, s, e in chunks]).flatten(1)
            k = torch.cat([self.sequence(rid).keys[number, s:e] for rid, _, s, e in chunks])
            layer(q, k, k, None)

    def take(self, rid: str, slot: int) -> CapturedTurn:
        turn = self.capture.take(rid, slot)
        assert turn is not None
        return turn

    def statistics(self, rid: str, slot: int) -> AttentionStatistics:
        turn = self.take(rid, slot)
        statistics = turn.statistics(lambda layer: torch.empty(0), CONTEXT)
        turn.release()
        assert statistics is not None
        return statistics

    def expected(self, rid: str, start: int, end: int) -> AttentionStatistics:
        """All rows and heads of tokens ``[start, end)`` at once."""
        sequence = self.sequence(rid)
        rows = QueryRows(
            sequence.queries[:, start:end],
            torch.arange(start, end),
            torch.tensor([0, 0, 1, 1]),
            SHAPE.scaling,
        )
        return accumulate(rows, sequence.read_keys)


def test_every_row_of_a_turn_counts_once(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    engine.extend(("a", 3, 0, 20))
    for position in range(20, 33):
        engine.decode(("a", 3, position))
    assert_same(engine.statistics("a", 3), engine.expected("a", 0, 33))


def test_a_chunked_prompt_after_a_restored_prefix(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    engine.restore("a", 2, 16)
    for start, end in ((16, 24), (24, 25), (25, 41)):
        engine.extend(("a", 2, start, end))
    engine.decode(("a", 2, 41))
    assert_same(engine.statistics("a", 2), engine.expected("a", 16, 42))


@settings(max_examples=15, deadline=None)
@given(st.data())
def test_requests_of_shared_batches_do_not_mix(worker: SimilarityWorker, data: st.DataObject) -> None:
    """Any prompts, cut and batched in any way, together with what decodes meanwhile."""
    engine = Engine(worker)
    slots = {"a": 4, "b": 0, "c": 2}
    prompt = {rid: data.draw(st.integers(1, 30), label=f"prompt {rid}") for rid in slots}
    done = dict.fromkeys(slots, 0)
    rng = random.Random(data.draw(st.integers(0, 1000), label="seed"))
    for _ in range(12):
        filling = [rid for rid in slots if done[rid] < prompt[rid] and rng.random() < 0.8]
        chunks = [(rid, slots[rid], done[rid], rng.randint(done[rid] + 1, prompt[rid])) for rid in filling]
        if chunks:
            engine.extend(*chunks)
        running = [rid for rid in slots if done[rid] >= prompt[rid]]
        if running:
            engine.decode(*[(rid, slots[rid], done[rid]) for rid in running])
        done.update({rid: end for rid, _, _, end in chunks})
        done.update({rid: done[rid] + 1 for rid in running})
    for rid, num_tokens in done.items():
        if num_tokens:
            assert_same(engine.statistics(rid, slots[rid]), engine.expected(rid, 0, num_tokens))


def test_decoding_beside_a_prompt_counts_once(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    engine.extend(("a", 3, 0, 20))
    engine.mixed(("b", 1, 0, 12), ("a", 3, 20))
    engine.mixed(("b", 1, 12, 17), ("a", 3, 21))
    engine.decode(("a", 3, 22), ("b", 1, 17))
    assert_same(engine.statistics("a", 3), engine.expected("a", 0, 23))
    assert_same(engine.statistics("b", 1), engine.expected("b", 0, 18))


def test_prompts_go_to_the_worker(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    before = engine.capture.stats()
    engine.extend(("a", 1, 0, 9), ("b", 2, 0, 7))
    engine.decode(("a", 1, 9), ("b", 2, 7))
    assert_same(engine.statistics("b", 2), engine.expected("b", 0, 8))
    after = engine.capture.stats()
    assert after["name"] == "heterogeneous"
    assert after["submitted"] - before["submitted"] == 2
    assert (after["reduced_here"], after["rejected"], after["restarts"]) == (0, 0, 0)


def test_an_aborted_request_leaves_nothing_to_the_next_one_in_its_slot(worker: SimilarityWorker) -> None:
    engine = Engine(worker, max_requests=1)
    engine.extend(("a", 3, 0, 20))
    engine.extend(("b", 3, 0, 12))
    assert engine.capture.take("a", 3) is None
    assert_same(engine.statistics("b", 3), engine.expected("b", 0, 12))


def test_a_request_that_starts_over_forgets_what_it_had(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    engine.extend(("a", 3, 0, 20))
    engine.decode(("a", 3, 20))
    engine.extend(("a", 3, 8, 15))
    assert_same(engine.statistics("a", 3), engine.expected("a", 8, 15))


def test_a_slot_is_used_again_while_the_earlier_turn_is_read(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    engine.extend(("a", 3, 0, 20))
    first = engine.take("a", 3)
    # What an overlapped scheduler has already launched when it learns that the request has ended.
    engine.decode(("a", 3, 20))
    engine.extend(("b", 3, 0, 12))
    engine.decode(("b", 3, 12))
    statistics = first.statistics(lambda layer: torch.empty(0), CONTEXT)
    assert statistics is not None
    assert_same(statistics, engine.expected("a", 0, 20))
    assert_same(engine.statistics("b", 3), engine.expected("b", 0, 13))


def test_requests_at_a_time_are_bounded(worker: SimilarityWorker) -> None:
    engine = Engine(worker, max_requests=1)
    engine.extend(("a", 3, 0, 20), ("b", 1, 0, 5))
    engine.decode(("a", 3, 20), ("b", 1, 5))
    assert engine.capture.take("b", 1) is None
    turn = engine.take("a", 3)
    engine.extend(("c", 4, 0, 5))
    assert engine.capture.take("c", 4) is None
    turn.release()
    engine.extend(("d", 4, 0, 5))
    assert_same(engine.statistics("d", 4), engine.expected("d", 0, 5))


def test_nothing_is_recorded_while_suspended(worker: SimilarityWorker) -> None:
    engine = Engine(worker)
    engine.extend(("a", 3, 0, 20))
    with engine.capture.recording(decode_batch(("a", 3, 20))):
        with engine.capture.suspended():
            engine.run_modules(("b", 1, 0, 20))
        engine.run_modules(("a", 3, 20, 21))
    with engine.capture.suspended():
        engine.run_modules(("b", 1, 0, 20))
    assert engine.capture.take("b", 1) is None
    assert_same(engine.statistics("a", 3), engine.expected("a", 0, 21))


def test_an_estimator_that_fails_costs_its_own_request_only(
    worker: SimilarityWorker, caplog: pytest.LogCaptureFixture
) -> None:
    engine = Engine(worker, max_requests=2)
    engine.extend(("a", 3, 0, 20), ("b", 1, 0, 20))
    # The decoded token of "a".
    engine.unreadable_slot = engine.req_to_token[3, 20]
    engine.decode(("a", 3, 20), ("b", 1, 20))
    assert "attention of request a could not be reduced" in caplog.text
    assert engine.capture.take("a", 3) is None
    assert_same(engine.statistics("b", 1), engine.expected("b", 0, 21))
    # Its place is free again.
    engine.extend(("c", 3, 0, 5), ("d", 1, 0, 5))
    assert_same(engine.statistics("c", 3), engine.expected("c", 0, 5))
    assert_same(engine.statistics("d", 1), engine.expected("d", 0, 5))


def test_the_capture_closes_its_worker() -> None:
    engine = Engine(SimilarityWorker(1 << 20))
    assert engine.capture.stats()["name"] == "heterogeneous"
    engine.extend(("a", 3, 0, 20))
    turn = engine.take("a", 3)
    engine.capture.close()
    statistics = turn.statistics(lambda layer: torch.empty(0), CONTEXT)
    assert statistics is not None
    # Accepted before the end, so reduced; nothing is accepted after it, and nothing breaks.
    assert_same(statistics, engine.expected("a", 0, 20))
    engine.extend(("b", 3, 0, 20))
    assert engine.capture.take("b", 3) is None


def test_graphs_are_refused_with_the_flag_and_the_way_out() -> None:
    check_estimator("heterogeneous", runs_graphs=False)
    with pytest.raises(UnsupportedSetupError, match=r'"heterogeneous".*--disable-cuda-graph.*"sampled"'):
        check_estimator("heterogeneous", runs_graphs=True)
