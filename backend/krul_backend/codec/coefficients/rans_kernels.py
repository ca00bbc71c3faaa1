"""The loops of the rANS coder: one record of up to 64 tokens in, one out.

A record is the states of its lanes (uint32), then words (uint16), all little-endian. Token ``t`` is coded by
lane ``t % 32``. The decoder goes through the coefficients in order, for each through tokens 0 to 31, then 32
to 63, and for each such group through these steps; in each the lanes that need a word take the next ones, in
their order:

1. the symbol, by the coefficient's table;
2. if any lane has the escape: a word, which is the symbol as int16;
3. if the coefficient has stream bits: these, uniform.

A lane needs a word in steps 1 and 3 when its state has fallen below ``2^16``. The level is ``symbol <<
low_bits | stream bits << payload_bits | payload bits``. Payload bits lie in what is left in the states at the
end: ``2^16 | second token's << 8 | first token's``, the bits of the first coefficient lowest. They cost
nothing, because a state must begin with something. The coefficients that give them use a coarse table.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.compiled import compiled
from krul_backend.codec.coefficients.interface import RECORD_TOKENS, Levels, Values
from krul_backend.codec.coefficients.records import Index, copy_words, gather_record, read_words, store_record

NUM_LANES = 32
PAYLOAD_BITS = 8
"""Of each token."""

WORDS_PER_GROUP = 3 * NUM_LANES
"""A group of one coefficient takes no more words than this."""

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
def encode_block(
    levels: Levels,
    coded: NDArray[np.int64],
    tables: NDArray[np.int64],
    stream_bits: NDArray[np.int64],
    payload_bits: NDArray[np.int64],
    payload_columns: NDArray[np.int64],
    encoding: NDArray[np.uint32],
    data: NDArray[np.uint16],
    record_num_words: NDArray[np.int64],
) -> Index:
    """Write all records of ``levels [T, R]`` to the front of ``data``; the number of words that they take.

    ``tables``, ``stream_bits`` and ``payload_bits`` are those of the coefficients ``coded``;
    ``payload_columns`` are the places in ``coded`` of those with payload bits. ``data`` has room for the most
    that a block may take: 64 words, and 3 for each level, per record.
    """
    num_tokens = levels.shape[0]
    columns = np.empty((len(coded), RECORD_TOKENS), np.int16)
    room = np.empty(2 * NUM_LANES + len(coded) * 3 * RECORD_TOKENS, np.uint16)
    end: Index = 0
    for record in range(len(record_num_words)):
        first = record * RECORD_TOKENS
        size = min(RECORD_TOKENS, num_tokens - first)
        gather_record(levels, first, size, coded, columns)
        start = _encode_record(
            columns, size, tables, stream_bits, payload_bits, payload_columns, encoding, room
        )
        num_words = len(room) - start
        copy_words(room, start, num_words, data, end)
        if num_words & 1:
            data[end + num_words] = 0
            num_words += 1
        record_num_words[record] = num_words
        end += num_words
    return end


@compiled
def _encode_record(
    columns: Levels,
    size: int,
    tables: NDArray[np.int64],
    stream_bits: NDArray[np.int64],
    payload_bits: NDArray[np.int64],
    payload_columns: NDArray[np.int64],
    encoding: NDArray[np.uint32],
    room: NDArray[np.uint16],
) -> Index:
    """Write a record to the end of ``room``, backwards; where it begins."""
    num_lanes = min(size, NUM_LANES)
    states = np.full(NUM_LANES, _LOWER_BOUND, np.uint64)
    for token in range(size):
        payload = np.int64(0)
        place = 0
        for index in payload_columns:
            bits = payload_bits[index]
            payload |= (np.int64(columns[index, token]) & ((1 << bits) - 1)) << place
            place += bits
        states[token % NUM_LANES] |= np.uint64(payload << (8 * (token // NUM_LANES)))
    entries = np.empty(NUM_LANES, np.uint32)
    position = np.uint64(len(room))
    for index in range(len(tables) - 1, -1, -1):
        payload_shift = payload_bits[index]
        stream_shift = np.uint64(stream_bits[index])
        symbol_shift = payload_shift + stream_bits[index]
        table = tables[index] * 256 + 128
        for group in range((size - 1) // NUM_LANES, -1, -1):
            first = group * NUM_LANES
            group_size = min(NUM_LANES, size - first)
            escapes = np.uint32(0)
            for lane in range(group_size):
                symbol = np.int64(columns[index, first + lane]) >> symbol_shift
                entry = encoding[table + min(max(symbol, -128), 127)]
                entries[lane] = entry
                escapes |= entry
            if stream_shift > _ZERO:
                mask = (_ONE << stream_shift) - _ONE
                limit = _LOWER_BOUND << (_WORD_BITS - stream_shift)
                for lane in range(group_size - 1, -1, -1):
                    state = states[lane]
                    room[position - _ONE] = state & _WORD_MASK
                    full = state >= limit
                    position -= np.uint64(full)
                    state = state >> _WORD_BITS if full else state
                    low = np.uint64(np.int64(columns[index, first + lane]) >> payload_shift) & mask
                    states[lane] = state << stream_shift | low
            if np.uint64(escapes) >> _ESCAPE_SHIFT:
                for lane in range(group_size - 1, -1, -1):
                    if np.uint64(entries[lane]) >> _ESCAPE_SHIFT:
                        position -= _ONE
                        room[position] = columns[index, first + lane] >> symbol_shift
            for lane in range(group_size - 1, -1, -1):
                entry_bits = np.uint64(entries[lane])
                frequency = entry_bits & _SLOT_MASK
                begin = (entry_bits >> _PROBABILITY_BITS) & _SLOT_MASK
                state = states[lane]
                # Written in any case, and kept if the state is too large: no branch to mispredict.
                room[position - _ONE] = state & _WORD_MASK
                full = state >= frequency << _LIMIT_SHIFT
                position -= np.uint64(full)
                state = state >> _WORD_BITS if full else state
                quotient = np.uint64(np.uint32(state) // np.uint32(frequency))
                rest = state - quotient * frequency
                states[lane] = (quotient << _PROBABILITY_BITS) + rest + begin
    start = np.int64(position) - 2 * num_lanes
    for lane in range(num_lanes):
        room[start + 2 * lane] = states[lane] & _WORD_MASK
        room[start + 2 * lane + 1] = states[lane] >> _WORD_BITS
    return start


@compiled
def decode_block(
    data: NDArray[np.uint8],
    starts: NDArray[np.int64],
    num_tokens: int,
    coded: NDArray[np.int64],
    num_leading: int,
    tables: NDArray[np.int64],
    stream_bits: NDArray[np.int64],
    payload_bits: NDArray[np.int64],
    payload_columns: NDArray[np.int64],
    decoding: NDArray[np.uint32],
    shrink: np.float32,
    out_levels: Levels,
    out_values: Values,
) -> int:
    """Decode all records into the output that has rows; how many are good before the first damaged one."""
    num_coded = len(coded)
    columns = np.empty((num_coded, RECORD_TOKENS), np.int16)
    rows = np.empty((RECORD_TOKENS, num_coded), np.int16)
    longest: Index = 0
    for record in range(len(starts) - 1):
        longest = max(longest, starts[record + 1] - starts[record])
    # A group may read beyond the end before that is noticed.
    words = np.empty(longest // 2 + WORDS_PER_GROUP, np.uint16)
    for record in range(len(starts) - 1):
        first = record * RECORD_TOKENS
        size = min(RECORD_TOKENS, num_tokens - first)
        num_words = (starts[record + 1] - starts[record]) >> 1
        if num_words < 2 * min(size, NUM_LANES):
            return record
        read_words(data, starts[record], starts[record + 1], words)
        if not _decode_record(
            words, num_words, size, tables, stream_bits, payload_bits, payload_columns, decoding, columns
        ):
            return record
        for stripe in range(0, num_coded, 32):
            end = min(stripe + 32, num_coded)
            for token in range(size):
                for index in range(stripe, end):
                    rows[token, index] = columns[index, token]
        store_record(rows, first, size, coded, num_leading, shrink, out_levels, out_values)
    return len(starts) - 1


@compiled
def _decode_record(
    words: NDArray[np.uint16],
    num_words: int,
    size: int,
    tables: NDArray[np.int64],
    stream_bits: NDArray[np.int64],
    payload_bits: NDArray[np.int64],
    payload_columns: NDArray[np.int64],
    decoding: NDArray[np.uint32],
    columns: Levels,
) -> bool:
    """Decode one record into ``columns [num_coded, 64]``; False if it is damaged."""
    num_lanes = min(size, NUM_LANES)
    states = np.empty(NUM_LANES, np.uint64)
    for lane in range(num_lanes):
        states[lane] = np.uint64(words[2 * lane]) | np.uint64(words[2 * lane + 1]) << _WORD_BITS
        if states[lane] < _LOWER_BOUND:
            return False
    position = np.uint64(2 * num_lanes)
    limit = np.uint64(num_words)
    for index in range(len(tables)):
        payload_shift = payload_bits[index]
        stream_shift = np.uint64(stream_bits[index])
        table = np.uint64(tables[index]) << _PROBABILITY_BITS
        for first in range(0, size, NUM_LANES):
            group_size = min(NUM_LANES, size - first)
            smallest = _BYTE_MASK
            for lane in range(group_size):
                state = states[lane]
                entry = np.uint64(decoding[table + (state & _SLOT_MASK)])
                symbol = entry & _BYTE_MASK
                smallest = min(smallest, symbol)
                columns[index, first + lane] = np.int64(symbol) - 128
                state = (entry >> _FREQUENCY_SHIFT) * (state >> _PROBABILITY_BITS) + (
                    (entry >> _PLACE_SHIFT) & _SLOT_MASK
                )
                # Read in any case, and kept if the state is too small: no branch to mispredict.
                longer = state << _WORD_BITS | np.uint64(words[position])
                short = state < _LOWER_BOUND
                position += np.uint64(short)
                states[lane] = longer if short else state
            if smallest == _ZERO:
                for lane in range(group_size):
                    if columns[index, first + lane] == -128:
                        columns[index, first + lane] = words[position]
                        position += _ONE
            if stream_shift > _ZERO:
                mask = (_ONE << stream_shift) - _ONE
                for lane in range(group_size):
                    state = states[lane]
                    low = np.int64(state & mask)
                    columns[index, first + lane] = (
                        columns[index, first + lane] << np.int64(stream_shift) | low
                    )
                    state >>= stream_shift
                    longer = state << _WORD_BITS | np.uint64(words[position])
                    short = state < _LOWER_BOUND
                    position += np.uint64(short)
                    states[lane] = longer if short else state
            if position > limit:
                return False
        if payload_shift:
            for token in range(size):
                columns[index, token] <<= payload_shift
    # One word may follow, so that records stay a multiple of 4 bytes long.
    if position + (position & _ONE) != limit or (position < limit and words[position] != 0):
        return False
    return _take_payload(states, size, payload_bits, payload_columns, columns)


@compiled
def _take_payload(
    states: NDArray[np.uint64],
    size: int,
    payload_bits: NDArray[np.int64],
    payload_columns: NDArray[np.int64],
    columns: Levels,
) -> bool:
    """Complete levels by the bits that the final states hold; False if these are not final states."""
    for token in range(NUM_LANES * 2):
        lane = token % NUM_LANES
        if lane >= min(size, NUM_LANES):
            continue
        if states[lane] >> _WORD_BITS != _ONE:
            return False
        payload = np.int64(states[lane] >> np.uint64(8 * (token // NUM_LANES))) & 255
        if token >= size:
            if payload != 0:
                return False
            continue
        for index in payload_columns:
            bits = payload_bits[index]
            columns[index, token] |= payload & ((1 << bits) - 1)
            payload >>= bits
        if payload != 0:
            return False
    return True
