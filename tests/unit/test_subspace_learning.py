"""Learned bases against principal components and the metric that they are learned in."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, group_vectors, split_vectors
from krul_backend.codec.subspace.learning import DIAGONAL_SHARE, LEAST_TOKENS, BasisLearner, LearningText
from krul_backend.codec.subspace.quantizer import SHRINK, step_shifts, token_steps
from krul_backend.codec.subspace.sample import ErrorCosts, GroupSample
from krul_backend.errors import CodecError

SHAPE = LayerShape(2, 4, 4, torch.float32)
GROUP_ENDS = [2, 3]
DIMS = [32, 16]
FIRST_TOKENS = 4
NUM_TOKENS = 600
SPREADS = torch.tensor([1.0, 0.8, 0.6, 0.4])
"""Standard deviations of the directions that all layers of a group share."""

GRADIENT = 0.02


def planted(seed: int, noise: float = 1e-5) -> list[torch.Tensor]:
    """Vectors ``[T, D]`` of each group: four directions that its layers share, a mean, hardly any noise."""
    generator = torch.Generator().manual_seed(seed)
    vectors = []
    for directions, mean in zip(planted_directions(), planted_means(), strict=True):
        normal = torch.randn(NUM_TOKENS, 4, generator=generator)
        own = noise * torch.randn(NUM_TOKENS, len(mean), generator=generator)
        vectors.append(mean + normal * SPREADS @ directions.T + own)
    return vectors


def planted_directions() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(100)
    return [torch.linalg.qr(torch.randn(dim, 4, generator=generator)).Q for dim in DIMS]


def planted_means() -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(101)
    return [torch.randn(dim, generator=generator) for dim in DIMS]


def white_gradients(seed: int) -> list[torch.Tensor]:
    """Gradients whose covariance over the tokens learned from is exactly the identity, up to a factor."""
    generator = torch.Generator().manual_seed(seed)
    gradients = []
    for dim in DIMS:
        normal = torch.randn(NUM_TOKENS, dim, generator=generator, dtype=torch.float64)
        orthogonal = torch.linalg.qr(normal[FIRST_TOKENS:]).Q
        normal[FIRST_TOKENS:] = orthogonal * math.sqrt(NUM_TOKENS - FIRST_TOKENS)
        gradients.append((normal * GRADIENT).float())
    return gradients


def layers_of(vectors: Sequence[torch.Tensor]) -> list[LayerKV]:
    sizes = [2, 1]
    return [
        LayerKV(kv.k.contiguous(), kv.v.contiguous())
        for group, size in zip(vectors, sizes, strict=True)
        for kv in split_vectors(group, SHAPE, size)
    ]


def attention_of(seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(3, 2, NUM_TOKENS, generator=generator) ** 3 + 1e-4


def text(seed: int, gradients: Sequence[torch.Tensor] | None = None, noise: float = 1e-5) -> LearningText:
    chosen = white_gradients(seed) if gradients is None else gradients
    return LearningText(layers_of(planted(seed, noise)), layers_of(chosen), attention_of(seed))


def fitted(texts: Sequence[LearningText]) -> ModelBases:
    learner = BasisLearner(SHAPE, GROUP_ENDS, FIRST_TOKENS)
    # The last one first, as the model is gone through.
    for number in (1, 0):
        learner.learn_group(number, [of_group(each, number) for each in texts])
    return learner.bases()


def of_group(whole: LearningText, number: int) -> LearningText:
    """The layers of one group of a text."""
    layers = slice(*([0, *GROUP_ENDS][number : number + 2]))
    return LearningText(whole.layers[layers], whole.gradients[layers], whole.attention[layers])


def coefficients_of(basis: GroupBasis, vectors: torch.Tensor) -> torch.Tensor:
    return (vectors.double() - basis.mean.double()) @ basis.encoder.double()


def learned_vectors(group: int, seeds: Sequence[int], noise: float = 1e-5) -> torch.Tensor:
    return torch.cat([planted(seed, noise)[group][FIRST_TOKENS:] for seed in seeds])


def test_kept_coefficients_are_the_planted_principal_components() -> None:
    bases = fitted([text(seed) for seed in range(2)])
    assert [group.rank for group in bases.groups] == [4, 4]
    for group, (basis, directions) in enumerate(zip(bases.groups, planted_directions(), strict=True)):
        vectors = learned_vectors(group, range(2)).double()
        centred = vectors - vectors.mean(0)
        torch.testing.assert_close(basis.mean.double(), vectors.mean(0), rtol=0, atol=1e-5)
        variances, components = torch.linalg.eigh(centred.T @ centred / len(vectors))
        variances, components = variances.flip(0)[:4], components.flip(1)[:, :4]
        # An error of 1 in any direction costs half the squared gradient, and what the metric adds to all.
        factor = GRADIENT * math.sqrt(1 + 1e-3)
        # Up to the sign of each direction.
        alignment = (basis.decoder.double() * factor @ components).abs()
        torch.testing.assert_close(alignment, torch.eye(4).double(), rtol=0, atol=1e-3)
        alignment = (basis.encoder.double().T / factor @ components).abs()
        torch.testing.assert_close(alignment, torch.eye(4).double(), rtol=0, atol=1e-3)
        torch.testing.assert_close(
            basis.magnitudes.double(), (variances / 2).sqrt() * factor, rtol=1e-4, atol=0
        )
        # And they are what was planted, whose layers move together.
        spans = basis.decoder.double().pinverse() @ basis.decoder.double()
        torch.testing.assert_close(spans @ directions.double(), directions.double(), rtol=0, atol=1e-3)


def test_a_direction_that_costs_nothing_is_left_out() -> None:
    gradients = white_gradients(0)
    # Errors along the widest direction of the first group change nothing that is predicted.
    widest = planted_directions()[0][:, 0]
    gradients[0] -= torch.outer(gradients[0] @ widest, widest)
    plain, blind = fitted([text(0), text(1)]), fitted([text(0, gradients), text(1, gradients)])
    assert plain.groups[0].magnitudes[0] > blind.groups[0].magnitudes[0]
    # The metric's diagonal sees channels, not directions, so something remains.
    kept = (blind.groups[0].encoder.T @ widest).norm() / (plain.groups[0].encoder.T @ widest).norm()
    assert 0 < kept < 0.6


def correlated_texts(noise: float = 0.1, size: float = 1.0) -> list[LearningText]:
    """Texts whose metric is far from the identity, with gradients of this ``size``. With this noise every
    coefficient costs something."""
    texts = []
    for seed in range(2):
        generator = torch.Generator().manual_seed(200)
        mixed = [
            size * gradients @ torch.randn(dim, dim, generator=generator)
            for gradients, dim in zip(white_gradients(seed), DIMS, strict=True)
        ]
        texts.append(text(seed, mixed, noise))
    return texts


def test_coefficients_are_uncorrelated_and_their_variance_falls() -> None:
    bases = fitted(correlated_texts())
    for group, basis in enumerate(bases.groups):
        assert basis.rank == DIMS[group]
        coefficients = coefficients_of(basis, learned_vectors(group, range(2), 0.1))
        assert coefficients.mean(0).abs().max() < 1e-5
        covariance = coefficients.T @ coefficients / len(coefficients)
        variances = covariance.diagonal()
        assert (variances.diff() < 0).all()
        correlation = covariance / torch.outer(variances, variances).sqrt()
        # Products are summed in fp32.
        torch.testing.assert_close(correlation, torch.eye(basis.rank).double(), rtol=0, atol=2e-3)
        # A Laplace distribution with mean magnitude m has a variance of 2 m^2.
        torch.testing.assert_close(basis.magnitudes.double(), (variances / 2).sqrt(), rtol=2e-3, atol=0)


def test_encoder_and_decoder_are_inverse_on_what_is_kept() -> None:
    few, all_kept = fitted([text(0), text(1)]), fitted(correlated_texts())
    for basis in (*few.groups, *all_kept.groups):
        product = basis.decoder.double() @ basis.encoder.double()
        torch.testing.assert_close(product, torch.eye(basis.rank).double(), rtol=0, atol=1e-4)
    for group, basis in enumerate(all_kept.groups):
        vectors = learned_vectors(group, [5], 0.1)
        restored = basis.mean + coefficients_of(basis, vectors).float() @ basis.decoder
        torch.testing.assert_close(restored, vectors, rtol=0, atol=1e-3)


@settings(max_examples=20)
@given(seed=st.integers(0, 1000), step_log2=st.floats(-8, 2))
def test_expected_damage_is_half_of_the_quadratic_form_of_the_error(seed: int, step_log2: float) -> None:
    texts, bases = correlated_texts(), _correlated_bases()
    generator = torch.Generator().manual_seed(seed)
    for group, basis in enumerate(bases.groups):
        used = metric_of(texts, basis)
        vectors = planted(seed, 0.1)[group][:50] - basis.mean
        coefficients = (vectors.double() @ basis.encoder.double()).float()
        worth = torch.rand(50, generator=generator) * 3
        shifts, step = step_shifts(worth).numpy(), 2**step_log2
        lost, vector_sums = np.zeros(50, np.float32), np.zeros((2, 128), np.float32)
        of_basis = ErrorCosts.of(basis)
        sample = GroupSample(coefficients.numpy(), worth.numpy(), shifts, lost, vector_sums, of_basis)
        rounded = sample.rounded(step)
        levels = torch.zeros_like(coefficients)
        levels[:, : rounded.levels.shape[1]] = torch.from_numpy(rounded.levels).float()
        steps = torch.from_numpy(token_steps(step, shifts))[:, None]
        errors = (levels - SHRINK * levels.sign()) * steps - coefficients
        vector_errors = errors.double() @ basis.decoder.double()
        costs = ((vector_errors @ used) * vector_errors).sum(1) / 2
        expected = float(costs @ worth.double())
        assert sample.errors(rounded).own_damage == pytest.approx(expected, rel=2e-3)


@pytest.mark.parametrize("size", [0.01, 1.0])
def test_a_direction_that_the_text_did_not_have_costs_what_the_metric_says(size: float) -> None:
    """The bases keep four directions. Another one, along which errors matter, has no coefficient."""
    texts = correlated_texts(noise=1e-5, size=0.3)
    bases = fitted(texts)
    for group, (basis, dim) in enumerate(zip(bases.groups, DIMS, strict=True)):
        assert basis.rank == 4
        used = metric_of(texts, basis)
        known, generator = planted(7, noise=0.0)[group][:20], torch.Generator().manual_seed(1)
        strange = known + size * torch.randn(20, dim, generator=generator)
        residual = strange - basis.mean - coefficients_of(basis, strange).float() @ basis.decoder
        cost = ((residual.double() @ used) * residual.double()).sum(1) / 2
        seen = ((strange - basis.mean) @ basis.outside).square().sum(1) / 2
        assert float(seen.sum()) == pytest.approx(float(cost.sum()), rel=0.2)
        # Nothing of what the coefficients carry is seen.
        assert ((known - basis.mean) @ basis.outside).square().sum() < 1e-4 * seen.sum() / size**2


def test_a_shift_of_all_tokens_costs_what_the_sums_of_gradients_say() -> None:
    """Gradients of one text that all point the same way add up; those of the other cancel each other."""
    gradients = white_gradients(0)
    alternating = [(-1.0) ** torch.arange(NUM_TOKENS)[:, None] * part[FIRST_TOKENS] for part in gradients]
    equal = [part[FIRST_TOKENS].expand(NUM_TOKENS, -1) for part in gradients]
    bases = fitted([text(0, equal), text(1, alternating)])
    for basis, part in zip(bases.groups, gradients, strict=True):
        total = part[FIRST_TOKENS] * (NUM_TOKENS - FIRST_TOKENS)
        torch.testing.assert_close(basis.shift_costs, total.square() / 2, rtol=1e-4, atol=1e-9)


def metric_of(texts: Sequence[LearningText], basis: GroupBasis) -> torch.Tensor:
    """The metric of a group, fp64 ``[D, D]``: gradients' outer products, with a share of their diagonal."""
    gradients = torch.cat(
        [group_vectors([each.gradients[layer] for layer in basis.layers])[FIRST_TOKENS:] for each in texts]
    ).double()
    metric = gradients.T @ gradients / len(gradients)
    diagonal = metric.diagonal()
    return (1 - DIAGONAL_SHARE) * metric + torch.diag(DIAGONAL_SHARE * diagonal + 1e-3 * diagonal.mean())


def _correlated_bases() -> ModelBases:
    global _kept_bases
    if _kept_bases is None:
        _kept_bases = fitted(correlated_texts())
    return _kept_bases


_kept_bases: ModelBases | None = None


def test_the_order_of_texts_does_not_matter() -> None:
    texts = [text(seed) for seed in range(3)]
    forward, backward = fitted(texts), fitted(texts[::-1])
    for one, other in zip(forward.groups, backward.groups, strict=True):
        assert one.rank == other.rank
        torch.testing.assert_close(one.mean, other.mean)
        torch.testing.assert_close(one.magnitudes, other.magnitudes, rtol=1e-4, atol=0)
        # Directions have no sign of their own.
        torch.testing.assert_close(
            one.encoder @ one.decoder, other.encoder @ other.decoder, rtol=0, atol=1e-4
        )
        for name in ("attention_means", "attention_slopes", "attention_levels"):
            torch.testing.assert_close(getattr(one, name), getattr(other, name), rtol=1e-4, atol=1e-6)


def test_worth_follows_the_gradients_and_is_one_on_average() -> None:
    texts = []
    for seed in range(2):
        attention = attention_of(seed)
        gradients = layers_of(white_gradients(seed))
        # Gradients whose square is in proportion to attention to the power 1.5.
        scaled = [
            LayerKV(kv.k * factor.T[..., None], kv.v * factor.T[..., None])
            for kv, factor in zip(gradients, attention**0.75, strict=True)
        ]
        texts.append(replace(text(seed), gradients=scaled))
    bases = fitted(texts)
    for basis in bases.groups:
        # Random gradients of 8 channels spread the energy of a token by a third; 1,192 tokens average that.
        torch.testing.assert_close(
            basis.attention_slopes, torch.full_like(basis.attention_slopes, 1.5), rtol=0, atol=0.05
        )
        worth = torch.cat(
            [
                basis.token_worth(each.attention[basis.first_layer : basis.end_layer, :, FIRST_TOKENS:])
                for each in texts
            ]
        )
        assert float(worth.mean()) == pytest.approx(1, rel=1e-4)
        assert worth.max() > 2


def test_attention_that_says_nothing_of_the_gradients_counts_for_nothing() -> None:
    for basis in fitted([text(0), text(1)]).groups:
        assert basis.attention_slopes.min() >= 0
        assert basis.attention_slopes.max() < 0.1
        worth = basis.token_worth(attention_of(7)[basis.first_layer : basis.end_layer])
        assert 0.7 < worth.min() <= worth.max() < 1.3


def test_too_little_text_makes_no_bases() -> None:
    learner = BasisLearner(SHAPE, GROUP_ENDS, FIRST_TOKENS)
    with pytest.raises(CodecError, match="0 tokens are too few"):
        learner.learn_group(0, [])
    assert NUM_TOKENS - FIRST_TOKENS < LEAST_TOKENS
    with pytest.raises(CodecError, match=f"596 tokens are too few to learn from .at least {LEAST_TOKENS}"):
        learner.learn_group(0, [of_group(text(0), 0)])
    learner.learn_group(0, [of_group(text(seed), 0) for seed in range(2)])
    with pytest.raises(CodecError, match="1 of 2 groups"):
        learner.bases()


def test_texts_that_do_not_fit_the_model_are_refused() -> None:
    learner, whole = BasisLearner(SHAPE, GROUP_ENDS, FIRST_TOKENS), of_group(text(0), 0)
    for broken in (
        replace(whole, layers=whole.layers[:1]),
        replace(whole, gradients=whole.gradients[:1]),
        replace(whole, layers=[*whole.layers, whole.layers[0]]),
        replace(whole, attention=whole.attention[:1]),
        replace(whole, attention=whole.attention[..., 1:]),
    ):
        with pytest.raises(CodecError, match="layers"):
            learner.learn_group(0, [of_group(text(1), 0), broken])
    short = [LayerKV(kv.k[:FIRST_TOKENS], kv.v[:FIRST_TOKENS]) for kv in whole.layers]
    with pytest.raises(CodecError, match="too short"):
        learner.learn_group(0, [LearningText(short, short, whole.attention[..., :FIRST_TOKENS])])
    with pytest.raises(CodecError, match="0 of 2 groups"):
        learner.bases()


@pytest.mark.parametrize("ends", [[], [0], [0, 2], [2, 2], [3, 2]])
def test_groups_end_at_rising_layers(ends: list[int]) -> None:
    with pytest.raises(CodecError, match="rising"):
        BasisLearner(SHAPE, ends)
