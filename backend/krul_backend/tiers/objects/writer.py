"""Writes committed segments to the object store."""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque

import numpy as np

from krul_backend.errors import ManifestError
from krul_backend.tiers.common.interface import Clock
from krul_backend.tiers.common.tier_health import Suspension, TierCounters
from krul_backend.tiers.common.write_queue import QueuedSegment, WriteQueue
from krul_backend.tiers.objects.connection import ObjectStoreConnection
from krul_backend.tiers.objects.lookup import KnownSegments, Lookup, publish
from krul_backend.tiers.objects.object_client import ObjectClient, ObjectStoreError, StoreFullError
from krul_backend.tiers.objects.stored_object import Epochs, StoredObject, encode_object

_CLOSE_TIMEOUT_S = 5.0
_NUM_THREADS = 2


class ObjectWriter:
    """Writes queued segments in a few threads of its own. Thread-safe.

    The blocks of a segment are written first, then its metadata, then the pointer by which it is found. The
    blocks of several segments are written at once. Their pointers are written, and they are settled, in the
    order in which they were put: a segment after those that it continues. One that begins with the same page
    as another, of which it may be a copy, is begun when that one is settled. What waits is in ``queue``.
    """

    def __init__(
        self,
        connection: ObjectStoreConnection,
        suspension: Suspension,
        counters: TierCounters,
        epochs: Epochs,
        known: KnownSegments,
        lookup: Lookup,
        clock: Clock,
        queue_bytes: int,
    ) -> None:
        self._connection = connection
        self._suspension = suspension
        self._counters = counters
        self._epochs = epochs
        self._known = known
        self._lookup = lookup
        self._clock = clock
        self.queue = WriteQueue(queue_bytes, counters)
        self._is_giving_up = False
        # Those that are being written, in the order in which they were put.
        self._taken: deque[QueuedSegment] = deque()
        self._turn = threading.Condition()
        self._threads = [
            threading.Thread(target=self._work, name=f"krul-objects-writer-{i}", daemon=True)
            for i in range(_NUM_THREADS)
        ]
        for thread in self._threads:
            thread.start()

    def put(self, item: QueuedSegment) -> bool:
        """See ``LowerTier.put``."""
        return not self._suspension.is_active and self.queue.put(item)

    def close(self) -> None:
        """Write waiting segments for some seconds at most, then give up the rest."""
        self.queue.close()
        for is_giving_up in (False, True):
            self._is_giving_up = is_giving_up
            ends_at_s = time.monotonic() + _CLOSE_TIMEOUT_S
            for thread in self._threads:
                thread.join(max(0.0, ends_at_s - time.monotonic()))

    def _work(self) -> None:
        while self.queue.wait():
            with self._turn:
                # One at a time, so that ``give_up`` reaches all others.
                items = self.queue.take(1)
                self._taken.extend(items)
            for item in items:
                if self._is_giving_up or not self._is_written(item):
                    self._counters.skip("failed")
                self._await_earlier(item)
                self.queue.settle(items)
                with self._turn:
                    self._taken.popleft()
                    self._turn.notify_all()

    def _await_earlier(self, item: QueuedSegment, *, only_alike: bool = False) -> None:
        """Wait until all that was put before is settled, or what of it begins with the same page."""
        with self._turn:
            earlier = set(itertools.takewhile(lambda other: other is not item, self._taken))
            if only_alike:
                earlier = {other for other in earlier if _first_page(other) == _first_page(item)}
            self._turn.wait_for(lambda: earlier.isdisjoint(self._taken))

    def _is_written(self, item: QueuedSegment) -> bool:
        if self._suspension.is_active:
            return False
        try:
            store = self._connection.store()
            self._write(store, item)
            self._suspension.succeeded()
            return True
        except (StoreFullError, ManifestError):
            pass  # A full store evicts in the background: there may be room for the next segment.
        except ObjectStoreError as error:
            self._suspension.failed("writes fail", error)
        self._counters.add(failed_writes=1)
        return False

    def _write(self, store: ObjectClient, item: QueuedSegment) -> None:
        manifest = item.manifest
        self._await_earlier(item, only_alike=True)
        num_clears = self._known.num_clears
        prefix = self._epochs.prefix(store, manifest.model.fingerprint, may_create=True)
        if prefix is None:
            raise ObjectStoreError("the epoch's object cannot be kept")
        if self._lookup.find_copy(store, prefix, manifest):
            return
        digest, metadata = encode_object(manifest, item.checksums)
        place = f"{prefix}/s/{digest}"
        segment = StoredObject(prefix, place, manifest, item.checksums, 0.0, store.joins_blocks)
        blocks = [block for block in item.blocks if block.nbytes]
        try:
            store.put_blocks(segment.block_keys, [np.concatenate(blocks)] if store.joins_blocks else blocks)
            store.put(segment.metadata_key, metadata)
        except StoreFullError:
            store.remove([segment.metadata_key, *segment.block_keys])
            raise
        self._await_earlier(item)
        # Not if writing what this segment may continue has suspended the tier.
        store = self._connection.store()
        if not store.have_all([segment.metadata_key, *segment.block_keys]):
            # Another host is writing it, or the store evicts already.
            raise StoreFullError("an object of the segment is not there")
        if publish(store, prefix, manifest.page_keys[0], digest):
            self._counters.add(written_segments=1, written_bytes=manifest.num_bytes)
            segment.confirmed_at_s = self._clock()
            self._known.add(segment, num_clears)
        else:
            self._counters.add(failed_writes=1)
            store.remove([segment.metadata_key, *segment.block_keys])


def _first_page(item: QueuedSegment) -> tuple[str, str]:
    return item.manifest.model.fingerprint, item.manifest.page_keys[0]
