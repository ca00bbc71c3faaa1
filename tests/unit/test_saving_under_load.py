"""Turns that are stored as they are and encoded later, when more end than there is room for."""

from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest
from test_engine_copies import (
    NUM_LAYERS,
    PAGE_SIZE,
    TOKEN_BYTES,
    Bench,
    FakeCapturedTurn,
    Stuck,
    losing_the_daemon,
)

from krul_backend.codec.pairs.units import CodedLayer
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.save import later_encoding
from krul_sglang.engine.save.later_encoding import LEAST_SHARE, LaterEncoder, copy_room
from krul_sglang.engine.save.turn import Turn
from tests.support.engine_builders import PATIENCE_S, computing
from tests.support.present import present
from tests.support.store_builders import put, wait_until

PAGE_BYTES = PAGE_SIZE * TOKEN_BYTES
LOSSY = Strategy.from_pairs(NUM_LAYERS, [], Precision.INT8)
SEGMENT_PAGES = 2
NUM_FREE = 4
"""Exact copies of so many pages may wait."""


class BusyBench(Bench):
    """Turns become segments of two pages each, and nothing is encoded until ``encode_now``."""

    def __init__(self, *, keeps_copies: bool = False, capacity_pages: int = 64) -> None:
        self.gate = TransferGate()
        super().__init__(
            capacity_bytes=capacity_pages * PAGE_BYTES,
            gate=self.gate,
            copy_room=NUM_FREE * PAGE_BYTES,
            keeps_copies=keeps_copies,
        )
        self.decision.strategy = LOSSY
        self.encoder: LaterEncoder = self.offloader.encoder
        self._may_encode = threading.Event()
        is_time_for = self.encoder._is_time_for
        self.encoder._is_time_for = lambda copy: self._may_encode.is_set() and is_time_for(copy)  # type: ignore[method-assign]

    def encode_now(self) -> None:
        self._may_encode.set()
        self.offloader.wait()

    def close(self) -> None:
        self._may_encode.set()
        super().close()

    def lease(self, turn: Turn, **kind: Any) -> Lease | None:
        return self.store.lease(self.model, turn.page_keys, turn.token_ids, **kind)

    def segments(self, turn: Turn, **kind: Any) -> list[tuple[int, int, bool]]:
        """First token, number of tokens, and whether it is exact, of each segment that a lookup finds."""
        lease = self.lease(turn, **kind)
        if lease is None:
            return []
        self.store.release(lease)
        return [
            (header.start_token, header.num_tokens, header.codec_params["codec"] == "native")
            for header in (piece.header for piece in lease.slices)
        ]

    def missing(self, turn: Turn) -> list[range]:
        return self.store.find_missing(self.model, turn.page_keys)

    def nothing_is_held(self) -> bool:
        stats = self.store.stats()
        return (stats.num_leases, stats.num_reservations, self.encoder.waiting_bytes, len(self.encoder)) == (
            0,
            0,
            0,
            0,
        )


@pytest.fixture
def busy() -> Iterator[BusyBench]:
    bench = BusyBench()
    yield bench
    bench.close()


# ---- turns that wait for room ----


def wait_until_wanting(busy: BusyBench) -> None:
    end_s = time.monotonic() + PATIENCE_S
    while not busy.encoder._num_wanting:
        assert time.monotonic() < end_s
        time.sleep(1e-3)


def test_a_turn_waits_for_room_and_encoding_is_hurried_for_it(busy: BusyBench) -> None:
    captured = FakeCapturedTurn()
    full, turn = busy.turn("full", NUM_FREE), busy.turn("a", 3, first_slot=24)
    turn = dataclasses.replace(turn, attention=captured)
    with computing(busy.gate):
        busy.gate.has_queue = True
        for each in (full, turn):
            busy.offloader.submit(each)
        assert busy.offloader.pop_completed()
        wait_until_wanting(busy)
        assert (busy.encoder._share(), busy.lease(turn)) == (1.0, None)
        busy._may_encode.set()
        assert busy.offloader.pop_completed()
    busy.encode_now()
    assert busy.missing(full) == busy.missing(turn) == []
    assert busy.decision.asked == [full, turn]
    assert captured.releases == 1
    assert busy.offloader.counters.dropped_turns == {}
    assert busy.nothing_is_held()


def test_a_turn_that_is_evicted_while_it_waits_keeps_what_was_copied(busy: BusyBench) -> None:
    captured = FakeCapturedTurn()
    busy.offloader.submit(busy.turn("full", 2))
    turn = dataclasses.replace(busy.turn("a", 7, first_slot=8), attention=captured)
    job = busy.offloader.submit(turn)
    assert busy.offloader.pop_completed()
    wait_until_wanting(busy)
    # Its first segment had room.
    assert busy.segments(turn) == [(0, 8, True)]
    busy.offloader.finish([job], 0.01, is_store_prompt=True)
    assert not busy.offloader.pop_completed()
    busy.encode_now()
    assert busy.segments(turn) == [(0, 8, False)]
    assert busy.offloader.counters.dropped_turns == {"evicted": 1}
    assert captured.releases == 1
    assert busy.nothing_is_held()


def test_room_is_made_while_an_evicted_turn_waits_for_it(busy: BusyBench) -> None:
    stats = busy.store.stats()
    sizes = [stats.largest_free_bytes // NUM_LAYERS] * NUM_LAYERS
    reservation = present(busy.store.reserve(sizes))
    job = busy.offloader.submit(busy.turn("a", 2))
    wait_until(lambda: busy.encoder.lacks_room)
    asked = []

    def make_room() -> None:
        if not asked:
            busy.store.abort(reservation)
        asked.append(job.has_read.is_set())

    busy.offloader.finish([job], PATIENCE_S, is_store_prompt=True, make_room=make_room)
    assert asked[0] is False
    assert not job.is_revoked
    assert busy.offloader.pop_completed()
    assert not busy.encoder.lacks_room


def test_a_turn_that_is_evicted_before_its_time_still_takes_part_in_what_ranks_decide(
    busy: BusyBench,
) -> None:
    captured = FakeCapturedTurn()
    turn = dataclasses.replace(busy.turn("a", 2), attention=captured)
    go_on = threading.Event()
    busy.offloader._worker.submit(go_on.wait)
    job = busy.offloader.submit(turn)
    busy.offloader.finish([job], 0.0, is_store_prompt=True)
    go_on.set()
    assert not busy.offloader.pop_completed()
    assert busy.decision.asked == [None]
    assert captured.releases == 1
    assert busy.segments(turn) == []
    assert busy.offloader.counters.dropped_turns == {"evicted": 1}


def test_a_flush_does_not_wait_for_room(busy: BusyBench) -> None:
    busy.offloader.submit(busy.turn("full", NUM_FREE))
    busy.offloader.submit(busy.turn("a", 3, first_slot=24))
    wait_until_wanting(busy)
    busy.offloader.discard_all()
    assert busy.nothing_is_held()


def test_a_copy_that_ends_after_a_flush_is_not_encoded(
    busy: BusyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    leasing = Stuck(busy.store, "lease", monkeypatch)
    job = busy.offloader.submit(busy.turn("a", 2))
    assert leasing.has_begun.wait(PATIENCE_S)
    busy.offloader.discard_all()
    leasing.go_on.set()
    assert not job.future.result(PATIENCE_S)
    assert busy.nothing_is_held()


def test_a_turn_larger_than_the_room_is_stored_piece_by_piece(busy: BusyBench) -> None:
    """Once its copies can be encoded; a single one always has room."""
    busy._may_encode.set()
    turn = busy.turn("a", 3 * NUM_FREE)
    assert busy.store_turn(turn)
    assert busy.missing(turn) == []
    assert [num_tokens for _, num_tokens, _ in busy.segments(turn)] == [SEGMENT_PAGES * PAGE_SIZE] * 6


def test_room_is_waited_for_and_a_lone_copy_always_has_some(busy: BusyBench) -> None:
    encoder = busy.encoder
    assert encoder.take_room(2 * encoder.room_bytes, lambda: True)
    assert not encoder.take_room(1, lambda: False)
    begin_s = time.monotonic()
    threading.Timer(0.05, encoder.give_room_back, [2 * encoder.room_bytes]).start()
    assert encoder.take_room(1, lambda: True)
    assert time.monotonic() < begin_s + PATIENCE_S / 2
    encoder.give_room_back(1)
    assert encoder.waiting_bytes == 0


def test_host_memory_that_is_full_for_a_moment_is_waited_for(busy: BusyBench) -> None:
    taken = present(busy.store.reserve((busy.store.stats().capacity_bytes,)))
    threading.Timer(0.05, busy.store.abort, [taken]).start()
    busy._may_encode.set()
    assert busy.store_turn(busy.turn("a", 2))
    assert busy.offloader.counters.dropped_turns == {}


# ---- exact copies that wait ----


def test_what_waits_is_pinned_and_found_as_it_is(busy: BusyBench) -> None:
    turn = busy.turn("a", 3)
    busy.offloader.submit(turn)
    assert busy.offloader.pop_completed()
    assert busy.offloader.num_pending() == 2
    # All other memory is asked for, several times over.
    for number in range(100):
        put(busy.store, f"other {number}", 0, 1, (PAGE_BYTES,) * NUM_LAYERS, busy.model)
    assert busy.segments(turn) == [(0, 8, True), (8, 4, True)]
    assert busy.missing(turn) == [range(3)]
    busy.encode_now()
    assert busy.segments(turn) == [(0, 8, False), (8, 4, False)]
    assert busy.missing(turn) == []
    assert busy.nothing_is_held()


def test_the_next_turn_stores_what_it_has_added_to_what_waits(busy: BusyBench) -> None:
    busy.offloader.submit(busy.turn("a", 2))
    busy.offloader.submit(busy.turn("a", 4))
    busy.offloader.submit(busy.turn("a", 4))
    assert [busy.offloader.pop_completed() for _ in range(3)] == [True] * 3
    assert busy.offloader.counters.fast_copy_bytes == 4 * PAGE_BYTES
    assert busy.segments(busy.turn("a", 4)) == [(0, 8, True), (8, 8, True)]
    busy.encode_now()
    assert busy.segments(busy.turn("a", 4)) == [(0, 8, False), (8, 8, False)]
    assert (busy.offloader.counters.segments, busy.offloader.counters.tokens) == (2, 16)


@pytest.mark.parametrize("keeps_copies", [True, False])
def test_an_exact_copy_stays_beside_its_encoded_form_or_goes(keeps_copies: bool) -> None:
    busy = BusyBench(keeps_copies=keeps_copies)
    turn = busy.turn("a", 2)
    busy.offloader.submit(turn)
    assert busy.offloader.pop_completed()
    busy.encode_now()
    assert busy.segments(turn) == [(0, 8, keeps_copies)]
    assert busy.segments(turn, fast_copies="skip") == [(0, 8, False)]
    assert busy.store.stats().fast_copy_bytes == (2 * PAGE_BYTES if keeps_copies else 0)
    assert busy.nothing_is_held()
    busy.close()


def test_a_damaged_exact_copy_is_not_encoded(busy: BusyBench) -> None:
    damaged, whole = busy.turn("a", 2), busy.turn("b", 2)
    for turn in (damaged, whole):
        busy.offloader.submit(turn)
        assert busy.offloader.pop_completed()
    lease = present(busy.lease(damaged))
    busy.store.release(lease)
    busy.store.host.buffer[lease.slices[0].spans[1].offset] ^= 0x10
    busy.encode_now()
    assert busy.offloader.counters.failed_encodings == 1
    assert busy.segments(damaged, fast_copies="skip") == []
    assert busy.missing(damaged) == [range(2)]
    # Those behind it are encoded.
    assert busy.segments(whole) == [(0, 8, False)]
    assert busy.nothing_is_held()


def test_an_encoding_that_fails_leaves_the_exact_copy(
    busy: BusyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **named: Any) -> None:
        raise CodecError("no such values")

    turn = busy.turn("a", 2)
    busy.offloader.submit(turn)
    assert busy.offloader.pop_completed()
    with monkeypatch.context() as patch:
        patch.setattr(CodedLayer, "encode", fail)
        busy.encode_now()
    assert busy.offloader.counters.failed_encodings == 1
    assert busy.segments(turn) == [(0, 8, True)]
    assert busy.nothing_is_held()
    # The next turn stores its pages again.
    assert busy.store_turn(turn)
    assert busy.segments(turn) == [(0, 8, False)]


def test_a_daemon_that_goes_while_pages_are_encoded_is_no_failed_encoding(
    busy: BusyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn = busy.turn("a", 2)
    busy.offloader.submit(turn)
    assert busy.offloader.pop_completed()
    monkeypatch.setattr(busy.store, "commit", losing_the_daemon(busy.store))
    busy.encode_now()
    counters = busy.offloader.counters
    assert (counters.failed_encodings, counters.dropped_turns) == (0, {"no answer": 1})
    assert busy.segments(turn) == [(0, 8, True)]
    assert busy.nothing_is_held()


# ---- the end ----


class Encoding:
    """Holds the thread that encodes when it has begun, until ``go_on``."""

    def __init__(self, busy: BusyBench, monkeypatch: pytest.MonkeyPatch) -> None:
        self.has_begun, self.go_on = threading.Event(), threading.Event()
        encode = CodedLayer.encode

        def encode_slowly(*args: Any) -> Any:
            if threading.current_thread().name == "krul-encode":
                self.has_begun.set()
                assert self.go_on.wait(PATIENCE_S)
            return encode(*args)

        monkeypatch.setattr(CodedLayer, "encode", encode_slowly)


def test_what_is_discarded_while_it_is_encoded_is_not_stored(
    busy: BusyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    encoding = Encoding(busy, monkeypatch)
    turns = busy.turn("a", 2), busy.turn("b", 2)
    for turn in turns:
        busy.offloader.submit(turn)
        assert busy.offloader.pop_completed()
    busy._may_encode.set()
    assert encoding.has_begun.wait(PATIENCE_S)
    busy.offloader.discard_all()
    assert busy.nothing_is_held() or busy.store.stats().num_reservations == 1
    encoding.go_on.set()
    # The thread goes on with what comes next.
    after = busy.turn("c", 2)
    assert busy.store_turn(after)
    assert [busy.missing(turn) for turn in (*turns, after)] == [[range(2)], [range(2)], []]
    assert busy.nothing_is_held()


def test_a_server_that_ends_encodes_what_it_has_time_for(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = BusyBench()
    turn = busy.turn("a", 2)
    busy.offloader.submit(turn)
    busy._may_encode.set()
    busy.offloader.close()
    assert busy.segments(turn) == [(0, 8, False)]
    assert busy.nothing_is_held()
    busy.close()


def test_a_server_that_ends_waits_no_longer_than_it_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(later_encoding, "_CLOSING_S", 0.05)
    busy = BusyBench()
    encoding = Encoding(busy, monkeypatch)
    for name in "ab":
        busy.offloader.submit(busy.turn(name, 2))
    busy._may_encode.set()
    assert encoding.has_begun.wait(PATIENCE_S)
    threading.Timer(0.2, encoding.go_on.set).start()
    busy.offloader.close()
    assert busy.nothing_is_held()
    assert busy.store.stats().num_segments == 0
    busy.close()


# ---- when, and how fast ----


@pytest.mark.parametrize(("num_pages", "share"), [(0, LEAST_SHARE), (1, 0.25), (2, 0.5), (4, 1.0), (8, 1.0)])
def test_the_share_of_a_core_follows_the_room_that_is_taken(
    num_pages: int, share: float, busy: BusyBench
) -> None:
    encoder = busy.encoder
    assert encoder.take_room(num_pages * PAGE_BYTES, lambda: True)
    # An idle server has cores to spare.
    assert encoder._share() == 1.0
    with computing(busy.gate):
        assert encoder._share() == share
        busy.gate.has_queue = True
        assert encoder._share() == share / 2
        encoder._is_hurried = True
        assert encoder._share() == 1.0
    encoder._is_hurried = False
    encoder.give_room_back(num_pages * PAGE_BYTES)


@pytest.mark.parametrize(
    ("num_taken", "age_s", "is_computing", "is_time"),
    [
        (0.1, 0.0, False, True),
        (0.7, 0.0, True, False),
        (0.75, 0.0, True, True),
        (0.1, 59.0, True, False),
        (0.1, 60.0, True, True),
    ],
)
def test_a_copy_is_encoded_when_idle_or_when_room_is_taken_or_old(
    num_taken: float, age_s: float, is_computing: bool, is_time: bool
) -> None:
    bench = Bench(gate=(gate := TransferGate()), copy_room=NUM_FREE * PAGE_BYTES)
    encoder = bench.offloader.encoder
    copy: Any = type("Copy", (), {"since_s": time.monotonic() - age_s})
    num_bytes = int(num_taken * encoder.room_bytes)
    assert encoder.take_room(num_bytes, lambda: True)
    if is_computing:
        with computing(gate):
            assert encoder._is_time_for(copy) == is_time
    else:
        assert encoder._is_time_for(copy) == is_time
    encoder.give_room_back(num_bytes)
    bench.close()


def test_copies_may_take_what_nothing_encoded_needs_and_half_of_memory_at_least(busy: BusyBench) -> None:
    capacity_bytes = busy.store.stats().capacity_bytes

    def room(num_ranks: int) -> int:
        return copy_room(busy.store, capacity_bytes // num_ranks, num_ranks)

    assert room(1) == int(0.9 * capacity_bytes)
    assert room(2) == int(0.9 * capacity_bytes) // 2
    # Natively stored turns count as encoded.
    busy.decision.strategy = Strategy.from_pairs(NUM_LAYERS)
    assert busy.store_turn(busy.turn("a", 16))
    unused_bytes = capacity_bytes - busy.store.stats().stored_bytes
    assert 0.5 * capacity_bytes < room(1) == int(0.9 * unused_bytes) < 0.9 * capacity_bytes
    for name in "bc":
        assert busy.store_turn(busy.turn(name, 16))
    assert room(1) == capacity_bytes // 2


def test_encoding_is_hurried_while_the_store_has_no_room(busy: BusyBench) -> None:
    """The copies of another server have taken it."""
    sizes = (busy.store.stats().capacity_bytes,)
    taken = present(busy.store.reserve(sizes, is_fast_copy=False))
    with computing(busy.gate):
        assert not busy.encoder._has_full_speed()
        busy.offloader.submit(busy.turn("a", 1))
        wait_until(busy.encoder._has_full_speed)
        busy.store.abort(taken)
        assert busy.offloader.pop_completed()
        assert not busy.encoder._has_full_speed()
    busy.encode_now()


def test_a_copy_whose_daemon_has_died_is_stored_again_at_once(
    busy: BusyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its bytes can still be read, but the next daemon does not know them."""
    write, written = busy.offloader.writer.write, list[bool]()

    def write_and_note(*args: Any, is_fast_copy: bool = False, **kwargs: Any) -> bool:
        written.append(is_fast_copy)
        return write(*args, is_fast_copy=is_fast_copy, **kwargs)

    monkeypatch.setattr(busy.offloader.writer, "write", write_and_note)
    with computing(busy.gate):
        busy.offloader.submit(busy.turn("a", 1))
        assert busy.offloader.pop_completed()
        assert not busy.encoder._has_full_speed()
        monkeypatch.setattr(busy.store, "is_held", lambda lease: False)
        assert busy.encoder._has_full_speed()
        busy.encode_now()
    assert written == [True, True, False]


def test_an_encoding_rests_by_its_share_and_waits_for_restores(
    busy: BusyBench, monkeypatch: pytest.MonkeyPatch
) -> None:
    rests: list[float] = []
    given_way = []
    monkeypatch.setattr(busy.gate, "rest", rests.append)
    give_way = busy.gate.give_way
    monkeypatch.setattr(
        busy.gate,
        "give_way",
        lambda patience: (given_way.append(threading.current_thread().name), give_way(patience)),
    )
    worked_s = iter(range(0, 1000, 3))
    monkeypatch.setattr(later_encoding.time, "thread_time", lambda: float(next(worked_s)))
    monkeypatch.setattr(busy.encoder, "_share", lambda: 0.25)
    busy.offloader.submit(busy.turn("a", 2))
    assert busy.offloader.pop_completed()
    busy.encode_now()
    # Three seconds of work for each layer, and three times as much rest.
    assert rests == [9.0] * NUM_LAYERS
    assert given_way.count("krul-encode") == NUM_LAYERS
