"""Query capture against forward batches made by hand: which rows are kept, of whom, and where."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from forward_builders import decode_batch, extend_batch

from krul_backend.errors import ConfigError
from krul_sglang.engine.attention_observer import QueryShape
from krul_sglang.engine.query_capture import DECODE_INTERVAL, CapturedRows, CapturePlan, QueryCapture

SHAPE = QueryShape(
    num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=4, dtype=torch.float32, scaling=0.5
)
NUM_SLOTS = 8


def query(rid: str, layer: int, position: int) -> torch.Tensor:
    """The query of one token: ``[num_query_heads * head_dim]``, different in every respect."""
    head = torch.arange(SHAPE.num_query_heads * SHAPE.head_dim, dtype=torch.float32)
    return head + 100 * layer + 1000 * position + 1e6 * ord(rid[0])


class Engine:
    """Runs prompts and decode steps as the scheduler would."""

    def __init__(self, *, num_requests: int = 3, num_rows: int = 16) -> None:
        plan = CapturePlan(num_requests, num_rows, 0)
        self.capture = QueryCapture(SHAPE, plan, num_slots=NUM_SLOTS, device=torch.device("cpu"))

    def extend(self, *chunks: tuple[str, int, int, int]) -> None:
        """``(rid, slot, start, end)`` of each request in the batch."""
        self._forward(
            extend_batch(*chunks), [(rid, p) for rid, _, start, end in chunks for p in range(start, end)]
        )

    def decode(self, *requests: tuple[str, int, int]) -> None:
        """``(rid, slot, position)`` of each request in the batch."""
        self._forward(decode_batch(*requests), [(rid, position) for rid, _, position in requests])

    def _forward(self, batch: Any, tokens: list[tuple[str, int]]) -> None:
        self.capture.begin_step(batch)
        for layer in range(SHAPE.num_layers):
            self.capture.record(layer, torch.stack([query(rid, layer, p) for rid, p in tokens]))

    def take(self, rid: str, slot: int) -> CapturedRows:
        rows = self.capture.take(rid, slot)
        assert rows is not None
        return rows


def assert_rows_are(rid: str, rows: CapturedRows) -> list[int]:
    """Every kept row is the query of its position, one head of each group; returns the positions."""
    read = rows.rows(10**9)
    assert read is not None
    positions: list[int] = read.positions.tolist()
    assert positions == sorted(set(positions))
    for row, position in enumerate(positions):
        for layer in range(SHAPE.num_layers):
            heads = query(rid, layer, position).view(SHAPE.num_query_heads, SHAPE.head_dim)
            assert torch.equal(read.queries[layer, row], heads[::2])
    assert read.kv_heads.tolist() == [0, 1]
    assert read.scaling == SHAPE.scaling
    return positions


def test_a_prompt_keeps_half_of_the_rows_spread_over_it_with_the_last_one() -> None:
    engine = Engine()
    engine.extend(("a", 5, 0, 100))
    positions = assert_rows_are("a", engine.take("a", 5))
    assert len(positions) == 8
    assert positions[-1] == 99
    assert positions[0] < 25


def test_a_short_prompt_keeps_all_its_rows() -> None:
    engine = Engine()
    engine.extend(("a", 5, 16, 19))
    assert assert_rows_are("a", engine.take("a", 5)) == [16, 17, 18]


def test_every_chunk_of_a_long_prompt_keeps_a_share() -> None:
    engine = Engine(num_rows=32)
    for start in range(0, 400, 100):
        engine.extend(("a", 5, start, start + 100))
    positions = assert_rows_are("a", engine.take("a", 5))
    assert len(positions) == 16
    shares = [sum(start <= p < start + 100 for p in positions) for start in range(0, 400, 100)]
    assert all(2 <= share <= 8 for share in shares), shares


def test_requests_of_one_batch_do_not_mix() -> None:
    engine = Engine()
    engine.extend(("a", 5, 0, 30), ("b", 2, 10, 60))
    engine.extend(("c", 1, 0, 40))
    for rid, slot, low, high in (("a", 5, 0, 30), ("b", 2, 10, 60), ("c", 1, 0, 40)):
        positions = assert_rows_are(rid, engine.take(rid, slot))
        assert all(low <= position < high for position in positions)


def test_one_of_many_decoded_tokens_is_kept_and_the_oldest_go_first() -> None:
    engine = Engine()
    engine.extend(("a", 5, 0, 10))
    num_steps = 20 * DECODE_INTERVAL
    for step in range(num_steps):
        engine.decode(("a", 5, 10 + step))
    positions = [p for p in assert_rows_are("a", engine.take("a", 5)) if p >= 10]
    assert len(positions) == 8
    assert {later - earlier for earlier, later in itertools.pairwise(positions)} == {DECODE_INTERVAL}
    assert positions[-1] > num_steps - DECODE_INTERVAL


def test_padding_rows_of_a_batch_are_written_nowhere() -> None:
    engine = Engine()
    engine.extend(("a", 0, 0, 10))
    before = engine.capture.read(0)
    for _ in range(DECODE_INTERVAL):
        engine.decode(("x", 0, 0))
    after = engine.capture.read(0)
    assert torch.equal(before.positions, after.positions)
    assert torch.equal(before.queries, after.queries)


def test_a_request_without_a_free_place_is_not_recorded_and_harms_nobody() -> None:
    engine = Engine(num_requests=1)
    engine.extend(("a", 5, 0, 30), ("b", 2, 0, 30))
    for step in range(2 * DECODE_INTERVAL):
        engine.decode(("a", 5, 30 + step), ("b", 2, 30 + step))
    assert engine.capture.take("b", 2) is None
    assert_rows_are("a", engine.take("a", 5))


def test_a_place_is_free_again_only_when_it_was_released() -> None:
    engine = Engine(num_requests=1)
    engine.extend(("a", 5, 0, 30))
    rows = engine.take("a", 5)
    engine.extend(("b", 5, 0, 20))
    assert engine.capture.take("b", 5) is None
    assert_rows_are("a", rows)
    rows.release()
    engine.extend(("c", 5, 0, 20))
    assert_rows_are("c", engine.take("c", 5))


def test_an_aborted_request_gives_its_place_to_the_next_one_in_its_slot() -> None:
    engine = Engine(num_requests=1)
    engine.extend(("a", 5, 0, 30))
    engine.extend(("b", 5, 0, 12))
    assert engine.capture.take("a", 5) is None
    positions = assert_rows_are("b", engine.take("b", 5))
    assert positions[-1] == 11


def test_a_request_that_starts_over_forgets_what_it_had() -> None:
    engine = Engine()
    engine.extend(("a", 5, 0, 300))
    engine.extend(("a", 5, 0, 12))
    assert assert_rows_are("a", engine.take("a", 5))[-1] == 11


def test_nothing_is_recorded_while_suspended() -> None:
    engine = Engine()
    engine.extend(("a", 5, 0, 30))
    with engine.capture.suspended():
        for _ in range(DECODE_INTERVAL):
            engine.decode(("b", 5, 77))
        engine.extend(("b", 5, 0, 30))
    assert_rows_are("a", engine.take("a", 5))


def test_the_plan_stays_within_its_memory() -> None:
    row = SHAPE.row_bytes
    assert CapturePlan.fit(SHAPE, max_requests=100, num_rows=64, max_bytes=10 * 64 * row) == CapturePlan(
        9, 64, 10 * 64 * row
    )
    assert CapturePlan.fit(SHAPE, max_requests=3, num_rows=64, max_bytes=10**9).num_requests == 3
    # Too little for two times 64 rows: fewer rows, down to 8.
    assert CapturePlan.fit(SHAPE, max_requests=9, num_rows=64, max_bytes=33 * row).num_rows == 16
    with pytest.raises(ConfigError, match="query_memory"):
        CapturePlan.fit(SHAPE, max_requests=9, num_rows=64, max_bytes=15 * row)
