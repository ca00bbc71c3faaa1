"""Some tokens of a segment: what the bases cannot represent of them, and the step that a limit allows.

What is needed of them is fetched from the device at once; all else happens on the host.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from math import log2

import numpy as np
import torch

from krul_backend.codec.coefficients.scales import BAND, Integers, Shifts, Values, num_bands
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases
from krul_backend.codec.subspace.coded_tail import SegmentTokens
from krul_backend.codec.subspace.parameters import LARGEST_STEP, SMALLEST_STEP
from krul_backend.codec.subspace.quantizer import (
    FINEST_SHIFT,
    RoundedTokens,
    Sums,
    add_up_sample,
    token_steps,
)
from krul_backend.machine_code import compiled

LEAST_MAGNITUDE = 0.25
"""The last bands are left out if their mean magnitude is below this many steps. Nearly all their levels would
be zero, and the bytes save more in a finer step for the others."""

_SINK_WORTH, _SINK_NEARNESS, _SINK_COEFFICIENTS = 256.0, 0.2, 64
"""A sink is worth that many average tokens. Its squared distance from KV that is zero is below this share of
theirs, in so many coefficients."""

_SLACK, _SLACK_OF_LIMIT = 0.005, 0.001
"""The search aims below the limit by these shares of what rounding may cost and of the limit, and ends within
as much around that."""

_SLOPE, _LEAST_SLOPE, _LARGEST_SLOPE = 1.7, 0.5, 4.0
"""By so many octaves about, at least and at most, the cost of rounding rises with each octave of the step."""

_ROUNDS_BY_SLOPE = 8
"""After so many rounds the search only halves what is left."""

_LEAST_OCTAVES = 1 / 256
"""The search ends when the step is known as exactly as this."""

_NONE = np.zeros(1, np.float32)


@dataclass(frozen=True)
class GroupErrors:
    """The errors that were made in the KV of some tokens in one group.

    Errors that differ from token to token cost each for itself, the more the more attention its token draws:
    ``own_damage`` is their cost in nats, before the model's factor. The error that all tokens share costs on
    top, since attention does not average it out. In text unlike the text learned from it is most of the loss,
    because the mean of its KV lies elsewhere. ``squared_total`` is the square of the sum of the errors of
    ``num_tokens``, and ``scatter`` the sum of their squares, each channel times its ``shift_costs``.
    """

    own_damage: float
    squared_total: float
    scatter: float
    num_tokens: int

    @property
    def shift_damage(self) -> float:
        """The expected damage, in nats, of the errors that all tokens have in common, if a whole conversation
        is like them.

        Errors without anything in common have a mean, too, of few tokens a large one. Its square is expected
        to be their scatter, and is taken off.
        """
        num_pairs = self.num_tokens * (self.num_tokens - 1)
        return max(0.0, self.squared_total - self.scatter) / num_pairs / 2 if num_pairs else 0.0


def segment_damage(
    bases: ModelBases, segment: SegmentTokens, groups: Iterable[GroupErrors]
) -> tuple[float, float]:
    """Return the damage in nats that is expected of a segment whose tokens have such errors, group by group,
    and the part of it that comes from the errors that they have in common."""
    own = shift = 0.0
    for errors in groups:
        own += errors.own_damage * segment.num_tokens / errors.num_tokens
        shift += errors.shift_damage
    shift *= segment.num_tokens / (segment.start_token + segment.num_tokens)
    return bases.damage_factor * own + shift, shift


@dataclass(frozen=True, eq=False)
class ErrorCosts:
    """Holds the costs of errors in a group's coefficients, on the host: ``GroupBasis.scatter_costs [R]``, and
    ``GroupBasis.shift_sums`` of the decoder, ``[R, sums]``. ``zero [any]``: the first coefficients of KV that
    is zero. ``reach [any]``: sinks are within this squared distance from it, in those up to each one."""

    scatter: Sums
    shift: Values
    zero: Values
    reach: Values

    @classmethod
    def of(cls, basis: GroupBasis) -> ErrorCosts:
        shift, zero = basis.shift_sums(basis.decoder), -basis.mean @ basis.encoder[:, :_SINK_COEFFICIENTS]
        mean, around = (x.square().cumsum(0) for x in (zero, basis.deviations[: len(zero)]))
        # Where the mean is small, other tokens may be as near to zero.
        reach = torch.where(mean > around, _SINK_NEARNESS * (mean + around), 0)
        parts = shift, zero, reach
        return cls(basis.scatter_costs.double().cpu().numpy(), *(part.cpu().numpy() for part in parts))

    def mark_sinks(self, rows: Integers, coefficients: Values, worth: Values, shifts: Shifts) -> None:
        """Give the sinks among the tokens ``rows [n]``, with ``coefficients [n, any]``, the worth of a sink
        and the finest step: in ``worth [T]`` and ``shifts [T]``, which have all tokens of the segment.

        A sink has KV near zero and draws attention from whatever follows, as a conversation's first token
        does. Text that repeats itself makes sinks of many tokens (Yona et al. 2025, arXiv 2503.08908). Only
        later text attends to them, so that the attention which they have drawn does not show it.
        """
        num_known = min(coefficients.shape[1], len(self.zero))
        distances = np.square(coefficients[:, :num_known] - self.zero[:num_known]).sum(1)
        sinks = rows[(distances < self.reach[num_known - 1]) & (worth[rows] > 0)]
        worth[sinks] = np.maximum(worth[sinks], _SINK_WORTH)
        shifts[sinks] = FINEST_SHIFT

    def squared_total(self, restored: Sums, vector_sum: Values) -> float:
        """See ``GroupErrors``. ``restored [any]``: the sum of the first coefficients that come back.
        ``vector_sum [sums]``: ``GroupBasis.shift_sums`` of the sum of the true vectors, less the mean."""
        return _squared_difference(restored, self.shift, vector_sum)


@compiled
def _squared_difference(restored: Sums, shift: Values, vector_sum: Values) -> float:
    total = -vector_sum.astype(np.float64)
    for index in range(len(restored)):
        for place in range(len(total)):
            total[place] += restored[index] * shift[index, place]
    return float((total * total).sum())


@cache
def scatter_signs(num_tokens: int) -> torch.Tensor:
    """Numbers of -1, 0 and 1 that sum to 0, one for each of the tokens, always the same: fp32 ``[T]``."""
    order = torch.randperm(num_tokens, generator=torch.Generator().manual_seed(0))
    signs = torch.zeros(num_tokens)
    half = num_tokens // 2
    signs[order[:half]], signs[order[half : 2 * half]] = 1.0, -1.0
    return signs


def scatter_of(squared_total: float, squared_signed: float, num_tokens: int) -> float:
    """Estimate the sum of the squares of vectors by the squares of two sums of them: one of all, and one in
    which each has one of ``scatter_signs``. In the second, what they have in common is gone."""
    num_signs = num_tokens // 2 * 2
    spread = (num_tokens - 1) / num_signs * squared_signed if num_signs else 0.0
    return spread + squared_total / num_tokens


class GroupSample:
    """The sampled tokens in one group.

    ``coefficients [n, R]``, ``worth [n]`` and ``shifts [n]`` of the tokens: the worth is 0 for those stored
    as they are. ``lost_outside [n]``: the squares of what they lose outside of the basis. ``vector_sums [2,
    sums]``: of all of them, and times ``scatter_signs``; see ``ErrorCosts.squared_total``.
    """

    def __init__(
        self,
        coefficients: Values,
        worth: Values,
        shifts: Shifts,
        lost_outside: Values,
        vector_sums: Values,
        costs: ErrorCosts,
    ) -> None:
        self.num_tokens, self._rank = len(coefficients), int(coefficients.shape[1])
        self.coefficients = coefficients
        self._vector_sum = vector_sums[0]
        self._rows = np.arange(self.num_tokens)
        self._worth = worth
        self._steps = token_steps(1, shifts)
        self.costs = costs
        totals = np.zeros((2, self._rank))
        # Of the coefficients, or the bands, from each one on.
        self._left_out = np.zeros((2, self._rank + 1))
        self._magnitudes = np.zeros(num_bands(self._rank), np.float32)
        signs = scatter_signs(self.num_tokens).numpy()
        self.smallest_unclipped_step = add_up_sample(
            coefficients, self._steps, worth, signs, costs.scatter, totals, self._left_out, self._magnitudes
        )
        """The smallest step with which no level is clipped."""
        self.unit_damage = float(np.square(self._steps) @ worth) * self._rank / 24
        """The damage of rounding with a step of 1, if no level is zero."""
        total, signed = map(costs.squared_total, totals, vector_sums)
        scatter = scatter_of(total, signed, self.num_tokens)
        self.outside = GroupErrors(float(worth @ lost_outside) / 2, total, scatter, self.num_tokens)
        """The errors that remain whatever the step."""

    def num_kept(self, step: float) -> int:
        """Count the coefficients that are kept: up to the last band that is not small, at least one band."""
        kept_bands = int(np.count_nonzero(self._magnitudes >= LEAST_MAGNITUDE * step))
        return min(max(1, kept_bands) * BAND, self._rank)

    def rounded(self, step: float) -> RoundedTokens:
        """The tokens with this step."""
        rounded = RoundedTokens.none(self.num_tokens, self.num_kept(step))
        rounded.add(self._rows, self.coefficients, np.float32(step) * self._steps, self._worth)
        return rounded

    def errors(
        self, rounded: RoundedTokens, num_others: int = 0, own_outside: float = 0.0, of_others: Values = _NONE
    ) -> GroupErrors:
        """The errors of tokens that were rounded: these, and ``num_others`` of which these are a sample, and
        which lose ``own_outside`` outside of the basis, each for itself. ``of_others``: the sum of their
        vectors, see ``ErrorCosts.squared_total``."""
        num_tokens, num_kept = self.num_tokens + num_others, len(rounded.restored)
        share = num_tokens / self.num_tokens
        # Coefficients are rounded each for itself.
        scatter = float(rounded.squares @ self.costs.scatter[:num_kept])
        left_out, left_out_scatter = self._left_out[:, num_kept].tolist()
        return GroupErrors(
            self.outside.own_damage + own_outside + rounded.own_damage + share * left_out,
            self.costs.squared_total(rounded.restored, self._vector_sum + of_others),
            scatter + share * (self.outside.scatter + left_out_scatter),
            num_tokens,
        )


@dataclass(frozen=True, eq=False)
class ChosenStep:
    """A step, the sampled tokens rounded with it in each group, and the damage that is expected of the
    segment: all of it, and the part that ``segment_damage`` says."""

    step: float
    rounded: Sequence[RoundedTokens]
    damage: float
    shift_damage: float


@dataclass(frozen=True, eq=False)
class SegmentSample:
    """What ``SubspaceCodec.sample`` has read of a segment, some of its tokens or all. Encoding it begins with
    that.

    ``rows`` int64 ``[n]``: the sampled tokens. ``worth`` fp32 and ``shifts`` int8 ``[groups, T]``: of all
    tokens of the segment, on the CPU. ``first_tokens`` uint8: of each group what is stored of the segment's
    first tokens. ``rounding``: the damage of rounding what comes back to an fp8 pool.
    """

    bases: ModelBases
    segment: SegmentTokens
    rows: Integers
    worth: Values
    shifts: Shifts
    groups: Sequence[GroupSample]
    first_tokens: Sequence[torch.Tensor]
    rounding: float = 0.0

    @property
    def has_all(self) -> bool:
        """Whether every token of the segment is in the sample."""
        return len(self.rows) == self.segment.num_tokens

    @cached_property
    def others(self) -> Integers:
        """The tokens of the segment that are not in the sample."""
        return np.delete(np.arange(self.segment.num_tokens), self.rows)

    @cached_property
    def outside(self) -> float:
        """The damage, in nats per predicted token, whatever the step: of what lies outside of the bases, and
        of rounding to a pool's elements."""
        outside, _ = segment_damage(self.bases, self.segment, (group.outside for group in self.groups))
        return outside + self.rounding

    @property
    def all_lost(self) -> float:
        """The damage, in nats per predicted token, if the mean came back for each of these tokens."""
        return self._tried(60.0).damage  # octaves: all levels are zero

    def choose_step(self, max_damage: float) -> ChosenStep:
        """The largest step, or one that is nearly as large, with which the sampled tokens are expected to
        stay within the limit, or else the smallest one with which none of their levels is clipped."""
        # Below, damage would rise again, and the search would end at a step that clips nearly everything.
        unclipped = max(group.smallest_unclipped_step for group in self.groups)
        within, largest = log2(max(SMALLEST_STEP, min(unclipped, LARGEST_STEP))), log2(LARGEST_STEP)
        beyond = largest + _LEAST_OCTAVES / 2
        room, chosen = max_damage - self.outside, None
        slack = _SLACK * room + _SLACK_OF_LIMIT * max_damage
        # As if no level were zero.
        share = self.bases.damage_factor * self.segment.num_tokens / len(self.rows)
        unit = share * sum(group.unit_damage for group in self.groups)
        place = log2(room / unit) / 2 if room > 0 and unit > 0 else within
        slope, before, num_rounds = _SLOPE, None, 0
        while room > 0 and beyond - within > _LEAST_OCTAVES:
            place = min(place, largest)
            if num_rounds >= _ROUNDS_BY_SLOPE or not within < place < beyond:
                place = (within + beyond) / 2
            tried = self._tried(place)
            if tried.damage > max_damage:
                beyond = place
            else:
                within, chosen = place, tried
                if tried.damage >= max_damage - 2 * slack:
                    break
            # In octaves of what is left for rounding.
            cost = log2(max(1e-9, (tried.damage - self.outside) / (room - slack)))
            if before is not None:
                slope = (cost - before[1]) / (place - before[0])
            before = (place, cost)
            place -= cost / min(max(slope, _LEAST_SLOPE), _LARGEST_SLOPE)
            num_rounds += 1
        return chosen or self._tried(within)

    def _tried(self, octave: float) -> ChosenStep:
        step = 2.0**octave
        rounded = [group.rounded(step) for group in self.groups]
        return ChosenStep(step, rounded, *self.damage(rounded))

    def damage(
        self, rounded: Sequence[RoundedTokens], of_others: Values | None = None
    ) -> tuple[float, float]:
        """The damage of the segment, as ``segment_damage`` returns it, by what was ``rounded`` in each group:
        the sample, or all of it. Then ``of_others [groups, any + sums]`` has the square of what each of the
        ``others`` loses outside of the basis, and the sum of their vectors, see ``ErrorCosts``."""
        groups = zip(self.groups, rounded, strict=True)
        if of_others is None:
            errors = [group.errors(each) for group, each in groups]
        else:
            num_others = len(self.others)
            own = (self.worth[:, self.others] * of_others[:, :num_others]).sum(1) / 2
            errors = [
                group.errors(each, num_others, float(own[index]), of_others[index, num_others:])
                for index, (group, each) in enumerate(groups)
            ]
        lost, shift = segment_damage(self.bases, self.segment, errors)
        return lost + self.rounding, shift
