"""Space in the arena: taken by evicting idle segments, for segments that an engine writes or that arrive from
a lower tier."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
import orjson

from krul_backend.errors import ManifestError
from krul_backend.free_extents import FreeExtents
from krul_backend.segment import SegmentManifest, check_codec_params_num_bytes
from krul_backend.tiers.common.interface import (
    LANDED,
    PENDING,
    Block,
    LayerStatus,
    Reservation,
    checked_checksums,
)
from krul_backend.tiers.dram.arena import Allocation
from krul_backend.tiers.dram.dram_books import LOCK_PAUSE_S, DramBooks, LockedBooks, PendingReservation
from krul_backend.tiers.dram.eviction_plan import MAX_VISITED, Candidate, EvictionSearch
from krul_backend.tiers.dram.stored_segment import StoredSegment

_MAX_SEARCHES = 4

T = TypeVar("T")


class Arrival:
    """The writer's end of one arriving segment. Leases may be given on the segment from the start.

    The segment stays pinned until ``end`` or ``fail``, one of which must be called. A segment that fails
    leaves the index at once, and whoever waits for one of its layers is told.

    Args:
        blocks: writable ``[num_bytes]`` per layer, the bytes to be filled.
        end: called once, with the segment, whether it arrived whole, and the part whose place it takes then.
    """

    def __init__(
        self,
        segment: StoredSegment,
        status: LayerStatus,
        blocks: Sequence[Block],
        end: Callable[[StoredSegment, bool, StoredSegment | None], None],
    ) -> None:
        self.segment = segment
        self.blocks = tuple(blocks)
        self._flags = status.flags
        self._end = end
        self._is_over = False

    def landed(self, layer: int) -> None:
        """Tell readers that a layer's block is written and its checksum is right."""
        self._flags[layer] = LANDED

    def end(self, part: StoredSegment | None = None) -> bool:
        """End the arrival; whether all layers have landed. Then the segment is an ordinary one from here on,
        in the place of ``part``, which has less of the same blocks; else it has failed."""
        has_arrived = not self._is_over and bool((self._flags == LANDED).all())
        if has_arrived:
            self._is_over = True
            self._end(self.segment, True, part)
        else:
            self.fail()
        return has_arrived

    def fail(self) -> None:
        """End the arrival; layers that have not landed never will. Does nothing if it ended before."""
        if self._is_over:
            return
        self._is_over = True
        self._end(self.segment, False, None)


class Reservations:
    """Takes space for whole segments, and makes segments of them when they are written. Thread-safe.

    ``reserve``, ``commit`` and ``abort`` are those of ``KVStore``, for what an engine writes. ``admit`` lets
    in segments of lower tiers: they are indexed before their bytes are there.
    """

    def __init__(self, locked: LockedBooks) -> None:
        self._locked = locked

    def _take(
        self,
        sizes: Sequence[int],
        tenant: str,
        use: Callable[[DramBooks, Allocation], T],
        *,
        is_fast_copy: bool = False,
        at_once: bool = False,
    ) -> T | None:
        """Take a block per size in bytes, and ``use`` them before the lock is released.

        Returns what ``use`` returns; None when there is no space, which is counted as a rejected reservation
        unless it is for a fast copy.

        Idle segments are evicted if needed: for a fast copy others of its kind first, and any segment only as
        far as ``MAX_FAST_COPY_SHARE`` allows. A search that needs to look at more than ``MAX_VISITED``
        segments goes on in steps, plans on a copy of the free ranges, and begins again if its plan no longer
        holds. ``at_once``: it gives up there, and counts nothing.
        """
        for _ in range(_MAX_SEARCHES):
            with self._locked.open() as books:
                allocation = books.take(sizes, tenant)
                if allocation is not None:
                    return use(books, allocation)
                only_fast_copies = is_fast_copy and not books.may_displace(sizes)
                search = books.search(
                    sizes, tenant, self._locked.next_id(), only_fast_copies=only_fast_copies
                )
                victims = search.plan(books.arena.space, MAX_VISITED)
                if victims is not None:
                    is_evicted = books.evict(victims)
                    assert is_evicted, f"one of {len(victims)} idle segments was not idle"
                    allocation = books.take(sizes, tenant)
                    assert allocation is not None, f"{sizes} fitted in the trial alone"
                    return use(books, allocation)
                if at_once:
                    return None
                if search.is_exhausted:
                    break
                space = books.arena.space.copy()
            victims = self._search_on(search, space)
            if victims is None:
                with self._locked.open() as books:
                    is_as_it_was = books.arena.free_bytes == space.free_bytes
                if is_as_it_was:
                    break
                continue
            for first in range(0, len(victims), MAX_VISITED):
                time.sleep(LOCK_PAUSE_S)
                with self._locked.open() as books:
                    part = victims[first : first + MAX_VISITED]
                    if not books.evict(part):
                        break
                    allocation = books.take(sizes, tenant) if part[-1] is victims[-1] else None
                    if allocation is not None:
                        return use(books, allocation)
        if not is_fast_copy:
            with self._locked.open() as books:
                books.counters.rejected_reservations += 1
        return None

    def _search_on(self, search: EvictionSearch, space: FreeExtents) -> list[Candidate] | None:
        """Look for twice as many candidates each time, until they are enough on a copy of the free ranges."""
        while not search.is_exhausted:
            wanted = 2 * max(search.num_found, MAX_VISITED)
            while search.num_found < wanted and not search.is_exhausted:
                time.sleep(LOCK_PAUSE_S)
                with self._locked.open():
                    search.look_on(MAX_VISITED)
            victims = search.plan(space)
            if victims is not None:
                return victims
        return None

    def reserve(
        self, layer_num_bytes: Sequence[int], tenant: str, *, is_fast_copy: bool, at_once: bool
    ) -> Reservation | None:
        sizes = tuple(layer_num_bytes)
        if not sizes or any(num_bytes < 0 for num_bytes in sizes):
            raise ValueError(f"a reservation needs blocks, of no fewer than 0 bytes each, got {sizes}")

        def use(books: DramBooks, allocation: Allocation) -> Reservation:
            blocks = books.arena.views(allocation)
            reservation = Reservation(self._locked.next_id(), blocks, allocation.spans)
            pending = PendingReservation(reservation, allocation, tenant, is_fast_copy, books.clears.now)
            books.pending[reservation.reservation_id] = pending
            return reservation

        return self._take(sizes, tenant, use, is_fast_copy=is_fast_copy, at_once=at_once)

    def commit(
        self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[bytes]
    ) -> StoredSegment:
        """As ``KVStore.commit``; the segment is held until ``unhold``, also if it was dropped."""
        with self._locked.open() as books:
            pending = _settle(books, reservation)
            try:
                manifest = _checked_manifest(pending.reservation, manifest)
                checksums = checked_checksums(checksums, manifest.layer_num_bytes, manifest.range_bytes)
            except BaseException:
                books.give(pending.allocation, pending.tenant)
                raise
            segment = StoredSegment(
                segment_id=self._locked.next_id(),
                manifest=manifest,
                allocation=pending.allocation,
                blocks=pending.reservation.blocks,
                checksums=checksums,
                last_used_s=books.clock(),
                is_fast_copy=pending.is_fast_copy,
                num_pins=1,
            )
            books.move_charge(segment.taken_bytes, pending.tenant, manifest.tenant)
            is_outdated = books.clears.is_outdated(pending.clear_mark, manifest.model)
            if not is_outdated and books.publish(segment):
                books.counters.committed_segments += not segment.is_fast_copy
            # A segment that was dropped was still a use of the copies that were there before.
            books.touch(books.index_of(segment).path_to(segment))
            return segment

    def abort(self, reservation: Reservation) -> None:
        with self._locked.open_unless_closed() as books:
            if books is not None:
                pending = _settle(books, reservation)
                books.give(pending.allocation, pending.tenant)

    def admit(
        self,
        manifest: SegmentManifest,
        checksums: Sequence[bytes],
        origin: str,
        lower_load_s: float,
        clear_mark: int | None,
    ) -> Arrival | None:
        """Begin the arrival of a segment of the tier ``origin``; None, counted, when there is no room.

        The segment is not indexed, and freed with its last lease, when DRAM holds all of its pages already or
        its model was cleared since ``clear_mark`` (a ``ClearMarks.now``). Reading it from the lower tier
        again would take ``lower_load_s`` seconds.
        """

        def use(books: DramBooks, allocation: Allocation) -> Arrival:
            *blocks, flags = books.arena.views(allocation)
            flags[:] = PENDING
            status = LayerStatus(flags)
            segment = StoredSegment(
                segment_id=self._locked.next_id(),
                manifest=manifest,
                allocation=allocation,
                blocks=tuple(block.view() for block in blocks),
                checksums=tuple(checksums),
                last_used_s=books.clock(),
                origin=origin,
                status=status,
                lower_load_s=lower_load_s,
                num_pins=1,
            )
            for block in segment.blocks:
                block.flags.writeable = False
            books.arriving[segment.segment_id] = status
            is_outdated = clear_mark is not None and books.clears.is_outdated(clear_mark, manifest.model)
            if not is_outdated and books.publish(segment):
                books.touch(books.index.path_to(segment))
            return Arrival(segment, status, blocks, self._end_arrival)

        return self._take(arrival_sizes(manifest), manifest.tenant, use)

    def _end_arrival(self, segment: StoredSegment, is_whole: bool, part: StoredSegment | None) -> None:
        with self._locked.open_unless_closed() as books:
            if is_whole:
                segment.status = None
            elif segment.status is not None:
                # With the lock held: what has failed is leased to nobody.
                segment.status.fail()
            if books is None:
                return
            books.arriving.pop(segment.segment_id, None)
            if part is not None:
                books.replace(part, segment)
            if not is_whole and segment.is_indexed:
                books.remove(segment)
            books.unpin((segment,))


def arrival_sizes(manifest: SegmentManifest) -> tuple[int, ...]:
    """Bytes of each block of an arriving segment. The last one holds its status flags, a byte per layer."""
    return *manifest.layer_num_bytes, manifest.model.num_layers


def _settle(books: DramBooks, reservation: Reservation) -> PendingReservation:
    """Take a reservation off the books; its blocks become read-only for the holder."""
    pending = books.pending.pop(reservation.reservation_id, None)
    if pending is None:
        raise KeyError(f"reservation {reservation.reservation_id} is unknown, committed or aborted")
    for block in pending.reservation.blocks:
        block.flags.writeable = False
    return pending


def _checked_manifest(reservation: Reservation, manifest: SegmentManifest) -> SegmentManifest:
    """A copy of the manifest that the caller cannot change any more: its token ids confirm later hits."""
    given = tuple(manifest.layer_num_bytes)
    reserved = tuple(block.nbytes for block in reservation.blocks)
    if given != reserved:
        raise ManifestError(f"the manifest's layer blocks {given} differ from the reserved {reserved}")
    try:
        check_codec_params_num_bytes(len(orjson.dumps(manifest.codec_params)))
    except orjson.JSONEncodeError as error:
        raise ManifestError(f"codec parameters that JSON has no words for: {error}") from error
    token_ids = np.array(manifest.token_ids, dtype=np.int64)
    token_ids.flags.writeable = False
    return dataclasses.replace(
        manifest,
        page_keys=tuple(manifest.page_keys),
        token_ids=token_ids,
        layer_num_bytes=given,
        layer_first_token=tuple(manifest.layer_first_token),
    )
