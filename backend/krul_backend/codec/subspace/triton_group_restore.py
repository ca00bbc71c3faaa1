"""Launches the kernels of ``triton_group_kernels``, which decode a group of layers into the KV pool.

Importing this module imports triton.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import triton

from krul_backend.codec.coefficients.scales import RECORD_TOKENS, CoderTables
from krul_backend.codec.kernel_arguments import rotary_arguments, target_arguments
from krul_backend.codec.layout import LayerShape, empty_kv, put_rows
from krul_backend.codec.subspace.bases import vector_size
from krul_backend.codec.subspace.coded_tail import CodedTail, GroupTransform, tensors_of
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.codec.subspace.restore import GroupRestore, GroupTarget, wanted_rows
from krul_backend.codec.subspace.triton_group_kernels import decode_rans, restore_group_layer
from krul_backend.device import Device

_PAIR_TILE = 64
"""Channel pairs of a program, unless a head has more."""
_TILE = 128 * 128
_EXACT_POOL_TILE = 64 * 128
"""Elements of a program. Products without tensor cores take more registers."""
_EXACT_VALUES = 16
_REST_VALUES = 64
"""Coefficients that a program multiplies at a time."""
_NUM_WARPS = 8

_ALIGNMENT = 16
"""Bytes at whose multiples a tail's block begins on the device, and each table."""

_RECORD = np.dtype(
    {
        "names": [
            "first_byte", "end_byte", "num_tokens", "places_at", "num_coded", "num_exact", "exact_at",
            "rest_at",
        ],
        "formats": ["i4"] * 8,
    }
)  # fmt: skip
"""A row of the table that ``decode_rans`` reads, one for each record. The record's values begin in ``exact``
at 64 times ``exact_at``, in ``rest`` at 64 times ``rest_at``; its tail's scales begin at ``places_at``."""

_TAIL = np.dtype(
    {
        "names": [
            "places_at", "num_coded", "num_exact", "exact_at", "rest_at", "num_rows", "first_row_token",
            "end_token", "start_token", "slots_at", "num_stored", "stored_at", "step",
        ],
        "formats": ["i4"] * 12 + ["f4"],
    }
)  # fmt: skip
"""A row of the table that ``restore_group_layer`` reads, one for each tail. The tail's first row is token
``first_row_token`` of its segment, which begins at ``start_token`` of the conversation. The slot of token
``t`` of the segment is at place ``slots_at + t`` among the slots of all tails. The first
``num_stored`` tokens of the segment are stored as in the pool, at 16 times ``stored_at``."""

Buffers = tuple[torch.Tensor, torch.Tensor]
Offsets = npt.NDArray[np.int64]
"""The offsets of pieces that are stored back to back."""


class TritonGroupRestore(GroupRestore):
    """Tails of group ``number`` of a wave that a GPU decodes; ``write`` multiplies their coefficients."""

    def __init__(self, targets: Sequence[GroupTarget], wave: TailsOnDevice, number: int) -> None:
        super().__init__(targets)
        self.on_device: TailsOnDevice | None = wave
        self._number = number
        # Those of all groups, which are counted once.
        self.damaged = None if number else wave.damaged

    def _write(self, buffers: Sequence[Buffers]) -> None:
        """Write each layer, once, since what was decoded is freed then."""
        on_device = self.on_device
        assert on_device is not None
        slots = on_device.groups[self._number].slots
        shape = self.targets[0].tail.transform.shape
        for layer, of_layer in enumerate(buffers):
            if not any(target.first_tokens[layer] < target.tail.end_token for target in self.targets):
                continue
            with Device.of(of_layer[0]).as_current():
                # Not every GPU's triton rounds to fp8.
                is_fp8 = of_layer[0].dtype is not shape.dtype
                written = tensors_of(empty_kv(shape, len(slots), slots.device)) if is_fp8 else of_layer
                places = torch.arange(len(slots), device=slots.device) if is_fp8 else slots
                grid, arguments = layer_launch(on_device, layer, written, places, self._number)
                restore_group_layer[grid](**arguments)
                for rows in wanted_rows(self.targets, layer, slice(0, len(slots))) if is_fp8 else ():
                    for buffer, part in zip(of_layer, written, strict=True):
                        put_rows(buffer, slots[rows], part[rows])
        self.on_device = None


def begin_wave(groups: Sequence[Sequence[GroupTarget]], device: Device) -> list[TritonGroupRestore]:
    """Begin to decode the tails of several groups: the coefficients of all of them at once, so that it takes
    hardly longer than those of one. See ``begin_groups``."""
    with device.as_current():
        wave = TailsOnDevice(groups, device)
        grid, arguments = decode_launch(wave)
        decode_rans[grid](**arguments)
    return [TritonGroupRestore(targets, wave, number) for number, targets in enumerate(groups)]


@dataclass(frozen=True, eq=False)
class GroupOnDevice:
    """Says which slots the tails of one group of a wave go to. ``tails``, ``parts`` and ``slots``: see
    ``restore_group_layer``; ``first_tokens [layers, tails]``."""

    transform: GroupTransform
    tails: torch.Tensor
    parts: torch.Tensor
    first_tokens: torch.Tensor
    slots: torch.Tensor


class TailsOnDevice:
    """Tails of one or more groups of layers on a device: their bytes, tables about them, and room for
    coefficients.

    ``exact`` fp32 and ``rest`` bf16: see ``decode_rans``. For pools of 16 bits the large coefficients are
    multiplied as well as in fp32 (three products of tf32 parts), and the others in bf16. Coefficients of
    scale 0 are left out; ``scales`` and ``places`` int32 have those of the others, tail after tail.
    """

    def __init__(self, groups: Sequence[Sequence[GroupTarget]], device: Device) -> None:
        tails = [target.tail for targets in groups for target in targets]
        self.coder = tails[0].coder
        coded = [np.flatnonzero(tail.scales) for tail in tails]
        self.block, block_starts = _join_blocks(tails, device)
        self.of_tails = _tail_table(tails, coded, block_starts)
        of_records = _record_table(tails, self.of_tails, block_starts)
        first_tails = _starts(np.array([len(targets) for targets in groups]))
        of_groups = [
            table
            for first, targets in zip(first_tails, groups, strict=True)
            for table in _group_tables(self.of_tails[first : first + len(targets)], targets)
        ]
        self.records, self.scales, self.places, *uploaded = _upload_tables(
            [
                of_records.view(np.int32).reshape(len(of_records), -1),
                np.concatenate([tail.scales[places] for tail, places in zip(tails, coded, strict=True)]),
                np.concatenate(coded),
                *of_groups,
            ],
            device,
        )
        self.groups = [
            GroupOnDevice(targets[0].tail.transform, of_tails, parts, first_tokens, _slots(targets))
            for targets, of_tails, parts, first_tokens in zip(
                groups, uploaded[::3], uploaded[1::3], uploaded[2::3], strict=True
            )
        ]
        last = of_records[-1]
        num_exact = last["exact_at"] + last["num_exact"]
        num_rest = last["rest_at"] + last["num_coded"] - last["num_exact"]
        on_device: dict[str, Any] = {"device": device.torch_device}
        self.exact = torch.empty(int(num_exact) * RECORD_TOKENS, dtype=torch.float32, **on_device)
        self.rest = torch.empty(int(num_rest) * RECORD_TOKENS, dtype=torch.bfloat16, **on_device)
        self.damaged = torch.empty(len(of_records), dtype=torch.int32, **on_device)


def decode_launch(on_device: TailsOnDevice) -> tuple[tuple[int], dict[str, Any]]:
    """Grid and arguments of ``decode_rans``."""
    arguments = {
        "block": on_device.block,
        "records": on_device.records,
        "scales": on_device.scales,
        "tables": _tables_on(on_device.coder.tables, on_device.block.device),
        "shrink": SHRINK,
        "exact": on_device.exact,
        "rest": on_device.rest,
        "damaged": on_device.damaged,
        "num_warps": 1,
    }
    return (len(on_device.records),), arguments


def layer_launch(
    on_device: TailsOnDevice, layer: int, buffers: Buffers, slots: torch.Tensor, number: int = 0
) -> tuple[tuple[int, int], dict[str, Any]]:
    """Grid and arguments of ``restore_group_layer`` for layer number ``layer`` of group ``number``, which is
    written at ``slots`` of the buffers."""
    group = on_device.groups[number]
    transform = group.transform
    shape, mean = transform.shape, transform.basis.mean
    k_at = layer * vector_size(shape)
    padded_half, num_program_heads = _program_heads(shape)
    arguments = {
        "exact": on_device.exact, "rest": on_device.rest, "tails": group.tails, "parts": group.parts,
        "first_tokens": group.first_tokens[layer], "places": on_device.places,
        "exact_decoder": transform.basis.decoder, "decoder": transform.decoder,
        "vector_size": len(mean), "mean": mean,
        "k_at": k_at, "v_at": k_at + shape.num_kv_heads * shape.k_head_dim,
        "block": on_device.block,
        **target_arguments(*buffers, slots),
        **rotary_arguments(transform.rotary, slots.device),
        "num_heads": shape.num_kv_heads, "num_program_heads": num_program_heads,
        "k_dim": shape.k_head_dim, "v_dim": shape.v_head_dim, "padded_half": padded_half,
        "precision": "ieee" if shape.dtype is torch.float32 else "tf32x3",
        "num_program_tokens": _program_tokens(shape),
        "num_exact_values": _EXACT_VALUES, "num_rest_values": _REST_VALUES,
        "num_warps": _NUM_WARPS,
    }  # fmt: skip
    return (len(group.parts) * triton.cdiv(shape.num_kv_heads, num_program_heads), 2), arguments


def _group_tables(
    of_tails: npt.NDArray[np.void], targets: Sequence[GroupTarget]
) -> tuple[npt.NDArray[Any], ...]:
    """The tables of one group: its ``of_tails``, whose slots begin a tensor of their own from here on; which
    rows each program writes; and the first tokens ``[layers, tails]``."""
    of_tails["slots_at"] -= of_tails["slots_at"][0] + targets[0].tail.first_token
    num_program_tokens = _program_tokens(targets[0].tail.transform.shape)
    rows = [np.arange(0, num_rows, num_program_tokens) for num_rows in of_tails["num_rows"]]
    parts = [np.stack([np.full_like(of_tail, tail), of_tail], axis=1) for tail, of_tail in enumerate(rows)]
    first_tokens = np.array([target.first_tokens for target in targets]).T
    return of_tails.view(np.int32).reshape(len(targets), -1), np.concatenate(parts), first_tokens


def _slots(targets: Sequence[GroupTarget]) -> torch.Tensor:
    return targets[0].slots if len(targets) == 1 else torch.cat([target.slots for target in targets])


def _program_tokens(shape: LayerShape) -> int:
    """The number of tokens that each program of ``restore_group_layer`` writes."""
    padded_half, num_program_heads = _program_heads(shape)
    tile = _EXACT_POOL_TILE if shape.dtype is torch.float32 else _TILE
    return max(16, tile // (2 * num_program_heads * padded_half))


def _program_heads(shape: LayerShape) -> tuple[int, int]:
    """Channel pairs of a head, up to a power of two, and the heads of a program."""
    padded_half = triton.next_power_of_2(-(-max(shape.k_head_dim, shape.v_head_dim) // 2))
    return padded_half, max(1, _PAIR_TILE // padded_half)


def _num_records(tail: CodedTail) -> int:
    return -(-tail.end_token // RECORD_TOKENS) - tail.first_record


def _tail_table(
    tails: Sequence[CodedTail], coded: Sequence[npt.NDArray[np.intp]], block_starts: Offsets
) -> npt.NDArray[np.void]:
    """A ``_TAIL`` for each tail. ``coded``: the places of its coefficients; ``block_starts``: in bytes."""
    is_exact_pool = tails[0].transform.shape.dtype is torch.float32
    num_records = np.array([_num_records(tail) for tail in tails])
    first_tokens = np.array([tail.first_token for tail in tails])
    table = np.zeros(len(tails), _TAIL)
    table["num_coded"] = [len(places) for places in coded]
    table["num_exact"] = [
        len(places) if is_exact_pool else (places < tail.num_exact).sum()
        for tail, places in zip(tails, coded, strict=True)
    ]
    table["places_at"] = _starts(table["num_coded"])
    table["exact_at"] = _starts(num_records * table["num_exact"])
    table["rest_at"] = _starts(num_records * (table["num_coded"] - table["num_exact"]))
    table["first_row_token"] = [tail.first_record * RECORD_TOKENS for tail in tails]
    table["end_token"] = [tail.end_token for tail in tails]
    table["num_rows"] = table["end_token"] - table["first_row_token"]
    table["start_token"] = [tail.segment.start_token for tail in tails]
    table["slots_at"] = _starts(table["end_token"] - first_tokens) - first_tokens
    table["num_stored"] = [tail.segment.num_first_tokens if tail.num_raw_bytes else 0 for tail in tails]
    table["stored_at"] = block_starts // _ALIGNMENT
    table["step"] = [tail.step for tail in tails]
    return table


def _record_table(
    tails: Sequence[CodedTail], of_tails: npt.NDArray[np.void], block_starts: Offsets
) -> npt.NDArray[np.void]:
    """A ``_RECORD`` for each record of all tails."""
    tables = []
    for tail, of_tail, start in zip(tails, of_tails, block_starts, strict=True):
        numbers = np.arange(_num_records(tail))
        sizes = tail.record_num_bytes[: len(numbers)].astype(np.int64)
        num_rest = of_tail["num_coded"] - of_tail["num_exact"]
        table = np.zeros(len(numbers), _RECORD)
        table["end_byte"] = start + tail.num_raw_bytes + np.cumsum(sizes)
        table["first_byte"] = table["end_byte"] - sizes
        # Of the last record all tokens are decoded: only so their end is known.
        left = tail.segment.num_tokens - RECORD_TOKENS * (tail.first_record + numbers)
        table["num_tokens"] = np.minimum(left, RECORD_TOKENS)
        for name in ("places_at", "num_coded", "num_exact"):
            table[name] = of_tail[name]
        table["exact_at"] = of_tail["exact_at"] + of_tail["num_exact"] * numbers
        table["rest_at"] = of_tail["rest_at"] + num_rest * numbers
        tables.append(table)
    return np.concatenate(tables)


def _starts(sizes: npt.NDArray[np.signedinteger[Any]]) -> Offsets:
    """The offsets of pieces of these sizes that are stored back to back."""
    return np.cumsum(sizes, dtype=np.int64) - sizes


def _join_blocks(tails: Sequence[CodedTail], device: Device) -> tuple[torch.Tensor, Offsets]:
    """The blocks of all tails in one tensor of the device, and the byte at which each begins."""
    sizes = np.array([tail.block.numel() for tail in tails])
    aligned = -(-sizes // _ALIGNMENT) * _ALIGNMENT
    starts = _starts(aligned)
    joined = torch.empty(int(aligned.sum()), dtype=torch.uint8, device=device.torch_device)
    for tail, start, size in zip(tails, starts, sizes, strict=True):
        device.upload(tail.block, joined[start : start + size])
    return joined, starts


def _upload_tables(tables: Sequence[npt.NDArray[Any]], device: Device) -> list[torch.Tensor]:
    """Copy tables of whole numbers to the device at once, as int32."""
    sizes = np.array([table.size for table in tables])
    in_alignment = _ALIGNMENT // 4
    aligned = -(-sizes // in_alignment) * in_alignment
    starts = _starts(aligned)
    host = device.host_empty((int(aligned.sum()),), torch.int32)
    for table, start, size in zip(tables, starts, sizes, strict=True):
        host.numpy()[start : start + size] = table.ravel()
    on_device = device.upload(host)
    return [
        on_device[start : start + size].view(table.shape)
        for table, start, size in zip(tables, starts, sizes, strict=True)
    ]


@lru_cache(maxsize=4)
def _tables_on(tables: CoderTables, device: torch.device) -> torch.Tensor:
    """The tables for decoding on ``device``, int32; copied once, as the rotary tables are."""
    return torch.from_numpy(tables.decoding.view(np.int32).copy()).to(device)
