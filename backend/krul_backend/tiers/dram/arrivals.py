"""Segments that come into DRAM from a lower tier, layer by layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import FAILED, LANDED, PENDING, Block, LayerStatus
from krul_backend.tiers.dram.dram_books import DramBooks, LockedBooks
from krul_backend.tiers.dram.reservations import Allocator, Extents
from krul_backend.tiers.dram.stored_segment import StoredSegment, block_in


class Arrival:
    """The writer's end of one arriving segment. Leases may be given on the segment from the start.

    The segment stays pinned until ``finish`` or ``fail``, one of which must be called. A segment that fails
    leaves the index at once, and whoever waits for one of its layers is told.

    Args:
        blocks: writable ``[num_bytes]`` per layer, the bytes to be filled.
        end: called once, with the segment and whether it arrived whole.
    """

    def __init__(
        self,
        segment: StoredSegment,
        status: LayerStatus,
        blocks: Sequence[Block],
        end: Callable[[StoredSegment, bool], None],
    ) -> None:
        self.segment = segment
        self.blocks = tuple(blocks)
        self._flags = status.flags
        self._end = end
        self._is_over = False

    def landed(self, layer: int) -> None:
        """Tell readers that a layer's block is written and its checksum is right."""
        self._flags[layer] = LANDED

    def finish(self) -> None:
        """End the arrival; all layers have landed, and the segment is an ordinary one from here on.

        Raises:
            RuntimeError: a layer has not landed, or the arrival ended before.
        """
        if self._is_over or not (self._flags == LANDED).all():
            raise RuntimeError(f"segment {self.segment.segment_id} cannot finish: {self._flags.tolist()}")
        self._is_over = True
        self._end(self.segment, True)

    def fail(self) -> None:
        """End the arrival; layers that have not landed never will. Does nothing if it ended before."""
        if self._is_over:
            return
        self._is_over = True
        self._flags[self._flags == PENDING] = FAILED
        self._end(self.segment, False)


class Arrivals:
    """Makes room in DRAM for segments of lower tiers, and indexes them before their bytes are there.

    Thread-safe.
    """

    def __init__(self, locked: LockedBooks, allocator: Allocator) -> None:
        self._locked = locked
        self._allocator = allocator

    def admit(
        self,
        manifest: SegmentManifest,
        checksums: Sequence[int],
        origin: str,
        lower_load_s: float,
        began_at: int | None,
    ) -> Arrival | None:
        """Begin the arrival of a segment of the tier ``origin``; None, counted, when there is no room.

        The segment is not indexed, and freed with its last lease, when DRAM holds all of its pages already or
        its model was cleared since ``began_at`` (a ``ClearMarks.now``). Reading it again from the lower tier
        would take ``lower_load_s`` seconds.
        """
        # The last extent holds the status flags, one byte per layer.
        sizes = (*manifest.layer_num_bytes, manifest.model.num_layers)

        def use(books: DramBooks, extents: Extents) -> Arrival:
            *block_extents, flags_extent = extents
            flags = block_in(books.arena, flags_extent)
            flags[:] = PENDING
            status = LayerStatus(flags)
            blocks = tuple(block_in(books.arena, extent) for extent in block_extents)
            segment = StoredSegment(
                segment_id=self._locked.next_id(),
                manifest=manifest,
                extents=tuple(block_extents),
                blocks=tuple(block.view() for block in blocks),
                checksums=tuple(checksums),
                last_used_s=books.clock(),
                origin=origin,
                status=status,
                flags_extent=flags_extent,
                lower_load_s=lower_load_s,
                num_pins=1,
            )
            for block in segment.blocks:
                block.flags.writeable = False
            books.arriving[segment.segment_id] = status
            is_outdated = began_at is not None and books.clears.is_outdated(began_at, manifest.model)
            if not is_outdated and books.publish(segment):
                books.touch(books.index.path_to(segment))
            return Arrival(segment, status, blocks, self._end)

        return self._allocator.take(sizes, manifest.tenant, use)

    def _end(self, segment: StoredSegment, is_whole: bool) -> None:
        with self._locked.open_unless_closed() as books:
            if is_whole:
                segment.status = None
            if books is None:
                return
            books.arriving.pop(segment.segment_id, None)
            if not is_whole and segment.is_indexed:
                books.remove(segment)
            books.unpin((segment,))
