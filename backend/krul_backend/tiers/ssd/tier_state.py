"""The state that reads and writes of the SSD tier share."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.tier_health import Suspension, TierCounters
from krul_backend.tiers.ssd.catalog import Catalog

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class TierState:
    """The tier's lock and what it guards: ``catalog`` and the bookkeeping of files; and its counters.

    The lock is never held during I/O.

    While ``suspension`` is active nothing is read or written; while ``fullness`` is, nothing is written.

    ``pending_clears``: an event for each clear that is not noted on the disk yet, by the model's fingerprint
    (None: of all models); set when the writer has tried. ``is_given_up``: it could not be noted, so nothing
    is read or written any more.

    ``wake`` tells the writer that a segment has died; ``given_back`` is notified when it has seen to that.

    ``is_opening``: what lies on the disk is being read. Until then ``catalog`` has some of it, and nothing of
    it may be found.
    """

    lock: threading.Lock
    catalog: Catalog
    suspension: Suspension
    fullness: Suspension
    given_back: threading.Condition = field(init=False)
    counters: TierCounters = field(default_factory=TierCounters)
    pending_clears: dict[str | None, threading.Event] = field(default_factory=dict)
    is_given_up: bool = False
    wake: Callable[[], None] = lambda: None
    is_opening: bool = True
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.given_back = threading.Condition(self.lock)

    @property
    def is_suspended(self) -> bool:
        return self.is_given_up or self.suspension.is_active

    @property
    def is_usable(self) -> bool:
        return not self.is_closed and not self.is_suspended

    @property
    def is_findable(self) -> bool:
        """Whether lookups are answered from the catalog."""
        return self.is_usable and not self.is_opening

    @property
    def is_writable(self) -> bool:
        return self.is_usable and not self.fullness.is_active

    def num_stored(self) -> dict[str, Any]:
        """What can be found, under the names of ``TierStats``."""
        names = ("num_segments", "num_pages", "stored_bytes")
        return {name: 0 if self.is_given_up else getattr(self.catalog, name) for name in names}

    def is_being_cleared(self, model: ModelIdentity) -> bool:
        return None in self.pending_clears or model.fingerprint in self.pending_clears

    def failed(self, cause: str, error: OSError) -> None:
        """Note a failure of something other than a read. A full file system only stops writing."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.fullness.failed("file system full", error)
        else:
            self.suspension.failed(cause, error)

    def quarantine(self, place: int, reason: object) -> None:
        """Take a segment with wrong bytes out of the catalog, unless it has left already."""
        with self.lock:
            if not self.catalog.remove(place):
                return
            self.counters.add(corrupted_segments=1)
        self.wake()
        logger.error("segment %d on the SSD is damaged and was taken out: %s", place, reason)
