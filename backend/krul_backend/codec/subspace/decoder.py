"""Decodes the blocks of one segment: any tail of any group of layers."""

from __future__ import annotations

from bisect import bisect
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
from krul_backend.codec.segment_layout import SegmentLayout
from krul_backend.codec.subspace.bases import ModelBases, split_vectors
from krul_backend.codec.subspace.parameters import SubspaceParameters
from krul_backend.codec.subspace.quantizer import SHRINK
from krul_backend.errors import CodecError

_LEAST_ROWS = 64
"""At least so many rows are multiplied at a time. Products of fewer rows add up in another order, and a token
would depend on where the tail that it is decoded with begins."""

EXACT_COEFFICIENTS = 64
"""The first coefficients, which are the largest, are always multiplied in fp32. In bf16 their errors would
come near to the step."""

CHUNK_TOKENS = 1024
"""The most tokens whose vectors are held in fp32 at a time."""


@dataclass(frozen=True)
class SegmentTokens:
    """The tokens of a segment: ``[start_token, start_token + num_tokens)`` of its conversation. The first
    ``num_first_tokens`` of them are stored as in the pool."""

    start_token: int
    num_tokens: int
    num_first_tokens: int


class SubspaceDecoder(SegmentLayout):
    """Decodes the blocks of one segment. ``SubspaceCodec.open`` makes it.

    The block of a group is that of its first layer; the other layers of the group have none of their own.
    ``decoders``: for each group the rows of its basis' decoder after the exact ones, in the element type that
    they are multiplied in. ``stored_as``: the groups. ``damage``: see ``EncodedSegment``.
    """

    def __init__(
        self,
        bases: ModelBases,
        decoders: Sequence[torch.Tensor],
        rotary: RotaryTable | None,
        coder: CoefficientCoder,
        parameters: SubspaceParameters,
        segment: SegmentTokens,
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
        num_tokens = self._segment.num_tokens
        if not 0 <= first_token < num_tokens:
            raise CodecError(f"token {first_token} of a segment of {num_tokens} tokens")
        first_layer = self._bases.groups[group].first_layer
        expected = self.group_num_bytes[group] - self.tail_start(first_layer, first_token)
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
        values = np.empty((end_row + _LEAST_ROWS, num_used), np.float32)
        values[end_row:] = 0
        self._coder.decode(
            block[num_raw_bytes:].numpy(),
            parameters.record_num_bytes[record:],
            scales[:num_used],
            values[:end_row],
            shrink=SHRINK,
            num_threads=torch.get_num_threads(),
        )
        decoded = self._reconstruct(group, torch.from_numpy(values[first_row:]), first_token)
        if num_raw_bytes:
            self._put_first_tokens(block[:num_raw_bytes], first_token, decoded)
        return decoded

    def _reconstruct(self, group: int, values: torch.Tensor, first_token: int) -> list[LayerKV]:
        """The KV of the tokens from ``first_token`` on. ``values``: their coefficients in steps, fp32 ``[T +
        _LEAST_ROWS, R]``, zeros at the end."""
        shape, layers = self._bases.shape, self._bases.groups[group].layers
        basis, decoder = self._bases.groups[group], self._decoders[group]
        mean, exact = basis.mean, basis.decoder[: min(values.shape[1], EXACT_COEFFICIENTS)]
        num_tokens, step = self._segment.num_tokens - first_token, self._parameters.step
        keys = torch.empty(
            (num_tokens, len(layers) * shape.num_kv_heads, shape.k_head_dim),
            dtype=shape.dtype,
            device=mean.device,
        )
        values_of_layers = keys.new_empty((len(layers), num_tokens, shape.num_kv_heads, shape.v_head_dim))
        for start in range(0, num_tokens, CHUNK_TOKENS):
            end = min(start + CHUNK_TOKENS, num_tokens)
            coefficients = values[start : max(end, start + _LEAST_ROWS)].to(mean.device)
            vectors = torch.addmm(mean, coefficients[:, : len(exact)], exact, alpha=step)
            if coefficients.shape[1] > len(exact):
                rest = coefficients[:, len(exact) :].to(decoder.dtype)
                vectors.add_(rest @ decoder[: rest.shape[1]], alpha=step)
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
