"""Rounds coefficients to levels, with a finer step for tokens that attention dwells on."""

from __future__ import annotations

import torch

from krul_backend.codec.coefficients.scales import BAND, num_bands

ROUNDING = 0.4
"""Added to magnitudes, in steps, before they are rounded down. It is below 0.5, so that zero has a wider
range than the other levels."""

SHRINK = 0.04
"""Levels are read back nearer to zero by this many steps, because small magnitudes are more frequent than
large ones."""

SHIFTS_PER_OCTAVE = 2
COARSEST_SHIFT = 2
FINEST_SHIFT = -4
"""A token's step is the segment's times ``2 ** (shift / 2)``, with a shift from -4 to 2: a quarter to
twice."""

LEAST_MAGNITUDE = 0.25
"""The last bands are left out if their mean magnitude is below this many steps. Nearly all their levels would
be zero, and the bytes save more in a finer step for the others."""

WORTH_EXPONENT = -0.25
"""A token's step is in proportion to ``worth`` to this power. With -0.5, errors would cost the same in every
token if attention predicted worth exactly. But attention tells of the past only: a fact that nobody has asked
for yet has drawn none. Half of that exponent compresses nearly as well, and is safer."""

_LARGEST_LEVEL = 32767


def step_shifts(worth: torch.Tensor) -> torch.Tensor:
    """The shift of each token's step: int8 ``[T]``. ``worth [T]``, see ``GroupBasis.token_worth``."""
    octaves = worth.clamp_min(2.0**-40).log2() * WORTH_EXPONENT
    return (octaves * SHIFTS_PER_OCTAVE).round().clamp(FINEST_SHIFT, COARSEST_SHIFT).to(torch.int8)


def token_steps(step: float, shifts: torch.Tensor) -> torch.Tensor:
    """The step of each token: fp32 ``[T, 1]``."""
    return (step * torch.exp2(shifts.float() / SHIFTS_PER_OCTAVE))[:, None]


def quantize(coefficients: torch.Tensor, step: float, shifts: torch.Tensor) -> torch.Tensor:
    """Levels of ``coefficients [T, R]``: fp32 whole numbers of the same shape."""
    scaled = coefficients / token_steps(step, shifts)
    magnitudes = scaled.abs().add_(ROUNDING).floor_().clamp_(max=_LARGEST_LEVEL)
    return magnitudes.copysign_(scaled)


def dequantize(levels: torch.Tensor, step: float, shifts: torch.Tensor) -> torch.Tensor:
    """The coefficients that levels stand for: fp32 ``[T, R]``."""
    return levels.sub(levels.sign(), alpha=SHRINK).mul_(token_steps(step, shifts))


def expected_damage(
    coefficients: torch.Tensor, levels: torch.Tensor, step: float, shifts: torch.Tensor, worth: torch.Tensor
) -> float:
    """The divergence in nats per predicted token that rounding ``coefficients [T, R]`` to ``levels`` is
    expected to cause."""
    errors = dequantize(levels, step, shifts).sub_(coefficients)
    return float(errors.square_().sum(1) @ worth) / 2


class Sample:
    """Some tokens of a segment. They show what a step costs, and which coefficients are worth keeping.

    ``coefficients [T, R]`` of one group. ``worth [T]`` of the tokens: 0 for those that are stored
    as they are.
    """

    def __init__(self, coefficients: torch.Tensor, worth: torch.Tensor) -> None:
        self.num_tokens = len(coefficients)
        self._coefficients = coefficients
        self._worth = worth
        self._shifts = step_shifts(worth)
        coded = coefficients[worth > 0] / token_steps(1, self._shifts[worth > 0])
        self._magnitudes = _band_means(coded.abs())
        self._largest = float(coded.abs().amax()) if coded.numel() else 0.0
        squares = coefficients.square().T @ worth
        self._squares_from = torch.cat([squares.flip(0).cumsum(0).flip(0), squares.new_zeros(1)])

    @property
    def smallest_unclipped_step(self) -> float:
        """The smallest step with which no level is clipped."""
        return self._largest / _LARGEST_LEVEL

    def num_kept(self, step: float) -> int:
        """How many coefficients are kept: all up to the last band that is not small, at least one band."""
        kept = (self._magnitudes >= LEAST_MAGNITUDE * step).nonzero()
        last_band = int(kept.max()) if len(kept) else 0
        return min((last_band + 1) * BAND, self._coefficients.shape[1])

    def left_out_damage(self, num_kept: int) -> float:
        """The divergence of leaving out the coefficients from ``num_kept`` on, in these tokens."""
        return float(self._squares_from[num_kept]) / 2

    def damage(self, step: float) -> float:
        """The divergence in nats per predicted token that a step is expected to cause in these tokens."""
        num_kept = self.num_kept(step)
        kept = self._coefficients[:, :num_kept]
        levels = quantize(kept, step, self._shifts)
        rounding = expected_damage(kept, levels, step, self._shifts, self._worth)
        return rounding + self.left_out_damage(num_kept)


def _band_means(magnitudes: torch.Tensor) -> torch.Tensor:
    """The mean of each band of ``magnitudes [T, R]``: ``[number of bands]``."""
    if not len(magnitudes):
        return magnitudes.new_zeros(num_bands(magnitudes.shape[1]))
    return torch.stack([band.mean() for band in torch.split(magnitudes, BAND, dim=1)])
