"""Reads the tails of a leased prefix, layer by layer, whatever each segment was encoded with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from krul_backend.codec.restore import restore_layer
from krul_backend.codec.segment_codec import SegmentCodec, SegmentDecoder
from krul_backend.device import Device
from krul_backend.tiers.common.interface import Block, Lease, SegmentSlice
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore.block_checks import BlockChecks

MAX_KEPT_BYTES = 128 << 20
"""Of the device's memory, for blocks that wait there for the other layer of their pair."""


class KeptRoom:
    """Device memory in which the readers of one batch keep blocks from one layer to a later one."""

    def __init__(self, num_bytes: int = MAX_KEPT_BYTES) -> None:
        self._free_bytes = num_bytes

    def take(self, num_bytes: int) -> bool:
        """Whether there is room for a block, which it has then."""
        if num_bytes > self._free_bytes:
            return False
        self._free_bytes -= num_bytes
        return True

    def give_back(self, num_bytes: int) -> None:
        self._free_bytes += num_bytes


@dataclass(frozen=True, eq=False)
class OpenSlice:
    """Tokens ``[first_token, first_token + num_tokens)`` of a conversation in one leased segment."""

    source: SegmentSlice
    decoder: SegmentDecoder
    num_tokens: int

    @property
    def first_token(self) -> int:
        header = self.source.header
        return header.start_token + self.source.first_page * header.page_size

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_tokens


class SegmentReader:
    """Reads one slice into the pool. Layers are read in ascending order.

    Positions are absolute. In layer ``l``, of the slice's tokens ``[first_token, end_token)``::

        [first_token, head_ends[l])   not read
        [head_ends[l], end_token)     read, decoded and written to their slots

    Each block is copied in one piece when its layer comes: from the group on in which the tail of the layer
    that needs it last begins (the other one of a pair, or itself), since heads never grow. It stays on the
    device until then, if there is ``room``; otherwise the part that the other layer needs is copied again
    when that comes. ``checks`` say when a block is there and right; nothing is copied before.
    """

    def __init__(
        self, opened: OpenSlice, head_ends: Sequence[int], checks: BlockChecks, room: KeptRoom
    ) -> None:
        header = opened.source.header
        self.num_tokens = opened.num_tokens
        self.num_bytes = 0
        self._header = header
        self._decoder = opened.decoder
        # Rows of the segment from here on.
        self._first_token = opened.first_token - header.start_token
        self._source = opened.source
        self._checks = checks
        self._heads = [max(end - header.start_token, self._first_token) for end in head_ends]
        self._last_use = opened.decoder.last_use
        self._room = room
        self._on_device: dict[int, torch.Tensor] = {}
        self._kept: set[int] = set()

    def announce(self, layer: int) -> None:
        """Let the blocks that ``fetch`` of this layer will copy be checked. Layers are announced in order."""
        for source in self._needed(layer):
            self._checks.announce(self._source, source)

    def fetch(self, layer: int, device: Device) -> None:
        """Copy to the device what ``restore`` of this layer needs and is not there yet. May take its time.

        Raises:
            DamagedBlockError, TierReadError: see ``BlockChecks.wait``.
        """
        for source in self._needed(layer):
            if source not in self._on_device:
                self._checks.wait(self._source, source)
                self._on_device[source] = self._copy_tail(source, layer, device)

    def _needed(self, layer: int) -> Sequence[int]:
        """Layers whose blocks this layer's tail is made of."""
        return () if self._first_row(layer) == self._end_row else self._decoder.sources(layer)

    def restore(self, layer: int, pool: DevicePool, slots: torch.Tensor) -> None:
        """Write the layer's tail to its slots. ``slots``: int64 ``[num_tokens]``, of the whole slice."""
        first = self._first_row(layer)
        if first < self._end_row:
            restore_layer(
                self._decoder,
                layer,
                {source: self._on_device[source] for source in self._decoder.sources(layer)},
                first,
                self._end_row,
                *pool.buffers(layer),
                slots[first - self._first_token :],
            )
        for source in self._decoder.sources(layer):
            if self._last_use[source] <= layer or source not in self._kept:
                block = self._on_device.pop(source, None)
                if block is not None and source in self._kept:
                    self._room.give_back(block.nbytes)

    @property
    def _end_row(self) -> int:
        return self._first_token + self.num_tokens

    def _first_row(self, layer: int) -> int:
        """First row of the segment that this layer's tail has; the end if it has none."""
        return min(self._heads[layer], self._end_row)

    def _copy_tail(self, source: int, layer: int, device: Device) -> torch.Tensor:
        """Copy what the last layer that needs the block reads; if that cannot stay, what ``layer`` reads."""
        last_use = self._last_use[source]
        tail = self._tail(source, last_use)
        if last_use > layer:
            if self._room.take(tail.nbytes):
                self._kept.add(source)
            else:
                tail = self._tail(source, layer)
        self.num_bytes += tail.nbytes
        return device.upload(torch.from_numpy(tail))

    def _tail(self, source: int, layer: int) -> Block:
        """The part of a block from the group on in which the tail of ``layer`` begins."""
        header = self._header
        stored_from = header.layer_first_token[source] - header.start_token
        # The block as it was encoded, in bytes:
        # [0, stored)    left out when it was stored
        # [stored, first)  stored, not needed now
        # [first, ...)   the tail
        stored = self._decoder.tail_start(source, stored_from)
        first = self._decoder.tail_start(source, self._first_row(layer))
        return self._source.blocks[source][first - stored :]


def open_slices(lease: Lease, codec: SegmentCodec, num_tokens: int) -> list[OpenSlice]:
    """The first ``num_tokens`` tokens of a lease, in token order.

    Raises:
        CodecError: a segment's parameters are none that ``codec`` can decode.
    """
    opened: list[OpenSlice] = []
    for source in lease.slices:
        header = source.header
        num_leased = (source.end_page - source.first_page) * header.page_size
        of_slice = min(num_leased, num_tokens - sum(part.num_tokens for part in opened))
        if of_slice <= 0:
            break
        decoder = codec.open(
            header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
        )
        opened.append(OpenSlice(source, decoder, of_slice))
    return opened
