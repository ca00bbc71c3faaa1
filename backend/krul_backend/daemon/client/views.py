"""What a reply says about the arena, as arrays of this process."""

from __future__ import annotations

from collections.abc import Sequence
from operator import add
from typing import overload

import numpy as np
import numpy.typing as npt

from krul_backend.daemon.protocol.replies import WireSlice
from krul_backend.daemon.protocol.wire import header_from_wire
from krul_backend.errors import ProtocolError
from krul_backend.tiers.common.interface import DRAM_TIER, Block, SegmentSlice, Span
from krul_backend.tiers.common.layer_status import LayerStatus

Arena = npt.NDArray[np.uint8]


def view_in(arena: Arena, span: Span) -> Block:
    """The bytes of a span, uint8 ``[num_bytes]``, writable, without a copy; it keeps the mapping alive.

    Raises:
        ProtocolError: there are no such bytes in the arena.
    """
    if not 0 <= span.offset <= span.offset + span.num_bytes <= arena.nbytes:
        raise ProtocolError(f"{span} is not within an arena of {arena.nbytes} bytes")
    return arena[span.offset : span.offset + span.num_bytes]


class ArenaBlocks(Sequence[Block]):
    """The blocks of a slice, uint8 ``[num_bytes]`` each, as views that are made when they are asked for.

    A lookup names hundreds of blocks, and its holder may use none of them.

    Args:
        arena: its views are as writable as it is.
        spans: within the arena.
    """

    __slots__ = ("_arena", "_spans")

    def __init__(self, arena: Arena, spans: tuple[Span, ...]) -> None:
        self._arena = arena
        self._spans = spans

    def __len__(self) -> int:
        return len(self._spans)

    @overload
    def __getitem__(self, index: int) -> Block: ...
    @overload
    def __getitem__(self, index: slice) -> tuple[Block, ...]: ...
    def __getitem__(self, index: int | slice) -> Block | tuple[Block, ...]:
        if isinstance(index, slice):
            return tuple(self._arena[offset : offset + size] for offset, size in self._spans[index])
        offset, num_bytes = self._spans[index]
        return self._arena[offset : offset + num_bytes]


def slices_in(arena: Arena, wires: Sequence[WireSlice]) -> tuple[SegmentSlice, ...]:
    """Leased slices with read-only views of their blocks, and of their layers' status if they still come.

    Raises:
        ProtocolError: their parts contradict each other, or the arena.
    """
    read_only = arena.view()
    read_only.flags.writeable = False
    return tuple(_slice_in(read_only, wire) for wire in wires)


def _slice_in(arena: Arena, wire: WireSlice) -> SegmentSlice:
    num_layers = len(wire.header.layer_num_bytes)
    if len(wire.checksums) != num_layers or not 0 <= wire.first_page < wire.end_page:
        raise ProtocolError(
            f"segment {wire.segment_id}: {len(wire.checksums)} checksums for {num_layers} layers, "
            f"pages {wire.first_page} to {wire.end_page}"
        )
    if wire.spans or wire.tier == DRAM_TIER:
        offsets, sizes = zip(*wire.spans, strict=True) if wire.spans else ((), ())
        if sizes != wire.header.layer_num_bytes:
            raise ProtocolError(
                f"segment {wire.segment_id}: {wire.spans} for {wire.header.layer_num_bytes} bytes"
            )
        ends = map(add, offsets, sizes)
        if sizes and not (min(offsets) >= 0 and min(sizes) >= 0 and max(ends) <= arena.nbytes):
            raise ProtocolError(
                f"segment {wire.segment_id}: {wire.spans} are not all within an arena of {arena.nbytes} bytes"
            )
    status = None
    if wire.status_span is not None:
        if wire.status_span.num_bytes != num_layers:
            raise ProtocolError(
                f"segment {wire.segment_id}: {wire.status_span} for {num_layers} layers' status"
            )
        status = LayerStatus(view_in(arena, wire.status_span))
    return SegmentSlice(
        segment_id=wire.segment_id,
        header=header_from_wire(wire.header),
        tier=wire.tier,
        blocks=ArenaBlocks(arena, wire.spans),
        spans=wire.spans,
        checksums=wire.checksums,
        first_page=wire.first_page,
        end_page=wire.end_page,
        status=status,
    )
