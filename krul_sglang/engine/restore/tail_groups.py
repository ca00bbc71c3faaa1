"""Groups the tails of one layer, of all segments of a batch, into what is copied and decoded at once."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Protocol, TypeVar

import torch

from krul_backend.codec.restore import GroupRestore, NativeTail, NativeTails, begin_group
from krul_backend.device import Device
from krul_sglang.engine.restore.block_checks import LayerBlock
from krul_sglang.engine.restore.segment_reader import GroupReader, KVBuffers, SegmentReader, UnitReader

MAX_JOINED_BYTES = 32 << 20
"""Most bytes of a layer, as the pool holds it, that are copied or decoded together: those of one long
segment."""

T = TypeVar("T")

Part = tuple[SegmentReader, torch.Tensor]
"""A segment that is read, and the slots of its tokens: int64 ``[num_tokens]``."""


class TailGroup(Protocol):
    """Tails of one layer. ``fetch`` and then ``restore`` are called; a second ``fetch`` does nothing.
    ``blocks`` must have been checked before ``fetch``.
    """

    blocks: list[LayerBlock]

    def fetch(self, device: Device) -> None:
        """Copy to the device what is not there yet, on the current stream."""

    def restore(self, pool: KVBuffers) -> None:
        """Write the tails to their slots, on the current stream.

        Raises:
            CodecError: blocks that the codec cannot have written.
        """


class TailGroups:
    """Makes the groups of each layer: natively stored tails of all segments join, and so do those in shared
    subspaces of the same bases; others stay alone. Those that join have at most ``MAX_JOINED_BYTES``.
    """

    def __init__(self, parts: Sequence[Part], device: Device) -> None:
        self._device = device
        self._parts = parts
        self._begun: list[GroupRestore] = []
        # Heads have few different lengths, so that most layers are grouped as an earlier one is.
        self._grouped: dict[object, list[Callable[[int], TailGroup]]] = {}

    def of_layer(self, layer: int) -> list[TailGroup]:
        """The groups of a layer; none if no segment has a tail in it."""
        key = tuple(
            (reader.num_head_rows(layer), reader.decoder.native_units[layer]) for reader, _ in self._parts
        )
        if key not in self._grouped:
            self._grouped[key] = self._group(layer)
        return [make_group(layer) for make_group in self._grouped[key]]

    @property
    def has_decoded(self) -> bool:
        """Whether anything was decoded, so that ``check`` may find something."""
        return bool(self._begun)

    def check(self) -> None:
        """After the last layer: raise what ``restore`` could not know yet, because a GPU finds it.

        The calling thread waits for the current stream if anything was decoded on a GPU.

        Raises:
            CodecError: as for ``TailGroup.restore``.
        """
        for begun in self._begun:
            begun.check()

    def _group(self, layer: int) -> list[Callable[[int], TailGroup]]:
        """What makes the groups of this layer, and of others with the same heads."""
        coded: dict[object, list[tuple[GroupReader, torch.Tensor]]] = {}
        native: list[tuple[Part, NativeTail]] = []
        groups: list[Callable[[int], TailGroup]] = []
        for reader, slots in self._parts:
            if not reader.has_tail(layer):
                continue
            if isinstance(reader, GroupReader):
                key = reader.decoder.bases_digest, reader.decoder.stored_as.coder
                coded.setdefault(key, []).append((reader, slots))
            elif (tail := reader.native_tail(layer)) is not None:
                native.append(((reader, slots), tail))
            else:
                assert isinstance(reader, UnitReader)
                groups.append(partial(_CodedUnit, reader, slots))
        for alike in coded.values():
            for together in _batches(alike, lambda part: part[0].num_pool_bytes):
                groups.append(partial(_CodedGroups, together, self._begun))
        for joined in _batches(native, lambda part: part[1].num_bytes):
            groups.append(partial(_Joined, self._join(joined, layer)))
        return groups

    def _join(self, joined: Sequence[tuple[Part, NativeTail]], layer: int) -> _Joint:
        return _Joint(
            [(reader, tail.num_bytes) for (reader, _), tail in joined],
            NativeTails([tail for _, tail in joined], self._device),
            torch.cat([slots[reader.num_head_rows(layer) :] for (reader, slots), _ in joined]),
        )


def _batches(parts: Sequence[T], num_bytes: Callable[[T], int]) -> Iterator[list[T]]:
    """Runs of ``parts`` of at most ``MAX_JOINED_BYTES`` together; a larger part is alone."""
    batch: list[T] = []
    for part in parts:
        if batch and sum(map(num_bytes, batch)) + num_bytes(part) > MAX_JOINED_BYTES:
            yield batch
            batch = []
        batch.append(part)
    if batch:
        yield batch


class _CodedUnit:
    """The tail of a segment whose layer is decoded alone, or with the other one of its pair."""

    def __init__(self, reader: UnitReader, slots: torch.Tensor, layer: int) -> None:
        self.blocks = [reader.block(source) for source in reader.decoder.sources(layer)]
        self._reader = reader
        self._slots = slots
        self._layer = layer

    def fetch(self, device: Device) -> None:
        self._reader.fetch(self._layer, device)

    def restore(self, pool: KVBuffers) -> None:
        self._reader.restore(self._layer, pool, self._slots)


class _CodedGroups:
    """Tails in the same shared subspace, which are decoded together.

    The first layer of a group that has a tail writes all layers of the group; later ones have nothing to do.
    """

    def __init__(
        self, parts: Sequence[tuple[GroupReader, torch.Tensor]], begun: list[GroupRestore], layer: int
    ) -> None:
        self.blocks = [
            reader.block(source) for reader, _ in parts for source in reader.decoder.sources(layer)
        ]
        self._parts = parts
        self._begun = begun
        self._layer = layer
        self._restore: GroupRestore | None = None

    def fetch(self, device: Device) -> None:
        # Asked again, readers have no targets.
        found = [reader.target(self._layer, slots) for reader, slots in self._parts]
        targets = [target for target in found if target is not None]
        if targets:
            self._restore = begin_group(targets, device)
            self._begun.append(self._restore)

    def restore(self, pool: KVBuffers) -> None:
        if self._restore is not None:
            decoder = self._parts[0][0].decoder
            layers = decoder.stored_as.groups[decoder.group_of(self._layer)]
            self._restore.write([pool.buffers(layer) for layer in layers])


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
        if self._bytes is None:
            self._bytes = device.upload_joined(
                [reader.native_bytes(self._layer, num_bytes) for reader, num_bytes in self._joint.tails]
            )

    def restore(self, pool: KVBuffers) -> None:
        assert self._bytes is not None
        self._joint.rows.restore(self._bytes, *pool.buffers(self._layer), self._joint.slots)
        self._bytes = None
