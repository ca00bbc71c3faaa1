"""Groups the tails of one layer, of all segments of a batch, into what is copied and decoded at once."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from krul_backend.codec.native_tails import NativeTail, NativeTails
from krul_backend.device import Device
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore.block_checks import LayerBlock
from krul_sglang.engine.restore.load_batch import Load
from krul_sglang.engine.restore.segment_reader import SegmentReader

MAX_JOINED_BYTES = 32 << 20
"""Most device memory for the tails that are copied together: that of one long segment's layer."""


class TailGroup(Protocol):
    """Tails of one layer, for which ``fetch`` and then ``restore`` is called, once each."""

    def blocks(self) -> list[LayerBlock]:
        """The blocks that must have been checked before ``fetch``."""

    def fetch(self, device: Device) -> None:
        """Copy to the device what is not there yet, on the current stream."""

    def restore(self, pool: DevicePool) -> None:
        """Write the tails to their slots, on the current stream."""


class TailGroups:
    """Makes the groups of each layer: natively stored tails of all segments join, others stay alone.

    A group of several tails has at most ``MAX_JOINED_BYTES``.
    """

    def __init__(self, loads: Sequence[Load], device: Device) -> None:
        self._device = device
        self._parts: list[_Part] = []
        for load in loads:
            first = 0
            for reader in load.readers:
                self._parts.append(_Part(reader, load.slots[first : first + reader.num_tokens]))
                first += reader.num_tokens
        # Heads have few different lengths, so most layers share their places with an earlier one.
        self._places: dict[tuple[tuple[_Part, NativeTail], ...], _Places] = {}

    def of_layer(self, layer: int) -> list[TailGroup]:
        """The groups of a layer; none if no load has a tail in it."""
        groups: list[TailGroup] = []
        joined: list[tuple[_Part, NativeTail]] = []
        num_bytes = 0
        for part in self._parts:
            if not part.reader.has_tail(layer):
                continue
            tail = part.reader.native_tail(layer)
            if tail is None:
                groups.append(_Alone(part, layer))
                continue
            if joined and num_bytes + tail.num_bytes > MAX_JOINED_BYTES:
                groups.append(self._join(joined, layer))
                joined, num_bytes = [], 0
            joined.append((part, tail))
            num_bytes += tail.num_bytes
        if joined:
            groups.append(self._join(joined, layer))
        return groups

    def _join(self, joined: Sequence[tuple[_Part, NativeTail]], layer: int) -> _Joined:
        parts, tails = zip(*joined, strict=True)
        places = self._places.get(key := tuple(joined))
        if places is None:
            slots = torch.cat([part.slots_of_tail(layer) for part in parts])
            places = self._places[key] = _Places(NativeTails(tails, self._device), slots)
        return _Joined([part.reader for part in parts], tails, places, layer)


@dataclass(frozen=True, eq=False)
class _Part:
    """A segment of a load, and the slots of its tokens."""

    reader: SegmentReader
    slots: torch.Tensor

    def slots_of_tail(self, layer: int) -> torch.Tensor:
        return self.slots[self.reader.num_head_rows(layer) :]


@dataclass(frozen=True, eq=False)
class _Places:
    """Where the rows of joined tails come from, and the slots that they go to."""

    rows: NativeTails
    slots: torch.Tensor


class _Joined:
    """Natively stored tails: one copy for each, back to back, and one gather and scatter for all."""

    def __init__(
        self, readers: Sequence[SegmentReader], tails: Sequence[NativeTail], places: _Places, layer: int
    ) -> None:
        self._readers = readers
        self._tails = tails
        self._places = places
        self._layer = layer
        self._bytes: torch.Tensor | None = None

    def blocks(self) -> list[LayerBlock]:
        return [block for reader in self._readers for block in reader.blocks(self._layer)]

    def fetch(self, device: Device) -> None:
        self._bytes = device.upload_joined(
            [
                torch.from_numpy(reader.native_bytes(self._layer, tail.num_bytes))
                for reader, tail in zip(self._readers, self._tails, strict=True)
            ]
        )

    def restore(self, pool: DevicePool) -> None:
        assert self._bytes is not None
        self._places.rows.restore(self._bytes, *pool.buffers(self._layer), self._places.slots)
        self._bytes = None


class _Alone:
    """The tail of a segment that is decoded by itself."""

    def __init__(self, part: _Part, layer: int) -> None:
        self._part = part
        self._layer = layer

    def blocks(self) -> list[LayerBlock]:
        return self._part.reader.blocks(self._layer)

    def fetch(self, device: Device) -> None:
        self._part.reader.fetch(self._layer, device)

    def restore(self, pool: DevicePool) -> None:
        self._part.reader.restore(self._layer, pool, self._part.slots_of_tail(self._layer))
