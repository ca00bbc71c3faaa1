"""Copies rows of keys and values between slots of a layer of the pool and the bytes of blocks, by one kernel.

Importing this module imports triton.
"""

# What triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from krul_backend.device import Device

_PROGRAM_TOKENS = 8
_MOST_NUMBERS = 256
"""Tokens of a program, and numbers of their rows that it copies at a time."""


@triton.jit
def _copy(
    starts, rows, is_token, block, buffer, stride, size,
    to_pool: tl.constexpr, num_program_numbers: tl.constexpr,
):  # fmt: skip
    for first in range(0, size, num_program_numbers):
        number = first + tl.arange(0, num_program_numbers)
        mask = is_token[:, None] & (number < size)[None, :]
        in_block = block + (starts[:, None] + number[None, :])
        in_pool = buffer + ((rows * stride)[:, None] + number[None, :])
        if to_pool:
            tl.store(in_pool, tl.load(in_block, mask=mask), mask=mask)
        else:
            tl.store(in_block, tl.load(in_pool, mask=mask), mask=mask)


@triton.jit(do_not_specialize=["num_tokens"], do_not_specialize_on_alignment=["slots"])
def copy_rows(
    starts, slots, num_tokens, block, k_buffer, k_stride, k_size, v_buffer, v_stride, v_size,
    to_pool: tl.constexpr, is_wide: tl.constexpr, unit: tl.constexpr, num_program_tokens: tl.constexpr,
    num_program_numbers: tl.constexpr,
):  # fmt: skip
    """Copy the keys of some tokens, ``k_size`` numbers each, or their values in the second row of programs.

    Token ``t`` is row ``slots[t]`` of the buffers. In ``block`` its keys begin at number ``unit * starts[0,
    t]``, and its values at ``unit * starts[1, t]``. All bytes are read as numbers of 64 bits if ``is_wide``,
    or else as the buffers' own.
    """
    if is_wide:
        k_buffer = k_buffer.to(tl.pointer_type(tl.int64), bitcast=True)
        v_buffer = v_buffer.to(tl.pointer_type(tl.int64), bitcast=True)
    block = block.to(k_buffer.dtype, bitcast=True)
    is_value = tl.program_id(1)
    token = tl.program_id(0) * num_program_tokens + tl.arange(0, num_program_tokens)
    is_token = token < num_tokens
    of_block = tl.load(starts + is_value * num_tokens + token, mask=is_token, other=0) * unit
    rows = tl.load(slots + token, mask=is_token, other=0)
    if is_value == 0:
        _copy(of_block, rows, is_token, block, k_buffer, k_stride, k_size, to_pool, num_program_numbers)
    else:
        _copy(of_block, rows, is_token, block, v_buffer, v_stride, v_size, to_pool, num_program_numbers)


def move_launch(
    starts: torch.Tensor, unit_bytes: int, block: torch.Tensor, k_buffer: torch.Tensor,
    v_buffer: torch.Tensor, slots: torch.Tensor, *, to_pool: bool,
) -> tuple[tuple[int, int], dict[str, Any]]:  # fmt: skip
    """Grid and arguments of ``copy_rows``; see ``move_rows``. No operation of torch is called: each would
    give the GIL back, and wait for it beside a forward."""
    # As the widest numbers that fit.
    item_bytes = k_buffer.itemsize
    buffers = k_buffer, v_buffer
    multiples = [step * item_bytes for each in buffers for step in (each.stride(0), each.storage_offset())]
    is_wide = not any(num_bytes % 8 for num_bytes in (unit_bytes, *multiples))
    number_bytes = 8 if is_wide else item_bytes
    k_size, v_size = (each.shape[1] * each.shape[2] * item_bytes // number_bytes for each in buffers)
    k_stride, v_stride = (each.stride(0) * item_bytes // number_bytes for each in buffers)
    num_tokens = slots.shape[0]
    arguments = {
        "starts": starts, "slots": slots, "num_tokens": num_tokens, "block": block,
        "k_buffer": k_buffer, "k_stride": k_stride, "k_size": k_size,
        "v_buffer": v_buffer, "v_stride": v_stride, "v_size": v_size,
        "to_pool": to_pool, "is_wide": is_wide, "unit": unit_bytes // number_bytes,
        "num_program_tokens": _PROGRAM_TOKENS,
        "num_program_numbers": min(_MOST_NUMBERS, triton.next_power_of_2(max(k_size, v_size))),
        "num_warps": 4,
    }  # fmt: skip
    return (triton.cdiv(num_tokens, _PROGRAM_TOKENS), 2), arguments


def move_rows(
    starts: torch.Tensor, unit_bytes: int, block: torch.Tensor, k_buffer: torch.Tensor,
    v_buffer: torch.Tensor, slots: torch.Tensor, *, to_pool: bool,
) -> None:  # fmt: skip
    """Copy rows from ``block`` to slots of a layer, or the other way, on the current stream.

    ``starts`` int64 ``[2, T]``: where each token's keys, and its values, begin in ``block`` uint8, in units
    of ``unit_bytes``, of which rows are multiples: at most 16. The buffers are those of ``KVBuffers``;
    ``slots`` int64, one for each token.
    """
    # The thread's current GPU may be another one than the pool's.
    with Device.of(k_buffer).as_current():
        grid, arguments = move_launch(starts, unit_bytes, block, k_buffer, v_buffer, slots, to_pool=to_pool)
        copy_rows[grid](**arguments)
