"""Segments that DRAM has in part, completed from an SSD: what is read, what stays, what may fail."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from krul_backend.errors import TierReadError
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import Lease, LowerCopy, Prefetched, SegmentSlice, SegmentTail
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.present import present
from tests.support.ssd_builders import FaultyDisk, open_tier, put_manifest, random_blocks
from tests.support.store_builders import (
    flip_byte,
    lease_pages,
    make_manifest,
    make_model,
    offset_in,
    page_keys,
    put,
    stored_ids,
    wait_until,
)
from tests.support.tiered_builders import SIZES as TIERED_SIZES
from tests.support.tiered_builders import Rig, put_below, put_in_dram, wait_for

KIB = 1 << 10
RANGE_BYTES = 16 * KIB
SIZES = (200 * KIB, 120 * KIB)
MODEL = make_model()
MANIFEST = make_manifest("c", 0, 3, SIZES, range_bytes=RANGE_BYTES)
CONTENT = tuple(block.tobytes() for block in random_blocks(SIZES, 0))

PART = SegmentTail((8, 4), (40 * KIB, 60 * KIB))
HELD = (48 * KIB, 64 * KIB)
"""The bytes of whole ranges in which it lies."""
MORE = SegmentTail((2, 8), (150 * KIB, 30 * KIB))
COMPLETED = (160 * KIB, 64 * KIB)
"""Of both."""
WHOLE = SegmentTail((0, 0), SIZES)


class OnSsd:
    """A store over an SSD that has a segment of three pages, of which DRAM has ``PART``."""

    def __init__(self, directory: Path, capacity_bytes: int = 4 << 20) -> None:
        self.disk = FaultyDisk()
        self.tier: SsdTier = open_tier(directory, self.disk, capacity_bytes=4 << 20, file_bytes=1 << 20)
        assert put_manifest(self.tier, MANIFEST)
        assert self.tier.flush(20)
        self.host = HostStore(capacity_bytes)
        self.store = TieredStore(self.host, [self.tier])
        lease = self.lease()
        assert self.load(lease, PART) == ends_of(HELD)
        self.store.release(lease)
        self.disk.num_bytes_read = 0

    def lease(self) -> Lease:
        return present(lease_pages(self.store, "c", 0, 3))

    def fetch(self, lease: Lease, tail: SegmentTail) -> SegmentSlice:
        (piece,) = self.store.fetch(lease, [tail])
        return piece

    def load(self, lease: Lease, tail: SegmentTail) -> tuple[bytes, ...]:
        """What comes, when it is an ordinary segment."""
        (content,) = wait_for((self.fetch(lease, tail),))
        self.wait_for_reads()
        return content

    def wait_for_reads(self) -> None:
        wait_until(lambda: not self.store._fetcher._reads)

    def assert_nothing_is_held(self) -> None:
        stats = self.store.stats()
        assert (stats.num_leases, self.host.stats().num_leases) == (0, 0)
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
        reservation = present(self.host.reserve((stats.capacity_bytes,)))
        self.host.abort(reservation)

    def close(self) -> None:
        self.disk.gate.set()
        self.store.close()


def ends_of(num_bytes: tuple[int, ...]) -> tuple[bytes, ...]:
    return tuple(block[len(block) - num :] for block, num in zip(CONTENT, num_bytes, strict=True))


@pytest.fixture
def rig(tmp_path: Path) -> Iterator[OnSsd]:
    with closing(OnSsd(tmp_path)) as rig:
        yield rig


def test_a_lease_says_where_the_rest_is_and_reads_nothing_of_it(rig: OnSsd) -> None:
    lease = rig.lease()
    (piece,) = lease.slices
    assert lease.is_in_dram
    assert piece.header.layer_first_token == PART.layer_first_token
    assert piece.lower == LowerCopy("ssd", (0, 0))
    assert piece.loadable_from == (0, 0)
    assert rig.load(lease, PART) == ends_of(HELD)
    assert rig.disk.num_bytes_read == 0
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_only_what_dram_lacks_is_read_and_completes_the_part(rig: OnSsd) -> None:
    (part_id,) = stored_ids(rig.host)
    lease = rig.lease()
    assert rig.load(lease, MORE) == ends_of(COMPLETED)
    missing = COMPLETED[0] - HELD[0]
    assert missing <= rig.disk.num_bytes_read <= missing + 8 * KIB
    assert rig.fetch(lease, MORE).segment_id != part_id, "asked again, it is the completed one"
    rig.store.release(lease)
    (completed_id,) = stored_ids(rig.host)
    assert completed_id != part_id
    stats = rig.store.stats()
    assert (stats.stored_bytes, stats.num_pages) == (sum(COMPLETED), 3)
    assert stats.used_bytes < sum(COMPLETED) + KIB, "the part's bytes are free"
    # What DRAM still lacks can be read later, and then no tier has more than DRAM.
    later = rig.lease()
    assert later.slices[0].header.layer_first_token == (2, 4)
    assert later.slices[0].lower == LowerCopy("ssd", (0, 0))
    assert rig.load(later, WHOLE) == CONTENT
    rig.store.release(later)
    last = rig.lease()
    assert last.slices[0].lower is None
    assert wait_for(last.slices) == [CONTENT]
    assert rig.disk.num_bytes_read <= sum(SIZES) - sum(HELD) + 24 * KIB
    rig.store.release(last)
    assert rig.store.verify().bad_segments == ()
    rig.assert_nothing_is_held()


def test_who_reads_the_part_meanwhile_keeps_its_bytes(rig: OnSsd) -> None:
    reading, lease = rig.lease(), rig.lease()
    assert rig.load(lease, WHOLE) == CONTENT
    rig.store.release(lease)
    assert wait_for(reading.slices) == [ends_of(HELD)]
    # Its promise is kept by what has taken the place of the part.
    num_read = rig.disk.num_bytes_read
    assert rig.load(reading, MORE) == CONTENT
    assert rig.disk.num_bytes_read == num_read
    rig.store.release(reading)
    assert rig.store.stats().stored_bytes == sum(SIZES)
    rig.assert_nothing_is_held()


def test_a_pin_holds_what_has_taken_the_place_of_a_part(rig: OnSsd) -> None:
    (part_id,) = stored_ids(rig.host)
    with rig.host._locked.open() as books:
        assert books.pins.pin(books.segments[part_id], 1000.0)
    lease = rig.lease()
    rig.load(lease, WHOLE)
    rig.store.release(lease)
    (info,) = rig.host.list_segments()
    assert (info.num_bytes, info.pinned_s > 900) == (sum(SIZES), True)


@pytest.mark.parametrize("is_late", [False, True])
def test_hints_hold_for_what_has_taken_the_place_of_a_part(rig: OnSsd, is_late: bool) -> None:
    """Also those that come while the rest is read."""
    other, _ = put(rig.host, "other", 0, 1, (10, 10))
    rig.disk.gate.clear()
    lease = rig.lease()
    if is_late:
        rig.fetch(lease, WHOLE)
    rig.store.advise(Hint(demote=True, priority=0), model=MODEL, page_keys=page_keys("c", 0, 3))
    if not is_late:
        rig.fetch(lease, WHOLE)
    rig.disk.gate.set()
    rig.wait_for_reads()
    rig.store.release(lease)
    with rig.host._locked.open() as books:
        first, second = books._order.victims(only_fast_copies=False)
        assert (books.segments[first].manifest.num_bytes, second) == (sum(SIZES), other)
        assert books._order._others._nodes[first].weight == Hint(priority=0).weight


def test_of_a_conversation_nothing_else_loses_its_worth(rig: OnSsd) -> None:
    """What follows a segment that was completed can be restored as before."""
    following, _ = put(rig.host, "c", 3, 4, (10, 10))
    lease = rig.lease()
    rig.load(lease, WHOLE)
    rig.store.release(lease)
    with rig.host._locked.open() as books:
        assert books._order._others._nodes[following].is_reachable


def test_a_tier_that_raises_leaves_no_copy_held() -> None:
    rig = Rig(capacity_bytes=64 * KIB)
    with closing(rig):
        put_below(rig.ssd, "c", 0, 2, range_bytes=20)
        first, end = SegmentTail((4, 4), (20, 20)), SegmentTail((12, 12), (20, 20))
        lease = present(lease_pages(rig.store, "c", 0, 2))
        wait_for(rig.store.fetch(lease, [first]))
        rig.store.release(lease)
        wait_until(lambda: rig.store.stats().fetched_segments == 1)
        segment_id, _ = put_in_dram(rig, "c", 2, 4, range_bytes=20)
        assert rig.host.trim(segment_id, *end)

        def fail(*args: Any) -> Any:
            raise ValueError("as the tier says")

        # It knows all pages; the first segment was found in the other tier before it is asked.
        rig.mooncake.find_missing = lambda model, keys: []  # type: ignore[method-assign]
        rig.mooncake.match = fail  # type: ignore[method-assign]
        with pytest.raises(ValueError, match="as the tier says"):
            lease_pages(rig.store, "c", 0, 4)
        assert rig.ssd.num_holds == 0
        rig.assert_nothing_is_held()


def test_a_flipped_bit_in_what_completes_costs_no_more_than_that(rig: OnSsd) -> None:
    rig.disk.flipped_read_offset = 5000
    lease = rig.lease()
    piece = rig.fetch(lease, MORE)
    assert piece.status is not None
    with pytest.raises(TierReadError):
        piece.status.wait(0, 20)
    rig.wait_for_reads()
    rig.store.release(lease)
    assert rig.store.stats().tiers[0].corrupted_segments == 1
    # The part was right, and is still found; no tier has more of it now.
    again = rig.lease()
    assert again.slices[0].lower is None
    assert wait_for(again.slices) == [ends_of(HELD)]
    rig.store.release(again)
    rig.assert_nothing_is_held()


def test_a_part_that_is_damaged_in_dram_is_read_anew(rig: OnSsd) -> None:
    """The disk's bytes are not blamed for it, and what takes its place is right."""
    lease = rig.lease()
    flip_byte(rig.host, offset_in(rig.host, lease.slices[0].blocks[0]) + 3)
    assert rig.load(lease, MORE) == ends_of(COMPLETED)
    assert COMPLETED[0] <= rig.disk.num_bytes_read <= COMPLETED[0] + 8 * KIB
    rig.store.release(lease)
    assert rig.store.stats().tiers[0].corrupted_segments == 0
    assert rig.store.verify().bad_segments == ()
    rig.assert_nothing_is_held()


def leave_disk(rig: OnSsd) -> None:
    rig.tier.discard(MANIFEST)


def leave_dram(rig: OnSsd) -> None:
    rig.host.discard(MANIFEST)


def clear(rig: OnSsd) -> None:
    rig.store.clear(MODEL)


@pytest.mark.parametrize(
    ("leave", "is_reading", "comes", "found"),
    [
        (leave_disk, False, False, HELD),
        (leave_disk, True, False, HELD),
        (leave_dram, False, True, COMPLETED),
        (leave_dram, True, True, None),
        (clear, False, False, None),
        (clear, True, False, None),
    ],
)
def test_copies_that_leave_between_the_lease_and_the_end_of_the_read(
    rig: OnSsd, leave: Callable[[OnSsd], None], is_reading: bool, comes: bool, found: tuple[int, ...] | None
) -> None:
    """A miss or the right bytes; and nothing that was cleared comes back."""
    lease = rig.lease()
    if is_reading:
        rig.disk.gate.clear()
        rig.fetch(lease, MORE)
        wait_until(lambda: rig.disk.num_stalled > 0)
    leave(rig)
    rig.disk.gate.set()
    if comes:
        assert rig.load(lease, MORE) == ends_of(COMPLETED)
    else:
        with pytest.raises(TierReadError):
            rig.load(lease, MORE)
        rig.wait_for_reads()
    rig.store.release(lease)
    again = lease_pages(rig.host, "c", 0, 3)
    content = None if again is None else wait_for(again.slices)
    assert content == (None if found is None else [ends_of(found)])
    if again is not None:
        rig.host.release(again)
    rig.assert_nothing_is_held()


def test_who_has_gone_before_the_read_ends_leaves_a_completed_segment(rig: OnSsd) -> None:
    rig.disk.gate.clear()
    lease = rig.lease()
    rig.fetch(lease, WHOLE)
    rig.store.release(lease)
    rig.disk.gate.set()
    rig.wait_for_reads()
    found = rig.lease()
    assert wait_for(found.slices) == [CONTENT]
    rig.store.release(found)
    rig.assert_nothing_is_held()


def test_an_end_between_the_two_reads(tmp_path: Path) -> None:
    """The next daemon finds what the disk has, whole."""
    rig = OnSsd(tmp_path)
    rig.disk.gate.clear()
    lease = rig.lease()
    piece = rig.fetch(lease, WHOLE)
    rig.disk.errors["preadv"] = 5
    rig.close()
    assert piece.status is not None
    with pytest.raises(TierReadError):
        piece.status.wait(0, 20)
    with closing(TieredStore(HostStore(1 << 20), [open_tier(tmp_path)])) as store:
        again = present(lease_pages(store, "c", 0, 3))
        assert [found.tier for found in again.slices] == ["ssd"]
        assert wait_for(store.fetch(again)) == [CONTENT]


def test_without_room_for_it_the_part_stays_as_it_is(tmp_path: Path) -> None:
    with closing(OnSsd(tmp_path, capacity_bytes=sum(HELD) + 100 * KIB)) as rig:
        lease = rig.lease()
        with pytest.raises(TierReadError, match="no room in DRAM"):
            rig.fetch(lease, WHOLE)
        assert rig.load(lease, PART) == ends_of(HELD)
        rig.store.release(lease)
        rig.assert_nothing_is_held()


def test_other_bytes_of_the_same_pages_complete_nothing(tmp_path: Path) -> None:
    """Somebody has stored the pages again meanwhile: DRAM and the disk are of different commits."""
    with closing(OnSsd(tmp_path)) as rig:
        rig.tier.discard(MANIFEST)
        assert put_manifest(rig.tier, MANIFEST, seed=1)
        assert rig.tier.flush(20)
        lease = rig.lease()
        assert lease.slices[0].lower is None
        rig.store.release(lease)
        rig.assert_nothing_is_held()


def test_segments_in_part_that_follow_each_other_are_asked_for_once() -> None:
    """Each gets its own copy; one that is whole, or that the tier does not have, breaks no other."""
    rig = Rig(capacity_bytes=64 * KIB)
    with closing(rig):
        contents = [
            put_below(rig.ssd, "c", 2 * number, 2 * number + 2, range_bytes=20)[1] for number in range(5)
        ]
        ends = [SegmentTail((8 * number + 4,) * 2, (20, 20)) for number in range(5)]
        lease = present(lease_pages(rig.store, "c", 0, 10))
        wait_for(rig.store.fetch(lease, [*ends[:3], None, ends[4]]))
        rig.store.release(lease)
        wait_until(lambda: rig.store.stats().fetched_segments == 5)
        matched: list[tuple[str, ...]] = []
        match = rig.ssd.match

        def noting(model: Any, page_keys: Any, *more: Any) -> Any:
            matched.append(tuple(page_keys))
            return match(model, page_keys, *more)

        rig.ssd.match = noting  # type: ignore[method-assign]
        lease = present(lease_pages(rig.store, "c", 0, 10))
        assert matched == [page_keys("c", 0, 6), page_keys("c", 8, 10)]
        assert [piece.lower is not None for piece in lease.slices] == [True, True, True, False, True]
        wholes = [SegmentTail((8 * number,) * 2, TIERED_SIZES) for number in range(5)]
        assert wait_for(rig.store.fetch(lease, wholes)) == contents
        rig.store.release(lease)
        wait_until(lambda: rig.store.stats().fetched_segments == 9)
        rig.assert_nothing_is_held()


# What comes before a load asks for it


def test_a_prefetch_of_tails_brings_a_part_and_a_later_one_completes_it(rig: OnSsd) -> None:
    """First what a load will want, then the rest; each reads only what DRAM lacks."""
    lease = rig.lease()
    assert rig.store.prefetch(lease, [PART]) == Prefetched(0), "all of that is here"
    assert rig.store.prefetch(lease, [None]) == Prefetched(0)
    assert rig.disk.num_bytes_read == 0
    assert rig.store.prefetch(lease, [MORE], ReadPriority.REST) == Prefetched(3)
    rig.wait_for_reads()
    missing = COMPLETED[0] - HELD[0]
    assert missing <= rig.disk.num_bytes_read <= missing + 8 * KIB
    # Whoever has the lease gets what it wants, although it is more.
    assert rig.load(lease, WHOLE) == CONTENT
    assert rig.disk.num_bytes_read <= sum(SIZES) - sum(HELD) + 24 * KIB
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_what_was_prefetched_stays_until_the_lease_ends(tmp_path: Path) -> None:
    with closing(OnSsd(tmp_path)) as rig:
        rig.host.clear()
        lease = rig.lease()
        assert lease.slices[0].tier == "ssd"
        assert rig.store.prefetch(lease, [PART]) == Prefetched(3)
        rig.wait_for_reads()
        assert rig.host.reserve((4 << 20,)) is None
        found = rig.lease()
        assert (found.is_in_dram, found.slices[0].header.layer_num_bytes) == (True, HELD)
        # The earlier lease promised more, and its load may want that.
        assert rig.load(lease, MORE) == ends_of(COMPLETED)
        for each in (lease, found):
            rig.store.release(each)
        assert rig.store.stats().stored_bytes == sum(COMPLETED)
        rig.assert_nothing_is_held()


def test_two_that_want_different_ends_of_one_segment_read_none_twice(tmp_path: Path) -> None:
    """A common prefix: the second one completes what came for the first one since it was leased."""
    with closing(OnSsd(tmp_path)) as rig:
        rig.host.clear()
        first, second = rig.lease(), rig.lease()
        rig.store.prefetch(first, [PART])
        rig.wait_for_reads()
        assert rig.store.prefetch(second, [WHOLE]) == Prefetched(3)
        rig.wait_for_reads()
        assert rig.disk.num_bytes_read <= sum(SIZES) + 24 * KIB
        found = rig.lease()
        assert wait_for(found.slices) == [CONTENT]
        for each in (first, second, found):
            rig.store.release(each)
        rig.assert_nothing_is_held()


@pytest.mark.parametrize("fails", [False, True])
def test_two_that_complete_one_segment_at_once_read_it_once(rig: OnSsd, fails: bool) -> None:
    first, second, third = rig.lease(), rig.lease(), rig.lease()
    rig.disk.gate.clear()
    assert rig.store.prefetch(first, [WHOLE]) == Prefetched(3)
    assert rig.store.prefetch(second, [MORE]) == Prefetched(3)
    piece = rig.fetch(third, MORE)
    assert piece.status is not None
    rig.disk.flipped_read_offset = 5000 if fails else None
    rig.disk.gate.set()
    rig.wait_for_reads()
    assert rig.disk.num_bytes_read <= sum(SIZES) - sum(HELD) + 24 * KIB
    if fails:
        with pytest.raises(TierReadError):
            piece.status.wait(0, 20)
    else:
        assert wait_for((piece,)) == [CONTENT]
    for lease in (first, second, third):
        rig.store.release(lease)
    assert rig.store.stats().stored_bytes == sum(HELD if fails else SIZES)
    rig.assert_nothing_is_held()


def test_a_prefetch_whose_copy_has_left_the_disk_ends(rig: OnSsd) -> None:
    lease = rig.lease()
    rig.tier.discard(MANIFEST)
    assert rig.store.prefetch(lease, [WHOLE]) == Prefetched(3)
    rig.wait_for_reads()
    assert rig.load(lease, PART) == ends_of(HELD)
    rig.store.release(lease)
    rig.assert_nothing_is_held()


def test_a_prefetch_of_a_segment_for_which_there_is_no_room(tmp_path: Path) -> None:
    with closing(OnSsd(tmp_path, capacity_bytes=sum(SIZES) + 100 * KIB)) as rig:
        lease = rig.lease()
        assert rig.store.prefetch(lease, [WHOLE]) == Prefetched(0, "no room")
        rig.store.release(lease)
        with pytest.raises(KeyError, match="unknown or was released"):
            rig.store.prefetch(lease)
        rig.assert_nothing_is_held()


def test_the_rest_comes_after_all_that_other_prefetches_read(tmp_path: Path) -> None:
    rig = Rig(capacity_bytes=64 * KIB)
    with closing(rig):
        rig.ssd.reads = ReadQueue(1, "one thread")
        order: list[str] = []
        fetch = rig.ssd.fetch

        def noting(reads: Any, *more: Any) -> None:
            order.extend(read.run.segment.manifest.page_keys[0] for read in reads)
            fetch(reads, *more)

        rig.ssd.fetch = noting  # type: ignore[method-assign]
        for name in "abcd":
            put_below(rig.ssd, name, 0, 2, range_bytes=20)
        leases = {name: lease_pages(rig.store, name, 0, 2) for name in "abcd"}
        rig.ssd.reads_go_on.clear()
        for name, lease in leases.items():
            assert lease is not None
            rig.store.prefetch(lease, priority=ReadPriority.REST if name == "b" else ReadPriority.PREFETCH)
        rig.ssd.reads_go_on.set()
        wait_until(lambda: rig.store.stats().fetched_segments == 4)
        assert order == ["a/0", "c/0", "d/0", "b/0"]
        for lease in leases.values():
            assert lease is not None
            rig.store.release(lease)
        rig.assert_nothing_is_held()
