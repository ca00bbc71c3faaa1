"""The bookkeeping of the DRAM tier: where blocks lie, who holds them, counters, and the lock around that."""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from krul_backend.errors import StoreClosedError
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import MAX_FAST_COPY_SHARE, Clock, LayerStatus, Reservation
from krul_backend.tiers.common.page_filter import PageFilter, digest_of
from krul_backend.tiers.common.page_index import PageIndex, PageRun
from krul_backend.tiers.dram.arena import Allocation, Arena, aligned_num_bytes
from krul_backend.tiers.dram.eviction_plan import Candidate, EvictionSearch, FastCopiesFirst
from krul_backend.tiers.dram.pins_and_quotas import PinBook, TenantQuotas
from krul_backend.tiers.dram.stored_segment import StoredSegment

logger = logging.getLogger(__name__)

MAX_PINNED_SHARE = 0.5
"""Share of the arena that pinned segments may take."""

LOCK_PAUSE_S = 1e-4
"""Pause between two holds of the store's lock."""

_TARGET_COMES_S = 10.0
"""A draft model's KV is stored before its target's, and stays meanwhile."""


@dataclass
class DramCounters:
    """Events since the store was made, under the names that ``StoreStats`` gives them."""

    committed_segments: int = 0
    evicted_segments: int = 0
    evicted_bytes: int = 0
    trimmed_segments: int = 0
    trimmed_bytes: int = 0
    rejected_reservations: int = 0
    corrupted_segments: int = 0
    token_mismatches: int = 0
    lookups: int = 0
    hit_pages: int = 0
    missed_pages: int = 0
    prefetch_useful_bytes: int = 0
    prefetch_wasted_bytes: int = 0


class ClearMarks:
    """Counts clears, so that work that began before a model was cleared can be told from work after it."""

    def __init__(self) -> None:
        self._count = 0
        self._all_at = 0
        self._model_at: dict[str, int] = {}

    @property
    def now(self) -> int:
        """A mark to be kept by whatever begins now."""
        return self._count

    def clear(self, model: ModelIdentity | None) -> None:
        """Outdate everything (of one model) that began until now."""
        self._count += 1
        if model is None:
            self._all_at = self._count
        else:
            self._model_at[model.fingerprint] = self._count

    def is_outdated(self, clear_mark: int, model: ModelIdentity) -> bool:
        """Whether ``model`` was cleared since ``clear_mark``, an earlier ``now``."""
        return clear_mark < max(self._all_at, self._model_at.get(model.fingerprint, 0))


@dataclass(frozen=True)
class PendingReservation:
    """A reservation that is neither committed nor aborted. ``clear_mark`` is a ``ClearMarks.now``."""

    reservation: Reservation
    allocation: Allocation
    tenant: str
    is_fast_copy: bool
    clear_mark: int


class DramBooks:
    """All bookkeeping of a ``HostStore``; no method reads or writes a block.

    Not thread-safe: see ``LockedBooks``, which guards it.

    The life of a segment's allocation (a trim frees the front of blocks while it is indexed)::

        taken -> published -> indexed --(evict)--------------------------------> free
              |                    \\-(quarantine, clear)-> pinned ? zombie -> free at the last unpin
              \\-> given back, or dropped by ``publish`` ----------------------> free

    ``leases`` are by lease id, ``pending`` by reservation id, ``arriving`` by segment id. ``index`` has all
    segments but fast copies, which ``fast_copies`` has; "indexed" means: in the one or in the other.
    ``leaving`` are the ids of indexed segments that a clear is about to remove. ``page_filter`` has the pages
    of all segments that were ever indexed.

    Args:
        capacity_bytes: size of the arena in bytes.
        policy: order of eviction, owned by these books.
        tenant_quota: share of the arena, in (0, 1], that one tenant may take.
    """

    def __init__(
        self, capacity_bytes: int, policy: EvictionPolicy, clock: Clock, tenant_quota: float
    ) -> None:
        self.arena = Arena(capacity_bytes)
        self.page_filter = PageFilter()
        self.index: PageIndex[StoredSegment] = PageIndex()
        self.fast_copies: PageIndex[StoredSegment] = PageIndex()
        self.segments: dict[int, StoredSegment] = {}
        self.leaving: set[int] = set()
        self.leases: dict[int, tuple[PageRun[StoredSegment], ...]] = {}
        self.pending: dict[int, PendingReservation] = {}
        self.arriving: dict[int, LayerStatus] = {}
        self.counters = DramCounters()
        self.clears = ClearMarks()
        self.clock = clock
        self.pins = PinBook(int(self.arena.capacity_bytes * MAX_PINNED_SHARE), clock, self._note_pin)
        self.stored_bytes = 0
        self.stored_tokens = 0
        self.num_fast_copies = 0
        self.fast_copy_bytes = 0
        self._order = FastCopiesFirst(policy)
        limit_bytes = int(self.arena.capacity_bytes * tenant_quota) if tenant_quota < 1 else None
        self._quotas = TenantQuotas(limit_bytes, self._order)

    # Space

    def search(
        self, sizes: Sequence[int], tenant: str, newest_id: int, *, only_fast_copies: bool
    ) -> EvictionSearch:
        """Begin a search for segments to evict, so that blocks of ``sizes`` bytes fit into arena and quota.

        Segments with ids after ``newest_id`` are never evicted by it, nor any but fast copies if it may evict
        ``only_fast_copies``.
        """
        self.pins.drop_ended()
        wanted = [num_bytes for num_bytes in sizes if num_bytes]
        needed_bytes = sum(aligned_num_bytes(num_bytes) for num_bytes in wanted)
        return EvictionSearch(
            wanted,
            self._quotas.victims(tenant, only_fast_copies=only_fast_copies),
            self._quotas.excess_bytes(tenant, needed_bytes),
            self._order.victims(only_fast_copies=only_fast_copies),
            self._look,
            newest_id,
        )

    def may_displace(self, sizes: Sequence[int]) -> bool:
        """Whether a fast copy of ``sizes`` bytes may take the place of other segments."""
        num_bytes = self.fast_copy_bytes + sum(map(aligned_num_bytes, sizes))
        return num_bytes <= self.arena.capacity_bytes * MAX_FAST_COPY_SHARE

    def evict(self, victims: Sequence[Candidate]) -> bool:
        """Evict what a search found, in order; stop with False at the first one that has changed since."""
        for victim in victims:
            segment = victim.segment
            has_moved = segment.allocation is not victim.allocation
            if has_moved or not segment.is_indexed or not self._is_idle(segment):
                return False
            if not segment.is_fast_copy:
                self.counters.evicted_segments += 1
                self.counters.evicted_bytes += segment.manifest.num_bytes
            self.remove(segment)
        return True

    def take(self, sizes: Sequence[int], tenant: str) -> Allocation | None:
        """A block per size in bytes on a tenant's account; None if they are not free."""
        taken = self.arena.allocate(sizes)
        if taken is None:
            return None
        if self._quotas.excess_bytes(tenant, taken.taken_bytes) > 0:
            self.arena.free(taken)
            return None
        self._quotas.charge(tenant, taken.taken_bytes)
        return taken

    def is_over_quota(self, sizes: Sequence[int], tenant: str) -> bool:
        """True if blocks do not fit into a tenant's quota beside what the tenant has, or into the arena."""
        needed_bytes = sum(map(aligned_num_bytes, sizes))
        return needed_bytes > self.arena.capacity_bytes or self._quotas.excess_bytes(tenant, needed_bytes) > 0

    def give(self, allocation: Allocation, tenant: str) -> None:
        """Free an allocation, and take it off the tenant's account."""
        self.arena.free(allocation)
        self._quotas.charge(tenant, -allocation.taken_bytes)

    def move_charge(self, num_bytes: int, tenant: str, to_tenant: str) -> None:
        """Charge another tenant for bytes that were taken on the account of ``tenant``."""
        if tenant != to_tenant:
            self._quotas.charge(tenant, -num_bytes)
            self._quotas.charge(to_tenant, num_bytes)

    def note_trim(self, segment: StoredSegment, taken_before: int, num_bytes: int) -> None:
        """Note that a trim took ``num_bytes`` off an indexed segment that took ``taken_before`` bytes."""
        self._quotas.charge(segment.manifest.tenant, segment.taken_bytes - taken_before)
        self.pins.note_size(segment)
        self.stored_bytes -= num_bytes
        self.counters.trimmed_segments += 1
        self.counters.trimmed_bytes += num_bytes

    def _note_pin(self, segment: StoredSegment, is_pinned: bool) -> None:
        """Let the orders of eviction leave pinned segments out."""
        self._order.hold(segment, is_held=is_pinned)
        self._quotas.hold(segment, is_held=is_pinned)

    def _look(self, segment_id: int) -> Candidate | None:
        """A segment as it is now; None if it may not be evicted."""
        segment = self.segments.get(segment_id)
        if segment is None or not self._is_idle(segment):
            return None
        before = self.index_of(segment).before(segment)
        return Candidate(segment, segment.allocation, before)

    def _is_idle(self, segment: StoredSegment) -> bool:
        """Whether an indexed segment may be evicted: that of a draft model after its target's only."""
        if segment.num_pins or self.pins.remaining_s(segment.segment_id):
            return False
        if not segment.manifest.model.target:
            return True
        is_new = self.clock() - segment.last_used_s < _TARGET_COMES_S
        return not (is_new or self.index.has_target(segment) or self.fast_copies.has_target(segment))

    # Segments

    def index_of(self, segment: StoredSegment) -> PageIndex[StoredSegment]:
        """The index that has the segment, or would have it."""
        return self.fast_copies if segment.is_fast_copy else self.index

    def is_shared(self, segment: StoredSegment) -> bool:
        """See ``PageIndex.is_shared``."""
        return self.index_of(segment).is_shared(segment)

    def publish(self, segment: StoredSegment) -> bool:
        """Index a segment; False if all of its pages are indexed already.

        Pages of segments that a clear is about to remove do not count: those segments are removed now.
        """
        manifest = segment.manifest
        if self.leaving:
            for older in self.index_of(segment).segments_of(manifest.model, manifest.page_keys):
                if older.segment_id in self.leaving:
                    self.remove(older)
        fingerprint = manifest.model.fingerprint
        self.page_filter.add(digest_of(fingerprint, key) for key in manifest.page_keys)
        if not self.index_of(segment).add(segment):
            return False
        segment.is_indexed = True
        self.segments[segment.segment_id] = segment
        self._count(segment, 1)
        self._quotas.add(segment)
        return True

    def replace(self, part: StoredSegment, fuller: StoredSegment) -> None:
        """Index a segment in the place of one with less of the same blocks, if that is still there.

        What hints and uses have said of the one holds for the other.
        """
        if not part.is_indexed or part.is_fast_copy or part.segment_id in self.leaving:
            return
        pinned_s = self.pins.remaining_s(part.segment_id)
        self.pins.end(part.segment_id)
        self._leave_index(part)
        if self.publish(fuller):
            self._order.replace(part, fuller)
            self._quotas.replace(part, fuller)
        else:
            self._order.remove(part)
            self._quotas.remove(part)
        if pinned_s and fuller.is_indexed:
            self.pins.pin(fuller, pinned_s)

    def touch_pages(
        self, model: ModelIdentity, page_keys: Sequence[str], found: Sequence[StoredSegment]
    ) -> None:
        """Note a use of all that is stored of these pages, and of what they continue; a lookup has ``found``
        them in these segments."""
        for index in (self.index, self.fast_copies):
            has_all = all(self.index_of(segment) is index for segment in found)
            held = found if has_all else index.segments_of(model, page_keys)
            if held:
                self.touch([*index.path_to(held[0]), *held[1:]])

    def touch(self, path: Sequence[StoredSegment]) -> None:
        """Note a use of the segments of a conversation, from its first stored one on; all of one kind."""
        # A segment can leave the index while somebody uses it: the policy must not get it back.
        indexed = [segment for segment in path if segment.is_indexed]
        now_s = self.clock()
        for segment in indexed:
            segment.last_used_s = now_s
        self._order.touch(indexed)
        self._quotas.touch(indexed)

    def advise(self, path: Sequence[StoredSegment], hint: Hint) -> None:
        """Note a hint about a conversation, of which ``path`` is indexed, in conversation order.

        Pins hold all of it, as far as there is room for pins. All else stops, from the end on, at the first
        segment that another conversation goes through.
        """
        if hint.ttl_s == 0:
            for segment in path:
                self.pins.end(segment.segment_id)
        elif hint.ttl_s is not None:
            for segment in path:
                if not self.pins.pin(segment, hint.ttl_s):
                    # Later segments are of no use without this one.
                    break
        for num_after, segment in enumerate(reversed(path)):
            if self.is_shared(segment) or self.index.num_continuations(segment) > num_after:
                break
            self._order.advise(segment, hint)
            self._quotas.advise(segment, hint)

    def note_found(self, segments: Iterable[StoredSegment], *, is_load: bool = False) -> None:
        """Note that a lookup found these, or a load takes them. A prefetch was worth it for those that it has
        brought whole; to a load also for those that still come."""
        for segment in segments:
            if segment.is_prefetched and (is_load or segment.status is None):
                segment.is_prefetched = False
                self.counters.prefetch_useful_bytes += segment.manifest.num_bytes

    def quarantine(self, segment: StoredSegment) -> bool:
        """Take a damaged segment out of the index; False if it had left before."""
        if not segment.is_indexed:
            return False
        self.remove(segment)
        self.counters.corrupted_segments += 1
        logger.error("segment %d has a wrong checksum: taken out of the index", segment.segment_id)
        return True

    def remove(self, segment: StoredSegment) -> None:
        """Take a segment out of the index; free it now, or at its last unpin."""
        self.pins.end(segment.segment_id)
        self._order.remove(segment)
        self._quotas.remove(segment)
        self._leave_index(segment)

    def _leave_index(self, segment: StoredSegment) -> None:
        """Take a segment without a pin out of the books, but leave it in the orders of eviction."""
        self.index_of(segment).remove(segment)
        del self.segments[segment.segment_id]
        self.leaving.discard(segment.segment_id)
        self._count(segment, -1)
        segment.is_indexed = False
        if segment.is_prefetched:
            segment.is_prefetched = False
            self.counters.prefetch_wasted_bytes += segment.manifest.num_bytes
        if segment.num_pins == 0:
            self.give(segment.allocation, segment.manifest.tenant)

    def _count(self, segment: StoredSegment, sign: int) -> None:
        """Add an indexed segment to the sums, or with ``sign`` -1 take it off."""
        if segment.is_fast_copy:
            self.num_fast_copies += sign
            self.fast_copy_bytes += sign * segment.manifest.num_bytes
        else:
            self.stored_bytes += sign * segment.manifest.num_bytes
            self.stored_tokens += sign * segment.manifest.num_tokens

    def pin(self, segments: Iterable[StoredSegment]) -> None:
        for segment in segments:
            segment.num_pins += 1

    def unpin(self, segments: Iterable[StoredSegment]) -> None:
        for segment in segments:
            segment.num_pins -= 1
            if segment.num_pins == 0 and not segment.is_indexed:
                self.give(segment.allocation, segment.manifest.tenant)


class LockedBooks:
    """Hands out ``DramBooks`` with the lock held. All parts of a ``HostStore`` share one such object.

    The rules of the lock:

    - Everything in the books is read and changed inside ``open`` or ``open_unless_closed``, and nowhere else.
    - It is held for bookkeeping only. Whoever reads or writes blocks holds their segment (``hold``), not the
      lock: a held segment's bytes stay where they are.
    - At most ``eviction_plan.MAX_VISITED`` segments are looked at in one go, so that nobody waits long. It is
      not a fair lock: without a pause of ``LOCK_PAUSE_S`` between two holds nobody else would get it.
    - It is the last lock that a thread takes: no other lock is taken and no tier is called inside.
    """

    def __init__(self, books: DramBooks) -> None:
        self._lock = threading.Lock()
        # None once the store is closed.
        self._books: DramBooks | None = books
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """A number that no segment, lease or reservation of this store has. Needs no lock."""
        return next(self._ids)

    @contextmanager
    def open(self) -> Iterator[DramBooks]:
        """Hold the lock and get the books.

        Raises:
            StoreClosedError: the store was closed.
        """
        with self._lock:
            if self._books is None:
                raise StoreClosedError("the KV store was closed")
            yield self._books

    @contextmanager
    def open_unless_closed(self) -> Iterator[DramBooks | None]:
        """Hold the lock and get the books; None after ``close``."""
        with self._lock:
            yield self._books

    def hold(self, segment_id: int) -> StoredSegment | None:
        """Pin an indexed segment until ``unhold``; None if it has gone."""
        with self.open() as books:
            segment = books.segments.get(segment_id)
            if segment is not None:
                segment.num_pins += 1
            return segment

    def unhold(self, segment: StoredSegment) -> None:
        """End a hold. Does nothing after ``close``."""
        with self.open_unless_closed() as books:
            if books is not None:
                books.unpin((segment,))

    @contextmanager
    def held(self, segment_id: int) -> Iterator[StoredSegment | None]:
        """``hold`` for the length of a block."""
        segment = self.hold(segment_id)
        try:
            yield segment
        finally:
            if segment is not None:
                self.unhold(segment)

    def close(self) -> None:
        """Drop the books. Readers that wait for layers of arriving segments are told that these failed."""
        with self._lock:
            if self._books is None:
                return
            for segment in self._books.segments.values():
                segment.is_indexed = False
            for status in self._books.arriving.values():
                status.fail()
            # Dropped, not unmapped: a copy thread may still hold views, and they keep the mapping alive.
            self._books = None
