"""Pins, quotas and arrivals of the DRAM tier."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator

import numpy as np
import numpy.typing as npt
import pytest
import xxhash

from krul_backend.errors import ConfigError, StoreClosedError, TierReadError
from krul_backend.tiers.common.eviction import LruPolicy, ValuePolicy, make_policy
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import LayerStatus, Lease
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.eviction_plan import MAX_FREE_SHARE, MAX_VISITED, Candidate
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.dram.reservations import Arrival
from tests.support.present import present
from tests.support.store_builders import (
    Clock,
    commit_to,
    fill,
    lease_pages,
    make_manifest,
    make_model,
    page_keys,
    put,
    stored_ids,
)

MODEL = make_model()
NUM_LAYERS = 8
LAYERED_MODEL = make_model(num_layers=NUM_LAYERS)
BLOCKS = (b"a" * 100, b"b" * 60)


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> Iterator[HostStore]:
    store = HostStore(4096, LruPolicy(), clock)
    yield store
    store.close()


# Pins


def test_a_pinned_segment_stays_until_its_time_is_over(store: HostStore, clock: Clock) -> None:
    pinned, _ = put(store, "c", 0, 2, sizes=(960, 64))
    for i in range(3):
        put(store, f"x{i}", 0, 1, sizes=(960, 64))
    assert store.advise(MODEL, page_keys("c", 0, 3), Hint(ttl_s=10.0)) == 2
    (info,) = (info for info in store.list_segments() if info.segment_id == pinned)
    assert (info.pinned_s, store.stats().pinned_bytes) == (10.0, 1024)
    clock.now_s = 9.9
    for i in range(5):
        put(store, f"y{i}", 0, 1, sizes=(960, 64))
    assert pinned in stored_ids(store)
    assert store.reserve((4096,)) is None
    clock.now_s = 10.0
    assert store.stats().pinned_bytes == 0
    assert store.reserve((4096,)) is not None


def test_a_reservation_does_not_walk_past_what_is_pinned(
    clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = HostStore(192 * 40, ValuePolicy(clock), clock=clock)
    for number in range(20):
        put(store, f"p{number}", 0, 2)
        store.advise(MODEL, page_keys(f"p{number}", 0, 2), Hint(ttl_s=10.0))
    clock.now_s += 5.0
    for number in range(20):
        put(store, f"c{number}", 0, 2)
    looked_at: list[int] = []
    look = DramBooks._look

    def count(books: DramBooks, segment_id: int) -> Candidate | None:
        looked_at.append(segment_id)
        return look(books, segment_id)

    monkeypatch.setattr(DramBooks, "_look", count)
    put(store, "more", 0, 2)
    assert len(looked_at) == 1
    # Pinned no more: used longest ago.
    clock.now_s += 5.0
    looked_at.clear()
    put(store, "even-more", 0, 2)
    assert len(looked_at) == 1
    assert store.find_missing(MODEL, page_keys("p0", 0, 2)) == [range(2)]
    store.close()


def test_a_later_pin_replaces_an_earlier_one(store: HostStore, clock: Clock) -> None:
    put(store, "c", 0, 2, sizes=(960, 64))
    keys = page_keys("c", 0, 2)
    store.advise(MODEL, keys, Hint(ttl_s=10.0))
    store.advise(MODEL, keys, Hint(ttl_s=2.0))
    assert store.stats().pinned_bytes == 1024
    clock.now_s = 3.0
    assert store.stats().pinned_bytes == 0
    # Longer than before: the end of the first one ends nothing.
    store.advise(MODEL, keys, Hint(ttl_s=5.0))
    store.advise(MODEL, keys, Hint(ttl_s=20.0))
    clock.now_s = 11.0
    assert store.stats().pinned_bytes == 1024
    assert store.reserve((4096,)) is None


def test_pinning_again_and_again_leaves_few_entries_behind(store: HostStore, clock: Clock) -> None:
    put(store, "c", 0, 2)
    put(store, "d", 0, 2)
    with store._locked.open() as books:
        pins = books.pins
    for i in range(2_000):
        clock.now_s += 1.0
        assert store.advise(MODEL, page_keys("cd"[i % 2], 0, 2), Hint(ttl_s=86_400.0)) == 2
        assert len(pins._ends) <= 100
    assert store.stats().pinned_bytes == 2 * 192
    clock.now_s += 86_399.0
    assert store.stats().pinned_bytes == 192


def test_pins_take_half_of_the_arena_at_most(store: HostStore) -> None:
    for i in range(4):
        put(store, "c", i, i + 1, sizes=(704, 64))
    # 768 bytes each: two are in the limit of 2048, from the conversation's beginning on.
    assert store.advise(MODEL, page_keys("c", 0, 4), Hint(ttl_s=10.0)) == 2
    assert store.stats().pinned_bytes == 2 * 768
    assert [info.pinned_s for info in store.list_segments()] == [10.0, 10.0, 0.0, 0.0]
    assert store.reserve((4096 - 2 * 768,)) is not None


def test_what_leaves_the_index_is_not_pinned_any_more(store: HostStore) -> None:
    segment_id, _ = put(store, "c", 0, 4, range_bytes=1)
    store.advise(MODEL, page_keys("c", 0, 4), Hint(ttl_s=10.0))
    assert store.stats().pinned_bytes == 192
    assert store.trim(segment_id, (8, 16), (30, 0)) == 130
    assert store.stats().pinned_bytes == 64
    store.clear()
    assert (store.stats().pinned_bytes, store.stats().used_bytes) == (0, 0)


def test_a_demoted_conversation_leaves_first_in_its_tenants_quota_too(clock: Clock) -> None:
    """1024 bytes for the tenant, in an arena with room for more."""
    store = HostStore(4096, make_policy("value", clock), clock, tenant_quota=0.25)
    for name in "abc":
        put(store, name, 0, 2, sizes=(192, 64), tenant="t")
        clock.now_s += 20.0
    assert store.advise(MODEL, page_keys("c", 0, 2), Hint(demote=True)) == 2
    put(store, "d", 0, 2, sizes=(192, 64), tenant="t")
    put(store, "e", 0, 2, sizes=(192, 64), tenant="t")
    assert [not store.find_missing(MODEL, page_keys(name, 0, 2)) for name in "abcde"] == [
        True,
        True,
        False,
        True,
        True,
    ]
    store.close()


def test_a_pin_can_be_ended(store: HostStore) -> None:
    put(store, "c", 0, 2, sizes=(960, 64))
    keys = page_keys("c", 0, 2)
    assert store.advise(MODEL, keys, Hint(ttl_s=10.0)) == 2
    assert store.advise(MODEL, keys, Hint(ttl_s=0)) == 0
    assert store.stats().pinned_bytes == 0
    assert store.reserve((4096,)) is not None


# Quotas


@pytest.fixture
def shared() -> Iterator[HostStore]:
    """1024 bytes for each tenant."""
    store = HostStore(4096, LruPolicy(), tenant_quota=0.25)
    yield store
    store.close()


def test_a_tenant_over_its_quota_evicts_its_own_first(shared: HostStore) -> None:
    other, _ = put(shared, "b", 0, 1, sizes=(448, 64), tenant="b")
    first, _ = put(shared, "a1", 0, 1, sizes=(448, 64), tenant="a")
    second, _ = put(shared, "a2", 0, 1, sizes=(448, 64), tenant="a")
    # Half of the arena is free, and the least recently used segment is b's.
    third, _ = put(shared, "a3", 0, 1, sizes=(448, 64), tenant="a")
    assert stored_ids(shared) == [other, second, third]
    assert first not in stored_ids(shared)
    stats = shared.stats()
    assert (stats.evicted_segments, stats.used_bytes) == (1, 3 * 512)


def test_a_tenant_that_cannot_make_room_is_rejected_and_loses_nothing(shared: HostStore) -> None:
    put(shared, "b", 0, 1, sizes=(448, 64), tenant="b")
    put(shared, "a1", 0, 1, sizes=(448, 64), tenant="a")
    put(shared, "a2", 0, 1, sizes=(448, 64), tenant="a")
    lease = present(lease_pages(shared, "a1", 0, 1))
    assert shared.reserve((1025,), "a") is None
    assert shared.reserve((640,), "a") is None
    assert (shared.stats().rejected_reservations, shared.stats().evicted_segments) == (2, 0)
    assert shared.reserve((512,), "a") is not None
    # A segment that left the index counts as long as somebody reads it; so do reservations.
    shared.clear()
    assert shared.reserve((64,), "a") is None
    shared.release(lease)
    assert shared.reserve((512,), "a") is not None
    assert shared.reserve((64,), "a") is None
    assert shared.reserve((1024,), "b") is not None


def test_what_a_tenant_gave_back_it_may_take_again(shared: HostStore) -> None:
    for _ in range(3):
        reservation = present(shared.reserve((1024,), "a"))
        shared.abort(reservation)
    segment_id, _ = put(shared, "a", 0, 4, sizes=(960, 64), tenant="a", range_bytes=64)
    assert shared.trim(segment_id, (8, 0), (448, 64)) == 512
    reservation = present(shared.reserve((512,), "a"))
    assert shared.stats().evicted_segments == 0
    # The bytes are whose manifest they have.
    commit_to(shared, reservation, make_manifest("b", 0, 1, (512,), make_model(num_layers=1), tenant="b"))
    assert shared.reserve((512,), "a") is not None
    assert shared.reserve((1024,), "b") is not None


def test_a_full_arena_takes_from_others_within_their_quotas(shared: HostStore) -> None:
    for tenant in "abcd":
        put(shared, tenant, 0, 1, sizes=(960, 64), tenant=tenant)
    put(shared, "e", 0, 1, sizes=(960, 64), tenant="e")
    assert [info.tenant for info in shared.list_segments()] == ["b", "c", "d", "e"]


@pytest.mark.parametrize("quota", [0.0, -0.1, 1.1])
def test_a_quota_is_a_share(quota: float) -> None:
    with pytest.raises(ConfigError, match="tenant_quota"):
        HostStore(4096, tenant_quota=quota)


# Arrivals


def admit(store: HostStore, name: str = "c", first: int = 0, end: int = 2) -> Arrival:
    manifest = make_manifest(name, first, end, (100, 60))
    checksums = [xxhash.xxh3_64_digest(block) for block in BLOCKS]
    return present(store.admit(manifest, checksums, "ssd", 0.5))


def land(arrival: Arrival, layer: int) -> None:
    arrival.blocks[layer][:] = np.frombuffer(BLOCKS[layer], dtype=np.uint8)
    arrival.landed(layer)


def test_an_arrival_is_leased_from_its_tier_until_it_is_whole(store: HostStore) -> None:
    arrival = admit(store)
    lease = present(lease_pages(store, "c", 0, 2))
    assert (lease.slices[0].tier, lease.slices[0].blocks, lease.is_in_dram) == ("ssd", (), False)
    (piece,) = store.fetch(lease)
    assert piece.status is not None
    waiting = threading.Thread(target=piece.status.wait, args=(1, 20))
    waiting.start()
    land(arrival, 0)
    land(arrival, 1)
    waiting.join(20)
    assert arrival.end()
    assert tuple(block.tobytes() for block in piece.blocks) == BLOCKS
    assert not arrival.end(), "it ends once"
    arrival.fail()
    ordinary = present(lease_pages(store, "c", 0, 2))
    assert (ordinary.slices[0].tier, ordinary.slices[0].status) == ("dram", None)
    assert store.verify().num_blocks == 2
    for held in (lease, ordinary):
        store.release(held)
    assert store.stats().used_bytes == 192 + 64
    assert store.reserve((4096,)) is not None


@pytest.mark.parametrize("ends_early", [False, True])
def test_a_failed_arrival_is_gone_at_once(store: HostStore, ends_early: bool) -> None:
    arrival = admit(store)
    lease = present(lease_pages(store, "c", 0, 2))
    (piece,) = store.fetch(lease)
    land(arrival, 0)
    if ends_early:
        assert not arrival.end()
    arrival.fail()
    arrival.fail()
    assert not arrival.end()
    assert piece.status is not None
    assert piece.status.has_landed(0)
    with pytest.raises(TierReadError):
        piece.status.wait(1, 0)
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
    assert store.stats().used_bytes == 256
    store.release(lease)
    assert store.stats().used_bytes == 0


def test_who_is_told_that_an_arrival_failed_does_not_find_it_again(
    store: HostStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    arrival, fail, found = admit(store), LayerStatus.fail, list[Lease | None]()
    asking = threading.Thread(target=lambda: found.append(lease_pages(store, "c", 0, 2)))

    def fail_and_ask(status: LayerStatus) -> None:
        fail(status)
        asking.start()
        asking.join(0.05)

    monkeypatch.setattr(LayerStatus, "fail", fail_and_ask)
    arrival.fail()
    asking.join(20)
    assert found == [None]


def test_a_reader_gives_up_waiting_for_a_layer(store: HostStore) -> None:
    arrival = admit(store)
    lease = store.lease_arrival(arrival, 0, 2)
    status = present(store.fetch(lease)[0].status)
    with pytest.raises(TierReadError, match="layer 0 did not arrive from its tier"):
        status.wait(0, 0.01)


def test_an_arrival_of_what_dram_holds_is_its_readers_alone(store: HostStore) -> None:
    first, _ = put(store, "c", 0, 2)
    arrival = admit(store)
    assert stored_ids(store) == [first]
    lease = store.lease_arrival(arrival, 0, 2)
    for layer in range(2):
        land(arrival, layer)
    assert arrival.end()
    assert tuple(block.tobytes() for block in store.fetch(lease)[0].blocks) == BLOCKS
    store.release(lease)
    assert (stored_ids(store), store.stats().used_bytes) == ([first], 192)


def test_an_arrival_without_room_is_refused(store: HostStore) -> None:
    put(store, "c", 0, 1, sizes=(2048, 1920))
    assert lease_pages(store, "c", 0, 1) is not None
    # There would be room for one of 100 and 60 bytes, but for its flags.
    assert store.reserve((64,)) is not None
    assert store.admit(make_manifest("d", 0, 1, (10,)), (bytes(8),), "ssd", 0.5) is None
    assert store.stats().rejected_reservations == 1


def test_a_store_that_closes_tells_those_who_wait(store: HostStore) -> None:
    arrival = admit(store)
    status = present(store.fetch(store.lease_arrival(arrival, 0, 2))[0].status)
    store.close()
    with pytest.raises(TierReadError):
        status.wait(0, 20)
    arrival.fail()


# Fragmentation


def churn(
    policy: str, rng: np.random.Generator, sizes: npt.NDArray[np.int64], capacity_bytes: int
) -> tuple[HostStore, float]:
    """Segments of ``sizes`` bytes come until the arena has been filled many times over.

    Computing one takes as long as it is large, up to a factor of 2. Returns the store, and the mean share of
    it that is free although room had to be made all the time.
    """
    clock = Clock()
    store = HostStore(capacity_bytes, make_policy(policy, clock), clock)
    free_shares = []
    for i, size in enumerate(sizes):
        clock.now_s += 1.0
        blocks = tuple(int(size) // NUM_LAYERS + layer % 3 for layer in range(NUM_LAYERS))
        reservation = present(store.reserve(blocks))
        manifest = make_manifest(
            f"c{i}", 0, 1, blocks, LAYERED_MODEL, recompute_s=float(size * rng.uniform(0.5, 2))
        )
        commit_to(store, reservation, manifest)
        stats = store.stats()
        if stats.evicted_segments > 100:
            free_shares.append(stats.free_bytes / stats.capacity_bytes)
    return store, float(np.mean(free_shares))


@pytest.mark.parametrize(("policy", "max_share"), [("lru", 0.02), ("value", MAX_FREE_SHARE)])
def test_free_space_that_cannot_be_used_is_bounded(policy: str, max_share: float) -> None:
    """Sizes from 10 KB to 8 MB in 256 MiB, scaled by 64, at full churn: nothing is pinned, all fits."""
    rng = np.random.default_rng(3)
    sizes = np.exp(rng.uniform(np.log(160), np.log(131_072), 2500)).astype(int)
    store, free_share = churn(policy, rng, sizes, 4 * 1024 * 1024)
    assert store.stats().rejected_reservations == 0
    assert store.stats().evicted_segments > 1500
    assert free_share < max_share
    store.close()


@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize("seed", range(3))
def test_a_reservation_fits_while_half_of_the_arena_is_leased(seed: int, policy: str) -> None:
    """Up to a 32nd of the arena: as large as the largest segments among those that are stored."""
    rng = np.random.default_rng(seed)
    capacity_bytes = 1024 * 1024
    sizes = np.exp(rng.uniform(np.log(160), np.log(32_768), 1000)).astype(int)
    store, _ = churn(policy, rng, sizes, capacity_bytes)
    manifests = [store.manifest_of(info.segment_id) for info in store.list_segments()]
    leased_bytes, wanted_bytes, limit_bytes = 0, capacity_bytes // 32, capacity_bytes // 2
    for position in rng.permutation(len(manifests)):
        manifest = manifests[position]
        if leased_bytes + manifest.num_bytes <= limit_bytes:
            assert store.lease(LAYERED_MODEL, manifest.page_keys, manifest.token_ids) is not None
            leased_bytes += manifest.num_bytes
    assert leased_bytes > limit_bytes * 0.95
    reservation = present(store.reserve((wanted_bytes // NUM_LAYERS - 64,) * NUM_LAYERS))
    fill(reservation, seed)
    store.close()


# The lock while space is looked for


class CountingLock:
    """A store's lock that knows how many segments the policy named in one hold of it."""

    def __init__(self) -> None:
        self.num_named = self.most_named = self.num_holds = 0
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        self._lock.acquire()
        self.num_named = 0
        self.num_holds += 1

    def __exit__(self, *error: object) -> None:
        self.most_named = max(self.most_named, self.num_named)
        self._lock.release()


class CountingPolicy(LruPolicy):
    lock: CountingLock

    def victims(self) -> Iterator[int]:
        for segment_id in super().victims():
            self.lock.num_named += 1
            yield segment_id


NUM_SMALL = 4000


@pytest.fixture
def crowded(monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[HostStore, CountingLock]]:
    """Full of segments of 64 bytes, every second one leased."""
    policy, lock = CountingPolicy(), CountingLock()
    policy.lock = lock
    store = HostStore(64 * NUM_SMALL, policy)
    monkeypatch.setattr(store._locked, "_lock", lock)
    model = make_model(num_layers=1)
    for i in range(NUM_SMALL):
        put(store, f"c{i}", 0, 1, sizes=(64,), model=model)
    for i in range(1, NUM_SMALL, 2):
        lease_pages(store, f"c{i}", 0, 1, model)
    lock.most_named = lock.num_holds = 0
    yield store, lock
    store.close()


def test_one_hold_of_the_lock_looks_at_few_segments_however_many_must_go(
    crowded: tuple[HostStore, CountingLock],
) -> None:
    store, lock = crowded
    assert store.reserve((64,) * (NUM_SMALL // 2)) is not None
    assert store.stats().evicted_segments == NUM_SMALL // 2
    assert lock.most_named <= MAX_VISITED
    assert lock.num_holds >= NUM_SMALL // MAX_VISITED


def test_one_hold_of_the_lock_looks_at_few_segments_when_nothing_fits(
    crowded: tuple[HostStore, CountingLock],
) -> None:
    store, lock = crowded
    # Every second one may leave, and each lies between two that may not.
    assert store.reserve((128,)) is None
    stats = store.stats()
    assert (stats.evicted_segments, stats.rejected_reservations) == (0, 1)
    assert lock.most_named <= MAX_VISITED


def num_evicted_for_one(policy: str, seed: int) -> int:
    """How many of a thousand segments of all sizes leave for one that is larger than most."""
    clock, rng = Clock(), np.random.default_rng(seed)
    store = HostStore(1 << 20, make_policy(policy, clock), clock)
    for i in range(1000):
        clock.now_s += 1.0
        size = int(64 * 100 ** rng.random())
        put(store, f"c{i}", 0, 1, sizes=(size, size), recompute_s=float(size * rng.uniform(0.5, 2)))
    before = store.stats().evicted_segments
    assert store.reserve((60_000, 50_000)) is not None
    num_evicted = store.stats().evicted_segments - before
    store.close()
    return num_evicted


@pytest.mark.parametrize("policy", ["lru", "value"])
@pytest.mark.parametrize("seed", range(3))
def test_a_search_in_steps_evicts_what_one_in_one_step_does(
    policy: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once = num_evicted_for_one(policy, seed)
    assert 10 < at_once <= MAX_VISITED, "one hold of the lock is enough"
    monkeypatch.setattr("krul_backend.tiers.dram.reservations.MAX_VISITED", 2)
    # A run of victims may be an eighth longer than need be, depending on where the steps end.
    assert at_once * 8 // 9 <= num_evicted_for_one(policy, seed) <= at_once * 9 // 8


class Breaths:
    """Stands in for the moment between two holds of the lock: does something at the first one."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, act: Callable[[], object]) -> None:
        self.num = 0
        self._act = act
        monkeypatch.setattr("krul_backend.tiers.dram.reservations.MAX_VISITED", 2)
        monkeypatch.setattr("krul_backend.tiers.dram.reservations.time.sleep", self._breathe)

    def _breathe(self, seconds: float) -> None:
        self.num += 1
        if self.num == 1:
            self._act()


def full_of_small(num: int) -> HostStore:
    store = HostStore(192 * num, LruPolicy())
    for i in range(num):
        put(store, f"c{i}", 0, 1)
    return store


def test_what_is_leased_during_a_search_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    store = full_of_small(20)
    leases = []
    Breaths(monkeypatch, lambda: leases.append(lease_pages(store, "c3", 0, 1)))
    assert store.reserve((64,) * 30) is not None
    assert leases[0] is not None
    assert leases[0].num_pages == 1
    assert not store.find_missing(MODEL, page_keys("c3", 0, 1))
    store.close()


def test_what_is_used_during_a_search_is_not_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    # More than the policy names at a time: those that were used come again at the end of its order.
    store = full_of_small(600)

    def use_the_oldest() -> None:
        for i in range(300):
            lease = present(lease_pages(store, f"c{i}", 0, 1))
            store.release(lease)

    Breaths(monkeypatch, use_the_oldest)
    assert store.reserve((64,) * 3 * 600) is not None
    assert store.stats().evicted_segments == 600
    store.close()


def test_what_is_cleared_and_stored_during_a_search_confuses_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    store = full_of_small(20)

    def replace_all() -> None:
        store.clear()
        for i in range(15):
            put(store, f"d{i}", 0, 1, sizes=(100, 60))

    Breaths(monkeypatch, replace_all)
    assert store.reserve((64,) * 50) is not None
    stats = store.stats()
    assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
    assert store.verify().bad_segments == ()
    store.clear()
    assert store.stats().used_bytes == 50 * 64
    store.close()


def test_closing_during_a_search_ends_it(monkeypatch: pytest.MonkeyPatch) -> None:
    store = full_of_small(20)
    Breaths(monkeypatch, store.close)
    with pytest.raises(StoreClosedError):
        store.reserve((64,) * 30)
