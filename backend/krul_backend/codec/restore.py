"""Writes stored tails into the slots of the KV pool, the fastest way that the pool's device offers."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import get_args

import numpy as np
import numpy.typing as npt
import torch

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.segment_codec import SegmentDecoder, UnitBlocks
from krul_backend.codec.shared_pair import SharedPair
from krul_backend.codec.subspace.coded_tail import CodedTail, decode_tails
from krul_backend.codec.unit import CodedLayer, NativeLayer
from krul_backend.device import Device
from krul_backend.errors import CodecError

Rows = npt.NDArray[np.int64]


FusedUnit = NativeLayer | CodedLayer | SharedPair
"""What ``triton_restore`` can decode."""


_FUSED_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def restore_layer(
    decoder: SegmentDecoder,
    layer: int,
    blocks: Mapping[int, torch.Tensor],
    first_token: int,
    end_token: int,
    k_buffer: torch.Tensor,
    v_buffer: torch.Tensor,
    slots: torch.Tensor,
) -> None:
    """Decode tokens ``[first_token, end_token)`` of a segment into slots of one layer of the pool.

    ``blocks``: as for ``SegmentDecoder.decode``, on the pool's device. ``k_buffer [num_slots, H, Dk]`` and
    ``v_buffer [num_slots, H, Dv]`` in the pool's dtype are written at ``slots`` (int64
    ``[end_token - first_token]``, all different, on the same device), and nowhere else. On a GPU the work is
    queued on the current stream and this returns at once: blocks and slots must not change until it has run.

    Where ``can_fuse`` holds one fused kernel does it (``triton_restore``); otherwise rows are decoded, then
    copied.

    Raises:
        CodecError: see ``SegmentDecoder.decode``; also if slots and tokens differ in number, or the buffers
            are not of the codec's shape and dtype.
    """
    found = decoder.unit_blocks(layer, blocks, first_token, end_token)
    _check_slots(end_token - first_token, slots)
    _check_buffers(found.codec.place.shape, k_buffer, v_buffer)
    if can_fuse(found, k_buffer, v_buffer, slots):
        from krul_backend.codec.triton_restore import restore_fused

        restore_fused(found, first_token, end_token, k_buffer, v_buffer, slots)
        return
    kv = found.codec.decode(found.index, found.blocks, first_token, end_token)
    k_buffer.index_copy_(0, slots, kv.k)
    v_buffer.index_copy_(0, slots, kv.v)


def can_fuse(found: UnitBlocks, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor) -> bool:
    """Whether the fused pass can restore this layer.

    It cannot if a tensor is on the CPU or on another GPU; if elements of the pool are not bf16, fp16 or fp32;
    if the channels of a vector are not neighbours in memory; or for any class of units that the kernel does
    not know, subclasses included.
    """
    tensors = (*found.blocks, k_buffer, v_buffer, slots)
    return (
        type(found.codec) in get_args(FusedUnit)
        and Device.of(k_buffer).runs_triton
        and all(tensor.device == k_buffer.device for tensor in tensors)
        and found.codec.place.shape.dtype in _FUSED_DTYPES
        and k_buffer.stride(-1) == v_buffer.stride(-1) == 1
        and slots.is_contiguous()
    )


@dataclass(frozen=True, eq=False)
class GroupTarget:
    """A coded tail, and its slots in the pool.

    ``first_tokens``: of each layer of the group, not before that of the tail. ``slots``: int64, those of all
    tokens of the tail, all different.
    """

    tail: CodedTail
    first_tokens: Sequence[int]
    slots: torch.Tensor


class GroupRestore:
    """Tails of one group of layers, those of several segments of a model, on their way to the pool.

    ``begin_group`` makes it, and ``write`` ends it; on a GPU both on the same stream. On the host tails are
    decoded when they are written.
    """

    def __init__(self, targets: Sequence[GroupTarget]) -> None:
        """Raises CodecError if slots and tokens of a tail differ in number."""
        for target in targets:
            _check_slots(target.tail.num_tokens, target.slots)
        self.targets = targets

    def write(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        """Write all tails, once. ``buffers``: keys and values of each layer of the group, as for
        ``restore_layer``.

        Raises:
            CodecError: buffers are not of the codec's shape and dtype, or a block is damaged. Damage that a
                GPU finds is raised by ``check``.
        """
        for k_buffer, v_buffer in buffers:
            _check_buffers(self.targets[0].tail.transform.shape, k_buffer, v_buffer)
        self._write(buffers)

    def check(self) -> None:
        """Wait until the tails are written, if that is only queued, and see whether it worked. On the host,
        damage is an error when they are written.

        Raises:
            CodecError: a block is damaged. What was written is undefined.
        """

    def _write(self, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
        slots = torch.cat([target.slots for target in self.targets])
        for rows, chunk in decode_tails([target.tail for target in self.targets]):
            for layer, (kv, (k_buffer, v_buffer)) in enumerate(zip(chunk, buffers, strict=True)):
                for part in _wanted(self.targets, layer, rows):
                    of_chunk = slice(part.start - rows.start, part.stop - rows.start)
                    k_buffer.index_copy_(0, slots[part], kv.k[of_chunk].to(k_buffer.dtype))
                    v_buffer.index_copy_(0, slots[part], kv.v[of_chunk].to(v_buffer.dtype))


def begin_group(targets: Sequence[GroupTarget], device: Device) -> GroupRestore:
    """Begin to decode tails of one group, of the same bases, for a pool on ``device``.

    Where ``can_fuse_groups`` holds, their blocks are copied to the device and decoded there, on the current
    stream, and this returns at once: the blocks must not change until that has run.

    Raises:
        CodecError: see ``GroupRestore``.
    """
    tail = targets[0].tail
    if can_fuse_groups(tail.transform.shape, device):
        from krul_backend.codec.triton_group_restore import TritonGroupRestore

        return TritonGroupRestore(targets, device)
    return GroupRestore(targets)


def _wanted(targets: Sequence[GroupTarget], layer: int, rows: slice) -> list[slice]:
    """The runs of ``rows`` that are written in a layer of the group. Rows are tokens of one tail after the
    other."""
    runs: list[slice] = []
    first_row = 0
    for target in targets:
        coded = target.tail
        start = first_row + target.first_tokens[layer] - coded.first_token
        first_row += coded.num_tokens
        start, end = max(start, rows.start), min(first_row, rows.stop)
        if start >= end:
            continue
        if runs and runs[-1].stop == start:
            start = runs.pop().start
        runs.append(slice(start, end))
    return runs


def can_fuse_groups(shape: LayerShape, device: Device) -> bool:
    """Return whether kernels decode tails for pools of this shape on ``device``.

    They do not on a CPU, or if elements of the pool are not bf16, fp16 or fp32.
    """
    return device.runs_triton and shape.dtype in _FUSED_DTYPES


def _check_slots(num_tokens: int, slots: torch.Tensor) -> None:
    if slots.shape != (num_tokens,) or slots.dtype is not torch.int64:
        raise CodecError(
            f"{num_tokens} tokens need as many int64 slots, got {slots.dtype} {tuple(slots.shape)}"
        )


def _check_buffers(shape: LayerShape, k_buffer: torch.Tensor, v_buffer: torch.Tensor) -> None:
    for name, buffer, head_dim in (
        ("k_buffer", k_buffer, shape.k_head_dim),
        ("v_buffer", v_buffer, shape.v_head_dim),
    ):
        expected = (shape.num_kv_heads, head_dim)
        if buffer.ndim != 3 or tuple(buffer.shape[1:]) != expected or buffer.dtype is not shape.dtype:
            raise CodecError(
                f"{name} is {buffer.dtype} {tuple(buffer.shape)}, expected {shape.dtype} [slots, *{expected}]"
            )


@dataclass(frozen=True)
class NativeTail:
    """Tokens ``[first_token, end_token)`` of a segment's layer, which ``unit`` stored.

    Its bytes are the end of the block from the group of ``first_token`` on: ``[num_bytes]``.
    """

    unit: NativeLayer
    first_token: int
    end_token: int

    @property
    def num_bytes(self) -> int:
        layout = self.unit.layouts[0]
        return layout.num_bytes - layout.group_start(self.first_token // layout.group_size)

    def row_starts(self) -> tuple[Rows, Rows]:
        """The first byte of each token's keys and of its values, counted from the first byte of the tail."""
        layout, shape = self.unit.layouts[0], self.unit.place.shape
        tokens = np.arange(self.first_token, self.end_token)
        group, row = np.divmod(tokens, layout.group_size)
        first_byte = layout.group_start(self.first_token // layout.group_size)
        record = group * layout.group_record.num_bytes - first_byte
        # Only the record of the last group may be shorter, and start its sections elsewhere.
        is_last = group == layout.num_tokens // layout.group_size
        full, last = layout.group_record.byte_offsets(), layout.last_record.byte_offsets()
        k = record + np.where(is_last, last["k"], full["k"]) + row * shape.k_token_bytes
        v = record + np.where(is_last, last["v"], full["v"]) + row * shape.v_token_bytes
        return k, v


class NativeTails:
    """Says where the rows of several tails lie when the tails lie one behind the other in one buffer.

    All are stored by one model: ``unit.place.shape`` is the same. The same object serves every layer whose
    tails are equal. ``num_bytes`` is the size of the buffer.
    """

    def __init__(self, tails: Sequence[NativeTail], device: Device) -> None:
        shape = self._shape = tails[0].unit.place.shape
        starts: list[tuple[Rows, Rows]] = []
        self.num_bytes = 0
        for tail in tails:
            k, v = tail.row_starts()
            starts.append((k + self.num_bytes, v + self.num_bytes))
            self.num_bytes += tail.num_bytes
        k_starts, v_starts = (np.concatenate(of_tails) for of_tails in zip(*starts, strict=True))
        # Rows are gathered in pieces of the largest size at whose multiples all of them start: whole rows,
        # unless keys and values differ in size, or rows are no multiple of the alignment.
        self._piece_bytes = math.gcd(
            shape.k_token_bytes,
            shape.v_token_bytes,
            self.num_bytes,
            int(np.gcd.reduce(k_starts)),
            int(np.gcd.reduce(v_starts)),
        )
        self._k_pieces = self._pieces(k_starts, shape.k_token_bytes, device)
        self._v_pieces = self._pieces(v_starts, shape.v_token_bytes, device)

    def restore(
        self, joined: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor
    ) -> None:
        """Write all rows to their slots of one layer, keys and values with one gather and one scatter each.

        ``joined``: uint8 ``[num_bytes]``, the tails back to back. ``k_buffer [num_slots, H, Dk]`` and
        ``v_buffer [num_slots, H, Dv]`` in the pool's dtype are written at ``slots`` (int64, as many as there
        are tokens in all tails, on the same device). On a GPU the work is queued on the current stream.
        """
        # As the widest numbers that fit, of which a CPU copies one at a time.
        wide = torch.int64 if self._piece_bytes % 8 == 0 else self._shape.dtype
        pieces = joined.view(-1, self._piece_bytes).view(wide)
        for buffer, wanted in ((k_buffer, self._k_pieces), (v_buffer, self._v_pieces)):
            targets = buffer.view(len(buffer), -1).view(wide)
            # [T * pieces per row, numbers of a piece] -> [T, numbers of a row]
            rows = pieces.index_select(0, wanted).view(-1, targets.shape[1])
            targets.index_copy_(0, slots, rows)

    def _pieces(self, starts: Rows, row_bytes: int, device: Device) -> torch.Tensor:
        """The pieces that rows at ``starts`` consist of: int64 ``[T * pieces per row]``."""
        per_row = np.arange(row_bytes // self._piece_bytes)
        pieces = (starts[:, None] // self._piece_bytes + per_row).ravel()
        host = device.host_empty(pieces.shape, torch.int64)
        return device.upload(host.copy_(torch.from_numpy(pieces)))
