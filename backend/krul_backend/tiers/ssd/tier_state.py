"""The state that reads and writes of the SSD tier share."""

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
    """The tier's lock and what it guards: ``catalog``, ``counters`` and the bookkeeping of files.

    The lock is never held during I/O.

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
        """Note a failure of something other than a read. A full file system only stops writing."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.fullness.failed("file system full", error)
        else:
            self.suspension.failed(cause, error)

    def quarantine(self, segment: SsdSegment, reason: object) -> None:
        """Take a segment with wrong bytes out of the catalog, unless it has left already."""
        with self.lock:
            if not segment.is_indexed:
                return
            self.catalog.remove(segment)
            self.counters.corrupted_segments += 1
        logger.error("segment %d on the SSD is damaged and was taken out: %s", segment.segment_id, reason)
