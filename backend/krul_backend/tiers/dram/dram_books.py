"""What is where in the DRAM tier: arena, index, order of eviction, pins, quotas and counts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from krul_backend.tiers.common.arena import DramArena, Extent, aligned_num_bytes
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.page_index import PageIndex
from krul_backend.tiers.dram.clear_marks import ClearMarks
from krul_backend.tiers.dram.eviction_plan import Candidate, EvictionSearch
from krul_backend.tiers.dram.pins import PinBook
from krul_backend.tiers.dram.stored_segment import StoredSegment
from krul_backend.tiers.dram.tenant_quotas import TenantQuotas

logger = logging.getLogger(__name__)

MAX_PINNED_SHARE = 0.5
"""Of the arena, what pins may keep."""


@dataclass
class Counters:
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


class DramBooks:
    """Not thread-safe: each method is called with the store's lock held, and none reads or writes a block.

    The life of a segment's extents (a trim frees the front of them while they are indexed)::

        taken -> published -> indexed --(evict)--------------------------------> free
              |                    \\-(quarantine, clear)-> pinned ? zombie -> free at the last unpin
              \\-> given back, or dropped by ``publish`` ----------------------> free

    Args:
        capacity_bytes: size of the arena in bytes.
        policy: order of eviction, owned by these books.
        clock: seconds, monotonic.
        tenant_quota: share of the arena, in (0, 1], that one tenant may take.
    """

    def __init__(
        self, capacity_bytes: int, policy: EvictionPolicy, clock: Callable[[], float], tenant_quota: float
    ) -> None:
        self.arena = DramArena(capacity_bytes)
        self.index: PageIndex[StoredSegment] = PageIndex()
        self.segments: dict[int, StoredSegment] = {}
        self.counters = Counters()
        self.clears = ClearMarks()
        self.pins = PinBook(int(self.arena.capacity_bytes * MAX_PINNED_SHARE), clock)
        self.stored_bytes = 0
        self.stored_tokens = 0
        self._policy = policy
        self._clock = clock
        limit_bytes = int(self.arena.capacity_bytes * tenant_quota) if tenant_quota < 1 else None
        self._quotas = TenantQuotas(limit_bytes, policy)

    # Space

    def search(self, sizes: Sequence[int], tenant: str, newest_id: int) -> EvictionSearch:
        """To find who leaves so that blocks of ``sizes`` bytes fit, into arena and quota.

        Segments with ids after ``newest_id`` do not.
        """
        wanted = [num_bytes for num_bytes in sizes if num_bytes]
        needed_bytes = sum(aligned_num_bytes(num_bytes) for num_bytes in wanted)
        return EvictionSearch(
            wanted,
            self._quotas.victims(tenant),
            self._quotas.excess_bytes(tenant, needed_bytes),
            self._policy.victims(),
            self._look,
            newest_id,
        )

    def evict(self, victims: Sequence[Candidate]) -> bool:
        """Evict what a search found; False if one is not as it was then. Those before it have left."""
        for victim in victims:
            segment = victim.segment
            if not segment.is_indexed or not self._is_idle(segment) or segment.ranges != victim.ranges:
                return False
            self.counters.evicted_segments += 1
            self.counters.evicted_bytes += segment.manifest.num_bytes
            self.remove(segment)
        return True

    def take(self, sizes: Sequence[int], tenant: str) -> tuple[Extent | None, ...] | None:
        """One extent per size in bytes (None for 0) on a tenant's account; None if they are not free."""
        taken = self.arena.allocate_all([num_bytes for num_bytes in sizes if num_bytes])
        if taken is None:
            return None
        taken_bytes = sum(extent.taken_bytes for extent in taken)
        if self._quotas.excess_bytes(tenant, taken_bytes) > 0:
            self.arena.free_all(taken)
            return None
        self._quotas.charge(tenant, taken_bytes)
        of_layers = iter(taken)
        return tuple(next(of_layers) if num_bytes else None for num_bytes in sizes)

    def give(self, extents: Iterable[Extent | None], tenant: str) -> None:
        """Free extents that a tenant was charged for."""
        held = [extent for extent in extents if extent is not None]
        self.arena.free_all(held)
        self._quotas.charge(tenant, -sum(extent.taken_bytes for extent in held))

    def move_charge(self, num_bytes: int, tenant: str, to_tenant: str) -> None:
        """Taken bytes turn out to be another tenant's."""
        if tenant != to_tenant:
            self._quotas.charge(tenant, -num_bytes)
            self._quotas.charge(to_tenant, num_bytes)

    def note_trim(self, segment: StoredSegment, taken_before: int, num_bytes: int) -> None:
        """An indexed segment lost ``num_bytes`` of its blocks, and took ``taken_before`` of the arena."""
        self._quotas.charge(segment.manifest.tenant, segment.taken_bytes - taken_before)
        self.pins.note_size(segment)
        self.stored_bytes -= num_bytes
        self.counters.trimmed_segments += 1
        self.counters.trimmed_bytes += num_bytes

    def _look(self, segment_id: int) -> Candidate | None:
        segment = self.segments.get(segment_id)
        if segment is None or not self._is_idle(segment):
            return None
        return Candidate(segment, segment.ranges, segment.taken_bytes, self.index.before(segment))

    def _is_idle(self, segment: StoredSegment) -> bool:
        """Whether an indexed segment may be evicted."""
        return segment.num_pins == 0 and not self.pins.remaining_s(segment.segment_id)

    # Segments

    def publish(self, segment: StoredSegment) -> bool:
        """Index a segment; False, and nothing is done, if every page of it is indexed already."""
        if not self.index.add(segment):
            return False
        segment.is_indexed = True
        self.segments[segment.segment_id] = segment
        self.stored_bytes += segment.manifest.num_bytes
        self.stored_tokens += segment.manifest.num_tokens
        self._quotas.add(segment)
        return True

    def touch(self, path: Sequence[StoredSegment]) -> None:
        """Note a use of the segments of a conversation, from its first stored one on."""
        # A segment can leave the index while somebody uses it: the policy must not get it back.
        indexed = [segment for segment in path if segment.is_indexed]
        now_s = self._clock()
        for segment in indexed:
            segment.last_used_s = now_s
        self._policy.touch(indexed)
        self._quotas.touch(indexed)

    def quarantine(self, segment: StoredSegment) -> bool:
        """Take a damaged segment out, unless that happened before. Returns whether it was this call."""
        if not segment.is_indexed:
            return False
        self.remove(segment)
        self.counters.corrupted_segments += 1
        logger.error("segment %d has a wrong checksum: taken out of the index", segment.segment_id)
        return True

    def remove(self, segment: StoredSegment) -> None:
        """Take a segment out of the index; free it now, or at its last unpin."""
        self.index.remove(segment)
        self._policy.remove(segment.segment_id)
        self._quotas.remove(segment)
        self.pins.end(segment.segment_id)
        del self.segments[segment.segment_id]
        self.stored_bytes -= segment.manifest.num_bytes
        self.stored_tokens -= segment.manifest.num_tokens
        segment.is_indexed = False
        if segment.num_pins == 0:
            self.give(segment.all_extents, segment.manifest.tenant)

    def pin(self, segments: Iterable[StoredSegment]) -> None:
        for segment in segments:
            segment.num_pins += 1

    def unpin(self, segments: Iterable[StoredSegment]) -> None:
        for segment in segments:
            segment.num_pins -= 1
            if segment.num_pins == 0 and not segment.is_indexed:
                self.give(segment.all_extents, segment.manifest.tenant)
