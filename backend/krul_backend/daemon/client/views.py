"""Turns the spans of a reply into arrays in this process's mapping of the arena."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from operator import add
from typing import overload

import numpy as np
import numpy.typing as npt

from krul_backend.errors import ProtocolError
from krul_backend.tiers.common.interface import DRAM_TIER, Block, LayerStatus, SegmentSlice, Span

ArenaBytes = npt.NDArray[np.uint8]


def view_in(arena: ArenaBytes, span: Span) -> Block:
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

    def __init__(self, arena: ArenaBytes, spans: tuple[Span, ...]) -> None:
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


def with_views(slices: Sequence[SegmentSlice], arena: ArenaBytes) -> tuple[SegmentSlice, ...]:
    """The slices of a reply with read-only views of their blocks, and of the status of layers still to land.

    Raises:
        ProtocolError: the parts of a slice contradict each other, or lie outside the arena.
    """
    read_only = arena.view()
    read_only.flags.writeable = False
    return tuple(_with_views(part, read_only) for part in slices)


def _with_views(part: SegmentSlice, arena: ArenaBytes) -> SegmentSlice:
    num_layers = len(part.header.layer_num_bytes)
    if len(part.checksums) != num_layers or not 0 <= part.first_page < part.end_page:
        raise ProtocolError(
            f"segment {part.segment_id}: {len(part.checksums)} checksums for {num_layers} layers, "
            f"pages {part.first_page} to {part.end_page}"
        )
    if part.spans or part.tier == DRAM_TIER:
        offsets, sizes = zip(*part.spans, strict=True) if part.spans else ((), ())
        if sizes != part.header.layer_num_bytes:
            raise ProtocolError(
                f"segment {part.segment_id}: {part.spans} for {part.header.layer_num_bytes} bytes"
            )
        ends = map(add, offsets, sizes)
        if sizes and not (min(offsets) >= 0 and min(sizes) >= 0 and max(ends) <= arena.nbytes):
            raise ProtocolError(
                f"segment {part.segment_id}: {part.spans} are not all within an arena of {arena.nbytes} bytes"
            )
    status = None
    if part.status_span is not None:
        if part.status_span.num_bytes != num_layers:
            raise ProtocolError(
                f"segment {part.segment_id}: {part.status_span} for {num_layers} layers' status"
            )
        status = LayerStatus(view_in(arena, part.status_span))
    return replace(part, blocks=ArenaBlocks(arena, part.spans), status=status)
