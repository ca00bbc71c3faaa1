"""What all parts of the DRAM tier share: the lock, the books that it guards, and pins."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from krul_backend.errors import ConfigError, StoreClosedError
from krul_backend.store.dram_books import DramBooks
from krul_backend.store.eviction import EvictionPolicy
from krul_backend.store.hashing import Hasher
from krul_backend.store.interface import KVStore
from krul_backend.store.policy_registry import make_policy
from krul_backend.store.stored_segment import StoredSegment


class HostBase(KVStore):
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
        self._hasher = Hasher()
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

    @contextmanager
    def _held(self, segment_id: int) -> Iterator[StoredSegment | None]:
        segment = self.hold(segment_id)
        try:
            yield segment
        finally:
            if segment is not None:
                self.unhold(segment)
