"""Offloader and loader against a real store and a pool in this process, without a server."""

from __future__ import annotations

import dataclasses
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from krul_backend import page_lock
from krul_backend.attention.rows import ReadKeys
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec import interface
from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.unit import NativeLayer
from krul_backend.codec.units import UnitPlan
from krul_backend.device import Device
from krul_backend.errors import StoreClosedError
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.strategy.strategy import Precision, Strategy
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import DRAM_TIER, Block, Reservation
from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.engine.capture.turn_capture import CapturedTurn
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore import loading
from krul_sglang.engine.restore.load_batch import Load, LoadFailedError
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.save import segment_writer
from krul_sglang.engine.save.offload import MAX_LAYER_BYTES, TurnOffloader
from krul_sglang.engine.save.turn import Turn
from krul_sglang.engine.save.turn_encoding import LayerEncoding
from krul_sglang.reasons import Reasons, RequestReasons, Run
from tests.support.engine_builders import PATIENCE_S, make_load, make_store
from tests.support.sglang_pool import NUM_LAYERS, NUM_SLOTS, PAGE_SIZE, make_pool
from tests.support.strict_device import DEVICES, StrictDevice, check_device, lock_all, make_device

TOKEN_BYTES = NUM_LAYERS * 2 * 2 * 16 * 4  # layers x (K, V) x heads x channels x float32


class FixedDecision:
    """Chooses one strategy for every turn, and remembers for which it was asked."""

    def __init__(self, codec: ModelCodecs, strategy: Strategy) -> None:
        self.codec = codec
        self.strategy = strategy
        self.asked: list[Turn | None] = []

    def decide(self, turn: Turn | None, missing: Sequence[range]) -> LayerEncoding:
        self.asked.append(turn)
        return LayerEncoding(self.codec, self.strategy, (None,) * len(missing))


class FakeCapturedTurn(CapturedTurn):
    """What was captured of a turn; it only counts how often its place was given back."""

    def __init__(self) -> None:
        super().__init__()
        self.releases = 0

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        raise AssertionError("nobody needs statistics")

    def _give_place_back(self) -> None:
        self.releases += 1


class Stuck:
    """Calls of ``name`` of an object wait until ``go_on`` is set; ``has_begun`` is set by the first."""

    def __init__(self, owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        self._call = getattr(owner, name)
        monkeypatch.setattr(owner, name, self._wait)

    def _wait(self, *args: Any, **kwargs: Any) -> Any:
        self.has_begun.set()
        assert self.go_on.wait(PATIENCE_S)
        return self._call(*args, **kwargs)


class Bench:
    """A pool, a store, and what moves KV between them."""

    def __init__(
        self,
        *,
        capacity_bytes: int = 1 << 20,
        device: Device | None = None,
        max_layer_bytes: int = MAX_LAYER_BYTES,
        gate: TransferGate | None = None,
        copy_room: int = sys.maxsize,
        keeps_copies: bool = False,
        costs: OnlineCosts | None = None,
    ) -> None:
        self.sglang_pool = make_pool()
        self.pool = open_pool(self.sglang_pool)
        self.pool.streams = device = self.pool.streams if device is None else device
        self.store = make_store(capacity_bytes)
        lock_all(device, self.store.host.buffer)
        self.model = ModelIdentity("m", "d", "float32", NUM_LAYERS, 2, 16, 16, PAGE_SIZE, 0, 1)
        self.codec = ModelCodecs(self.pool.shape, NUM_LAYERS, rotary=None)
        self.decision = FixedDecision(self.codec, Strategy.from_pairs(NUM_LAYERS))
        self.reasons = Reasons(PAGE_SIZE, lambda: self.model.fingerprint, lambda: True)
        self.offloader = TurnOffloader(
            self.store,
            PAGE_SIZE,
            self.pool,
            self.codec,
            self.decision,
            max_layer_bytes=max_layer_bytes,
            gate=gate,
            copy_room=lambda: copy_room,
            keeps_copies=keeps_copies,
            costs=costs,
            reasons=self.reasons,
        )
        self.loader = LayerWiseLoader(self.store, self.pool, TransferGate(), patience_s=PATIENCE_S)

    def close(self) -> None:
        self.offloader.close()
        self.loader.close()
        self.store.close()
        check_device(self.pool.streams)

    def turn(self, name: str, num_pages: int, first_slot: int = 0) -> Turn:
        num_tokens = num_pages * PAGE_SIZE
        return Turn(
            page_keys=[f"{name}-{page}" for page in range(num_pages)],
            token_ids=np.arange(num_tokens, dtype=np.int64),
            slots=torch.arange(first_slot, first_slot + num_tokens),
            model=self.model,
            ready=[],
        )

    def store_turn(self, turn: Turn) -> bool:
        """Store a turn, and encode it; False if it was dropped."""
        before = self.num_dropped
        self.offloader.submit(turn)
        self.offloader.wait()
        is_stored = self.offloader.pop_completed()
        assert is_stored == (self.num_dropped == before)
        return is_stored

    def why_missing(self, turn: Turn) -> list[Run]:
        """Why nothing of a turn would be found now."""
        self.reasons.look_up("next", len(turn.token_ids), 0, lambda: ("", turn.token_ids))
        self.reasons.explain("next")
        (told,) = msgspec.json.decode(self.reasons.as_text(), type=list[RequestReasons])
        return told.missing

    @property
    def num_dropped(self) -> int:
        return sum(self.offloader.counters.dropped_turns.values())

    def load(self, turn: Turn, slots: torch.Tensor, first_page: int = 0) -> Load:
        """A load of what the store has of a turn from a page on, as much of it as there are slots."""
        token_ids = turn.token_ids[first_page * PAGE_SIZE :]
        lease = self.store.lease(self.model, turn.page_keys[first_page:], token_ids)
        assert lease is not None
        return make_load(lease, self.codec, slots)

    def rows(self, slots: torch.Tensor) -> list[torch.Tensor]:
        return [buffer[slots].clone() for buffer in (*self.sglang_pool.k_buffer, *self.sglang_pool.v_buffer)]


@pytest.fixture(params=DEVICES)
def bench(request: pytest.FixtureRequest) -> Iterator[Bench]:
    bench = Bench(device=make_device(request.param))
    yield bench
    bench.close()


@pytest.fixture
def strict() -> StrictDevice:
    return StrictDevice()


def test_stored_rows_come_back_to_other_slots_bit_for_bit(bench: Bench) -> None:
    turn = bench.turn("a", 3)
    turn = Turn(turn.page_keys, turn.token_ids, torch.randperm(NUM_SLOTS)[:12], [], model=bench.model)
    before = bench.rows(turn.slots)
    assert bench.store_turn(turn)
    targets = torch.randperm(NUM_SLOTS)[:12]
    index = bench.loader.start({"r": bench.load(turn, targets)})
    assert bench.loader.finish(index)
    for old, new in zip(before, bench.rows(targets), strict=True):
        assert torch.equal(old, new)
    assert bench.store.stats().num_leases == 0


def test_a_stray_write_before_the_commit_is_a_miss(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    commit = bench.store.commit

    def scribble(reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[int]) -> int:
        bench.store.host.buffer[reservation.spans[1].offset] ^= 1
        return commit(reservation, manifest, checksums)

    monkeypatch.setattr(bench.store, "commit", scribble)
    turn = bench.turn("a", 3)
    assert bench.store_turn(turn)
    assert not bench.loader.finish(bench.loader.start({"r": bench.load(turn, turn.slots)}))
    assert bench.store.stats().corrupted_segments == 1
    assert bench.store.find_missing(bench.model, turn.page_keys) == [range(3)]


@pytest.mark.parametrize(
    "strategy",
    [
        Strategy.from_pairs(NUM_LAYERS, [(0, 2)]),
        Strategy.from_pairs(NUM_LAYERS, [(1, 2)], Precision.INT8),
        Strategy.from_pairs(NUM_LAYERS, [], [Precision.INT4, Precision.NATIVE, Precision.INT2]),
    ],
)
def test_compressed_rows_come_back_as_the_codec_decodes_them(bench: Bench, strategy: Strategy) -> None:
    """Over two segments, from the middle of the first one on: what a direct round trip gives, bit for bit."""
    whole = bench.turn("a", 10)
    bench.decision.strategy = strategy
    assert bench.store_turn(
        Turn(whole.page_keys[:6], whole.token_ids[:24], whole.slots[:24], [], model=bench.model)
    )
    assert bench.store_turn(whole)
    expected = [decoded(bench, strategy, whole.slots[start:end], start) for start, end in ((0, 24), (24, 40))]
    targets = torch.randperm(NUM_SLOTS)[:32]
    assert bench.loader.finish(bench.loader.start({"r": bench.load(whole, targets, first_page=2)}))
    for layer in range(NUM_LAYERS):
        loaded = bench.pool.gather(layer, targets)
        assert torch.equal(loaded.k, torch.cat([part[layer].k for part in expected])[8:])
        assert torch.equal(loaded.v, torch.cat([part[layer].v for part in expected])[8:])
    assert bench.store.stats().stored_bytes < 40 * TOKEN_BYTES
    assert bench.offloader.counters.num_bytes == bench.store.stats().stored_bytes
    assert bench.loader.counters.num_bytes == bench.store.stats().stored_bytes


def decoded(bench: Bench, strategy: Strategy, slots: torch.Tensor, start: int) -> list[LayerKV]:
    """All layers of the rows ``slots``, encoded and decoded without a store."""
    codec = ModelCodecs(bench.pool.shape, NUM_LAYERS, rotary=None)
    kv = [bench.pool.gather(layer, slots) for layer in range(NUM_LAYERS)]
    encoding = codec.of(strategy).encode(TokenRun(kv.__getitem__, start, len(slots)), UnitPlan(strategy))
    blocks = dict(encoding.blocks)
    decoder = codec.of(strategy).open(encoding.params, start_token=start, num_tokens=len(slots))
    return [decoder.decode(layer, blocks, 0, len(slots)) for layer in range(NUM_LAYERS)]


def test_every_turn_is_put_to_the_decision_and_gives_its_capture_back(bench: Bench) -> None:
    captured = [FakeCapturedTurn() for _ in range(4)]
    turns = [
        dataclasses.replace(bench.turn(name, num_pages), attention=of_turn)
        for (name, num_pages), of_turn in zip((("a", 3), ("b", 2), ("a", 3), ("x", 1)), captured, strict=True)
    ]
    turns[3] = dataclasses.replace(turns[3], slots=turns[3].slots + 2 * NUM_SLOTS)  # fails
    with Blocked(bench.offloader):
        for turn in turns:
            bench.offloader.submit(turn)
    bench.offloader.wait()
    assert [bench.offloader.pop_completed() for _ in turns] == [True, True, True, False]
    assert bench.offloader.counters.dropped_turns == {"error": 1}
    assert bench.decision.asked == turns
    assert [of_turn.releases for of_turn in captured] == [1, 1, 1, 1]


def test_a_turn_for_which_nothing_can_be_decided_gives_its_capture_back(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("the device is gone")

    monkeypatch.setattr(bench.decision, "decide", fail)
    captured = FakeCapturedTurn()
    assert not bench.store_turn(dataclasses.replace(bench.turn("a", 2), attention=captured))
    assert captured.releases == 1
    assert bench.offloader.counters.dropped_turns == {"error": 1}


def test_a_rank_whose_store_cannot_answer_still_takes_part_in_the_choice(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object) -> None:
        raise ValueError("an answer that makes no sense")

    with Blocked(bench.offloader):
        bench.offloader.submit(bench.turn("a", 2))
        monkeypatch.setattr(bench.store, "find_missing", fail)
    bench.offloader.wait()
    assert not bench.offloader.pop_completed()
    assert bench.decision.asked == [None]
    assert bench.offloader.counters.dropped_turns == {"no answer": 1}
    assert bench.why_missing(bench.turn("a", 2)) == [Run(0, 8, "dropped: no answer")]


def losing_the_daemon(store: KVStore) -> Callable[..., int]:
    """A ``commit`` during which the daemon of a store goes."""

    def commit(reservation: Reservation, *_: object) -> int:
        store.abort(reservation)
        raise StoreClosedError("the segment was not stored: the daemon is gone")

    return commit


def test_a_daemon_that_goes_while_a_turn_is_stored_gave_no_answer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    turn = bench.turn("a", 2)
    with monkeypatch.context() as patch:
        patch.setattr(bench.store, "commit", losing_the_daemon(bench.store))
        assert not bench.store_turn(turn)
    assert bench.offloader.counters.dropped_turns == {"no answer": 1}
    assert bench.why_missing(turn) == [Run(0, 8, "dropped: no answer")]
    (record,) = [each for each in caplog.records if each.levelno >= logging.WARNING]
    said = "krul: a turn of 8 tokens: the segment was not stored: the daemon is gone"
    assert (record.getMessage(), record.exc_info) == (said, None)
    assert bench.store_turn(turn)


def test_a_load_over_several_segments_from_the_middle_of_the_first(bench: Bench) -> None:
    whole = bench.turn("a", 5)
    first = Turn(whole.page_keys[:3], whole.token_ids[:12], whole.slots[:12], [], model=bench.model)
    assert bench.store_turn(first)
    assert bench.store_turn(whole)
    assert bench.store.stats().num_segments == 2
    before = bench.rows(whole.slots[4:16])
    targets = torch.arange(40, 52)  # one page less than leased: ranks may agree on less
    load = bench.load(whole, targets, first_page=1)
    assert load.lease.num_pages == 4
    assert bench.loader.finish(bench.loader.start({"r": load}))
    for old, new in zip(before, bench.rows(targets), strict=True):
        assert torch.equal(old, new)


def test_a_damaged_block_between_others_is_found_before_a_row_of_its_layer_is_used(bench: Bench) -> None:
    whole = bench.turn("a", 6)
    for num_pages in (2, 4, 6):
        assert bench.store_turn(
            Turn(
                whole.page_keys[:num_pages],
                whole.token_ids[: 4 * num_pages],
                whole.slots[: 4 * num_pages],
                [],
                model=bench.model,
            )
        )
    targets, others = torch.arange(30, 54), torch.arange(54, 62)
    load = bench.load(whole, targets)
    assert len(load.readers) == 3
    layer = NUM_LAYERS - 1
    bench.store.host.buffer[load.lease.slices[1].spans[layer].offset] ^= 0x10
    before, stored = bench.rows(targets), bench.rows(whole.slots)
    assert not bench.loader.finish(bench.loader.start({"r": load}))
    for number, (old, new) in enumerate(zip(before, bench.rows(targets), strict=True)):
        if number % NUM_LAYERS == layer:
            # The segment before the damage is loaded all the same.
            assert torch.equal(new[:8], stored[number][:8])
            assert torch.equal(new[8:], old[8:])
        else:
            assert torch.equal(new, stored[number])
    assert bench.store.stats().corrupted_segments == 1
    # What lies before the damage is still found, and loaded by the next batch.
    assert bench.loader.finish(
        bench.loader.start(
            {
                "s": bench.load(
                    Turn(whole.page_keys[:2], whole.token_ids[:8], others, [], model=bench.model), others
                )
            }
        )
    )
    for old, new in zip(bench.rows(whole.slots[:8]), bench.rows(others), strict=True):
        assert torch.equal(old, new)


def test_only_missing_pages_are_stored(bench: Bench) -> None:
    assert bench.store_turn(bench.turn("a", 2))
    assert bench.store_turn(bench.turn("a", 5))
    assert bench.store_turn(bench.turn("a", 5))
    assert bench.offloader.counters.tokens == 5 * PAGE_SIZE
    assert bench.offloader.counters.segments == 2
    starts = [info.start_token for info in bench.store.list_segments()]
    assert sorted(starts) == [0, 2 * PAGE_SIZE]
    assert bench.store.stats().stored_bytes == 5 * PAGE_SIZE * TOKEN_BYTES


def test_two_turns_in_the_queue_store_their_common_prefix_once(bench: Bench) -> None:
    with Blocked(bench.offloader):
        bench.offloader.submit(bench.turn("a", 2))
        bench.offloader.submit(bench.turn("a", 2))
    bench.offloader.wait()
    assert [bench.offloader.pop_completed(), bench.offloader.pop_completed()] == [True, True]
    assert bench.offloader.counters.segments == 1


def test_turns_complete_in_order_and_none_is_skipped(bench: Bench) -> None:
    with Blocked(bench.offloader):
        for name in "abc":
            bench.offloader.submit(bench.turn(name, 8))
        assert bench.offloader.num_completed() == 0
    bench.offloader.wait()
    assert bench.offloader.num_completed() == 3
    assert [bench.offloader.pop_completed() for _ in range(3)] == [True] * 3
    assert bench.store.stats().num_pages == 24


def test_what_was_read_of_a_turn_that_was_given_up_is_never_stored(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its slots are given away, and written over, while they are copied."""
    reserving = Stuck(bench.store, "reserve", monkeypatch)
    turn = bench.turn("a", 2)
    job = bench.offloader.submit(turn)
    assert reserving.has_begun.wait(PATIENCE_S)
    bench.offloader.finish([job], 0.0, is_store_prompt=True)
    for buffer in bench.sglang_pool.k_buffer:
        buffer[turn.slots] = 7.0
    reserving.go_on.set()
    assert not bench.offloader.pop_completed()
    stats = bench.store.stats()
    assert (stats.num_pages, stats.num_reservations, stats.num_leases) == (0, 0, 0)
    counters = bench.offloader.counters
    assert (counters.turns, counters.dropped_turns) == (1, {"evicted": 1})
    assert bench.why_missing(turn) == [Run(0, 8, "dropped: evicted")]


def test_a_turn_that_was_read_is_not_waited_for_any_longer(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is committed though its slots are written over meanwhile, and comes back as it was."""
    committing = Stuck(bench.store, "commit", monkeypatch)
    turn = bench.turn("a", 2)
    before = bench.rows(turn.slots)
    job = bench.offloader.submit(turn)
    bench.offloader.finish([job], PATIENCE_S, is_store_prompt=True)
    assert not job.future.done()
    for buffer in (*bench.sglang_pool.k_buffer, *bench.sglang_pool.v_buffer):
        buffer[turn.slots] = 7.0
    committing.go_on.set()
    assert bench.offloader.pop_completed()
    assert bench.loader.finish(bench.loader.start({"r": bench.load(turn, turn.slots)}))
    for old, new in zip(before, bench.rows(turn.slots), strict=True):
        assert torch.equal(old, new)


def test_a_conversation_is_kept_as_long_as_its_request_says(bench: Bench) -> None:
    assert bench.store_turn(bench.turn("a", 2))
    assert bench.store.stats().pinned_bytes == 0
    # All of it, also what earlier turns stored, and what was stored before altogether.
    assert bench.store_turn(dataclasses.replace(bench.turn("a", 3), hint=Hint(ttl_s=600.0)))
    (pinned_s, *_) = [info.pinned_s for info in bench.store.list_segments()]
    assert 590.0 < pinned_s <= 600.0
    assert bench.store.stats().pinned_bytes == bench.store.stats().stored_bytes
    assert bench.store_turn(dataclasses.replace(bench.turn("a", 3), hint=Hint(ttl_s=5.0)))
    assert all(0.0 < info.pinned_s <= 5.0 for info in bench.store.list_segments())


def test_a_turn_that_cannot_be_kept_is_stored_all_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*args: object, **named: object) -> int:
        raise MemoryError

    monkeypatch.setattr(bench.store, "advise", fail)
    assert bench.store_turn(dataclasses.replace(bench.turn("a", 2), hint=Hint(ttl_s=600.0)))
    assert bench.store.stats().num_pages == 2


@pytest.mark.parametrize("is_measured", [False, True])
def test_the_store_learns_whose_a_turn_is_and_what_computing_it_takes(
    monkeypatch: pytest.MonkeyPatch, is_measured: bool
) -> None:
    head, own = ComputeCost(9.0, 9.0, 9.0), ComputeCost(1.0, 0.5, 0.25)
    costs = OnlineCosts(RestoreCosts(head, own, {DRAM_TIER: TierCost(0.0, 1.0)}))
    bench = Bench(costs=costs if is_measured else None)
    committed: list[SegmentManifest] = []
    commit = bench.store.commit

    def record(reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[int]) -> int:
        committed.append(manifest)
        return commit(reservation, manifest, checksums)

    monkeypatch.setattr(bench.store, "commit", record)
    assert bench.store_turn(dataclasses.replace(bench.turn("a", 2), tenant="t"))
    assert bench.store_turn(dataclasses.replace(bench.turn("a", 3), tenant="t"))
    assert [manifest.tenant for manifest in committed] == ["t", "t"]
    # 8 tokens, and 4 tokens after them, in each layer, by the engine itself.
    of_layers = [1.0 + 0.5 * 8 + 0.25 * 8 * 4, 1.0 + 0.5 * 4 + 0.25 * 4 * (8 + 2)]
    expected = [NUM_LAYERS * of_layer if is_measured else 0.0 for of_layer in of_layers]
    assert [manifest.recompute_s for manifest in committed] == expected
    assert {info.tenant for info in bench.store.list_segments()} == {"t"}
    bench.close()


def test_no_space_in_the_arena_is_skipped_and_counted() -> None:
    bench = Bench(capacity_bytes=2 * PAGE_SIZE * TOKEN_BYTES)
    assert not bench.store_turn(bench.turn("a", 3))
    assert bench.offloader.counters.dropped_turns == {"no room": 1}
    assert bench.why_missing(bench.turn("a", 3)) == [Run(0, 12, "dropped: no room")]
    assert bench.store.stats().used_bytes == 0
    assert bench.store_turn(bench.turn("b", 2))
    bench.close()


def test_a_failing_copy_leaves_no_reservation(bench: Bench) -> None:
    turn = bench.turn("a", 2)
    bad = Turn(
        turn.page_keys, turn.token_ids, turn.slots + NUM_SLOTS, [], model=bench.model
    )  # slots outside of the pool
    assert not bench.store_turn(bad)
    assert bench.offloader.counters.dropped_turns == {"error": 1}
    stats = bench.store.stats()
    assert (stats.num_reservations, stats.used_bytes) == (0, 0)
    assert bench.store_turn(turn)


def test_a_failing_load_is_reported_and_leaves_no_lease(bench: Bench) -> None:
    turn = bench.turn("a", 2)
    assert bench.store_turn(turn)
    index = bench.loader.start({"r": bench.load(turn, turn.slots + NUM_SLOTS * 2)})
    bench.loader.counter.set_consumer(index)
    with pytest.raises(LoadFailedError, match="loading failed"):
        bench.loader.counter.wait_until(0)
    assert not bench.loader.finish(index)
    assert bench.loader.counters.failed_batches == 1
    assert bench.store.stats().num_leases == 0


def test_what_runs_is_waited_for_and_releases_its_leases(bench: Bench) -> None:
    turn = bench.turn("a", 2)
    assert bench.store_turn(turn)
    bench.loader.start({rid: bench.load(turn, turn.slots) for rid in ("r1", "r2")})
    bench.loader.discard_all()
    assert bench.store.stats().num_leases == 0
    assert bench.loader.start({}) == -1


@pytest.mark.parametrize(
    ("owner", "call", "is_stored"), [("store", "reserve", False), ("pool", "gather", True)]
)
def test_while_the_store_is_late_only_copies_are_waited_for(
    owner: str, call: str, is_stored: bool, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(getattr(bench, owner), call, monkeypatch)
    job = bench.offloader.submit(bench.turn("a", 2))
    assert stuck.has_begun.wait(PATIENCE_S)
    later = threading.Timer(0.05, stuck.go_on.set)
    later.start()
    bench.offloader.finish([job], PATIENCE_S, is_store_prompt=False)
    assert stuck.go_on.is_set() == is_stored
    assert bench.offloader.pop_completed() == is_stored


@pytest.mark.parametrize("call", ["find_missing", "reserve", "commit"])
def test_a_flush_does_not_wait_for_the_store_and_nothing_comes_after_it(
    call: str, bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    stuck = Stuck(bench.store, call, monkeypatch)
    turn = bench.turn("a", 2)
    job = bench.offloader.submit(turn)
    assert stuck.has_begun.wait(PATIENCE_S)
    bench.offloader.discard_all()
    assert not job.future.done()
    clearing = threading.Thread(target=bench.offloader.clear, args=([bench.model],))
    clearing.start()
    stuck.go_on.set()
    clearing.join()
    job.future.result(PATIENCE_S)
    assert bench.store.find_missing(bench.model, turn.page_keys) == [range(2)]
    assert bench.store.stats().num_reservations == 0


def test_a_turn_that_was_read_is_stored_as_that_of_the_weights_that_computed_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    committing = Stuck(bench.store, "commit", monkeypatch)
    turn = bench.turn("a", 2)
    job = bench.offloader.submit(turn)
    assert job.has_read.wait(PATIENCE_S)
    bench.offloader.forget_read()
    assert (bench.offloader.num_pending(), job.future.done()) == (0, False)
    committing.go_on.set()
    assert job.future.result(PATIENCE_S)
    assert bench.store.find_missing(bench.model, turn.page_keys) == []


def test_discarded_offloads_neither_complete_nor_reappear(bench: Bench) -> None:
    with Blocked(bench.offloader):
        for name in "abc":
            bench.offloader.submit(bench.turn(name, 1))
        thread = threading.Thread(target=bench.offloader.discard_all)
        thread.start()
    thread.join()
    assert bench.offloader.num_completed() == 0
    assert bench.offloader.num_pending() == 0
    bench.store.clear(bench.model)
    assert bench.store.stats().used_bytes == 0


# ---- on a GPU ----


def test_a_turn_is_read_after_the_forward_has_written_it(strict: StrictDevice) -> None:
    bench = Bench(device=strict)
    ready = [strict.record(strict.new_stream()).of_torch for _ in ("schedule", "forward")]
    assert bench.store_turn(dataclasses.replace(bench.turn("a", 2), ready=ready))
    assert strict.module.waits_before("download", bench.offloader._stream) == ready
    assert strict.module.pageable_copies == 0
    bench.close()


def test_a_turn_is_stored_right_across_chunks(strict: StrictDevice, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", 1 << 10)
    monkeypatch.setattr(page_lock, "_touch_pages", lambda chunk: None)
    bench = Bench(device=strict)
    turn = bench.turn("a", 2)
    assert bench.store_turn(turn)
    downloads = [entry.host for entry in strict.module.log if entry.kind == "download"]
    assert len(downloads) > NUM_LAYERS
    assert max(map(len, downloads)) <= 1 << 10
    assert strict.module.pageable_copies == 0
    targets = turn.slots + 20
    before = bench.rows(turn.slots)
    assert bench.loader.finish(bench.loader.start({"r": bench.load(turn, targets)}))
    assert all(map(torch.equal, before, bench.rows(targets)))
    bench.close()


def copies_at_each_abort(bench: Bench, strict: StrictDevice, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many were under way: there must be none, because the bytes are somebody else's then."""
    under_way: list[int] = []
    abort = bench.store.abort

    def aborted(reservation: Reservation) -> None:
        under_way.append(len(strict.module.copies_under_way()))
        abort(reservation)

    monkeypatch.setattr(bench.store, "abort", aborted)
    return under_way


def test_bytes_are_given_back_when_no_copy_writes_them_any_more(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device=strict)
    under_way = copies_at_each_abort(bench, strict, monkeypatch)
    encode, encoded = NativeLayer.encode, list[None]()

    def fail_half_way(unit: NativeLayer, layers: Any) -> Any:
        encoded.append(None)
        if len(encoded) == 3:
            assert len(strict.module.copies_under_way()) == 2
            raise torch.OutOfMemoryError("CUDA out of memory")
        return encode(unit, layers)

    monkeypatch.setattr(NativeLayer, "encode", fail_half_way)
    assert not bench.store_turn(bench.turn("a", 2))
    assert under_way == [0]
    assert bench.offloader.counters.dropped_turns == {"error": 1}
    assert bench.store.stats().num_reservations == 0
    monkeypatch.setattr(NativeLayer, "encode", encode)
    assert bench.store_turn(bench.turn("a", 2))
    bench.close()


def test_bytes_that_may_still_be_written_are_not_given_back(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench = Bench(device=strict)
    under_way = copies_at_each_abort(bench, strict, monkeypatch)

    def fail(stream: object) -> None:
        raise RuntimeError("the device does not answer")

    strict.module.on_synchronize = fail
    assert not bench.store_turn(bench.turn("a", 2))
    assert under_way == []
    assert bench.store.stats().num_reservations == 1
    strict.module.on_synchronize = lambda stream: None
    strict.synchronize()
    assert bench.store_turn(bench.turn("b", 2))
    bench.close()


def test_a_long_turn_becomes_several_segments_of_bounded_layers(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Four pages each, of ten; neither storing nor loading has more of a layer beside the pool."""
    layer_bytes = 4 * PAGE_SIZE * TOKEN_BYTES // NUM_LAYERS
    bench = Bench(device=strict, max_layer_bytes=layer_bytes + PAGE_SIZE)
    gathered: list[int] = []
    gather = bench.pool.gather

    def counted(layer: int, slots: torch.Tensor) -> LayerKV:
        gathered.append(len(slots))
        return gather(layer, slots)

    monkeypatch.setattr(bench.pool, "gather", counted)
    turn = bench.turn("a", 10)
    before = bench.rows(turn.slots)
    assert bench.store_turn(turn)
    assert max(gathered) == 4 * PAGE_SIZE
    segments = bench.store.list_segments()
    assert sorted((info.start_token, info.num_tokens) for info in segments) == [(0, 16), (16, 16), (32, 8)]

    on_device: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()
    held: list[int] = []
    upload_joined = strict.upload_joined

    def watched(hosts: Sequence[Block]) -> torch.Tensor:
        uploaded = upload_joined(hosts)
        on_device.add(uploaded)
        held.append(sum(block.nbytes for block in on_device))
        return uploaded

    monkeypatch.setattr(strict, "upload_joined", watched)
    monkeypatch.setattr(interface, "MAX_JOINED_BYTES", layer_bytes)
    monkeypatch.setattr(loading, "MAX_BYTES_TOGETHER", layer_bytes)
    targets = torch.arange(NUM_SLOTS - 40, NUM_SLOTS)
    assert bench.loader.finish(bench.loader.start({"r": bench.load(turn, targets)}))
    # Two segments of the bound's size, and a shorter one, in each layer.
    assert held == [layer_bytes, layer_bytes, layer_bytes // 2] * NUM_LAYERS
    for old, new in zip(before, bench.rows(targets), strict=True):
        assert torch.equal(old, new)
    bench.close()


def test_what_follows_a_segment_without_room_is_not_stored_either(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would start where the prefix that is found has ended before."""
    bench = Bench(max_layer_bytes=2 * PAGE_SIZE * TOKEN_BYTES // NUM_LAYERS)
    reserve, has_room = bench.store.reserve, iter([True, False, True])

    def reserve_some(layer_num_bytes: Any, *args: Any, **kwargs: Any) -> Reservation | None:
        return reserve(layer_num_bytes, *args, **kwargs) if next(has_room) else None

    monkeypatch.setattr(bench.store, "reserve", reserve_some)
    monkeypatch.setattr(segment_writer, "ROOM_WAIT_S", 0.0)
    assert not bench.store_turn(bench.turn("a", 6))
    assert bench.offloader.counters.dropped_turns == {"no room": 1}
    assert bench.why_missing(bench.turn("a", 6)) == [Run(0, 8, "evicted"), Run(8, 24, "dropped: no room")]
    assert [(info.start_token, info.num_tokens) for info in bench.store.list_segments()] == [(0, 8)]
    bench.close()


class Blocked:
    """Keeps an offloader's worker busy, so that what is submitted inside waits in its queue."""

    def __init__(self, offloader: TurnOffloader) -> None:
        self._worker = offloader._worker
        self._go_on = threading.Event()

    def __enter__(self) -> None:
        self._worker.submit(self._go_on.wait)

    def __exit__(self, *args: object) -> None:
        self._go_on.set()
