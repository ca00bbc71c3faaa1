"""Compares what is read of every block with its checksums before it is used, ahead of the copies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from typing import Any, NamedTuple

from krul_backend.device import Device
from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import SegmentSlice


class LayerBlock(NamedTuple):
    """The last ``num_bytes`` of a layer's block in a segment."""

    source: SegmentSlice
    layer: int
    num_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.source.segment_id, self.layer, self.num_bytes


_NUM_THREADS = 4
_LAYERS_AHEAD = 8
"""Layers that bring new blocks. Enough to keep the checking threads busy, and few enough that the first copy
does not wait while thousands of blocks are announced."""


class DamagedBlockError(KrulError):
    """A block of the segment ``segment_id`` is not what was committed."""

    def __init__(self, segment_id: int, layer: int, tier: str) -> None:
        super().__init__(f"layer {layer} of segment {segment_id} has a wrong checksum in {tier}")
        self.segment_id = segment_id


class BlockChecks:
    """Checks the blocks of one batch of loads in the order in which they are announced.

    On a GPU threads of its own check them: together they are faster than most buses, and hold no GIL, so that
    copies seldom wait for it. On a CPU the thread that announces does it at once, since all compete for the
    cores. A block that is still on its way to DRAM is waited for until ``deadline_s()`` on
    ``time.monotonic``, which may move meanwhile. A wrong block is reported with
    ``report_damage(segment_id)``.
    """

    def __init__(
        self, device: Device, deadline_s: Callable[[], float], report_damage: Callable[[int], object]
    ) -> None:
        self._deadline_s = deadline_s
        self._report_damage = report_damage
        self._checks: dict[tuple[int, int, int], Future[None]] = {}
        self._is_closed = False
        self._workers: Executor
        if device.shares_cores:
            self._workers, self.num_layers_ahead = _CallingThread(), 0
        else:
            self._workers = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="krul-check")
            self.num_layers_ahead = _LAYERS_AHEAD

    def announce(self, blocks: Iterable[LayerBlock]) -> bool:
        """Start to check blocks one after another, without those for which that was started before. Returns
        whether there are any."""
        fresh = {block.key: block for block in blocks if block.key not in self._checks}
        if fresh:
            check = self._workers.submit(self._check, list(fresh.values()))
            self._checks.update(dict.fromkeys(fresh, check))
        return bool(fresh)

    def wait(self, blocks: Iterable[LayerBlock]) -> None:
        """Block until announced blocks are in DRAM and their checksums are right.

        Raises:
            DamagedBlockError: one of them, or of those announced with it, is not what was committed.
            TierReadError: the same for one that did not arrive from its tier.
        """
        for check in dict.fromkeys([self._checks[block.key] for block in blocks]):
            check.result()

    def are_done(self, blocks: Iterable[LayerBlock]) -> bool:
        """Say whether all checks of these announced blocks have ended, well or not."""
        return all(self._checks[block.key].done() for block in blocks)

    def are_near(self, blocks: Iterable[LayerBlock]) -> bool:
        """Say whether no announced block of these has to come from a lower tier: they are checked soon."""
        return all(block.source.status is None or self._checks[block.key].done() for block in blocks)

    def close(self) -> None:
        """Start no more checks, and report no damage.

        A check that runs may go on reading, but after the lease ends the store may have given the bytes to
        another segment.
        """
        self._is_closed = True
        self._workers.shutdown(wait=False, cancel_futures=True)

    def _check(self, blocks: Sequence[LayerBlock]) -> None:
        for source, layer, num_bytes in blocks:
            if source.status is not None:
                source.status.wait_until(layer, self._deadline_s)
            if not source.is_right(layer, num_bytes):
                if not self._is_closed:
                    self._report_damage(source.segment_id)
                raise DamagedBlockError(source.segment_id, layer, source.tier)


class _CallingThread(Executor):
    """Runs everything in the thread that submits it, before ``submit`` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
