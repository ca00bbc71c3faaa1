"""The loops over the records of a block: load levels, code them, and back.

The levels of a record lie in ``rows`` int16 ``[64, row_width(R)]``, those of a token side by side. A record
begins with the shifts of its tokens plus 8, 4 bits each, lowest first, padded to a multiple of 4 bytes. The
rest is written by ``rans.py``. A word of zero may follow, so that records are a multiple of 4 bytes long.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients import rans
from krul_backend.codec.coefficients.scales import (
    RECORD_TOKENS,
    Index,
    Integers,
    Levels,
    Shifts,
    Tables,
    Values,
    Words,
)
from krul_backend.machine_code import compiled

SMALLEST_SHIFT = -8


@compiled
def row_width(num_coefficients: int) -> int:
    """Return how many levels a row of ``rows`` has: at least ``num_coefficients``, and an odd number of cache
    lines, so that the 64 levels of a column do not compete for the same lines of the first cache."""
    return ((num_coefficients + 31) // 32 | 1) * 32


@compiled
def encode_block(
    levels: Levels,
    places: Integers,
    scales: Integers,
    shifts: Shifts,
    tables: Tables,
    data: Words,
    num_words: Integers,
) -> Index:
    """Write all records of ``levels [T, R]`` to the front of ``data`` and the number of words of each to
    ``num_words``. Return the sum of these numbers.

    ``places`` are the coefficients that are coded, and ``scales`` are theirs. ``data`` has room for the most
    that a block may take.
    """
    rows = np.zeros((RECORD_TOKENS, row_width(levels.shape[1])), np.int16)
    moves = np.empty(RECORD_TOKENS, np.int64)
    end: Index = 0
    for record in range(len(num_words)):
        first = record * RECORD_TOKENS
        size = min(RECORD_TOKENS, len(levels) - first)
        for token in range(size):
            moves[token] = 2 * np.int64(shifts[first + token])
            for index in range(levels.shape[1]):
                rows[token, index] = levels[first + token, index]
        begin = end
        end += _num_shift_words(size)
        for index in range(begin, end):
            word = np.int64(0)
            for token in range(4 * (index - begin), min(4 * (index - begin) + 4, size)):
                word |= (np.int64(shifts[first + token]) - SMALLEST_SHIFT) << (4 * (token & 3))
            data[index] = word
        end = rans.encode_record(rows, size, places, scales, moves, tables, data, end)
        if (end - begin) & 1:
            data[end] = 0
            end += 1
        num_words[record] = end - begin
    return end


@compiled
def decode_block(
    data: NDArray[np.uint8],
    starts: Integers,
    places: Integers,
    scales: Integers,
    shifts: Shifts,
    tables: Tables,
    words: Words,
    shrink: np.float32,
    factors: Values,
    out: NDArray[Any],
) -> int:
    """Decode all records to ``shifts`` and ``out``. Return how many are good before the first damaged one.

    Record ``i`` is ``data[starts[i] : starts[i + 1]]``. ``words`` has room for the largest record, and 128
    words more. A level is shrunk, then multiplied by ``factors[shift + 8]``.
    """
    rows = np.zeros((RECORD_TOKENS, row_width(out.shape[1])), np.int16)
    moves = np.empty(RECORD_TOKENS, np.int64)
    for record in range(len(starts) - 1):
        first = record * RECORD_TOKENS
        size = min(RECORD_TOKENS, len(out) - first)
        start = _num_shift_words(size)
        num_words = (starts[record + 1] - starts[record]) >> 1
        if not start <= num_words <= len(words) - 2 * RECORD_TOKENS:
            return record
        for index in range(num_words):
            place = starts[record] + 2 * index
            words[index] = np.uint16(data[place]) | np.uint16(data[place + 1]) << 8
        # A coder may read that far beyond the end before it notices.
        words[num_words : num_words + 2 * RECORD_TOKENS] = 0
        for token in range(4 * start):
            shift = ((np.int64(words[token >> 2]) >> (4 * (token & 3))) & 15) + SMALLEST_SHIFT
            if token < size:
                shifts[first + token] = shift
                moves[token] = 2 * shift
            elif shift != SMALLEST_SHIFT:
                return record
        end = rans.decode_record(words, start, num_words, size, places, scales, moves, tables, rows)
        if end < 0 or end + (end & 1) != num_words or (end < num_words and words[end] != 0):
            return record
        for token in range(size):
            factor = factors[np.int64(shifts[first + token]) - SMALLEST_SHIFT]
            for index in range(out.shape[1]):
                level = rows[token, index]
                sign = np.float32(np.int32(level > 0) - np.int32(level < 0))
                out[first + token, index] = (np.float32(level) - shrink * sign) * factor
    return len(starts) - 1


@compiled
def _num_shift_words(size: int) -> int:
    return (size + 7) // 8 * 2
