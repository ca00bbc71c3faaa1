"""Counters of a tier below DRAM, its measured cost of reading, and its pause after errors."""

from __future__ import annotations

import logging
import threading
from collections import Counter
from collections.abc import Callable
from typing import Any, Literal

from krul_backend.planner import TierCost
from krul_backend.tiers.common.interface import Clock

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0

_LEARNING_RATE = 0.2

_COUNTED = (
    *("written_segments", "written_bytes", "read_segments", "read_bytes"),
    *("evicted_segments", "evicted_bytes", "corrupted_segments"),
    *("failed_reads", "slow_reads", "failed_writes"),
)

SkipCause = Literal["dropped", "failed", "no room", "orphan", "suspended", "too large"]
"""Why a tier has not written a segment; see ``TierStats``."""


class TierCounters:
    """Counts events since a tier was opened, under the names of ``TierStats``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._skipped: Counter[SkipCause] = Counter()

    def add(self, **amounts: int) -> None:
        """``add(failed_reads=1)``; a name that is no counter is a KeyError."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def skip(self, cause: SkipCause, num_segments: int = 1) -> None:
        """Note that segments were not written, and will not be."""
        with self._lock:
            self._skipped[cause] += num_segments

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {**self._counts, "skipped_segments": dict(+self._skipped)}


class MeasuredCost:
    """The ``TierCost`` of one tier: measured once, then corrected by what reads took. Thread-safe.

    Args:
        unmeasured: the cost that counts until something was measured.
    """

    def __init__(self, unmeasured: TierCost) -> None:
        self._lock = threading.Lock()
        self._cost = unmeasured

    @property
    def current(self) -> TierCost:
        with self._lock:
            return self._cost

    def set(self, cost: TierCost) -> None:
        """Replace the cost by a measured one."""
        with self._lock:
            self._cost = cost

    def correct(self, seen: Callable[[TierCost], TierCost]) -> None:
        """Move the cost by a fifth of the way to what one read says.

        ``seen`` is given the current cost and returns that of the read; what a read says nothing of, it
        returns as it is.
        """
        with self._lock:
            old, new = self._cost, seen(self._cost)
            self._cost = TierCost(
                old.latency_s + _LEARNING_RATE * (new.latency_s - old.latency_s),
                old.byte_s + _LEARNING_RATE * (new.byte_s - old.byte_s),
            )


class Suspension:
    """Pauses a tier for 30 s after an error, twice as long after the next one, up to 600 s.

    A success makes the next pause short again. Errors during a pause, of work that had begun before, do not
    lengthen it. One log line per cause.

    Args:
        name: the tier, for the log.
    """

    def __init__(self, name: str, clock: Clock) -> None:
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
