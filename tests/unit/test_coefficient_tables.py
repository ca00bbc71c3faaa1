"""The tables of scale classes: the same for ever, close to their model, and chosen well."""

from __future__ import annotations

import numpy as np
import pytest

from benchmarks.codec import falling_levels
from krul_backend.codec.coefficients.frequencies import (
    COARSE_MEAN,
    FINE_MEAN,
    HEAVY_TAILED,
    LAPLACE,
    SHAPE,
    Shape,
    class_frequencies,
)
from krul_backend.codec.coefficients.tables import CoderTables, standard_tables
from krul_backend.errors import CodecError

STANDARD_DIGEST = "32fb2aaaa767992b32861124884be8dd9950475c9905f2ad1807d648e0a6560b"


def test_the_tables_never_change() -> None:
    """Stored blocks decode by these tables only. Other tables need another version of the coder."""
    assert standard_tables().digest == STANDARD_DIGEST
    assert standard_tables().shape == SHAPE == LAPLACE


@pytest.mark.parametrize("shape", [LAPLACE, HEAVY_TAILED], ids=lambda shape: shape.name)
@pytest.mark.parametrize("largest_mean", [FINE_MEAN, COARSE_MEAN])
def test_alphabets_are_those_of_the_model(shape: Shape, largest_mean: int) -> None:
    alphabets = class_frequencies(shape, largest_mean)
    assert len(alphabets) == 63
    assert [alphabets[0].mean, alphabets[31].mean, alphabets[-1].mean] == [2**-8, 1.0, 2**8]
    weights, scales = np.array(shape.components, np.float64).T
    for alphabet in alphabets:
        frequencies = np.array(alphabet.frequencies)
        assert frequencies.sum() == 4096
        assert frequencies.min() >= 1
        assert len(frequencies) == 2 * alphabet.largest + 2
        assert alphabet.mean <= largest_mean << alphabet.low_bits
        assert alphabet.low_bits == 0 or alphabet.mean > largest_mean << alphabet.low_bits - 1
        levels = np.arange(-20000, 20001)
        edges = np.maximum(np.arange(20002) - 0.4, 0) * alphabet.rate
        at_least = np.exp(-edges[:, None] / scales) @ weights / weights.sum()
        probabilities = (at_least[:-1] - at_least[1:])[np.abs(levels)] / np.where(levels == 0, 1, 2)
        assert np.isclose((np.abs(levels) * probabilities).sum(), alphabet.mean, rtol=1e-9)
        symbols = levels >> alphabet.low_bits
        for symbol, frequency in zip(
            range(-alphabet.largest, alphabet.largest + 1), frequencies[1:], strict=True
        ):
            expected = 4096 * probabilities[symbols == symbol].sum()
            # Rare symbols get a slot each, at the cost of the frequent ones.
            assert abs(frequency - expected) <= 1 + 0.02 * expected


def test_bits_are_those_of_the_frequencies() -> None:
    tables = standard_tables()
    alphabet = class_frequencies(LAPLACE)[50]
    levels = np.array([0, 1, -1, alphabet.largest << alphabet.low_bits, 20000, -20000])
    middle = alphabet.largest + 1
    expected = [
        12 - np.log2(alphabet.frequencies[middle + (int(level) >> alphabet.low_bits)]) for level in levels[:4]
    ]
    expected += [12 - np.log2(alphabet.frequencies[0]) + 16] * 2
    assert np.allclose(tables.bits_per_level(51, levels), np.array(expected) + alphabet.low_bits)
    assert tables.bits_per_level(0, np.array([0, 1])).tolist() == [0, np.inf]


def test_expected_bits_sum_over_tokens() -> None:
    tables = standard_tables()
    levels, classes = falling_levels(90, 50, 200, 0.02)
    levels[3, 4], levels[5, 40], levels[6, 30] = 30000, -129, 128
    levels[:, 49], classes[49] = 0, 0
    expected = [tables.bits_per_level(classes[index], levels[:, index]).sum() for index in range(50)]
    assert np.allclose(tables.expected_bits(levels, classes), expected)
    assert expected[49] == 0


def test_the_class_of_a_mean_takes_the_fewest_bits() -> None:
    tables = CoderTables(LAPLACE)
    generator = np.random.default_rng(1)
    scales = np.geomspace(0.16, 260, 40)
    magnitudes = generator.laplace(size=(20000, 40)) * scales
    levels = (np.sign(magnitudes) * np.floor(np.abs(magnitudes) + 0.4)).astype(np.int16)
    chosen = tables.class_of(np.abs(levels.astype(np.float64)).mean(axis=0))
    assert (np.diff(chosen.astype(int)) >= 0).all()
    every = np.stack([tables.expected_bits(levels, np.full(40, index, np.uint8)) for index in range(1, 64)])
    best = every.min(axis=0)
    assert (tables.expected_bits(levels, chosen) <= best * 1.0005).all()
    assert tables.class_of(np.array([0.0, 1e-9, 1e9])).tolist() == [0, 1, 63]
    for index, alphabet in enumerate(class_frequencies(LAPLACE), start=1):
        assert tables.class_of(np.array([alphabet.mean])).tolist() == [index]


@pytest.mark.parametrize("mean", [-0.1, float("nan")])
def test_means_that_are_none(mean: float) -> None:
    with pytest.raises(CodecError, match="not negative"):
        standard_tables().class_of(np.array([1.0, mean]))
