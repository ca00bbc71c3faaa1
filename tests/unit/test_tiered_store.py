from __future__ import annotations

import dataclasses
import math
import subprocess
import sys
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from operator import attrgetter
from typing import Any

import numpy as np
import pytest

from krul_backend.errors import StoreClosedError, TierReadError
from krul_backend.planner.interface import TierCost
from krul_backend.segment import SegmentManifest
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import Prefetched, SegmentSlice, TierStats
from krul_backend.tiers.dram.stored_segment import StoredSegment
from tests.support.fake_tier import NUM_READ_THREADS, FakeTier
from tests.support.present import present
from tests.support.store_builders import (
    commit_to,
    lease_pages,
    make_manifest,
    make_model,
    page_keys,
    put,
    tokens_of,
    wait_until,
)
from tests.support.tiered_builders import (
    FLAGS_BYTES,
    MODEL,
    SIZES,
    TAKEN_BYTES,
    Rig,
    checksums_in,
    content_of,
    is_in_dram,
    put_below,
    put_in_dram,
    tiers_of,
    wait_for,
)


@pytest.fixture
def rig() -> Iterator[Rig]:
    with closing(Rig()) as rig:
        yield rig


# Leases over tiers


def test_a_lease_has_parts_of_every_tier_in_conversation_order(rig: Rig) -> None:
    first, first_content = put_in_dram(rig, "c", 0, 2)
    _, second_content = put_below(rig.ssd, "c", 2, 5)
    _, third_content = put_below(rig.mooncake, "c", 5, 6)
    fourth, fourth_content = put_in_dram(rig, "c", 6, 8)
    lease = present(lease_pages(rig.store, "c", 0, 10))
    assert tiers_of(lease) == [("dram", 2), ("ssd", 3), ("mooncake", 1), ("dram", 2)]
    assert (lease.num_pages, lease.is_in_dram) == (8, False)
    assert [piece.header.start_token for piece in lease.slices] == [0, 8, 20, 24]
    assert [len(piece.blocks) for piece in lease.slices] == [2, 0, 0, 2]
    pieces = rig.store.fetch(lease)
    assert wait_for(pieces) == [first_content, second_content, third_content, fourth_content]
    assert [pieces[0].segment_id, pieces[3].segment_id] == [first, fourth]
    stats = rig.store.stats()
    assert stats.tier_hit_pages == {"dram": 4, "ssd": 3, "mooncake": 1}
    assert (stats.lookups, stats.hit_pages, stats.missed_pages, stats.num_leases) == (1, 8, 2, 1)
    rig.store.release(lease)
    with pytest.raises(KeyError):
        rig.store.release(lease)
    with pytest.raises(KeyError):
        rig.store.fetch(lease)
    rig.assert_nothing_is_held()


def test_pages_that_dram_has_are_not_read_from_below(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 2)
    for first, end in ((0, 2), (2, 4), (4, 6)):
        put_below(rig.ssd, "c", first, end)
    put_in_dram(rig, "c", 4, 6)
    lease = lease_pages(rig.store, "c", 0, 6)
    assert tiers_of(lease) == [("dram", 2), ("ssd", 2), ("dram", 2)]


def test_a_lease_from_the_middle_of_a_lower_segment(rig: Rig) -> None:
    _, content = put_below(rig.ssd, "c", 0, 6)
    lease = present(lease_pages(rig.store, "c", 1, 4))
    (piece,) = lease.slices
    assert (piece.first_page, piece.end_page, lease.num_pages) == (1, 4, 3)
    (fetched,) = rig.store.fetch(lease)
    assert (fetched.first_page, fetched.end_page) == (1, 4)
    assert wait_for((fetched,)) == [content]
    # The whole segment came: its other pages are found, too.
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    assert tiers_of(lease_pages(rig.store, "c", 0, 6)) == [("dram", 6)]


def test_positions_must_go_on_across_tiers(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 2)
    manifest, _ = put_below(rig.ssd, "c", 2, 4)
    (record,) = rig.ssd.records.values()
    record.manifest = dataclasses.replace(manifest, start_token=24, layer_first_token=())
    assert tiers_of(lease_pages(rig.store, "c", 0, 4)) == [("dram", 2)]
    # Nor does DRAM go on after a lower tier with what claims another position.
    put_below(rig.ssd, "d", 0, 2)
    reservation = present(rig.host.reserve((100, 60)))
    odd = dataclasses.replace(
        manifest,
        page_keys=page_keys("d", 2, 4),
        parent_key="d/1",
        token_ids=tokens_of(page_keys("d", 2, 4)),
        start_token=24,
        layer_first_token=(),
    )
    commit_to(rig.host, reservation, odd)
    assert tiers_of(lease_pages(rig.store, "d", 0, 4)) == [("ssd", 2)]


def test_a_wrong_token_ends_the_prefix_in_a_lower_tier(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 4)
    keys = page_keys("c", 0, 4)
    token_ids = tokens_of(keys)
    token_ids[9] += 1
    assert tiers_of(rig.store.lease(MODEL, keys, token_ids)) == [("ssd", 2)]
    with pytest.raises(ValueError, match="4 pages of 4 tokens"):
        rig.store.lease(MODEL, keys, token_ids[:-1])


def test_a_miss_in_all_tiers(rig: Rig) -> None:
    assert lease_pages(rig.store, "c", 0, 4) is None
    stats = rig.store.stats()
    assert (stats.lookups, stats.hit_pages, stats.missed_pages, stats.num_leases) == (1, 0, 4, 0)


def test_an_error_in_a_lookup_releases_what_was_held(rig: Rig, monkeypatch: pytest.MonkeyPatch) -> None:
    put_in_dram(rig, "c", 0, 2)
    put_below(rig.ssd, "c", 2, 4)

    def fail(*args: object) -> tuple[()]:
        raise OSError("a bug of this tier")

    with monkeypatch.context() as patch:
        patch.setattr(rig.mooncake, "match", fail)
        with pytest.raises(OSError, match="a bug"):
            lease_pages(rig.store, "c", 0, 5)
    rig.assert_nothing_is_held()


def test_missing_is_what_no_tier_has(rig: Rig) -> None:
    put_in_dram(rig, "c", 1, 3)
    put_below(rig.ssd, "c", 4, 5)
    put_below(rig.mooncake, "c", 5, 7)
    missing = rig.store.find_missing(MODEL, page_keys("c", 0, 9))
    assert missing == [range(1), range(3, 4), range(7, 9)]
    assert rig.store.find_missing(MODEL, page_keys("c", 1, 3)) == []


# Fetches


def test_layers_land_one_by_one_and_the_segment_becomes_an_ordinary_one(rig: Rig) -> None:
    _, content = put_below(rig.ssd, "c", 0, 3)
    rig.ssd.num_free_layers = 1
    rig.ssd.reads_go_on.clear()
    lease = present(lease_pages(rig.store, "c", 0, 3))
    (piece,) = rig.store.fetch(lease)
    assert piece.status is not None
    assert piece.tier == "ssd"
    piece.status.wait(0, 10)
    assert piece.blocks[0].tobytes() == content[0]
    assert not piece.status.has_landed(1)
    assert not piece.blocks[1].flags.writeable
    # Another process finds the flags by where they lie in the arena.
    offset = piece.status.flags.ctypes.data - rig.host.buffer.ctypes.data
    assert rig.host.buffer[offset : offset + 2].tolist() == [1, 0]
    rig.ssd.reads_go_on.set()
    assert wait_for((piece,)) == [content]
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.store.release(lease)
    again = present(lease_pages(rig.store, "c", 0, 3))
    assert tiers_of(again) == [("dram", 3)]
    assert wait_for(again.slices) == [content]
    rig.store.release(again)
    assert rig.store.verify().bad_segments == ()
    assert rig.store.stats().failed_fetches == 0
    rig.assert_nothing_is_held()


def test_two_threads_that_fetch_the_same_segment_read_it_once(rig: Rig) -> None:
    _, content = put_below(rig.ssd, "c", 0, 3)
    rig.ssd.reads_go_on.clear()
    leases = [lease_pages(rig.store, "c", 0, 3) for _ in range(2)]
    start = threading.Barrier(2)
    fetched: list[SegmentSlice] = []

    def fetch(lease: object) -> None:
        start.wait()
        fetched.extend(rig.store.fetch(lease))  # type: ignore[arg-type]

    with ThreadPoolExecutor(2) as threads:
        list(threads.map(fetch, leases))
    assert fetched[0].segment_id == fetched[1].segment_id
    # A third one finds it on its way.
    third = present(lease_pages(rig.store, "c", 0, 3))
    assert tiers_of(third) == [("ssd", 3)]
    assert third.slices[0].segment_id == fetched[0].segment_id
    rig.ssd.reads_go_on.set()
    assert wait_for((*fetched, *rig.store.fetch(third))) == [content] * 3
    assert rig.ssd.num_reads == 1
    for lease in (*leases, third):
        assert lease is not None
        rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_a_copy_that_was_stored_meanwhile_is_used(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 3)
    lease = present(lease_pages(rig.store, "c", 0, 3))
    stored, content = put_in_dram(rig, "c", 0, 3)
    (piece,) = rig.store.fetch(lease)
    assert (piece.segment_id, piece.tier, rig.ssd.num_reads, rig.ssd.num_holds) == (stored, "dram", 0, 0)
    assert wait_for((piece,)) == [content]
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_a_copy_that_holds_less_than_was_promised_is_not_used(rig: Rig) -> None:
    _, content = put_below(rig.ssd, "c", 0, 3)
    lease = present(lease_pages(rig.store, "c", 0, 3))
    stored, _ = put_in_dram(rig, "c", 0, 3, range_bytes=20)
    assert rig.host.trim(stored, (4, 4), (60, 40)) == 60
    (piece,) = rig.store.fetch(lease)
    assert piece.segment_id != stored
    assert piece.header.layer_first_token == (0, 0)
    assert wait_for((piece,)) == [content]
    # It is the lease's alone, and goes with it.
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.store.release(lease)
    assert [info.segment_id for info in rig.host.list_segments()] == [stored]
    assert rig.store.stats().used_bytes == TAKEN_BYTES
    rig.assert_nothing_is_held()


def test_fetching_a_lease_again_gives_the_same_segments(rig: Rig) -> None:
    _, content = put_below(rig.ssd, "c", 0, 3)
    lease = present(lease_pages(rig.store, "c", 0, 3))
    pieces = (*rig.store.fetch(lease), *rig.store.fetch(lease))
    assert wait_for(pieces) == [content] * 2
    assert pieces[0].segment_id == pieces[1].segment_id
    assert rig.ssd.num_reads == 1
    wait_until(lambda: rig.store.stats().fetched_segments == 1)


def test_an_arriving_segment_is_not_evicted_or_trimmed(rig: Rig) -> None:
    _, content = put_below(rig.ssd, "c", 0, 3)
    rig.ssd.reads_go_on.clear()
    assert (
        rig.store.prefetch_pages(MODEL, page_keys("c", 0, 3), tokens_of(page_keys("c", 0, 3))).num_pages == 3
    )
    (info,) = rig.host.list_segments()
    assert rig.store.stats().num_leases == 0
    assert rig.store.reserve((64 * 64,)) is None
    assert rig.store.trim(info.segment_id, (4, 4), (60, 40)) == 0
    # Nor is what has not landed yet taken for damaged.
    assert not rig.store.report_damage(info.segment_id)
    assert rig.host.verify().num_blocks == 0
    rig.ssd.reads_go_on.set()
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    lease = present(lease_pages(rig.store, "c", 0, 3))
    assert wait_for(lease.slices) == [content]
    rig.store.release(lease)
    rig.assert_nothing_is_held()


# Failures


@pytest.mark.parametrize("error", [TierReadError("a broken disk"), ValueError("a bug")])
@pytest.mark.parametrize("fail_after", [0, 1])
def test_a_read_that_fails_tells_its_readers_and_leaves_nothing(
    rig: Rig, fail_after: int, error: Exception
) -> None:
    put_below(rig.ssd, "c", 0, 3)
    rig.ssd.fail_after, rig.ssd.read_error = fail_after, error
    rig.ssd.reads_go_on.clear()
    lease = present(lease_pages(rig.store, "c", 0, 3))
    (piece,) = rig.store.fetch(lease)
    rig.ssd.reads_go_on.set()
    assert piece.status is not None
    for layer in range(fail_after):
        piece.status.wait(layer, 10)
    for layer in range(fail_after, 2):
        with pytest.raises(TierReadError, match="could not be read"):
            piece.status.wait(layer, 10)
    wait_until(lambda: rig.store.stats().failed_fetches == 1)
    assert not is_in_dram(rig, "c", 0, 3)
    assert rig.store.stats().fetched_segments == 0
    # The bytes, flags too, stay until the reader has let go.
    assert rig.store.stats().used_bytes == TAKEN_BYTES + FLAGS_BYTES
    with pytest.raises(TierReadError, match="could not be read from ssd"):
        rig.store.fetch(lease)
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 0
    rig.assert_nothing_is_held()
    # And it can be fetched again.
    rig.ssd.fail_after = None
    assert (
        rig.store.prefetch_pages(MODEL, page_keys("c", 0, 3), tokens_of(page_keys("c", 0, 3))).num_pages == 3
    )
    wait_until(lambda: rig.store.stats().fetched_segments == 1)


def test_no_room_in_dram_is_an_error_and_keeps_what_came_before(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 2)
    put_below(rig.ssd, "c", 2, 3, sizes=(4000, 60))
    put_below(rig.ssd, "c", 3, 4)
    lease = present(lease_pages(rig.store, "c", 0, 4))
    assert tiers_of(lease) == [("ssd", 2), ("ssd", 1), ("ssd", 1)]
    with pytest.raises(TierReadError, match="no room in DRAM for 4060 bytes from ssd"):
        rig.store.fetch(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    assert rig.ssd.num_holds == 2
    assert rig.store.stats().failed_fetches == 1
    rig.store.release(lease)
    assert is_in_dram(rig, "c", 0, 2)
    rig.assert_nothing_is_held()


def test_no_room_for_a_prefetch_stops_it(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 2)
    put_below(rig.ssd, "c", 2, 3, sizes=(4000, 60))
    put_below(rig.ssd, "c", 3, 4)
    rig.ssd.reads_go_on.clear()
    keys = page_keys("c", 0, 4)
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 2
    # What is on its way already counts, and is not started again.
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 2
    rig.ssd.reads_go_on.set()
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    assert rig.store.prefetch_pages(MODEL, keys[:2], tokens_of(keys[:2])) == Prefetched(0)
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)) == Prefetched(0, "over quota")
    assert rig.ssd.num_reads == 1
    rig.assert_nothing_is_held()


def test_prefetches_on_their_way_leave_most_of_the_memory_to_others(rig: Rig) -> None:
    # A quarter of the arena is 1024 bytes.
    names = [f"c{number}" for number in range(8)]
    for name in names:
        put_below(rig.ssd, name, 0, 2, sizes=(300, 100))
    keys = {name: page_keys(name, 0, 2) for name in names}
    put_in_dram(rig, "stored", 0, 2)
    rig.ssd.reads_go_on.clear()
    prefetched = [rig.store.prefetch_pages(MODEL, each, tokens_of(each)) for each in keys.values()]
    assert prefetched == [Prefetched(2)] * 2 + [Prefetched(0, "too much at once")] * 6
    assert is_in_dram(rig, "stored", 0, 2)
    # A load is not limited.
    lease = present(lease_pages(rig.store, names[7], 0, 2))
    pieces = rig.store.fetch(lease)
    rig.ssd.reads_go_on.set()
    assert wait_for(pieces) == [content_of(names[7], 0, 2, (300, 100))]
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    rig.store.release(lease)
    # What has arrived does not count.
    for name, num_fetched in zip(names[2:5], (4, 5, 6), strict=True):
        assert rig.store.prefetch_pages(MODEL, keys[name], tokens_of(keys[name])).num_pages == 2
        wait_until(lambda num=num_fetched: rig.store.stats().fetched_segments == num)
    rig.assert_nothing_is_held()


def test_a_prefetch_of_one_large_segment_is_never_refused(rig: Rig) -> None:
    put_below(rig.ssd, "large", 0, 2, sizes=(3000, 100))
    keys = page_keys("large", 0, 2)
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 2
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.assert_nothing_is_held()


def test_what_was_prefetched_is_counted_once_as_found_or_as_wasted(rig: Rig) -> None:
    rig.ssd.reads_go_on.clear()
    for name in "cde":
        put_below(rig.ssd, name, 0, 2)
        keys = page_keys(name, 0, 2)
        assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 2
    # On its way is not there, but a load takes it.
    assert tiers_of(lease_pages(rig.store, "c", 0, 2)) == [("ssd", 2)]
    taken = present(lease_pages(rig.store, "e", 0, 2))
    rig.store.fetch(taken)
    rig.ssd.reads_go_on.set()
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    counted = attrgetter("prefetch_useful_bytes", "prefetch_wasted_bytes")
    assert counted(rig.store.stats()) == (sum(SIZES), 0)
    for _ in range(2):
        assert tiers_of(lease_pages(rig.store, "c", 0, 2)) == [("dram", 2)]
        assert counted(rig.store.stats()) == (2 * sum(SIZES), 0)
    rig.store.clear(MODEL)
    assert counted(rig.store.stats()) == (2 * sum(SIZES), sum(SIZES))


def test_what_a_load_fetches_is_no_prefetch(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 2)
    lease = present(lease_pages(rig.store, "c", 0, 2))
    rig.store.fetch(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    assert tiers_of(lease_pages(rig.store, "c", 0, 2)) == [("dram", 2)]
    rig.store.clear(MODEL)
    stats = rig.store.stats()
    assert (stats.prefetch_useful_bytes, stats.prefetch_wasted_bytes) == (0, 0)


def test_a_segment_below_is_not_found_for_a_few_of_its_pages(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 16)
    put_below(rig.ssd, "c", 16, 18)
    for num_pages, expected in ((1, 0), (2, 2)):
        keys = page_keys("c", 0, num_pages)
        assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == expected
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    put_below(rig.ssd, "d", 0, 16)
    assert lease_pages(rig.store, "d", 0, 1) is None
    lease = lease_pages(rig.store, "d", 0, 2)
    assert tiers_of(lease) == [("ssd", 2)]
    rig.store.release(lease)
    # The first page of many prompts, and all that follows it in one of them.
    put_below(rig.ssd, "e", 0, 32)
    put_below(rig.ssd, "f", 1, 5)
    keys = (*page_keys("e", 0, 1), *page_keys("f", 1, 5))
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 5
    wait_until(lambda: rig.store.stats().fetched_segments == 3)
    rig.assert_nothing_is_held()


def test_what_comes_before_a_segment_that_is_hardly_used_is_found(rig: Rig) -> None:
    put_in_dram(rig, "c", 0, 3)
    put_below(rig.ssd, "c", 3, 20)
    put_in_dram(rig, "c", 20, 22)
    lease = lease_pages(rig.store, "c", 0, 5)
    assert tiers_of(lease) == [("dram", 3)]
    rig.store.release(lease)
    lease = lease_pages(rig.store, "c", 0, 22)
    assert tiers_of(lease) == [("dram", 3), ("ssd", 17), ("dram", 2)]
    rig.store.release(lease)
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("step", ["admit", "lease_arrival"])
def test_an_error_while_a_segment_is_let_in_leaves_nothing(
    rig: Rig, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    put_below(rig.ssd, "c", 0, 3)
    lease = present(lease_pages(rig.store, "c", 0, 3))

    def fail(*args: object) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(rig.host, step, fail)
        with pytest.raises(MemoryError):
            rig.store.fetch(lease)
    assert rig.store.stats().used_bytes == 0
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_a_lease_released_while_its_segments_arrive_keeps_them_coming(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 3)
    rig.ssd.reads_go_on.clear()
    lease = present(lease_pages(rig.store, "c", 0, 3))
    rig.store.fetch(lease)
    rig.store.release(lease)
    rig.ssd.reads_go_on.set()
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    assert is_in_dram(rig, "c", 0, 3)
    rig.assert_nothing_is_held()


# Writing behind


def test_a_committed_segment_is_written_to_every_tier_and_held_meanwhile(rig: Rig) -> None:
    rig.ssd.writes_go_on.clear()
    _, written = put(rig.store, "c", 0, 2)
    wait_until(lambda: (rig.ssd.num_puts, rig.mooncake.num_puts) == (1, 1))
    wait_until(lambda: len(rig.mooncake.records) == 1)
    assert rig.store.reserve((64 * 64,)) is None
    rig.ssd.writes_go_on.set()
    assert rig.store.flush(10)
    for tier in rig.tiers:
        (record,) = tier.records.values()
        assert record.content == written
    rig.assert_nothing_is_held()


@pytest.mark.parametrize("error", [None, OSError("a bug")])
def test_a_tier_that_does_not_take_a_segment_holds_nothing(rig: Rig, error: Exception | None) -> None:
    rig.ssd.refuses, rig.ssd.put_error = True, error
    put(rig.store, "c", 0, 2)
    assert rig.store.flush(10)
    assert (len(rig.ssd.records), len(rig.mooncake.records)) == (0, 1)
    rig.assert_nothing_is_held()


def encoded(manifest: SegmentManifest, kind: str) -> SegmentManifest:
    return dataclasses.replace(manifest, codec_params={"kind": kind})


def add_encoded(tier: FakeTier, conversation: str, first: int, end: int, kind: str) -> SegmentManifest:
    manifest = encoded(make_manifest(conversation, first, end, SIZES, MODEL), kind)
    content = content_of(conversation, first, end)
    tier.add(manifest, content, checksums_in(manifest, content))
    return manifest


@pytest.mark.parametrize("is_in_dram", [True, False])
def test_what_cannot_be_decoded_leaves_every_tier_and_is_stored_again(rig: Rig, is_in_dram: bool) -> None:
    for tier in rig.tiers:
        add_encoded(tier, "c", 0, 2, "old")
        add_encoded(tier, "c", 2, 4, "known")
    if is_in_dram:
        rig.store.prefetch_pages(MODEL, page_keys("c", 0, 2), tokens_of(page_keys("c", 0, 2)))
        wait_until(lambda: rig.store.stats().fetched_segments == 1)
    lease = present(lease_pages(rig.store, "c", 0, 4))
    assert tiers_of(lease) == [("dram" if is_in_dram else "ssd", 2), ("ssd", 2)]
    first = lease.slices[0]
    assert first.header.codec_params == {"kind": "old"}
    assert rig.store.report_damage(first.segment_id, "undecodable")
    assert rig.store.find_missing(MODEL, page_keys("c", 0, 4)) == [range(2)]
    assert lease_pages(rig.store, "c", 0, 4) is None
    # It is reported once, and what nobody leases is not known by that number.
    rig.store.release(lease)
    assert not rig.store.report_damage(first.segment_id, "undecodable")
    assert not rig.store.report_damage(10**6, "undecodable")
    reservation = present(rig.store.reserve(SIZES))
    commit_to(rig.store, reservation, encoded(make_manifest("c", 0, 2, SIZES, MODEL), "new"))
    assert rig.store.flush(10)
    for tier in rig.tiers:
        kinds = [record.manifest.codec_params["kind"] for record in tier.records.values()]
        assert sorted(kinds) == ["known", "new"]
    lease = present(lease_pages(rig.store, "c", 0, 4))
    assert [part.header.codec_params["kind"] for part in lease.slices] == ["new", "known"]
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_what_cannot_be_decoded_keeps_its_bytes_for_its_readers(rig: Rig) -> None:
    segment_id, content = put_in_dram(rig, "c", 0, 2)
    lease = present(lease_pages(rig.store, "c", 0, 2))
    assert rig.store.report_damage(segment_id, "undecodable")
    assert wait_for(lease.slices) == [content]
    assert rig.store.stats().corrupted_segments == 0
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 0


def test_flush_is_late_when_a_write_is(rig: Rig) -> None:
    rig.ssd.writes_go_on.clear()
    put(rig.store, "c", 0, 2)
    assert not rig.store.flush(0.01)
    rig.ssd.writes_go_on.set()
    assert rig.store.flush(10)


def test_what_comes_from_the_cluster_is_written_to_the_disk_too(rig: Rig) -> None:
    _, content = put_below(rig.mooncake, "c", 0, 3)
    put_below(rig.ssd, "d", 0, 3)
    for name in "cd":
        keys = page_keys(name, 0, 3)
        assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 3
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    assert rig.store.flush(10)
    assert [record.content for record in rig.ssd.records.values()][1] == content
    # What came from the disk goes nowhere.
    assert (rig.ssd.num_puts, rig.mooncake.num_puts) == (1, 0)
    rig.assert_nothing_is_held()


def test_having_a_segment_saves_computing_it_or_reading_it_from_below(rig: Rig) -> None:
    rig.ssd._cost = TierCost(0.001, 1e-5)
    rig.mooncake._cost = TierCost(0.5, 1e-5)
    rig.ssd.writes_go_on.clear()
    rig.mooncake.writes_go_on.clear()
    segment_id, _ = put(rig.store, "c", 0, 2, recompute_s=0.25)
    segment = present(rig.host.hold(segment_id))
    assert segment.restore_s == 0.25
    before = segment.value
    rig.mooncake.writes_go_on.set()
    # From there it takes longer than computing it.
    wait_until(lambda: segment.lower_load_s is not None)
    assert segment.lower_load_s == pytest.approx(2 * 0.5 + 160e-5)
    assert segment.restore_s == 0.25
    rig.ssd.writes_go_on.set()
    wait_until(lambda: segment.restore_s < 0.25)
    assert segment.restore_s == pytest.approx(2 * 0.001 + 160e-5)
    wait_until(lambda: segment.value < before)
    assert segment.value == pytest.approx(before * math.sqrt(segment.restore_s / 0.25))
    rig.host.unhold(segment)
    assert rig.store.tier_costs()["mooncake"].latency_s == 0.5


# Clear, close, and what people ask for


def test_clear_reaches_all_tiers_and_what_is_on_its_way(rig: Rig) -> None:
    _, content = put_below(rig.mooncake, "c", 0, 3)
    put(rig.store, "d", 0, 2)
    rig.store.flush(10)
    rig.mooncake.num_free_layers = 1
    rig.mooncake.reads_go_on.clear()
    lease = present(lease_pages(rig.store, "c", 0, 3))
    pieces = rig.store.fetch(lease)
    rig.store.clear()
    assert lease_pages(rig.store, "c", 0, 3) is None
    assert lease_pages(rig.store, "d", 0, 2) is None
    rig.mooncake.reads_go_on.set()
    # Whoever had it under a lease before gets all of it, nobody else any of it.
    assert wait_for(pieces) == [content]
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.store.flush(10)
    assert (rig.ssd.records, rig.mooncake.records) == ({}, {})
    assert rig.store.find_missing(MODEL, page_keys("c", 0, 3)) == [range(3)]
    rig.store.release(lease)
    assert rig.store.stats().used_bytes == 0
    rig.assert_nothing_is_held()


def test_a_lease_from_before_a_clear_brings_nothing_back(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 3)
    put_below(rig.mooncake, "d", 0, 3)
    leases = [lease_pages(rig.store, name, 0, 3) for name in "cd"]
    rig.store.clear(MODEL)
    for lease in leases:
        assert lease is not None
        assert len(wait_for(rig.store.fetch(lease))) == 1
    wait_until(lambda: rig.store.stats().fetched_segments == 2)
    rig.store.flush(10)
    assert rig.store.stats().num_segments == 0
    assert rig.ssd.records == {}
    for lease in leases:
        assert lease is not None
        rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_clearing_another_model_leaves_what_is_on_its_way(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 3)
    lease = present(lease_pages(rig.store, "c", 0, 3))
    rig.store.clear(make_model("another"))
    rig.store.fetch(lease)
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    rig.store.release(lease)
    assert is_in_dram(rig, "c", 0, 3)


def test_a_clear_that_meets_a_segment_before_it_is_queued_keeps_it_out(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    go_on, entered = threading.Event(), threading.Event()
    commit = rig.host.commit_held

    def slow_commit(*args: Any) -> StoredSegment:
        segment = commit(*args)
        entered.set()
        assert go_on.wait(10)
        return segment

    monkeypatch.setattr(rig.host, "commit_held", slow_commit)
    thread = threading.Thread(target=lambda: put(rig.store, "c", 0, 2))
    thread.start()
    assert entered.wait(10)
    rig.store.clear()
    go_on.set()
    thread.join(10)
    assert rig.store.flush(10)
    assert (rig.ssd.num_puts, rig.mooncake.num_puts) == (0, 0)
    rig.assert_nothing_is_held()


def test_a_tier_that_cannot_be_cleared_does_not_keep_the_others(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(rig.store, "c", 0, 2)
    rig.store.flush(10)

    def fail(model: object) -> None:
        raise OSError("a bug")

    for tier, other in ((rig.ssd, rig.mooncake), (rig.mooncake, rig.ssd)):
        with monkeypatch.context() as patch:
            patch.setattr(tier, "clear", fail)
            with pytest.raises(OSError, match="a bug"):
                rig.store.clear()
        assert other.records == {}
    assert rig.store.stats().num_segments == 0


def test_a_cluster_that_hangs_does_not_hold_up_the_disk(rig: Rig) -> None:
    rig.mooncake.reads_go_on.clear()
    hanging = []
    for i in range(NUM_READ_THREADS + 1):
        put_below(rig.mooncake, f"m{i}", 0, 3)
        hanging.append(lease_pages(rig.store, f"m{i}", 0, 3))
    _, content = put_below(rig.ssd, "c", 0, 3)
    for lease in hanging:
        assert lease is not None
        rig.store.fetch(lease)
    wait_until(lambda: rig.mooncake.num_reads == NUM_READ_THREADS)
    lease = present(lease_pages(rig.store, "c", 0, 3))
    assert wait_for(rig.store.fetch(lease)) == [content]
    assert rig.mooncake.num_reads == NUM_READ_THREADS
    rig.mooncake.reads_go_on.set()
    wait_until(lambda: rig.store.stats().fetched_segments == len(hanging) + 1)
    for held in (*hanging, lease):
        assert held is not None
        rig.store.release(held)
    rig.assert_nothing_is_held()


def test_close_ends_reads_and_leases_and_writes_what_waits(rig: Rig) -> None:
    put_below(rig.ssd, "c", 0, 3)
    put_below(rig.mooncake, "d", 0, 3)
    rig.ssd.reads_go_on.clear()
    lease = present(lease_pages(rig.store, "c", 0, 3))
    present(lease_pages(rig.store, "d", 0, 3))
    rig.store.fetch(lease)
    put(rig.store, "e", 0, 1)
    rig.ssd.reads_go_on.set()
    rig.store.close()
    rig.store.close()
    rig.store.release(lease)
    assert [tier.num_holds for tier in rig.tiers] == [0, 0]
    assert [tier.is_closed for tier in rig.tiers] == [True, True]
    assert "e/0" in [record.manifest.page_keys[0] for record in rig.ssd.records.values()]
    for call in (
        lambda: lease_pages(rig.store, "c", 0, 3),
        lambda: rig.store.reserve((1,)),
        lambda: rig.store.prefetch_pages(MODEL, (), np.zeros(0, np.int64)),
        rig.store.stats,
        rig.store.clear,
    ):
        with pytest.raises(StoreClosedError):
            call()


def test_lists_say_where_a_segment_lies_and_name_it_once(rig: Rig) -> None:
    both, _ = put(rig.store, "c", 0, 2)
    rig.store.flush(10)
    alone, _ = put_in_dram(rig, "d", 0, 2)
    put_below(rig.mooncake, "e", 0, 3)
    tiers = {(info.segment_id, info.num_tokens): info.tiers for info in rig.store.list_segments()}
    assert tiers == {(both, 8): ("dram", "ssd", "mooncake"), (alone, 8): ("dram",), (2, 12): ("mooncake",)}


def test_a_tier_is_asked_for_its_counts_while_leases_can_be_given(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    was_locked: list[bool] = []
    of_tier = rig.ssd.stats

    def stats() -> TierStats:
        was_locked.append(rig.store._lock.locked())
        return of_tier()

    monkeypatch.setattr(rig.ssd, "stats", stats)
    rig.store.stats()
    assert was_locked == [False]


def test_verify_and_stats_cover_all_tiers(rig: Rig) -> None:
    segment_id, _ = put(rig.store, "c", 0, 2)
    put_below(rig.ssd, "d", 0, 2)
    rig.store.flush(10)
    report = rig.store.verify()
    assert (report.num_blocks, report.num_bytes, report.bad_segments) == (8, 4 * 160, ())
    assert [tier.num_segments for tier in rig.store.stats().tiers] == [2, 1]
    lease = present(lease_pages(rig.store, "c", 0, 2))
    rig.host.buffer[lease.slices[0].spans[0].offset] ^= 1
    rig.store.release(lease)
    assert rig.store.report_damage(segment_id)
    # The lower copy stands in.
    assert tiers_of(lease_pages(rig.store, "c", 0, 2)) == [("ssd", 2)]


def test_threads_that_do_everything_at_once_see_right_bytes_and_leave_nothing() -> None:
    rig = Rig(capacity_bytes=64 * 40)
    contents = {(name, i): put_below(rig.ssd, name, i, i + 1)[1] for name in "abc" for i in range(5)}
    failures: list[str] = []
    num_read = [0] * 3

    def work(worker: int) -> None:
        rng = np.random.default_rng(worker)
        for _ in range(120):
            name, choice = str(rng.choice(list("abc"))), rng.random()
            keys = page_keys(name, 0, 5)
            if choice < 0.2:
                rig.store.prefetch_pages(MODEL, keys, tokens_of(keys))
            elif choice < 0.3:
                rig.host.clear()
            else:
                lease = present(rig.store.lease(MODEL, keys, tokens_of(keys)))
                try:
                    pieces = rig.store.fetch(lease)
                    for piece, content in zip(pieces, wait_for(pieces), strict=True):
                        num_read[worker] += 1
                        if content != contents[name, piece.header.start_token // 4]:
                            failures.append(f"{name} {piece.header.start_token}")
                except TierReadError:
                    pass
                finally:
                    rig.store.release(lease)

    with ThreadPoolExecutor(3) as threads:
        list(threads.map(work, range(3)))
    assert failures == []
    assert min(num_read) > 0
    wait_until(lambda: rig.ssd.num_holds == 0)
    rig.assert_nothing_is_held()
    rig.store.close()


def test_the_store_needs_no_torch() -> None:
    code = "import sys, krul_backend.store.tiered_store; print('torch' in sys.modules)"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_a_store_without_lower_tiers_is_one_of_dram() -> None:
    rig = Rig()
    store = TieredStore(rig.host)
    _, written = put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 3))
    assert lease.is_in_dram
    assert wait_for(store.fetch(lease)) == [written]
    assert store.flush(1)
    assert (dict(store.tier_costs()), store.stats().tiers) == ({}, ())
    store.close()
