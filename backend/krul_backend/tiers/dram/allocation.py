"""Taking space from the arena, evicting idle segments if needed."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import TypeVar

from krul_backend.free_extents import FreeExtents
from krul_backend.tiers.dram.arena import Extent
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.eviction_plan import MAX_VISITED, Candidate, EvictionSearch
from krul_backend.tiers.dram.locked_books import LockedBooks

_MAX_SEARCHES = 4
_BREATH_S = 1e-4
"""Pause between two holds of the lock. It is not a fair lock: without a pause nobody else would get it."""

Extents = tuple[Extent | None, ...]
T = TypeVar("T")


class Allocator:
    """Takes extents for whole segments. Thread-safe."""

    def __init__(self, locked: LockedBooks) -> None:
        self._locked = locked

    def take(self, sizes: Sequence[int], tenant: str, use: Callable[[DramBooks, Extents], T]) -> T | None:
        """Take one extent per size in bytes (None for 0), and ``use`` them before the lock is released.

        Returns what ``use`` returns; None, counted as a rejected reservation, when there is no space.

        Idle segments are evicted if needed. A search that needs to look at more than ``MAX_VISITED`` segments
        goes on in steps, plans on a copy of the free ranges, and begins again if its plan no longer holds.
        """
        for _ in range(_MAX_SEARCHES):
            with self._locked.open() as books:
                search = books.search(sizes, tenant, self._locked.next_id())
                victims = search.plan(books.arena, MAX_VISITED)
                if victims is not None:
                    is_evicted = books.evict(victims)
                    assert is_evicted, f"one of {len(victims)} idle segments was not idle"
                    extents = books.take(sizes, tenant)
                    assert extents is not None, f"{sizes} fitted in the trial alone"
                    return use(books, extents)
                if search.is_exhausted:
                    break
                space = books.arena.copy_free()
            victims = self._search_on(search, space)
            if victims is None:
                with self._locked.open() as books:
                    is_as_it_was = books.arena.free_bytes == space.free_bytes
                if is_as_it_was:
                    break
                continue
            for first in range(0, len(victims), MAX_VISITED):
                time.sleep(_BREATH_S)
                with self._locked.open() as books:
                    part = victims[first : first + MAX_VISITED]
                    if not books.evict(part):
                        break
                    extents = books.take(sizes, tenant) if part[-1] is victims[-1] else None
                    if extents is not None:
                        return use(books, extents)
        with self._locked.open() as books:
            books.counters.rejected_reservations += 1
        return None

    def _search_on(self, search: EvictionSearch, space: FreeExtents) -> list[Candidate] | None:
        """Look for twice as many candidates each time, until they are enough on a copy of the free ranges."""
        while not search.is_exhausted:
            wanted = 2 * max(search.num_found, MAX_VISITED)
            while search.num_found < wanted and not search.is_exhausted:
                time.sleep(_BREATH_S)
                with self._locked.open():
                    search.look_on(MAX_VISITED)
            victims = search.plan(space)
            if victims is not None:
                return victims
        return None
