"""Rounds coefficients to levels, with a finer step for tokens that attention dwells on, and says what the
errors of a group of layers are expected to cost; a sample shows it for any step."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from krul_backend.codec.coefficients.scales import BAND, ROUNDING, num_bands
from krul_backend.codec.subspace.bases import GroupBasis

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

LEAST_MAGNITUDE = 0.25
"""The last bands are left out if their mean magnitude is below this many steps. Nearly all their levels would
be zero, and the bytes save more in a finer step for the others."""

_SCATTER_TOKENS = 128
"""The scatter of errors is measured in at most so many tokens."""


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


@dataclass(frozen=True, eq=False)
class GroupErrors:
    """The errors that were made in the KV of some tokens in one group.

    Errors that differ from token to token cost each for itself, the more the more attention its token draws:
    ``own_damage`` is their cost in nats, before the model's factor. The error that all tokens share costs on
    top, since attention does not average it out. In text unlike the text learned from it is most of the loss,
    because the mean of its KV lies elsewhere. ``total [D]`` is the sum of the errors of ``num_tokens``, and
    ``scatter`` the sum of their squares, each channel times its ``shift_costs``.
    """

    basis: GroupBasis
    own_damage: float
    total: torch.Tensor
    scatter: float
    num_tokens: int

    @classmethod
    def none(cls, basis: GroupBasis) -> GroupErrors:
        return cls(basis, 0.0, torch.zeros_like(basis.mean), 0.0, 0)

    def with_tokens(
        self, vectors: torch.Tensor, coefficients: torch.Tensor, worth: torch.Tensor
    ) -> GroupErrors:
        """These and those of tokens whose ``vectors [T, D]``, less the mean, come back as exactly these first
        ``coefficients [T, any]`` say. What the others of the basis cost is not in ``own_damage`` yet.
        ``worth [T]``: see ``GroupBasis.token_worth``."""
        basis, decoder = self.basis, self.basis.decoder[: coefficients.shape[1]]
        own = (vectors @ basis.outside).square_().sum(1) @ worth
        total = coefficients.sum(0) @ decoder - vectors.sum(0)
        # Of some tokens, since this takes a product for each.
        few = slice(None, None, -(-len(vectors) // _SCATTER_TOKENS))
        squares = (coefficients[few] @ decoder).sub_(vectors[few]).square_().mean(0)
        return GroupErrors(
            basis,
            self.own_damage + float(own) / 2,
            self.total + total,
            self.scatter + len(vectors) * float(squares @ basis.shift_costs),
            self.num_tokens + len(vectors),
        )

    def with_rounding(self, errors: torch.Tensor, worth: torch.Tensor) -> GroupErrors:
        """These and ``errors [T, any]`` of first coefficients, of tokens that count already."""
        squares, num_kept = errors.square(), errors.shape[1]
        total = errors.sum(0) @ self.basis.decoder[:num_kept]
        # Coefficients are rounded each for itself.
        scatter = squares.sum(0) @ self.basis.scatter_costs[:num_kept]
        return GroupErrors(
            self.basis,
            self.own_damage + float(squares.sum(1) @ worth) / 2,
            self.total + total,
            self.scatter + float(scatter),
            self.num_tokens,
        )

    def with_left_out(self, damage: float) -> GroupErrors:
        """These, if coefficients that were left out cost so much more, each for itself."""
        return replace(self, own_damage=self.own_damage + damage)

    @property
    def shift_damage(self) -> float:
        """The expected damage, in nats, of the errors that all tokens have in common, if a whole conversation
        is like them.

        Errors without anything in common have a mean, too, of few tokens a large one. Its square is expected
        to be their scatter, and is taken off.
        """
        num_pairs = self.num_tokens * (self.num_tokens - 1)
        of_pairs = float(self.total.square() @ self.basis.shift_costs) - self.scatter
        return max(0.0, of_pairs) / num_pairs / 2 if num_pairs else 0.0


class Sample:
    """Some tokens of a segment in one group. They show what a step costs, and which coefficients are worth
    keeping.

    ``vectors [T, D]``, less the mean, have the ``coefficients [T, R]``. ``worth [T]`` of the tokens: 0 for
    those that are stored as they are. ``outside``: the errors that remain whatever the step.
    """

    def __init__(
        self, basis: GroupBasis, vectors: torch.Tensor, coefficients: torch.Tensor, worth: torch.Tensor
    ) -> None:
        self.num_tokens = len(coefficients)
        self.outside = GroupErrors.none(basis).with_tokens(vectors, coefficients, worth)
        self._coefficients = coefficients
        self._worth = worth
        self._shifts = step_shifts(worth)
        coded = coefficients[worth > 0] / token_steps(1, self._shifts[worth > 0])
        self._magnitudes = _band_means(coded.abs())
        self._largest = float(coded.abs().amax()) if coded.numel() else 0.0

    @property
    def smallest_unclipped_step(self) -> float:
        """The smallest step with which no level is clipped."""
        return self._largest / LARGEST_LEVEL

    def num_kept(self, step: float) -> int:
        """Count the coefficients that are kept: up to the last band that is not small, at least one band."""
        kept = (self._magnitudes >= LEAST_MAGNITUDE * step).nonzero()
        last_band = int(kept.max()) if len(kept) else 0
        return min((last_band + 1) * BAND, self._coefficients.shape[1])

    def left_out_damage(self, num_kept: int) -> float:
        """What leaving out the coefficients from ``num_kept`` on costs each of these tokens for itself."""
        return float(self._coefficients[:, num_kept:].square().sum(1) @ self._worth) / 2

    def rounded(self, step: float) -> GroupErrors:
        """The errors of these tokens with this step."""
        num_kept = self.num_kept(step)
        levels = quantize(self._coefficients[:, :num_kept], step, self._shifts)
        errors = self._coefficients.neg()
        errors[:, :num_kept] += dequantize(levels, step, self._shifts)
        return self.outside.with_rounding(errors, self._worth)


def _band_means(magnitudes: torch.Tensor) -> torch.Tensor:
    """The mean of each band of ``magnitudes [T, R]``: ``[number of bands]``."""
    if not len(magnitudes):
        return magnitudes.new_zeros(num_bands(magnitudes.shape[1]))
    return torch.stack([band.mean() for band in torch.split(magnitudes, BAND, dim=1)])
