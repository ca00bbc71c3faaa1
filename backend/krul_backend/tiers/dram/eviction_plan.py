"""Chooses the segments to evict for a reservation to fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

from krul_backend.free_extents import FreeExtents
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.dram.arena import Allocation, aligned_num_bytes
from krul_backend.tiers.dram.stored_segment import StoredSegment

MAX_FREE_SHARE = 1 / 16
"""If a plan would leave a larger share of the arena free, it spares some of its victims.

The share is not smaller, because a spared segment is still among those of least worth: the next reservation
would only find it again.
"""

MAX_VISITED = 128
"""The most segments that are looked at in one hold of the store's lock."""

_MAX_SPARINGS = 8


class FastCopiesFirst:
    """The order in which segments leave: all fast copies first, each kind in the order of its own policy.

    Not thread-safe.
    """

    def __init__(self, policy: EvictionPolicy) -> None:
        self._fast_copies, self._others = policy.fresh(), policy

    def touch(self, path: Sequence[StoredSegment]) -> None:
        """Note a use of segments of one kind, in conversation order."""
        if path:
            self._policy(is_fast_copy=path[0].is_fast_copy).touch(path)

    def advise(self, segment: StoredSegment, hint: Hint) -> None:
        """Note a hint about a known segment."""
        self._policy(is_fast_copy=segment.is_fast_copy).advise(segment.segment_id, hint)

    def hold(self, segment: StoredSegment, *, is_held: bool) -> None:
        """Note that a known segment may not be evicted for now, or may be again."""
        self._policy(is_fast_copy=segment.is_fast_copy).hold(segment.segment_id, is_held=is_held)

    def replace(self, segment: StoredSegment, by: StoredSegment) -> None:
        """Put a segment in the place of a known one of the same kind."""
        self._policy(is_fast_copy=segment.is_fast_copy).replace(segment.segment_id, by)

    def remove(self, segment: StoredSegment) -> None:
        self._policy(is_fast_copy=segment.is_fast_copy).remove(segment.segment_id)

    def victims(self, *, only_fast_copies: bool) -> Iterator[int]:
        """Ids of segments, the first to evict first."""
        yield from self._fast_copies.victims()
        if not only_fast_copies:
            yield from self._others.victims()

    def fresh(self) -> FastCopiesFirst:
        """One of the same kind that knows no segment."""
        return FastCopiesFirst(self._others.fresh())

    def _policy(self, *, is_fast_copy: bool) -> EvictionPolicy:
        return self._fast_copies if is_fast_copy else self._others


@dataclass(frozen=True, eq=False)
class Candidate:
    """A segment that could be evicted, as it was when looked at; ``before`` is the segment it continues."""

    segment: StoredSegment
    allocation: Allocation
    before: StoredSegment | None

    @property
    def taken_bytes(self) -> int:
        return self.allocation.taken_bytes


class EvictionSearch:
    """Looks for segments whose eviction makes blocks of all ``sizes`` (bytes) fit. Not thread-safe.

    Looking at a segment needs the store's lock. Planning with segments that were looked at needs no lock when
    it is done on a copy of the free ranges; by then the plan may not be possible any more.

    Args:
        own: ids of the segments of the tenant that asks, in the order of eviction. They are evicted in any
            case, until ``excess_bytes`` of its quota are free.
        others: ids of all segments, in the order of eviction.
        look: returns a segment as a candidate; None if it may not be evicted now.
        newest_id: segments with later ids are skipped: a copy of the free ranges may be older than they are.
    """

    def __init__(
        self,
        sizes: Sequence[int],
        own: Iterator[int],
        excess_bytes: int,
        others: Iterator[int],
        look: Callable[[int], Candidate | None],
        newest_id: int,
    ) -> None:
        self._sizes = [aligned_num_bytes(num_bytes) for num_bytes in sizes]
        self._own, self._others = own, others
        self._excess_bytes = excess_bytes
        self._look = look
        self._newest_id = newest_id
        self._seen: set[int] = set()
        self._leaving: list[Candidate] = []
        self._idle: list[Candidate] = []
        self.is_exhausted = False

    @property
    def num_found(self) -> int:
        """How many segments that could be evicted were found so far."""
        return len(self._leaving) + len(self._idle)

    def look_on(self, num_visits: int) -> None:
        """Look at up to ``num_visits`` more segments."""
        for _ in range(num_visits):
            if not self._look_at_next():
                return

    def plan(self, space: FreeExtents, num_visits: int = 0) -> list[Candidate] | None:
        """Choose the segments to evict, among those seen and ``num_visits`` more; None if they are too few.

        Takes the first candidates that make the sizes fit. If more than ``MAX_FREE_SHARE`` of the space would
        be free then, it spares candidates on whose bytes no block would be placed, those of most worth first.
        A segment is not spared when the one that it continues is evicted.

        Evicts nothing itself, so that nothing is evicted for a reservation that fails anyway. It compares
        ranges, not sums of bytes, because pinned blocks can lie between the freed ones.
        """
        if sum(self._sizes) > space.capacity_bytes:
            self.is_exhausted = True
            return None
        visits = iter(range(num_visits))
        while self._excess_bytes > 0:
            if next(visits, None) is None or not self._look_at_next():
                return None
        found = self._first_run(space, visits)
        for _ in range(_MAX_SPARINGS):
            if found is None:
                return None
            victims, offsets = found
            left_free_bytes = (
                space.free_bytes + sum(victim.taken_bytes for victim in victims) - sum(self._sizes)
            )
            excess_bytes = left_free_bytes - int(space.capacity_bytes * MAX_FREE_SHARE)
            placement = _Placement(offsets, self._sizes)
            fewer = _without_spared(victims, len(self._leaving), excess_bytes, placement)
            if len(fewer) == len(victims):
                return victims
            with space.trial() as give:
                for victim in fewer:
                    _give(victim, give)
                # With other free ranges the best fit may be another one, so the placement is tried again.
                placed = space.find_all(self._sizes)
            if placed is None:
                return victims
            found = fewer, placed
        return found[0] if found is not None else None

    def _first_run(
        self, space: FreeExtents, visits: Iterator[int]
    ) -> tuple[list[Candidate], list[int]] | None:
        """Find the first segments whose eviction makes the sizes fit, and where the blocks would lie.

        Of more than eight segments, up to an eighth may be unnecessary.
        """
        victims = list(self._leaving)
        lacking_bytes = sum(self._sizes) - space.free_bytes - sum(victim.taken_bytes for victim in victims)
        others = self._candidates(visits)
        with space.trial() as give:
            for victim in victims:
                _give(victim, give)
            while True:
                # Compare sums first: that is cheap, and too few bytes cannot fit in any layout.
                offsets = space.find_all(self._sizes) if lacking_bytes <= 0 else None
                if offsets is not None:
                    return victims, offsets
                # Add more at a time as the run gets longer, so that trials cost no more than additions.
                following = list(islice(others, 1 + len(victims) // 8))
                if not following:
                    return None
                for victim in following:
                    _give(victim, give)
                    lacking_bytes -= victim.taken_bytes
                victims += following

    def _candidates(self, visits: Iterator[int]) -> Iterator[Candidate]:
        """Candidates that need not be evicted: those seen before, then as many more as may be visited."""
        position = 0
        while True:
            if position < len(self._idle):
                yield self._idle[position]
                position += 1
            elif next(visits, None) is None or not self._look_at_next():
                return

    def _look_at_next(self) -> bool:
        """Look at one more segment; False if none is left."""
        is_own = self._excess_bytes > 0
        segment_id = next(self._own if is_own else self._others, None)
        if segment_id is None:
            self.is_exhausted = True
            return False
        if segment_id in self._seen or segment_id > self._newest_id:
            return True
        self._seen.add(segment_id)
        found = self._look(segment_id)
        if found is not None and is_own:
            self._leaving.append(found)
            self._excess_bytes -= found.taken_bytes
        elif found is not None:
            self._idle.append(found)
        return True


class _Placement:
    """The ranges in which blocks would lie."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._ranges = sorted(zip(offsets, sizes, strict=True))
        self._starts = [start for start, _ in self._ranges]

    def covers_part_of(self, victim: Candidate) -> bool:
        """Whether a block would lie on any byte of the segment."""
        ranges = victim.allocation.ranges
        return any(self._overlaps(offset, offset + num_bytes) for offset, num_bytes in ranges)

    def _overlaps(self, start: int, end: int) -> bool:
        # The ranges are disjoint: only the last one that starts before ``end`` can reach beyond ``start``.
        position = bisect_right(self._starts, end - 1) - 1
        return position >= 0 and sum(self._ranges[position]) > start


def _without_spared(
    victims: Sequence[Candidate], num_leaving: int, excess_bytes: int, placement: _Placement
) -> list[Candidate]:
    """The victims without the spared ones, in the same order. The first ``num_leaving`` are not spared."""
    gone = {victim.segment for victim in victims[:num_leaving]}
    # Backwards: segments of most worth are spared first, and each is decided before those that continue it.
    for victim in reversed(victims[num_leaving:]):
        if excess_bytes <= 0 or placement.covers_part_of(victim) or victim.before in gone:
            gone.add(victim.segment)
        else:
            excess_bytes -= victim.taken_bytes
    return [victim for victim in victims if victim.segment in gone]


def _give(victim: Candidate, give: Callable[[int, int], None]) -> None:
    """Free a segment's ranges on trial."""
    for offset, num_bytes in victim.allocation.ranges:
        give(offset, num_bytes)
