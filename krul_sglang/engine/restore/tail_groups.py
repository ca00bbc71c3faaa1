"""Groups the tails of one layer, of all segments of a batch, into what is copied and decoded at once."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import torch

from krul_backend.codec.restore import NativeTail, NativeTails, can_fuse_groups
from krul_backend.device import Device
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.restore.block_checks import LayerBlock
from krul_sglang.engine.restore.load_batch import Load
from krul_sglang.engine.restore.segment_reader import GroupReader, SegmentReader, restore_groups

MAX_JOINED_BYTES = 32 << 20
"""Most device memory for the tails that are copied together: that of one long segment's layer."""


class TailGroup(Protocol):
    """Tails of one layer, for which ``fetch`` and then ``restore`` is called, once each.

    ``blocks`` must have been checked before ``fetch``.
    """

    blocks: list[LayerBlock]

    def fetch(self, device: Device) -> None:
        """Copy to the device what is not there yet, on the current stream."""

    def restore(self, pool: DevicePool) -> None:
        """Write the tails to their slots, on the current stream."""


class TailGroups:
    """Makes the groups of each layer: natively stored tails of all segments join, and those in shared
    subspaces; others stay alone.

    A group of several native tails has at most ``MAX_JOINED_BYTES``. Tails in shared subspaces stay alone,
    too, where kernels decode them: each is copied to the device whole, and nothing is gained together.
    """

    def __init__(self, loads: Sequence[Load], device: Device) -> None:
        self._device = device
        self._parts: list[_Part] = []
        for load in loads:
            for reader in load.readers:
                first = reader.first_token - load.device_tokens
                self._parts.append((reader, load.slots[first : first + reader.num_tokens]))
        # Heads have few different lengths, so that most layers are grouped as an earlier one is.
        self._grouped: dict[object, list[Callable[[int], TailGroup]]] = {}

    def of_layer(self, layer: int) -> list[TailGroup]:
        """The groups of a layer; none if no load has a tail in it."""
        key = tuple(
            (reader.num_head_rows(layer), reader.decoder.native_units[layer]) for reader, _ in self._parts
        )
        if key not in self._grouped:
            self._grouped[key] = self._group(layer)
        return [make_group(layer) for make_group in self._grouped[key]]

    def _group(self, layer: int) -> list[Callable[[int], TailGroup]]:
        """What makes the groups of this layer, and of others with the same heads."""
        groups: list[Callable[[int], TailGroup]] = []
        parts = [(reader, slots) for reader, slots in self._parts if reader.has_tail(layer)]
        # By the bases that they are stored in; or one by one.
        shared: dict[object, list[tuple[GroupReader, torch.Tensor]]] = {}
        for reader, slots in parts:
            if isinstance(reader, GroupReader):
                decoder = reader.decoder
                is_alone = can_fuse_groups(decoder.shape, decoder.stored_as.coder, self._device)
                shared.setdefault(reader if is_alone else decoder.bases_digest, []).append((reader, slots))
        groups += [partial(_Decoded, tails, partial(restore_groups, tails)) for tails in shared.values()]
        joined: list[tuple[_Part, NativeTail]] = []
        num_bytes = 0
        for reader, slots in parts:
            if isinstance(reader, GroupReader):
                continue
            tail = reader.native_tail(layer)
            if tail is None:
                groups.append(partial(_Decoded, [(reader, slots)], partial(reader.restore, slots=slots)))
                continue
            if joined and num_bytes + tail.num_bytes > MAX_JOINED_BYTES:
                groups.append(partial(_Joined, self._join(joined, layer)))
                joined, num_bytes = [], 0
            joined.append(((reader, slots), tail))
            num_bytes += tail.num_bytes
        if joined:
            groups.append(partial(_Joined, self._join(joined, layer)))
        return groups

    def _join(self, joined: Sequence[tuple[_Part, NativeTail]], layer: int) -> _Joint:
        return _Joint(
            [(reader, tail.num_bytes) for (reader, _), tail in joined],
            NativeTails([tail for _, tail in joined], self._device),
            torch.cat([slots[reader.num_head_rows(layer) :] for (reader, slots), _ in joined]),
        )


_Part = tuple[SegmentReader, torch.Tensor]
"""A segment of a load, and the slots of its tokens."""


class _Decoded:
    """Tails that are decoded: that of one segment, or all in the same subspace, with one product for all."""

    def __init__(
        self, parts: Sequence[_Part], restore: Callable[[int, DevicePool], None], layer: int
    ) -> None:
        self.blocks = [
            reader.block(source) for reader, _ in parts for source in reader.decoder.sources(layer)
        ]
        self._parts = parts
        self._restore = restore
        self._layer = layer

    def fetch(self, device: Device) -> None:
        for reader, _ in self._parts:
            reader.fetch(self._layer, device)

    def restore(self, pool: DevicePool) -> None:
        self._restore(self._layer, pool)


@dataclass(frozen=True, eq=False)
class _Joint:
    """Native tails that join in some layers: how many bytes each has, and where their rows come from and go.

    ``slots`` are those of all of their tokens, in the order of the tails.
    """

    tails: Sequence[tuple[SegmentReader, int]]
    rows: NativeTails
    slots: torch.Tensor


class _Joined:
    """Natively stored tails: one copy for each, back to back, and one gather and scatter for all."""

    def __init__(self, joint: _Joint, layer: int) -> None:
        self.blocks = [reader.block(layer) for reader, _ in joint.tails]
        self._joint = joint
        self._layer = layer
        self._bytes: torch.Tensor | None = None

    def fetch(self, device: Device) -> None:
        self._bytes = device.upload_joined(
            [reader.native_bytes(self._layer, num_bytes) for reader, num_bytes in self._joint.tails]
        )

    def restore(self, pool: DevicePool) -> None:
        assert self._bytes is not None
        self._joint.rows.restore(self._bytes, *pool.buffers(self._layer), self._joint.slots)
        self._bytes = None
