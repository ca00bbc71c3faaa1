"""The KV of a layer, and its block: one record per group of tokens, then a trailer for the rest."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

import torch

from krul_backend.errors import CodecError

FP8_TYPES = (torch.float8_e4m3fn, torch.float8_e4m3fnuz, torch.float8_e5m2)


def number_type(element_type: torch.dtype) -> torch.dtype:
    """The type to compute with a pool's elements in: for fp8 it is bf16, which has all their numbers."""
    return torch.bfloat16 if element_type in FP8_TYPES else element_type


def as_bytes(x: torch.Tensor) -> torch.Tensor:
    """View fp8 elements as their bytes, since few operators know fp8; any others stay as they are."""
    return x.view(torch.uint8) if x.dtype in FP8_TYPES else x


class PoolRows(NamedTuple):
    """Rows of one layer of a pool: ``slots`` (int64, all different) of ``k_buffer [num_slots, H, Dk]`` and
    ``v_buffer [num_slots, H, Dv]``, all on one device."""

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor
    slots: torch.Tensor


def to_elements(x: torch.Tensor, element_type: torch.dtype) -> torch.Tensor:
    """Round numbers to elements of a pool. Those beyond the largest one of fp8 become that: in some of its
    formats they would be no numbers."""
    if element_type in FP8_TYPES and x.dtype is not element_type:
        most = torch.finfo(element_type).max
        x = x.clamp(-most, most)
    return x.to(element_type)


def take_rows(buffer: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """Copies of the rows in ``slots`` of a buffer."""
    return as_bytes(buffer).index_select(0, slots).view(buffer.dtype)


def put_rows(buffer: torch.Tensor, slots: torch.Tensor, rows: torch.Tensor) -> None:
    """Write ``rows [T, ...]``, see ``to_elements``, to ``slots`` of a buffer."""
    as_bytes(buffer).index_copy_(0, slots, as_bytes(to_elements(rows, buffer.dtype)))


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's KV on one rank.

    ``k [T, num_kv_heads, k_head_dim]``, ``v [T, num_kv_heads, v_head_dim]``.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def k_token_bytes(self) -> int:
        return self.num_kv_heads * self.k_head_dim * self.dtype.itemsize

    @property
    def v_token_bytes(self) -> int:
        return self.num_kv_heads * self.v_head_dim * self.dtype.itemsize

    @property
    def of_numbers(self) -> LayerShape:
        """Return the shape of the same KV as numbers: see ``LayerKV.numbers``."""
        return replace(self, dtype=number_type(self.dtype))


@dataclass(frozen=True)
class LayerKV:
    """Keys ``k [T, num_kv_heads, k_head_dim]`` and values ``v [T, num_kv_heads, v_head_dim]`` of one layer.

    In the pool's dtype, on any device. Keys carry their rotary embedding, as attention sees them.
    """

    k: torch.Tensor
    v: torch.Tensor

    @property
    def numbers(self) -> LayerKV:
        """Return fp8 elements as numbers in bf16, and any others as they are."""
        return LayerKV(*(x.to(number_type(x.dtype)) for x in (self.k, self.v)))


def empty_kv(shape: LayerShape, num_tokens: int, device: torch.device) -> LayerKV:
    """Room for the KV of ``num_tokens`` tokens, with undefined values."""
    k, v = (
        torch.empty(num_tokens, shape.num_kv_heads, head_dim, dtype=shape.dtype, device=device)
        for head_dim in (shape.k_head_dim, shape.v_head_dim)
    )
    return LayerKV(k, v)


def rounding_errors(kv: LayerKV, rows: torch.Tensor) -> LayerKV:
    """Return random errors, fp32, as large as those of rounding numbers near the fp8 elements ``kv`` to fp8:
    in the tokens ``rows`` (int64, on the device of ``kv``), and 0 in all others."""
    parts = []
    for x in (kv.k, kv.v):
        kind, generator = torch.finfo(x.dtype), torch.Generator(x.device).manual_seed(0)
        numbers = take_rows(x, rows).float().abs().clamp_min(kind.smallest_normal)
        spacing = torch.exp2(numbers.log2().floor()) * kind.eps
        # Of numbers that are spread evenly between two elements.
        signs = torch.randint(2, spacing.shape, generator=generator, device=x.device) - 0.5
        errors = torch.zeros(x.shape, device=x.device)
        parts.append(errors.index_copy_(0, rows, spacing * signs / math.sqrt(3)))
    return LayerKV(*parts)


ReadLayer = Callable[[int], LayerKV]
"""Reads one layer's KV of a segment. It keeps nothing: a second call for a layer reads again."""


ALIGNMENT_BYTES = 16
"""Every section starts at a multiple of this, so that a kernel can read 16 bytes at once."""

_MAX_RUN_TOKENS = 1024
"""Tokens that are held in fp32 at a time. It bounds the working memory of coding a segment of any length."""

Views = dict[str, torch.Tensor]
"""Typed views of the sections of a run of records, by name."""


@dataclass(frozen=True)
class Section:
    """An array in a record: ``[group tokens, *shape]`` if ``per_token``, else ``[*shape]``."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    per_token: bool


@dataclass(frozen=True)
class RecordLayout:
    """Places sections for ``num_tokens`` tokens one after the other; each start and the end are aligned."""

    sections: tuple[Section, ...]
    num_tokens: int

    @cached_property
    def _places(self) -> tuple[tuple[Section, tuple[int, ...], int, int], ...]:
        """Section, shape, first byte, end byte."""
        places = []
        end = 0
        for section in self.sections:
            shape = (self.num_tokens, *section.shape) if section.per_token else section.shape
            first = _aligned(end)
            end = first + math.prod(shape) * section.dtype.itemsize
            places.append((section, shape, first, end))
        return tuple(places)

    @cached_property
    def num_bytes(self) -> int:
        return _aligned(self._places[-1][3]) if self._places else 0

    def byte_offsets(self) -> dict[str, int]:
        """First byte of each section in the record."""
        return {section.name: first for section, _, first, _ in self._places}

    def views(self, records: torch.Tensor) -> Views:
        """``records`` uint8 ``[R, num_bytes]``, rows contiguous. Views ``[R, *shape of the section]``."""
        num_records = records.shape[0]
        return {
            section.name: records[:, first:end].view(section.dtype).view(num_records, *shape)
            # torch cannot view an empty slice as another dtype: its strides do not fit.
            if first < end
            else records.new_empty((num_records, *shape), dtype=section.dtype)
            for section, shape, first, end in self._places
        }


@dataclass(frozen=True)
class GroupRun:
    """Neighbouring groups of equal length that are coded in one go.

    They cover tokens ``[first_token, end_token)`` of the segment.
    """

    first_token: int
    num_groups: int
    group_tokens: int

    @property
    def end_token(self) -> int:
        return self.first_token + self.num_groups * self.group_tokens


@dataclass(frozen=True)
class BlockLayout:
    """Describes the bytes of one layer of one segment.

    ::

        block = | record of group 0 | record of group 1 | ... | record of the last group | trailer |

    Groups are counted from the segment's first token; the last one may be shorter, and its record is then
    exactly as much smaller. From any group on, the rest of the block is one contiguous range, so a restore
    that needs only the end of a layer reads only that.
    """

    record: tuple[Section, ...]
    trailer: tuple[Section, ...]
    group_size: int
    num_tokens: int

    @cached_property
    def group_record(self) -> RecordLayout:
        """The record of a full group."""
        return RecordLayout(self.record, self.group_size)

    @cached_property
    def last_record(self) -> RecordLayout:
        """The record of the shorter last group. If all groups are full it is empty, and not stored."""
        return RecordLayout(self.record, self.num_tokens % self.group_size)

    @cached_property
    def trailer_record(self) -> RecordLayout:
        return RecordLayout(self.trailer, 0)

    @cached_property
    def records_num_bytes(self) -> int:
        """Bytes of all records. The trailer starts there."""
        return self.group_start(-(-self.num_tokens // self.group_size))

    @cached_property
    def num_bytes(self) -> int:
        return self.records_num_bytes + self.trailer_record.num_bytes

    def group_start(self, group: int) -> int:
        """First byte of the record of ``group``; for the number of groups, the end of all records."""
        num_full = self.num_tokens // self.group_size
        if group <= num_full:
            return group * self.group_record.num_bytes
        return num_full * self.group_record.num_bytes + self.last_record.num_bytes

    def byte_range(self, first_token: int, end_token: int) -> range:
        """Bytes of the groups that cover tokens ``[first_token, end_token)``, without the trailer."""
        first_group, end_group = first_token // self.group_size, -(-end_token // self.group_size)
        return range(self.group_start(first_group), self.group_start(end_group))

    def runs(self, first_token: int, end_token: int) -> Iterator[GroupRun]:
        """The groups that cover tokens ``[first_token, end_token)``, as runs."""
        group, end_group = first_token // self.group_size, -(-end_token // self.group_size)
        num_full = min(end_group, self.num_tokens // self.group_size)
        step = max(1, _MAX_RUN_TOKENS // self.group_size)
        for first in range(group, num_full, step):
            yield GroupRun(first * self.group_size, min(step, num_full - first), self.group_size)
        if end_group > num_full:
            yield GroupRun(num_full * self.group_size, 1, self.num_tokens % self.group_size)

    def new_block(self, device: torch.device) -> torch.Tensor:
        """A block of zeros, uint8 ``[num_bytes]``, so that the gaps between sections are zero."""
        return torch.zeros(self.num_bytes, dtype=torch.uint8, device=device)

    def check(self, block: torch.Tensor, first_token: int) -> torch.Tensor:
        """Return a block that can be viewed: the whole one, or its end from a group on.

        That group must not start after ``first_token``. An unaligned block is copied.

        Raises:
            CodecError: not bytes, or of a size that no such block has.
        """
        if block.dtype is not torch.uint8 or block.ndim != 1:
            raise CodecError(f"a block is uint8 in one dimension, got {block.dtype} {tuple(block.shape)}")
        missing = self.num_bytes - block.numel()
        group = -1 if missing < 0 else missing // max(1, self.group_record.num_bytes)
        if missing < 0 or group > first_token // self.group_size or self.group_start(group) != missing:
            raise CodecError(
                f"a block of {self.num_tokens} tokens has {self.num_bytes} bytes, "
                f"those before the group of token {first_token} may be missing; got {block.numel()}"
            )
        is_aligned = block.is_contiguous() and block.storage_offset() % ALIGNMENT_BYTES == 0
        return block if is_aligned else block.clone(memory_format=torch.contiguous_format)

    def record_views(self, block: torch.Tensor, run: GroupRun) -> Views:
        """Sections of the records of ``run`` in a checked block: ``[num_groups, *shape of the section]``."""
        layout = self.group_record if run.group_tokens == self.group_size else self.last_record
        missing = self.num_bytes - block.numel()
        first = self.group_start(run.first_token // self.group_size) - missing
        records = block[first : first + run.num_groups * layout.num_bytes]
        return layout.views(records.view(run.num_groups, layout.num_bytes))

    def trailer_views(self, block: torch.Tensor) -> Views:
        """Sections of the trailer in a checked block, in their own shapes."""
        first = self.records_num_bytes - (self.num_bytes - block.numel())
        trailer = block[first:].view(1, self.trailer_record.num_bytes)
        return {name: view[0] for name, view in self.trailer_record.views(trailer).items()}


def in_groups(x: torch.Tensor, run: GroupRun) -> torch.Tensor:
    """``x [tokens of the run, ...]`` as ``[num_groups, group_tokens, ...]``."""
    return x.reshape(run.num_groups, run.group_tokens, *x.shape[1:])


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
