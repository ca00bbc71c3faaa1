"""Decodes blocks into the slots of the KV pool, the fastest way that the pool's device offers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import get_args

import torch

from krul_backend.codec.segment_codec import SegmentDecoder, UnitBlocks
from krul_backend.codec.shared_pair import SharedPair
from krul_backend.codec.single_layer import CodedLayer, NativeLayer
from krul_backend.device import Device
from krul_backend.errors import CodecError

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
    _check_target(found, end_token - first_token, k_buffer, v_buffer, slots)
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


def _check_target(
    found: UnitBlocks, num_tokens: int, k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor
) -> None:
    if slots.shape != (num_tokens,) or slots.dtype is not torch.int64:
        raise CodecError(
            f"{num_tokens} tokens need as many int64 slots, got {slots.dtype} {tuple(slots.shape)}"
        )
    shape = found.codec.place.shape
    for name, buffer, head_dim in (
        ("k_buffer", k_buffer, shape.k_head_dim),
        ("v_buffer", v_buffer, shape.v_head_dim),
    ):
        expected = (shape.num_kv_heads, head_dim)
        if buffer.ndim != 3 or tuple(buffer.shape[1:]) != expected or buffer.dtype is not shape.dtype:
            raise CodecError(
                f"{name} is {buffer.dtype} {tuple(buffer.shape)}, expected {shape.dtype} [slots, *{expected}]"
            )
