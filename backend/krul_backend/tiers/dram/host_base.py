"""What all parts of the DRAM tier share: the lock, the books that it guards, and pins."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

from krul_backend.errors import ConfigError, StoreClosedError
from krul_backend.free_extents import FreeExtents
from krul_backend.tiers.common.arena import Extent
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.policy_registry import make_policy
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.eviction_plan import MAX_VISITED, Candidate, EvictionSearch
from krul_backend.tiers.dram.stored_segment import StoredSegment

_MAX_SEARCHES = 4
_BREATH_S = 1e-4
"""Between two holds of the lock: it is not fair, and whoever waits for it would not get it otherwise."""

Extents = tuple[Extent | None, ...]
T = TypeVar("T")


class HostBase:
    """See ``HostStore``, which has the arguments."""

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        tenant_quota: float = 1.0,
    ) -> None:
        if not 0 < tenant_quota <= 1:
            raise ConfigError(f"tenant_quota is a share of the arena above 0, up to 1, not {tenant_quota}")
        policy = policy if policy is not None else make_policy("value", clock)
        self._lock = threading.Lock()
        # None once the store is closed.
        self._open_books: DramBooks | None = DramBooks(capacity_bytes, policy, clock, tenant_quota)
        self._clock = clock
        self._ids = itertools.count(1)

    def next_id(self) -> int:
        """A number that no segment, lease or reservation of this store has."""
        return next(self._ids)

    @property
    def _books(self) -> DramBooks:
        """Use them with the lock held."""
        if self._open_books is None:
            raise StoreClosedError("the KV store was closed")
        return self._open_books

    def hold(self, segment_id: int) -> StoredSegment | None:
        """Pin an indexed segment until ``unhold``; None if it has gone."""
        with self._lock:
            segment = self._books.segments.get(segment_id)
            if segment is not None:
                segment.num_pins += 1
            return segment

    def unhold(self, segment: StoredSegment) -> None:
        """End a hold; also after ``close``."""
        with self._lock:
            if self._open_books is not None:
                self._open_books.unpin((segment,))

    def _take(self, sizes: Sequence[int], tenant: str, use: Callable[[DramBooks, Extents], T]) -> T | None:
        """Take one extent per size in bytes (None for 0), and ``use`` them in the same hold of the lock.

        Idle segments leave if needed. The lock is never held for more than ``MAX_VISITED`` of them: a longer
        search plans on a copy of the free ranges, and begins again if what it found does not hold any more.
        None, counted, when the space cannot be had.
        """
        for _ in range(_MAX_SEARCHES):
            with self._lock:
                books = self._books
                search = books.search(sizes, tenant, self.next_id())
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
                with self._lock:
                    is_as_it_was = self._books.arena.free_bytes == space.free_bytes
                if is_as_it_was:
                    break
                continue
            for first in range(0, len(victims), MAX_VISITED):
                time.sleep(_BREATH_S)
                with self._lock:
                    books = self._books
                    part = victims[first : first + MAX_VISITED]
                    if not books.evict(part):
                        break
                    extents = books.take(sizes, tenant) if part[-1] is victims[-1] else None
                    if extents is not None:
                        return use(books, extents)
        with self._lock:
            self._books.counters.rejected_reservations += 1
        return None

    def _search_on(self, search: EvictionSearch, space: FreeExtents) -> list[Candidate] | None:
        """Look for twice as many candidates each time, until they are enough on a copy of the free ranges."""
        while not search.is_exhausted:
            wanted = 2 * max(search.num_found, MAX_VISITED)
            while search.num_found < wanted and not search.is_exhausted:
                time.sleep(_BREATH_S)
                with self._lock:
                    if self._open_books is None:
                        raise StoreClosedError("the KV store was closed")
                    search.look_on(MAX_VISITED)
            victims = search.plan(space)
            if victims is not None:
                return victims
        return None

    @contextmanager
    def _held(self, segment_id: int) -> Iterator[StoredSegment | None]:
        segment = self.hold(segment_id)
        try:
            yield segment
        finally:
            if segment is not None:
                self.unhold(segment)
