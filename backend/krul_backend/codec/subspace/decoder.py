"""Decodes the blocks of one segment: any tail of any group of layers."""

from __future__ import annotations

from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.codec.coefficients.coders import CoefficientCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import base_scales, scales_of
from krul_backend.codec.interface import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.segment_layout import SegmentLayout
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, split_vectors
from krul_backend.codec.subspace.parameters import SubspaceParameters
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.errors import CodecError

_LEAST_ROWS = 64
"""At least so many rows are multiplied at a time. Products of fewer rows add up in another order, and a token
would depend on where the tail that it is decoded with begins."""

CHUNK_TOKENS = 1024
"""The most tokens whose vectors are held in fp32 at a time."""


@dataclass(frozen=True)
class SegmentTokens:
    """The tokens of a segment: ``[start_token, start_token + num_tokens)`` of its conversation. The first
    ``num_first_tokens`` of them are stored as in the pool."""

    start_token: int
    num_tokens: int
    num_first_tokens: int


@dataclass(frozen=True, eq=False)
class Reconstruction:
    """Reconstructs the vectors of a group as ``mean + coefficients @ decoder``.

    ``mean [D]`` and ``decoder [R, D]`` are those of the group's basis, in the element type in which they are
    multiplied. ``magnitudes [R]`` are the basis's, on the host.
    """

    mean: torch.Tensor
    decoder: torch.Tensor
    magnitudes: NDArray[np.float32]


@dataclass(frozen=True, eq=False)
class CodedTail:
    """A group's block from the record of ``first_token`` on, and all that is needed to decode it.

    The block begins with ``num_raw_bytes`` of the segment's first tokens; one record of each of
    ``record_num_bytes`` uint32 follows. ``scales`` uint8 ``[R]``: of all coefficients. ``step``: the
    segment's.
    """

    first_token: int
    block: torch.Tensor
    num_raw_bytes: int
    record_num_bytes: NDArray[np.uint32]
    scales: NDArray[np.uint8]
    step: float
    coder: CoefficientCoder
    basis: GroupBasis
    reconstruction: Reconstruction
    rotary: RotaryTable | None
    shape: LayerShape
    segment: SegmentTokens

    @property
    def first_record(self) -> int:
        return self.first_token // RECORD_TOKENS


class SubspaceDecoder(SegmentLayout):
    """Decodes the blocks of one segment. ``SubspaceCodec.open`` makes it.

    The block of a group is that of its first layer; the other layers of the group have none of their own.
    ``stored_as``: the groups. ``damage``: see ``EncodedSegment``. ``shape``: of each layer's KV in the pool.
    """

    def __init__(
        self,
        bases: ModelBases,
        reconstructions: Sequence[Reconstruction],
        rotary: RotaryTable | None,
        coder: CoefficientCoder,
        parameters: SubspaceParameters,
        segment: SegmentTokens,
    ) -> None:
        super().__init__(bases.num_layers, segment.start_token, segment.num_tokens, RECORD_TOKENS)
        self.stored_as = bases.layer_groups(coder.name)
        self.damage = parameters.damage
        self.shape = bases.shape
        self._bases = bases
        self._reconstructions = reconstructions
        self._rotary = rotary
        self._coder = coder
        self._parameters = parameters
        self._segment = segment

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
        tail = self.tail(group, block, first_token)
        scales = tail.scales
        # Coefficients matter less and less: with a large step all from some place on are zero.
        num_used = int(scales.nonzero()[0].max(initial=-1)) + 1
        first_row, end_row = (
            token - tail.first_record * RECORD_TOKENS for token in (first_token, self._segment.num_tokens)
        )
        values = np.empty((end_row + _LEAST_ROWS, num_used), np.float32)
        values[end_row:] = 0
        self._coder.decode(
            block[tail.num_raw_bytes :].numpy(),
            tail.record_num_bytes,
            scales[:num_used],
            values[:end_row],
            shrink=SHRINK,
            num_threads=torch.get_num_threads(),
        )
        decoded = self._reconstruct(group, torch.from_numpy(values[first_row:]), first_token)
        if tail.num_raw_bytes:
            self._put_first_tokens(block[: tail.num_raw_bytes], first_token, decoded)
        return decoded

    def tail(self, group: int, block: torch.Tensor, first_token: int) -> CodedTail:
        """Take apart what ``decode`` decodes: the same arguments, and the same errors but for damage.

        ``block`` may lie on any device.
        """
        num_tokens = self._segment.num_tokens
        if not 0 <= first_token < num_tokens:
            raise CodecError(f"token {first_token} of a segment of {num_tokens} tokens")
        first_layer = self._bases.groups[group].first_layer
        expected = self.group_num_bytes[group] - self.tail_start(first_layer, first_token)
        if block.dtype is not torch.uint8 or block.ndim != 1 or block.numel() != expected:
            raise CodecError(f"a block of {expected} bytes is needed, got {block.dtype} {tuple(block.shape)}")
        parameters, record = self._parameters.groups[group], first_token // RECORD_TOKENS
        reconstruction, step = self._reconstructions[group], self._parameters.step
        return CodedTail(
            first_token,
            block,
            self._first_tokens_num_bytes(group) if record == 0 else 0,
            parameters.record_num_bytes[record:],
            scales_of(base_scales(reconstruction.magnitudes, step), parameters.offsets),
            step,
            self._coder,
            self._bases.groups[group],
            reconstruction,
            self._rotary,
            self._bases.shape,
            self._segment,
        )

    def _reconstruct(self, group: int, values: torch.Tensor, first_token: int) -> list[LayerKV]:
        """The KV of the tokens from ``first_token`` on. ``values``: their coefficients in steps, fp32 ``[T +
        _LEAST_ROWS, R]``, zeros at the end."""
        shape, layers = self._bases.shape, self._bases.groups[group].layers
        mean, decoder = self._reconstructions[group].mean, self._reconstructions[group].decoder
        num_tokens = self._segment.num_tokens - first_token
        keys = torch.empty(
            (num_tokens, len(layers) * shape.num_kv_heads, shape.k_head_dim),
            dtype=shape.dtype,
            device=mean.device,
        )
        values_of_layers = keys.new_empty((len(layers), num_tokens, shape.num_kv_heads, shape.v_head_dim))
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            coefficients = values[start : max(end, start + _LEAST_ROWS)].to(mean.device, mean.dtype)
            vectors = torch.addmm(mean, coefficients, decoder[: values.shape[1]], alpha=self._parameters.step)
            split = split_vectors(vectors[: end - start], shape, len(layers))
            # Rotating the keys of all layers at once is faster.
            chunk = torch.cat([kv.k for kv in split], dim=1)
            if self._rotary is not None:
                positions = torch.arange(start, end, device=mean.device)
                chunk = self._rotary.rotate(chunk, positions + self._segment.start_token + first_token)
            keys[start:end] = chunk
            for layer, kv in enumerate(split):
                values_of_layers[layer, start:end] = kv.v
        of_layers = torch.split(keys, shape.num_kv_heads, dim=1)
        return [LayerKV(k, v) for k, v in zip(of_layers, values_of_layers, strict=True)]

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
        sizes = [part[0].numel() * part.dtype.itemsize * num_first_tokens for part in parts]
        for part, stored in zip(parts, torch.split(raw, sizes), strict=True):
            rows = stored.clone().view(part.dtype).view(num_first_tokens, *part.shape[1:])[first_token:]
            part[: len(rows)] = rows.to(part.device)


def tensors_of(kv: LayerKV) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values, in the order in which they are stored."""
    return kv.k, kv.v
