"""Copying committed segments to lower tiers, behind the commit."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from functools import partial

from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.dram.stored_segment import StoredSegment

logger = logging.getLogger(__name__)


class WriteBehind:
    """Puts committed segments to lower tiers, and holds them in DRAM until all tiers have copied them.

    Args:
        host: where the segments lie.
        written: called when a tier is done with a segment, from any thread and maybe under the tier's locks:
            it must not call the tier.
    """

    def __init__(self, host: HostStore, written: Callable[[StoredSegment, LowerTier], None]) -> None:
        self._host = host
        self._written = written
        # Held from the look whether a segment is still indexed until every tier has queued it.
        self._queueing = threading.Lock()

    def submit(self, segment_id: int, tiers: Sequence[LowerTier]) -> None:
        """Queue a segment in ``tiers``, unless it has left DRAM. Does not wait for the writes."""
        # All held before the first put: a tier that is done at once must not let the segment go.
        held = [(tier, self._host.hold(segment_id)) for tier in tiers]
        with self._queueing:
            for tier, segment in held:
                if segment is not None:
                    hold = _Hold(self._host, segment)
                    done = partial(hold.end, partial(self._written, segment, tier))
                    if not self._put_to(tier, segment, done):
                        hold.end()

    def settle(self) -> None:
        """Wait for calls of ``submit`` that may still queue a segment that has left the index."""
        with self._queueing:
            pass

    @staticmethod
    def _put_to(tier: LowerTier, segment: StoredSegment, done: Callable[[], None]) -> bool:
        """Queue a segment in a tier; False if it has left the index, or the tier does not take it."""
        if not segment.is_indexed:
            return False
        try:
            return tier.put(segment.manifest, segment.blocks, segment.checksums, done)
        except Exception:
            logger.exception("the tier %s failed to queue segment %d", tier.name, segment.segment_id)
            return False


class _Hold:
    """Holds a segment in DRAM for one tier. It ends once, however often a tier says that it is done."""

    def __init__(self, host: HostStore, segment: StoredSegment) -> None:
        self._host = host
        self._segment = segment
        self._open = threading.Lock()

    def end(self, first: Callable[[], None] = lambda: None) -> None:
        """End the hold after calling ``first``; does nothing if it has ended."""
        if self._open.acquire(blocking=False):
            try:
                first()
            finally:
                self._host.unhold(self._segment)
