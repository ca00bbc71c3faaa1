"""What it takes to read a block from the SSD into DRAM."""

from __future__ import annotations

import os
import statistics
import threading
import time
from pathlib import Path

from krul_backend.planner.costs import TierCost
from krul_backend.tiers.common.record import RECORD_ALIGN
from krul_backend.tiers.ssd.disk import Disk, open_for_reading, write_all
from krul_backend.tiers.ssd.reader import NUM_THREADS, PieceReader

PROBE_NUM_BYTES = 32 << 20
_NUM_LATENCY_READS = 5
_LEARNING_RATE = 0.2
_LEAST_LEARNED_NUM_BYTES = 1 << 20
# Of a slow disk, for the time before anything was measured.
_UNMEASURED = TierCost(latency_s=1e-3, byte_s=1e-8)


class ReadCost:
    """``TierCost`` of one tier: measured once, then corrected by what reads took. Thread-safe.

    A record is read as one sequential range with several pieces in flight, so a layer in it costs only its
    share of a request's latency.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cost = _UNMEASURED

    @property
    def current(self) -> TierCost:
        with self._lock:
            return self._cost

    def measure(self, disk: Disk, directory: Path, reader: PieceReader, num_bytes: int) -> None:
        """Write a file, read it, remove it. ``num_bytes`` is a multiple of 4096. Raises OSError."""
        path = directory / "probe.tmp"
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(disk, fd, [os.urandom(num_bytes)], 0)
            disk.fdatasync(fd)
            disk.drop_cache(fd, 0, 0)
            read_fd = open_for_reading(disk, path)
            try:
                size_s = [
                    _seconds_to_read(reader, read_fd, at * RECORD_ALIGN, RECORD_ALIGN)
                    for at in range(min(_NUM_LATENCY_READS, num_bytes // RECORD_ALIGN))
                ]
                all_s = _seconds_to_read(reader, read_fd, 0, num_bytes)
            finally:
                disk.close(read_fd)
        finally:
            disk.close(fd)
            disk.unlink(path)
        with self._lock:
            self._cost = TierCost(statistics.median(size_s) / NUM_THREADS, all_s / num_bytes)

    def learn(self, num_bytes: int, took_s: float) -> None:
        """Note a read of a whole segment; small ones say nothing of the rate."""
        if num_bytes >= _LEAST_LEARNED_NUM_BYTES:
            with self._lock:
                byte_s = (1 - _LEARNING_RATE) * self._cost.byte_s + _LEARNING_RATE * took_s / num_bytes
                self._cost = TierCost(self._cost.latency_s, byte_s)


def _seconds_to_read(reader: PieceReader, fd: int, offset: int, num_bytes: int) -> float:
    started_s = time.monotonic()
    reader.read(fd, offset, num_bytes, lambda piece: None, lambda: None)
    return time.monotonic() - started_s
