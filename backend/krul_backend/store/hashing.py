"""Checksums of committed blocks, taken behind the commit."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import CancelledError, Future, InvalidStateError, ThreadPoolExecutor

import xxhash

from krul_backend.errors import StoreClosedError
from krul_backend.store.interface import Block

NUM_THREADS = 2

NICENESS = 10
"""Of these threads: they must not take the processor from whoever waits for the commit's answer."""

_PIECE_BYTES = 512 << 10

Checksums = tuple[int, ...]


def block_checksum(block: Block) -> int:
    """XXH3 (64 bit) of a block's bytes. Releases the GIL, so it belongs outside every lock."""
    return xxhash.xxh3_64_intdigest(block.data)


def yielding_checksum(block: Block) -> int:
    """The same, for a thread that gives way: between two pieces whoever waits for a processor gets this one.

    Low priority alone is not enough: the kernel lets a thread that runs end its slice of some milliseconds.
    """
    digest = xxhash.xxh3_64()
    for first in range(0, block.nbytes, _PIECE_BYTES):
        digest.update(block[first : first + _PIECE_BYTES].data)
        os.sched_yield()
    return digest.intdigest()


def block_checksums(blocks: Sequence[Block]) -> Checksums:
    return tuple(block_checksum(block) for block in blocks)


class SegmentHashes:
    """The checksums of one segment: each block's is taken once, by the hasher or by who cannot do without.

    Who needs them takes what nobody has begun, so it waits for one block at most: threads of low priority
    may not get to run for long.
    """

    def __init__(self, blocks: Sequence[Block]) -> None:
        self._blocks = blocks
        # Shared by all that take: a step of it is atomic.
        self._waiting = iter(range(len(blocks)))
        self._by_layer = [0] * len(blocks)
        self._num_missing = len(blocks)
        self._lock = threading.Lock()
        self._over: Future[Checksums] = Future()
        self.if_taken: Checksums | None = None
        """All of them, or None: not yet, or never."""

    @classmethod
    def known(cls, checksums: Sequence[int]) -> SegmentHashes:
        """Those that somebody took already."""
        hashes = cls(())
        hashes._finish(tuple(checksums))
        return hashes

    def result(self) -> Checksums:
        """All of them, XXH3 (64 bit) by layer. Call it with the segment pinned, and outside locks.

        Raises:
            StoreClosedError: they were cancelled.
        """
        if self.if_taken is None:
            try:
                self.take()
                return self._over.result()
            except CancelledError as error:
                raise StoreClosedError("the KV store was closed") from error
        return self.if_taken

    def take(self, checksum: Callable[[Block], int] | None = None) -> None:
        """Take those that nobody has begun, each by ``checksum``, or else as fast as can be."""
        take_one = block_checksum if checksum is None else checksum
        try:
            for layer in self._waiting:
                if self._over.cancelled():
                    return
                self._by_layer[layer] = take_one(self._blocks[layer])
                with self._lock:
                    self._num_missing -= 1
                    is_last = self._num_missing == 0
                if is_last:
                    self._finish(tuple(self._by_layer))
        except BaseException as error:
            # Nobody will begin this block again.
            with contextlib.suppress(InvalidStateError):
                self._over.set_exception(error)
            raise

    def cancel(self) -> None:
        """They are not wanted; nothing happens if they are there."""
        self._over.cancel()

    def when_over(self, call: Callable[[], None]) -> None:
        """Call once they are taken or cancelled, in the thread that does that; at once if they are."""
        self._over.add_done_callback(lambda _: call())

    def _finish(self, checksums: Checksums) -> None:
        with contextlib.suppress(InvalidStateError):
            self.if_taken = checksums
            self._over.set_result(checksums)


class Hasher:
    """Takes checksums in threads of its own, of low priority.

    A hash under way keeps nothing where it is: a segment that left meanwhile gets checksums of whatever is
    there, which nobody asks for, since whoever asks has the segment pinned.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "krul-checksum", initializer=_lower_priority)

    def submit(self, blocks: Sequence[Block]) -> SegmentHashes:
        """The checksums of ``blocks``, to be taken; cancelled if the hasher is closed before it begins.

        Raises:
            StoreClosedError: it is closed.
        """
        hashes = SegmentHashes(blocks)
        try:
            work = self._pool.submit(hashes.take, yielding_checksum)
        except RuntimeError as error:
            raise StoreClosedError("the KV store was closed") from error
        work.add_done_callback(lambda done: hashes.cancel() if done.cancelled() else None)
        return hashes

    def close(self) -> None:
        """Take no more, and none of those that wait. Does not wait for those under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)


def _lower_priority() -> None:
    # For this thread alone: Linux has a priority per thread.
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICENESS)
