"""Launches the kernels of ``triton_kernels``, which decode one layer of a segment into the KV pool.

Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import torch
import triton

from krul_backend.codec.kernel_arguments import rotary_arguments, target_arguments
from krul_backend.codec.layout import PoolRows, RecordLayout
from krul_backend.codec.pairs.shared_pair import SharedPair
from krul_backend.codec.pairs.triton_kernels import restore_groups, restore_retained
from krul_backend.codec.pairs.units import FusedUnit
from krul_backend.codec.pairs.vector_format import CodeFormat, FloatFormat, VectorFormat
from krul_backend.device import Device

_LOWER = 0
_NUM_WARPS = 4
_HALF_TILE = 1024
"""Elements of one half of a program's vectors: 8 for each lane, so that bf16 is stored 16 bytes at a time."""
_RETAINED_TILE = 2048
_PROGRAM_HEADS = (4, 3, 2, 1)


def restore_fused(
    unit: FusedUnit, index: int, blocks: Sequence[torch.Tensor], tokens: range, target: PoolRows
) -> None:
    """Do ``UnitCodec.restore`` for what ``can_fuse`` accepts, with one kernel; a pair takes a second one.

    Raises:
        CodecError: a block that this unit cannot have written.
    """
    checked = unit.check(index, blocks, tokens.start)
    # The thread's current GPU may be another one than the pool's.
    with Device.of(target.k_buffer).as_current():
        grid, arguments = group_launch(unit, index, checked, tokens, target)
        restore_groups[grid](**arguments)
        if isinstance(unit, SharedPair) and sum(unit.retained.k) + sum(unit.retained.v) > 0:
            # It overwrites rows that the first kernel has just written.
            grid, arguments = retained_launch(unit, index, checked, tokens, target)
            restore_retained[grid](**arguments)


def group_launch(
    unit: FusedUnit, index: int, blocks: Sequence[torch.Tensor], tokens: range, target: PoolRows
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and arguments of ``restore_groups``. ``blocks``: checked."""
    place = unit.place
    shape, group_size = place.shape, place.group_size
    k_elements, v_elements = (_elements(part) for part in unit.formats)
    lower, own = unit.layouts[_LOWER], unit.layouts[index]
    k_padded_half, v_padded_half = (
        triton.next_power_of_2(-(-dim // 2)) for dim in (shape.k_head_dim, shape.v_head_dim)
    )
    num_program_tokens = min(
        max(1, _HALF_TILE // max(k_padded_half, v_padded_half)), triton.next_power_of_2(group_size)
    )
    num_program_heads = next(n for n in _PROGRAM_HEADS if shape.num_kv_heads % n == 0)
    num_groups = -(-tokens.stop // group_size) - tokens.start // group_size
    token_blocks = num_groups * triton.cdiv(group_size, num_program_tokens)
    arguments = {
        "block": blocks[0], "missing_bytes": lower.num_bytes - blocks[0].numel(),
        "own_block": blocks[-1], "own_missing_bytes": own.num_bytes - blocks[-1].numel(),
        **target_arguments(*target),
        **rotary_arguments(place.rotary, target.k_buffer.device),
        "first_token": tokens.start, "end_token": tokens.stop,
        "start_token": place.start_token, "num_full_groups": place.num_tokens // group_size,
        **_section_offsets("last_", unit.formats, lower.last_record, own.last_record),
        **_section_offsets("", unit.formats, lower.group_record, own.group_record),
        "record_bytes": lower.group_record.num_bytes, "own_record_bytes": own.group_record.num_bytes,
        "group_size": group_size, "num_heads": shape.num_kv_heads,
        "k_dim": shape.k_head_dim, "v_dim": shape.v_head_dim,
        "k_padded_half": k_padded_half, "v_padded_half": v_padded_half,
        "k_bits": k_elements.bits, "v_bits": v_elements.bits,
        "is_k_per_channel": k_elements.is_per_channel, "is_v_per_channel": v_elements.is_per_channel,
        "has_norm": isinstance(unit, SharedPair),
        "num_program_tokens": num_program_tokens, "num_program_heads": num_program_heads,
        "num_warps": _NUM_WARPS,
    }  # fmt: skip
    return (token_blocks * (shape.num_kv_heads // num_program_heads), 2), arguments


def retained_launch(
    pair: SharedPair, index: int, blocks: Sequence[torch.Tensor], tokens: range, target: PoolRows
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and arguments of ``restore_retained``. ``blocks``: checked."""
    num_k_rows, num_v_rows = sum(pair.retained.k), sum(pair.retained.v)
    shape = pair.place.shape
    lower = pair.layouts[_LOWER].trailer_views(blocks[0])
    own = pair.layouts[index].trailer_views(blocks[-1])
    head_ends = Device.of(target.k_buffer).from_list(
        [list(accumulate(counts)) for counts in (pair.retained.k, pair.retained.v)], torch.int32
    )
    k_padded_dim, v_padded_dim = (triton.next_power_of_2(dim) for dim in (shape.k_head_dim, shape.v_head_dim))
    num_program_rows = max(1, _RETAINED_TILE // max(k_padded_dim, v_padded_dim))
    arguments = {
        "k_tokens": lower["k_tokens"], "k_rows": own["k_rows"], "k_head_ends": head_ends[0],
        "v_tokens": lower["v_tokens"], "v_rows": own["v_rows"], "v_head_ends": head_ends[1],
        "num_k_rows": num_k_rows, "num_v_rows": num_v_rows,
        **target_arguments(*target),
        "first_token": tokens.start, "end_token": tokens.stop,
        "num_heads": shape.num_kv_heads, "padded_heads": triton.next_power_of_2(shape.num_kv_heads),
        "k_dim": shape.k_head_dim, "k_padded_dim": k_padded_dim,
        "v_dim": shape.v_head_dim, "v_padded_dim": v_padded_dim,
        "num_program_rows": num_program_rows, "num_warps": _NUM_WARPS,
    }  # fmt: skip
    return (triton.cdiv(max(num_k_rows, num_v_rows), num_program_rows), 2), arguments


def _section_offsets(
    prefix: str, formats: Sequence[VectorFormat], record: RecordLayout, own_record: RecordLayout
) -> dict[str, int]:
    """The arguments of ``restore_groups`` that say where sections start; 0 for sections a format has not."""
    places, own_places = record.byte_offsets(), own_record.byte_offsets()
    offsets = {}
    for part in formats:
        offsets[f"{prefix}{part.name}_data_at"] = places[_elements(part).section]
        offsets[f"{prefix}{part.name}_scale_at"] = places.get(f"{part.name}_scale", 0)
        offsets[f"{prefix}{part.name}_offset_at"] = places.get(f"{part.name}_offset", 0)
        offsets[f"{prefix}{part.name}_norm_at"] = own_places.get(f"{part.name}_norm", 0)
    return offsets


@dataclass(frozen=True)
class _Elements:
    """``section`` has the elements. ``bits`` of one element."""

    section: str
    bits: int
    is_per_channel: bool


def _elements(part: VectorFormat) -> _Elements:
    match part:
        case FloatFormat():
            return _Elements(part.name, part.dtype.itemsize * 8, is_per_channel=False)
        case CodeFormat():
            return _Elements(f"{part.name}_codes", part.bits, is_per_channel=part.per_channel)
    raise AssertionError(f"no kernel for {part}")
