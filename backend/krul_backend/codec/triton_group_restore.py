"""Launches the kernels of ``triton_group_kernels``, which decode a group of layers into the KV pool.

Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import torch
import triton

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import CoderTables
from krul_backend.codec.restore import GroupTail, GroupTarget
from krul_backend.codec.subspace.bases import vector_size
from krul_backend.codec.subspace.coded_tail import CodedTail
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.codec.triton_group_kernels import decode_rans, restore_group_layer
from krul_backend.codec.triton_restore import rotary_arguments, target_arguments
from krul_backend.device import Device
from krul_backend.errors import CodecError

_PAIR_TILE = 64
"""Channel pairs of a program, unless a head has more."""
_TILE = 128 * 128
_EXACT_POOL_TILE = 64 * 128
"""Elements of a program. Products without tensor cores take more registers."""
_EXACT_VALUES = 16
_REST_VALUES = 64
"""Coefficients that a program multiplies at a time."""
_NUM_WARPS = 8


class TritonTail(GroupTail):
    """A tail that a GPU decodes: its coefficients first, which ``write_fused`` multiplies."""

    def __init__(self, tail: CodedTail, device: Device) -> None:
        super().__init__(tail)
        with device.as_current():
            self.block: torch.Tensor | None = device.upload(tail.block)
            self.coefficients: Coefficients | None = Coefficients(tail, device)
            self._damaged = self.coefficients.damaged
            grid, arguments = decode_launch(tail, self.block, self.coefficients)
            decode_rans[grid](**arguments)

    def check(self) -> None:
        damaged = self._damaged.nonzero()
        if len(damaged):
            raise CodecError(f"record {int(damaged[0]) + self.tail.first_record} of a group is damaged")


def write_fused(target: GroupTarget, buffers: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Write each layer of a tail, once, since what was decoded is freed then; see ``write_tails``."""
    decoded = target.tail
    assert isinstance(decoded, TritonTail)
    assert decoded.block is not None
    assert decoded.coefficients is not None
    for layer, (of_layer, token) in enumerate(zip(buffers, target.first_tokens, strict=True)):
        if token < decoded.tail.end_token:
            with Device.of(target.slots).as_current():
                grid, arguments = layer_launch(
                    decoded.tail, decoded.block, decoded.coefficients, layer, token, of_layer, target.slots
                )
                restore_group_layer[grid](**arguments)
    decoded.block = decoded.coefficients = None


class Coefficients:
    """Room on the device for the coefficients of a tail's records.

    ``exact`` fp32 and ``rest``: see ``decode_rans``. For pools of 16 bits the large coefficients,
    ``num_exact``, are multiplied as well as in fp32 (three products of tf32 parts), and the others in bf16.
    Coefficients of scale 0 are left out; ``scales`` and ``places`` int32 ``[num_coded]`` have those of the
    others. ``record_starts`` int32 ``[num_records + 1]``.
    """

    def __init__(self, tail: CodedTail, device: Device) -> None:
        self.num_tokens = tail.end_token - tail.first_record * RECORD_TOKENS
        self.num_records = -(-self.num_tokens // RECORD_TOKENS)
        coded = np.flatnonzero(tail.scales)
        self.num_coded = len(coded)
        is_exact_pool = tail.transform.shape.dtype is torch.float32
        self.num_exact = self.num_coded if is_exact_pool else int((coded < tail.num_exact).sum())
        starts = np.cumsum(tail.record_num_bytes[: self.num_records], dtype=np.int64) + tail.num_raw_bytes
        # As one copy. All rows start at a multiple of 16 bytes.
        width = -(-max(self.num_records + 1, self.num_coded, 1) // 4) * 4
        host = device.host_empty((3, width), torch.int32)
        rows = host.numpy()
        rows[0, : self.num_records + 1] = [tail.num_raw_bytes, *starts]
        rows[1, : self.num_coded] = tail.scales[coded]
        rows[2, : self.num_coded] = coded
        self.record_starts, self.scales, self.places = device.upload(host)
        size = self.num_records * RECORD_TOKENS
        self.exact = torch.empty(size * self.num_exact, dtype=torch.float32, device=device.torch_device)
        num_rest = self.num_coded - self.num_exact
        self.rest = torch.empty(size * num_rest, dtype=torch.bfloat16, device=device.torch_device)
        self.damaged = torch.empty(self.num_records, dtype=torch.int32, device=device.torch_device)


def decode_launch(
    tail: CodedTail, block: torch.Tensor, coefficients: Coefficients
) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and arguments of ``decode_rans``. ``block``: the tail's, on the device."""
    coder = tail.coder
    assert isinstance(coder, RansCoder), f"no kernel for {coder.name}"
    arguments = {
        "block": block,
        "record_starts": coefficients.record_starts,
        "scales": coefficients.scales,
        "tables": _tables_on(coder.tables, block.device),
        # Of the last record all tokens are decoded: only so their end is known.
        "num_tokens": min(
            coefficients.num_records * RECORD_TOKENS,
            tail.segment.num_tokens - tail.first_record * RECORD_TOKENS,
        ),
        "num_coded": coefficients.num_coded,
        "num_exact": coefficients.num_exact,
        "shrink": SHRINK,
        "exact": coefficients.exact,
        "rest": coefficients.rest,
        "damaged": coefficients.damaged,
        "num_warps": 1,
    }
    return (coefficients.num_records,), arguments


def layer_launch(
    tail: CodedTail,
    block: torch.Tensor,
    coefficients: Coefficients,
    layer: int,
    first_token: int,
    buffers: tuple[torch.Tensor, torch.Tensor],
    slots: torch.Tensor,
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and arguments of ``restore_group_layer`` for a tail's tokens from ``first_token`` on, in layer
    number ``layer`` of the group."""
    shape, end_token = tail.transform.shape, tail.end_token
    first_row_token = tail.first_record * RECORD_TOKENS
    k_at = layer * vector_size(shape)
    mean = tail.transform.basis.mean
    padded_half = triton.next_power_of_2(-(-max(shape.k_head_dim, shape.v_head_dim) // 2))
    num_program_heads = max(1, _PAIR_TILE // padded_half)
    is_exact_pool = shape.dtype is torch.float32
    num_columns = 2 * num_program_heads * padded_half
    num_program_tokens = max(16, (_EXACT_POOL_TILE if is_exact_pool else _TILE) // num_columns)
    first_block = (first_token - first_row_token) // num_program_tokens
    num_blocks = triton.cdiv(end_token - first_row_token, num_program_tokens) - first_block
    arguments = {
        "exact": coefficients.exact, "num_exact": coefficients.num_exact,
        "rest": coefficients.rest, "num_coded": coefficients.num_coded, "places": coefficients.places,
        "exact_decoder": tail.transform.basis.decoder, "decoder": tail.transform.decoder,
        "vector_size": len(mean), "mean": mean, "step": tail.step,
        "k_at": k_at, "v_at": k_at + shape.num_kv_heads * shape.k_head_dim,
        "first_tokens": block,
        "num_first_tokens": tail.segment.num_first_tokens if tail.num_raw_bytes else 0,
        **target_arguments(*buffers, slots),
        **rotary_arguments(tail.transform.rotary, slots.device),
        "num_rows": coefficients.num_tokens,
        "first_row_token": first_row_token, "first_slot_token": tail.first_token,
        "first_token": first_token, "end_token": end_token, "start_token": tail.segment.start_token,
        "num_heads": shape.num_kv_heads, "num_program_heads": num_program_heads,
        "k_dim": shape.k_head_dim, "v_dim": shape.v_head_dim, "padded_half": padded_half,
        "precision": "ieee" if is_exact_pool else "tf32x3",
        "num_program_tokens": num_program_tokens,
        "num_exact_values": _EXACT_VALUES, "num_rest_values": _REST_VALUES,
        "num_warps": _NUM_WARPS,
    }  # fmt: skip
    return (num_blocks * triton.cdiv(shape.num_kv_heads, num_program_heads), 2), arguments


@lru_cache(maxsize=4)
def _tables_on(tables: CoderTables, device: torch.device) -> torch.Tensor:
    """The tables for decoding on ``device``, int32; copied once, as the rotary tables are."""
    return torch.from_numpy(tables.decoding.view(np.int32).copy()).to(device)
