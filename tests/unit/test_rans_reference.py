"""The rANS coder against its format written down again in Python's own integers, word by word."""

from __future__ import annotations

from fractions import Fraction

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codec import falling_levels
from krul_backend.codec.coefficients.frequencies import (
    COARSE_MEAN,
    LAPLACE,
    ClassFrequencies,
    class_frequencies,
)
from krul_backend.codec.coefficients.rans import RansCoder

FINE = (None, *class_frequencies(LAPLACE))
COARSE = (None, *class_frequencies(LAPLACE, COARSE_MEAN))


def interval(alphabet: ClassFrequencies, symbol: int) -> tuple[int, int]:
    """Start and length of the slots of a symbol, or of the escape."""
    place = 0 if abs(symbol) > alphabet.largest else symbol + alphabet.largest + 1
    return sum(alphabet.frequencies[:place]), alphabet.frequencies[place]


def split(classes: list[int]) -> tuple[list[ClassFrequencies | None], list[int]]:
    """The alphabet of each coefficient, and how many of its low bits lie in the payload of 8 bits."""
    left, alphabets, payload = 8, [], []
    for scale_class in classes:
        coarse = COARSE[scale_class]
        payload.append(min(left, coarse.low_bits if coarse else 0))
        left -= payload[-1]
        alphabets.append(coarse if payload[-1] else FINE[scale_class])
    return alphabets, payload


def reference_record(levels: list[list[int]], classes: list[int]) -> bytes:
    """One record of ``levels`` by token and coefficient, encoded from its last step to its first."""
    alphabets, payload = split(classes)
    lanes = min(len(levels), 32)
    states = [1 << 16] * lanes
    for token, row in enumerate(levels):
        filled = 8 * (token // 32)
        for level, bits in zip(row, payload, strict=True):
            states[token % 32] += level % 2**bits << filled
            filled += bits
    words: list[int] = []

    def push(lane: int, start: int, length: int, total: int) -> None:
        # Exactly the states that would leave 32 bits give a word away first.
        if states[lane] // length * total + states[lane] % length + start >= 2**32:
            words.append(states[lane] % 2**16)
            states[lane] //= 2**16
        states[lane] = states[lane] // length * total + states[lane] % length + start

    for coefficient in reversed(range(len(classes))):
        alphabet = alphabets[coefficient]
        if alphabet is None:
            continue
        stream_bits = alphabet.low_bits - payload[coefficient]
        for first in (32, 0):
            tokens = range(first, min(first + 32, len(levels)))
            symbols = {token: levels[token][coefficient] >> alphabet.low_bits for token in tokens}
            if stream_bits:
                for token in reversed(tokens):
                    low = (levels[token][coefficient] >> payload[coefficient]) % 2**stream_bits
                    push(token % 32, low, 1, 2**stream_bits)
            for token in reversed(tokens):
                if abs(symbols[token]) > alphabet.largest:
                    words.append(symbols[token] % 2**16)
            for token in reversed(tokens):
                push(token % 32, *interval(alphabet, symbols[token]), 4096)
    if len(words) % 2:
        words.insert(0, 0)
    heads = b"".join(state.to_bytes(4, "little") for state in states)
    return heads + b"".join(word.to_bytes(2, "little") for word in reversed(words))


@settings(max_examples=60, deadline=None)
@given(
    classes=st.lists(st.integers(0, 63), min_size=1, max_size=12).filter(any),
    num_tokens=st.integers(1, 140),
    seed=st.integers(0, 2**32),
    spread=st.sampled_from([0.3, 1, 4]),
)
def test_the_bytes_are_those_of_the_format(
    classes: list[int], num_tokens: int, seed: int, spread: float
) -> None:
    generator = np.random.default_rng(seed)
    means = np.array([alphabet.mean if alphabet else 0 for alphabet in (FINE[index] for index in classes)])
    levels = np.rint(generator.laplace(size=(num_tokens, len(classes))) * means * spread).astype(np.int16)
    encoded = RansCoder().encode(levels, np.array(classes, np.uint8))
    expected = [
        reference_record(levels[first : first + 64].tolist(), classes) for first in range(0, num_tokens, 64)
    ]
    assert encoded.data.tobytes() == b"".join(expected)
    assert encoded.record_num_bytes.tolist() == [len(record) for record in expected]


def test_states_of_32_bits_lose_little_against_one_exact_number() -> None:
    levels, classes = falling_levels(64, 120, 40, 0.05)
    # One state without limits: the length of the number that all levels together need.
    state = Fraction(1)
    for row in levels.tolist():
        for level, scale_class in zip(row, classes.tolist(), strict=True):
            alphabet = FINE[scale_class]
            assert alphabet is not None
            symbol = level >> alphabet.low_bits
            state *= Fraction(4096, interval(alphabet, symbol)[1]) * 2**alphabet.low_bits
            state *= 2**16 if abs(symbol) > alphabet.largest else 1
    exact_bits = int(state).bit_length()
    # The payload fills the 16 bits that a state begins with. Of its 32 bits at the end about 8 are not used.
    lane_bits = 32 * 9
    actual_bits = 8 * len(RansCoder().encode(levels, classes).data)
    assert exact_bits < actual_bits < exact_bits * 1.001 + lane_bits + 32
