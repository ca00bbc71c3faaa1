"""Trims: dropping the first tokens of a segment's blocks."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass

from krul_backend.errors import ManifestError
from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.hashing import Checksums, block_checksum
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.dram.arena import Arena, Extent
from krul_backend.tiers.dram.dram_books import LockedBooks
from krul_backend.tiers.dram.stored_segment import StoredSegment


@dataclass(frozen=True, eq=False)
class Trim:
    """One trim of one segment: its manifest afterwards, and the bytes that each block loses at its front."""

    manifest: SegmentManifest
    drop_num_bytes: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Bytes that all blocks lose."""
        return sum(self.drop_num_bytes)

    def checksums(self, segment: StoredSegment) -> Checksums | None:
        """The blocks' checksums after the trim; None if a block of which a part stays is damaged.

        Only blocks that change are read. Call it with the segment pinned, and outside the lock.
        """
        checksums = []
        for block, checksum, drop in zip(segment.blocks, segment.checksums, self.drop_num_bytes, strict=True):
            if drop and drop < block.nbytes and block_checksum(block) != checksum:
                return None
            checksums.append(block_checksum(block[drop:]) if drop else checksum)
        return tuple(checksums)

    def apply(self, segment: StoredSegment, arena: Arena, checksums: Checksums) -> None:
        """Cut the segment, and free the bytes that its blocks lost.

        Call it with the lock held, and with no pin on the segment but the trim's own.
        """
        extents: list[Extent | None] = []
        blocks: list[Block] = []
        for extent, block, drop in zip(segment.extents, segment.blocks, self.drop_num_bytes, strict=True):
            if extent is None or not drop:
                extents.append(extent)
            elif drop == block.nbytes:
                arena.free(extent)
                extents.append(None)
            else:
                # Bytes that an earlier trim could not free for alignment lie before the block.
                unused = extent.num_bytes - block.nbytes
                extents.append(arena.free_front(extent, unused + drop))
            blocks.append(block[drop:])
        segment.manifest = self.manifest
        segment.place(tuple(extents), tuple(blocks))
        segment.checksums = checksums


def trim_segment(
    locked: LockedBooks, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]
) -> int:
    """As ``KVStore.trim``: plan under the lock, take checksums outside of it, apply under it again."""
    with locked.open() as books:
        segment = books.segments.get(segment_id)
        if segment is None:
            return 0
        trim = plan_trim(segment.manifest, layer_first_token, layer_num_bytes)
        if trim is None or segment.num_pins or books.index.is_shared(segment):
            return 0
        segment.num_pins += 1
    try:
        # Somebody who pins the segment meanwhile is handed the old blocks: then the trim gives up.
        checksums = trim.checksums(segment)
        with locked.open() as books:
            if checksums is None:
                books.quarantine(segment)
                return 0
            if not segment.is_indexed or segment.num_pins > 1 or books.index.is_shared(segment):
                return 0
            taken_before = segment.taken_bytes
            trim.apply(segment, books.arena, checksums)
            books.note_trim(segment, taken_before, trim.num_bytes)
            return trim.num_bytes
    finally:
        locked.unhold(segment)


def plan_trim(
    manifest: SegmentManifest, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]
) -> Trim | None:
    """Plan the trim after which layer ``l`` holds no token before ``layer_first_token[l]``.

    ``layer_num_bytes[l]``: size of the block that holds exactly the tokens from there on. Layers that start
    there or later already stay as they are; None if all do.

    Raises:
        ManifestError: other numbers of layers, tokens beyond the segment, or sizes that no such blocks have.
    """
    num_layers = manifest.model.num_layers
    if len(layer_first_token) != num_layers or len(layer_num_bytes) != num_layers:
        raise ManifestError(
            f"{len(layer_first_token)} first tokens and {len(layer_num_bytes)} sizes "
            f"for a segment of {num_layers} layers"
        )
    first_tokens, sizes = list(manifest.layer_first_token), list(manifest.layer_num_bytes)
    for layer, (first, size) in enumerate(zip(layer_first_token, layer_num_bytes, strict=True)):
        if first <= first_tokens[layer]:
            continue
        if size >= sizes[layer]:
            raise ManifestError(
                f"layer {layer} cannot hold the tokens from {first} on in {size} bytes: "
                f"those from {first_tokens[layer]} on take {sizes[layer]}"
            )
        first_tokens[layer], sizes[layer] = first, size
    if tuple(first_tokens) == manifest.layer_first_token:
        return None
    return Trim(
        dataclasses.replace(manifest, layer_first_token=tuple(first_tokens), layer_num_bytes=tuple(sizes)),
        tuple(before - after for before, after in zip(manifest.layer_num_bytes, sizes, strict=True)),
    )
