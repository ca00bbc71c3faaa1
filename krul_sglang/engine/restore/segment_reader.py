"""Reads the tails of one leased segment: which bytes a layer needs, and rows that are decoded alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

import torch

from krul_backend.codec.restore import GroupTarget, NativeTail, restore_layer
from krul_backend.codec.segment_codec import OpenedSegment, SegmentCodec, SegmentDecoder
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.device import Device
from krul_backend.errors import CodecError, TierReadError
from krul_backend.tiers.common.interface import Block, Lease, SegmentSlice, SegmentTail
from krul_sglang.engine.restore.block_checks import LayerBlock

MAX_KEPT_BYTES = 128 << 20
"""Most device memory for blocks that stay there until the other layer of their pair comes."""


class KVBuffers(Protocol):
    """What KV is written to: see ``DevicePool.buffers``."""

    def buffers(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]: ...


class KeptRoom:
    """Counts the device memory in which readers of one batch keep blocks from one layer to a later one."""

    def __init__(self, num_bytes: int = MAX_KEPT_BYTES) -> None:
        self._free_bytes = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Reserve room for a block; False if there is none."""
        if num_bytes > self._free_bytes:
            return False
        self._free_bytes -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes


class SegmentReader:
    """Reads tokens ``[first_token, end_token)`` of a conversation from one leased segment.

    The planner asks it about the segment. If the plan loads, ``begin`` follows, and then ``TailGroups`` reads
    each layer in ascending order. Positions are absolute::

        [first_token, head_ends[l])   not read in layer l
        [head_ends[l], end_token)     read, decoded and written to their slots

    ``source`` is what was leased, ``num_tokens`` how many of its tokens are wanted, from the first one on.
    ``shift``: how many tokens later they are in this conversation than in the one that they were stored for;
    keys are restored as they were stored. ``num_bytes`` were read so far.
    """

    def __init__(self, source: SegmentSlice, decoder: OpenedSegment, num_tokens: int, shift: int = 0) -> None:
        header = source.header
        self.shift = shift
        self.source = source
        self.decoder = decoder
        self.num_tokens = num_tokens
        self.num_bytes = 0
        # Rows are tokens of the segment, counted from its first one.
        self._row = source.first_page * header.page_size
        self._end_row = self._row + num_tokens
        self._first_rows: list[int] = []
        self._fetched = source

    @property
    def first_token(self) -> int:
        return self.source.header.start_token + self.shift + self._row

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens

    def begin(self, head_ends: Sequence[int], room: KeptRoom) -> None:
        """Say from where on each layer is read. ``room`` is that of the batch of loads."""
        start_token = self.source.header.start_token + self.shift
        # The end if a layer has no tail.
        self._first_rows = [min(max(end - start_token, self._row), self._end_row) for end in head_ends]

    def take_blocks_of(self, fetched: SegmentSlice) -> None:
        """Read the blocks that the store fetches for ``source`` from a lower tier.

        Raises:
            TierReadError: they are encoded in another way than what was leased, and than the decoder and the
                plan are for: somebody stored these tokens again meanwhile.
        """
        leased, came = self.source.header, fetched.header
        if (
            (came.start_token, came.num_tokens) != (leased.start_token, leased.num_tokens)
            or came.codec != leased.codec
            or came.codec_params != leased.codec_params
        ):
            raise TierReadError(
                f"tokens from {leased.start_token} on were stored again since they were leased"
            )
        self._fetched = fetched

    def again(self, head_ends: Sequence[int], room: KeptRoom) -> Self | None:
        """A reader that begins anew with the same blocks, if all that is to be read of them is in DRAM."""
        status = self._fetched.status
        layers = {source for layer, _ in enumerate(head_ends) for source in self.decoder.sources(layer)}
        if not self._fetched.blocks or (
            status is not None and not all(status.has_landed(layer) for layer in layers)
        ):
            return None
        reader = type(self)(self.source, self.decoder, self.num_tokens, self.shift)
        reader._fetched = self._fetched
        reader.begin(head_ends, room)
        return reader

    def end(self) -> None:
        """Free what is still kept in device memory. Nothing is read afterwards."""

    def has_tail(self, layer: int) -> bool:
        """Whether anything of this layer is loaded."""
        return self._first_rows[layer] < self._end_row

    def num_head_rows(self, layer: int) -> int:
        """How many of the ``num_tokens`` the head of this layer covers: those before its tail."""
        return self._first_rows[layer] - self._row

    def block(self, source: int) -> LayerBlock:
        """The part of a layer's block that is read: for the layer that needs it last, or for itself."""
        return LayerBlock(self._fetched, source, self._num_tail_bytes(source, self.decoder.last_use[source]))

    def tail(self) -> SegmentTail:
        """What of the segment is read, whole records."""
        header = self.source.header
        first_tokens = [
            header.start_token + row if row < self._end_row else header.end_token for row in self._first_rows
        ]
        kept = tuple(map(max, self.decoder.kept_from(first_tokens), header.layer_first_token))
        return SegmentTail(kept, self.decoder.kept_num_bytes(kept))

    def native_tail(self, layer: int) -> NativeTail | None:
        """The layer's tail, if it is stored natively and alone; None for any other."""
        unit = self.decoder.native_units[layer]
        return None if unit is None else NativeTail(unit, self._first_rows[layer], self._end_row)

    def native_bytes(self, layer: int, num_bytes: int) -> Block:
        """The end of the layer's block, from ``num_bytes`` before its end on.

        Raises:
            CodecError: so much of it is not stored.
        """
        self.num_bytes += num_bytes
        return self._end_of_block(layer, num_bytes)

    def _tail(self, source: int, layer: int) -> Block:
        """The part of a block from the record on in which the tail of ``layer`` begins."""
        return self._end_of_block(source, self._num_tail_bytes(source, layer))

    def _num_tail_bytes(self, source: int, layer: int) -> int:
        first = self.decoder.tail_start(source, self._first_rows[layer])
        return self.decoder.layer_num_bytes[source] - first if self.has_tail(layer) else 0

    def _end_of_block(self, source: int, num_bytes: int) -> Block:
        # What was left out when it was stored, or not fetched, is the beginning of a block.
        block = self._fetched.blocks[source]
        if block.nbytes < num_bytes:
            raise CodecError(
                f"layer {source} has a block of {block.nbytes} bytes, {num_bytes} are needed of it"
            )
        return block[block.nbytes - num_bytes :]


class UnitReader(SegmentReader):
    """Reads a segment that was stored unit by unit: layers alone, or in pairs.

    Each block is copied in one piece when its layer comes: from the record on in which the tail of the layer
    that needs it last begins (the other one of a pair, or itself), since heads never grow. It stays on the
    device until then, if there is room; otherwise the part that the other layer needs is copied again when
    that comes.
    """

    decoder: SegmentDecoder
    _room: KeptRoom

    def __init__(
        self, source: SegmentSlice, decoder: SegmentDecoder, num_tokens: int, shift: int = 0
    ) -> None:
        super().__init__(source, decoder, num_tokens, shift)
        self._on_device: dict[int, torch.Tensor] = {}
        self._kept: set[int] = set()

    def begin(self, head_ends: Sequence[int], room: KeptRoom) -> None:
        super().begin(head_ends, room)
        self._room = room

    def end(self) -> None:
        self._on_device.clear()

    def fetch(self, layer: int, device: Device) -> None:
        """Copy to the device what ``restore`` of this layer needs and is not there yet, of checked blocks."""
        for source in self.decoder.sources(layer):
            if source not in self._on_device:
                self._on_device[source] = self._copy_tail(source, layer, device)

    def restore(self, layer: int, pool: KVBuffers, slots: torch.Tensor) -> None:
        """Write the layer's tail to its part of ``slots``, int64 ``[num_tokens]``.

        Raises:
            CodecError: blocks that the codec cannot have written.
        """
        restore_layer(
            self.decoder,
            layer,
            {source: self._on_device[source] for source in self.decoder.sources(layer)},
            self._first_rows[layer],
            self._end_row,
            *pool.buffers(layer),
            slots[self.num_head_rows(layer) :],
        )
        for source in self.decoder.sources(layer):
            if self.decoder.last_use[source] <= layer or source not in self._kept:
                block = self._on_device.pop(source)
                if source in self._kept:
                    self._room.give_back(block.nbytes)

    def _copy_tail(self, source: int, layer: int, device: Device) -> torch.Tensor:
        """Copy what the last layer that needs the block reads; without room for it, what ``layer`` reads."""
        last_use = self.decoder.last_use[source]
        tail = self._tail(source, last_use)
        if last_use > layer:
            if self._room.take(tail.nbytes):
                self._kept.add(source)
            else:
                tail = self._tail(source, layer)
        self.num_bytes += tail.nbytes
        return device.upload(torch.from_numpy(tail))


class GroupReader(SegmentReader):
    """Reads a segment whose groups of layers share a subspace.

    The first layer of a group that has a tail brings the tails of the whole group.
    """

    decoder: SubspaceDecoder

    def __init__(
        self, source: SegmentSlice, decoder: SubspaceDecoder, num_tokens: int, shift: int = 0
    ) -> None:
        super().__init__(source, decoder, num_tokens, shift)
        self._read_groups: set[int] = set()

    @property
    def num_pool_bytes(self) -> int:
        """The bytes of its tokens in a layer of the pool."""
        shape = self.decoder.shape
        return self.num_tokens * (shape.k_token_bytes + shape.v_token_bytes)

    def target(self, layer: int, slots: torch.Tensor) -> GroupTarget | None:
        """The tail of a layer's group, of a checked block, and where it goes; None if it was asked for
        before. ``slots``: int64 ``[num_tokens]``.

        Raises:
            CodecError: blocks that the codec cannot have written.
        """
        group = self.decoder.group_of(layer)
        if group in self._read_groups:
            return None
        self._read_groups.add(group)
        layers = self.decoder.stored_as.groups[group]
        # Heads never grow: what is decoded begins with the tail of the last layer.
        last = layers[-1]
        (source,) = self.decoder.sources(layer)
        block = self._tail(source, last)
        self.num_bytes += block.nbytes
        tail = self.decoder.tail(group, torch.from_numpy(block), self._first_rows[last], self._end_row)
        return GroupTarget(
            tail, [self._first_rows[each] for each in layers], slots[self.num_head_rows(last) :]
        )


def open_segments(lease: Lease, codec: SegmentCodec, num_tokens: int, shift: int = 0) -> list[SegmentReader]:
    """Readers of the first ``num_tokens`` tokens of a lease, in token order. ``shift``: as for the readers.

    Raises:
        CodecError: a segment's parameters are none that ``codec`` can decode.
    """
    opened: list[SegmentReader] = []
    for source in lease.slices:
        header = source.header
        num_leased = (source.end_page - source.first_page) * header.page_size
        of_slice = min(num_leased, num_tokens - sum(part.num_tokens for part in opened))
        if of_slice <= 0:
            break
        decoder = codec.open(
            header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
        )
        opened.append(
            GroupReader(source, decoder, of_slice, shift)
            if isinstance(decoder, SubspaceDecoder)
            else UnitReader(source, decoder, of_slice, shift)
        )
    return opened
