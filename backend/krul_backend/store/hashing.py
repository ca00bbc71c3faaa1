"""Checksums of committed blocks, taken behind the commit."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import xxhash

from krul_backend.errors import StoreClosedError
from krul_backend.store.interface import Block

NUM_THREADS = 2

Checksums = tuple[int, ...]


def block_checksum(block: Block) -> int:
    """XXH3 (64 bit) of a block's bytes. Releases the GIL, so it belongs outside every lock."""
    return xxhash.xxh3_64_intdigest(block.data)


def block_checksums(blocks: Sequence[Block]) -> Checksums:
    return tuple(block_checksum(block) for block in blocks)


def known_checksums(checksums: Sequence[int]) -> Future[Checksums]:
    """Checksums that somebody took already, in the form of those that are being taken."""
    known: Future[Checksums] = Future()
    known.set_result(tuple(checksums))
    return known


class Hasher:
    """Takes checksums in threads of its own.

    A hash under way keeps nothing where it is: a segment that left meanwhile gets checksums of whatever is
    there, which nobody asks for, since whoever asks has the segment pinned.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(NUM_THREADS, "krul-checksum")

    def submit(self, blocks: Sequence[Block]) -> Future[Checksums]:
        """The checksums of ``blocks``, once they are taken; cancelled if the hasher is closed before.

        Raises:
            StoreClosedError: it is closed.
        """
        try:
            return self._pool.submit(block_checksums, blocks)
        except RuntimeError as error:
            raise StoreClosedError("the KV store was closed") from error

    def close(self) -> None:
        """Take no more, and none of those that wait. Does not wait for those under way."""
        self._pool.shutdown(wait=False, cancel_futures=True)
