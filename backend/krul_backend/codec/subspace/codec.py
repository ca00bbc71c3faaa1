"""Encodes the KV of a segment as coefficients of the model's bases."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import pi, prod, sqrt
from typing import Any

import numpy as np
import torch

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.scales import (
    RECORD_TOKENS,
    base_scales,
    best_offsets,
    num_bands,
    scales_of,
)
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
from krul_backend.codec.subspace.sample import ErrorCosts, GroupSample, SegmentSample, scatter_signs
from krul_backend.codec.subspace.vectors import TokenRows, put_vectors
from krul_backend.device import Device
from krul_backend.errors import CodecError

_SAMPLE_TOKENS = 128
"""The step is chosen with the coefficients of this many tokens of a segment."""

MOST_OUTSIDE = 0.9
"""The largest share of a limit that KV outside of the bases may cost. With less left for rounding, levels
would become too large to be coded: such a segment is better stored in another way."""

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
        *,
        num_first_tokens: int = 1,
    ) -> None:
        if not 0 <= num_first_tokens <= RECORD_TOKENS:
            raise CodecError(f"{num_first_tokens} first tokens are not 0 to {RECORD_TOKENS}")
        self.bases = bases
        self._rotary = rotary
        self._coder = RansCoder()
        self._num_first_tokens = num_first_tokens
        device = Device.of(bases.groups[0].mean)
        is_fast = device.multiplies_bf16_fast
        keeps_no_more = bases.shape.dtype is torch.bfloat16 or bases.shape.dtype.itemsize == 1
        encoding = torch.bfloat16 if is_fast and keeps_no_more else torch.float32
        # The columns after the exact ones.
        self._encoders = tuple(basis.encoder[:, _EXACT_COEFFICIENTS:].to(encoding) for basis in bases.groups)
        self._outside = tuple(basis.outside.to(encoding) for basis in bases.groups)
        self._costs = tuple(map(ErrorCosts.of, bases.groups))
        self._memory = KeptMemory()
        decoding = torch.bfloat16 if is_fast else torch.float32
        self._transforms = tuple(
            GroupTransform(
                basis,
                basis.decoder.to(decoding),
                basis.magnitudes.cpu().numpy(),
                rotary,
                bases.shape,
                self._memory,
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
            CodecError: no tokens, a limit that is not positive, positions beyond the model's, or the sample
                of another segment.
        """
        segment = self._segment(start_token, num_tokens)
        if not max_damage > 0:
            raise CodecError(f"a limit of {max_damage} nats leaves nothing to encode within")
        if sample is None:
            sample = self.sample(read, start_token=start_token, num_tokens=num_tokens, attention=attention)
        elif sample.bases is not self.bases or sample.segment != segment:
            raise CodecError(f"a sample of {sample.segment} is not one of {segment}, or is of other bases")
        best = sample.choose_step(max_damage)
        groups, blocks, all_rounded, of_others = [], [], [], []
        chunks = [] if sample.has_all else self._chunks(sample)
        for group, rounded in enumerate(best.rounded):
            before_group()
            if chunks:
                rounded, found = self._rounded(group, read, sample, best.step, chunks)
                of_others.append(found)
            parameters, block = self._encode_group(group, rounded, sample, best.step)
            groups.append(parameters)
            blocks.append(block)
            all_rounded.append(rounded.without_levels())
        damage, shift = best.damage, best.shift_damage
        if of_others:
            damage, shift = sample.damage(all_rounded, torch.stack(of_others).cpu().numpy())
        of_segment = SubspaceParameters(
            self.bases.digest,
            segment.num_first_tokens,
            best.step,
            carried_damage + damage,
            tuple(groups),
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
        index = torch.arange(num_sampled) * num_tokens // num_sampled
        rows = TokenRows.of(index, start_token, self._rotary)
        device = groups[0].mean.device
        # What the host is to have lies side by side: it waits for the device once.
        shapes = [(len(groups), num_tokens), (len(groups), num_sampled)]
        shapes += [(num_sampled, basis.rank) for basis in groups]
        shapes += [(2, costs.shift.shape[1]) for costs in self._costs]
        found = torch.empty(sum(map(prod, shapes)), device=device)
        worth, lost, *parts = _views(found, shapes)
        self._put_worth(worth, attention, segment)
        signs = torch.stack([torch.ones(num_sampled), scatter_signs(num_sampled)]).to(device)
        first_tokens = []
        for group, basis in enumerate(groups):
            layers = [read(layer) for layer in basis.layers]
            first_tokens += [
                part[: segment.num_first_tokens].flatten() for kv in layers for part in tensors_of(kv)
            ]
            vectors = self._vectors(group, layers, rows, segment)
            lowered = self._put_coefficients(group, vectors, parts[group])
            lost[group] = self._lost_outside(group, lowered)
            parts[len(groups) + group].copy_(basis.shift_sums(signs @ vectors))
        worth, lost, *parts = _views(found.cpu(), shapes)
        worths, shifts, picked = worth.numpy(), step_shifts(worth).numpy(), index.numpy()
        samples = [
            GroupSample(
                coefficients.numpy(),
                worths[group, picked],
                shifts[group, picked],
                lost[group].numpy(),
                vector_sums.numpy(),
                self._costs[group],
            )
            for group, (coefficients, vector_sums) in enumerate(
                zip(parts[: len(groups)], parts[len(groups) :], strict=True)
            )
        ]
        raw = torch.cat(first_tokens).view(torch.uint8).cpu()
        sizes = [len(raw) * len(basis.layers) // self.bases.num_layers for basis in groups]
        return SegmentSample(self.bases, segment, picked, worths, shifts, samples, torch.split(raw, sizes))

    def open(self, params: Mapping[str, Any], *, start_token: int, num_tokens: int) -> SubspaceDecoder:
        """A decoder for blocks that were encoded with these parameters at this place.

        Raises:
            CodecError: anything but parameters that this codec writes for this model and place.
        """
        check_positions(start_token, num_tokens, self._rotary)
        parameters = SubspaceParameters.parse(params, self.bases, num_tokens)
        segment = SegmentTokens(start_token, num_tokens, parameters.num_first_tokens)
        return SubspaceDecoder(self.bases, self._transforms, self._coder, parameters, segment)

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
            worth.copy_(self.bases.token_worth(attention.to(worth.device).float()))
        worth[:, : segment.num_first_tokens] = 0

    def _chunks(self, sample: SegmentSample) -> list[TokenRows]:
        """The tokens that are not in the sample."""
        chunks = torch.split(torch.from_numpy(sample.others), CHUNK_TOKENS)
        return [TokenRows.of(index, sample.segment.start_token, self._rotary) for index in chunks]

    def _rounded(
        self, group: int, read: ReadLayer, sample: SegmentSample, step: float, others: Sequence[TokenRows]
    ) -> tuple[RoundedTokens, torch.Tensor]:
        """All tokens of a segment in one group; and of ``others``, those that are not in the sample, what
        ``SegmentSample.damage`` wants, on the bases' device."""
        basis, of_sample = self.bases.groups[group], sample.groups[group]
        layers = [read(layer) for layer in basis.layers]
        rounded = RoundedTokens.none(sample.segment.num_tokens, of_sample.num_kept(step))
        worth, steps = sample.worth[group], token_steps(step, sample.shifts[group])
        rounded.add(sample.rows, of_sample.coefficients, steps[sample.rows], worth[sample.rows])
        vector_sum, lost = torch.zeros_like(basis.mean), []
        for rows in others:
            vectors, index = self._vectors(group, layers, rows, sample.segment), rows.index.numpy()
            size = (len(index), rounded.levels.shape[1])
            coefficients = self._memory.tensor("coefficients", size, torch.float32, vectors.device)
            lowered = self._put_coefficients(group, vectors, coefficients)
            vector_sum += vectors.sum(0)
            lost.append(self._lost_outside(group, lowered))
            rounded.add(index, coefficients.cpu().numpy(), steps[index], worth[index])
        return rounded, torch.cat([*lost, basis.shift_sums(vector_sum[None])[0]])

    def _encode_group(
        self, group: int, rounded: RoundedTokens, sample: SegmentSample, step: float
    ) -> tuple[GroupParameters, torch.Tensor]:
        """The parameters and the block of one group."""
        num_tokens, num_kept = rounded.levels.shape
        base = base_scales(self._transforms[group].magnitudes[:num_kept], step)
        observed = (rounded.magnitudes / (num_tokens * step)).astype(np.float32)
        offsets = best_offsets(base, observed, rounded.levels)
        encoded = self._coder.encode(
            rounded.levels,
            scales_of(base, offsets),
            sample.shifts[group],
            num_threads=torch.get_num_threads(),
        )
        block = torch.cat([sample.first_tokens[group], torch.from_numpy(encoded.data)])
        all_offsets = np.zeros(num_bands(self.bases.groups[group].rank), np.uint8)
        all_offsets[: len(offsets)] = offsets
        return GroupParameters(all_offsets, encoded.record_num_bytes), block

    def _vectors(
        self, group: int, layers: Sequence[LayerKV], rows: TokenRows, segment: SegmentTokens
    ) -> torch.Tensor:
        """The vectors of these tokens of the segment, in order, less the basis' mean: fp32 ``[n, D]``, in
        memory that the next ones are written to. They are 0 for the first tokens, of which nothing is lost.
        ``layers``: those of the group."""
        mean = self.bases.groups[group].mean
        vectors = self._memory.tensor("vectors", (len(rows.index), len(mean)), torch.float32, mean.device)
        put_vectors(layers, rows, mean, vectors)
        vectors[: int((rows.index < segment.num_first_tokens).sum())] = 0
        return vectors

    def _put_coefficients(self, group: int, vectors: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        """Write the first coefficients of ``vectors [T, D]`` to ``out`` fp32 ``[T, any]``. Return the vectors
        in the type that most are multiplied in."""
        basis, encoder, num_kept = self.bases.groups[group], self._encoders[group], out.shape[1]
        if encoder.dtype is torch.float32:
            torch.mm(vectors, basis.encoder[:, :num_kept], out=out)
            return vectors
        num_exact, lowered = min(num_kept, _EXACT_COEFFICIENTS), vectors.to(encoder.dtype)
        torch.mm(vectors, basis.encoder[:, :num_exact], out=out[:, :num_exact])
        out[:, num_exact:] = lowered @ encoder[:, : num_kept - num_exact]
        return lowered

    def _lost_outside(self, group: int, lowered: torch.Tensor) -> torch.Tensor:
        """The squares of what vectors ``[T, D]``, less the mean, lose outside of the basis: fp32 ``[T]``."""
        return (lowered @ self._outside[group]).float().square_().sum(1)


def _views(flat: torch.Tensor, shapes: Sequence[tuple[int, int]]) -> list[torch.Tensor]:
    """Matrices of these shapes, one after the other in ``flat``."""
    parts = torch.split(flat, [prod(shape) for shape in shapes])
    return [part.view(shape) for part, shape in zip(parts, shapes, strict=True)]
