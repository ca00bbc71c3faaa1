"""What reading and writing share."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field

from krul_backend.tiers.common.lower_tier import TierCounters
from krul_backend.tiers.common.suspension import Suspension
from krul_backend.tiers.ssd.catalog import Catalog, SsdSegment

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TierState:
    """``lock`` guards ``catalog``, ``counters`` and the bookkeeping of files; it is never held during I/O.

    While ``suspension`` is active nothing is read or written; while ``fullness`` is, nothing is written.
    """

    catalog: Catalog
    suspension: Suspension
    fullness: Suspension
    clock: Callable[[], float]
    lock: threading.Lock = field(default_factory=threading.Lock)
    counters: TierCounters = field(default_factory=TierCounters)
    is_closed: bool = False

    @property
    def is_usable(self) -> bool:
        return not self.is_closed and not self.suspension.is_active

    @property
    def is_writable(self) -> bool:
        return self.is_usable and not self.fullness.is_active

    def failed(self, cause: str, error: OSError) -> None:
        """Note that something other than a read failed. What a full file system holds can still be read."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.fullness.failed("file system full", error)
        else:
            self.suspension.failed(cause, error)

    def quarantine(self, segment: SsdSegment, reason: object) -> None:
        """Take out a segment with wrong bytes, unless it left before."""
        with self.lock:
            if not segment.is_indexed:
                return
            self.catalog.remove(segment)
            self.counters.corrupted_segments += 1
        logger.error("segment %d on the SSD is damaged and was taken out: %s", segment.segment_id, reason)
