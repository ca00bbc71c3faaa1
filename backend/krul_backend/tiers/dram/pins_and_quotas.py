"""Limits what tenants keep in DRAM: quotas, and pins that keep segments there for a given time."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import Clock
from krul_backend.tiers.dram.eviction_plan import FastCopiesFirst
from krul_backend.tiers.dram.stored_segment import StoredSegment

_NUM_SPARE_ENDS = 64


class PinBook:
    """Knows which segments are pinned until when, and how many bytes they take. Not thread-safe.

    No thread waits for pins to end: each method first drops those that have ended.

    Args:
        limit_bytes: how much of the arena all pinned segments together may take.
        note: called with a segment when it becomes pinned (True), and when that ends (False).
    """

    def __init__(self, limit_bytes: int, clock: Clock, note: Callable[[StoredSegment, bool], None]) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._note = note
        self._segments: dict[int, StoredSegment] = {}
        self._until_s: dict[int, float] = {}
        self._num_bytes: dict[int, int] = {}
        self._pinned_bytes = 0
        # A heap of (end, segment id). Entries of pins that were replaced or ended early stay for a while.
        self._ends: list[tuple[float, int]] = []

    @property
    def pinned_bytes(self) -> int:
        self.drop_ended()
        return self._pinned_bytes

    def pin(self, segment: StoredSegment, ttl_s: float) -> bool:
        """Pin a segment for ``ttl_s`` from now, in place of any earlier pin.

        False if too many bytes would be pinned; an earlier pin then stays.
        """
        self.drop_ended()
        segment_id, taken_bytes = segment.segment_id, segment.taken_bytes
        others_bytes = self._pinned_bytes - self._num_bytes.get(segment_id, 0)
        if others_bytes + taken_bytes > self._limit_bytes:
            return False
        until_s = self._clock() + ttl_s
        self._until_s[segment_id] = until_s
        self._segments[segment_id] = segment
        self._num_bytes[segment_id] = taken_bytes
        self._note(segment, True)
        self._pinned_bytes = others_bytes + taken_bytes
        heapq.heappush(self._ends, (until_s, segment_id))
        self._drop_replaced()
        return True

    def end(self, segment_id: int) -> None:
        """End a segment's pin, if it has one."""
        self.drop_ended()
        self._forget(segment_id)
        self._drop_replaced()

    def note_size(self, segment: StoredSegment) -> None:
        """Update the size of a segment, pinned or not, that takes fewer bytes than before."""
        before = self._num_bytes.get(segment.segment_id)
        if before is not None:
            self._num_bytes[segment.segment_id] = segment.taken_bytes
            self._pinned_bytes += segment.taken_bytes - before

    def remaining_s(self, segment_id: int) -> float:
        """Seconds until a segment's pin ends; 0 if it has none."""
        until_s = self._until_s.get(segment_id)
        return max(0.0, until_s - self._clock()) if until_s is not None else 0.0

    def drop_ended(self) -> None:
        """Forget the pins whose time is over."""
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            until_s, segment_id = heapq.heappop(self._ends)
            if self._until_s.get(segment_id) == until_s:
                self._forget(segment_id)

    def _drop_replaced(self) -> None:
        """Rebuild the heap when most of its entries are stale: a conversation may be pinned at every turn."""
        if len(self._ends) > 2 * len(self._until_s) + _NUM_SPARE_ENDS:
            self._ends = [(until_s, segment_id) for segment_id, until_s in self._until_s.items()]
            heapq.heapify(self._ends)

    def _forget(self, segment_id: int) -> None:
        if self._until_s.pop(segment_id, None) is not None:
            self._pinned_bytes -= self._num_bytes.pop(segment_id)
            self._note(self._segments.pop(segment_id), False)


@dataclass
class _Tenant:
    """One tenant's account. ``taken_bytes`` includes reservations, and pinned segments out of the index."""

    order: FastCopiesFirst
    taken_bytes: int = 0
    num_segments: int = 0


class TenantQuotas:
    """Applies one limit to every tenant. Without a limit it keeps no accounts. Not thread-safe.

    Each tenant has an order of eviction of its own beside the store's, so that its victims are found without
    looking at segments of others.

    Args:
        limit_bytes: how much of the arena a tenant may take, alignment included; None: all of it.
        order: each tenant gets a fresh one of this kind.
    """

    def __init__(self, limit_bytes: int | None, order: FastCopiesFirst) -> None:
        self._limit_bytes = limit_bytes
        self._kind = order
        self._tenants: dict[str, _Tenant] = {}

    def excess_bytes(self, tenant: str, num_bytes: int) -> int:
        """By how many bytes ``num_bytes`` more would exceed a tenant's quota; 0 or less if they would not."""
        if self._limit_bytes is None:
            return 0
        books = self._tenants.get(tenant)
        return (books.taken_bytes if books is not None else 0) + num_bytes - self._limit_bytes

    def charge(self, tenant: str, num_bytes: int) -> None:
        """Add ``num_bytes``, which may be negative, to what a tenant takes."""
        if self._limit_bytes is None:
            return
        books = self._books(tenant)
        books.taken_bytes += num_bytes
        self._drop_empty(tenant, books)

    def add(self, segment: StoredSegment) -> None:
        """Note that a segment entered the index. Its bytes were charged before."""
        if self._limit_bytes is not None:
            self._books(segment.manifest.tenant).num_segments += 1

    def remove(self, segment: StoredSegment) -> None:
        """Note that a segment left the index. Its bytes stay charged until its blocks are freed."""
        if self._limit_bytes is None:
            return
        tenant = segment.manifest.tenant
        books = self._books(tenant)
        books.order.remove(segment)
        books.num_segments -= 1
        self._drop_empty(tenant, books)

    def replace(self, segment: StoredSegment, by: StoredSegment) -> None:
        """Note that the second one, which is new in the index, has taken the place of the first one."""
        if self._limit_bytes is not None:
            books = self._books(segment.manifest.tenant)
            books.order.replace(segment, by)
            books.num_segments -= 1

    def touch(self, path: Sequence[StoredSegment]) -> None:
        """Note a use of indexed segments, in conversation order."""
        if self._limit_bytes is None:
            return
        for tenant in {segment.manifest.tenant for segment in path}:
            own = [segment for segment in path if segment.manifest.tenant == tenant]
            self._books(tenant).order.touch(own)

    def advise(self, segment: StoredSegment, hint: Hint) -> None:
        """Note a hint about an indexed segment."""
        if self._limit_bytes is not None:
            self._books(segment.manifest.tenant).order.advise(segment, hint)

    def hold(self, segment: StoredSegment, *, is_held: bool) -> None:
        """Note that an indexed segment may not be evicted for now, or may be again."""
        if self._limit_bytes is not None:
            self._books(segment.manifest.tenant).order.hold(segment, is_held=is_held)

    def victims(self, tenant: str, *, only_fast_copies: bool) -> Iterator[int]:
        """Ids of a tenant's segments, the first to evict first."""
        books = self._tenants.get(tenant)
        return iter(()) if books is None else books.order.victims(only_fast_copies=only_fast_copies)

    def _books(self, tenant: str) -> _Tenant:
        books = self._tenants.get(tenant)
        if books is None:
            books = self._tenants[tenant] = _Tenant(self._kind.fresh())
        return books

    def _drop_empty(self, tenant: str, books: _Tenant) -> None:
        if not books.taken_bytes and not books.num_segments:
            del self._tenants[tenant]
