from __future__ import annotations

import math

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from krul_backend.codec.pairs.shared_pair import angular_distance, slerp, unit_directions


def formula(x: torch.Tensor, y: torch.Tensor, t: float) -> torch.Tensor:
    """MiniCache, equation 3, word by word, in float64, for vectors in general position."""
    u, w = x / x.norm(), y / y.norm()
    angle = torch.arccos((u * w).sum())
    return torch.sin((1 - t) * angle) / torch.sin(angle) * u + torch.sin(t * angle) / torch.sin(angle) * w


def unit(*numbers: float) -> torch.Tensor:
    return unit_directions(torch.tensor(numbers, dtype=torch.float32))[0]


@settings(max_examples=100)
@given(head_dim=st.integers(2, 128), t=st.floats(0, 1), mix=st.floats(-3, 3), seed=st.integers(0, 10_000))
def test_slerp_equals_the_formula_in_float64(head_dim: int, t: float, mix: float, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(head_dim, dtype=torch.float64, generator=generator)
    y = mix * x + torch.randn(head_dim, dtype=torch.float64, generator=generator)
    merged = slerp(unit_directions(x)[0], unit_directions(y)[0], t)
    torch.testing.assert_close(merged, formula(x, y, t), rtol=0, atol=1e-7)
    # Of vectors that are nearly opposite, fp32 does not say in which plane the angle is.
    assume(torch.cosine_similarity(x, y, dim=0) > -0.9998)
    in_fp32 = slerp(unit_directions(x.float())[0], unit_directions(y.float())[0], t)
    # arccos loses half the digits near 0 and pi.
    torch.testing.assert_close(in_fp32.double(), formula(x, y, t), rtol=0, atol=1e-3)


def test_t_is_the_share_of_the_angle() -> None:
    u, w = unit(1, 0, 0), unit(math.cos(1.0), math.sin(1.0), 0)
    for t in (0.0, 0.25, 0.6, 1.0):
        expected = torch.tensor([math.cos(t), math.sin(t), 0])
        torch.testing.assert_close(slerp(u, w, t), expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize("t", [0.0, 0.3, 0.6, 1.0])
def test_parallel_opposite_and_zero_vectors_have_a_direction(t: float) -> None:
    u, w = unit(3, 4), torch.zeros(2)
    torch.testing.assert_close(slerp(u, u, t), u)
    opposite = slerp(u, -u, t)
    torch.testing.assert_close(opposite, u if t < 0.5 else -u)
    if 0 < t < 1:
        torch.testing.assert_close(slerp(u, w, t), u)
        torch.testing.assert_close(slerp(w, u, t), u)
    assert torch.equal(slerp(w, w, t), w)


def test_unit_directions_and_norms() -> None:
    x = torch.tensor([[3.0, 4.0], [0.0, 0.0], [-1e-20, 0.0]])
    directions, norms = unit_directions(x)
    torch.testing.assert_close(directions, torch.tensor([[0.6, 0.8], [0.0, 0.0], [-1.0, 0.0]]))
    torch.testing.assert_close(norms, torch.tensor([[5.0], [0.0], [1e-20]]))


def test_angular_distance_is_the_angle_over_pi() -> None:
    angles = torch.tensor([0.1, 1.0, math.pi / 2, 3.0])
    u = torch.tensor([1.0, 0.0]).expand(4, 2)
    w = torch.stack([angles.cos(), angles.sin()], dim=-1)
    torch.testing.assert_close(angular_distance(u, w), angles / math.pi, rtol=1e-5, atol=1e-5)
    # The product of a unit vector with itself can be a little above 1.
    generator = torch.Generator().manual_seed(0)
    same, _ = unit_directions(torch.randn(1000, 64, generator=generator))
    assert not angular_distance(same, same).isnan().any()
