"""Codes coefficients with range asymmetric numeral systems (rANS), close to the fewest bits possible.

After its shifts a record has the states of its lanes (uint32), then words (uint16), all little-endian. States
are 32 bits, words 16, probabilities 12. The decoder goes through the coefficients that are coded, in order,
and for each through the tokens. Lane ``t % 16`` gives the level of token ``t`` by the table of ``scale - 2 *
shift``, within 1 to 47: twice the step is half the level. Then the lane takes the next word if its state has
fallen below ``2^16``, and a level that is escaped is the word after that. In the end all states are ``2^16``.
"""

from __future__ import annotations

import numpy as np

from krul_backend.codec.coefficients.scales import NUM_SCALES, Index, Integers, Levels, Tables, Words
from krul_backend.machine_code import compiled

NUM_LANES = 16

_LARGEST_SCALE = NUM_SCALES - 1
_LOWER_BOUND = np.uint64(1 << 16)
_WORD_BITS = np.uint64(16)
_WORD_MASK = np.uint64(0xFFFF)
_PROBABILITY_BITS = np.uint64(12)
_SLOT_MASK = np.uint64(4095)
_BYTE_MASK = np.uint64(255)
_PLACE_SHIFT = np.uint64(8)
_FREQUENCY_SHIFT = np.uint64(20)
_LIMIT_SHIFT = np.uint64(20)
_ESCAPE_SHIFT = np.uint64(24)
_ONE = np.uint64(1)
_ZERO = np.uint64(0)


@compiled
def encode_record(
    rows: Levels,
    size: int,
    coded: Integers,
    scales: Integers,
    moves: Integers,
    encoding: Tables,
    data: Words,
    begin: Index,
) -> Index:
    """Write states and words to ``data`` from word ``begin`` on, and return the word after them.

    ``coded`` are the coefficients that are coded, ``scales`` are theirs, and ``moves [64]`` twice the shifts.
    ``data`` has room for two words per level, and 32.
    """
    states = np.full(NUM_LANES, _LOWER_BOUND, np.uint64)
    # The last level is coded first: backwards from where the longest record would end.
    last = begin + 2 * NUM_LANES + 2 * size * len(coded)
    position = np.uint64(last)
    for place in range(len(coded) - 1, -1, -1):
        index = coded[place]
        for token in range(size - 1, -1, -1):
            level = np.int64(rows[token, index])
            table = min(max(scales[place] - moves[token], 1), _LARGEST_SCALE)
            entry = np.uint64(encoding[table * 256 + 128 + min(max(level, -128), 127)])
            if entry >> _ESCAPE_SHIFT:
                position -= _ONE
                data[position] = level
            frequency = entry & _SLOT_MASK
            slot = (entry >> _PROBABILITY_BITS) & _SLOT_MASK
            state = states[token % NUM_LANES]
            # Written in any case, and kept if the state is too large: no branch to mispredict.
            data[position - _ONE] = state & _WORD_MASK
            full = state >= frequency << _LIMIT_SHIFT
            position -= np.uint64(full)
            state = state >> _WORD_BITS if full else state
            quotient = np.uint64(np.uint32(state) // np.uint32(frequency))
            rest = state - quotient * frequency
            states[token % NUM_LANES] = (quotient << _PROBABILITY_BITS) + rest + slot
    for lane in range(min(size, NUM_LANES)):
        data[begin] = states[lane] & _WORD_MASK
        data[begin + 1] = states[lane] >> _WORD_BITS
        begin += 2
    for index in range(np.int64(position), last):
        data[begin] = data[index]
        begin += 1
    return begin


@compiled
def decode_record(
    words: Words,
    start: Index,
    num_words: Index,
    size: int,
    coded: Integers,
    scales: Integers,
    moves: Integers,
    decoding: Tables,
    rows: Levels,
) -> Index:
    """Decode the states and words from word ``start`` on into ``rows``. Return the word after them, or -1 if
    they are damaged.

    The arguments are those of ``encode_record``. ``words`` has zeros for 128 words after its ``num_words``.
    """
    num_lanes = min(size, NUM_LANES)
    if num_words < start + 2 * num_lanes:
        return -1
    states = np.empty(NUM_LANES, np.uint64)
    for lane in range(num_lanes):
        states[lane] = np.uint64(words[start]) | np.uint64(words[start + 1]) << _WORD_BITS
        start += 2
        if states[lane] < _LOWER_BOUND:
            return -1
    position = np.uint64(start)
    limit = np.uint64(num_words)
    for place in range(len(coded)):
        index = coded[place]
        for token in range(size):
            table = np.uint64(min(max(scales[place] - moves[token], 1), _LARGEST_SCALE))
            state = states[token % NUM_LANES]
            entry = np.uint64(decoding[table << _PROBABILITY_BITS | (state & _SLOT_MASK)])
            symbol = entry & _BYTE_MASK
            rows[token, index] = np.int64(symbol) - 128
            state = (entry >> _FREQUENCY_SHIFT) * (state >> _PROBABILITY_BITS) + (
                (entry >> _PLACE_SHIFT) & _SLOT_MASK
            )
            # Read in any case, and kept if the state is too small: no branch to mispredict.
            longer = state << _WORD_BITS | np.uint64(words[position])
            short = state < _LOWER_BOUND
            position += np.uint64(short)
            states[token % NUM_LANES] = longer if short else state
            if symbol == _ZERO:
                rows[token, index] = words[position]
                position += _ONE
        if position > limit:
            return -1
    for lane in range(num_lanes):
        if states[lane] != _LOWER_BOUND:
            return -1
    return np.int64(position)
