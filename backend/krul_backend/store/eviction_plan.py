"""How many segments must leave for a reservation to fit."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from krul_backend.store.stored_segment import StoredSegment
from krul_backend.tiers.arena import DramArena, aligned_num_bytes


def plan_eviction(
    arena: DramArena,
    sizes: Sequence[int],
    idle_segments: Iterator[StoredSegment],
    leaving: Sequence[StoredSegment] = (),
) -> list[StoredSegment] | None:
    """The shortest run of ``idle_segments`` whose leaving makes blocks of all ``sizes`` (bytes) fit.

    ``leaving`` are idle segments that leave in any case; they come first in the answer. Returns None when
    even the last one does not make them fit. Changes nothing: it is tried on a copy of the free space, so
    that no segment leaves for a reservation that fails anyway. What counts are extents, not sums of bytes,
    because pinned blocks can lie between the freed ones.
    """
    aligned_sizes = [aligned_num_bytes(num_bytes) for num_bytes in sizes]
    needed_bytes = sum(aligned_sizes)
    if needed_bytes > arena.capacity_bytes:
        return None
    victims = list(leaving)
    available_bytes = arena.free_bytes + sum(victim.taken_bytes for victim in victims)
    leaving_set = set(leaving)
    idle_segments = (segment for segment in idle_segments if segment not in leaving_set)
    # Sums first: they are cheap, and below this many victims no layout can help.
    while available_bytes < needed_bytes:
        victim = next(idle_segments, None)
        if victim is None:
            return None
        victims.append(victim)
        available_bytes += victim.taken_bytes
    trial = arena.free_extents()
    for victim in victims:
        victim.give_extents_to(trial)
    while not trial.fits_all(aligned_sizes):
        victim = next(idle_segments, None)
        if victim is None:
            return None
        victims.append(victim)
        victim.give_extents_to(trial)
    return victims
