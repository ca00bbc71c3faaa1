"""The choice of scales: nearest to known magnitudes, moved by bands to what a segment has."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from krul_backend.codec.coefficients.scales import (
    base_scales,
    best_offsets,
    pack_offsets,
    scales_of,
    unpack_offsets,
)
from krul_backend.errors import CodecError


def test_base_scales_are_the_nearest_on_a_grid_of_quarter_octaves() -> None:
    scales = np.arange(1, 48)
    exact = 3 * np.exp2((scales - 21) / 4)
    for factor in (1, 2**0.12, 2**-0.12):
        assert base_scales((exact * factor).astype(np.float32), 3.0).tolist() == scales.tolist()
    assert base_scales(np.array([0, 1e-30, 1e30], np.float32), 1.0).tolist() == [1, 1, 47]


@settings(max_examples=60)
@given(num_coefficients=st.integers(0, 70), seed=st.integers(0, 2**32), spread=st.sampled_from([0.5, 3, 20]))
def test_offsets_bring_the_mean_scale_of_a_band_nearest(
    num_coefficients: int, seed: int, spread: float
) -> None:
    generator = np.random.default_rng(seed)
    base = generator.integers(1, 48, num_coefficients).astype(np.uint8)
    octaves = (base.astype(np.float64) - 21) / 4 + generator.normal(0, spread, num_coefficients)
    observed = np.exp2(octaves.clip(-100, 100)).astype(np.float32)
    levels = np.zeros((5, num_coefficients), np.int16)
    levels[2] = generator.integers(0, 2, num_coefficients) * (np.arange(num_coefficients) // 16 != 1)
    offsets = best_offsets(base, observed, levels)
    assert offsets.dtype == np.uint8
    assert len(offsets) == -(-num_coefficients // 16)
    target = np.clip(np.rint(21 + 4 * np.log2(observed)), 1, 47)
    for band, offset in enumerate(offsets.tolist()):
        part = slice(16 * band, 16 * band + 16)
        misses = [
            abs((np.clip(base[part].astype(int) + number - 8, 1, 47) - target[part]).mean())
            for number in range(1, 16)
        ]
        if levels[:, part].any():
            assert misses[offset - 1] == min(misses)
        else:
            assert offset == 0
    scales = scales_of(base, offsets)
    assert scales.dtype == np.uint8
    numbers = np.repeat(offsets, 16)[:num_coefficients].astype(int)
    expected = np.where(numbers == 0, 0, np.clip(base.astype(int) + numbers - 8, 1, 47))
    assert np.array_equal(scales, expected)


def test_a_segment_as_expected_keeps_the_base_scales() -> None:
    base = np.full(20, 30, np.uint8)
    as_expected = np.full(20, 2.0 ** (9 / 4), np.float32)
    levels = np.ones((3, 20), np.int16)
    assert best_offsets(base, as_expected, levels).tolist() == [8, 8]
    assert best_offsets(base, 2 * as_expected, levels).tolist() == [12, 12]
    assert best_offsets(base, as_expected / 100, levels).tolist() == [1, 1]
    assert best_offsets(np.full(20, 47, np.uint8), 100 * as_expected, levels).tolist() == [8, 8]


@given(offsets=arrays.arrays(np.uint8, st.integers(0, 9), elements=st.integers(0, 15)))
def test_offsets_take_half_a_byte_each(offsets: np.ndarray) -> None:
    packed = pack_offsets(offsets)
    assert packed.tobytes() == sum(
        number << 4 * place for place, number in enumerate(offsets.tolist())
    ).to_bytes(-(-len(offsets) // 2), "little")
    for num_coefficients in (16 * len(offsets), max(16 * len(offsets) - 15, 0)):
        assert np.array_equal(unpack_offsets(packed, num_coefficients), offsets)


def test_what_cannot_be_scales() -> None:
    base, observed = np.ones(20, np.uint8), np.ones(20, np.float32)
    levels, offsets = np.ones((3, 20), np.int16), np.ones(2, np.uint8)
    for run, message in (
        (lambda: base_scales(np.ones(3), 1.0), "magnitudes are float32"),
        (lambda: base_scales(np.array([-1], np.float32), 1.0), "at least 0"),
        (lambda: base_scales(np.array([np.nan], np.float32), 1.0), "at least 0"),
        (lambda: base_scales(observed, 0.0), "above 0"),
        (lambda: base_scales(observed, float("nan")), "above 0"),
        (lambda: best_offsets(base, observed[1:], levels), "not 19"),
        (lambda: best_offsets(base, observed, levels[:, 1:]), r"int16 \[3, 19\]"),
        (lambda: best_offsets(base, observed, levels.astype(np.int32)), "not 20 and int32"),
        (lambda: best_offsets(base - 1, observed, levels), "1 to 47"),
        (lambda: scales_of(base + 47, offsets), "1 to 47"),
        (lambda: scales_of(base.astype(int), offsets), "base scales are uint8"),
        (lambda: scales_of(base, offsets[:1]), "2 numbers"),
        (lambda: scales_of(base, offsets + 15), "0 to 15"),
        (lambda: pack_offsets(offsets + 15), "0 to 15"),
        (lambda: unpack_offsets(offsets, 20), "take 1 bytes, not 2"),
        (lambda: unpack_offsets(offsets + 15, 33), "unused half"),
    ):
        with pytest.raises(CodecError, match=message):
            run()
