"""Makes the vectors of groups of layers from native blocks on a GPU, by one kernel.

Importing this module imports triton.
"""

# What triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from krul_backend.codec.kernel_arguments import rotary_arguments
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.unit_restore import NativeTails
from krul_backend.device import Device

_PROGRAM_TOKENS = 8
_MOST_NUMBERS = 256
"""Tokens of a program, and numbers of their rows that it turns at a time."""


@triton.jit
def _put(
    of_layer, starts, position, is_token, is_kept, mean, out, lowered, at, cos_table, sin_table,
    angle_stride, size, dim: tl.constexpr, rotary_half: tl.constexpr, is_neox: tl.constexpr,
    num_program_numbers: tl.constexpr,
):  # fmt: skip
    """Write the keys, or the values, of some tokens in one layer: ``size`` numbers of each."""
    for first in range(0, size, num_program_numbers):
        number = first + tl.arange(0, num_program_numbers)
        is_number = number < size
        mask = is_token[:, None] & is_number[None, :]
        x = tl.load(of_layer + (starts[:, None] + number[None, :]), mask=mask, other=0).to(tl.float32)
        if rotary_half > 0:
            channel = number % dim
            if is_neox:
                is_second = channel >= rotary_half
                pair = tl.where(is_second, channel - rotary_half, channel)
                other = tl.where(is_second, number - rotary_half, number + rotary_half)
            else:
                is_second = channel % 2 == 1
                pair = channel // 2
                other = tl.where(is_second, number - 1, number + 1)
            is_turned = mask & (channel < 2 * rotary_half)[None, :]
            y = tl.load(of_layer + (starts[:, None] + other[None, :]), mask=is_turned, other=0).to(tl.float32)
            angle_at = position[:, None] * angle_stride + pair[None, :]
            cos = tl.load(cos_table + angle_at, mask=is_turned, other=1)
            sin = tl.load(sin_table + angle_at, mask=is_turned, other=0)
            turned = x * cos + tl.where(is_second[None, :], -y, y) * sin
            x = tl.where(is_turned, turned / (cos * cos + sin * sin), x)
        x -= tl.load(mean + number, mask=is_number, other=0)[None, :]
        x = tl.where(is_kept[:, None], x, 0)
        to = at[:, None] + number[None, :]
        tl.store(out + to, x, mask=mask)
        tl.store(lowered + to, x.to(lowered.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["num_tokens", "num_starts", "num_first", "start_token"])
def put_group_vectors(
    blocks, block_size, starts, num_starts, index, num_tokens, num_first, start_token, mean, out, lowered,
    cos_table, sin_table, angle_stride,
    num_layers: tl.constexpr, k_size: tl.constexpr, v_size: tl.constexpr, k_dim: tl.constexpr,
    v_dim: tl.constexpr, rotary_half: tl.constexpr, is_neox: tl.constexpr, unit: tl.constexpr,
    num_program_tokens: tl.constexpr, num_program_numbers: tl.constexpr,
):  # fmt: skip
    """Write the vectors of the tokens ``index [num_tokens]`` of a segment, less the mean of their group, to
    ``out`` and ``lowered [groups, num_tokens, D]``. They are 0 for its ``num_first`` first tokens.

    ``blocks [layers, block_size]``: of ``num_layers`` layers of each group. Token ``t``'s keys begin in a
    block at number ``unit * starts[0, t]``, its values at ``unit * starts[1, t]``. ``mean [groups, D]``.
    """
    token = tl.program_id(0) * num_program_tokens + tl.arange(0, num_program_tokens)
    is_token = token < num_tokens
    layer = tl.program_id(1)
    group = layer // num_layers
    row = tl.load(index + token, mask=is_token, other=0)
    k_starts = tl.load(starts + row, mask=is_token, other=0) * unit
    v_starts = tl.load(starts + num_starts + row, mask=is_token, other=0) * unit
    of_layer = blocks + layer.to(tl.int64) * block_size
    mean += layer * (k_size + v_size)
    at = (group * num_tokens + token).to(tl.int64) * (num_layers * (k_size + v_size))
    at += (layer - group * num_layers) * (k_size + v_size)
    is_kept = row >= num_first
    if tl.program_id(2) == 0:
        _put(
            of_layer, k_starts, start_token + row, is_token, is_kept, mean, out, lowered, at,
            cos_table, sin_table, angle_stride, k_size, k_dim, rotary_half, is_neox, num_program_numbers,
        )  # fmt: skip
    else:
        _put(
            of_layer, v_starts, start_token + row, is_token, is_kept, mean + k_size, out, lowered,
            at + k_size, cos_table, sin_table, angle_stride, v_size, v_dim, 0, is_neox, num_program_numbers,
        )  # fmt: skip


def vectors_launch(
    blocks: torch.Tensor, rows: NativeTails, index: torch.Tensor, num_first: int, start_token: int,
    shape: LayerShape, rotary: RotaryTable | None, mean: torch.Tensor, out: torch.Tensor,
    lowered: torch.Tensor,
) -> tuple[tuple[int, int, int], dict[str, Any]]:  # fmt: skip
    """Grid and arguments of ``put_group_vectors``; ``blocks [layers, numbers]``: see ``GroupLayers``."""
    k_size, v_size = shape.num_kv_heads * shape.k_head_dim, shape.num_kv_heads * shape.v_head_dim
    most = triton.next_power_of_2(max(k_size, v_size))
    arguments = {
        "blocks": blocks, "block_size": blocks.shape[1],
        "starts": rows.starts, "num_starts": rows.starts.shape[1],
        "index": index, "num_tokens": len(index), "num_first": num_first, "start_token": start_token,
        "mean": mean, "out": out, "lowered": lowered,
        **rotary_arguments(rotary, out.device),
        "num_layers": len(blocks) // len(mean), "k_size": k_size, "v_size": v_size,
        "k_dim": shape.k_head_dim, "v_dim": shape.v_head_dim,
        "unit": rows.piece_bytes // rows.shape.dtype.itemsize,
        "num_program_tokens": _PROGRAM_TOKENS, "num_program_numbers": min(_MOST_NUMBERS, most),
        "num_warps": 4,
    }  # fmt: skip
    return (triton.cdiv(len(index), _PROGRAM_TOKENS), len(blocks), 2), arguments


def put_on_device(*given: Any) -> None:
    """Launch ``put_group_vectors`` on the current stream, with the arguments of ``vectors_launch``."""
    with Device.of(given[0]).as_current():
        grid, arguments = vectors_launch(*given)
        put_group_vectors[grid](**arguments)
