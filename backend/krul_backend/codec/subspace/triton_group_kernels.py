"""GPU code that decodes a group of layers: first its coefficients, then their product with the basis.

``decode_rans`` has one program of one warp for each record of 64 tokens. A lane of the coder is a lane of the
warp. All lanes take a step together: which of them read a word, and which one, follows from a running sum
over the lanes. The steps of a record follow each other, so the time is that of the longest record; records
run side by side. Where a record lies comes from the caller and is checked by it. Whatever the bytes in
between are, nothing outside of the record is read, and nothing outside of its own coefficients is written.

``restore_group_layer`` has one program for some tokens and some channels of a layer's keys, or of its values.
It multiplies coefficients and basis tile by tile, adds the mean, rotates keys and writes to the slots.

Coefficients lie between the two as ``[records, coefficients, 64]``: the lanes of a step are neighbours in
memory. Those whose scale is 0 are left out.

Importing this module imports triton.
"""

# What triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator, assignment"

from __future__ import annotations

import triton
import triton.language as tl

RECORD = tl.constexpr(64)
"""Tokens of a record."""

LANES = tl.constexpr(16)
ROUNDS = tl.constexpr(4)
"""Steps that a lane takes for one coefficient: its tokens of a record."""

SMALLEST_SHIFT = tl.constexpr(-8)
LARGEST_SCALE = tl.constexpr(47)
LOWER_BOUND = tl.constexpr(1 << 16)
ESCAPE = tl.constexpr(-128)
SQRT_2 = tl.constexpr(2**0.5)


@triton.jit
def _read_words(words, at, num_words, is_wanted):
    """Words ``at`` of a record, uint32; 0 for those that it does not have or that are not wanted."""
    return tl.load(words + at, mask=is_wanted & (at < num_words), other=0).to(tl.uint32)


@triton.jit
def _read_shifts(words, num_shift_words, num_words, token):
    """The shift of each token plus 8."""
    is_stored = (token >> 2) < num_shift_words
    return (_read_words(words, token >> 2, num_words, is_stored) >> (4 * (token & 3)).to(tl.uint32)) & 15


@triton.jit
def decode_rans(block, records, scales, tables, shrink, exact, rest, damaged):
    """Decode one record of ``block`` uint8 into the values of its coefficients, for each program.

    ``records [records, 8]`` int32: ``_RECORD`` of ``triton_group_restore`` names the columns. A record's
    bytes are whole words of 16 bits. ``scales``: of the coefficients that are coded, tail after tail.
    ``tables``: ``CoderTables.decoding``.

    A record's coefficients before ``num_exact`` go to ``exact [num_exact, 64]``, the others to ``rest
    [num_coded - num_exact, 64]``, each from the record's place there on, as ``sign(q) * (|q| - shrink) * 2 **
    (shift / 2)``. ``damaged [records]`` is set to 1 if the bytes are not what the coder writes, otherwise to
    0.
    """
    number = tl.program_id(0)
    record = records + number * 8
    begin = tl.load(record)
    num_words = (tl.load(record + 1) - begin) >> 1
    size = tl.load(record + 2)
    of_tail = scales + tl.load(record + 3)
    num_coded = tl.load(record + 4)
    num_exact = tl.load(record + 5)
    exact_values = exact + tl.load(record + 6).to(tl.int64) * RECORD
    rest_values = rest + tl.load(record + 7).to(tl.int64) * RECORD
    words = (block + begin).to(tl.pointer_type(tl.uint16), bitcast=True)
    lane = tl.arange(0, LANES)
    is_lane = lane < size
    num_shift_words = (size + 7) // 8 * 2
    position = num_shift_words + 2 * tl.minimum(size, LANES)

    of_record = tl.arange(0, RECORD)
    is_unused = (of_record >= size) & (_read_shifts(words, num_shift_words, num_words, of_record) != 0)
    is_wrong = (position > num_words) | (tl.sum(is_unused.to(tl.int32)) > 0)
    moves = ()
    factors = ()
    for index in tl.static_range(ROUNDS):
        shift = _read_shifts(words, num_shift_words, num_words, lane + index * LANES).to(tl.int32)
        shift += SMALLEST_SHIFT
        moves = moves + (2 * shift,)  # noqa: RUF005 - triton does not unpack
        # Powers of whole numbers are exact on every device.
        factor = tl.exp2((shift >> 1).to(tl.float32)) * tl.where((shift & 1) != 0, SQRT_2, 1.0)
        factors = factors + (factor,)  # noqa: RUF005
    low = _read_words(words, num_shift_words + 2 * lane, num_words, is_lane)
    high = _read_words(words, num_shift_words + 2 * lane + 1, num_words, is_lane)
    state = low | high << 16
    is_wrong |= tl.sum((is_lane & (state < LOWER_BOUND)).to(tl.int32)) > 0

    for place in range(num_coded):
        scale = tl.load(of_tail + place)
        for index in tl.static_range(ROUNDS):
            token = lane + index * LANES
            is_token = token < size
            table = tl.minimum(tl.maximum(scale - moves[index], 1), LARGEST_SCALE)
            slot = (state & 4095).to(tl.int32)
            entry = tl.load(tables + (table * 4096 + slot)).to(tl.uint32, bitcast=True)
            symbol = (entry & 255).to(tl.int32)
            after = (entry >> 20) * (state >> 12) + ((entry >> 8) & 4095)
            is_short = is_token & (after < LOWER_BOUND)
            is_escaped = is_token & (symbol == 0)
            num_read = is_short.to(tl.int32) + is_escaped.to(tl.int32)
            # A lane's words lie behind those of the lanes before it.
            at = position + tl.cumsum(num_read, 0) - num_read
            after = tl.where(is_short, after << 16 | _read_words(words, at, num_words, is_short), after)
            state = tl.where(is_token, after, state)
            own = _read_words(words, at + is_short.to(tl.int32), num_words, is_escaped)
            level = tl.where(is_escaped, own.to(tl.int16).to(tl.int32), symbol + ESCAPE)
            position += tl.sum(num_read)
            sign = (level > 0).to(tl.float32) - (level < 0).to(tl.float32)
            value = (level.to(tl.float32) - shrink * sign) * factors[index]
            is_exact = is_token & (place < num_exact)
            tl.store(exact_values + place * RECORD + token, value, mask=is_exact)
            tl.store(
                rest_values + (place - num_exact) * RECORD + token,
                value.to(rest.dtype.element_ty),
                mask=is_token & (place >= num_exact),
            )

    # A word of zero may follow, so that records are a multiple of 4 bytes long.
    is_wrong |= (position > num_words) | (position + (position & 1) != num_words)
    padding = _read_words(words, position + lane, num_words, lane == 0)
    is_wrong |= tl.sum(padding.to(tl.int32)) > 0
    is_wrong |= tl.sum((is_lane & (state != LOWER_BOUND)).to(tl.int32)) > 0
    tl.store(damaged + number, is_wrong.to(tl.int32))


@triton.jit
def _place_channels(
    column,
    num_pairs: tl.constexpr,
    padded_half: tl.constexpr,
    dim: tl.constexpr,
    rotary_half: tl.constexpr,
    are_halves: tl.constexpr,
):
    """Which head, counted from the program's first one, and which channel each of ``column [C]`` is.

    ``are_halves``: the first ``num_pairs`` columns are the first channels of the pairs that turn together, of
    one head after the other, and the others are the second ones::

        [0, rotary_half)     p                p + rotary_half
        [rotary_half, half)  p + rotary_half  p + half    what is not rotated, in two halves too

    Otherwise columns are channels, and ``2 p`` and ``2 p + 1`` turn together.
    """
    # By arithmetic, without remainders and choices: the compiler then knows which channels are neighbours.
    if are_halves:
        half: tl.constexpr = (dim + 1) // 2
        is_second = column // num_pairs
        head = column // padded_half - is_second * (num_pairs // padded_half)
        pair = column - is_second * num_pairs - head * padded_half
        channel = pair + is_second * half
        if rotary_half < half:
            is_rotated = (pair < rotary_half).to(tl.int32)
            channel += (1 - is_rotated) * (1 - is_second) * rotary_half
            channel -= is_rotated * is_second * (half - rotary_half)
        is_channel = (pair < half) & (channel < dim)
    else:
        head = column // (2 * padded_half)
        channel = column - head * (2 * padded_half)
        is_channel = channel < dim
    return head, channel, is_channel


@triton.jit
def _multiply(
    acc, values, num_values, places, decoder, vector_size,
    record, in_record, is_row, column, is_column,
    dtype: tl.constexpr, precision: tl.constexpr, num_program_values: tl.constexpr,
):  # fmt: skip
    """Add the product of coefficients ``values [records, num_values, 64]`` and rows of ``decoder``.

    Row ``r`` of the result is token ``in_record[r]`` of record ``record[r]``; ``places [num_values]`` are the
    rows of ``decoder [R, vector_size]``. Both are multiplied as ``dtype``.
    """
    of_rows = values + (record.to(tl.int64) * num_values * RECORD + in_record)
    for start in range(0, num_values, num_program_values):
        value = start + tl.arange(0, num_program_values)
        is_value = value < num_values
        place = tl.load(places + value, mask=is_value, other=0).to(tl.int64)
        left = tl.load(
            of_rows[:, None] + value[None, :] * RECORD, mask=is_row[:, None] & is_value[None, :], other=0
        )
        right = tl.load(
            decoder + place[:, None] * vector_size + column[None, :],
            mask=is_value[:, None] & is_column[None, :],
            other=0,
        )
        acc = tl.dot(left.to(dtype), right.to(dtype), acc, input_precision=precision)
    return acc


@triton.jit
def _restore_channels(
    exact, rest, num_exact, num_coded, places, exact_decoder, decoder, vector_size, vector_at, mean, step,
    stored_tokens, num_stored, cos_table, sin_table, angle_stride, start_token,
    row, num_rows, token, is_token, slot, first_head, buffer, slot_stride, head_stride,
    num_heads: tl.constexpr, num_program_heads: tl.constexpr, dim: tl.constexpr, padded_half: tl.constexpr,
    rotary_half: tl.constexpr, is_neox: tl.constexpr, precision: tl.constexpr,
    num_exact_values: tl.constexpr, num_rest_values: tl.constexpr,
):  # fmt: skip
    """Reconstruct keys, or values, of the rows ``row [T]`` and write them to ``buffer`` at ``slot [T]``."""
    num_pairs: tl.constexpr = num_program_heads * padded_half
    are_halves: tl.constexpr = rotary_half > 0 and is_neox
    column = tl.arange(0, 2 * num_pairs)
    head, channel, is_channel = _place_channels(column, num_pairs, padded_half, dim, rotary_half, are_halves)
    head += first_head
    is_column = is_channel & (head < num_heads)
    element = head * dim + channel
    record = row // RECORD
    in_record = row - record * RECORD
    is_row = row < num_rows
    x = tl.zeros([row.shape[0], 2 * num_pairs], tl.float32)
    x = _multiply(
        x, exact, num_exact, places, exact_decoder, vector_size, record, in_record, is_row,
        vector_at + element, is_column, tl.float32, precision, num_exact_values,
    )  # fmt: skip
    x = _multiply(
        x, rest, num_coded - num_exact, places + num_exact, decoder, vector_size, record, in_record, is_row,
        vector_at + element, is_column, rest.dtype.element_ty, precision, num_rest_values,
    )  # fmt: skip
    x = x * step + tl.load(mean + vector_at + element, mask=is_column, other=0)[None, :]
    if rotary_half > 0:
        pair = tl.arange(0, num_pairs)
        pair -= pair // padded_half * padded_half
        is_angle = is_token[:, None] & (pair < rotary_half)[None, :]
        angle_at = (start_token + token)[:, None] * angle_stride + pair[None, :]
        cos = tl.load(cos_table + angle_at, mask=is_angle, other=1)
        sin = tl.load(sin_table + angle_at, mask=is_angle, other=0)
        if are_halves:
            pairs = tl.permute(tl.reshape(x, [x.shape[0], 2, num_pairs]), (0, 2, 1))
        else:
            pairs = tl.reshape(x, [x.shape[0], num_pairs, 2])
        first, second = tl.split(pairs)
        pairs = tl.join(first * cos - second * sin, second * cos + first * sin)
        if are_halves:
            pairs = tl.permute(pairs, (0, 2, 1))
        x = tl.reshape(pairs, [x.shape[0], 2 * num_pairs])
    x = x.to(buffer.dtype.element_ty)
    # Tokens that are stored as in the pool.
    is_first = is_token & (token < num_stored)
    stored = stored_tokens.to(buffer.dtype, bitcast=True) + num_stored * vector_at
    stored = tl.load(
        stored + token[:, None] * (num_heads * dim) + element[None, :],
        mask=is_first[:, None] & is_column[None, :],
        other=0,
    )
    x = tl.where(is_first[:, None], stored, x)
    out = buffer + slot[:, None] * slot_stride + (head * head_stride + channel)[None, :]
    tl.store(out, x, mask=is_token[:, None] & is_column[None, :])


# A layer's begin at any tail, slots at any token.
@triton.jit(do_not_specialize_on_alignment=["first_tokens", "slots"])
def restore_group_layer(
    exact, rest, tails, parts, first_tokens, places, exact_decoder, decoder, vector_size, k_at, v_at, mean,
    block, cos_table, sin_table, angle_stride,
    k_buffer, k_slot_stride, k_head_stride, v_buffer, v_slot_stride, v_head_stride, slots,
    num_heads: tl.constexpr, num_program_heads: tl.constexpr, k_dim: tl.constexpr, v_dim: tl.constexpr,
    padded_half: tl.constexpr, rotary_half: tl.constexpr, is_neox: tl.constexpr, precision: tl.constexpr,
    num_program_tokens: tl.constexpr, num_exact_values: tl.constexpr, num_rest_values: tl.constexpr,
):  # fmt: skip
    """Write tokens of several tails to their slots of one layer.

    ``exact``, ``rest``: what ``decode_rans`` wrote. ``tails [tails, 13]`` int32: ``_TAIL`` of
    ``triton_group_restore`` names the columns. ``parts [parts, 2]`` int32: a tail, and the first of the
    ``num_program_tokens`` rows of it that a program writes. ``first_tokens [tails]``: of this layer.
    ``places``: the rows of the decoders ``[R, vector_size]`` that the coefficients belong to, tail after
    tail; a token's vector has the layer's keys from ``k_at`` and its values from ``v_at`` on. ``block``: the
    bytes of all tails. ``slots``: of the tokens of all tails.
    """
    head_blocks: tl.constexpr = (num_heads + num_program_heads - 1) // num_program_heads
    first_head = tl.program_id(0) % head_blocks * num_program_heads
    part = parts + tl.program_id(0) // head_blocks * 2
    number = tl.load(part)
    row = tl.load(part + 1) + tl.arange(0, num_program_tokens)
    tail = tails + number * 13
    places += tl.load(tail)
    num_coded = tl.load(tail + 1)
    num_exact = tl.load(tail + 2)
    exact += tl.load(tail + 3).to(tl.int64) * RECORD
    rest += tl.load(tail + 4).to(tl.int64) * RECORD
    num_rows = tl.load(tail + 5)
    token = tl.load(tail + 6) + row
    is_token = (token >= tl.load(first_tokens + number)) & (token < tl.load(tail + 7))
    start_token = tl.load(tail + 8)
    slot = tl.load(slots + (tl.load(tail + 9) + token), mask=is_token, other=0).to(tl.int64)
    num_stored = tl.load(tail + 10)
    stored_tokens = block + tl.load(tail + 11).to(tl.int64) * 16
    step = tl.load(tail + 12).to(tl.float32, bitcast=True)
    if tl.program_id(1) == 0:
        _restore_channels(
            exact, rest, num_exact, num_coded, places, exact_decoder, decoder, vector_size, k_at, mean, step,
            stored_tokens, num_stored, cos_table, sin_table, angle_stride, start_token, row, num_rows,
            token, is_token, slot, first_head, k_buffer, k_slot_stride, k_head_stride, num_heads,
            num_program_heads, k_dim, padded_half, rotary_half, is_neox, precision, num_exact_values,
            num_rest_values,
        )  # fmt: skip
    else:
        _restore_channels(
            exact, rest, num_exact, num_coded, places, exact_decoder, decoder, vector_size, v_at, mean, step,
            stored_tokens, num_stored, cos_table, sin_table, angle_stride, start_token, row, num_rows,
            token, is_token, slot, first_head, v_buffer, v_slot_stride, v_head_stride, num_heads,
            num_program_heads, v_dim, padded_half, 0, is_neox, precision, num_exact_values,
            num_rest_values,
        )  # fmt: skip
