"""Codes coefficients in bands of one bit width each, and stores levels that do not fit as exceptions.

A band is 16 neighbouring coefficients; the last is filled up with zeros. It is coded if any of its scales is
not 0. Of the scales nothing else matters. After its shifts a record is little-endian words (uint16):

1. for each band its width in bits 0 to 3, and in bits 4 to 15 the number of words of its exceptions;
2. for each band its levels; ``width`` bits each, plus ``2^(width - 1)``. The levels of a coefficient follow
   each other by token in a chain of words, lowest bits first, and word ``k`` of coefficient ``i`` of the band
   is word ``16 * k + i``: neighbouring coefficients are unpacked by the same shifts. Then its exceptions:
   ``token * 16 + coefficient`` in bits 0 to 9, and in bits 10 to 15 how far the level lies beyond the levels
   that the width has, plus 32; or 0, if that is too far, and the level as int16 is the next word.
"""

from __future__ import annotations

import numpy as np

from krul_backend.codec.coefficients.compiled import RECORD_TOKENS, Index, Integers, Levels, Words
from krul_backend.codec.coefficients.scales import BAND
from krul_backend.machine_code import compiled

LARGEST_WIDTH = 8
NEAR = 32
"""An exception takes one word if it lies less than this beyond the levels that its band's width has."""

_PLACE_MASK = RECORD_TOKENS * BAND - 1


@compiled
def _limits(width: Index) -> tuple[Index, Index]:
    """The smallest level that ``width`` bits have, and the one after the largest."""
    if width == 0:
        return 0, 1
    return -(1 << (width - 1)), 1 << (width - 1)


@compiled
def encode_record(rows: Levels, size: int, columns: Integers, data: Words, begin: Index) -> Index:
    """Write a record to ``data`` from word ``begin`` on, and return the word after it.

    ``columns`` are the first coefficients of the bands that are coded. ``data`` has room for two words per
    level, and one per band.
    """
    end = begin + len(columns)
    for band in range(len(columns)):
        width = _best_width(rows, columns[band], size)
        exceptions = end + ((size * width + 15) >> 4) * BAND
        data[end:exceptions] = 0
        start = end
        end = _encode_band(rows, columns[band], size, width, data, start, exceptions)
        data[begin + band] = width | (end - exceptions) << 4
    return end


@compiled
def _best_width(rows: Levels, begin: Index, size: int) -> int:
    """Return the width with which a band takes the fewest words; width 0 takes at most two per level."""
    best_width = 0
    best_words: Index = 1 << 62
    for width in range(LARGEST_WIDTH + 1):
        low, high = _limits(width)
        smallest_near, end_near = np.int16(low - NEAR), np.int16(high + NEAR)
        first, last = np.int16(low), np.int16(high - 1)
        num_outside = np.int64(0)
        num_far = np.int64(0)
        for token in range(size):
            outside = np.int16(0)
            far = np.int16(0)
            for column in range(begin, begin + BAND):
                level = rows[token, column]
                outside += np.int16(level < first) | np.int16(level > last)
                far += np.int16(level <= smallest_near) | np.int16(level >= end_near)
            num_outside += outside
            num_far += far
        num_words = ((size * width + 15) >> 4) * BAND + num_outside + num_far
        if num_words < best_words:
            best_words = num_words
            best_width = width
        if num_outside == 0:
            break
    return best_width


@compiled
def _encode_band(
    rows: Levels, begin: Index, size: int, width: int, data: Words, start: Index, end: Index
) -> Index:
    """Write the levels of a band from word ``start`` on, where ``data`` is zero, and its exceptions from word
    ``end`` on; return the word after them."""
    low, high = _limits(width)
    for token in range(size):
        place = token * width
        word = start + (place >> 4) * BAND
        for column in range(BAND):
            level = np.int64(rows[token, begin + column])
            if low <= level < high:
                bits = (level - low) << (place & 15)
                if width > 0:
                    data[word + column] |= np.uint16(bits & 0xFFFF)
                if (place & 15) + width > 16:
                    data[word + BAND + column] = bits >> 16
                continue
            beyond = level - (low if level < low else high)
            near = -NEAR < beyond < NEAR
            data[end] = token * BAND + column | ((beyond + NEAR) << 10 if near else 0)
            end += 1
            if not near:
                data[end] = level
                end += 1
    return end


@compiled
def decode_record(
    words: Words, start: Index, num_words: Index, size: int, columns: Integers, rows: Levels
) -> Index:
    """Decode the record that starts at word ``start`` into ``rows``. Return the word after it, or -1 if it is
    damaged.

    ``columns`` are those of ``encode_record``. ``words`` has a zero after its ``num_words``.
    """
    position = start + len(columns)
    if num_words < position:
        return -1
    total = position
    for band in range(len(columns)):
        width = np.int64(words[start + band]) & 15
        if width > LARGEST_WIDTH:
            return -1
        total += ((size * width + 15) >> 4) * BAND + (np.int64(words[start + band]) >> 4)
    if total > num_words:
        return -1
    for band in range(len(columns)):
        begin = columns[band]
        width = np.int64(words[start + band]) & 15
        _unpack(words, position, width, size, rows, begin)
        position += ((size * width + 15) >> 4) * BAND
        end = position + (np.int64(words[start + band]) >> 4)
        low, high = _limits(width)
        while position < end:
            exception = np.int64(words[position])
            token = (exception & _PLACE_MASK) // BAND
            if token >= size:
                return -1
            beyond = (exception >> 10) - NEAR
            level = beyond + (low if beyond < 0 else high)
            position += 1
            if beyond == -NEAR:
                level = np.int64(words[position])
                position += 1
            rows[token, begin + exception % BAND] = level
        if position > end:
            return -1
    return position


@compiled
def _unpack(words: Words, position: Index, width: Index, size: int, rows: Levels, begin: Index) -> None:
    """Write the levels of one band without its exceptions to ``rows[:size, begin : begin + 16]``."""
    mask = np.uint32((1 << width) - 1)
    low = np.int32(_limits(width)[0])
    for token in range(size):
        place = token * width
        word = position + (place >> 4) * BAND
        shift = np.uint32(place & 15)
        if width == 0:
            for column in range(BAND):
                rows[token, begin + column] = 0
        elif (place & 15) + width <= 16:
            for column in range(BAND):
                bits = np.uint32(words[word + column]) >> shift
                rows[token, begin + column] = np.int16(np.int32(bits & mask) + low)
        else:
            for column in range(BAND):
                after = np.uint32(words[word + BAND + column])
                both = np.uint32(words[word + column]) | after << np.uint32(16)
                rows[token, begin + column] = np.int16(np.int32((both >> shift) & mask) + low)
