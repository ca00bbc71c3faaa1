"""A segment on its way from a lower tier into DRAM."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from krul_backend.tiers.common.arrival import FAILED, LANDED, PENDING, LayerStatus
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.dram.stored_segment import StoredSegment


class Arrival:
    """The writer's end of a segment that arrives: leases may be given on it from the start.

    It keeps the segment where it is until ``finish`` or ``fail``, one of which must be called. A segment that
    fails leaves the index at once, and whoever waits for one of its layers is told.

    Args:
        blocks: writable ``[num_bytes]`` per layer, the bytes to be filled.
        end: takes the segment's pin, and the segment out of the index unless it arrived whole.
    """

    def __init__(
        self,
        segment: StoredSegment,
        status: LayerStatus,
        blocks: Sequence[Block],
        end: Callable[[StoredSegment, bool], None],
    ) -> None:
        self.segment = segment
        self.blocks = tuple(blocks)
        self._flags = status.flags
        self._end = end
        self._is_over = False

    def landed(self, layer: int) -> None:
        """A layer's block is written and right: its readers may go on."""
        self._flags[layer] = LANDED

    def finish(self) -> None:
        """All layers have landed; the segment is an ordinary one from here on.

        Raises:
            RuntimeError: a layer has not landed, or the arrival ended before.
        """
        if self._is_over or not (self._flags == LANDED).all():
            raise RuntimeError(f"segment {self.segment.segment_id} cannot finish: {self._flags.tolist()}")
        self._is_over = True
        self._end(self.segment, True)

    def fail(self) -> None:
        """What has not landed will not come. Nothing happens if the arrival is over."""
        if self._is_over:
            return
        self._is_over = True
        self._flags[self._flags == PENDING] = FAILED
        self._end(self.segment, False)
