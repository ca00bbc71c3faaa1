"""Encodes the KV of a segment as coefficients of the model's bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, prod, sqrt
from typing import Any

import numpy as np
import torch

from krul_backend.codec.coefficients.coders import CoefficientCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.coefficients.scales import base_scales, best_offsets, num_bands, scales_of
from krul_backend.codec.layout import LayerKV, ReadLayer
from krul_backend.codec.rotary import RotaryTable, check_positions
from krul_backend.codec.subspace.bases import ModelBases, split_vectors
from krul_backend.codec.subspace.coded_tail import (
    CHUNK_TOKENS,
    GroupTransform,
    KeptMemory,
    SegmentTokens,
    tensors_of,
)
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.subspace.parameters import GroupParameters, SubspaceParameters
from krul_backend.codec.subspace.quantizer import RoundedTokens, step_shifts, token_steps
from krul_backend.codec.subspace.sample import (
    GroupErrors,
    GroupSample,
    SegmentSample,
    own_outside,
    scatter_of,
    scatter_signs,
    squared_total,
)
from krul_backend.device import Device
from krul_backend.errors import CodecError

_SAMPLE_TOKENS = 128
"""The step is chosen with the coefficients of this many tokens of a segment."""

MOST_OUTSIDE = 0.9
"""The largest share of a limit that KV outside of the bases may cost. With less left for rounding, levels
would become too large to be coded: such a segment is better stored in another way."""

_CACHED_TOKENS = 128
"""The vectors of so many tokens about stay in the second cache of a core while they are made."""

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
        device = Device.of(bases.groups[0].mean)
        self._block_tokens = _CACHED_TOKENS if device.shares_cores else CHUNK_TOKENS
        is_fast = device.multiplies_bf16_fast
        keeps_no_more = bases.shape.dtype is torch.bfloat16 or bases.shape.dtype.itemsize == 1
        encoding = torch.bfloat16 if is_fast and keeps_no_more else torch.float32
        # The columns after the exact ones.
        self._encoders = tuple(basis.encoder[:, _EXACT_COEFFICIENTS:].to(encoding) for basis in bases.groups)
        self._scatter_costs = tuple(
            basis.scatter_costs.cpu().numpy().astype(np.float64) for basis in bases.groups
        )
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
        sample: SegmentSample | None = None,
    ) -> EncodedSegment:
        """Encode tokens ``[start_token, start_token + num_tokens)`` of a conversation with the largest step
        whose damage is expected to stay within ``max_damage`` nats per predicted token. If that takes larger
        levels than there are, or if what lies outside of the bases costs about as much, the damage is larger:
        that of the smallest step. Ask ``outside`` before, and see ``MOST_OUTSIDE``.

        ``attention [L, Hkv, num_tokens]``: see ``GroupBasis.token_worth``; None counts all tokens alike.
        ``carried_damage`` (nats) is what the KV has lost before: it is added in the parameters.
        ``before_group`` is called before the work on each group, which it may hold up. ``sample``: what
        ``sample`` returned for these tokens, with this ``attention``; None to take one now. Each layer is
        read once more, unless the sample has all tokens, and the layers of one group are held at a time.
        Blocks are on the CPU.

        Raises:
            CodecError: no tokens, a limit that is not positive, an unknown coder, positions beyond the
            model's, or the sample of another segment.
        """
        segment = self._segment(start_token, num_tokens)
        if not max_damage > 0:
            raise CodecError(f"a limit of {max_damage} nats leaves nothing to encode within")
        chosen = self._coder(coder)
        if sample is None:
            sample = self.sample(read, start_token=start_token, num_tokens=num_tokens, attention=attention)
        elif sample.bases is not self.bases or sample.segment != segment:
            raise CodecError(f"a sample of {sample.segment} is not one of {segment}, or is of other bases")
        step, (damage, shift) = sample.choose_step(max_damage)
        groups, blocks, all_rounded, vector_sums, lost_outside = [], [], [], [], []
        for group in range(len(self.bases.groups)):
            before_group()
            if sample.has_all:
                rounded = sample.groups[group].rounded(step)
            else:
                rounded, vector_sum, own = self._rounded(group, read, sample, step)
                vector_sums.append(vector_sum)
                lost_outside.append(own)
            parameters, block = self._encode_group(group, rounded, sample, step, chosen)
            groups.append(parameters)
            blocks.append(block)
            all_rounded.append(rounded.without_levels())
        if not sample.has_all:
            outside = torch.stack(lost_outside).tolist()
            damage, shift = sample.damage(all_rounded, vector_sums, outside, num_tokens)
        of_segment = SubspaceParameters(
            self.bases.digest, coder, segment.num_first_tokens, step, carried_damage + damage, tuple(groups)
        )
        return EncodedSegment(of_segment.to_json(), tuple(blocks), damage, shift, of_segment.mean_offset)

    def outside(
        self, read: ReadLayer, *, start_token: int, num_tokens: int, attention: torch.Tensor | None
    ) -> float:
        """The damage, in nats per predicted token, of these tokens' KV outside of the bases, which no step
        keeps. It is estimated from a sample of the tokens. Arguments and errors as for ``sample``.
        """
        return self.sample(read, start_token=start_token, num_tokens=num_tokens, attention=attention).outside

    def sample(
        self, read: ReadLayer, *, start_token: int, num_tokens: int, attention: torch.Tensor | None
    ) -> SegmentSample:
        """Read some tokens of a segment, at most 128: see what they lose outside of the bases, and hand them
        to ``encode``, which then reads no segment again that is no longer than that.

        Arguments as for ``encode``. Each layer is read once, and those of one group are held at a time. The
        sample takes 4 bytes for each coefficient of its tokens, on the CPU.

        Raises:
            CodecError: no tokens, or positions beyond the model's.
        """
        segment, groups = self._segment(start_token, num_tokens), self.bases.groups
        num_sampled = min(num_tokens, _SAMPLE_TOKENS)
        rows = torch.arange(num_sampled) * num_tokens // num_sampled
        picked = slice(None) if num_sampled == num_tokens else rows
        device = groups[0].mean.device
        # What the host is to have lies side by side: it waits for the device once.
        shapes = [(len(groups), num_tokens), (3, len(groups)), *((num_sampled, each.rank) for each in groups)]
        found = torch.empty(sum(map(prod, shapes)), device=device)
        worth, costs, *coefficients = _views(found, shapes)
        self._put_worth(worth, attention, segment)
        signs = scatter_signs(num_sampled).to(device)
        vector_sums, first_tokens = [], []
        for group, (basis, out) in enumerate(zip(groups, coefficients, strict=True)):
            layers = [read(layer) for layer in basis.layers]
            first_tokens += [part[: segment.num_first_tokens] for kv in layers for part in tensors_of(kv)]
            vectors = self._vectors(group, layers, picked, segment)
            self._put_coefficients(group, vectors, out)
            costs[0, group] = own_outside(basis, vectors, worth[group, picked])
            vector_sums.append(vectors.sum(0))
            # One after the other: on a CPU, a product of two rows at once takes three times as long.
            costs[1, group] = squared_total(basis, out.sum(0), vector_sums[-1])
            costs[2, group] = squared_total(basis, signs @ out, signs @ vectors)
        worth, costs, *coefficients = _views(found.cpu(), shapes)
        shifts = step_shifts(worth)
        samples = [
            GroupSample(
                of_group.numpy(),
                worth[group, picked].numpy(),
                shifts[group, picked],
                GroupErrors(own, total, scatter_of(total, signed, num_sampled), num_sampled),
                self._scatter_costs[group],
            )
            for group, (of_group, (own, total, signed)) in enumerate(
                zip(coefficients, costs.T.tolist(), strict=True)
            )
        ]
        raw = [part.contiguous().view(torch.uint8).flatten() for part in first_tokens]
        each = sum(map(len, raw)) // self.bases.num_layers
        of_groups = torch.split(torch.cat(raw).cpu(), [each * len(basis.layers) for basis in groups])
        return SegmentSample(self.bases, segment, worth, shifts, samples, vector_sums, of_groups)

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

    def _put_worth(self, worth: torch.Tensor, attention: torch.Tensor | None, segment: SegmentTokens) -> None:
        """Write the worth of each token in each group to ``worth [groups, T]``. It is 0 for those stored as
        they are, since they lose nothing."""
        if attention is None:
            worth.fill_(1)
        else:
            attention = attention.to(worth.device).float()
            for basis, of_group in zip(self.bases.groups, worth, strict=True):
                of_group.copy_(basis.token_worth(attention[basis.first_layer : basis.end_layer]))
        worth[:, : segment.num_first_tokens] = 0

    def _rounded(
        self, group: int, read: ReadLayer, sample: SegmentSample, step: float
    ) -> tuple[RoundedTokens, torch.Tensor, torch.Tensor]:
        """All tokens of a segment in one group; the sum of their vectors, less the mean, ``[D]``; and what
        each of them loses outside of the basis, added up in nats ``[]``, both on the bases' device."""
        basis, segment = self.bases.groups[group], sample.segment
        layers = [read(layer) for layer in basis.layers]
        rounded = RoundedTokens.none(segment.num_tokens, sample.groups[group].num_kept(step))
        worth, steps = sample.worth[group], token_steps(step, sample.shifts[group])
        vector_sum, own = torch.zeros_like(basis.mean), basis.mean.new_zeros(())
        for first in range(0, segment.num_tokens, CHUNK_TOKENS):
            rows = slice(first, min(first + CHUNK_TOKENS, segment.num_tokens))
            vectors = self._vectors(group, layers, rows, segment)
            coefficients = vectors.new_empty(len(vectors), rounded.levels.shape[1])
            self._put_coefficients(group, vectors, coefficients)
            vector_sum += vectors.sum(0)
            own += own_outside(basis, vectors, worth[rows].to(vectors.device))
            rounded.add(first, coefficients.cpu().numpy(), steps[rows], worth[rows].numpy())
        return rounded, vector_sum, own

    def _encode_group(
        self, group: int, rounded: RoundedTokens, sample: SegmentSample, step: float, coder: CoefficientCoder
    ) -> tuple[GroupParameters, torch.Tensor]:
        """The parameters and the block of one group."""
        num_tokens, num_kept = rounded.levels.shape
        base = base_scales(self._transforms[group].magnitudes[:num_kept], step)
        observed = (rounded.magnitudes / (num_tokens * step)).astype(np.float32)
        offsets = best_offsets(base, observed, rounded.levels)
        encoded = coder.encode(
            rounded.levels,
            scales_of(base, offsets),
            sample.shifts[group].numpy(),
            num_threads=torch.get_num_threads(),
        )
        block = torch.cat([sample.first_tokens[group], torch.from_numpy(encoded.data)])
        all_offsets = np.zeros(num_bands(self.bases.groups[group].rank), np.uint8)
        all_offsets[: len(offsets)] = offsets
        return GroupParameters(all_offsets, encoded.record_num_bytes), block

    def _vectors(
        self, group: int, layers: Sequence[LayerKV], rows: slice | torch.Tensor, segment: SegmentTokens
    ) -> torch.Tensor:
        """The vectors of these tokens of the segment, in order, less the basis' mean: fp32 ``[number of rows,
        D]``. They are 0 for the first tokens, of which nothing is lost. ``layers``: those of the group."""
        basis, size = self.bases.groups[group], self.bases.shape.num_kv_heads * self.bases.shape.k_head_dim
        places = torch.arange(segment.num_tokens)[rows]
        vectors = torch.empty(len(places), len(basis.mean), device=basis.mean.device)
        is_slice = isinstance(rows, slice)
        for first in range(0, len(places), self._block_tokens):
            block = places[first : first + self._block_tokens]
            of_block = slice(int(block[0]), int(block[-1]) + 1) if is_slice else block
            # [T, layers * Hkv, k_head_dim]: rotating the keys of all layers at once is faster.
            keys = torch.cat([kv.k[of_block] for kv in layers], dim=1).to(vectors.device).float()
            if self._rotary is not None:
                self._rotary.unrotate_in_place(keys, block + segment.start_token)
            values = torch.cat([kv.v[of_block] for kv in layers], dim=1)
            part = vectors[first : first + len(block)]
            of_layers = part.view(len(block), len(layers), -1)
            of_layers[..., :size] = keys.view(len(block), len(layers), size)
            of_layers[..., size:] = values.view(len(block), len(layers), -1)
            part.sub_(basis.mean)
        vectors[: int((places < segment.num_first_tokens).sum())] = 0
        return vectors

    def _put_coefficients(self, group: int, vectors: torch.Tensor, out: torch.Tensor) -> None:
        """Write the first coefficients of ``vectors [T, D]`` to ``out`` fp32 ``[T, any]``."""
        basis, encoder, num_kept = self.bases.groups[group], self._encoders[group], out.shape[1]
        if encoder.dtype is torch.float32:
            torch.mm(vectors, basis.encoder[:, :num_kept], out=out)
            return
        num_exact = min(num_kept, _EXACT_COEFFICIENTS)
        torch.mm(vectors, basis.encoder[:, :num_exact], out=out[:, :num_exact])
        out[:, num_exact:] = vectors.to(encoder.dtype) @ encoder[:, : num_kept - num_exact]


def _views(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Matrices of these shapes, one after the other in ``flat``."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
