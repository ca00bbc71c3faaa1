"""Decodes the blocks of one segment: any tail of any group of layers."""

from __future__ import annotations

import math
import threading
from bisect import bisect
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.codec.coefficients.coders import CoefficientCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import base_scales, scales_of
from krul_backend.codec.interface import LayerKV
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.segment_layout import SegmentLayout
from krul_backend.codec.subspace.bases import ModelBases, split_vectors
from krul_backend.codec.subspace.parameters import SubspaceParameters
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.errors import CodecError

_CPU = torch.device("cpu")

_LEAST_ROWS = 64
"""At least so many rows are multiplied at a time. Products of fewer rows add up in another order, and a token
would depend on where the tail that it is decoded with begins."""

_LEAST_EXACT_SCALE = 33
"""Coefficients up to the last one of this scale, a mean magnitude of 8 steps, are multiplied in fp32. In bf16
their errors would come near to those of their levels."""

_CHUNK_RECORDS = 16

CHUNK_TOKENS = _CHUNK_RECORDS * RECORD_TOKENS
"""The most tokens whose vectors are held in fp32 at a time."""


@dataclass(frozen=True)
class SegmentTokens:
    """The tokens of a segment: ``[start_token, start_token + num_tokens)`` of its conversation. The first
    ``num_first_tokens`` of them are stored as in the pool."""

    start_token: int
    num_tokens: int
    num_first_tokens: int


class KeptMemory(threading.local):
    """The memory in which each thread decodes. It is kept, since the system is slow to give new pages."""

    def __init__(self) -> None:
        self._kept: dict[str, torch.Tensor] = {}

    def tensor(
        self,
        name: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device = _CPU,
    ) -> torch.Tensor:
        """A tensor with undefined values, in the memory of the last one with this name."""
        size = math.prod(shape)
        kept = self._kept.get(name)
        if kept is None or len(kept) < size or (kept.dtype, kept.device) != (dtype, device):
            kept = self._kept[name] = torch.empty(size, dtype=dtype, device=device)
        return kept[:size].view(*shape)


class SubspaceDecoder(SegmentLayout):
    """Decodes the blocks of one segment. ``SubspaceCodec.open`` makes it.

    The block of a group is that of its first layer; the other layers of the group have none of their own.
    ``decoders``: those of the bases, in the element type in which small coefficients are multiplied.
    ``stored_as``: the groups. ``damage``: see ``EncodedSegment``.
    """

    def __init__(
        self,
        bases: ModelBases,
        decoders: Sequence[torch.Tensor],
        rotary: RotaryTable | None,
        coder: CoefficientCoder,
        parameters: SubspaceParameters,
        segment: SegmentTokens,
        memory: KeptMemory,
    ) -> None:
        super().__init__(bases.num_layers, segment.start_token, segment.num_tokens, RECORD_TOKENS)
        self.stored_as = bases.layer_groups(coder.name)
        self.damage = parameters.damage
        self._bases = bases
        self._decoders = decoders
        self._rotary = rotary
        self._coder = coder
        self._parameters = parameters
        self._segment = segment
        self._memory = memory

    @cached_property
    def native_units(self) -> tuple[None, ...]:
        """``[L]``, all None: no layer is stored natively and alone. See ``SegmentDecoder.native_units``."""
        return (None,) * self._num_layers

    def group_of(self, layer: int) -> int:
        """The group that a layer belongs to."""
        self._check_layer(layer)
        return bisect(self.stored_as.ends, layer)

    def sources(self, layer: int) -> tuple[int, ...]:
        return (self.stored_as.groups[self.group_of(layer)].start,)

    def tail_start(self, layer: int, first_token: int) -> int:
        record, group = first_token // RECORD_TOKENS, self.group_of(layer)
        if record == 0 or not self.whole_num_bytes(layer):
            return 0
        sizes = self._parameters.groups[group].record_num_bytes
        return self._first_tokens_num_bytes(group) + int(sizes[:record].sum())

    def whole_num_bytes(self, layer: int) -> int:
        return self.group_num_bytes[self.group_of(layer)] if self.sources(layer) == (layer,) else 0

    @cached_property
    def group_num_bytes(self) -> tuple[int, ...]:
        """The size of each group's whole block."""
        return tuple(
            self._first_tokens_num_bytes(group) + int(parameters.record_num_bytes.sum())
            for group, parameters in enumerate(self._parameters.groups)
        )

    def decode(self, group: int, block: torch.Tensor, first_token: int) -> list[LayerKV]:
        """Decode tokens ``[first_token, num_tokens)`` of the segment in all layers of a group.

        ``block``: uint8 on the CPU, the group's from the ``tail_start`` of ``first_token`` on. Returns new
        tensors in the pool's dtype on the bases' device, keys with their rotary embedding.

        Raises:
            CodecError: no such token, a block of another size, or a damaged one.
        """
        shape, device = self._bases.shape, self._bases.groups[group].mean.device
        num_rows = max(0, self._segment.num_tokens - first_token)
        decoded = [
            LayerKV(
                *(
                    torch.empty((num_rows, shape.num_kv_heads, dim), dtype=shape.dtype, device=device)
                    for dim in (shape.k_head_dim, shape.v_head_dim)
                )
            )
            for _ in self._bases.groups[group].layers
        ]
        for rows, chunk in self.chunks(group, block, first_token):
            for of_layer, part in zip(decoded, chunk, strict=True):
                of_layer.k[rows], of_layer.v[rows] = part.k, part.v
        return decoded

    def chunks(
        self, group: int, block: torch.Tensor, first_token: int
    ) -> Iterator[tuple[slice, list[LayerKV]]]:
        """Decode like ``decode``, but a part of the tokens at a time, and in fp32.

        Yields the rows of a part, counted from ``first_token``, and the KV of each layer. It lies in memory
        that this thread decodes the next part or block into.

        Raises:
            CodecError: as for ``decode``. What was yielded before is undefined then.
        """
        num_tokens = self._segment.num_tokens
        if not 0 <= first_token < num_tokens:
            raise CodecError(f"token {first_token} of a segment of {num_tokens} tokens")
        first_layer = self._bases.groups[group].first_layer
        expected = self.group_num_bytes[group] - self.tail_start(first_layer, first_token)
        if block.dtype is not torch.uint8 or block.ndim != 1 or block.numel() != expected:
            raise CodecError(f"a block of {expected} bytes is needed, got {block.dtype} {tuple(block.shape)}")
        parameters, first_record = self._parameters.groups[group], first_token // RECORD_TOKENS
        num_raw_bytes = self._first_tokens_num_bytes(group) if first_record == 0 else 0
        magnitudes = self._bases.groups[group].magnitudes.cpu().numpy()
        scales = scales_of(base_scales(magnitudes, self._parameters.step), parameters.offsets)
        # Coefficients matter less and less: with a large step all from some place on are zero.
        scales = scales[: _end_of(scales > 0)]
        num_exact = _end_of(scales >= _LEAST_EXACT_SCALE)
        coded = block[num_raw_bytes:].numpy()
        for record in range(first_record, len(parameters.record_num_bytes), _CHUNK_RECORDS):
            sizes = parameters.record_num_bytes[record : record + _CHUNK_RECORDS]
            data, coded = np.split(coded, [int(sizes.sum())])
            first, start = max(first_token, record * RECORD_TOKENS), record * RECORD_TOKENS
            end = min(start + CHUNK_TOKENS, num_tokens)
            values = self._values(data, sizes, scales, first - start, end - start)
            layers = self._reconstruct(group, values, num_exact, first, end)
            if first < self._segment.num_first_tokens:
                self._put_first_tokens(block[:num_raw_bytes], first, layers)
            yield slice(first - first_token, end - first_token), layers

    def _values(
        self,
        data: NDArray[np.uint8],
        record_num_bytes: NDArray[np.uint32],
        scales: NDArray[np.uint8],
        first_row: int,
        end_row: int,
    ) -> torch.Tensor:
        """The coefficients of some records, in steps: fp32, those of rows ``[first_row, end_row)``, and then
        zeros up to the least number of rows that are multiplied."""
        num_rows = max(end_row, first_row + _LEAST_ROWS)
        values = self._memory.tensor("values", (num_rows, len(scales)), torch.float32)
        values[end_row:] = 0
        self._coder.decode(
            data,
            record_num_bytes,
            scales,
            values[:end_row].numpy(),
            shrink=SHRINK,
            num_threads=torch.get_num_threads(),
        )
        return values[first_row:]

    def _reconstruct(
        self, group: int, values: torch.Tensor, num_exact: int, first: int, end: int
    ) -> list[LayerKV]:
        """The KV of tokens ``[first, end)`` in the layers of a group. ``values``: see ``_values``."""
        basis, decoder, shape = self._bases.groups[group], self._decoders[group], self._bases.shape
        num_layers, device = len(basis.layers), basis.mean.device
        values = values.to(device)
        vectors = self._memory.tensor("vectors", (len(values), len(basis.mean)), torch.float32, device)
        step, num_used = self._parameters.step, values.shape[1]
        torch.addmm(basis.mean, values[:, :num_exact], basis.decoder[:num_exact], alpha=step, out=vectors)
        if num_exact < num_used:
            factors = self._memory.tensor(
                "factors", (len(values), num_used - num_exact), decoder.dtype, device
            )
            factors.copy_(values[:, num_exact:])
            product = self._memory.tensor("product", vectors.shape, decoder.dtype, device)
            torch.mm(factors, decoder[num_exact:num_used], out=product)
            vectors.add_(product, alpha=step)
        layers = split_vectors(vectors[: end - first], shape, num_layers)
        if self._rotary is None:
            return layers
        # Rotating the keys of all layers at once is faster.
        size = (end - first, num_layers * shape.num_kv_heads, shape.k_head_dim)
        keys = self._memory.tensor("keys", size, torch.float32, device)
        torch.cat([kv.k for kv in layers], dim=1, out=keys)
        positions = torch.arange(first, end, device=device) + self._segment.start_token
        self._rotary.rotate_in_place(keys, positions)
        of_layers = torch.split(keys, shape.num_kv_heads, dim=1)
        return [LayerKV(k, kv.v) for k, kv in zip(of_layers, layers, strict=True)]

    def decode_all(self, blocks: Sequence[torch.Tensor]) -> list[LayerKV]:
        """Decode all layers of the whole segment, in order. ``blocks``: the whole block of each group.

        Raises:
            CodecError: another number of blocks than of groups, or what ``decode`` refuses.
        """
        if len(blocks) != len(self._bases.groups):
            raise CodecError(f"{len(self._bases.groups)} groups have as many blocks, got {len(blocks)}")
        return [kv for group, block in enumerate(blocks) for kv in self.decode(group, block, 0)]

    def _first_tokens_num_bytes(self, group: int) -> int:
        shape = self._bases.shape
        token_bytes = len(self._bases.groups[group].layers) * (shape.k_token_bytes + shape.v_token_bytes)
        return self._segment.num_first_tokens * token_bytes

    def _put_first_tokens(self, raw: torch.Tensor, first_token: int, decoded: Sequence[LayerKV]) -> None:
        """Write the first tokens' own KV over what was decoded for them."""
        num_first_tokens = self._segment.num_first_tokens
        parts = [part for kv in decoded for part in tensors_of(kv)]
        dtype = self._bases.shape.dtype
        sizes = [part[0].numel() * dtype.itemsize * num_first_tokens for part in parts]
        for part, stored in zip(parts, torch.split(raw, sizes), strict=True):
            rows = stored.clone().view(dtype).view(num_first_tokens, *part.shape[1:])[first_token:]
            part[: len(rows)] = rows.to(part.device)


def _end_of(is_wanted: NDArray[np.bool_]) -> int:
    """The place after the last one that is wanted; 0 if none is."""
    return int(is_wanted.nonzero()[0].max(initial=-1)) + 1


def tensors_of(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, in the order in which they are stored."""
    return kv.k, kv.v
