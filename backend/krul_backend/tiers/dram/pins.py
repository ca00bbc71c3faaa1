"""Pins: conversations that stay in DRAM for a given time."""

from __future__ import annotations

import heapq
from collections.abc import Callable

from krul_backend.tiers.dram.stored_segment import StoredSegment

_NUM_SPARE_ENDS = 64


class PinBook:
    """Knows which segments are pinned until when, and how many bytes they take. Not thread-safe.

    No thread waits for pins to end: each method first drops those that have ended.

    Args:
        limit_bytes: how much of the arena all pinned segments together may take.
        clock: seconds, monotonic.
    """

    def __init__(self, limit_bytes: int, clock: Callable[[], float]) -> None:
        self._limit_bytes = limit_bytes
        self._clock = clock
        self._until_s: dict[int, float] = {}
        self._num_bytes: dict[int, int] = {}
        self._pinned_bytes = 0
        # A heap of (end, segment id). Entries of pins that were replaced or ended early stay for a while.
        self._ends: list[tuple[float, int]] = []

    @property
    def pinned_bytes(self) -> int:
        self._drop_ended()
        return self._pinned_bytes

    def pin(self, segment: StoredSegment, ttl_s: float) -> bool:
        """Pin a segment for ``ttl_s`` from now, in place of any earlier pin.

        False if too many bytes would be pinned; an earlier pin then stays.
        """
        self._drop_ended()
        segment_id, taken_bytes = segment.segment_id, segment.taken_bytes
        others_bytes = self._pinned_bytes - self._num_bytes.get(segment_id, 0)
        if others_bytes + taken_bytes > self._limit_bytes:
            return False
        until_s = self._clock() + ttl_s
        self._until_s[segment_id] = until_s
        self._num_bytes[segment_id] = taken_bytes
        self._pinned_bytes = others_bytes + taken_bytes
        heapq.heappush(self._ends, (until_s, segment_id))
        self._drop_replaced()
        return True

    def end(self, segment_id: int) -> bool:
        """End a segment's pin; False if it had none."""
        self._drop_ended()
        has_ended = self._forget(segment_id)
        self._drop_replaced()
        return has_ended

    def note_size(self, segment: StoredSegment) -> None:
        """Update the size of a segment, pinned or not, that takes fewer bytes than before."""
        before = self._num_bytes.get(segment.segment_id)
        if before is not None:
            self._num_bytes[segment.segment_id] = segment.taken_bytes
            self._pinned_bytes += segment.taken_bytes - before

    def remaining_s(self, segment_id: int) -> float:
        """Seconds until a segment's pin ends; 0 if it has none."""
        until_s = self._until_s.get(segment_id)
        return max(0.0, until_s - self._clock()) if until_s is not None else 0.0

    def _drop_ended(self) -> None:
        now_s = self._clock()
        while self._ends and self._ends[0][0] <= now_s:
            until_s, segment_id = heapq.heappop(self._ends)
            if self._until_s.get(segment_id) == until_s:
                self._forget(segment_id)

    def _drop_replaced(self) -> None:
        """Rebuild the heap when most of its entries are stale: a conversation may be pinned at every turn."""
        if len(self._ends) > 2 * len(self._until_s) + _NUM_SPARE_ENDS:
            self._ends = [(until_s, segment_id) for segment_id, until_s in self._until_s.items()]
            heapq.heapify(self._ends)

    def _forget(self, segment_id: int) -> bool:
        if self._until_s.pop(segment_id, None) is None:
            return False
        self._pinned_bytes -= self._num_bytes.pop(segment_id)
        return True
