"""Some tokens of a segment: what the bases cannot represent of them, and the step that a limit allows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from math import floor, log2

import numpy as np
import torch

from krul_backend.codec.coefficients.compiled import Values
from krul_backend.codec.coefficients.scales import BAND
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases
from krul_backend.codec.subspace.coded_tail import SegmentTokens
from krul_backend.codec.subspace.parameters import LARGEST_STEP, SMALLEST_STEP
from krul_backend.codec.subspace.quantizer import (
    LARGEST_LEVEL,
    RoundedTokens,
    Sums,
    coefficient_sums,
    token_steps,
)

LEAST_MAGNITUDE = 0.25
"""The last bands are left out if their mean magnitude is below this many steps. Nearly all their levels would
be zero, and the bytes save more in a finer step for the others."""

_NUM_STEPS = 4096
"""Steps that are chosen from, as many in each octave. They are 0.6 % apart at most."""

_SHIFT_RATIO = 0.3
"""About what the errors that tokens have in common cost over what those of their own cost: where the search
begins."""

_SLACK, _SLACK_OF_LIMIT = 0.005, 0.001
"""The search aims below the limit by these shares of what rounding may cost and of the limit, and ends within
as much around that: from one step to the next, rounding costs 0.5 to 1.2 % more."""

_NEWTON_ROUNDS = 10


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


def own_outside(basis: GroupBasis, vectors: torch.Tensor, worth: torch.Tensor) -> torch.Tensor:
    """What ``vectors [T, D]``, less the mean, lose outside of the basis, each for itself, in nats before the
    model's factor: fp32 ``[]``."""
    return (vectors @ basis.outside).square_().sum(1) @ worth / 2


def squared_total(basis: GroupBasis, restored: torch.Tensor, vector_sum: torch.Tensor) -> torch.Tensor:
    """The square of the sum of all errors in one group, each channel times its ``shift_costs``: fp32 ``[]``.

    ``restored [any]``: the sum of the first coefficients that come back. ``vector_sum [D]``: the sum of the
    true vectors, less the mean.
    """
    return (restored @ basis.decoder[: len(restored)]).sub_(vector_sum).square_() @ basis.shift_costs


def squared_totals(
    bases: ModelBases, restored: Sequence[Sums], vector_sums: Sequence[torch.Tensor]
) -> list[float]:
    """``squared_total`` of each group; ``restored`` is on the host, ``vector_sums`` on the bases' device,
    which is waited for once."""
    flat = torch.from_numpy(np.concatenate(restored).astype(np.float32)).to(vector_sums[0].device)
    parts = torch.split(flat, [len(each) for each in restored])
    totals: list[float] = torch.stack(
        [squared_total(*each) for each in zip(bases.groups, parts, vector_sums, strict=True)]
    ).tolist()
    return totals


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
    """The sampled tokens in one group, on the host.

    ``coefficients [n, R]``, ``worth [n]`` and ``shifts [n]`` of the tokens: the worth is 0 for those stored
    as they are. ``outside``: the errors that remain whatever the step. ``scatter_costs [R]``: see
    ``GroupBasis``.
    """

    def __init__(
        self,
        coefficients: Values,
        worth: Values,
        shifts: torch.Tensor,
        outside: GroupErrors,
        scatter_costs: Sums,
    ) -> None:
        self.outside = outside
        self.num_tokens, self._rank = len(coefficients), int(coefficients.shape[1])
        self._coefficients = coefficients
        self._worth = worth
        self._shifts = shifts
        self._scatter_costs = scatter_costs
        steps = token_steps(1, shifts)
        sums = np.zeros((3, self._rank))
        self._largest = coefficient_sums(coefficients, steps, worth, sums)
        self._squares, self._own = sums[0], sums[1] / 2
        starts = np.arange(0, self._rank, BAND)
        count = np.maximum(1, np.diff(starts, append=self._rank) * np.count_nonzero(worth > 0))
        self._magnitudes = np.add.reduceat(sums[2], starts) / count
        self.unit_damage = float(np.square(steps) @ worth) * self._rank / 24
        """What rounding with a step of 1 costs where no level is zero."""

    @property
    def smallest_unclipped_step(self) -> float:
        """The smallest step with which no level is clipped."""
        return self._largest / LARGEST_LEVEL

    def num_kept(self, step: float) -> int:
        """Count the coefficients that are kept: up to the last band that is not small, at least one band."""
        last_band = int((self._magnitudes >= LEAST_MAGNITUDE * step).nonzero()[0].max(initial=0))
        return min((last_band + 1) * BAND, self._rank)

    def rounded(self, step: float) -> RoundedTokens:
        """The tokens with this step."""
        rounded = RoundedTokens.none(self.num_tokens, self.num_kept(step))
        rounded.add(0, self._coefficients, token_steps(step, self._shifts), self._worth)
        return rounded

    def rounding_damage(self, rounded: RoundedTokens) -> float:
        """What the errors of rounding cost each of these tokens for itself, and leaving out coefficients."""
        return rounded.own_damage + float(self._own[len(rounded.restored) :].sum())

    def errors(
        self, rounded: RoundedTokens, num_tokens: int, own_outside: float, squared_total: float
    ) -> GroupErrors:
        """The errors of ``num_tokens`` that were rounded, of which these are a sample. ``own_outside``: what
        they lose outside of the basis. ``squared_total``: see ``GroupErrors``."""
        share, num_kept = num_tokens / self.num_tokens, len(rounded.restored)
        # Coefficients are rounded each for itself.
        scatter = float(rounded.squares @ self._scatter_costs[:num_kept])
        left_out = float(self._squares[num_kept:] @ self._scatter_costs[num_kept:])
        return GroupErrors(
            own_outside + rounded.own_damage + share * float(self._own[num_kept:].sum()),
            squared_total,
            scatter + share * (self.outside.scatter + left_out),
            num_tokens,
        )


@dataclass(frozen=True, eq=False)
class SegmentSample:
    """What ``SubspaceCodec.sample`` has read of a segment, some of its tokens or all. Encoding it begins with
    that.

    ``worth`` fp32 and ``shifts`` int8 ``[groups, T]``: of all tokens of the segment, on the CPU.
    ``vector_sums [D]``: of each group, see ``squared_totals``. ``first_tokens`` uint8: of each group what is
    stored of the segment's first tokens.
    """

    bases: ModelBases
    segment: SegmentTokens
    worth: torch.Tensor
    shifts: torch.Tensor
    groups: Sequence[GroupSample]
    vector_sums: Sequence[torch.Tensor]
    first_tokens: Sequence[torch.Tensor]

    @property
    def has_all(self) -> bool:
        """Whether every token of the segment is in the sample."""
        return bool(self.groups[0].num_tokens == self.segment.num_tokens)

    @property
    def outside(self) -> float:
        """The damage, in nats per predicted token, of what lies outside of the bases, which no step keeps."""
        return segment_damage(self.bases, self.segment, (group.outside for group in self.groups))[0]

    def choose_step(self, max_damage: float) -> tuple[float, tuple[float, float]]:
        """The largest step, or one that is nearly as large, with which the sampled tokens are expected to
        stay within the limit, or else the smallest one with which none of their levels is clipped. With it
        comes the damage that is expected, see ``segment_damage``."""
        # Below, damage would rise again, and the search would end at a step that clips nearly everything.
        unclipped = max(group.smallest_unclipped_step for group in self.groups)
        low = log2(max(SMALLEST_STEP, min(unclipped, LARGEST_STEP)))
        cell = (log2(LARGEST_STEP) - low) / _NUM_STEPS
        factor = self.bases.damage_factor * self.segment.num_tokens / self.groups[0].num_tokens
        outside = [group.outside.own_damage for group in self.groups]
        known: dict[int, tuple[float, list[RoundedTokens]]] = {}

        def own(place: int) -> float:
            """What the tokens' own errors cost that rounding makes. Only the host works for it."""
            if place not in known:
                rounded = [group.rounded(2 ** (low + cell * place)) for group in self.groups]
                parts = zip(self.groups, rounded, strict=True)
                damage = sum(group.rounding_damage(each) for group, each in parts)
                # Their levels are not needed again.
                known[place] = factor * damage, [each.without_levels() for each in rounded]
            return known[place][0]

        def damage(place: int) -> tuple[float, float]:
            """All that the tokens lose. That takes a product in each group."""
            own(place)
            return self.damage(known[place][1], self.vector_sums, outside, self.groups[0].num_tokens)

        within, beyond, ratio = 0, _NUM_STEPS, _SHIFT_RATIO
        room, unit = max_damage - self.outside, factor * sum(group.unit_damage for group in self.groups)
        place = floor((log2(room / unit) / 2 - low) / cell) if room > 0 and unit > 0 else 0
        expected, slack = None, _SLACK * room + _SLACK_OF_LIMIT * max_damage
        while room > 0 and beyond - within > 1:
            # Errors in common cost about as much more than the tokens' own as they do at steps nearby.
            aim = (room - slack) / (1 + ratio)
            place = _last_within(own, aim, within, beyond, place, 2 * cell)
            found = damage(place)
            if found[0] > max_damage:
                beyond = place
            else:
                within, expected = place, found
                if found[0] >= max_damage - 2 * slack:
                    break
            if own(place) > 0:
                ratio = max(-0.9, (found[0] - self.outside) / own(place) - 1)
        return float(2 ** (low + cell * within)), damage(within) if expected is None else expected

    def damage(
        self,
        rounded: Sequence[RoundedTokens],
        vector_sums: Sequence[torch.Tensor],
        own_outside: Sequence[float],
        num_tokens: int,
    ) -> tuple[float, float]:
        """The damage of the segment, as ``segment_damage`` returns it, by ``num_tokens`` of it that were
        rounded, in each group. ``vector_sums``: see ``squared_totals``; ``own_outside``: see
        ``GroupSample.errors``."""
        totals = squared_totals(self.bases, [each.restored for each in rounded], vector_sums)
        errors = (
            group.errors(each, num_tokens, own, total)
            for group, each, own, total in zip(self.groups, rounded, own_outside, totals, strict=True)
        )
        return segment_damage(self.bases, self.segment, errors)


def _last_within(
    cost: Callable[[int], float], limit: float, within: int, beyond: int, start: int, slope: float
) -> int:
    """The last place between ``within`` and ``beyond``, or else the first, whose ``cost``, which rises, is at
    most ``limit``. ``slope``: about the octaves of cost from one place to the next near ``start``."""
    first, place, before, least = within + 1, start, None, slope / 8
    for round_number in range(beyond - within):
        if beyond - within <= 1:
            break
        if round_number >= _NEWTON_ROUNDS:
            place = (within + beyond) // 2
        place = min(max(place, within + 1), beyond - 1)
        found = cost(place)
        within, beyond = (place, beyond) if found <= limit else (within, place)
        if found <= 0:
            place = beyond - 1
            continue
        if before is not None and abs(place - before[0]) > 3 and found != before[1]:
            slope = max(least, log2(found / before[1]) / (place - before[0]))
        before = (place, found)
        place += floor(log2(limit / found) / slope)
    return max(first, within)
