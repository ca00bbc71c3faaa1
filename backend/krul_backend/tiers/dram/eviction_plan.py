"""Which segments must leave for a reservation to fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from itertools import islice
from typing import Protocol

from krul_backend.free_extents import FreeTrial
from krul_backend.tiers.common.interface import Span
from krul_backend.tiers.dram.arena import aligned_num_bytes
from krul_backend.tiers.dram.stored_segment import StoredSegment

MAX_FREE_SHARE = 1 / 16
"""Of the arena, what may be free after a reservation before victims are spared.

Not less: who was spared is worth little still, and is the first that the next reservation tries again.
"""

MAX_VISITED = 128
"""Segments that are looked at in one hold of the store's lock."""

_MAX_SPARINGS = 8


class Space(Protocol):
    """Free ranges in which something can be tried: an arena's, or a copy of them."""

    @property
    def capacity_bytes(self) -> int: ...

    @property
    def free_bytes(self) -> int: ...

    def trial(self) -> AbstractContextManager[FreeTrial]: ...


@dataclass(frozen=True, eq=False)
class Candidate:
    """A segment that could be evicted, as it was when it was looked at. ``before``: the one it continues."""

    segment: StoredSegment
    ranges: tuple[Span, ...]
    taken_bytes: int
    before: StoredSegment | None


class EvictionSearch:
    """Looks for segments whose leaving makes blocks of all ``sizes`` (bytes) fit. Not thread-safe.

    Looking at a segment needs the store's lock. Planning with those that were looked at does not, on a copy
    of the free ranges; what is found then may not hold any more.

    Args:
        own: the segments of the tenant that asks, in the order of eviction: they leave in any case, until
            ``excess_bytes`` of its quota are free.
        others: all segments, in the order of eviction.
        look: a segment as a candidate; None if it may not leave now.
        newest_id: segments with later ids are passed over: they may lie where a copy of the free ranges has
            nothing.
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
        """Segments that could leave."""
        return len(self._leaving) + len(self._idle)

    def look_on(self, num_visits: int) -> None:
        """Look at up to ``num_visits`` more segments."""
        for _ in range(num_visits):
            if not self._look_at_next():
                return

    def plan(self, space: Space, num_visits: int = 0) -> list[Candidate] | None:
        """Choose the segments to evict, among those seen and ``num_visits`` more; None if they are too few.

        The first of them that make the sizes fit are found. If more than ``MAX_FREE_SHARE`` of the space
        would be free then, those of them are spared, what is worth most first, that nothing would be placed
        on. A segment is not spared when the one that it continues leaves.

        Changes nothing, so that no segment leaves for a reservation that fails anyway. What counts are
        extents, not sums of bytes, because pinned blocks can lie between the freed ones.
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
            with space.trial() as trial:
                for victim in fewer:
                    _give(victim, trial)
                # With other free ranges another one may be the best fit, so it is tried, not concluded.
                placed = trial.find_all(self._sizes)
            if placed is None:
                return victims
            found = fewer, placed
        return found[0] if found is not None else None

    def _first_run(self, space: Space, visits: Iterator[int]) -> tuple[list[Candidate], list[int]] | None:
        """Find the first segments whose eviction makes the sizes fit, and the places that they would leave.

        Of a run longer than eight, up to an eighth may be more than need be.
        """
        victims = list(self._leaving)
        lacking_bytes = sum(self._sizes) - space.free_bytes - sum(victim.taken_bytes for victim in victims)
        others = self._candidates(visits)
        with space.trial() as trial:
            for victim in victims:
                _give(victim, trial)
            while True:
                # Sums first: they are cheap, and below this many victims no layout can help.
                offsets = trial.find_all(self._sizes) if lacking_bytes <= 0 else None
                if offsets is not None:
                    return victims, offsets
                # More at a time as the run gets longer, so that trying costs no more than giving.
                following = list(islice(others, 1 + len(victims) // 8))
                if not following:
                    return None
                for victim in following:
                    _give(victim, trial)
                    lacking_bytes -= victim.taken_bytes
                victims += following

    def _candidates(self, visits: Iterator[int]) -> Iterator[Candidate]:
        """Those that need not leave: the ones looked at before, then as many more as may be visited."""
        position = 0
        while True:
            if position < len(self._idle):
                yield self._idle[position]
                position += 1
            elif next(visits, None) is None or not self._look_at_next():
                return

    def _look_at_next(self) -> bool:
        """False if there is none left."""
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
    """Where blocks would lie: which extents they overlap."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._ranges = sorted(zip(offsets, sizes, strict=True))
        self._starts = [start for start, _ in self._ranges]

    def covers_part_of(self, victim: Candidate) -> bool:
        """Whether a block would lie on a byte of the segment."""
        return any(self._overlaps(offset, offset + num_bytes) for offset, num_bytes in victim.ranges)

    def _overlaps(self, start: int, end: int) -> bool:
        # The ranges are disjoint: only the last one that starts before ``end`` can reach beyond ``start``.
        position = bisect_right(self._starts, end - 1) - 1
        return position >= 0 and sum(self._ranges[position]) > start


def _without_spared(
    victims: Sequence[Candidate], num_leaving: int, excess_bytes: int, placement: _Placement
) -> list[Candidate]:
    """The victims without those that may stay, in the same order."""
    gone = {victim.segment for victim in victims[:num_leaving]}
    # Backwards: what is worth most is spared first, and a segment is settled before those that continue it.
    for victim in reversed(victims[num_leaving:]):
        if excess_bytes <= 0 or placement.covers_part_of(victim) or victim.before in gone:
            gone.add(victim.segment)
        else:
            excess_bytes -= victim.taken_bytes
    return [victim for victim in victims if victim.segment in gone]


def _give(victim: Candidate, trial: FreeTrial) -> None:
    """Free a segment's bytes on trial."""
    for offset, num_bytes in victim.ranges:
        trial.give(offset, num_bytes)
