"""Writing behind the commit when a tier does not take everything at once: nothing is lost or orphaned."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.dram.stored_segment import StoredSegment
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.present import present
from tests.support.ssd_builders import FILE_BYTES, FaultyDisk, busy_writer, open_tier, put_manifest
from tests.support.ssd_builders import SIZES as SSD_SIZES
from tests.support.ssd_builders import match as ssd_match
from tests.support.ssd_builders import put as put_on_ssd
from tests.support.store_builders import commit_to, make_manifest, page_keys, put, tokens_of
from tests.support.tiered_builders import MODEL, SIZES, Rig, put_below

MIB = 1 << 20


@pytest.fixture
def rig() -> Iterator[Rig]:
    made = Rig()
    yield made
    made.ssd.writes_go_on.set()
    made.store.close()


def ranges_of(rig: Rig) -> list[tuple[str, int]]:
    """First page key and number of pages of what the SSD has taken, in its order."""
    taken = [(manifest.page_keys[0], len(manifest.page_keys)) for manifest in rig.ssd.puts]
    held = [
        (record.manifest.page_keys[0], len(record.manifest.page_keys)) for record in rig.ssd.records.values()
    ]
    assert set(taken) == set(held), "flush waits for all that was taken"
    return taken


def test_what_a_full_queue_refuses_is_written_when_there_is_room(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(
        tmp_path, disk, capacity_bytes=8 * MIB, file_bytes=MIB, max_queued_bytes=2 * sum(SSD_SIZES)
    )
    store = TieredStore(HostStore(4 * MIB), [tier])
    num_conversations = 12
    disk.writes_go_on.clear()
    for first in (0, 2):
        for number in range(num_conversations):
            put(store, f"c{number}", first, first + 2, SSD_SIZES, seed=number)
    (stats,) = store.stats().tiers
    assert stats.queued_segments + stats.waiting_segments == 2 * num_conversations
    assert stats.waiting_segments >= 2 * num_conversations - 2
    assert store.find_missing(MODEL, page_keys("c11", 0, 4)) == [], "nobody but the store can offer it again"
    assert not store.flush(0.01)
    disk.writes_go_on.set()
    assert store.flush(20)
    (stats,) = store.stats().tiers
    assert (stats.num_segments, stats.waiting_segments) == (2 * num_conversations, 0)
    assert stats.skipped_segments == {}
    store.close()
    tier = open_tier(tmp_path, capacity_bytes=8 * MIB, file_bytes=MIB)
    for number in range(num_conversations):
        assert [run.num_pages for run in ssd_match(tier, f"c{number}", 0, 4)] == [2, 2]
    tier.close()


def test_what_a_tier_refused_is_offered_before_what_comes_later(rig: Rig) -> None:
    rig.ssd.refuses = True
    put(rig.store, "a", 0, 2)
    put(rig.store, "b", 0, 2)
    assert rig.store.stats().tiers[0].waiting_segments == 2
    assert rig.store.stats().tiers[1].waiting_segments == 0
    rig.ssd.refuses = False
    put(rig.store, "c", 0, 2)
    assert rig.store.flush(10)
    assert [key for key, _ in ranges_of(rig)] == ["a/0", "b/0", "c/0"]
    rig.assert_nothing_is_held()


def test_what_a_tier_refused_is_offered_before_memory_evicts_it(rig: Rig) -> None:
    rig.ssd.refuses = True
    capacity_bytes = rig.store.stats().capacity_bytes
    put(rig.store, "a", 0, 2)
    put(rig.store, "b", 0, 2)
    rig.ssd.refuses = False
    rig.ssd.writes_go_on.clear()
    assert rig.store.reserve((capacity_bytes,)) is None, "both are held while the tier copies them"
    rig.ssd.writes_go_on.set()
    assert rig.store.flush(10)
    assert len(ranges_of(rig)) == 2
    reservation = present(rig.store.reserve((capacity_bytes,)))
    rig.store.abort(reservation)
    assert rig.store.stats().tiers[0].skipped_segments == {}


def test_what_was_just_committed_is_not_evicted_before_it_is_offered(
    rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    commit = rig.host.commit_held

    def commit_and_evict(*args: Any) -> StoredSegment:
        segment = commit(*args)
        assert rig.host.reserve((rig.store.stats().capacity_bytes,)) is None
        return segment

    monkeypatch.setattr(rig.host, "commit_held", commit_and_evict)
    put(rig.store, "a", 0, 2)
    assert rig.store.flush(10)
    assert ranges_of(rig) == [("a/0", 2)]
    rig.assert_nothing_is_held()


def test_what_leaves_memory_first_and_what_continues_it_is_counted_by_cause(rig: Rig) -> None:
    rig.ssd.refuses = True
    put(rig.store, "a", 0, 2)
    put(rig.store, "a", 2, 4)
    put(rig.store, "a", 4, 6)
    put(rig.store, "b", 0, 2)
    rig.host.discard(make_manifest("a", 0, 2, SIZES, MODEL))
    rig.ssd.refuses = False
    assert rig.store.flush(10)
    stats = rig.store.stats().tiers[0]
    assert stats.skipped_segments == {"behind": 1, "orphan": 2}
    assert stats.waiting_segments == 0
    assert ranges_of(rig) == [("b/0", 2)]


def test_what_is_cleared_waits_no_more_and_is_not_counted(rig: Rig) -> None:
    rig.ssd.refuses = True
    put(rig.store, "a", 0, 2)
    rig.store.clear(MODEL)
    rig.ssd.refuses = False
    assert rig.store.flush(10)
    assert rig.store.stats().tiers[0].waiting_segments == 0
    assert (rig.ssd.num_puts, rig.store.stats().tiers[0].skipped_segments) == (0, {})


def test_what_a_tier_has_evicted_is_written_again_before_what_continues_it(rig: Rig) -> None:
    put(rig.store, "a", 0, 2)
    put(rig.store, "a", 2, 4)
    assert rig.store.flush(10)
    rig.ssd.records.clear()
    rig.ssd.puts.clear()
    put(rig.store, "a", 4, 6)
    assert rig.store.flush(10)
    assert ranges_of(rig) == [("a/0", 2), ("a/2", 2), ("a/4", 2)]
    rig.assert_nothing_is_held()


def test_what_continues_an_arriving_segment_waits_for_it(rig: Rig) -> None:
    put_below(rig.mooncake, "a", 0, 2)
    rig.mooncake.reads_go_on.clear()
    keys = page_keys("a", 0, 2)
    assert rig.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 2
    put(rig.store, "a", 2, 4)
    put(rig.store, "b", 0, 2)
    assert rig.store.flush(10)
    assert ranges_of(rig) == [("b/0", 2)]
    assert rig.store.stats().tiers[0].waiting_segments == 1
    rig.mooncake.reads_go_on.set()
    while rig.store.stats().tiers[0].waiting_segments:
        time.sleep(1e-3)
    assert rig.store.flush(10)
    written = [("b/0", 2), ("a/0", 2), ("a/2", 2)]
    assert ranges_of(rig) == written
    # What arrived may be offered after that, too.
    arrived = present(rig.store.host.hold(rig.store.path_segments(MODEL, keys)[0].segment_id))
    rig.store._write_behind.submit(arrived, [rig.ssd])
    rig.store.host.unhold(arrived)
    assert rig.store.flush(10)
    assert ranges_of(rig) == written


def test_what_can_never_be_held_does_not_keep_others(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    store = TieredStore(HostStore(4 * MIB), [tier])
    put(store, "large", 0, 2, (8 * FILE_BYTES, 10))
    put(store, "large", 2, 4, SSD_SIZES)
    put(store, "other", 0, 2, SSD_SIZES)
    assert store.flush(20)
    (stats,) = store.stats().tiers
    assert (stats.num_segments, stats.waiting_segments) == (1, 0)
    # The first one was offered once more, before the one that continues it.
    assert stats.skipped_segments == {"too large": 2, "orphan": 1}
    store.close()


def test_segments_that_name_each_other_are_taken(rig: Rig) -> None:
    rig.ssd.refuses = True
    # The first segment says that it continues the second one, and the other way round.
    for parent, first in (("a/5", 2), ("a/3", 4)):
        reservation = present(rig.store.reserve(SIZES))
        keys = page_keys("a", first, first + 2)
        manifest = make_manifest("a", first, first + 2, SIZES, MODEL)
        object.__setattr__(manifest, "parent_key", parent)
        assert manifest.page_keys == keys
        commit_to(rig.store, reservation, manifest)
    rig.ssd.refuses = False
    assert rig.store.flush(10)
    assert sorted(ranges_of(rig)) == [("a/2", 2), ("a/4", 2)]


# On the disk itself


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def tier(tmp_path: Path, disk: FaultyDisk) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path, disk)
    yield opened
    opened.close()


def test_the_disk_takes_no_orphan(tier: SsdTier) -> None:
    put_on_ssd(tier, "a", 2, 4)
    assert not ssd_match(tier, "a", 2, 4)
    assert tier.stats().skipped_segments == {"orphan": 1}


def test_a_segment_and_its_continuation_are_written_in_one_go(tier: SsdTier, disk: FaultyDisk) -> None:
    with busy_writer(tier, disk):
        for first in (0, 2, 4):
            assert put_manifest(tier, make_manifest("a", first, first + 2, SSD_SIZES))
    assert tier.flush(20)
    assert len(ssd_match(tier, "a", 0, 6)) == 3
    assert tier.stats().skipped_segments == {}


def test_room_for_a_continuation_is_not_made_by_evicting_what_it_continues(tmp_path: Path) -> None:
    full = open_tier(tmp_path / "full")
    num_fitting = 0
    while not full.stats().evicted_segments:
        put_on_ssd(full, f"c{num_fitting}")
        num_fitting += 1
    full.close()
    tier = open_tier(tmp_path / "tier")
    # The first conversation is the one that was used longest ago, when the next segment needs room.
    for number in range(num_fitting - 1):
        put_on_ssd(tier, f"c{number}")
    assert not tier.stats().evicted_segments
    put_on_ssd(tier, "c0", 2, 4)
    assert tier.stats().evicted_segments
    assert tier.stats().skipped_segments == {}
    assert len(ssd_match(tier, "c0", 0, 4)) == 2
    tier.close()
