"""A segment as the DRAM tier keeps it."""

from __future__ import annotations

from dataclasses import dataclass, field

from krul_backend.errors import TierReadError
from krul_backend.free_extents import joined
from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import (
    DRAM_TIER,
    FAILED,
    Block,
    Checksums,
    LayerStatus,
    SegmentSlice,
    Span,
    block_checksum,
    checksums_of,
)
from krul_backend.tiers.dram.arena import Arena, Extent


@dataclass(eq=False)
class StoredSegment:
    """A segment's blocks, and where they lie. Its extents are freed when it is neither indexed nor pinned.

    ``extents[l]`` is None where layer ``l`` has no bytes. A block is the end of its extent: before it may lie
    bytes that a trim could not free for alignment. ``num_pins`` counts who reads or writes the blocks:
    leases, arrivals, copies to lower tiers and running verifications; ``num_leases`` counts the leases among
    them. ``last_used_s`` is on the store's clock.

    ``checksums[l]`` are those of what was written into block ``l``; damage shows as a difference.

    Only a trim changes ``manifest``, ``extents``, ``blocks``, ``spans`` and ``checksums``: all at once, under
    the store's lock, and only if no pin is on the segment. So whoever has pinned a segment can read these
    fields without the lock.

    ``is_fast_copy``: see ``KVStore.reserve``. ``is_prefetched``: it was read ahead of a load, and no
    lookup has found it here since, and no load has taken it.

    ``status`` is set while layers arrive from ``origin``, a lower tier; its flags lie in ``flags_extent``,
    which is freed with the segment. ``lower_load_s``: seconds to read the segment from the fastest lower tier
    that is known to hold it, None if there is none.
    """

    segment_id: int
    manifest: SegmentManifest
    extents: tuple[Extent | None, ...]
    blocks: tuple[Block, ...]
    checksums: Checksums
    last_used_s: float
    is_fast_copy: bool = False
    is_prefetched: bool = False
    origin: str = DRAM_TIER
    status: LayerStatus | None = None
    flags_extent: Extent | None = None
    lower_load_s: float | None = None
    is_indexed: bool = False
    num_pins: int = 0
    num_leases: int = 0
    spans: tuple[Span, ...] = field(init=False)
    ranges: tuple[Span, ...] = field(init=False)
    """The bytes of the arena that it takes, alignment included; extents that touch are one range."""
    taken_bytes: int = field(init=False)
    """Bytes in the arena, alignment included."""

    def __post_init__(self) -> None:
        self.place(self.extents, self.blocks)

    def place(self, extents: tuple[Extent | None, ...], blocks: tuple[Block, ...]) -> None:
        """Set the blocks, and the extents at whose ends they lie."""
        self.extents, self.blocks = extents, blocks
        self.spans = tuple(
            Span(0 if extent is None else extent.offset + extent.num_bytes - block.nbytes, block.nbytes)
            for extent, block in zip(extents, blocks, strict=True)
        )
        taken = ((extent.offset, extent.taken_bytes) for extent in self.all_extents)
        self.ranges = tuple(Span(*each) for each in joined(taken))
        self.taken_bytes = sum(span.num_bytes for span in self.ranges)

    @property
    def all_extents(self) -> tuple[Extent, ...]:
        """All extents that it holds, that of the status flags included."""
        return tuple(extent for extent in (*self.extents, self.flags_extent) if extent is not None)

    @property
    def status_span(self) -> Span | None:
        """The bytes of the arena that hold the flags of ``status``, one per layer."""
        flags = self.flags_extent
        return None if flags is None else Span(flags.offset, flags.num_bytes)

    @property
    def start_token(self) -> int:
        return self.manifest.start_token

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def restore_s(self) -> float:
        """Seconds that a restore saves by finding it in DRAM; 0 if not known.

        Otherwise it would be computed, or read from a lower tier: the faster of the two counts.
        """
        known = [seconds for seconds in (self.manifest.recompute_s, self.lower_load_s) if seconds]
        return min(known, default=0.0)

    def pages(self, first_page: int, end_page: int, *, is_fetched: bool) -> SegmentSlice:
        """Pages ``[first_page, end_page)`` as a lease on them shows them.

        While the segment arrives, they belong to the tier that it comes from, and have blocks only if the
        lease ``is_fetched``. Call it with the segment pinned.

        Raises:
            TierReadError: fetched pages of a segment whose arrival has failed.
        """
        # Read once: an arrival may end at any moment.
        status = self.status
        if is_fetched and status is not None and (status.flags == FAILED).any():
            raise TierReadError(f"segment {self.segment_id} could not be read from {self.origin}")
        has_blocks = is_fetched or status is None
        return SegmentSlice(
            segment_id=self.segment_id,
            header=self.manifest.header,
            tier=DRAM_TIER if status is None else self.origin,
            blocks=self.blocks if has_blocks else (),
            spans=self.spans if has_blocks else (),
            checksums=self.checksums,
            first_page=first_page,
            end_page=end_page,
            status=status if has_blocks else None,
            status_span=self.status_span if has_blocks and status is not None else None,
            is_fast_copy=self.is_fast_copy,
        )

    def trim(self, manifest: SegmentManifest, arena: Arena) -> None:
        """Keep of each block what ``manifest`` says, a trimmed one, and free the bytes before.

        Call it with the lock held, and with no pin on the segment.
        """
        extents: list[Extent | None] = []
        blocks: list[Block] = []
        for extent, block, kept in zip(self.extents, self.blocks, manifest.layer_num_bytes, strict=True):
            drop = block.nbytes - kept
            if extent is None or not drop:
                extents.append(extent)
            elif not kept:
                arena.free(extent)
                extents.append(None)
            else:
                # Bytes that an earlier trim could not free for alignment lie before the block.
                unused = extent.num_bytes - block.nbytes
                extents.append(arena.free_front(extent, unused + drop))
            blocks.append(block[drop:])
        self.checksums = checksums_of(manifest, self.checksums)
        self.manifest = manifest
        self.place(tuple(extents), tuple(blocks))

    def num_damaged(self) -> int:
        """Count the landed blocks whose checksums differ from the committed ones.

        Call it with the segment pinned, and outside the lock.
        """
        status = self.status
        return sum(
            block_checksum(block, self.manifest.range_bytes) != checksum
            for layer, (block, checksum) in enumerate(zip(self.blocks, self.checksums, strict=True))
            if status is None or status.has_landed(layer)
        )


def block_in(arena: Arena, extent: Extent | None) -> Block:
    """A writable view of an extent's bytes; of no bytes for None."""
    return arena.buffer[:0] if extent is None else arena.view(extent)
