"""The tables of the scales: the same for ever, and close to their model."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from benchmarks.codec import expected_bits, falling_levels, level_bits
from krul_backend.codec.coefficients.scales import alphabets, magnitude

STANDARD_DIGEST = "065eca317e9ac8a56297427ba4800ea1f6369dbb95d33e2e672b403bfcd9a061"


def test_the_tables_never_change() -> None:
    """Stored blocks decode by these tables only. Other tables need another version of the coder."""
    digest = hashlib.sha256()
    for alphabet in alphabets():
        digest.update(bytes([alphabet.largest]) + np.array(alphabet.frequencies, "<u2").tobytes())
    assert digest.hexdigest() == STANDARD_DIGEST


def test_alphabets_are_those_of_the_model() -> None:
    assert [float(magnitude(scale)) for scale in (1, 21, 47)] == [2**-5, 1, pytest.approx(2**6.5)]
    assert len(alphabets()) == 47
    for scale, alphabet in enumerate(alphabets(), start=1):
        frequencies = np.array(alphabet.frequencies)
        assert frequencies.sum() == 4096
        assert frequencies.min() >= 1
        assert alphabet.largest <= 126
        assert len(frequencies) == 2 * alphabet.largest + 2
        at_least = np.exp(-np.maximum(np.arange(129) - 0.4, 0) / 2 ** ((scale - 21) / 4))
        levels = np.arange(-alphabet.largest, alphabet.largest + 1)
        probabilities = (at_least[:-1] - at_least[1:])[np.abs(levels)] / np.where(levels == 0, 1, 2)
        expected = 4096 * np.array([at_least[alphabet.largest + 1], *probabilities])
        # Rare symbols get a slot each, at the cost of the frequent ones.
        assert (np.abs(frequencies - expected) <= 1 + 0.02 * expected).all()


def test_bits_are_those_of_the_frequencies() -> None:
    alphabet = alphabets()[29]
    lengths = level_bits()[30]
    escaped = 12 - np.log2(alphabet.frequencies[0]) + 16
    sides = [escaped] * (127 - alphabet.largest)
    expected = [escaped, *sides, *(12 - np.log2(alphabet.frequencies[1:])), *sides]
    assert alphabet.largest < 126
    assert np.allclose(lengths, expected)
    unused = level_bits()[0]
    assert unused[128] == 0
    assert np.isinf(np.delete(unused, 128)).all()


def test_expected_bits_sum_over_tokens_in_the_scales_of_their_steps() -> None:
    levels, scales, shifts = falling_levels(90, 50, 200, 0.02)
    levels[3, 4], levels[5, 40], levels[6, 30] = 30000, -129, 128
    levels[:, 49], scales[49] = 0, 0
    shifts[:2] = -8, 7
    expected = np.zeros(50)
    for token, shift in enumerate(shifts.tolist()):
        for index, scale in enumerate(scales.tolist()):
            moved = min(max(scale - 2 * shift, 1), 47) if scale else 0
            symbol = min(max(int(levels[token, index]), -128), 127)
            expected[index] += level_bits()[moved, symbol + 128]
    assert np.allclose(expected_bits(levels, scales, shifts), expected)
    assert expected[49] == 0


def test_the_right_scale_takes_the_fewest_bits() -> None:
    """Coefficients cost least in the scale of their mean before quantization, or in one beside it."""
    generator = np.random.default_rng(1)
    coefficients = generator.laplace(size=20000)
    every = np.arange(1, 48, dtype=np.uint8)
    for scale in range(13, 40, 3):
        magnitudes = np.abs(coefficients) * 2 ** ((scale - 21) / 4)
        levels = (np.sign(coefficients) * np.floor(magnitudes + 0.4)).astype(np.int16)
        bits = expected_bits(np.tile(levels[:, None], 47), every, np.zeros(20000, np.int8))
        assert abs(1 + int(np.argmin(bits)) - scale) <= 1
        assert bits[scale - 1] <= bits.min() * 1.005
