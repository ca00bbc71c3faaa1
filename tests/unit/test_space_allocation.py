"""The offloader with heads that are not stored, against the codec alone."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from test_engine_copies import NUM_LAYERS, PAGE_SIZE, FixedDecision, make_pool

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitPlan
from krul_backend.segment import ModelIdentity
from krul_backend.strategy.strategy import Precision, Strategy
from krul_backend.tiers.common.interface import SegmentSlice
from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.save.allocation import SpaceAllocation, trim_path
from krul_sglang.engine.save.offload import TurnOffloader
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import TurnEncoding
from tests.support.engine_builders import make_store
from tests.support.store_builders import shorten_ranges

GROUP = 8
LAYER_TOKEN_BYTES = 2 * 2 * 16 * 4  # (K, V) x heads x channels x float32
NATIVE = Strategy.from_pairs(NUM_LAYERS)
PAIRED = Strategy.from_pairs(NUM_LAYERS, [(0, 2)], Precision.INT4)


class FixedAllocation(SpaceAllocation):
    """Heads that the test sets; it remembers what it was asked."""

    def __init__(self) -> None:
        self.heads: tuple[int, ...] | None = None
        self.asked: list[tuple[int, TurnEncoding]] = []

    def head_ends(self, num_tokens: int, encoding: TurnEncoding) -> tuple[int, ...] | None:
        self.asked.append((num_tokens, encoding))
        return self.heads


class CountingPool(DevicePool):
    """Remembers which layers were gathered."""

    def __init__(self, pool: DevicePool) -> None:
        vars(self).update(vars(pool))
        self.gathered: list[int] = []

    def gather(self, layer: int, slots: torch.Tensor) -> Any:
        self.gathered.append(layer)
        return super().gather(layer, slots)


class AllocatingBench:
    """An offloader with an allocation, on a pool and a store in this process."""

    def __init__(self, *, has_allocation: bool = True) -> None:
        self.pool = CountingPool(open_pool(make_pool()))
        self.store = make_store(1 << 20)
        self.model = ModelIdentity("m", "d", "float32", NUM_LAYERS, 2, 16, 16, PAGE_SIZE, 0, 1)
        self.codec = ModelCodecs(
            self.pool.shape, NUM_LAYERS, rotary=None, options=CodecOptions(group_size=GROUP)
        )
        self.decision: Any = FixedDecision(self.codec, NATIVE)
        self.allocation = FixedAllocation()
        self.offloader = TurnOffloader(
            self.store,
            PAGE_SIZE,
            self.pool,
            self.codec,
            self.decision,
            allocation=self.allocation if has_allocation else None,
            keeps_copies=False,
        )

    def close(self) -> None:
        self.offloader.close()
        self.store.close()

    def turn(self, num_pages: int, name: str = "a", num_common_pages: int = 0) -> Turn:
        """The first pages of a conversation; ``num_common_pages`` of them are those of conversation ``a``."""
        names = ["a"] * num_common_pages + [name] * (num_pages - num_common_pages)
        num_tokens = num_pages * PAGE_SIZE
        return Turn(
            page_keys=[f"{of_page}-{page}" for page, of_page in enumerate(names)],
            token_ids=np.arange(num_tokens, dtype=np.int64),
            slots=torch.arange(num_tokens),
            model=self.model,
            ready=[],
        )

    def store_turn(self, turn: Turn, heads: tuple[int, ...] | None) -> bool:
        self.allocation.heads = heads
        self.offloader.submit(turn)
        self.offloader.wait()
        return self.offloader.pop_completed()

    def slices(self, turn: Turn) -> tuple[SegmentSlice, ...]:
        lease = self.store.lease(self.model, turn.page_keys, turn.token_ids)
        assert lease is not None
        assert lease.num_pages == len(turn.page_keys)
        self.store.release(lease)
        return lease.slices

    def decoded_from(self, turn: Turn) -> list[int]:
        """Per layer the token from which all of the turn can be decoded.

        What can be decoded is checked, segment by segment, against the codec without heads or store.
        """
        decoded_from = [0] * NUM_LAYERS
        for piece in self.slices(turn):
            header = piece.header
            start, end = header.start_token, header.end_token
            open_at = {"start_token": start, "num_tokens": end - start}
            stored = self.codec.open(header.codec_params, **open_at).stored_as
            assert isinstance(stored, Strategy)
            codec = self.codec.of(stored)
            decoder = codec.open(header.codec_params, **open_at)
            kv = [self.pool.gather(layer, turn.slots[start:end]) for layer in range(NUM_LAYERS)]
            encoding = codec.encode(TokenRun(kv.__getitem__, start, end - start), UnitPlan(stored))
            whole_decoder = codec.open(encoding.params, **open_at)
            whole = dict(encoding.blocks)
            # Before what is kept may lie the end of an earlier record: blocks are cut in whole ranges.
            sizes = decoder.kept_num_bytes(header.layer_first_token)
            kept = {
                layer: torch.from_numpy(block[block.nbytes - size :].copy())
                for layer, (block, size) in enumerate(zip(piece.blocks, sizes, strict=True))
            }
            for layer, first in enumerate(decoder.decodable_from(header.layer_first_token)):
                if first > start:
                    decoded_from[layer] = first
                if first < end:
                    rows = decoder.decode(layer, kept, first - start, end - start)
                    expected = whole_decoder.decode(layer, whole, first - start, end - start)
                    assert torch.equal(rows.k, expected.k)
                    assert torch.equal(rows.v, expected.v)
        return decoded_from


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[AllocatingBench]:
    shorten_ranges(monkeypatch)
    bench = AllocatingBench()
    yield bench
    bench.close()


@pytest.mark.parametrize("strategy", [NATIVE, PAIRED])
def test_heads_are_neither_stored_nor_missing(bench: AllocatingBench, strategy: Strategy) -> None:
    bench.decision.strategy = strategy
    turn = bench.turn(10)
    assert bench.store_turn(turn, (40, 24, 12))
    # Layer 2 is decoded from layer 0 where they are a pair.
    assert bench.decoded_from(turn) == [8 if strategy is PAIRED else 40, 24, 8]
    assert bench.store.find_missing(bench.model, turn.page_keys) == []
    counters, stats = bench.offloader.counters, bench.store.stats()
    assert counters.num_bytes == stats.stored_bytes > 0
    assert counters.left_out_bytes > 0
    assert (stats.num_pages, stats.trimmed_bytes) == (10, 0)
    (piece,) = bench.slices(turn)
    whole = bench.codec.open(piece.header.codec_params, start_token=0, num_tokens=40).layer_num_bytes
    assert counters.num_bytes + counters.left_out_bytes == sum(whole)


def test_layers_of_which_nothing_is_kept_are_not_gathered(bench: AllocatingBench) -> None:
    assert bench.store_turn(bench.turn(10), (40, 40, 12))
    assert set(bench.pool.gathered) == {2}
    assert bench.offloader.counters.num_bytes == 32 * LAYER_TOKEN_BYTES
    bench.pool.gathered.clear()
    assert bench.store_turn(bench.turn(12, "b"), (48, 48, 48))
    assert bench.pool.gathered == []
    assert bench.store.stats().stored_bytes == 32 * LAYER_TOKEN_BYTES
    assert bench.store.find_missing(bench.model, bench.turn(12, "b").page_keys) == []


def test_earlier_turns_are_trimmed_when_a_later_one_is_stored(bench: AllocatingBench) -> None:
    assert bench.store_turn(bench.turn(6), (8, 0, 0))
    assert bench.store_turn(bench.turn(10), (16, 8, 0))
    assert bench.decoded_from(bench.turn(10)) == [16, 8, 0]
    assert bench.store.stats().trimmed_bytes == 16 * LAYER_TOKEN_BYTES
    assert bench.store_turn(bench.turn(12), (40, 32, 28))
    # Segments of 6, 4 and 2 pages: groups of 8 tokens start at 0, 8, 16; 24, 32; 40.
    assert bench.decoded_from(bench.turn(12)) == [40, 32, 24]
    stats = bench.store.stats()
    assert stats.stored_bytes == (8 + 16 + 24) * LAYER_TOKEN_BYTES
    assert bench.offloader.counters.left_out_bytes == 8 * LAYER_TOKEN_BYTES
    assert stats.trimmed_bytes == (3 * 48 - 8 - 48) * LAYER_TOKEN_BYTES
    assert stats.used_bytes == stats.stored_bytes


@pytest.mark.parametrize("heads", [(40, 24, 8), (24, 24, 24), (0, 0, 0), (39, 31, 9), (100, 7, 0)])
@pytest.mark.parametrize("strategy", [NATIVE, PAIRED])
def test_trimming_later_leaves_what_storing_less_would_have(
    bench: AllocatingBench, strategy: Strategy, heads: tuple[int, int, int]
) -> None:
    bench.decision.strategy = strategy
    turns = [bench.turn(6), bench.turn(10)]
    for turn in turns:
        assert bench.store_turn(turn, heads)
    at_once = [piece.header.layer_first_token for piece in bench.slices(turns[1])]
    bench.store.clear()
    for turn, of_turn in zip(turns, (None, heads), strict=True):
        assert bench.store_turn(turn, of_turn)
    assert [piece.header.layer_first_token for piece in bench.slices(turns[1])] == at_once
    bench.decoded_from(turns[1])
    assert bench.store.verify().bad_segments == ()


def test_what_another_conversation_continues_is_not_trimmed(bench: AllocatingBench) -> None:
    assert bench.store_turn(bench.turn(6), None)
    assert bench.store_turn(bench.turn(8, "b", num_common_pages=4), None)
    assert bench.store_turn(bench.turn(10), (40, 40, 40))
    assert bench.store.stats().trimmed_bytes == 0
    assert bench.decoded_from(bench.turn(8, "b", num_common_pages=4)) == [0, 0, 0]
    first, second = bench.slices(bench.turn(10))
    assert first.header.layer_first_token == (0, 0, 0)
    assert sum(second.header.layer_num_bytes) == 0


@pytest.mark.parametrize("strategy", [NATIVE, PAIRED])
def test_a_conversation_that_begins_like_another_trims_nothing_of_it(
    bench: AllocatingBench, strategy: Strategy
) -> None:
    """Also while its own turn is a fast copy, to be encoded later."""
    bench.decision.strategy = strategy
    assert bench.store_turn(bench.turn(6), None)
    assert bench.store_turn(bench.turn(10, "b", num_common_pages=1), (40, 40, 40))
    assert bench.store.stats().trimmed_bytes == 0
    assert bench.decoded_from(bench.turn(6)) == [0, 0, 0]


def test_shorter_heads_bring_nothing_back_and_drop_nothing(bench: AllocatingBench) -> None:
    assert bench.store_turn(bench.turn(6), (24, 16, 8))
    assert bench.store_turn(bench.turn(10), (16, 8, 0))
    assert bench.store.stats().trimmed_bytes == 0
    assert bench.decoded_from(bench.turn(10)) == [24, 16, 8]


def test_an_allocation_is_told_what_a_token_takes(bench: AllocatingBench) -> None:
    assert bench.store_turn(bench.turn(6), None)
    bench.decision.strategy = PAIRED
    assert bench.store_turn(bench.turn(10), None)
    (num_native, native), (num_paired, paired) = bench.allocation.asked
    assert (num_native, native.stored_as, native.last_use) == (24, NATIVE, (0, 1, 2))
    assert native.layer_token_bytes == (LAYER_TOKEN_BYTES,) * NUM_LAYERS
    # Layer 2 needs the direction in layer 0's block.
    assert (num_paired, paired.stored_as, paired.last_use) == (40, PAIRED, (2, 1, 2))
    # Layer 2 has two norms of half precision for each of two heads.
    assert paired.layer_token_bytes[1:] == (
        bench.codec.of(PAIRED).layer_token_bytes(Strategy.from_pairs(NUM_LAYERS, [], Precision.INT4))[1],
        8.0,
    )
    assert bench.offloader.counters.left_out_bytes == 0
    assert bench.store.stats().stored_bytes == bench.offloader.counters.num_bytes


def test_a_rank_without_room_is_asked_like_the_others(bench: AllocatingBench) -> None:
    bench.offloader.submit(bench.turn(12))
    bench.offloader.submit(bench.turn(16, "b"))
    bench.offloader.wait()
    assert [bench.offloader.pop_completed(), bench.offloader.pop_completed()] == [True, True]
    assert [num_tokens for num_tokens, *_ in bench.allocation.asked] == [48, 64]


def test_an_allocation_that_keeps_everything_changes_no_byte() -> None:
    blocks = []
    for has_allocation in (False, True):
        bench = AllocatingBench(has_allocation=has_allocation)
        bench.decision.strategy = PAIRED
        for turn in (bench.turn(6), bench.turn(10)):
            assert bench.store_turn(turn, None)
        slices = bench.slices(bench.turn(10))
        blocks.append([[block.tobytes() for block in piece.blocks] for piece in slices])
        assert [piece.header.layer_first_token for piece in slices] == [(0, 0, 0), (24, 24, 24)]
        bench.close()
    assert blocks[0] == blocks[1]


def test_a_turn_is_stored_even_if_its_conversation_cannot_be_trimmed(
    bench: AllocatingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.store_turn(bench.turn(6), None)

    def fail(*args: object) -> int:
        raise MemoryError

    monkeypatch.setattr(bench.store, "trim", fail)
    assert bench.store_turn(bench.turn(10), (8, 8, 8))
    assert (bench.offloader.counters.failed_trims, bench.offloader.counters.dropped_turns) == (1, {})
    assert bench.decoded_from(bench.turn(10)) == [0, 0, 0]


@pytest.mark.parametrize(("range_bytes", "num_trims"), [(16, 1), (1 << 14, 0), (1024, 1)])
def test_the_store_is_asked_only_where_something_can_go(
    bench: AllocatingBench, monkeypatch: pytest.MonkeyPatch, range_bytes: int, num_trims: int
) -> None:
    """Of a short turn not one range may be dropped; every later turn would ask again."""
    shorten_ranges(monkeypatch, range_bytes)
    assert bench.store_turn(bench.turn(6), None)
    asked: list[int] = []
    trim = bench.store.trim

    def counted(segment_id: int, *args: Any) -> int:
        asked.append(segment_id)
        return trim(segment_id, *args)

    monkeypatch.setattr(bench.store, "trim", counted)
    for _ in range(3):
        trim_path(bench.store, bench.model, bench.codec, bench.turn(6).page_keys, (16, 8, 0))
    assert len(asked) == num_trims
    assert (bench.store.stats().trimmed_bytes > 0) == (num_trims > 0)
    # A layer of which nothing is needed goes whole.
    trim_path(bench.store, bench.model, bench.codec, bench.turn(6).page_keys, (24, 8, 0))
    assert len(asked) == num_trims + 1
    assert bench.slices(bench.turn(6))[0].header.layer_num_bytes[0] == 0


def test_segments_that_hold_no_heads_are_not_opened(
    bench: AllocatingBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.store_turn(bench.turn(6), (24, 16, 8))
    opened: list[int] = []
    open_segment = bench.codec.open

    def counted(params: Any, *, start_token: int, num_tokens: int) -> Any:
        opened.append(start_token)
        return open_segment(params, start_token=start_token, num_tokens=num_tokens)

    monkeypatch.setattr(bench.codec, "open", counted)
    keys = bench.turn(6).page_keys
    trim_path(bench.store, bench.model, bench.codec, keys, (24, 16, 8))
    assert opened == []
    trim_path(bench.store, bench.model, bench.codec, keys, (24, 16, 16))
    assert opened == [0]
    assert bench.store.stats().trimmed_bytes == 8 * LAYER_TOKEN_BYTES
