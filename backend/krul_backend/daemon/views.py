"""What a reply says about the arena, as arrays of this process."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from krul_backend.daemon.replies import WireSlice
from krul_backend.daemon.wire import header_from_wire
from krul_backend.errors import ProtocolError
from krul_backend.store.arrival import LayerStatus
from krul_backend.store.interface import DRAM_TIER, Block, SegmentSlice, Span

Arena = npt.NDArray[np.uint8]


def view_in(arena: Arena, span: Span) -> Block:
    """The bytes of a span, uint8 ``[num_bytes]``, writable, without a copy; it keeps the mapping alive.

    Raises:
        ProtocolError: there are no such bytes in the arena.
    """
    if not 0 <= span.offset <= span.offset + span.num_bytes <= arena.nbytes:
        raise ProtocolError(f"{span} is not within an arena of {arena.nbytes} bytes")
    return arena[span.offset : span.offset + span.num_bytes]


def slice_in(arena: Arena, wire: WireSlice) -> SegmentSlice:
    """A leased slice with read-only views of its blocks, and of its layers' status if they are still coming.

    Raises:
        ProtocolError: its parts contradict each other, or the arena.
    """
    num_layers = len(wire.header.layer_num_bytes)
    if len(wire.checksums) != num_layers or not 0 <= wire.first_page < wire.end_page:
        raise ProtocolError(
            f"segment {wire.segment_id}: {len(wire.checksums)} checksums for {num_layers} layers, "
            f"pages {wire.first_page} to {wire.end_page}"
        )
    is_missing = not wire.spans and wire.tier != DRAM_TIER
    if not is_missing and tuple(span.num_bytes for span in wire.spans) != wire.header.layer_num_bytes:
        raise ProtocolError(
            f"segment {wire.segment_id}: {wire.spans} for {wire.header.layer_num_bytes} bytes"
        )
    blocks = tuple(_read_only(view_in(arena, span)) for span in wire.spans)
    status = None
    if wire.status_span is not None:
        if wire.status_span.num_bytes != num_layers:
            raise ProtocolError(
                f"segment {wire.segment_id}: {wire.status_span} for {num_layers} layers' status"
            )
        status = LayerStatus(_read_only(view_in(arena, wire.status_span)))
    return SegmentSlice(
        segment_id=wire.segment_id,
        header=header_from_wire(wire.header),
        tier=wire.tier,
        blocks=blocks,
        spans=wire.spans,
        checksums=wire.checksums,
        first_page=wire.first_page,
        end_page=wire.end_page,
        status=status,
    )


def _read_only(block: Block) -> Block:
    block.flags.writeable = False
    return block
