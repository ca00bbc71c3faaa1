"""The loops of the fixed-width coder: one record of up to 64 tokens in, one out.

A band is 16 coefficients, the last may have fewer. A record is little-endian words (uint16):

1. for each band its width in bits 0 to 3, and in bits 4 to 15 the number of its near exceptions;
2. two words, lowest first: the number of far exceptions;
3. for each band its levels; ``width`` bits each, plus ``2^(width - 1)``. The levels of a coefficient follow
   each other by token in a chain of words, lowest bits first, and word ``k`` of coefficient ``i`` of the band
   is word ``k * (coefficients of the band) + i``: neighbouring coefficients are unpacked by the same shifts;
4. for each band its near exceptions: ``token * 16 + coefficient`` in bits 0 to 9, and in bits 10 to 15 how
   far the level lies beyond the levels that its band's width has, plus 32;
5. the far exceptions, three words each: band, ``token * 16 + coefficient``, and the level as int16.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.compiled import compiled
from krul_backend.codec.coefficients.interface import RECORD_TOKENS, Levels, Values
from krul_backend.codec.coefficients.records import Index, copy_words, read_words, store_record

BAND = 16
LARGEST_WIDTH = 8
NEAR = 32
"""Near exceptions lie up to this far beyond the levels of their band's width."""

_FAR_WORDS = 3
_PLACE_MASK = RECORD_TOKENS * BAND - 1


def most_words(num_coded: int) -> int:
    """Words that a record of this many coefficients takes at most."""
    num_bands = -(-num_coded // BAND)
    # No width is chosen that takes more than width 0 would, where each level is a far exception at worst.
    return num_bands + 3 + num_coded * RECORD_TOKENS * _FAR_WORDS


@compiled
def _limits(width: Index) -> tuple[Index, Index]:
    """The smallest level that ``width`` bits have, and the one after the largest."""
    if width == 0:
        return 0, 1
    return -(1 << (width - 1)), 1 << (width - 1)


@compiled
def encode_block(
    levels: Levels,
    coded: NDArray[np.int64],
    data: NDArray[np.uint16],
    record_num_words: NDArray[np.int64],
) -> Index:
    """Write all records of ``levels [T, R]`` to the front of ``data``; the number of words that they take.

    ``data`` has room for ``most_words`` per record.
    """
    num_tokens = levels.shape[0]
    num_coded = len(coded)
    num_bands = (num_coded + BAND - 1) // BAND
    rows = np.zeros((RECORD_TOKENS, num_bands * BAND), np.int16)
    near = np.empty(num_bands * RECORD_TOKENS * BAND, np.uint16)
    far = np.empty(num_bands * RECORD_TOKENS * BAND * _FAR_WORDS, np.uint16)
    end: Index = 0
    for record in range(len(record_num_words)):
        first = record * RECORD_TOKENS
        size = min(RECORD_TOKENS, num_tokens - first)
        for token in range(size):
            for index in range(num_coded):
                rows[token, index] = levels[first + token, coded[index]]
        start = end
        end = start + num_bands + 2
        num_near = 0
        num_far = 0
        for band in range(num_bands):
            begin = band * BAND
            num_columns = min(BAND, num_coded - begin)
            width = _best_width(rows, begin, size, num_columns)
            low, high = _limits(width)
            before = num_near
            chain = (size * width + 15) >> 4
            for index in range(end, end + chain * num_columns):
                data[index] = 0
            for token in range(size):
                place = token * width
                word = end + (place >> 4) * num_columns
                shift = place & 15
                for column in range(num_columns):
                    level = np.int64(rows[token, begin + column])
                    if low <= level < high:
                        if width > 0:
                            bits = (level - low) << shift
                            data[word + column] |= np.uint16(bits & 0xFFFF)
                            if shift + width > 16:
                                data[word + num_columns + column] |= np.uint16(bits >> 16)
                        continue
                    beyond = level - (low if level < low else high)
                    position = token * BAND + column
                    if -NEAR <= beyond < NEAR:
                        near[num_near] = position | (beyond + NEAR) << 10
                        num_near += 1
                    else:
                        far[num_far] = band
                        far[num_far + 1] = position
                        far[num_far + 2] = level
                        num_far += _FAR_WORDS
            end += chain * num_columns
            data[start + band] = width | (num_near - before) << 4
        data[start + num_bands] = (num_far // _FAR_WORDS) & 0xFFFF
        data[start + num_bands + 1] = (num_far // _FAR_WORDS) >> 16
        copy_words(near, 0, num_near, data, end)
        end += num_near
        copy_words(far, 0, num_far, data, end)
        end += num_far
        if (end - start) & 1:
            data[end] = 0
            end += 1
        record_num_words[record] = end - start
    return end


@compiled
def _best_width(rows: Levels, begin: int, size: int, num_columns: int) -> int:
    """The width that stores a band in the fewest words."""
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
            for column in range(begin, begin + num_columns):
                level = rows[token, column]
                outside += np.int16(level < first) | np.int16(level > last)
                far += np.int16(level < smallest_near) | np.int16(level >= end_near)
            num_outside += outside
            num_far += far
        num_words = ((size * width + 15) >> 4) * num_columns + (num_outside - num_far) + _FAR_WORDS * num_far
        if num_words < best_words:
            best_words = num_words
            best_width = width
        if num_outside == 0:
            break
    return best_width


@compiled
def decode_block(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    num_tokens: int,
    coded: NDArray[np.int64],
    num_leading: int,
    shrink: np.float32,
    out_levels: Levels,
    out_values: Values,
) -> int:
    """Decode all records into the output that has rows; how many are good before the first damaged one."""
    num_coded = len(coded)
    num_bands = (num_coded + BAND - 1) // BAND
    rows = np.empty((RECORD_TOKENS, num_bands * BAND), np.int16)
    longest: Index = 0
    for record in range(len(starts) - 1):
        longest = max(longest, starts[record + 1] - starts[record])
    # The last levels of a band are read together with a word after them.
    words = np.empty(longest // 2 + BAND, np.uint16)
    for record in range(len(starts) - 1):
        first = record * RECORD_TOKENS
        size = min(RECORD_TOKENS, num_tokens - first)
        read_words(data, starts[record], starts[record + 1], words)
        num_words = (starts[record + 1] - starts[record]) >> 1
        if not _decode_record(words, num_words, size, num_coded, rows):
            return record
        store_record(rows, first, size, coded, num_leading, shrink, out_levels, out_values)
    return len(starts) - 1


@compiled
def _decode_record(
    words: NDArray[np.uint16], num_words: int, size: int, num_coded: int, rows: Levels
) -> bool:
    """Decode one record into ``rows [64, 16 * bands]``; False if it is damaged."""
    num_bands = (num_coded + BAND - 1) // BAND
    position: Index = num_bands + 2
    if num_words < position:
        return False
    num_far = np.int64(words[num_bands]) | np.int64(words[num_bands + 1]) << 16
    total = position + _FAR_WORDS * num_far
    for band in range(num_bands):
        header = np.int64(words[band])
        num_columns = min(BAND, num_coded - band * BAND)
        if header & 15 > LARGEST_WIDTH or header >> 4 > size * num_columns:
            return False
        total += ((size * (header & 15) + 15) >> 4) * num_columns + (header >> 4)
    if total + (total & 1) != num_words or (total < num_words and words[total] != 0):
        return False
    for band in range(num_bands):
        begin = band * BAND
        num_columns = min(BAND, num_coded - begin)
        width = np.int64(words[band]) & 15
        if num_columns == BAND:
            # A constant number of columns: they are unpacked side by side.
            _unpack(words, position, width, size, BAND, rows, begin)
        else:
            _unpack(words, position, width, size, num_columns, rows, begin)
        position += ((size * width + 15) >> 4) * num_columns
    for band in range(num_bands):
        begin = band * BAND
        num_columns = min(BAND, num_coded - begin)
        low, high = _limits(np.int64(words[band]) & 15)
        for index in range(position, position + (np.int64(words[band]) >> 4)):
            exception = np.int64(words[index])
            token = (exception & _PLACE_MASK) >> 4
            column = exception & (BAND - 1)
            if token >= size or column >= num_columns:
                return False
            beyond = (exception >> 10) - NEAR
            rows[token, begin + column] = beyond + (low if beyond < 0 else high)
        position += np.int64(words[band]) >> 4
    for index in range(position, position + _FAR_WORDS * num_far, _FAR_WORDS):
        token = np.int64(words[index + 1]) >> 4
        column = np.int64(words[index]) * BAND + (np.int64(words[index + 1]) & (BAND - 1))
        if token >= size or column >= num_coded:
            return False
        rows[token, column] = words[index + 2]
    return True


@compiled
def _unpack(
    words: NDArray[np.uint16],
    position: Index,
    width: Index,
    size: int,
    num_columns: int,
    rows: Levels,
    begin: int,
) -> None:
    """Write the levels of one band without its exceptions to ``rows[:size, begin:]``."""
    if width == 0:
        for token in range(size):
            for column in range(num_columns):
                rows[token, begin + column] = 0
        return
    mask = np.uint32((1 << width) - 1)
    low = np.int32(1 << (width - 1))
    for token in range(size):
        place = token * width
        word = position + (place >> 4) * num_columns
        shift = np.uint32(place & 15)
        if (place & 15) + width <= 16:
            for column in range(num_columns):
                bits = np.uint32(words[word + column]) >> shift
                rows[token, begin + column] = np.int16(np.int32(bits & mask) - low)
        else:
            for column in range(num_columns):
                both = np.uint32(words[word + column]) | np.uint32(
                    words[word + num_columns + column]
                ) << np.uint32(16)
                rows[token, begin + column] = np.int16(np.int32((both >> shift) & mask) - low)
