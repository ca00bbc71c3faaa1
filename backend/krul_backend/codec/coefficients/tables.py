"""The tables of the scales that rANS codes by, in integers that are the same on every host.

A level is a transform coefficient ``c`` quantized with a dead zone: ``|level| = floor(|c| / step + 0.4)``. A
scale is a Laplace distribution of coefficients, given by the mean of their magnitude before quantization.
Another distribution is another version of the coder.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

import numpy as np

NUM_SCALES = 48
"""Scale 0 is for coefficients that are never coded; scales 1 to 47 have a table each."""

SCALE_OF_ONE_STEP = 21
SCALES_PER_OCTAVE = 4
"""Scale ``s`` is a mean magnitude of ``2^((s - 21) / 4)`` steps."""

PROBABILITY_BITS = 12
TOTAL_FREQUENCY = 1 << PROBABILITY_BITS

ROUNDING = 0.4
"""Added to magnitudes in steps before they are rounded down: below 0.5, so that zero has a wider range."""

LARGEST_SYMBOL = 126
"""No alphabet goes beyond it: a level and the escape fit in one byte."""

_ROUNDING = Decimal(str(ROUNDING))
_CONTEXT = Context(prec=30, rounding=ROUND_HALF_EVEN)


@dataclass(frozen=True)
class Alphabet:
    """The levels that a scale has symbols for, ``-largest`` to ``largest``; all others are escaped.

    ``frequencies`` are those of the escape, then of ``-largest`` to ``largest``. They sum to 4096, and none
    is 0.
    """

    largest: int
    frequencies: tuple[int, ...]


def magnitude(scale: float) -> Decimal:
    """The mean magnitude that a scale stands for, in steps; halves of scales have one, too."""
    with localcontext(_CONTEXT):
        return Decimal(2) ** (Decimal(scale - SCALE_OF_ONE_STEP) / SCALES_PER_OCTAVE)


@cache
def alphabets() -> tuple[Alphabet, ...]:
    """The alphabets of scales 1 to 47."""
    with localcontext(_CONTEXT):
        return tuple(_alphabet(magnitude(scale)) for scale in range(1, NUM_SCALES))


def _alphabet(mean: Decimal) -> Alphabet:
    # at_least[k]: the probability of a magnitude of at least k, and of one of the two signs.
    at_least = [
        Decimal("0.5"),
        *(((_ROUNDING - level) / mean).exp() / 2 for level in range(1, LARGEST_SYMBOL + 2)),
    ]
    positive = [at_least[k] - at_least[k + 1] for k in range(LARGEST_SYMBOL + 1)]
    largest = 1
    # A pair of symbols costs all others 2 slots, 0.0007 bits per level, and saves 16 bits where it occurs.
    while largest < LARGEST_SYMBOL and positive[largest + 1] * TOTAL_FREQUENCY * 11 >= 1:
        largest += 1
    side = positive[1 : largest + 1]
    return Alphabet(largest, _rounded([2 * at_least[largest + 1], *side[::-1], 2 * positive[0], *side]))


def _rounded(probabilities: list[Decimal]) -> tuple[int, ...]:
    """Positive integers that sum to 4096 and code these probabilities in the fewest bits."""
    weights = [int(probability * 2**80) for probability in probabilities]
    frequencies = [max(1, weight * TOTAL_FREQUENCY >> 80) for weight in weights]
    missing = TOTAL_FREQUENCY - sum(frequencies)
    change = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        # One slot more saves about weight / (frequency + 1/2), one fewer costs weight / (frequency - 1/2).
        gains = [
            change * weight // (2 * frequency + change) if frequency + change > 0 else -(2**90)
            for weight, frequency in zip(weights, frequencies, strict=True)
        ]
        frequencies[gains.index(max(gains))] += change
    return tuple(frequencies)


ESCAPE = -128
"""The symbol before a level that the alphabet of its scale does not have."""

SYMBOLS = 256


class CoderTables:
    """The tables of all scales. The arrays are read-only.

    ``encoding`` uint32 ``[48 * 256]``, at ``scale * 256 + symbol + 128``: frequency in bits 0 to 11, start of
    its slots in bits 12 to 23, and bit 24 for levels that are escaped (the rest is that of the escape then).

    ``decoding`` uint32 ``[48 * 4096]``, at ``scale * 4096 + slot``: symbol + 128 in bits 0 to 7, the slot's
    place among those of its symbol in bits 8 to 19, frequency in bits 20 to 31.
    """

    def __init__(self) -> None:
        encoding = np.zeros((NUM_SCALES, SYMBOLS), np.uint32)
        decoding = np.zeros((NUM_SCALES, TOTAL_FREQUENCY), np.uint32)
        for scale, alphabet in enumerate(alphabets(), start=1):
            frequencies = np.array(alphabet.frequencies, np.uint32)
            symbols = np.array([ESCAPE, *range(-alphabet.largest, alphabet.largest + 1)]) - ESCAPE
            starts = np.cumsum(frequencies, dtype=np.uint32) - frequencies
            encoding[scale] = frequencies[0] | starts[0] << 12 | np.uint32(1 << 24)
            encoding[scale, symbols[1:]] = frequencies[1:] | starts[1:] << 12
            place = np.arange(TOTAL_FREQUENCY, dtype=np.uint32) - np.repeat(starts, frequencies)
            decoding[scale] = (
                np.repeat(symbols.astype(np.uint32), frequencies)
                | place << 8
                | np.repeat(frequencies, frequencies) << 20
            )
        self.encoding = encoding.reshape(-1)
        self.decoding = decoding.reshape(-1)
        for table in (self.encoding, self.decoding):
            table.setflags(write=False)


@cache
def standard_tables() -> CoderTables:
    """The tables that blocks are coded with."""
    return CoderTables()
