"""What lies in lower tiers, as a daemon's client sees it arrive."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from krul_backend.errors import TierReadError
from krul_backend.planner.interface import TierCost
from krul_backend.tiers.common.interface import Prefetched, SegmentTail
from krul_backend.tiers.common.read_queue import ReadPriority
from tests.support.daemon_builders import WatchedStore, serving
from tests.support.present import present
from tests.support.store_builders import lease_pages, put, wait_until
from tests.support.tiered_builders import MODEL, SIZES, Rig, put_below, put_in_dram, tiers_of, wait_for


@pytest.fixture
def rig() -> Iterator[Rig]:
    rig = Rig()
    yield rig
    rig.go_on()


@pytest.fixture
def store(rig: Rig) -> Iterator[WatchedStore]:
    with serving(rig.store) as runtime_dir:
        store = WatchedStore(runtime_dir, model=MODEL, request_timeout_s=10.0)
        yield store
        store.close()
    assert (store.counters.timeouts, store.counters.failures, store.counters.lost) == (0, 0, 0)


def test_layers_are_seen_when_they_land(rig: Rig, store: WatchedStore) -> None:
    _, first = put_in_dram(rig, "c", 0, 2)
    _, second = put_below(rig.ssd, "c", 2, 5)
    rig.ssd.num_free_layers = 1
    rig.ssd.reads_go_on.clear()
    lease = present(lease_pages(store, "c", 0, 5))
    assert tiers_of(lease) == [("dram", 2), ("ssd", 3)]
    assert not lease.is_in_dram
    assert [len(part.blocks) for part in lease.slices] == [2, 0]
    pieces = store.fetch(lease)
    assert [part.nbytes for part in pieces[1].blocks] == list(SIZES)
    status = present(pieces[1].status)
    status.wait(0, 20)
    assert pieces[1].blocks[0].tobytes() == second[0]
    assert not status.has_landed(1)
    with pytest.raises(TierReadError, match="did not arrive"):
        status.wait(1, 0.01)
    rig.ssd.reads_go_on.set()
    assert wait_for(pieces) == [first, second]
    store.release(lease)
    again = present(lease_pages(store, "c", 0, 5))
    assert again.is_in_dram
    assert wait_for(again.slices) == [first, second]
    store.release(again)


def test_a_read_that_fails_is_told_through_shared_memory(rig: Rig, store: WatchedStore) -> None:
    put_below(rig.ssd, "c", 0, 3)
    rig.ssd.fail_after = 1
    rig.ssd.reads_go_on.clear()
    lease = present(lease_pages(store, "c", 0, 3))
    status = present(store.fetch(lease)[0].status)
    rig.ssd.reads_go_on.set()
    with pytest.raises(TierReadError, match="could not be read"):
        status.wait(1, 20)
    store.release(lease)


def test_prefetched_pages_are_in_dram_by_the_time_of_the_lease(rig: Rig, store: WatchedStore) -> None:
    _, content = put_below(rig.mooncake, "c", 0, 3)
    ahead = present(lease_pages(store, "c", 0, 3))
    assert store.prefetch(ahead).num_pages == 3
    wait_until(lambda: store.stats().fetched_segments == 1)
    lease = present(lease_pages(store, "c", 0, 3))
    assert lease.is_in_dram
    assert wait_for(store.fetch(lease)) == [content]
    for each in (ahead, lease):
        store.release(each)
    with pytest.raises(KeyError):
        store.prefetch(ahead)


def test_a_prefetch_of_tails_reads_no_more(rig: Rig, store: WatchedStore) -> None:
    put_below(rig.ssd, "c", 0, 3, range_bytes=20)
    lease = present(lease_pages(store, "c", 0, 3))
    assert store.prefetch(lease, [SegmentTail((4, 8), (55, 30))], ReadPriority.REST) == Prefetched(3)
    wait_until(lambda: store.stats().fetched_segments == 1)
    assert rig.ssd.num_bytes_read == 60 + 40
    store.release(lease)


def test_a_refused_prefetch_says_why(rig: Rig, store: WatchedStore) -> None:
    put_below(rig.mooncake, "c", 0, 3)
    lease = present(lease_pages(store, "c", 0, 3))
    reservation = present(rig.host.reserve((store.stats().capacity_bytes,)))
    assert store.prefetch(lease) == Prefetched(0, "no room")
    rig.host.abort(reservation)
    assert store.prefetch(lease) == Prefetched(3)
    store.release(lease)


def test_tiers_costs_and_their_statistics(rig: Rig, store: WatchedStore) -> None:
    assert store.tier_costs() == {"ssd": TierCost(0.0, 1e-9), "mooncake": TierCost(0.0, 1e-9)}
    put(store, "c", 0, 2, SIZES)
    assert store.admin.flush(20.0) is True
    stats = store.stats()
    assert [(tier.name, tier.num_segments) for tier in stats.tiers] == [("ssd", 1), ("mooncake", 1)]
    (info,) = store.list_segments()
    assert info.tiers == ("dram", "ssd", "mooncake")


def test_a_clear_reaches_every_tier(rig: Rig, store: WatchedStore) -> None:
    put_in_dram(rig, "c", 0, 2)
    put_below(rig.ssd, "c", 2, 5)
    store.clear(MODEL)
    assert lease_pages(store, "c", 0, 5) is None
    assert rig.ssd.records == {}
