"""Decodes blocks into the slots of the KV pool, the fastest way that the pool's device offers."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import get_args

import torch

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.interface import LayerKV, LayerShape
from krul_backend.codec.segment_codec import SegmentDecoder, UnitBlocks
from krul_backend.codec.shared_pair import SharedPair
from krul_backend.codec.single_layer import CodedLayer, NativeLayer
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.device import Device
from krul_backend.errors import CodecError

FusedUnit = NativeLayer | CodedLayer | SharedPair
"""What ``triton_restore`` can decode."""

GroupBuffers = Sequence[tuple[torch.Tensor, torch.Tensor]]
"""Keys and values of each layer of a group in the pool."""

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
    _check_target(found.codec.place.shape, end_token - first_token, k_buffer, v_buffer, slots)
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


class DecodedGroup(ABC):
    """Tokens ``[first_token, end_token)`` of a segment in all layers of a group, ready to be written.

    ``decode_group`` makes it. On a GPU decoding is only queued then, on the stream that was current:
    ``write`` is called on the same one.
    """

    def __init__(self, shape: LayerShape, first_token: int, end_token: int) -> None:
        self._shape = shape
        self._first_token = first_token
        self._end_token = end_token

    def write(
        self,
        buffers: GroupBuffers,
        first_tokens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        """Write each layer of the group from its own first token on, and free what was decoded: once.

        ``buffers``: keys and values of each layer, as for ``restore_layer``. ``first_tokens``: of each layer,
        from ``first_token`` to ``end_token``. ``slots``: int64 ``[end_token - first_token]``, all different.

        Raises:
            CodecError: slots and tokens differ in number, or buffers are not of the codec's shape and dtype.
        """
        for k_buffer, v_buffer in buffers:
            _check_target(self._shape, self._end_token - self._first_token, k_buffer, v_buffer, slots)
        self._write(buffers, first_tokens, slots)

    @abstractmethod
    def _write(
        self,
        buffers: GroupBuffers,
        first_tokens: Sequence[int],
        slots: torch.Tensor,
    ) -> None: ...

    @abstractmethod
    def check(self) -> None:
        """Wait until the group is decoded, if it is only queued, and see whether that worked.

        Raises:
            CodecError: the block is damaged. What was written is undefined.
        """


class _DecodedRows(DecodedGroup):
    """Rows that the decoder itself has made, on the device of the bases."""

    def __init__(self, shape: LayerShape, rows: Sequence[LayerKV], first_token: int, end_token: int) -> None:
        super().__init__(shape, first_token, end_token)
        self._rows = rows

    def _write(
        self,
        buffers: GroupBuffers,
        first_tokens: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        for of_layer, kv, token in zip(buffers, self._rows, first_tokens, strict=True):
            wanted = slice(token - self._first_token, self._end_token - self._first_token)
            for buffer, rows in zip(of_layer, (kv.k, kv.v), strict=True):
                buffer.index_copy_(0, slots[wanted], rows[wanted])
        self._rows = ()

    def check(self) -> None:
        """Damage was an error when the rows were decoded."""


def decode_group(
    decoder: SubspaceDecoder,
    group: int,
    block: torch.Tensor,
    first_token: int,
    end_token: int,
    device: Device,
) -> DecodedGroup:
    """Decode tokens ``[first_token, end_token)`` of a group of layers, for a pool on ``device``.

    ``block``: uint8 on the host, the group's from the ``tail_start`` of ``first_token`` on. Where
    ``can_fuse_groups`` holds, it is copied to the device and decoded there, both on the current stream, and
    this returns at once: the block must not change until that has run. Otherwise it is decoded now.

    Raises:
        CodecError: see ``SubspaceDecoder.decode``. Damage that a GPU finds is raised by
        ``DecodedGroup.check``.
    """
    if can_fuse_groups(decoder, device):
        from krul_backend.codec.triton_group_restore import TritonGroup

        return TritonGroup(decoder.tail(group, block, first_token), end_token, device)
    rows = decoder.decode(group, block, first_token)
    return _DecodedRows(decoder.shape, rows, first_token, end_token)


def can_fuse_groups(decoder: SubspaceDecoder, device: Device) -> bool:
    """Whether kernels decode the groups of this segment on ``device``.

    They do not on a CPU, if elements of the pool are not bf16, fp16 or fp32, or for a coder other than rANS.
    """
    return (
        device.runs_triton
        and decoder.shape.dtype in _FUSED_DTYPES
        and decoder.stored_as.coder == RansCoder.name
    )


def _check_target(
    shape: LayerShape, num_tokens: int, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor
) -> None:
    if slots.shape != (num_tokens,) or slots.dtype is not torch.int64:
        raise CodecError(
            f"{num_tokens} tokens need as many int64 slots, got {slots.dtype} {tuple(slots.shape)}"
        )
    for name, buffer, head_dim in (
        ("k_buffer", k_buffer, shape.k_head_dim),
        ("v_buffer", v_buffer, shape.v_head_dim),
    ):
        expected = (shape.num_kv_heads, head_dim)
        if buffer.ndim != 3 or tuple(buffer.shape[1:]) != expected or buffer.dtype is not shape.dtype:
            raise CodecError(
                f"{name} is {buffer.dtype} {tuple(buffer.shape)}, expected {shape.dtype} [slots, *{expected}]"
            )
