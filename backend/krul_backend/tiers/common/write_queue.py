"""The queue of segments that a tier below DRAM has accepted and not written yet."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import Block, Checksums
from krul_backend.tiers.common.tier_health import TierCounters

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class QueuedSegment:
    """The arguments of ``LowerTier.put``. ``metadata`` is ``encode_metadata``'s, if the tier needs it."""

    manifest: SegmentManifest
    blocks: tuple[Block, ...]
    checksums: Checksums
    metadata: bytes
    done: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks and of the metadata: a segment may have no others."""
        return self.manifest.num_bytes + len(self.metadata)


class WriteQueue:
    """A first-in-first-out queue that also knows what was taken but not settled (written, or given up).

    Args:
        counters: of the tier; what is given up counts as skipped.
        max_num_bytes: of all segments that are not settled; a larger segment is accepted only into an empty
            queue.
    """

    def __init__(self, max_num_bytes: int, counters: TierCounters) -> None:
        self._counters = counters
        self._max_num_bytes = max_num_bytes
        self._changed = threading.Condition()
        self._waiting: deque[QueuedSegment] = deque()
        self._is_closed = False
        self._is_woken = False
        self._num_put = 0
        self._num_bytes = 0
        self._num_flushing = 0
        # Numbered in the order in which they were put; also those that are being written.
        self._unsettled: dict[QueuedSegment, int] = {}

    def sizes(self) -> tuple[int, int]:
        """Number of segments, and their bytes, that are not settled."""
        with self._changed:
            return len(self._unsettled), self._num_bytes

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def has_room(self, num_bytes: int) -> bool:
        """Return True if ``put`` would take a segment of so many bytes now."""
        is_full = self._num_bytes > 0 and self._num_bytes + num_bytes > self._max_num_bytes
        return not is_full and not self._is_closed

    def put(self, item: QueuedSegment) -> bool:
        """Add a segment; False when the queue is full or closed."""
        with self._changed:
            if not self.has_room(item.num_bytes):
                return False
            self._waiting.append(item)
            self._unsettled[item] = self._num_put
            self._num_put += 1
            self._num_bytes += item.num_bytes
            self._changed.notify_all()
            return True

    def wait(self, num_bytes: int = 0, patience_s: float = 0.0) -> bool:
        """Wait for a segment to take or a ``wake`` (True), or for the close of an empty queue (False).

        A segment waits ``patience_s`` for others at most, until there are ``num_bytes`` or the queue is half
        full, and not while anybody waits for a ``flush``.
        """
        num_bytes = min(num_bytes, self._max_num_bytes // 2)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_woken or self._is_closed)
            self._changed.wait_for(
                lambda: (
                    self._num_bytes >= num_bytes or self._is_woken or self._is_closed or self._num_flushing
                ),
                patience_s,
            )
            was_woken, self._is_woken = self._is_woken, False
            return bool(self._waiting) or was_woken

    def wake(self) -> None:
        """End a ``wait``, the current one or the next, although there may be no segment to take."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def take(self, max_num_bytes: int) -> list[QueuedSegment]:
        """Take the first few segments: at least one if any waits, further ones up to ``max_num_bytes``."""
        with self._changed:
            taken: list[QueuedSegment] = []
            num_bytes = 0
            while self._waiting:
                num_bytes += self._waiting[0].num_bytes
                if taken and num_bytes > max_num_bytes:
                    break
                taken.append(self._waiting.popleft())
            return taken

    def drop(self, is_dropped: Callable[[QueuedSegment], bool]) -> list[QueuedSegment]:
        """Take out all waiting segments for which the predicate is true. They still have to be settled."""
        with self._changed:
            dropped = [item for item in self._waiting if is_dropped(item)]
            self._waiting = deque(item for item in self._waiting if not is_dropped(item))
            return dropped

    def give_up(self, is_dropped: Callable[[QueuedSegment], bool]) -> None:
        """Take out and settle all waiting segments for which the predicate is true."""
        dropped = self.drop(is_dropped)
        self._counters.skip("dropped", len(dropped))
        self.settle(dropped)

    def settle(self, items: Sequence[QueuedSegment]) -> None:
        """Tell the owners of segments, written or given up, that their blocks are not read any more."""
        with self._changed:
            # First, so that an owner who is told finds room for what waits elsewhere.
            self._num_bytes -= sum(item.num_bytes for item in items)
        for item in items:
            try:
                item.done()
            except Exception:
                # A bug of one owner must not stop the writing of other segments.
                logger.exception("the owner of a segment failed when told that it is written")
        with self._changed:
            for item in items:
                del self._unsettled[item]
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is settled; False if that took longer."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            end = self._num_put
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: next(iter(self._unsettled.values()), end) >= end,
                    max(deadline_s - time.monotonic(), 0.0),
                )
            finally:
                self._num_flushing -= 1

    def close(self) -> None:
        """Accept no more segments; those that wait can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
