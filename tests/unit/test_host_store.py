from __future__ import annotations

import dataclasses
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import ManifestError, StoreClosedError
from krul_backend.segment import MAX_CODEC_PARAMS_BYTES
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.common.interface import block_checksum, block_checksums
from krul_backend.tiers.dram import host_store
from krul_backend.tiers.dram.eviction_plan import MAX_VISITED
from krul_backend.tiers.dram.host_store import HostStore
from tests.support.checksum_gate import ChecksumGate, install_gate, let_go, run_until_gate
from tests.support.present import present
from tests.support.store_builders import (
    PAGE_SIZE,
    commit_to,
    fill,
    flip_byte,
    lease_pages,
    make_manifest,
    make_model,
    offset_in,
    page_keys,
    put,
    stored_ids,
    tokens_of,
)

MODEL = make_model()
SUM = b"12345678"
"""As long as the checksum of a range."""


@pytest.fixture
def store() -> Iterator[HostStore]:
    store = HostStore(4096, LruPolicy())
    yield store
    store.close()


def test_what_was_written_comes_back(store: HostStore) -> None:
    segment_id, written = put(store, "c", 0, 3)
    lease = present(lease_pages(store, "c", 0, 3))
    assert lease.num_pages == 3
    (piece,) = lease.slices
    assert (piece.segment_id, piece.first_page, piece.end_page) == (segment_id, 0, 3)
    assert (piece.header.start_token, piece.header.num_tokens) == (0, 3 * PAGE_SIZE)
    assert tuple(block.tobytes() for block in piece.blocks) == written
    assert not any(block.flags.writeable for block in piece.blocks)


def test_byte_counts(store: HostStore) -> None:
    put(store, "c", 0, 3, sizes=(100, 60))
    reservation = present(store.reserve((65,)))
    stats = store.stats()
    assert (stats.stored_bytes, stats.stored_tokens, stats.num_pages) == (160, 12, 3)
    assert stats.used_bytes == 128 + 64 + 128
    assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes == 4096
    assert (stats.num_segments, stats.num_reservations, stats.committed_segments) == (1, 1, 1)
    store.abort(reservation)
    assert store.stats().used_bytes == 128 + 64


def test_nobody_sees_a_segment_before_its_commit(store: HostStore) -> None:
    reservation = present(store.reserve((100, 60)))
    assert [block.nbytes for block in reservation.blocks] == [100, 60]
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
    assert lease_pages(store, "c", 0, 2) is None
    commit_to(store, reservation, make_manifest("c", 0, 2, (100, 60)))
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == []


def test_missing_pages_come_as_maximal_runs(store: HostStore) -> None:
    put(store, "c", 2, 4)
    put(store, "c", 6, 7)
    assert store.find_missing(MODEL, page_keys("c", 0, 9)) == [range(2), range(4, 6), range(7, 9)]
    assert store.find_missing(MODEL, page_keys("c", 2, 4)) == []
    assert store.find_missing(MODEL, ()) == []


def test_a_lease_crosses_segments_and_ends_at_the_first_gap(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2)
    second, _ = put(store, "c", 2, 5)
    put(store, "c", 6, 8)
    lease = present(lease_pages(store, "c", 0, 8))
    assert lease.num_pages == 5
    assert [(s.segment_id, s.first_page, s.end_page) for s in lease.slices] == [(first, 0, 2), (second, 0, 3)]
    stats = store.stats()
    assert (stats.lookups, stats.hit_pages, stats.missed_pages) == (1, 5, 3)


def test_a_lease_can_start_and_end_inside_segments(store: HostStore) -> None:
    put(store, "c", 0, 4)
    put(store, "c", 4, 8)
    lease = present(lease_pages(store, "c", 1, 6))
    assert [(s.first_page, s.end_page) for s in lease.slices] == [(1, 4), (0, 2)]
    assert lease.num_pages == 5


def test_a_request_that_branches_off_gets_the_common_pages(store: HostStore) -> None:
    put(store, "c", 0, 6)
    keys = (*page_keys("c", 0, 2), *page_keys("other", 2, 6))
    lease = present(store.lease(MODEL, keys, tokens_of(keys)))
    assert lease.num_pages == 2


def test_a_miss_is_none_and_counted(store: HostStore) -> None:
    assert lease_pages(store, "c", 0, 4) is None
    assert store.lease(MODEL, (), np.zeros(0, np.int64)) is None
    stats = store.stats()
    assert (stats.lookups, stats.hit_pages, stats.missed_pages, stats.num_leases) == (2, 0, 4, 0)


@pytest.mark.parametrize("token", range(0, 6 * PAGE_SIZE, 3))
def test_a_wrong_token_ends_the_prefix_before_its_page(store: HostStore, token: int) -> None:
    put(store, "c", 0, 4)
    put(store, "c", 4, 6)
    keys = page_keys("c", 0, 6)
    token_ids = tokens_of(keys)
    token_ids[token] += 1
    lease = store.lease(MODEL, keys, token_ids)
    assert (lease.num_pages if lease is not None else 0) == token // PAGE_SIZE
    assert store.stats().token_mismatches == 1
    # Nothing is wrong with the stored segment itself.
    assert store.stats().num_segments == 2
    assert lease_pages(store, "c", 0, 6) is not None


def test_token_ids_of_the_wrong_length_are_an_error(store: HostStore) -> None:
    with pytest.raises(ValueError, match="2 pages of 4 tokens"):
        store.lease(MODEL, page_keys("c", 0, 2), np.zeros(7, np.int64))


def test_changing_the_callers_token_ids_later_changes_nothing(store: HostStore) -> None:
    reservation = present(store.reserve((100, 60)))
    manifest = make_manifest("c", 0, 2, (100, 60))
    commit_to(store, reservation, manifest)
    manifest.token_ids[:] = 0
    assert lease_pages(store, "c", 0, 2) is not None


def test_a_slice_at_another_position_ends_the_prefix(store: HostStore) -> None:
    put(store, "c", 0, 2)
    reservation = present(store.reserve((100, 60)))
    # Claims to follow page 1, but four pages further on.
    manifest = dataclasses.replace(
        make_manifest("c", 2, 4, (100, 60)), start_token=6 * PAGE_SIZE, layer_first_token=()
    )
    commit_to(store, reservation, manifest)
    lease = present(lease_pages(store, "c", 0, 4))
    assert lease.num_pages == 2
    assert store.stats().token_mismatches == 1
    alone = present(lease_pages(store, "c", 2, 4))
    assert alone.num_pages == 2


def test_models_never_meet(store: HostStore) -> None:
    other = dataclasses.replace(MODEL, tp_rank=1)
    put(store, "c", 0, 2)
    assert lease_pages(store, "c", 0, 2, other) is None
    assert store.find_missing(other, page_keys("c", 0, 2)) == [range(2)]
    _, written = put(store, "c", 0, 2, model=other, seed=5)
    lease = present(lease_pages(store, "c", 0, 2, other))
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    store.release(lease)
    store.clear(other)
    assert lease_pages(store, "c", 0, 2, other) is None
    assert lease_pages(store, "c", 0, 2) is not None


def test_tenants_never_meet(store: HostStore) -> None:
    # A tenant is part of every page key: equal tokens, other keys.
    put(store, "tenant-a", 0, 2)
    keys = page_keys("tenant-b", 0, 2)
    assert store.lease(MODEL, keys, tokens_of(page_keys("tenant-a", 0, 2))) is None
    assert store.stats().token_mismatches == 0


# Commit


def test_pages_committed_by_another_keep_their_first_copy(store: HostStore) -> None:
    reservations = [store.reserve((100, 60)) for _ in range(2)]
    assert all(reservations)
    written = [fill(reservation, seed) for seed, reservation in enumerate(reservations)]
    first = commit_to(store, reservations[0], make_manifest("c", 0, 3, (100, 60)))
    second = commit_to(store, reservations[1], make_manifest("c", 0, 3, (100, 60)))
    assert first != second
    assert stored_ids(store) == [first]
    assert store.stats().used_bytes == 128 + 64
    assert store.stats().committed_segments == 1
    lease = present(lease_pages(store, "c", 0, 3))
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written[0]


def test_a_segment_with_one_new_page_stays(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 3)
    second, _ = put(store, "c", 1, 4)
    assert stored_ids(store) == [first, second]
    assert store.stats().num_pages == 4
    lease = present(lease_pages(store, "c", 0, 4))
    assert [(s.segment_id, s.first_page, s.end_page) for s in lease.slices] == [(first, 0, 3), (second, 2, 3)]


def test_two_threads_that_commit_the_same_pages_leave_one_segment(store: HostStore) -> None:
    reservations = [store.reserve((100, 60)) for _ in range(8)]
    start = threading.Barrier(8)

    def commit(reservation: object) -> None:
        start.wait()
        commit_to(store, reservation, make_manifest("c", 0, 3, (100, 60)))  # type: ignore[arg-type]

    with ThreadPoolExecutor(8) as threads:
        list(threads.map(commit, reservations))
    stats = store.stats()
    assert (stats.num_segments, stats.used_bytes, stats.num_reservations) == (1, 192, 0)


@pytest.mark.parametrize("sizes", [(100, 61), (60, 100)])
def test_other_sizes_than_reserved_are_refused_and_freed(store: HostStore, sizes: tuple[int, ...]) -> None:
    reservation = present(store.reserve((100, 60)))
    with pytest.raises(ManifestError, match="differ from the reserved"):
        commit_to(store, reservation, make_manifest("c", 0, 1, sizes))
    stats = store.stats()
    assert (stats.used_bytes, stats.num_reservations, stats.num_segments) == (0, 0, 0)
    with pytest.raises(KeyError):
        store.abort(reservation)


def test_a_reservation_is_settled_once(store: HostStore) -> None:
    committed, aborted = present(store.reserve((100, 60))), present(store.reserve((100, 60)))
    manifest = make_manifest("c", 0, 1, (100, 60))
    commit_to(store, committed, manifest)
    store.abort(aborted)
    for reservation in (committed, aborted):
        with pytest.raises(KeyError, match="unknown, committed or aborted"):
            commit_to(store, reservation, manifest)
        with pytest.raises(KeyError, match="unknown, committed or aborted"):
            store.abort(reservation)
        # A late write of the holder's cannot reach bytes that are somebody else's by now.
        with pytest.raises(ValueError, match="read-only"):
            reservation.blocks[0][0] = 1


@pytest.mark.parametrize("sizes", [(), (-1,), (64, -1)])
def test_reservations_of_no_block_or_of_less_than_nothing_are_refused(
    store: HostStore, sizes: tuple[int, ...]
) -> None:
    with pytest.raises(ValueError, match="needs blocks, of no fewer than 0 bytes"):
        store.reserve(sizes)


# Eviction


def test_space_is_made_from_the_least_recently_used(store: HostStore) -> None:
    ids = [put(store, f"c{i}", 0, 1, sizes=(960, 64))[0] for i in range(4)]
    assert store.stats().free_bytes == 0
    lease = present(lease_pages(store, "c0", 0, 1))
    store.release(lease)
    new, _ = put(store, "new", 0, 1, sizes=(960, 64))
    assert sorted(stored_ids(store)) == sorted({*ids, new} - {ids[1]})
    stats = store.stats()
    assert (stats.evicted_segments, stats.evicted_bytes) == (1, 1024)


def test_tails_leave_before_heads_and_whole_segments_leave(store: HostStore) -> None:
    turns = [put(store, "long", i, i + 1, sizes=(448, 64))[0] for i in range(6)]
    recent, _ = put(store, "recent", 0, 1, sizes=(960, 64))
    survivors = [set(turns)]
    for i in range(5):
        put(store, f"new{i}", 0, 1, sizes=(448, 64))
        survivors.append(set(turns) & set(stored_ids(store)))
        assert survivors[-1] == set(turns[: 5 - i])
        stats = store.stats()
        assert stats.num_pages == stats.num_segments
    assert recent in stored_ids(store)


@pytest.mark.parametrize("is_fast_copy", [False, True])
def test_kv_of_a_draft_model_leaves_after_its_targets(is_fast_copy: bool) -> None:
    now_s = [0.0]
    store = HostStore(4096, LruPolicy(), clock=lambda: now_s[0])
    of_draft = dataclasses.replace(make_model("draft"), target=MODEL.fingerprint)
    draft, _ = put(store, "c", 0, 2, sizes=(448, 64), model=of_draft)
    put(store, "x", 0, 3, sizes=(3520, 64))
    target, _ = put(store, "c", 0, 1, sizes=(448, 64), is_fast_copy=is_fast_copy)
    assert set(stored_ids(store)) == {draft, target}, "its target's was still to come"
    now_s[0] = 60.0
    lease = present(store.lease(MODEL, page_keys("c", 0, 1), tokens_of(page_keys("c", 0, 1))))
    assert store.reserve((3520, 64)) is None, "only its target's may leave"
    store.release(lease)
    first, _ = put(store, "y", 0, 1, sizes=(3520, 64))
    assert set(stored_ids(store)) == {draft, first}
    second, _ = put(store, "z", 0, 1, sizes=(4032, 64))
    assert stored_ids(store) == [second]


def test_committing_a_turn_keeps_the_head_of_its_conversation(store: HostStore) -> None:
    head, _ = put(store, "old", 0, 1, sizes=(960, 64))
    other, _ = put(store, "other", 0, 1, sizes=(960, 64))
    tail, _ = put(store, "old", 1, 2, sizes=(960, 64))
    last, _ = put(store, "more", 0, 2, sizes=(960, 64))
    new, _ = put(store, "new", 0, 1, sizes=(960, 64))
    assert set(stored_ids(store)) == {head, tail, last, new}
    assert other not in stored_ids(store)


def test_leasing_from_the_middle_keeps_what_comes_before(store: HostStore) -> None:
    head, _ = put(store, "c", 0, 1, sizes=(960, 64))
    tail, _ = put(store, "c", 1, 2, sizes=(960, 64))
    for i in range(2):
        put(store, f"x{i}", 0, 1, sizes=(960, 64))
    lease = present(lease_pages(store, "c", 1, 2))
    store.release(lease)
    put(store, "y", 0, 1, sizes=(1984, 64))
    assert {head, tail} < set(stored_ids(store))


@settings(max_examples=40)
@given(history=st.lists(st.tuples(st.integers(0, 3), st.booleans(), st.integers(1, 400)), max_size=60))
def test_a_stored_conversation_never_has_a_hole(history: list[tuple[int, bool, int]]) -> None:
    """Conversations that grow a turn at a time, from what is left of them: what is stored is a prefix."""
    store = HostStore(2048, LruPolicy())
    for step, (conversation, is_lease, num_bytes) in enumerate(history):
        name = f"c{conversation}"
        keys = page_keys(name, 0, 64)
        missing = store.find_missing(MODEL, keys)
        if is_lease:
            lease = store.lease(MODEL, keys, tokens_of(keys))
            if lease is not None:
                store.release(lease)
        else:
            turn = missing[0].start
            reservation = present(store.reserve((num_bytes, 64)))
            # Making room may have cut off this conversation's own end.
            if store.find_missing(MODEL, keys)[0].start == turn:
                fill(reservation, step)
                commit_to(store, reservation, make_manifest(name, turn, turn + 1, (num_bytes, 64)))
            else:
                store.abort(reservation)
        for other in range(4):
            runs = store.find_missing(MODEL, page_keys(f"c{other}", 0, 64))
            assert len(runs) == 1
            assert runs[0].stop == 64


def test_a_reservation_larger_than_the_arena_evicts_nothing(store: HostStore) -> None:
    put(store, "c", 0, 1)
    assert store.reserve((4097,)) is None
    assert store.reserve((2048, 2049)) is None
    stats = store.stats()
    assert (stats.rejected_reservations, stats.evicted_segments, stats.num_segments) == (2, 0, 1)
    assert (stats.num_reservations, stats.used_bytes) == (0, 192)


def test_a_reservation_that_pinned_bytes_leave_no_room_for_evicts_nothing(store: HostStore) -> None:
    put(store, "leased", 0, 1, sizes=(960, 64))
    put(store, "idle", 0, 1, sizes=(960, 64))
    lease = present(lease_pages(store, "leased", 0, 1))
    present(store.reserve((1024,)))
    assert store.reserve((1024, 1025)) is None
    assert store.stats().evicted_segments == 0
    assert store.reserve((1024, 1024)) is not None
    assert store.stats().evicted_segments == 1
    assert stored_ids(store) == [lease.slices[0].segment_id]


def test_a_reservation_that_fragmentation_leaves_no_room_for_evicts_nothing() -> None:
    store = HostStore(64 * 8, LruPolicy())
    for i in range(4):
        put(store, f"c{i}", 0, 1, sizes=(64, 64))
    # Eight blocks in order: 0 0 1 1 2 2 3 3. With 1 and 3 pinned no gap is wider than two blocks.
    leases = [lease_pages(store, f"c{i}", 0, 1) for i in (1, 3)]
    assert all(leases)
    assert store.reserve((192,)) is None
    assert store.stats().evicted_segments == 0
    assert store.stats().num_segments == 4
    assert store.reserve((128, 128)) is not None
    assert store.stats().evicted_segments == 2


def test_fragmentation_costs_as_many_evictions_as_real_extents_need() -> None:
    store = HostStore(64 * 8, LruPolicy())
    for i in range(4):
        put(store, f"c{i}", 0, 1, sizes=(64, 64))
    lease = present(lease_pages(store, "c1", 0, 1))
    store.release(lease)
    # In order 0, 2, 3, 1: after 0 and 2 there are 256 bytes free, but only 3 makes 256 of them adjacent, and
    # those are not 0's.
    first_id = stored_ids(store)[0]
    assert store.reserve((256,)) is not None
    assert store.stats().evicted_segments == 2
    assert stored_ids(store) == [first_id, lease.slices[0].segment_id]


def test_a_tail_is_not_spared_when_its_head_leaves() -> None:
    store = HostStore(64 * 8, LruPolicy())
    put(store, "c", 0, 1, sizes=(64, 64))
    put(store, "x", 0, 1, sizes=(64, 64))
    last_id, _ = put(store, "y", 0, 1, sizes=(64, 64))
    put(store, "c", 1, 2, sizes=(64, 64))
    for name in ("x", "y"):
        lease = present(lease_pages(store, name, 0, 1))
        store.release(lease)
    # In order tail, head, x, y. The head and x make room in one piece; nothing is placed on the tail.
    assert store.reserve((256,)) is not None
    assert stored_ids(store) == [last_id]


# Leases, zombies, clear, close


def test_leased_segments_are_never_evicted(store: HostStore) -> None:
    _, written = put(store, "c", 0, 1, sizes=(960, 64))
    lease = present(lease_pages(store, "c", 0, 1))
    for i in range(6):
        put(store, f"x{i}", 0, 1, sizes=(960, 64), seed=i + 1)
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    assert lease.slices[0].segment_id in stored_ids(store)


def test_release_is_once(store: HostStore) -> None:
    put(store, "c", 0, 1)
    lease = present(lease_pages(store, "c", 0, 1))
    assert store.stats().num_leases == 1
    store.release(lease)
    assert store.stats().num_leases == 0
    with pytest.raises(KeyError):
        store.release(lease)


def test_a_cleared_segment_keeps_its_bytes_until_the_last_release(store: HostStore) -> None:
    _, written = put(store, "c", 0, 2)
    leases = [lease_pages(store, "c", 0, 2) for _ in range(2)]
    store.clear()
    assert lease_pages(store, "c", 0, 2) is None
    stats = store.stats()
    assert (stats.num_segments, stats.num_pages, stats.stored_bytes, stats.used_bytes) == (0, 0, 0, 192)
    # The arena's other bytes are reused, these are not.
    filler = present(store.reserve((4096 - 192,)))
    fill(filler, 9)
    assert store.reserve((1,)) is None
    for lease in leases:
        assert lease is not None
        assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
        assert store.stats().used_bytes == 4096
        store.release(lease)
    store.abort(filler)
    assert store.stats().used_bytes == 0


def test_the_same_pages_can_be_stored_again_beside_their_zombie(store: HostStore) -> None:
    put(store, "c", 0, 2, seed=1)
    old = present(lease_pages(store, "c", 0, 2))
    store.clear()
    _, written = put(store, "c", 0, 2, seed=2)
    new = present(lease_pages(store, "c", 0, 2))
    assert tuple(block.tobytes() for block in new.slices[0].blocks) == written
    store.release(old)
    assert lease_pages(store, "c", 0, 2) is not None
    assert store.stats().used_bytes == 192


@pytest.mark.parametrize("model", [None, MODEL])
def test_clear_drops_what_was_reserved_before_it(store: HostStore, model: object) -> None:
    before = present(store.reserve((100, 60)))
    store.clear(model)  # type: ignore[arg-type]
    after = present(store.reserve((100, 60)))
    fill(before, 1)
    dropped = commit_to(store, before, make_manifest("c", 0, 2, (100, 60)))
    assert dropped not in stored_ids(store)
    assert lease_pages(store, "c", 0, 2) is None
    kept = commit_to(store, after, make_manifest("c", 0, 2, (100, 60)))
    assert stored_ids(store) == [kept]
    assert store.stats().used_bytes == 192


def test_a_clear_lets_others_work_and_keeps_what_they_store_meanwhile(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for conversation in "abcde":
        put(store, conversation, 0, 1)
    before = present(store.reserve((100, 60)))
    fill(before, 1)
    monkeypatch.setattr(host_store, "MAX_VISITED", 2)
    num_left: list[int] = []
    later: list[int] = []

    def work(seconds: float) -> None:
        num_left.append(store.stats().num_segments)
        if not later:
            dropped = commit_to(store, before, make_manifest("f", 0, 1, (100, 60)))
            assert dropped not in stored_ids(store)
            # All of its pages are in a segment that the clear has not removed yet.
            later.append(put(store, "e", 0, 1, seed=7)[0])

    monkeypatch.setattr(time, "sleep", work)
    store.clear()
    monkeypatch.undo()
    assert num_left == [5, 3, 1]
    assert stored_ids(store) == later
    assert lease_pages(store, "e", 0, 1) is not None
    assert store.stats().used_bytes == 192


def test_clearing_another_model_drops_nothing(store: HostStore) -> None:
    reservation = present(store.reserve((100, 60)))
    store.clear(make_model("another"))
    segment_id = commit_to(store, reservation, make_manifest("c", 0, 2, (100, 60)))
    assert stored_ids(store) == [segment_id]


def test_a_closed_store_says_so_but_lets_late_threads_end(store: HostStore) -> None:
    _, written = put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 2))
    reservation, other = present(store.reserve((100, 60))), present(store.reserve((100, 60)))
    store.close()
    store.close()
    # Views stay mapped: a copy that is under way neither crashes nor reads anything else.
    reservation.blocks[0][:] = 1
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    store.release(lease)
    store.abort(reservation)
    store.abort(reservation)
    for call in (
        lambda: store.find_missing(MODEL, ()),
        lambda: store.reserve((1,)),
        lambda: commit_to(store, other, make_manifest("c", 0, 1, (100, 60))),
        lambda: lease_pages(store, "c", 0, 2),
        lambda: store.path_segments(MODEL, page_keys("c", 0, 2)),
        lambda: store.trim(1, (4, 4), (50, 30)),
        store.stats,
        store.list_segments,
        store.verify,
        store.clear,
        lambda: store.buffer,
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_list_shows_what_an_operator_wants() -> None:
    now_s = 100.0
    store = HostStore(4096, LruPolicy(), lambda: now_s)
    first, _ = put(store, "c", 0, 2)
    second, _ = put(store, "c", 2, 3, sizes=(10, 20))
    now_s = 107.0
    assert lease_pages(store, "c", 0, 2) is not None
    now_s = 110.0
    one, two = store.list_segments()
    assert (one.segment_id, one.start_token, one.num_tokens, one.num_bytes) == (first, 0, 8, 160)
    assert (two.segment_id, two.start_token, two.num_tokens, two.num_bytes) == (second, 8, 4, 30)
    assert (one.idle_s, two.idle_s) == (3.0, 10.0)
    assert (one.num_leases, two.num_leases) == (1, 0)
    assert (one.model, one.fingerprint, one.codec) == ("tiny", MODEL.fingerprint, "raw")


# Damage


def damage(store: HostStore, conversation: str, first: int, end: int, layer: int, byte: int) -> None:
    lease = present(lease_pages(store, conversation, first, end))
    flip_byte(store, offset_in(store, lease.slices[0].blocks[layer]) + byte)
    store.release(lease)


@pytest.mark.parametrize(("layer", "byte"), [(0, 0), (0, 99), (1, 0), (1, 59)])
def test_reported_damage_is_a_miss_and_hurts_no_other_segment(
    store: HostStore, layer: int, byte: int
) -> None:
    first, first_written = put(store, "c", 0, 2, seed=1)
    second, _ = put(store, "c", 2, 4, seed=2)
    third, _ = put(store, "c", 4, 6, seed=3)
    other, _ = put(store, "d", 0, 2, seed=4)
    damage(store, "c", 2, 4, layer, byte)
    lease = present(lease_pages(store, "c", 0, 6))
    # Whoever reads the block sees it.
    block = lease.slices[1].blocks[layer]
    assert block_checksum(block) != lease.slices[1].checksums[layer]
    store.release(lease)
    assert store.report_damage(second)
    assert not store.report_damage(second)
    lease = present(lease_pages(store, "c", 0, 6))
    assert lease.num_pages == 2
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == first_written
    assert stored_ids(store) == [first, third, other]
    stats = store.stats()
    assert (stats.corrupted_segments, stats.num_segments, stats.used_bytes) == (1, 3, 3 * 192)
    assert store.find_missing(MODEL, page_keys("c", 0, 6)) == [range(2, 4)]
    # The hole can be filled again.
    put(store, "c", 2, 4, seed=5)
    healed = present(lease_pages(store, "c", 0, 6))
    assert healed.num_pages == 6


@pytest.mark.parametrize("is_committed", [False, True])
def test_a_stray_write_after_the_copy_is_found_by_the_reader(store: HostStore, is_committed: bool) -> None:
    reservation = present(store.reserve((100, 60)))
    fill(reservation, 1)
    checksums = block_checksums(reservation.blocks)
    stray = offset_in(store, reservation.blocks[1]) + 7
    if not is_committed:
        flip_byte(store, stray)
    segment_id = store.commit(reservation, make_manifest("c", 0, 2, (100, 60)), checksums)
    if is_committed:
        flip_byte(store, stray)
    lease = present(lease_pages(store, "c", 0, 2))
    (piece,) = lease.slices
    assert piece.checksums == checksums
    assert [block_checksum(block) == checksums[i] for i, block in enumerate(piece.blocks)] == [True, False]
    store.release(lease)
    assert store.report_damage(segment_id)
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
    assert (store.stats().corrupted_segments, store.stats().used_bytes) == (1, 0)


@pytest.mark.parametrize("checksums", [(), (SUM,), (SUM, SUM, SUM), (SUM, SUM[1:]), (SUM, SUM + SUM)])
def test_a_commit_needs_a_checksum_for_each_range(store: HostStore, checksums: tuple[bytes, ...]) -> None:
    reservation = present(store.reserve((100, 60)))
    with pytest.raises(ManifestError, match="checksum"):
        store.commit(reservation, make_manifest("c", 0, 1, (100, 60)), checksums)
    stats = store.stats()
    assert (stats.used_bytes, stats.num_reservations, stats.num_segments) == (0, 0, 0)


@pytest.mark.parametrize("params", [{"maps": "x" * MAX_CODEC_PARAMS_BYTES}, {"maps": object()}])
def test_codec_params_that_cannot_be_kept_are_refused(store: HostStore, params: dict[str, object]) -> None:
    reservation = present(store.reserve((100, 60)))
    manifest = dataclasses.replace(make_manifest("c", 0, 1, (100, 60)), codec_params=params)
    with pytest.raises(ManifestError, match="codec parameters"):
        commit_to(store, reservation, manifest)
    stats = store.stats()
    assert (stats.used_bytes, stats.num_reservations, stats.num_segments) == (0, 0, 0)
    largest = {"maps": "x" * (MAX_CODEC_PARAMS_BYTES - len('{"maps":""}'))}
    reservation = present(store.reserve((100, 60)))
    commit_to(store, reservation, dataclasses.replace(manifest, codec_params=largest))
    lease = present(lease_pages(store, "c", 0, 1))
    assert lease.slices[0].header.codec_params == largest


def test_a_commit_and_a_lease_read_no_block(store: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    reservation = present(store.reserve((100, 60)))
    num_threads = threading.active_count()
    for module in ("common.interface", "dram.stored_segment"):
        monkeypatch.setattr(f"krul_backend.tiers.{module}.block_checksum", None)
    store.commit(reservation, make_manifest("c", 0, 2, (100, 60)), (SUM, SUM[::-1]))
    lease = present(lease_pages(store, "c", 0, 2))
    assert lease.slices[0].checksums == (SUM, SUM[::-1])
    assert threading.active_count() == num_threads


def test_a_wrong_report_of_damage_changes_nothing(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 2)
    assert not store.report_damage(segment_id)
    assert not store.report_damage(segment_id + 1)
    assert stored_ids(store) == [segment_id]
    assert store.stats().corrupted_segments == 0
    # Nothing stays pinned by the look.
    assert store.reserve((4096,)) is not None


@pytest.mark.parametrize("num_tokens", [1, 3])
def test_a_lease_tells_the_checksums_of_what_was_written(store: HostStore, num_tokens: int) -> None:
    _, written = put(store, "c", 0, num_tokens, seed=num_tokens)
    lease = present(lease_pages(store, "c", 0, num_tokens))
    (piece,) = lease.slices
    assert piece.checksums == tuple(xxhash.xxh3_64_digest(block) for block in written)
    for (offset, num_bytes), block in zip(piece.spans, written, strict=True):
        assert store.buffer[offset : offset + num_bytes].tobytes() == block
    assert (piece.tier, piece.status, lease.is_in_dram) == ("dram", None, True)
    assert store.fetch(lease)[0].spans == piece.spans


def test_a_damaged_segment_takes_only_its_own_pages_along(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 3)
    second, _ = put(store, "c", 1, 4)
    damage(store, "c", 3, 4, 0, 0)
    assert store.verify().bad_segments == (second,)
    assert stored_ids(store) == [first]
    assert store.find_missing(MODEL, page_keys("c", 0, 4)) == [range(3, 4)]
    assert store.stats().num_pages == 3


def test_damage_under_a_lease_is_freed_at_its_release(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 2))
    flip_byte(store, offset_in(store, lease.slices[0].blocks[1]))
    assert store.report_damage(segment_id)
    assert lease_pages(store, "c", 0, 2) is None
    stats = store.stats()
    assert (stats.corrupted_segments, stats.num_segments, stats.used_bytes) == (1, 0, 192)
    store.release(lease)
    assert store.stats().used_bytes == 0


def test_verify_takes_out_exactly_the_damaged_segments(store: HostStore) -> None:
    ids = [put(store, f"c{i}", 0, 1, seed=i)[0] for i in range(5)]
    assert store.verify().bad_segments == ()
    damage(store, "c1", 0, 1, 0, 3)
    damage(store, "c4", 0, 1, 1, 3)
    assert store.verify().bad_segments == (ids[1], ids[4])
    assert stored_ids(store) == [ids[0], ids[2], ids[3]]
    assert store.verify().bad_segments == ()
    assert store.stats().corrupted_segments == 2
    assert store.stats().used_bytes == 3 * 192


# Races


@pytest.fixture
def gate(monkeypatch: pytest.MonkeyPatch) -> ChecksumGate:
    return install_gate(monkeypatch)


@pytest.mark.parametrize("call", ["verify", "report"])
def test_close_during_a_verification(store: HostStore, gate: ChecksumGate, call: str) -> None:
    segment_id, _ = put(store, "c", 0, 1)
    put(store, "c", 1, 2)
    calls = {"verify": store.verify, "report": lambda: store.report_damage(segment_id)}
    thread, results = run_until_gate(gate, calls[call])
    store.close()
    gate.checksum = SUM
    let_go(gate, thread)
    assert isinstance(results[0], StoreClosedError)


def test_an_interrupted_verification_leaves_no_pin(store: HostStore, monkeypatch: pytest.MonkeyPatch) -> None:
    segment_id, _ = put(store, "c", 0, 1)

    def interrupt(block: object, range_bytes: int) -> bytes:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr("krul_backend.tiers.dram.stored_segment.block_checksum", interrupt)
        with pytest.raises(KeyboardInterrupt):
            store.report_damage(segment_id)
        with pytest.raises(KeyboardInterrupt):
            store.verify()
    assert store.reserve((4096,)) is not None


@pytest.mark.parametrize("max_visited", [MAX_VISITED, 2])
def test_threads_that_do_everything_at_once_never_see_wrong_bytes(
    monkeypatch: pytest.MonkeyPatch, max_visited: int
) -> None:
    monkeypatch.setattr("krul_backend.tiers.dram.reservations.MAX_VISITED", max_visited)
    store = HostStore(48 * 1024, LruPolicy())
    stop_at = time.monotonic() + 1.5
    failures: list[str] = []
    num_leases = [0] * 4

    def content(conversation: str, page: int, layer: int) -> int:
        return (hash((conversation, page, layer)) & 0xFF) | 1

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        while time.monotonic() < stop_at:
            name = f"c{rng.integers(6)}"
            first = int(rng.integers(0, 5))
            if rng.random() < 0.5:
                sizes = tuple(int(size) for size in rng.integers(500, 4000, 2))
                reservation = store.reserve(sizes)
                if reservation is None:
                    continue
                for layer, block in enumerate(reservation.blocks):
                    block[:] = content(name, first, layer)
                if rng.random() < 0.1:
                    store.abort(reservation)
                else:
                    commit_to(store, reservation, make_manifest(name, first, first + 1, sizes))
            elif rng.random() < 0.02:
                store.clear()
            else:
                lease = lease_pages(store, name, first, 6)
                if lease is None:
                    continue
                num_leases[worker] += 1
                for piece in lease.slices:
                    page = piece.header.start_token // PAGE_SIZE
                    for layer, block in enumerate(piece.blocks):
                        if not (block == content(name, page, layer)).all():
                            failures.append(f"{name} page {page} layer {layer}")
                store.release(lease)
            stats = store.stats()
            if stats.used_bytes + stats.free_bytes != stats.capacity_bytes:
                failures.append(f"{stats}")

    with ThreadPoolExecutor(4) as threads:
        list(threads.map(work, range(4)))
    assert failures == []
    stats = store.stats()
    assert min(num_leases) > 0
    assert stats.evicted_segments > 0
    assert (stats.corrupted_segments, stats.num_leases, stats.num_reservations) == (0, 0, 0)
    store.clear()
    assert store.stats().used_bytes == 0
    assert store.reserve((48 * 1024,)) is not None
