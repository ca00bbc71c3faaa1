"""Compares what is read of every block with its checksums before it is used, ahead of the copies."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import CancelledError, Executor, Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from threading import Lock
from typing import Any, NamedTuple, NoReturn

import numpy as np
from numpy.typing import NDArray

from krul_backend.device import Device
from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import SegmentSlice, checked_tail
from krul_backend.tiers.common.range_hashes import ComparedRanges, wait_a_moment


class LayerBlock(NamedTuple):
    """The last ``num_bytes`` of a layer's block in a segment."""

    source: SegmentSlice
    layer: int
    num_bytes: int

    @property
    def key(self) -> tuple[int, int, int]:
        return self.source.segment_id, self.layer, self.num_bytes


_NUM_THREADS = 8
_NUM_WAITING = 4
"""Threads of each batch for what comes from lower tiers."""
_LAYERS_AHEAD, _BLOCKS_AHEAD = 8, 256
"""If fewer layers are ahead, those of so many blocks more are announced: enough to keep the checking threads
busy, and few enough that no copy waits while thousands of blocks are announced."""


class DamagedBlockError(KrulError):
    """A block of the segment ``segment_id`` is not what was committed."""

    def __init__(self, segment_id: int, layer: int, tier: str) -> None:
        super().__init__(f"layer {layer} of segment {segment_id} has a wrong checksum in {tier}")
        self.segment_id = segment_id


@dataclass(eq=False)
class _Checks:
    """Checks that were started together, on one thread or several, of steps that are numbered through: blocks
    or ranges. Each step begins after those before it; the first ``num_right`` are known to be right."""

    futures: Sequence[Future[None]]
    is_right: NDArray[np.bool_]
    stop: Callable[[], object] = lambda: None
    num_right: int = 0

    def are_right(self, end: int) -> bool:
        """Say whether all steps before ``end`` were found right."""
        if self.num_right < end and self.is_right[self.num_right : end].all():
            self.num_right = end
        return self.num_right >= end

    def have_ended(self, end: int) -> bool:
        """Say whether all steps before ``end`` were right, or no more is checked."""
        return self.are_right(end) or all(future.done() for future in self.futures)

    def wait(self, end: int) -> None:
        """Wait for all steps before ``end``. Raises what ended the checks before."""
        while not self.have_ended(end):
            wait_a_moment(self.is_right, end)
        if not self.are_right(end):
            for future in self.futures:
                future.result()
            raise CancelledError

    def cancel(self) -> None:
        self.stop()
        for future in self.futures:
            future.cancel()


class BlockChecks:
    """Checks the blocks of one batch of loads in the order in which they are announced.

    On a GPU threads check each block together: so they are faster than most buses, and hold no GIL, so that
    copies seldom wait for it. On a CPU the thread that starts checks does them at once, since all compete for
    the cores. A block that is still on its way to DRAM is waited for until ``deadline_s()`` on
    ``time.monotonic``, which may move meanwhile, and then checked by one thread. A segment with a wrong block
    is reported once with ``report_damage(segment_id)``.
    """

    def __init__(
        self, device: Device, deadline_s: Callable[[], float], report_damage: Callable[[int], object]
    ) -> None:
        self._deadline_s = deadline_s
        self._report_damage = report_damage
        self._announced: dict[tuple[int, int, int], LayerBlock] = {}
        self._checks: dict[tuple[int, int, int], tuple[_Checks, int]] = {}
        self._reported, self._reporting = set[int](), Lock()
        self._is_closed = False
        self._workers: Executor
        if device.shares_cores:
            self._num_threads, self._workers = 0, _CallingThread()
        else:
            # The forward and its copies need cores, too.
            self._num_threads = min(_NUM_THREADS, max(2, len(os.sched_getaffinity(0)) // 2))
            self._workers = ThreadPoolExecutor(_NUM_WAITING, thread_name_prefix="krul-arrivals")

    def want_more(self, num_ahead: int) -> bool:
        """Say whether another layer should be announced before the next one is copied. ``num_ahead``: those
        that are announced and not copied yet, and bring new blocks."""
        is_enough = len(self._announced) >= _BLOCKS_AHEAD if self._announced else num_ahead >= _LAYERS_AHEAD
        return self._num_threads > 0 and not is_enough

    def announce(self, blocks: Iterable[LayerBlock]) -> bool:
        """Have blocks checked after the next ``start``, without those that were announced before. Returns
        whether there are any."""
        num_before = len(self._announced)
        self._announced.update((block.key, block) for block in blocks if block.key not in self._checks)
        return len(self._announced) > num_before

    def start(self) -> None:
        """Start to check what has been announced."""
        here, coming = list[LayerBlock](), dict[int, list[LayerBlock]]()
        for block in self._announced.values():
            is_here = self._num_threads and block.source.status is None
            (here if is_here else coming.setdefault(block.layer, [])).append(block)
        self._announced = {}
        if here:
            tails = [
                checked_tail(source.blocks[layer], source.checksums[layer], size, source.header.range_bytes)
                for source, layer, size in here
            ]
            ranges, threads = ComparedRanges(tails), _comparing_threads(self._num_threads)
            num_tasks = min(self._num_threads, len(ranges.is_right))
            futures = [threads.submit(self._compare, ranges, here) for _ in range(num_tasks)]
            self._add(here, _Checks(futures, ranges.is_right, ranges.stop), ranges.ends.tolist())
        for blocks in coming.values():
            is_right = np.zeros(len(blocks), np.bool_)
            futures = [self._workers.submit(self._check, blocks, is_right)]
            self._add(blocks, _Checks(futures, is_right), range(1, len(blocks) + 1))

    def wait(self, blocks: Iterable[LayerBlock]) -> None:
        """Block until announced blocks are in DRAM and their checksums are right.

        Raises:
            DamagedBlockError: one of them, or of those started with it and announced before, is not what was
                committed.
            TierReadError: the same for one that did not arrive from its tier.
        """
        for checks, end in self._ends(blocks).items():
            checks.wait(end)

    def are_right(self, blocks: Iterable[LayerBlock]) -> bool:
        """Say whether these announced blocks have been found to be what was committed."""
        return all(checks.are_right(end) for checks, end in self._ends(blocks).items())

    def are_near(self, blocks: Iterable[LayerBlock]) -> bool:
        """Say whether no announced block of these has to come from a lower tier: they are checked soon."""
        coming = self._ends(block for block in blocks if block.source.status is not None)
        return all(checks.have_ended(end) for checks, end in coming.items())

    def close(self) -> None:
        """Start no more checks, and report no damage.

        A check that runs may go on reading, but after the lease ends the store may have given the bytes to
        another segment.
        """
        self._is_closed = True
        self._workers.shutdown(wait=False)
        for checks in {checks for checks, _ in self._checks.values()}:
            checks.cancel()

    def _add(self, blocks: Sequence[LayerBlock], checks: _Checks, ends: Iterable[int]) -> None:
        self._checks.update((block.key, (checks, end)) for block, end in zip(blocks, ends, strict=True))

    def _ends(self, blocks: Iterable[LayerBlock]) -> dict[_Checks, int]:
        """The checks of announced blocks, each with the end of its last step that one of them needs."""
        ends = dict[_Checks, int]()
        for block in blocks:
            checks, end = self._checks[block.key]
            ends[checks] = max(end, ends.get(checks, 0))
        return ends

    def _compare(self, ranges: ComparedRanges, blocks: Sequence[LayerBlock]) -> None:
        wrong = ranges.compare()
        if wrong is not None:
            self._refuse(blocks[wrong])

    def _check(self, blocks: Sequence[LayerBlock], is_right: NDArray[np.bool_]) -> None:
        for number, block in enumerate(blocks):
            if block.source.status is not None:
                block.source.status.wait_until(block.layer, self._deadline_s)
            if not block.source.is_right(block.layer, block.num_bytes):
                self._refuse(block)
            is_right[number] = True

    def _refuse(self, block: LayerBlock) -> NoReturn:
        segment_id = block.source.segment_id
        with self._reporting:
            if segment_id not in self._reported and not self._is_closed:
                self._reported.add(segment_id)
                self._report_damage(segment_id)
        raise DamagedBlockError(segment_id, block.layer, block.source.tier)


@cache
def _comparing_threads(num_threads: int) -> ThreadPoolExecutor:
    """Those that all batches share. They stay, since a thread starts only when it gets the GIL."""
    return ThreadPoolExecutor(num_threads, thread_name_prefix="krul-check")


class _CallingThread(Executor):
    """Runs everything in the thread that submits it, before ``submit`` returns."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            future.set_result(fn(*args, **kwargs))
        except Exception as error:
            future.set_exception(error)
        return future
