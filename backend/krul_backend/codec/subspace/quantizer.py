"""Rounds coefficients to levels, with a finer step for tokens that attention dwells on, and adds up what
their errors cost.

That happens on the host, where the coder wants the levels: one compiled loop goes through the coefficients
once, and nothing is launched on a device, which is waited for once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.codec.coefficients.scales import (
    BAND,
    RECORD_TOKENS,
    ROUNDING,
    Integers,
    Levels,
    Shifts,
    Values,
)
from krul_backend.machine_code import compiled

SHRINK = 0.04
"""Levels are read back nearer to zero by this many steps, because small magnitudes are more frequent than
large ones."""

SHIFTS_PER_OCTAVE = 2
COARSEST_SHIFT = 2
FINEST_SHIFT = -4
"""A token's step is the segment's times ``2 ** (shift / 2)``, with a shift from -4 to 2: a quarter to
twice."""

WORTH_EXPONENT = -0.25
"""A token's step is in proportion to ``worth`` to this power. With -0.5, errors would cost the same in every
token if attention predicted worth exactly. But attention tells of the past only: a fact that nobody has asked
for yet has drawn none. Half of that exponent compresses nearly as well, and is safer."""

LARGEST_LEVEL = 32767

Sums = NDArray[np.float64]

_UNIT_STEPS = np.exp2(np.arange(FINEST_SHIFT, COARSEST_SHIFT + 1) / SHIFTS_PER_OCTAVE).astype(np.float32)
_ROUNDING, _SHRINK, _LARGEST, _ONE = (np.float32(each) for each in (ROUNDING, SHRINK, LARGEST_LEVEL, 1))


def step_shifts(worth: torch.Tensor) -> torch.Tensor:
    """The shift of each token's step: int8, in the shape of ``worth``; see ``GroupBasis.token_worth``."""
    octaves = worth.clamp_min(2.0**-40).log2() * WORTH_EXPONENT
    return (octaves * SHIFTS_PER_OCTAVE).round().clamp(FINEST_SHIFT, COARSEST_SHIFT).to(torch.int8)


def token_steps(step: float, shifts: Shifts) -> Values:
    """The step of each token, ``shifts`` int8 ``[T]``: float32 ``[T]``."""
    steps: Values = np.float32(step) * _UNIT_STEPS[shifts - FINEST_SHIFT]
    return steps


@dataclass(frozen=True, eq=False)
class RoundedTokens:
    """The levels int16 ``[T, K]`` of the first ``K`` coefficients of some tokens in one group.

    ``sums`` float64 ``[4, K]`` over the tokens: of what the levels stand for, of the squares of the errors,
    of these squares times the worth of their token, and of the coefficients' magnitudes.
    """

    levels: Levels
    sums: Sums

    @classmethod
    def none(cls, num_tokens: int, num_kept: int) -> RoundedTokens:
        """Room for the levels of so many tokens, which ``add`` fills."""
        return cls(np.empty((num_tokens, num_kept), np.int16), np.zeros((4, num_kept)))

    def add(self, rows: Integers, coefficients: Values, steps: Values, worth: Values) -> None:
        """Round the first of ``coefficients [n, any]`` of the tokens ``rows [n]``, with the step of each,
        ``steps [n]``. ``worth [n]``: see ``GroupBasis.token_worth``."""
        _round_tokens(rows, coefficients, steps, worth, self.levels, self.sums)

    def without_levels(self) -> RoundedTokens:
        """The sums alone."""
        return RoundedTokens(self.levels[:0].copy(), self.sums)

    @property
    def restored(self) -> Sums:
        """``[K]``: the sum of what the tokens' levels stand for."""
        row: Sums = self.sums[0]
        return row

    @property
    def squares(self) -> Sums:
        """``[K]``: the sum of the squares of the tokens' errors."""
        row: Sums = self.sums[1]
        return row

    @property
    def own_damage(self) -> float:
        """What the errors cost in nats, each token's for itself, before the model's factor."""
        return float(self.sums[2].sum()) / 2

    @property
    def magnitudes(self) -> Sums:
        """``[K]``: the sum of the magnitudes of the tokens' coefficients."""
        row: Sums = self.sums[3]
        return row


@compiled
def _round_tokens(
    rows: Integers, coefficients: Values, steps: Values, worth: Values, levels: Levels, sums: Sums
) -> None:
    num_kept = levels.shape[1]
    # Added up in fp32 for some tokens at a time: that is faster, and as exact as it need be.
    part = np.empty((4, num_kept), np.float32)
    for first in range(0, len(rows), RECORD_TOKENS):
        part[:] = 0
        for token in range(first, min(first + RECORD_TOKENS, len(rows))):
            step, weight, row = steps[token], worth[token], levels[rows[token]]
            for index in range(num_kept):
                value = coefficients[token, index]
                scaled = value / step
                level = min(np.floor(abs(scaled) + _ROUNDING), _LARGEST)
                row[index] = np.int16(np.copysign(level, scaled))
                restored = np.copysign((level - _SHRINK * min(level, _ONE)) * step, scaled)
                error = restored - value
                square = error * error
                part[0, index] += restored
                part[1, index] += square
                part[2, index] += square * weight
                part[3, index] += abs(value)
        for row_of_sums in range(4):
            for index in range(num_kept):
                sums[row_of_sums, index] += part[row_of_sums, index]


@compiled
def add_up_sample(
    coefficients: Values,
    steps: Values,
    worth: Values,
    signs: Values,
    scatter_costs: Sums,
    totals: Sums,
    left_out: Sums,
    magnitudes: Values,
) -> float:
    """Add up ``coefficients [T, R]`` of tokens with ``steps [T]`` and ``worth [T]``; those that are worth
    nothing count as 0. Return the smallest step of the segment with which no level is clipped.

    ``totals [2, R]`` get the sums over the tokens, as they are and times ``signs [T]``. ``left_out [2, R +
    1]`` get what it costs to leave out the coefficients from each one on: each token for itself, and squares
    times ``scatter_costs [R]``. ``magnitudes [bands]`` get the largest mean of a band's magnitudes, in units
    of ``steps``, from each band on.
    """
    num_tokens, rank = coefficients.shape
    part = np.empty((5, rank), np.float32)
    sums = np.zeros((5, rank))
    largest = np.zeros(rank, np.float32)
    num_counted = 0
    for first in range(0, num_tokens, RECORD_TOKENS):
        part[:] = 0
        for token in range(first, min(first + RECORD_TOKENS, num_tokens)):
            weight, sign = worth[token], signs[token]
            if weight <= 0:
                continue
            num_counted += 1
            inverse = _ONE / steps[token]
            for index in range(rank):
                value = coefficients[token, index]
                magnitude = abs(value) * inverse
                part[0, index] += value
                part[1, index] += value * sign
                part[2, index] += value * value
                part[3, index] += value * value * weight
                part[4, index] += magnitude
                largest[index] = max(largest[index], magnitude)
        for row in range(5):
            for index in range(rank):
                sums[row, index] += part[row, index]
    totals[:] = sums[:2]
    for index in range(rank - 1, -1, -1):
        left_out[0, index] = left_out[0, index + 1] + sums[3, index] / 2
        left_out[1, index] = left_out[1, index + 1] + sums[2, index] * scatter_costs[index]
    above = np.float64(0)
    for band in range(len(magnitudes) - 1, -1, -1):
        of_band = sums[4, band * BAND : min((band + 1) * BAND, rank)]
        above = max(above, of_band.sum() / max(1, len(of_band) * num_counted))
        magnitudes[band] = above
    return float(largest.max()) / LARGEST_LEVEL
