"""The rANS coder against its format written down again in Python's own integers, word by word."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codec import falling_levels
from krul_backend.codec.coefficients.coders import RansCoder
from krul_backend.codec.coefficients.scales import Alphabet, alphabets


def alphabet_of(scale: int, shift: int) -> Alphabet:
    return alphabets()[min(max(scale - 2 * shift, 1), 47) - 1]


def interval(alphabet: Alphabet, level: int) -> tuple[int, int]:
    """Start and length of the slots of a level, or of the escape."""
    place = 0 if abs(level) > alphabet.largest else level + alphabet.largest + 1
    return sum(alphabet.frequencies[:place]), alphabet.frequencies[place]


def reference_record(levels: list[list[int]], scales: list[int], shifts: list[int]) -> bytes:
    """One record of ``levels`` by token and coefficient, encoded from its last step to its first."""
    states = [2**16] * min(len(levels), 16)
    words: list[int] = []
    for coefficient in reversed(range(len(scales))):
        if scales[coefficient] == 0:
            continue
        for token in reversed(range(len(levels))):
            level = levels[token][coefficient]
            alphabet = alphabet_of(scales[coefficient], shifts[token])
            start, length = interval(alphabet, level)
            if abs(level) > alphabet.largest:
                words.append(level % 2**16)
            state = states[token % 16]
            # Exactly the states that would leave 32 bits give a word away first.
            if state // length * 4096 + state % length + start >= 2**32:
                words.append(state % 2**16)
                state //= 2**16
            states[token % 16] = state // length * 4096 + state % length + start
    if len(words) % 2:
        words.insert(0, 0)
    packed = sum((shift + 8) << 4 * token for token, shift in enumerate(shifts))
    head = packed.to_bytes(-(-len(shifts) // 8) * 4, "little")
    head += b"".join(state.to_bytes(4, "little") for state in states)
    return head + b"".join(word.to_bytes(2, "little") for word in reversed(words))


@settings(max_examples=40)
@given(
    scales=st.lists(st.integers(0, 47), min_size=1, max_size=12),
    num_tokens=st.integers(1, 140),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.3, 1, 4]),
)
def test_the_bytes_are_those_of_the_format(
    scales: list[int], num_tokens: int, seed: int, spread: float
) -> None:
    generator = np.random.default_rng(seed)
    magnitudes = np.where(np.array(scales) == 0, 0, np.exp2((np.array(scales) - 21) / 4))
    shifts = generator.integers(-8, 8, num_tokens).astype(np.int8)
    levels = generator.laplace(size=(num_tokens, len(scales))) * magnitudes * spread
    levels = np.rint(levels * np.exp2(-shifts[:, None] / 2)).astype(np.int16)
    encoded = RansCoder().encode(levels, np.array(scales, np.uint8), shifts)
    expected = [
        reference_record(levels[first : first + 64].tolist(), scales, shifts[first : first + 64].tolist())
        for first in range(0, num_tokens, 64)
    ]
    assert encoded.data.tobytes() == b"".join(expected)
    assert encoded.record_num_bytes.tolist() == [len(record) for record in expected]


def test_states_of_32_bits_lose_little_against_one_exact_number() -> None:
    levels, scales, shifts = falling_levels(64, 120, 40, 0.05)
    # One state without limits: the length of the number that all levels together need.
    state = Fraction(1)
    for row, shift in zip(levels.tolist(), shifts.tolist(), strict=True):
        for level, scale in zip(row, scales.tolist(), strict=True):
            alphabet = alphabet_of(scale, shift)
            state *= Fraction(4096, interval(alphabet, level)[1])
            state *= 2**16 if abs(level) > alphabet.largest else 1
    exact_bits = int(state).bit_length() + 4 * 64
    # Each state begins with 16 bits that mean nothing, and of its 32 bits at the end about 8 are not used.
    lane_bits = 16 * (16 + 9)
    actual_bits = 8 * len(RansCoder().encode(levels, scales, shifts).data)
    assert exact_bits < actual_bits < exact_bits * 1.001 + lane_bits + 32
