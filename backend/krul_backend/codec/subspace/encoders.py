"""Multiplies vectors of groups of layers with their bases: of one group on a CPU, of several on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import NamedTuple

import torch
from torch.nn.functional import pad

from krul_backend.codec.layout import LayerKV, ReadLayer
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import SHIFT_SUMS, ModelBases
from krul_backend.codec.subspace.coded_tail import KeptMemory
from krul_backend.codec.subspace.restore import can_fuse_groups
from krul_backend.codec.subspace.vectors import BlockReads, TokenRows, put_vectors
from krul_backend.codec.unit_restore import NativeTails
from krul_backend.device import Device

_EXACT_COEFFICIENTS = 64
"""The first coefficients, which are the largest, are always computed in fp32. In bf16 their errors would come
near to the step."""

MOST_VECTOR_BYTES = 64 << 20
"""Of vectors of several groups that a GPU makes at a time, and of the blocks that they are made of."""


class GroupLayers(NamedTuple):
    """Layers of some groups of a segment: those of each group, or where a kernel makes the vectors their
    ``blocks [layers, rows.num_bytes]``, as numbers, with ``rows``."""

    layers: Sequence[Sequence[LayerKV]]
    blocks: torch.Tensor | None = None
    rows: NativeTails | None = None


@dataclass(frozen=True, eq=False)
class GroupEncoders:
    """Groups with as many layers whose vectors are multiplied together: on a CPU each is alone.

    ``means [G, D]``. ``exact [G, D, any]``: the columns of their encoders that are multiplied in fp32.
    ``others [G, D, any]``, the columns after these, and ``outside [G, D, any]``: in the type that most are
    multiplied in. Columns that a group does not have are 0. ``shift_weights``, ``shift_places [G, D]``: see
    ``GroupBasis.shift_sums``.
    """

    bases: ModelBases
    rotary: RotaryTable | None
    memory: KeptMemory
    groups: slice
    means: torch.Tensor
    exact: torch.Tensor
    others: torch.Tensor
    outside: torch.Tensor
    shift_weights: torch.Tensor
    shift_places: torch.Tensor

    @classmethod
    def of(
        cls, bases: ModelBases, rotary: RotaryTable | None, memory: KeptMemory, dtype: torch.dtype
    ) -> list[GroupEncoders]:
        """Those of all groups. ``dtype``: in which most are multiplied, bf16 or fp32."""
        found, is_alone = [], Device.of(bases.groups[0].mean).shares_cores
        num_exact = None if dtype is torch.float32 else _EXACT_COEFFICIENTS
        numbers = range(len(bases.groups))
        for _, run in groupby(numbers, lambda each: each if is_alone else len(bases.groups[each].layers)):
            groups = list(run)
            tensors = [
                (
                    basis.mean,
                    basis.encoder[:, :num_exact],
                    basis.encoder[:, basis.rank if num_exact is None else num_exact :].to(dtype),
                    basis.outside.to(dtype),
                    basis.shift_weights,
                    basis.shift_places,
                )
                for basis in bases.groups[groups[0] : groups[-1] + 1]
            ]
            stacked = map(_stacked, zip(*tensors, strict=True))
            found.append(cls(bases, rotary, memory, slice(groups[0], groups[-1] + 1), *stacked))
        return found

    @property
    def rank(self) -> int:
        """The most coefficients of a group."""
        return self.exact.shape[2] + self.others.shape[2]

    def at_once(self, num_rows: int, num_tokens: int) -> Iterator[GroupEncoders]:
        """The groups of which so many rows are multiplied at a time, of a segment of ``num_tokens``."""
        shape, first = self.bases.shape, self.groups.start
        layer_bytes = num_tokens * (shape.k_token_bytes + shape.v_token_bytes)
        block_bytes = len(self.bases.groups[first].layers) * layer_bytes
        most = max(1, MOST_VECTOR_BYTES // max(block_bytes, 4 * num_rows * self.means.shape[1]))
        names = ("means", "exact", "others", "outside", "shift_weights", "shift_places")
        for start in range(first, self.groups.stop, most):
            end = min(start + most, self.groups.stop)
            parts = {name: getattr(self, name)[start - first : end - first] for name in names}
            yield replace(self, groups=slice(start, end), **parts)

    def read(self, read: ReadLayer) -> GroupLayers:
        """Read each layer of the groups once."""
        groups, device = [basis.layers for basis in self.bases.groups[self.groups]], Device.of(self.means)
        if isinstance(read, BlockReads) and can_fuse_groups(self.bases.shape, device):
            blocks = [[*read.blocks(layer)] for layers in groups for layer in layers]
            joined = device.upload_joined([piece for pieces in blocks for piece in pieces])
            numbers = joined.view(read.rows.shape.dtype).to(self.bases.shape.dtype)
            return GroupLayers((), numbers.view(len(blocks), -1), read.rows)
        return GroupLayers([[read(layer).numbers for layer in layers] for layers in groups])

    def vectors(
        self, source: GroupLayers, rows: TokenRows, num_first: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The vectors of tokens of a segment, in order, less the mean of their group: fp32 ``[G, n, D]``, on
        a CPU in memory that the next ones are written to, and in the type that most are multiplied in. They
        are 0 for the segment's ``num_first`` first tokens, of which nothing is lost."""
        size, dtype = (len(self.means), len(rows.index), self.means.shape[1]), self.outside.dtype
        vectors = self.memory.tensor("vectors", size, torch.float32, self.means.device)
        if source.blocks is None:
            for layers, mean, out in zip(source.layers, self.means, vectors, strict=True):
                put_vectors(layers, rows, mean, out)
            vectors[:, : int((rows.index < num_first).sum())] = 0
            return vectors, vectors.to(dtype)
        from krul_backend.codec.subspace.triton_vectors import put_on_device

        lowered = vectors if dtype is vectors.dtype else torch.empty_like(vectors, dtype=dtype)
        index = Device.of(vectors).from_host(rows.index)
        put_on_device(
            *(source.blocks, source.rows, index, num_first, rows.start_token, self.bases.shape, self.rotary),
            *(self.means, vectors, lowered),
        )
        return vectors, lowered

    def put_coefficients(self, vectors: torch.Tensor, lowered: torch.Tensor, out: torch.Tensor) -> None:
        """Write the first coefficients of what ``vectors`` returned to ``out`` fp32 ``[G, n, any]``."""
        num_kept = out.shape[2]
        num_exact = min(num_kept, self.exact.shape[2])
        multiply(vectors, self.exact[:, :, :num_exact], out[:, :, :num_exact])
        if num_exact < num_kept:
            out[:, :, num_exact:] = multiply(lowered, self.others[:, :, : num_kept - num_exact])

    def lost_outside(self, lowered: torch.Tensor) -> torch.Tensor:
        """The squares of what ``lowered`` vectors lose outside of the bases: fp32 ``[G, n]``."""
        return multiply(lowered, self.outside).float().square_().sum(2)

    def shift_sums(self, vectors: torch.Tensor) -> torch.Tensor:
        """``GroupBasis.shift_sums`` of each group, ``vectors [G, n, D]``: ``[G, n, 128]``."""
        weighted = vectors * self.shift_weights[:, None]
        sums = vectors.new_zeros(*vectors.shape[:2], SHIFT_SUMS)
        return sums.scatter_add_(2, self.shift_places[:, None].expand_as(weighted), weighted)


def multiply(left: torch.Tensor, right: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
    """Products of matrices ``[G, any, any]``; that of a single one is as fast as without ``G``."""
    if len(left) == 1:
        return torch.mm(left[0], right[0], out=None if out is None else out[0])[None]
    return torch.bmm(left, right, out=out)


def _stacked(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """``[G, ...]``, with zeros behind what is shorter in its last dimension; of a single one a view."""
    if len(parts) == 1:
        return parts[0][None]
    width = max(part.shape[-1] for part in parts)
    return torch.stack([pad(part, (0, width - part.shape[-1])) for part in parts])
