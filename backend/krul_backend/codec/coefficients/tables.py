"""The tables of the scales: for coding, and for predicting sizes."""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.compiled import Levels, Scales, Shifts
from krul_backend.codec.coefficients.frequencies import (
    NUM_SCALES,
    PROBABILITY_BITS,
    TOTAL_FREQUENCY,
    alphabets,
)

ESCAPE = -128
"""The symbol before a level that the alphabet of its scale does not have."""

SYMBOLS = 256
_ESCAPED_BITS = 16


class CoderTables:
    """The tables of all scales. The arrays are read-only.

    ``encoding`` uint32 ``[48 * 256]``, at ``scale * 256 + symbol + 128``: frequency in bits 0 to 11, start of
    its slots in bits 12 to 23, and bit 24 for levels that are escaped (the rest is that of the escape then).

    ``decoding`` uint32 ``[48 * 4096]``, at ``scale * 4096 + slot``: symbol + 128 in bits 0 to 7, the slot's
    place among those of its symbol in bits 8 to 19, frequency in bits 20 to 31.

    ``bits`` float32 ``[48, 256]``, at ``scale, symbol + 128``: the ideal length of a level, in bits. Both
    ends are escaped in each scale, as all levels beyond are. In scale 0 all but level 0 are infinite.
    """

    def __init__(self) -> None:
        encoding = np.zeros((NUM_SCALES, SYMBOLS), np.uint32)
        decoding = np.zeros((NUM_SCALES, TOTAL_FREQUENCY), np.uint32)
        self.bits = np.full((NUM_SCALES, SYMBOLS), np.inf, np.float32)
        self.bits[0, -ESCAPE] = 0
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
            lengths = PROBABILITY_BITS - np.log2(frequencies)
            self.bits[scale] = lengths[0] + _ESCAPED_BITS
            self.bits[scale, symbols[1:]] = lengths[1:]
        self.encoding = encoding.reshape(-1)
        self.decoding = decoding.reshape(-1)
        for table in (self.encoding, self.decoding, self.bits):
            table.setflags(write=False)

    def expected_bits(self, levels: Levels, scales: Scales, shifts: Shifts) -> NDArray[np.float64]:
        """The ideal code length in bits of each coefficient ``[R]``, over ``levels`` int16 ``[T, R]``.

        ``scales`` uint8 ``[R]``; ``shifts`` int8 ``[T]``, which are not part of the lengths.
        """
        moved = np.clip(scales.astype(np.int16) - 2 * shifts.astype(np.int16)[:, None], 1, NUM_SCALES - 1)
        lengths = self.bits[np.where(scales == 0, 0, moved), np.clip(levels, -128, 127) - ESCAPE]
        totals: NDArray[np.float64] = lengths.sum(axis=0, dtype=np.float64)
        return totals


@cache
def standard_tables() -> CoderTables:
    """The tables that blocks are coded with."""
    return CoderTables()
