"""A link that is only so fast, in front of memory or a disk that is faster."""

from __future__ import annotations

import threading
import time


class Link:
    """Keeps copies from being faster than ``bandwidth_gbs`` (1e9 bytes per second); None for no limit.

    Copies of several threads share the link: one after the other passes.
    """

    def __init__(self, bandwidth_gbs: float | None) -> None:
        self._bandwidth_gbs = bandwidth_gbs
        self._lock = threading.Lock()
        self._free_at_s = 0.0

    def hold(self, started_s: float, num_bytes: int) -> None:
        """Return when ``num_bytes`` can have arrived, if they were sent at ``started_s`` (perf_counter)."""
        if self._bandwidth_gbs is None:
            return
        with self._lock:
            self._free_at_s = max(self._free_at_s, started_s) + num_bytes / (self._bandwidth_gbs * 1e9)
            left_s = self._free_at_s - time.perf_counter()
        if left_s > 0:
            time.sleep(left_s)
