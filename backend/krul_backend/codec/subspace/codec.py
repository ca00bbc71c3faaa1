"""Encodes the KV of a segment as coefficients of the model's bases."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import log2, pi, sqrt
from typing import Any

import numpy as np
import torch

from krul_backend.codec.coefficients.coders import CoefficientCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import base_scales, best_offsets, num_bands, scales_of
from krul_backend.codec.layout import LayerKV, ReadLayer
from krul_backend.codec.rotary import RotaryTable, check_positions
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, group_vectors, split_vectors
from krul_backend.codec.subspace.coded_tail import (
    CHUNK_TOKENS,
    GroupTransform,
    KeptMemory,
    SegmentTokens,
    tensors_of,
)
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.subspace.parameters import (
    LARGEST_STEP,
    SMALLEST_STEP,
    GroupParameters,
    SubspaceParameters,
)
from krul_backend.codec.subspace.quantizer import GroupErrors, Sample, dequantize, quantize, step_shifts
from krul_backend.device import Device
from krul_backend.errors import CodecError

_SAMPLE_TOKENS = 128
"""The step is chosen with the coefficients of this many tokens of a segment."""

MOST_OUTSIDE = 0.9
"""The largest share of a limit that KV outside of the bases may cost. With less left for rounding, levels
would become too large to be coded: such a segment is better stored in another way."""

_STEP_HALVINGS = 12

_EXACT_COEFFICIENTS = 64
"""The first coefficients, which are the largest, are always computed in fp32. In bf16 their errors would come
near to the step."""


@dataclass(frozen=True, eq=False)
class EncodedSegment:
    """All blocks of a segment, one per group, and the plain JSON values that decoding needs.

    ``damage``: the divergence in nats per predicted token that the errors are expected to cause, without what
    the KV had lost before. In ``params`` are both together. ``shift_damage``: the part of it that comes from
    what all tokens are off by together. ``mean_offset``: see ``SubspaceParameters``.
    """

    params: dict[str, Any]
    blocks: tuple[torch.Tensor, ...]
    damage: float
    shift_damage: float
    mean_offset: float

    @property
    def num_bytes(self) -> int:
        """Bytes of all blocks; ``params`` are not counted."""
        return sum(block.numel() for block in self.blocks)


class SubspaceCodec:
    """Encodes and decodes the segments of one model on one rank, on the device of the bases.

    ``rotary`` is taken off keys before they are encoded; None for a model without it. ``num_first_tokens``:
    so many tokens at the start of a conversation are stored as they are. The first one draws attention from
    all others, and is like no other.

    Raises:
        CodecError: fewer first tokens than none, or more than a record has.
    """

    def __init__(
        self,
        bases: ModelBases,
        rotary: RotaryTable | None,
        coders: Sequence[CoefficientCoder],
        *,
        num_first_tokens: int = 1,
    ) -> None:
        if not 0 <= num_first_tokens <= RECORD_TOKENS:
            raise CodecError(f"{num_first_tokens} first tokens are not 0 to {RECORD_TOKENS}")
        self.bases = bases
        self._rotary = rotary
        self._coders = {coder.name: coder for coder in coders}
        self._num_first_tokens = num_first_tokens
        is_fast = Device.of(bases.groups[0].mean).multiplies_bf16_fast
        keeps_no_more = bases.shape.dtype is torch.bfloat16 or bases.shape.dtype.itemsize == 1
        encoding = torch.bfloat16 if is_fast and keeps_no_more else torch.float32
        # The columns after the exact ones.
        self._encoders = tuple(basis.encoder[:, _EXACT_COEFFICIENTS:].to(encoding) for basis in bases.groups)
        decoding, memory = torch.bfloat16 if is_fast else torch.float32, KeptMemory()
        self._transforms = tuple(
            GroupTransform(
                basis,
                basis.decoder.to(decoding),
                basis.magnitudes.cpu().numpy(),
                rotary,
                bases.shape,
                memory,
            )
            for basis in bases.groups
        )

    def encode(
        self,
        read: ReadLayer,
        *,
        start_token: int,
        num_tokens: int,
        attention: torch.Tensor | None,
        max_damage: float,
        coder: str,
        carried_damage: float = 0.0,
        before_group: Callable[[], None] = lambda: None,
    ) -> EncodedSegment:
        """Encode tokens ``[start_token, start_token + num_tokens)`` of a conversation with the largest step
        whose damage is expected to stay within ``max_damage`` nats per predicted token. If that takes larger
        levels than there are, or if what lies outside of the bases costs about as much, the damage is larger:
        that of the smallest step. Ask ``outside`` before, and see ``MOST_OUTSIDE``.

        ``attention [L, Hkv, num_tokens]``: see ``GroupBasis.token_worth``; None counts all tokens alike.
        ``carried_damage`` (nats) is what the KV has lost before: it is added in the parameters.
        ``before_group`` is called before the work on each group, which it may hold up. Each layer is read
        twice, and the layers of one group are held at a time. Blocks are on the CPU.

        Raises:
            CodecError: no tokens, a limit that is not positive, an unknown coder, or positions beyond the
            model's.
        """
        segment = self._segment(start_token, num_tokens)
        if not max_damage > 0:
            raise CodecError(f"a limit of {max_damage} nats leaves nothing to encode within")
        chosen = self._coder(coder)
        worths, samples = self._samples(read, attention, segment)
        step = self._choose_step(samples, segment, max_damage)
        groups, blocks, errors = [], [], []
        for group, (worth, sample) in enumerate(zip(worths, samples, strict=True)):
            before_group()
            num_kept = sample.num_kept(step)
            parameters, block, made = self._encode_group(group, read, worth, segment, step, num_kept, chosen)
            groups.append(parameters)
            blocks.append(block)
            left_out = sample.left_out_damage(num_kept) * segment.num_tokens / sample.num_tokens
            errors.append(made.with_left_out(left_out))
        damage, shift = self._damage(errors, segment)
        of_segment = SubspaceParameters(
            self.bases.digest, coder, segment.num_first_tokens, step, carried_damage + damage, tuple(groups)
        )
        return EncodedSegment(of_segment.to_json(), tuple(blocks), damage, shift, of_segment.mean_offset)

    def outside(
        self, read: ReadLayer, *, start_token: int, num_tokens: int, attention: torch.Tensor | None
    ) -> float:
        """The damage, in nats per predicted token, of these tokens' KV outside of the bases, which no step
        keeps. It is estimated from a sample of the tokens. Arguments and errors as for ``encode``.
        """
        segment = self._segment(start_token, num_tokens)
        _, samples = self._samples(read, attention, segment)
        return self._damage((sample.outside for sample in samples), segment)[0]

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SubspaceDecoder:
        """A decoder for blocks that were encoded with these parameters at this place.

        Raises:
            CodecError: anything but parameters that this codec writes for this model and place.
        """
        check_positions(start_token, num_tokens, self._rotary)
        parameters = SubspaceParameters.parse(params, self.bases, num_tokens)
        segment = SegmentTokens(start_token, num_tokens, parameters.num_first_tokens)
        return SubspaceDecoder(
            self.bases, self._transforms, self._coder(parameters.coder), parameters, segment
        )

    def draw(self, num_tokens: int) -> list[LayerKV]:
        """Random KV of all layers, at positions from 0 on, with the mean and the covariance of the text that
        the bases were learned from: always the same."""
        generator = torch.Generator().manual_seed(0)
        shape, layers = self.bases.shape, []
        for basis in self.bases.groups:
            normal = torch.randn(num_tokens, basis.rank, generator=generator).to(basis.mean.device)
            # Of normal numbers with this mean magnitude.
            deviations = basis.magnitudes * sqrt(pi / 2)
            vectors = basis.mean + normal * deviations @ basis.decoder
            layers += split_vectors(vectors, shape, len(basis.layers))
        positions = torch.arange(num_tokens)
        return [
            LayerKV(
                (kv.k if self._rotary is None else self._rotary.rotate(kv.k, positions)).to(shape.dtype),
                kv.v.to(shape.dtype),
            )
            for kv in layers
        ]

    def _coder(self, name: str) -> CoefficientCoder:
        if name not in self._coders:
            raise CodecError(f"coder {name!r} is unknown (known: {', '.join(self._coders)})")
        return self._coders[name]

    def _segment(self, start_token: int, num_tokens: int) -> SegmentTokens:
        """These tokens, with the first ones that are stored as they are."""
        check_positions(start_token, num_tokens, self._rotary)
        return SegmentTokens(
            start_token, num_tokens, max(0, min(num_tokens, self._num_first_tokens - start_token))
        )

    def _worth(
        self, basis: GroupBasis, attention: torch.Tensor | None, segment: SegmentTokens
    ) -> torch.Tensor:
        """The worth of each token ``[T]``. It is 0 for those stored as they are, since they lose nothing."""
        device = basis.mean.device
        if attention is None:
            worth = torch.ones(segment.num_tokens, device=device)
        else:
            worth = basis.token_worth(attention[basis.first_layer : basis.end_layer].to(device).float())
        worth[: segment.num_first_tokens] = 0
        return worth

    def _samples(
        self, read: ReadLayer, attention: torch.Tensor | None, segment: SegmentTokens
    ) -> tuple[list[torch.Tensor], list[Sample]]:
        """What each token of the segment is worth, and some of the tokens, both in each group."""
        num_sampled = min(segment.num_tokens, _SAMPLE_TOKENS)
        rows = torch.arange(num_sampled) * segment.num_tokens // num_sampled
        worths, samples = [], []
        for group, basis in enumerate(self.bases.groups):
            worth = self._worth(basis, attention, segment)
            vectors = self._vectors(group, [read(layer) for layer in basis.layers], rows, segment)
            worths.append(worth)
            samples.append(
                Sample(basis, vectors, self._coefficients(group, vectors, basis.rank), worth[rows])
            )
        return worths, samples

    def _choose_step(self, samples: Sequence[Sample], segment: SegmentTokens, max_damage: float) -> float:
        """The largest step with which a sample of the tokens is expected to stay within the limit, or else
        the smallest one with which none of its levels is clipped."""
        # Below, damage would rise again, and the search would end at a step that clips nearly everything.
        unclipped = max(sample.smallest_unclipped_step for sample in samples)
        low, high = log2(max(SMALLEST_STEP, min(unclipped, LARGEST_STEP))), log2(LARGEST_STEP)
        for _ in range(_STEP_HALVINGS):
            middle = (low + high) / 2
            damage, _ = self._damage((sample.rounded(2**middle) for sample in samples), segment)
            low, high = (middle, high) if damage <= max_damage else (low, middle)
        return float(2**low)

    def _damage(self, groups: Iterable[GroupErrors], segment: SegmentTokens) -> tuple[float, float]:
        """Return the damage in nats that is expected of a segment whose tokens have such errors, group by
        group, and the part of it that comes from the errors that they have in common."""
        own = shift = 0.0
        for errors in groups:
            own += errors.own_damage * segment.num_tokens / errors.num_tokens
            shift += errors.shift_damage
        shift *= segment.num_tokens / (segment.start_token + segment.num_tokens)
        return self.bases.damage_factor * own + shift, shift

    def _encode_group(
        self,
        group: int,
        read: ReadLayer,
        worth: torch.Tensor,
        segment: SegmentTokens,
        step: float,
        num_kept: int,
        coder: CoefficientCoder,
    ) -> tuple[GroupParameters, torch.Tensor, GroupErrors]:
        """The parameters and the block of one group, and its errors. What coefficients cost that are left out
        is not in their own damage."""
        basis, shifts = self.bases.groups[group], step_shifts(worth)
        layers = [read(layer) for layer in basis.layers]
        levels = np.empty((segment.num_tokens, num_kept), np.int16)
        magnitudes = torch.zeros(num_kept, device=basis.mean.device)
        errors = GroupErrors.none(basis)
        for first in range(0, segment.num_tokens, CHUNK_TOKENS):
            end = min(first + CHUNK_TOKENS, segment.num_tokens)
            vectors = self._vectors(group, layers, slice(first, end), segment)
            coefficients = self._coefficients(group, vectors, num_kept)
            chunk = quantize(coefficients, step, shifts[first:end])
            levels[first:end] = chunk.to(torch.int16).cpu().numpy()
            errors = errors.with_tokens(vectors, coefficients, worth[first:end])
            rounding = dequantize(chunk, step, shifts[first:end]).sub_(coefficients)
            errors = errors.with_rounding(rounding, worth[first:end])
            magnitudes += coefficients.abs_().sum(0)
        base = base_scales(self._transforms[group].magnitudes[:num_kept], step)
        offsets = best_offsets(base, (magnitudes / (segment.num_tokens * step)).cpu().numpy(), levels)
        scales = scales_of(base, offsets)
        encoded = coder.encode(levels, scales, shifts.cpu().numpy(), num_threads=torch.get_num_threads())
        first_tokens = [
            part[: segment.num_first_tokens].contiguous().cpu().view(torch.uint8).flatten()
            for kv in (layers if segment.num_first_tokens else ())
            for part in tensors_of(kv)
        ]
        block = torch.cat([*first_tokens, torch.from_numpy(encoded.data)])
        all_offsets = np.zeros(num_bands(basis.rank), np.uint8)
        all_offsets[: len(offsets)] = offsets
        return GroupParameters(all_offsets, encoded.record_num_bytes), block, errors

    def _vectors(
        self, group: int, layers: Sequence[LayerKV], rows: slice | torch.Tensor, segment: SegmentTokens
    ) -> torch.Tensor:
        """The vectors of these tokens of the segment, less the basis' mean: fp32 ``[number of rows, D]``.
        They are 0 for the first tokens, of which nothing is lost. ``layers``: those of the group."""
        basis, places = self.bases.groups[group], torch.arange(segment.num_tokens)[rows]
        positions = places + segment.start_token
        # [T, layers * Hkv, D]: rotating the keys of all layers at once is faster.
        keys = torch.cat([kv.k[rows] for kv in layers], dim=1)
        if self._rotary is not None:
            keys = self._rotary.unrotate(keys, positions)
        split = torch.split(keys, self.bases.shape.num_kv_heads, dim=1)
        bare = [LayerKV(k, kv.v[rows]) for k, kv in zip(split, layers, strict=True)]
        vectors = group_vectors(bare).to(basis.mean.device).sub_(basis.mean)
        is_first = (places < segment.num_first_tokens).to(vectors.device)
        return vectors.masked_fill_(is_first[:, None], 0)

    def _coefficients(self, group: int, vectors: torch.Tensor, num_kept: int) -> torch.Tensor:
        """The first coefficients, fp32 ``[T, num_kept]``, of ``vectors [T, D]``."""
        basis, encoder = self.bases.groups[group], self._encoders[group]
        exact = vectors @ basis.encoder[:, : min(num_kept, _EXACT_COEFFICIENTS)]
        rest = vectors.to(encoder.dtype) @ encoder[:, : max(0, num_kept - _EXACT_COEFFICIENTS)]
        return torch.cat([exact, rest], dim=1)
