"""The checksum of a block: its writer takes it, every reader compares it."""

from __future__ import annotations

from collections.abc import Sequence

import xxhash

from krul_backend.errors import ManifestError
from krul_backend.tiers.common.interface import Block

Checksums = tuple[int, ...]


def block_checksum(block: Block) -> int:
    """XXH3 (64 bit) of a block's bytes. Releases the GIL, so it belongs outside every lock."""
    return xxhash.xxh3_64_intdigest(block.data)


def block_checksums(blocks: Sequence[Block]) -> Checksums:
    """The checksum of each block, by layer.

    A writer takes them right after it has written the last byte. A stray write after that is found by the
    block's readers, whether it comes before the commit or after it.
    """
    return tuple(block_checksum(block) for block in blocks)


def checked_checksums(checksums: Sequence[int], num_layers: int) -> Checksums:
    """Check the checksums that came with a commit, and return them as a tuple.

    Raises:
        ManifestError: there is not one for each layer, or one has more than 64 bits.
    """
    if len(checksums) != num_layers:
        raise ManifestError(f"{len(checksums)} checksums for {num_layers} layer blocks")
    for layer, checksum in enumerate(checksums):
        if not 0 <= checksum < 1 << 64:
            raise ManifestError(f"layer {layer} has checksum {checksum}, which is not a number of 64 bits")
    return tuple(checksums)
