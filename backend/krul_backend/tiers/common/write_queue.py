"""The queue of committed segments that wait to be written to a lower tier."""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import Block

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class QueuedSegment:
    """The arguments of ``LowerTier.put``. ``metadata`` is ``encode_metadata``'s, if the tier needs it."""

    manifest: SegmentManifest
    blocks: tuple[Block, ...]
    checksums: tuple[int, ...]
    metadata: bytes
    done: Callable[[], None]


class WriteQueue:
    """A first-in-first-out queue that also knows what was taken but not settled (written, or given up).

    Args:
        max_num_bytes: of all blocks that are not settled; a larger segment is accepted only into an empty
            queue.
    """

    def __init__(self, max_num_bytes: int) -> None:
        self._max_num_bytes = max_num_bytes
        self._changed = threading.Condition()
        self._waiting: deque[QueuedSegment] = deque()
        self._is_closed = False
        self._num_put = 0
        self._num_bytes = 0
        # Numbered in the order in which they were put; also those that are being written.
        self._unsettled: dict[QueuedSegment, int] = {}

    def sizes(self) -> tuple[int, int]:
        """Number of segments, and their bytes, that are not settled."""
        with self._changed:
            return len(self._unsettled), self._num_bytes

    def put(self, item: QueuedSegment) -> bool:
        """Add a segment; False when the queue is full or closed."""
        with self._changed:
            is_full = self._num_bytes > 0 and self._num_bytes + item.manifest.num_bytes > self._max_num_bytes
            if is_full or self._is_closed:
                return False
            self._waiting.append(item)
            self._unsettled[item] = self._num_put
            self._num_put += 1
            self._num_bytes += item.manifest.num_bytes
            self._changed.notify_all()
            return True

    def wait(self) -> bool:
        """Wait for a segment to take (True), or for the close of an empty queue (False)."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_closed)
            return bool(self._waiting)

    def take(self, max_num_bytes: int) -> list[QueuedSegment]:
        """Take the first few segments: at least one if any waits, further ones up to ``max_num_bytes``."""
        with self._changed:
            taken: list[QueuedSegment] = []
            num_bytes = 0
            while self._waiting:
                num_bytes += self._waiting[0].manifest.num_bytes
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

    def settle(self, items: Sequence[QueuedSegment]) -> None:
        """Tell the owners of segments, written or given up, that their blocks are not read any more."""
        for item in items:
            try:
                item.done()
            except Exception:
                # A bug of one owner must not stop the writing of other segments.
                logger.exception("the owner of a segment failed when told that it is written")
        with self._changed:
            for item in items:
                del self._unsettled[item]
                self._num_bytes -= item.manifest.num_bytes
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is settled; False if that took longer."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            end = self._num_put
            while next(iter(self._unsettled.values()), end) < end:
                left_s = deadline_s - time.monotonic()
                if left_s <= 0:
                    return False
                self._changed.wait(left_s)
            return True

    def close(self) -> None:
        """Accept no more segments; those that wait can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
