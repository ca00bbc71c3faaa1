"""Decodes the blocks of one segment: any tail of any group of layers."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from krul_backend.codec.coefficients.coders import CoefficientCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import base_scales, scales_of
from krul_backend.codec.interface import LayerKV
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import ModelBases, split_vectors
from krul_backend.codec.subspace.parameters import SubspaceParameters
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.errors import CodecError

_LEAST_ROWS = 64
"""At least so many rows are multiplied at a time. Products of fewer rows add up in another order, and a token
would depend on where the tail that it is decoded with begins."""


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
    multiplied.
    """

    mean: torch.Tensor
    decoder: torch.Tensor


class SubspaceDecoder:
    """Decodes the blocks of one segment. ``SubspaceCodec.open`` makes it."""

    def __init__(
        self,
        bases: ModelBases,
        reconstructions: Sequence[Reconstruction],
        rotary: RotaryTable | None,
        coder: CoefficientCoder,
        parameters: SubspaceParameters,
        segment: SegmentTokens,
    ) -> None:
        self._bases = bases
        self._reconstructions = reconstructions
        self._rotary = rotary
        self._coder = coder
        self._parameters = parameters
        self._segment = segment

    @property
    def damage(self) -> float:
        """See ``EncodedSegment``."""
        return self._parameters.damage

    @cached_property
    def group_num_bytes(self) -> tuple[int, ...]:
        """The size of each group's whole block."""
        return tuple(
            self._first_tokens_num_bytes(group) + int(parameters.record_num_bytes.sum())
            for group, parameters in enumerate(self._parameters.groups)
        )

    def tail_start(self, group: int, first_token: int) -> int:
        """The byte of the group's whole block from which on it holds tokens ``first_token`` and later."""
        record = first_token // RECORD_TOKENS
        if record == 0:
            return 0
        sizes = self._parameters.groups[group].record_num_bytes
        return self._first_tokens_num_bytes(group) + int(sizes[:record].sum())

    def decode(self, group: int, block: torch.Tensor, first_token: int) -> list[LayerKV]:
        """Decode tokens ``[first_token, num_tokens)`` of the segment in all layers of a group.

        ``block``: uint8 on the CPU, the group's from ``tail_start(group, first_token)`` on. Returns new
        tensors in the pool's dtype on the bases' device, keys with their rotary embedding.

        Raises:
            CodecError: no such token, a block of another size, or a damaged one.
        """
        num_tokens = self._segment.num_tokens
        if not 0 <= first_token < num_tokens:
            raise CodecError(f"token {first_token} of a segment of {num_tokens} tokens")
        expected = self.group_num_bytes[group] - self.tail_start(group, first_token)
        if block.dtype is not torch.uint8 or block.ndim != 1 or block.numel() != expected:
            raise CodecError(f"a block of {expected} bytes is needed, got {block.dtype} {tuple(block.shape)}")
        basis, parameters = self._bases.groups[group], self._parameters.groups[group]
        record = first_token // RECORD_TOKENS
        num_raw_bytes = self._first_tokens_num_bytes(group) if record == 0 else 0
        scales = scales_of(
            base_scales(basis.magnitudes.cpu().numpy(), self._parameters.step), parameters.offsets
        )
        # Coefficients matter less and less: with a large step all from some place on are zero.
        num_used = int(scales.nonzero()[0].max(initial=-1)) + 1
        first_row, end_row = (token - record * RECORD_TOKENS for token in (first_token, num_tokens))
        values = np.empty((max(end_row, first_row + _LEAST_ROWS), num_used), np.float32)
        values[end_row:] = 0
        self._coder.decode(
            block[num_raw_bytes:].numpy(),
            parameters.record_num_bytes[record:],
            scales[:num_used],
            values[:end_row],
            shrink=SHRINK,
        )
        mean, decoder = self._reconstructions[group].mean, self._reconstructions[group].decoder
        coefficients = torch.from_numpy(values[first_row:]).to(mean.device, mean.dtype)
        vectors = torch.addmm(mean, coefficients, decoder[:num_used], alpha=self._parameters.step)
        vectors = vectors[: num_tokens - first_token]
        layers = split_vectors(vectors, self._bases.shape, len(basis.layers))
        # [T, layers * Hkv, D]: rotating the keys of all layers at once is faster.
        keys = torch.cat([kv.k for kv in layers], dim=1)
        if self._rotary is not None:
            positions = torch.arange(first_token, num_tokens, device=vectors.device)
            keys = self._rotary.rotate(keys, positions + self._segment.start_token)
        shape = self._bases.shape
        split = torch.split(keys.to(shape.dtype), shape.num_kv_heads, dim=1)
        decoded = [LayerKV(k, kv.v.to(shape.dtype)) for k, kv in zip(split, layers, strict=True)]
        if num_raw_bytes:
            self._put_first_tokens(block[:num_raw_bytes], first_token, decoded)
        return decoded

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
