"""A segment as the DRAM tier keeps it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.arena import DramArena, Extent
from krul_backend.tiers.common.arrival import LayerStatus
from krul_backend.tiers.common.hashing import Checksums, block_checksum
from krul_backend.tiers.common.interface import DRAM_TIER, Block, Span


@dataclass(eq=False)
class StoredSegment:
    """A segment's blocks, and where they lie. Its extents are freed when it is neither indexed nor pinned.

    ``extents[l]`` is None where layer ``l`` has no bytes; a block is the end of its extent, after what a trim
    could not free for alignment. ``num_pins`` counts whoever reads or writes the blocks: leases, arrivals,
    copies to lower tiers, running verifications and trims. ``num_leases`` counts the leases among them.
    ``last_used_s`` is on the store's clock.

    ``checksums[l]`` (XXH3, 64 bit) is of what was written into block ``l``, which need not be there any more.

    What says where the bytes are (``manifest``, ``extents``, ``blocks``, ``spans``, ``checksums``) is changed
    by a trim alone: all of it at once, under the store's lock, and only while the trim's own pin is the only
    one. So whoever pins a segment finds everything as it was until the unpin, without the lock.

    ``status`` is set while layers arrive from ``origin``, a lower tier; its flags lie in ``flags_extent``,
    which stays as long as the segment does. ``lower_load_s``: seconds to read the segment from the best lower
    tier that holds it, None if none is known to.
    """

    segment_id: int
    manifest: SegmentManifest
    extents: tuple[Extent | None, ...]
    blocks: tuple[Block, ...]
    checksums: Checksums
    last_used_s: float
    origin: str = DRAM_TIER
    status: LayerStatus | None = None
    flags_extent: Extent | None = None
    lower_load_s: float | None = None
    is_indexed: bool = False
    num_pins: int = 0
    num_leases: int = 0
    spans: tuple[Span, ...] = field(init=False)
    ranges: tuple[Span, ...] = field(init=False)
    """What it takes of the arena, alignment included: extents that touch as one range."""
    taken_bytes: int = field(init=False)
    """Bytes in the arena, alignment included."""

    def __post_init__(self) -> None:
        self.place(self.extents, self.blocks)

    def place(self, extents: tuple[Extent | None, ...], blocks: tuple[Block, ...]) -> None:
        """Say where the blocks lie: at the end of their extents."""
        self.extents, self.blocks = extents, blocks
        self.spans = tuple(
            Span(0 if extent is None else extent.offset + extent.num_bytes - block.nbytes, block.nbytes)
            for extent, block in zip(extents, blocks, strict=True)
        )
        self.ranges = tuple(_joined(self.all_extents))
        self.taken_bytes = sum(span.num_bytes for span in self.ranges)

    @property
    def all_extents(self) -> tuple[Extent, ...]:
        """What it holds of the arena."""
        return tuple(extent for extent in (*self.extents, self.flags_extent) if extent is not None)

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def restore_s(self) -> float:
        """Seconds that a restore saves by finding it in DRAM: computing it, or reading it from below.

        0 if neither is known.
        """
        known = [seconds for seconds in (self.manifest.recompute_s, self.lower_load_s) if seconds]
        return min(known, default=0.0)

    def num_damaged(self) -> int:
        """How many blocks, of those that have landed, have other checksums than were committed.

        Call it pinned, and outside the lock.
        """
        status = self.status
        return sum(
            block_checksum(block) != checksum
            for layer, (block, checksum) in enumerate(zip(self.blocks, self.checksums, strict=True))
            if status is None or status.has_landed(layer)
        )


def _joined(extents: Sequence[Extent]) -> Iterator[Span]:
    start = end = 0
    for offset, num_bytes in sorted((extent.offset, extent.taken_bytes) for extent in extents):
        if offset != end:
            if end > start:
                yield Span(start, end - start)
            start = offset
        end = offset + num_bytes
    if end > start:
        yield Span(start, end - start)


def block_in(arena: DramArena, extent: Extent | None) -> Block:
    """The bytes of an extent, writable; no bytes where there is none."""
    return arena.buffer[:0] if extent is None else arena.view(extent)
