"""The tables of the scale classes: for coding, for predicting sizes, and for choosing classes."""

from __future__ import annotations

import hashlib
from functools import cache

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.compiled import compiled
from krul_backend.codec.coefficients.frequencies import (
    COARSE_MEAN,
    NUM_CLASSES,
    PROBABILITY_BITS,
    ROUNDING,
    SHAPE,
    TOTAL_FREQUENCY,
    Shape,
    class_frequencies,
)
from krul_backend.codec.coefficients.interface import Classes, Levels
from krul_backend.errors import CodecError

ESCAPE = -128
"""The symbol before a level whose own symbol is not in the alphabet of its class."""

ESCAPED_BITS = 16
SYMBOLS = 256

COARSE = NUM_CLASSES
"""The coarse table of a class is that many after its fine one."""

_LEVELS = np.arange(-(2**13), 2**13 + 1)
"""The levels that a model of a class is summed over: beyond lies nothing that matters."""


class CoderTables:
    """The tables of all classes of one shape. The arrays are read-only.

    Each class has two tables: a fine one, with the number of the class, and from ``COARSE`` on a coarse one,
    which leaves more of a level to its lowest bits.

    ``low_bits`` uint8 ``[128]``: how many of a level's lowest bits are not in its symbol.

    ``encoding`` uint32 ``[128 * 256]``, at ``table * 256 + symbol + 128``: frequency in bits 0 to 11, start
    of its slots in bits 12 to 23, and bit 24 for symbols that are escaped (the rest is that of the escape
    then).

    ``decoding`` uint32 ``[128 * 4096]``, at ``table * 4096 + slot``: symbol + 128 in bits 0 to 7, the slot's
    place among those of its symbol in bits 8 to 19, frequency in bits 20 to 31.

    ``bits`` float32 ``[64, 256]``, at ``class, symbol + 128``: the ideal length of a level with this symbol
    of the fine table, in bits.
    """

    def __init__(self, shape: Shape) -> None:
        self.shape = shape
        self.low_bits = np.zeros(2 * COARSE, np.uint8)
        encoding = np.zeros((2 * COARSE, SYMBOLS), np.uint32)
        decoding = np.zeros((2 * COARSE, TOTAL_FREQUENCY), np.uint32)
        self.bits = np.full((NUM_CLASSES, SYMBOLS), np.inf, np.float32)
        self.bits[0, -ESCAPE] = 0
        digest = hashlib.sha256()
        fine, coarse = class_frequencies(shape), class_frequencies(shape, COARSE_MEAN)
        for index, alphabet in (*enumerate(fine, start=1), *enumerate(coarse, start=COARSE + 1)):
            frequencies = np.array(alphabet.frequencies, np.uint32)
            symbols = np.array([ESCAPE, *range(-alphabet.largest, alphabet.largest + 1)]) - ESCAPE
            starts = np.cumsum(frequencies, dtype=np.uint32) - frequencies
            self.low_bits[index] = alphabet.low_bits
            encoding[index] = frequencies[0] | starts[0] << 12 | np.uint32(1 << 24)
            encoding[index, symbols[1:]] = frequencies[1:] | starts[1:] << 12
            place = np.arange(TOTAL_FREQUENCY, dtype=np.uint32) - np.repeat(starts, frequencies)
            decoding[index] = (
                np.repeat(symbols.astype(np.uint32), frequencies)
                | place << 8
                | np.repeat(frequencies, frequencies) << 20
            )
            lengths = PROBABILITY_BITS - np.log2(frequencies) + alphabet.low_bits
            if index < COARSE:
                self.bits[index] = lengths[0] + ESCAPED_BITS
                self.bits[index, symbols[1:]] = lengths[1:]
            digest.update(bytes([alphabet.low_bits, alphabet.largest]) + frequencies.astype("<u2").tobytes())
        self.encoding = encoding.reshape(-1)
        self.decoding = decoding.reshape(-1)
        for table in (self.low_bits, self.encoding, self.decoding, self.bits):
            table.setflags(write=False)
        self.digest = digest.hexdigest()
        """SHA-256 of all alphabets and frequencies: equal digests decode each other's blocks."""
        self._borders: NDArray[np.float64] | None = None

    def bits_per_level(self, scale_class: int, levels: NDArray[np.integer]) -> NDArray[np.float64]:
        """The ideal code length in bits of each of ``levels``, of any shape, in one class.

        It is infinite for a level of class 0 that is not zero.
        """
        symbols = np.clip(np.asarray(levels, np.int64) >> self.low_bits[scale_class], ESCAPE, -ESCAPE - 1)
        lengths: NDArray[np.float64] = self.bits[scale_class, symbols - ESCAPE].astype(np.float64)
        return lengths

    def expected_bits(self, levels: Levels, classes: Classes) -> NDArray[np.float64]:
        """The ideal code length in bits of each coefficient ``[R]``, over ``levels`` int16 ``[T, R]``."""
        totals = np.zeros(len(classes))
        levels = np.require(levels, np.int16, ["C", "A", "W"])
        _sum_bits(levels, classes.astype(np.int64), self.low_bits, self.bits, totals)
        return totals

    def class_of(self, mean_abs: NDArray[np.floating]) -> Classes:
        """The class that codes levels of this mean magnitude and the tables' shape in the fewest bits.

        ``mean_abs [R]``, not negative; 0 is class 0. Result uint8 ``[R]``.
        """
        mean_abs = np.asarray(mean_abs, np.float64)
        if not bool((mean_abs >= 0).all()):
            raise CodecError("mean magnitudes of levels must be numbers that are not negative")
        if self._borders is None:
            self._borders = self._find_borders()
        chosen = 1 + np.searchsorted(self._borders, mean_abs)
        return np.where(mean_abs == 0, 0, chosen).astype(np.uint8)

    def _find_borders(self) -> NDArray[np.float64]:
        """Means at which two neighbouring classes need equally many bits, ``[62]``, rising."""
        alphabets = class_frequencies(self.shape)
        means = np.array([alphabet.mean for alphabet in alphabets])
        lengths = np.stack([self.bits_per_level(index, _LEVELS) for index in range(1, NUM_CLASSES)])
        models = np.stack([_model(self.shape, alphabet.rate) for alphabet in alphabets])
        # expected[c, d]: bits of a level in class c if it comes from the model of class d.
        expected = lengths @ models.T
        rise = np.diff(expected, axis=0)
        # Each class is best at its own mean. In between the difference is nearly linear in the mean.
        below, above = np.diagonal(rise), np.diagonal(rise, 1)
        borders: NDArray[np.float64] = means[:-1] + np.diff(means) * below / (below - above)
        return borders


def _model(shape: Shape, rate: float) -> NDArray[np.float64]:
    """The probability of each of ``_LEVELS`` in a class with this rate."""
    weights, scales = np.array(shape.components, np.float64).T
    # edge[k]: where the quantizer's magnitude k begins, in steps.
    edges = np.maximum(np.arange(_LEVELS[-1] + 2) - ROUNDING, 0) * rate
    at_least = np.exp(-edges[:, None] / scales) @ (weights / weights.sum())
    magnitudes = at_least[:-1] - at_least[1:]
    return np.where(_LEVELS == 0, magnitudes[0], magnitudes[np.abs(_LEVELS)] / 2)


@compiled
def _sum_bits(
    levels: Levels,
    classes: NDArray[np.int64],
    low_bits: NDArray[np.uint8],
    bits: NDArray[np.float32],
    totals: NDArray[np.float64],
) -> None:
    for token in range(levels.shape[0]):
        for index in range(levels.shape[1]):
            scale_class = classes[index]
            # Whether a symbol is escaped does not change beyond the ends of the table.
            place = (np.int64(levels[token, index]) >> np.int64(low_bits[scale_class])) + 128
            if place < 0 or place > 255:
                place = np.int64(0)
            totals[index] += bits[scale_class, place]


@cache
def standard_tables() -> CoderTables:
    """The tables that blocks are coded with."""
    return CoderTables(SHAPE)
