"""The one lock of the DRAM tier, and the books that it guards."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from krul_backend.errors import StoreClosedError
from krul_backend.tiers.common.interface import FAILED, PENDING
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.stored_segment import StoredSegment


class LockedBooks:
    """Hands out ``DramBooks`` with the lock held. All parts of a ``HostStore`` share one such object.

    The rules of the lock:

    - Everything in the books is read and changed inside ``open`` or ``open_unless_closed``, and nowhere else.
    - It is held for bookkeeping only. Whoever reads or writes blocks holds their segment (``hold``), not the
      lock: a held segment's bytes stay where they are.
    - At most ``eviction_plan.MAX_VISITED`` segments are looked at in one go, so that nobody waits long.
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
                status.flags[status.flags == PENDING] = FAILED
            # Dropped, not unmapped: a copy thread may still hold views, and they keep the mapping alive.
            self._books = None
