"""Restores segments that are stored unit by unit: native tails of all of them together, other units alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from krul_backend.codec.interface import (
    KVBuffers,
    Restorer,
    TailGroup,
    TailReader,
    check_buffers,
    check_slots,
    in_batches,
)
from krul_backend.codec.layout import ALIGNMENT_BYTES, PoolRows, as_bytes
from krul_backend.codec.unit import UnitCodec
from krul_backend.device import Device

if TYPE_CHECKING:
    from krul_backend.codec.units import UnitDecoder

Rows = npt.NDArray[np.int64]

MAX_KEPT_BYTES = 128 << 20
"""Most device memory for blocks that stay there until the other layer of their pair comes."""


def restore_layer(
    decoder: UnitDecoder, layer: int, blocks: Mapping[int, torch.Tensor], tokens: range, target: PoolRows
) -> None:
    """Decode ``tokens`` of a segment into rows of one layer of the pool.

    ``blocks``: as for ``UnitDecoder.decode``, on the pool's device. ``target``: in the pool's dtype, with as
    many slots as tokens; nothing else is written. On a GPU the work is queued on the current stream and this
    returns at once: blocks and slots must not change until it has run.

    Raises:
        CodecError: see ``UnitDecoder.decode``; also if slots and tokens differ in number, or the buffers are
            not of the codec's shape and dtype.
    """
    found = decoder.unit_blocks(layer, blocks, tokens.start, tokens.stop)
    check_slots(len(tokens), target.slots)
    check_buffers(found.codec.place.shape, target.k_buffer, target.v_buffer)
    found.codec.restore(found.index, found.blocks, tokens, target)


class UnitRestorer(Restorer["UnitDecoder"]):
    """Copies natively stored tails back to back, and scatters them together; decodes other units one by one.

    Each block of another unit is copied in one piece when its layer comes: from the record on in which the
    tail of the layer that needs it last begins (the other one of a pair, or itself), since heads never grow.
    It stays on the device until then, if there is room; otherwise the part that the other layer needs is
    copied again when that comes.
    """

    def __init__(self, device: Device) -> None:
        super().__init__(device)
        # Heads have few different lengths, so that most layers are grouped as an earlier one is.
        self._grouped: dict[object, list[Callable[[int], TailGroup]]] = {}
        self._free_bytes = MAX_KEPT_BYTES
        self._on_device: dict[tuple[TailReader[UnitDecoder], int], torch.Tensor] = {}
        self._kept: set[tuple[TailReader[UnitDecoder], int]] = set()

    def groups(self, layer: int, readers: Sequence[TailReader[UnitDecoder]]) -> list[TailGroup]:
        key = tuple((reader.num_head_rows(layer), reader.decoder.native_units[layer]) for reader in readers)
        if key not in self._grouped:
            self._grouped[key] = self._group(layer, readers)
        return [make_group(layer) for make_group in self._grouped[key]]

    def close(self) -> None:
        # What makes groups holds this object.
        self._grouped.clear()
        self._on_device.clear()

    def _group(
        self, layer: int, readers: Sequence[TailReader[UnitDecoder]]
    ) -> list[Callable[[int], TailGroup]]:
        """What makes the groups of this layer, and of others with the same heads."""
        native: list[tuple[TailReader[UnitDecoder], NativeTail]] = []
        groups: list[Callable[[int], TailGroup]] = []
        for reader in readers:
            if not reader.has_tail(layer):
                continue
            unit = reader.decoder.native_units[layer]
            if unit is None:
                groups.append(partial(_CodedUnit, self, reader))
            else:
                native.append((reader, NativeTail(unit, reader.first_row(layer), reader.end_row)))
        for joined in in_batches(native, lambda part: part[1].num_bytes):
            rows = NativeTails([tail for _, tail in joined], self.device)
            # Of all of their tokens, in the order of the tails.
            of_tails = torch.cat([reader.slots[reader.num_head_rows(layer) :] for reader, _ in joined])
            tails = [(reader, tail.num_bytes) for reader, tail in joined]
            groups.append(partial(_NativeGroup, tails, rows, of_tails))
        return groups

    def blocks_of(self, reader: TailReader[UnitDecoder], layer: int) -> dict[int, torch.Tensor]:
        """The blocks that a layer is decoded from, copied to the device unless they are there."""
        found = {}
        for source in reader.decoder.sources(layer):
            key = reader, source
            if key not in self._on_device:
                self._on_device[key] = self._copy_tail(reader, source, layer)
            found[source] = self._on_device[key]
        return found

    def drop_blocks(self, reader: TailReader[UnitDecoder], layer: int) -> None:
        """Free the blocks of a layer that no later one needs, or that there is no room to keep."""
        for source in reader.decoder.sources(layer):
            key = reader, source
            if reader.decoder.last_use[source] <= layer or key not in self._kept:
                block = self._on_device.pop(key)
                if key in self._kept:
                    self._free_bytes += block.nbytes

    def _copy_tail(self, reader: TailReader[UnitDecoder], source: int, layer: int) -> torch.Tensor:
        """Copy what the last layer that needs the block reads; without room for it, what ``layer`` reads."""
        last_use = reader.decoder.last_use[source]
        num_bytes = reader.num_tail_bytes(source, last_use)
        if last_use > layer:
            if num_bytes <= self._free_bytes:
                self._free_bytes -= num_bytes
                self._kept.add((reader, source))
            else:
                num_bytes = reader.num_tail_bytes(source, layer)
        return self.device.upload(torch.from_numpy(reader.end_of_block(source, num_bytes)))


class _CodedUnit(TailGroup):
    """The tail of a segment whose layer is decoded alone, or with the other one of its pair."""

    is_decoded = True

    def __init__(self, restorer: UnitRestorer, reader: TailReader[UnitDecoder], layer: int) -> None:
        self.blocks = [reader.block(source) for source in reader.decoder.sources(layer)]
        self._restorer = restorer
        self._reader = reader
        self._layer = layer

    def fetch(self, device: Device, later: Sequence[TailGroup] = ()) -> None:
        self._restorer.blocks_of(self._reader, self._layer)

    def restore(self, pool: KVBuffers) -> None:
        reader, layer = self._reader, self._layer
        rows = range(reader.first_row(layer), reader.end_row)
        target = PoolRows(*pool.buffers(layer), reader.slots[reader.num_head_rows(layer) :])
        restore_layer(reader.decoder, layer, self._restorer.blocks_of(reader, layer), rows, target)
        self._restorer.drop_blocks(reader, layer)


class _NativeGroup(TailGroup):
    """Natively stored tails of a layer: one copy for each, back to back and behind those of layers that are
    fetched with it, then all go to their slots together."""

    def __init__(
        self,
        tails: Sequence[tuple[TailReader[UnitDecoder], int]],
        rows: NativeTails,
        slots: torch.Tensor,
        layer: int,
    ) -> None:
        self.blocks = [reader.block(layer) for reader, _ in tails]
        self._tails = tails
        self._rows = rows
        self._slots = slots
        self._layer = layer
        self._bytes: torch.Tensor | None = None

    def fetch(self, device: Device, later: Sequence[TailGroup] = ()) -> None:
        if self._bytes is None:
            alike = [group for group in later if isinstance(group, _NativeGroup) and group._bytes is None]
            groups = [self, *alike]
            tails = [(group._layer, *tail) for group in groups for tail in group._tails]
            joined = device.upload_joined([reader.end_of_block(layer, size) for layer, reader, size in tails])
            # Copied at once: each operation gives the GIL back, and waits for it beside a forward.
            sizes = [group._rows.num_bytes for group in groups]
            parts = torch.split(joined, sizes) if alike else [joined]
            for group, part in zip(groups, parts, strict=True):
                group._bytes = part

    def restore(self, pool: KVBuffers) -> None:
        assert self._bytes is not None
        self._rows.restore(self._bytes, *pool.buffers(self._layer), self._slots)
        self._bytes = None


@dataclass(frozen=True)
class NativeTail:
    """Tokens ``[first_token, end_token)`` of a segment's layer, which the native ``unit`` stored.

    Its bytes are the end of the block from the group of ``first_token`` on: ``[num_bytes]``.
    """

    unit: UnitCodec
    first_token: int
    end_token: int

    @property
    def num_bytes(self) -> int:
        layout = self.unit.layouts[0]
        return layout.num_bytes - layout.group_start(self.first_token // layout.group_size)

    def groups(self) -> tuple[Rows, Rows]:
        """Of each group of these tokens: how many it has ``[G]``, and at which byte of the tail the keys, and
        the values, of the first token would begin if all tokens lay as those of the group do ``[2, G]``."""
        layout, shape = self.unit.layouts[0], self.unit.place.shape
        size = layout.group_size
        groups = np.arange(self.first_token // size, -(-self.end_token // size))
        record, row = (groups - groups[0]) * layout.group_record.num_bytes, self.first_token - groups * size
        # Only the record of the last group may be shorter, and start its sections elsewhere.
        is_last = groups == layout.num_tokens // size
        full, last = layout.group_record.byte_offsets(), layout.last_record.byte_offsets()
        k = record + np.where(is_last, last["k"], full["k"]) + row * shape.k_token_bytes
        v = record + np.where(is_last, last["v"], full["v"]) + row * shape.v_token_bytes
        bounds = np.append(groups, groups[-1] + 1) * size
        return np.diff(bounds.clip(self.first_token, self.end_token)), np.stack([k, v])


class NativeTails:
    """Says where the rows of several tails lie when the tails lie one behind the other in one buffer.

    All are stored by one model: ``unit.place.shape`` is the same. The same object serves every layer whose
    tails are equal. ``num_bytes`` is the size of the buffer. Where triton runs, token ``t``'s keys begin at
    byte ``piece_bytes * starts[0, t]``, its values at ``piece_bytes * starts[1, t]``.
    """

    def __init__(self, tails: Sequence[NativeTail], device: Device) -> None:
        self.tails, shape = tails, tails[0].unit.place.shape
        self.shape, self._runs_triton = shape, device.runs_triton
        row_bytes = np.array([[shape.k_token_bytes], [shape.v_token_bytes]])
        of_tails, num_tokens, self.num_bytes = [], 0, 0
        for tail in tails:
            counts, firsts = tail.groups()
            of_tails.append((counts, firsts + self.num_bytes - num_tokens * row_bytes))
            num_tokens += tail.end_token - tail.first_token
            self.num_bytes += tail.num_bytes
        counts, firsts = (np.concatenate(part, axis=-1) for part in zip(*of_tails, strict=True))
        # Rows are copied in pieces of the largest size at whose multiples all of them start: whole rows,
        # unless keys and values differ in size, or rows are no multiple of the alignment.
        piece_bytes = math.gcd(self.num_bytes, *row_bytes.ravel().tolist(), *firsts.ravel().tolist())
        if self._runs_triton:
            piece_bytes = math.gcd(piece_bytes, ALIGNMENT_BYTES)
        # Few operations on long arrays: numpy gives the GIL back in each, and a busy forward keeps it.
        starts = np.arange(num_tokens) * (row_bytes // piece_bytes)
        starts += np.repeat(firsts // piece_bytes, counts, axis=1)
        if self._runs_triton:
            self.starts = device.from_host(torch.from_numpy(starts))
        else:
            # Of keys and of values, int64 ``[T * pieces per row]``.
            of_rows = (np.arange(size // piece_bytes) for size in row_bytes.ravel())
            pieces = (part[:, None] + row for part, row in zip(starts, of_rows, strict=True))
            self._pieces = [device.from_host(torch.from_numpy(part.ravel())) for part in pieces]
        self.piece_bytes = piece_bytes

    def restore(
        self, joined: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write all rows to their slots of one layer, by one kernel or, of keys and of values, by torch.

        ``joined``: uint8 ``[num_bytes]``, the tails back to back. ``k_buffer [num_slots, H, Dk]`` and
        ``v_buffer [num_slots, H, Dv]`` in the pool's dtype are written at ``slots`` (int64, as many as there
        are tokens in all tails, on the same device). On a GPU the work is queued on the current stream.
        """
        if self._runs_triton:
            self._move(joined, k_buffer, v_buffer, slots, to_pool=True)
            return
        # As the widest numbers that fit, of which a CPU copies one at a time.
        wide = torch.int64 if self.piece_bytes % 8 == 0 else as_bytes(k_buffer).dtype
        pieces = joined.view(-1, self.piece_bytes).view(wide)
        for buffer, wanted in zip((k_buffer, v_buffer), self._pieces, strict=True):
            targets = buffer.view(len(buffer), -1).view(wide)
            # [T * pieces per row, numbers of a piece] -> [T, numbers of a row]
            rows = pieces.index_select(0, wanted).view(-1, targets.shape[1])
            targets.index_copy_(0, slots, rows)

    def gather(self, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
        """The inverse of ``restore``, on a device that runs triton: the tails of rows in slots."""
        row_bytes = self.shape.k_token_bytes + self.shape.v_token_bytes
        # Between rows, what is not written is zero.
        make = torch.empty if len(slots) * row_bytes == self.num_bytes else torch.zeros
        joined = make(self.num_bytes, dtype=torch.uint8, device=slots.device)
        self._move(joined, k_buffer, v_buffer, slots, to_pool=False)
        return joined

    def _move(self, joined: torch.Tensor, *of_pool: torch.Tensor, to_pool: bool) -> None:
        from krul_backend.triton_rows import move_rows

        move_rows(self.starts, self.piece_bytes, joined, *map(as_bytes, of_pool), to_pool=to_pool)
