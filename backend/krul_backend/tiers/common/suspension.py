"""Pausing the use of a medium that fails."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)

FIRST_PAUSE_S = 30.0
LONGEST_PAUSE_S = 600.0


class Suspension:
    """Pauses a tier for 30 s after an error, twice as long after the next one, up to 600 s.

    A success makes the next pause short again. Errors during a pause, of work that had begun before, do not
    lengthen it. One log line per cause.

    Args:
        name: the tier, for the log.
        clock: seconds, monotonic.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._ends_at_s = -1.0
        self._logged: set[str] = set()

    @property
    def is_active(self) -> bool:
        return self._clock() < self._ends_at_s

    def failed(self, cause: str, detail: object) -> None:
        """Note an error. ``cause`` is one of a few kinds of errors; ``detail`` is only logged."""
        with self._lock:
            if not self.is_active:
                self._ends_at_s = self._clock() + self._pause_s
                pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
                if cause not in self._logged:
                    self._logged.add(cause)
                    logger.warning(
                        "tier %s: %s (%s); left alone for %g s, longer each time it happens again; "
                        "logged once, see the counters",
                        self._name,
                        cause,
                        detail,
                        pause_s,
                    )

    def succeeded(self) -> None:
        """Note that the medium works. Does not end a pause, but the next one will be short."""
        with self._lock:
            if not self.is_active:
                self._pause_s = FIRST_PAUSE_S
