"""Slows loads down to the rate of a bus or a network."""

from __future__ import annotations

import time


class Link:
    """Lets loads into the pool take as long as they would through a slower bus, or a network: for
    measurements on a machine whose memory is faster than these. For one thread.

    ``mbs``: in 1e6 bytes per second.
    """

    def __init__(self, mbs: float) -> None:
        self.byte_s = 1e-6 / mbs
        self._free_from_s = 0.0

    def carry(self, num_bytes: int) -> None:
        """Wait until so many bytes have passed, after those before."""
        now_s = time.monotonic()
        self._free_from_s = max(self._free_from_s, now_s) + num_bytes * self.byte_s
        time.sleep(max(0.0, self._free_from_s - now_s))
