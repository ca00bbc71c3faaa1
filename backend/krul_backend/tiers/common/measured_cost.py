"""What reading from a tier costs, as far as it was seen."""

from __future__ import annotations

import threading
from collections.abc import Callable

from krul_backend.planner.costs import TierCost

_LEARNING_RATE = 0.2


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
