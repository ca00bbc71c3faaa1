"""One direction for the vectors of two layers: spherical interpolation (MiniCache, section 4)."""

from __future__ import annotations

import math

import torch

_SMALLEST_NORM = 1e-30
"""Shorter vectors have no direction."""

_SMALLEST_SINE = 1e-4
"""Below it ``sin((1 - t) W) / sin W`` is more rounding than number, and linear weights differ from it by less
than 1e-8 relative (at W near 0; near pi no interpolation is better than another)."""


def unit_directions(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``x [..., D]`` as unit vectors ``[..., D]`` and norms ``[..., 1]``; the direction of zero is zero."""
    norms = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x / norms.clamp(min=_SMALLEST_NORM), norms


def cosines(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """Cosine of the angle between unit vectors ``[..., D]``: ``[..., 1]`` in [-1, 1]."""
    return (first * second).sum(dim=-1, keepdim=True).clamp_(-1, 1)


def angular_distance(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
    """``arccos(cosine) / pi`` of unit vectors ``[..., D]``: ``[...]`` in [0, 1] (MiniCache, equation 5)."""
    return torch.arccos(cosines(first, second)).squeeze(-1) / math.pi


def slerp(first: torch.Tensor, second: torch.Tensor, t: float) -> torch.Tensor:
    """The unit vector at ``t`` of the way along the great circle from ``first`` to ``second`` (both unit).

    ``sin((1 - t) W) / sin W * first + sin(t W) / sin W * second`` with ``W = arccos(cosine)`` (MiniCache,
    equation 3). Where the vectors are parallel or opposite, the weights are ``1 - t`` and ``t``. If one of
    them is zero, the result is the other; if both are, zero.
    """
    angle = torch.arccos(cosines(first, second))
    sine = torch.sin(angle)
    is_flat = sine < _SMALLEST_SINE
    safe_sine = torch.where(is_flat, 1, sine)
    first_weight = torch.where(is_flat, 1 - t, torch.sin((1 - t) * angle) / safe_sine)
    second_weight = torch.where(is_flat, t, torch.sin(t * angle) / safe_sine)
    merged, _ = unit_directions(torch.addcmul(first * first_weight, second, second_weight))
    return merged
