"""A committed segment as a host store keeps it."""

from __future__ import annotations

from dataclasses import dataclass

import xxhash

from krul_backend.segment import SegmentManifest
from krul_backend.store.interface import Block
from krul_backend.tiers.arena import Extent
from krul_backend.tiers.free_extents import FreeExtents


def block_checksum(block: Block) -> int:
    """XXH3 (64 bit) of a block's bytes. Releases the GIL, so it belongs outside every lock."""
    return xxhash.xxh3_64_intdigest(block.data)


@dataclass(eq=False)
class StoredSegment:
    """A segment's blocks, and where they lie. Its extents are freed when it is neither indexed nor pinned.

    ``extents[l]`` is None where layer ``l`` has no bytes; a block is the end of its extent, after what a trim
    could not free for alignment. ``num_pins`` counts whoever reads the blocks: leases, running verifications
    and trims. ``num_leases`` counts the leases among them. ``last_used_s`` is on the store's clock.

    What says where the bytes are (``manifest``, ``extents``, ``blocks``, ``checksums``) is changed by a trim
    alone: all of it at once, under the store's lock, and only while the trim's own pin is the only one. So
    whoever pins a segment finds everything as it was until the unpin, without the lock.
    """

    segment_id: int
    manifest: SegmentManifest
    extents: tuple[Extent | None, ...]
    blocks: tuple[Block, ...]
    checksums: tuple[int, ...]
    last_used_s: float
    is_indexed: bool = False
    num_pins: int = 0
    num_leases: int = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes in the arena, alignment included."""
        return sum(extent.taken_bytes for extent in self.extents if extent is not None)

    def give_extents_to(self, free_extents: FreeExtents) -> None:
        """Mark this segment's bytes as free in a copy of the arena's free space."""
        for extent in self.extents:
            if extent is not None:
                free_extents.give(extent.offset, extent.taken_bytes)

    def is_intact(self) -> bool:
        """Do all blocks still have the checksums taken at commit? Call it pinned, and outside the lock."""
        return all(
            block_checksum(block) == checksum
            for block, checksum in zip(self.blocks, self.checksums, strict=True)
        )
