"""What a Mooncake tier counts."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class Counts:
    """See ``TierStats``."""

    written_segments: int = 0
    written_bytes: int = 0
    skipped_segments: int = 0
    read_segments: int = 0
    read_bytes: int = 0
    evicted_segments: int = 0
    evicted_bytes: int = 0
    corrupted_segments: int = 0
    failed_reads: int = 0
    slow_reads: int = 0
    failed_writes: int = 0


class Counters:
    """Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = Counts()

    def add(self, **amounts: int) -> None:
        """``add(failed_reads=1)``; a name that is no counter is an AttributeError."""
        with self._lock:
            for name, amount in amounts.items():
                setattr(self._counts, name, getattr(self._counts, name) + amount)

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return dict(vars(self._counts))
