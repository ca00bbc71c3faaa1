"""Rounds coefficients to levels, with a finer step for tokens that attention dwells on."""

from __future__ import annotations

import torch

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

WORTH_EXPONENT = -0.25
"""A token's step is in proportion to ``worth`` to this power. With -0.5, errors would cost the same in every
token if attention predicted worth exactly. But attention tells of the past only: a fact that nobody has asked
for yet has drawn none. Half of that exponent compresses nearly as well, and is safer."""

LARGEST_LEVEL = 32767


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
    magnitudes = scaled.abs().add_(ROUNDING).floor_().clamp_(max=LARGEST_LEVEL)
    return magnitudes.copysign_(scaled)


def dequantize(levels: torch.Tensor, step: float, shifts: torch.Tensor) -> torch.Tensor:
    """The coefficients that levels stand for: fp32 ``[T, R]``."""
    return levels.sub(levels.sign(), alpha=SHRINK).mul_(token_steps(step, shifts))
