"""What a Mooncake tier counts."""

from __future__ import annotations

import threading

from krul_backend.tiers.common.lower_tier import TierCounters


class Counters:
    """``TierCounters``, thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = TierCounters()

    def add(self, **amounts: int) -> None:
        """``add(failed_reads=1)``; a name that is no counter is an AttributeError."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(vars(self._counts))
