"""Encodes the KV of a segment as coefficients of the model's bases."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from math import prod
from typing import Any

import numpy as np
import torch

from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.scales import (
    RECORD_TOKENS,
    Integers,
    Values,
    base_scales,
    best_offsets,
    num_bands,
    scales_of,
)
from krul_backend.codec.layout import LayerKV, ReadLayer, rounding_errors
from krul_backend.codec.rotary import RotaryTable, check_positions
from krul_backend.codec.subspace.bases import SHIFT_SUMS, ModelBases, split_vectors
from krul_backend.codec.subspace.coded_tail import (
    CHUNK_TOKENS,
    GroupTransform,
    KeptMemory,
    SegmentTokens,
    tensors_of,
)
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.subspace.encoders import GroupEncoders, multiply
from krul_backend.codec.subspace.parameters import GroupParameters, SubspaceParameters
from krul_backend.codec.subspace.quantizer import RoundedTokens, step_shifts, token_steps
from krul_backend.codec.subspace.sample import (
    ChosenStep,
    ErrorCosts,
    GroupSample,
    SegmentSample,
    scatter_signs,
)
from krul_backend.codec.subspace.vectors import BlockReads, TokenRows
from krul_backend.device import Device
from krul_backend.errors import CodecError

_SAMPLE_TOKENS = 128
"""The step is chosen with the coefficients of this many tokens of a segment."""

MOST_OUTSIDE = 0.9
"""The largest share of a limit that KV outside of the bases may cost. With less left for rounding, levels
would become too large to be coded: such a segment is better stored in another way."""

MOST_AWAITED_BYTES = 64 << 20
"""Coefficients that are on their way from a GPU before the host waits for them."""


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
    all others, and is like no other. ``rounds``: an fp8 pool's KV is read, and rounding to it is damage.

    Raises:
        CodecError: fewer first tokens than none, or more than a record has.
    """

    def __init__(
        self,
        bases: ModelBases,
        rotary: RotaryTable | None,
        *,
        num_first_tokens: int = 1,
        rounds: bool = False,
    ) -> None:
        if not 0 <= num_first_tokens <= RECORD_TOKENS:
            raise CodecError(f"{num_first_tokens} first tokens are not 0 to {RECORD_TOKENS}")
        self.bases = bases
        self._rotary = rotary
        self._coder = RansCoder()
        self._num_first_tokens, self._rounds = num_first_tokens, rounds
        device = self._device = Device.of(bases.groups[0].mean)
        multiplied = torch.bfloat16 if device.multiplies_bf16_fast else torch.float32
        self._memory = KeptMemory()
        self._encoders = GroupEncoders.of(bases, rotary, self._memory, multiplied)
        self._costs = tuple(map(ErrorCosts.of, bases.groups))
        self._transforms = tuple(
            GroupTransform(
                basis,
                basis.decoder.to(multiplied),
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
        that of the smallest step. Ask the sample's ``outside`` before, and see ``MOST_OUTSIDE``.

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
        for group, (rounded, of_rest) in enumerate(self._rounded(read, sample, best, before_group)):
            parameters, block = self._encode_group(group, rounded, sample, best.step)
            groups.append(parameters)
            blocks.append(block)
            all_rounded.append(rounded.without_levels())
            of_others.append(of_rest)
        damage, shift = best.damage, best.shift_damage
        if not sample.has_all:
            damage, shift = sample.damage(all_rounded, np.stack(of_others))
        of_segment = SubspaceParameters(
            self.bases.digest, segment.num_first_tokens, best.step, carried_damage + damage, tuple(groups)
        )
        return EncodedSegment(of_segment.to_json(), tuple(blocks), damage, shift, of_segment.mean_offset)

    def sample(
        self,
        read: ReadLayer,
        *,
        start_token: int,
        num_tokens: int,
        attention: torch.Tensor | None,
        are_errors: bool = False,
    ) -> SegmentSample:
        """Read some tokens of a segment, at most 128: see what they lose outside of the bases, and hand them
        to ``encode``, which then reads no segment again that is no longer than that.

        Arguments as for ``encode``. Each layer is read once, of an fp8 pool twice, and those of one group are
        held at a time. The sample takes 4 bytes for each coefficient of its tokens, on the CPU.
        ``are_errors``: what is read are differences of KV, which have no mean; those of the first tokens
        count, too.

        Raises:
            CodecError: no tokens, or positions beyond the model's.
        """
        whole, groups = self._segment(start_token, num_tokens), self.bases.groups
        segment = replace(whole, num_first_tokens=0) if are_errors else whole
        num_sampled = min(num_tokens, _SAMPLE_TOKENS)
        index = torch.arange(num_sampled) * num_tokens // num_sampled
        rows, most = TokenRows(index, start_token, self._rotary), max(basis.rank for basis in groups)
        # What the host is to have lies side by side: it waits for the device once.
        shapes = [(num_tokens,), (num_sampled,), (num_sampled, most), (2, SHIFT_SUMS)]
        sizes = [len(groups) * prod(shape) for shape in shapes]
        found = torch.empty(sum(sizes), device=groups[0].mean.device)

        def views(flat: torch.Tensor) -> list[torch.Tensor]:
            parts = torch.split(flat, sizes)
            return [part.view(len(groups), *shape) for part, shape in zip(parts, shapes, strict=True)]

        worth, lost, coefficients, sums = views(found)
        self._put_worth(worth, attention, segment)
        signs = self._device.from_host(torch.stack([torch.ones(num_sampled), scatter_signs(num_sampled)]))
        first_tokens: list[torch.Tensor] = []
        for encoders in self._at_once(num_sampled, num_tokens):
            if are_errors:
                encoders = replace(encoders, means=torch.zeros_like(encoders.means))
            source = encoders.read(read)
            first_tokens += _first_tokens([kv for of_group in source.layers for kv in of_group], segment)
            vectors, lowered = encoders.vectors(source, rows, segment.num_first_tokens)
            encoders.put_coefficients(vectors, lowered, coefficients[encoders.groups, :, : encoders.rank])
            lost[encoders.groups] = encoders.lost_outside(lowered)
            signed = multiply(signs.expand(len(vectors), -1, -1), vectors)
            sums[encoders.groups] = encoders.shift_sums(signed)
        if isinstance(read, BlockReads) and not first_tokens:
            num_first = max(1, segment.num_first_tokens)
            layers = [read.first_tokens(layer, num_first).numbers for layer in range(self.bases.num_layers)]
            first_tokens = _first_tokens(layers, segment)
        raw = torch.cat(first_tokens).view(torch.uint8)
        worth, lost, coefficients, sums = views(found.cpu())
        worths, shifts, picked = worth.numpy(), step_shifts(worth).numpy(), index.numpy()
        if are_errors:
            # Every segment has as many first tokens, however few of the others are sampled.
            worths[:, : whole.num_first_tokens] *= num_sampled / num_tokens
        else:
            for group, costs in enumerate(self._costs):
                costs.mark_sinks(picked, coefficients[group].numpy(), worths[group], shifts[group])
        samples = [
            GroupSample(
                np.ascontiguousarray(coefficients[group, :, : basis.rank].numpy()),
                worths[group, picked],
                shifts[group, picked],
                lost[group].numpy(),
                sums[group].numpy(),
                self._costs[group],
            )
            for group, basis in enumerate(groups)
        ]
        ends = [len(raw) * len(basis.layers) // self.bases.num_layers for basis in groups]
        stored = torch.split(raw.cpu(), ends)
        rounding = 0.0
        if self._rounds and not are_errors:
            # The first tokens are stored as they are.
            rounded = self._device.from_host(index[index >= segment.num_first_tokens])
            rounding = self.sample(
                lambda layer: rounding_errors(read(layer), rounded),
                start_token=start_token,
                num_tokens=num_tokens,
                attention=attention,
                are_errors=True,
            ).all_lost
        return SegmentSample(self.bases, segment, picked, worths, shifts, samples, stored, rounding)

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
            vectors = basis.mean + normal * basis.deviations @ basis.decoder
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

    def _rounded(
        self, read: ReadLayer, sample: SegmentSample, best: ChosenStep, pause: Callable[[], None]
    ) -> Iterator[tuple[RoundedTokens, Values]]:
        """All tokens of a segment, group after group; and of those that are not in the sample, what
        ``SegmentSample.damage`` wants."""
        if sample.has_all:
            for rounded in best.rounded:
                pause()
                yield rounded, np.empty(0, np.float32)
            return
        chunks = [
            TokenRows(index, sample.segment.start_token, self._rotary)
            for index in torch.split(torch.from_numpy(sample.others), CHUNK_TOKENS)
        ]
        begun: list[_Rounding] = []
        for encoders in self._at_once(len(chunks[0].index), sample.segment.num_tokens):
            pause()
            begun += self._begin_rounding(encoders, read, sample, best.step, chunks)
            num_bytes = sum(found.nbytes for each in begun for _, found in each.awaited)
            if self._device.shares_cores or num_bytes > MOST_AWAITED_BYTES:
                yield from self._finished(begun, pause)
                begun = []
        yield from self._finished(begun, pause)

    def _at_once(self, num_rows: int, num_tokens: int) -> Iterator[GroupEncoders]:
        return chain.from_iterable(each.at_once(num_rows, num_tokens) for each in self._encoders)

    def _finished(
        self, begun: Sequence[_Rounding], pause: Callable[[], None]
    ) -> Iterator[tuple[RoundedTokens, Values]]:
        """Wait for the coefficients of these groups, and round them."""
        self._device.synchronize(self._device.current_stream())
        for each in begun:
            if each is not begun[0]:
                pause()
            each.round()
            yield each.rounded, each.of_rest.numpy()

    def _begin_rounding(
        self,
        encoders: GroupEncoders,
        read: ReadLayer,
        sample: SegmentSample,
        step: float,
        chunks: Sequence[TokenRows],
    ) -> list[_Rounding]:
        """Round the sampled tokens of some groups, and let the others come to the host: on a CPU they are
        there, and rounded at once."""
        begun = [_Rounding(sample, group, step) for group in range(len(self.bases.groups))[encoders.groups]]
        num_kept = max(each.rounded.levels.shape[1] for each in begun)
        source, found, vector_sums = encoders.read(read), list[torch.Tensor](), list[torch.Tensor]()
        for rows in chunks:
            vectors, lowered = encoders.vectors(source, rows, sample.segment.num_first_tokens)
            size = (len(begun), len(rows.index), num_kept)
            coefficients = self._memory.tensor("coefficients", size, torch.float32, vectors.device)
            encoders.put_coefficients(vectors, lowered, coefficients)
            vector_sums.append(vectors.sum(1, keepdim=True))
            found.append(encoders.lost_outside(lowered))
            for each, of_group in zip(begun, self._device.to_host(coefficients), strict=True):
                each.awaited.append((rows.index.numpy(), of_group))
                if self._device.shares_cores:
                    each.round()
        found.append(encoders.shift_sums(sum(vector_sums[1:], vector_sums[0]))[:, 0])
        for each, of_group in zip(begun, self._device.to_host(torch.cat(found, dim=1)), strict=True):
            each.of_rest = of_group
        return begun

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


class _Rounding:
    """The tokens of a segment in one group while they come to the host.

    ``awaited``: tokens, and their coefficients on the host, as soon as the stream has copied them.
    ``of_rest``: what ``SegmentSample.damage`` wants of the tokens that are not in the sample.
    """

    of_rest: torch.Tensor

    def __init__(self, sample: SegmentSample, group: int, step: float) -> None:
        of_sample = sample.groups[group]
        self.rounded = RoundedTokens.none(sample.segment.num_tokens, of_sample.num_kept(step))
        self.awaited: list[tuple[Integers, torch.Tensor]] = []
        self._worth, self._shifts, self._step = sample.worth[group], sample.shifts[group], step
        self._costs = of_sample.costs
        self._add(sample.rows, of_sample.coefficients)

    def round(self) -> None:
        """Round what has come."""
        for index, coefficients in self.awaited:
            self._add(index, coefficients.numpy())
        self.awaited.clear()

    def _add(self, rows: Integers, coefficients: Values) -> None:
        self._costs.mark_sinks(rows, coefficients, self._worth, self._shifts)
        self.rounded.add(rows, coefficients, token_steps(self._step, self._shifts[rows]), self._worth[rows])


def _first_tokens(layers: Sequence[LayerKV], segment: SegmentTokens) -> list[torch.Tensor]:
    """Copies of what is stored of a segment's first tokens, flat: keys and values of each layer."""
    return [part[: segment.num_first_tokens].flatten().clone() for kv in layers for part in tensors_of(kv)]
