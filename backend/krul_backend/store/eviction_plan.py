"""Which segments must leave for a reservation to fit."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import islice

from krul_backend.store.stored_segment import StoredSegment
from krul_backend.tiers.arena import DramArena, aligned_num_bytes
from krul_backend.tiers.free_extents import FreeTrial

MAX_FREE_SHARE = 1 / 16
"""Of the arena, what may be free after a reservation before victims are spared.

Not less: who was spared is worth little still, and is the first that the next reservation tries again.
"""


def plan_eviction(
    arena: DramArena,
    sizes: Sequence[int],
    idle_segments: Iterator[StoredSegment],
    leaving: Sequence[StoredSegment],
    before: Callable[[StoredSegment], StoredSegment | None],
) -> list[StoredSegment] | None:
    """Segments whose leaving makes blocks of all ``sizes`` (bytes) fit; None if nothing does.

    The first of ``idle_segments`` that make them fit are found. If more than ``MAX_FREE_SHARE`` of the arena
    would be free then, those of them are spared, what is worth most first, that nothing would be placed on.
    A segment is not spared when the one that it continues (``before``) leaves. ``leaving`` are idle segments
    that leave in any case; they come first in the answer.

    Changes nothing, so that no segment leaves for a reservation that fails anyway. What counts are extents,
    not sums of bytes, because pinned blocks can lie between the freed ones.
    """
    aligned_sizes = [aligned_num_bytes(num_bytes) for num_bytes in sizes]
    if sum(aligned_sizes) > arena.capacity_bytes:
        return None
    found = _first_run(arena, aligned_sizes, idle_segments, leaving)
    while found is not None:
        victims, offsets = found
        left_free_bytes = (
            arena.free_bytes + sum(victim.taken_bytes for victim in victims) - sum(aligned_sizes)
        )
        excess_bytes = left_free_bytes - int(arena.capacity_bytes * MAX_FREE_SHARE)
        placement = _Placement(offsets, aligned_sizes)
        fewer = _without_spared(victims, len(leaving), excess_bytes, placement, before)
        if len(fewer) == len(victims):
            return victims
        with arena.trial() as trial:
            for victim in fewer:
                _give(victim, trial)
            # With other free ranges another one may be the best fit, so it is tried, not concluded.
            placed = trial.find_all(aligned_sizes)
        if placed is None:
            return victims
        found = fewer, placed
    return None


def _first_run(
    arena: DramArena,
    aligned_sizes: Sequence[int],
    idle_segments: Iterator[StoredSegment],
    leaving: Sequence[StoredSegment],
) -> tuple[list[StoredSegment], list[int]] | None:
    """``leaving`` and the first of ``idle_segments`` that make the sizes fit, and where those would lie.

    Of a run longer than eight, up to an eighth may be more than need be.
    """
    victims = list(leaving)
    lacking_bytes = sum(aligned_sizes) - arena.free_bytes - sum(victim.taken_bytes for victim in victims)
    leaving_set = set(leaving)
    others = (segment for segment in idle_segments if segment not in leaving_set)
    with arena.trial() as trial:
        for victim in victims:
            _give(victim, trial)
        while True:
            # Sums first: they are cheap, and below this many victims no layout can help.
            offsets = trial.find_all(aligned_sizes) if lacking_bytes <= 0 else None
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


class _Placement:
    """Where blocks would lie: which extents they overlap."""

    def __init__(self, offsets: Sequence[int], sizes: Sequence[int]) -> None:
        self._ranges = sorted(zip(offsets, sizes, strict=True))
        self._starts = [start for start, _ in self._ranges]

    def covers_part_of(self, segment: StoredSegment) -> bool:
        """Whether a block would lie on a byte of the segment."""
        return any(self._overlaps(offset, offset + num_bytes) for offset, num_bytes in segment.ranges)

    def _overlaps(self, start: int, end: int) -> bool:
        # The ranges are disjoint: only the last one that starts before ``end`` can reach beyond ``start``.
        position = bisect_right(self._starts, end - 1) - 1
        return position >= 0 and sum(self._ranges[position]) > start


def _without_spared(
    victims: Sequence[StoredSegment],
    num_leaving: int,
    excess_bytes: int,
    placement: _Placement,
    before: Callable[[StoredSegment], StoredSegment | None],
) -> list[StoredSegment]:
    """The victims without those that may stay, in the same order."""
    gone: set[StoredSegment] = set(victims[:num_leaving])
    # Backwards: what is worth most is spared first, and a segment is settled before those that continue it.
    for victim in reversed(victims[num_leaving:]):
        if excess_bytes <= 0 or placement.covers_part_of(victim) or before(victim) in gone:
            gone.add(victim)
        else:
            excess_bytes -= victim.taken_bytes
    return [victim for victim in victims if victim in gone]


def _give(segment: StoredSegment, trial: FreeTrial) -> None:
    """Free a segment's bytes on trial."""
    for offset, num_bytes in segment.ranges:
        trial.give(offset, num_bytes)
