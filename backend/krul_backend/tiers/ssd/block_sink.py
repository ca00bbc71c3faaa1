"""Splits a record's bytes, as they are read, into its blocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import xxhash

from krul_backend.errors import RecordError
from krul_backend.tiers.common.interface import Block


class BlockSink:
    """Copies consecutive pieces of a record into blocks, and checks each block as its last byte comes.

    Args:
        at: where in the record the first piece starts, in bytes.
        block_offsets, block_sizes, checksums: of each layer's block; offsets from the record's start.
        blocks: where to copy to, writable; None to check only.
        landed: called for each layer, in ascending order, when its block is written and its checksum right.
    """

    def __init__(
        self,
        at: int,
        block_offsets: Sequence[int],
        block_sizes: Sequence[int],
        checksums: Sequence[int],
        blocks: Sequence[Block] | None,
        landed: Callable[[int], None],
    ) -> None:
        self._at = at
        self._offsets = block_offsets
        self._sizes = block_sizes
        self._checksums = checksums
        self._blocks = blocks
        self._landed = landed
        self._layer = 0
        self._hash = xxhash.xxh3_64()

    @property
    def num_landed(self) -> int:
        return self._layer

    def take(self, piece: memoryview) -> None:
        """Process the next bytes of the record. ``piece`` is not kept.

        Raises:
            RecordError: a block has a wrong checksum.
        """
        # piece: [at, end) of the record; block: [start, block_end)
        end = self._at + len(piece)
        while self._layer < len(self._offsets):
            start = self._offsets[self._layer]
            block_end = start + self._sizes[self._layer]
            first, last = max(start, self._at), min(block_end, end)
            if first < last:
                self._copy(piece[first - self._at : last - self._at], first - start)
            if end < block_end:
                break
            self._finish_block()
        self._at = end

    def _copy(self, part: memoryview, offset: int) -> None:
        # Hashing and copying release the GIL, so that other reads go on meanwhile.
        self._hash.update(part)
        if self._blocks is not None:
            block = self._blocks[self._layer]
            block[offset : offset + len(part)] = np.frombuffer(part, np.uint8)

    def _finish_block(self) -> None:
        layer = self._layer
        if self._hash.intdigest() != self._checksums[layer]:
            raise RecordError(f"the block of layer {layer} has a wrong checksum")
        self._hash.reset()
        self._layer += 1
        self._landed(layer)
