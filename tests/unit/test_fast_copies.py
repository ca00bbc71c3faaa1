"""Fast copies: pages stored a second time, in space that nothing else needs."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

from krul_backend.store.interface import KVStore
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.eviction import make_policy
from krul_backend.tiers.common.interface import Lease
from krul_backend.tiers.dram.host_store import HostStore
from tests.support.fake_tier import FakeTier
from tests.support.present import present
from tests.support.store_builders import (
    Clock,
    flip_byte,
    lease_pages,
    make_model,
    offset_in,
    page_keys,
    put,
    stored_ids,
    tokens_of,
)

MODEL = make_model()
SMALL, LARGE = (64, 64), (512, 512)


@pytest.fixture(params=["value", "lru"])
def store(request: pytest.FixtureRequest) -> Iterator[HostStore]:
    clock = Clock()
    store = HostStore(4096, make_policy(request.param, clock), clock)
    yield store
    store.close()


def ids_of(lease: Lease | None) -> list[int]:
    return [piece.segment_id for piece in present(lease).slices]


def test_a_lease_prefers_them_where_a_run_begins(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2, SMALL)
    second, _ = put(store, "c", 2, 4, SMALL)
    copy, written = put(store, "c", 2, 4, LARGE, is_fast_copy=True)
    lease = present(lease_pages(store, "c", 0, 4))
    assert ids_of(lease) == [first, copy]
    assert lease.num_pages == 4
    assert tuple(block.tobytes() for block in lease.slices[1].blocks) == written
    keys = page_keys("c", 0, 4)
    without = store.lease(MODEL, keys, tokens_of(keys), fast_copies="skip")
    assert ids_of(without) == [first, second]


def test_a_lease_that_avoids_them_has_them_where_there_is_nothing_else(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2, SMALL)
    put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    copy, _ = put(store, "c", 2, 4, LARGE, is_fast_copy=True)
    keys = page_keys("c", 0, 4)
    lease = present(store.lease(MODEL, keys, tokens_of(keys), fast_copies="avoid"))
    assert [(piece.segment_id, piece.is_fast_copy) for piece in lease.slices] == [
        (first, False),
        (copy, True),
    ]
    assert lease.num_pages == 4


def test_a_lease_of_nothing_but_them_ends_where_there_is_none(store: KVStore) -> None:
    put(store, "c", 0, 4, SMALL)
    copies = [put(store, "c", first, first + 1, SMALL, is_fast_copy=True)[0] for first in (0, 1, 3)]
    keys = page_keys("c", 0, 4)
    lease = present(store.lease(MODEL, keys, tokens_of(keys), fast_copies="only"))
    assert (ids_of(lease), lease.num_pages) == (copies[:2], 2)
    store.release(lease)
    keys = page_keys("c", 2, 4)
    assert store.lease(MODEL, keys, tokens_of(keys), fast_copies="only") is None


def test_a_lease_that_serves_no_request_is_no_lookup(store: KVStore) -> None:
    put(store, "c", 0, 2, SMALL)
    put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    before = store.stats()
    keys = page_keys("c", 0, 2)
    for kind in ("avoid", "skip", "only"):
        lease = present(store.lease(MODEL, keys, tokens_of(keys), fast_copies=kind))  # type: ignore[arg-type]
        store.release(lease)
    after = store.stats()
    assert (after.lookups, after.hit_pages) == (before.lookups, before.hit_pages)
    store.release(present(lease_pages(store, "c", 0, 2)))
    assert (store.stats().lookups, store.stats().hit_pages) == (before.lookups + 1, before.hit_pages + 2)


def test_they_can_be_dropped_and_stay_with_who_has_a_lease(store: KVStore) -> None:
    segment, _ = put(store, "c", 0, 2, SMALL)
    _, written = put(store, "c", 0, 2, (128, 128), is_fast_copy=True)
    others, _ = put(store, "d", 0, 2, (128, 128), is_fast_copy=True)
    lease = present(lease_pages(store, "c", 0, 2))
    store.drop_fast_copies(MODEL, page_keys("c", 1, 2))
    assert stored_ids(store) == [segment, others]
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    used_bytes = store.stats().used_bytes
    store.release(lease)
    assert store.stats().used_bytes == used_bytes - 256
    store.drop_fast_copies(MODEL, page_keys("c", 0, 2))
    assert ids_of(lease_pages(store, "c", 0, 2)) == [segment]


def test_one_is_found_before_the_segment_is_there_and_after_it_has_gone(store: HostStore) -> None:
    copy, _ = put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    assert ids_of(lease_pages(store, "c", 0, 2)) == [copy]
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
    assert store.path_segments(MODEL, page_keys("c", 0, 2)) == []


def test_they_leave_before_every_other_segment(store: HostStore) -> None:
    segments = [put(store, f"c{i}", 0, 2, SMALL)[0] for i in range(4)]
    copies = [put(store, f"c{i}", 0, 2, LARGE, is_fast_copy=True)[0] for i in range(3)]
    assert stored_ids(store) == [*segments, *copies]
    # The copies were used last, and still leave first; the segments stay.
    more = [put(store, f"d{i}", 0, 2, (256, 256))[0] for i in range(7)]
    assert stored_ids(store) == [*segments, *more]
    stats = store.stats()
    assert (stats.evicted_segments, stats.fast_copy_bytes) == (0, 0)


def test_they_displace_others_up_to_half_of_the_memory(store: HostStore) -> None:
    segments = [put(store, f"c{i}", 0, 2, LARGE)[0] for i in range(4)]
    first, _ = put(store, "d0", 0, 2, LARGE, is_fast_copy=True)
    present(lease_pages(store, "d0", 0, 2))
    second, _ = put(store, "d1", 0, 2, LARGE, is_fast_copy=True)
    assert len(set(stored_ids(store)) & set(segments)) == 2
    assert {first, second} <= set(stored_ids(store))
    # The first is pinned, and both are half of the memory: the next one takes the place of the second.
    third, _ = put(store, "d2", 0, 2, LARGE, is_fast_copy=True)
    assert {first, third} <= set(stored_ids(store))
    assert len(set(stored_ids(store)) & set(segments)) == 2


def test_their_space_is_taken_from_their_kind_first(store: HostStore) -> None:
    segments = [put(store, f"c{i}", 0, 2, LARGE)[0] for i in range(3)]
    old, _ = put(store, "c0", 0, 2, LARGE, is_fast_copy=True)
    new, _ = put(store, "c1", 0, 2, LARGE, is_fast_copy=True)
    assert stored_ids(store) == [*segments, new]
    assert store.reserve((1024, 512), is_fast_copy=True) is None
    stats = store.stats()
    assert (stats.rejected_reservations, stats.evicted_segments) == (0, 0)
    # The failure evicted nothing.
    assert stored_ids(store) == [*segments, new]
    assert old not in stored_ids(store)


def test_a_leased_one_stays(store: HostStore) -> None:
    copy, written = put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    lease = present(lease_pages(store, "c", 0, 2))
    for i in range(6):
        put(store, f"d{i}", 0, 2, LARGE)
    assert copy in stored_ids(store)
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    store.release(lease)
    put(store, "e", 0, 2, LARGE)
    assert copy not in stored_ids(store)


def test_a_use_of_one_is_a_use_of_the_segments_of_its_pages() -> None:
    clock = Clock()
    store = HostStore(4096, make_policy("lru", clock), clock)
    used, _ = put(store, "used", 0, 2, (896, 896))
    idle, _ = put(store, "idle", 0, 2, (896, 128))
    copy, _ = put(store, "used", 0, 2, (256, 256), is_fast_copy=True)
    lease = present(lease_pages(store, "used", 0, 2))
    assert ids_of(lease) == [copy]
    store.release(lease)
    put(store, "new", 0, 2, (896, 896))
    assert used in stored_ids(store)
    assert idle not in stored_ids(store)


def test_the_sums_leave_them_out(store: HostStore) -> None:
    put(store, "c", 0, 2, SMALL)
    before = store.stats()
    put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    after = store.stats()
    assert after.fast_copy_bytes == sum(LARGE)
    assert after.used_bytes == before.used_bytes + sum(LARGE)
    for name in ("stored_bytes", "stored_tokens", "num_segments", "num_pages", "committed_segments"):
        assert getattr(after, name) == getattr(before, name), name
    assert [info.is_fast_copy for info in store.list_segments()] == [False, True]


def test_a_damaged_one_leaves_and_the_segment_is_found(store: HostStore) -> None:
    segment, _ = put(store, "c", 0, 2, SMALL)
    copy, _ = put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    lease = present(lease_pages(store, "c", 0, 2))
    flip_byte(store, offset_in(store, np.asarray(lease.slices[0].blocks[1])))
    assert store.report_damage(copy)
    store.release(lease)
    assert ids_of(lease_pages(store, "c", 0, 2)) == [segment]


def test_a_second_one_of_the_same_pages_is_dropped(store: HostStore) -> None:
    copy, _ = put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    used_bytes = store.stats().used_bytes
    put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    assert stored_ids(store) == [copy]
    assert store.stats().used_bytes == used_bytes


def test_clear_drops_them(store: HostStore) -> None:
    put(store, "c", 0, 2, LARGE, is_fast_copy=True)
    store.clear(MODEL)
    assert lease_pages(store, "c", 0, 2) is None
    assert store.stats().used_bytes == 0


def test_a_tenant_over_its_quota_loses_its_own_first() -> None:
    store = HostStore(8192, make_policy("lru"), tenant_quota=0.25)
    mine, _ = put(store, "mine", 0, 2, SMALL, tenant="a")
    copy, _ = put(store, "mine", 0, 2, LARGE, tenant="a", is_fast_copy=True)
    other, _ = put(store, "other", 0, 2, LARGE, tenant="b", is_fast_copy=True)
    new, _ = put(store, "new", 0, 2, LARGE, tenant="a")
    assert stored_ids(store) == [mine, other, new]
    assert copy not in stored_ids(store)
    # A copy larger than the tenant's quota is not kept.
    assert store.reserve((1088, 1088), "a", is_fast_copy=True) is None
    assert stored_ids(store) == [mine, other, new]


def test_they_are_not_written_to_lower_tiers() -> None:
    host = HostStore(4096, make_policy("lru"))
    tier = FakeTier("ssd")
    store = TieredStore(host, (tier,))
    try:
        put(store, "c", 0, 2, LARGE, is_fast_copy=True)
        assert tier.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
        put(store, "c", 0, 2, SMALL)
        assert store.flush(10.0)
        assert tier.find_missing(MODEL, page_keys("c", 0, 2)) == []
        copies = [info.tiers for info in store.list_segments() if info.is_fast_copy]
        assert copies == [("dram",)]
    finally:
        store.close()
