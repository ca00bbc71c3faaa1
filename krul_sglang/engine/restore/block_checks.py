"""Compares every block with its checksum before its first byte is used, ahead of the copies."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor

from krul_backend.device import Device
from krul_backend.errors import KrulError
from krul_backend.tiers.common.hashing import block_checksum
from krul_backend.tiers.common.interface import SegmentSlice


class DamagedBlockError(KrulError):
    """A stored block is not what was committed."""


def num_check_threads(device: Device) -> int:
    """One on a CPU, where the forward needs the cores."""
    return 1 if device.shares_cores else 4


class BlockChecks:
    """Checks the blocks of one batch of loads on threads of its own, in the order they are announced.

    Hashing releases the GIL and is faster than most buses, so that copies seldom wait for it. A block that is
    still on its way to DRAM is waited for, at most ``timeout_s``. A wrong block is reported with
    ``report_damage(segment_id)``.
    """

    def __init__(self, device: Device, timeout_s: float, report_damage: Callable[[int], object]) -> None:
        self._timeout_s = timeout_s
        self._report_damage = report_damage
        self._checks: dict[tuple[int, int], Future[None]] = {}
        self._is_closed = False
        self._workers = ThreadPoolExecutor(num_check_threads(device), thread_name_prefix="krul-check")

    def announce(self, source: SegmentSlice, layer: int) -> None:
        """Start to check a layer's block, unless that has been started before."""
        key = (source.segment_id, layer)
        if key not in self._checks:
            self._checks[key] = self._workers.submit(self._check, source, layer)

    def wait(self, source: SegmentSlice, layer: int) -> None:
        """Block until an announced block is in DRAM and its checksum is right.

        Raises:
            DamagedBlockError: it is not what was committed.
            TierReadError: it did not arrive from its tier.
        """
        self._checks[source.segment_id, layer].result()

    def close(self) -> None:
        """Start no more checks, and report no damage.

        A check that runs may go on reading, but after the lease ends the store may have given the bytes to
        another segment.
        """
        self._is_closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _check(self, source: SegmentSlice, layer: int) -> None:
        if source.status is not None:
            source.status.wait(layer, self._timeout_s)
        if block_checksum(source.blocks[layer]) != source.checksums[layer]:
            if not self._is_closed:
                self._report_damage(source.segment_id)
            raise DamagedBlockError(
                f"layer {layer} of segment {source.segment_id} has a wrong checksum in {source.tier}"
            )
