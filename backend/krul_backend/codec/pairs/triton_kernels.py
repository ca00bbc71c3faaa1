"""GPU code that decodes one layer of a segment straight into the KV pool.

Work is laid out for a kernel that only waits for memory:

- A program has ``num_program_tokens`` tokens of one group and ``num_program_heads`` KV heads, keys or values
  (grid: token blocks x head blocks, 2). Where a group lies is arithmetic: nothing is looked up or waited for.
- Lanes lie along channels. A vector of ``dim`` channels is worked on as two halves ``[tokens, dim / 2]``.
  With neox rotation the channels that turn together are then at the same place in the two halves, and so are
  the codes that share a byte: one load serves both, no lane asks another, and every lane writes 16 bytes at
  a time. Where neighbours turn together, the vector is read whole and split in registers.
- Cosines and sines are read once per program and used for all its heads, which are unrolled: their loads are
  in flight together.
- Everything between the load of the codes and the store of the pool's elements stays in registers, in fp32.

Groups lie ``record_bytes`` apart. Every section of a record starts at a multiple of 16 bytes; in the last,
shorter group the sections start elsewhere, which is one choice between two numbers per section.

Importing this module imports triton.
"""

# What triton compiles has no Python types.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

from __future__ import annotations

import triton
import triton.language as tl

SMALLEST_NORM = tl.constexpr(1e-30)
"""Shorter directions are zero; the same as in ``shared_pair``."""


@triton.jit
def _code_place(channel, dim: tl.constexpr, bits: tl.constexpr):
    """The byte of a vector that holds the code of ``channel [C]``, and the bits by which it is shifted up.

    Byte ``w`` has the codes of channels ``w``, ``w + width``, ..., the first in its lowest bits.
    """
    byte = channel
    shift = tl.zeros_like(channel)
    if bits == 4 or bits == 2:
        width: tl.constexpr = (dim * bits + 7) // 8
        # Not channel % width: the compiler would lose sight of which bytes are neighbours.
        for plane in tl.static_range(1, 8 // bits):
            is_above = (channel >= plane * width).to(tl.int32)
            byte -= is_above * width
            shift += is_above * bits
    return byte, shift


@triton.jit
def _read_vectors(
    record, data_at, scale_at, offset_at, token, head, channel, byte, shift, is_token, is_channel, buffer,
    num_heads: tl.constexpr, dim: tl.constexpr, bits: tl.constexpr, is_per_channel: tl.constexpr,
):  # fmt: skip
    """Read channels ``channel [C]`` of one head for the tokens ``token [T]`` of a record: ``[T, C]``.

    ``bits`` of an element: 32 or 16 are the pool's own (returned as they are), 8, 4 and 2 codes.
    ``byte``, ``shift`` ``[C]``: see ``_code_place``.
    """
    vector = token * num_heads + head
    mask = is_token[:, None] & is_channel[None, :]
    if bits >= 16:
        elements = (record + data_at).to(buffer.dtype, bitcast=True)
        x = tl.load(elements + vector[:, None] * dim + channel[None, :], mask=mask, other=0)
    else:
        width: tl.constexpr = (dim * bits + 7) // 8
        packed = tl.load(record + data_at + vector[:, None] * width + byte[None, :], mask=mask, other=0)
        code = (packed.to(tl.int32) >> shift[None, :]) & ((1 << bits) - 1)
        scales = (record + scale_at).to(tl.pointer_type(tl.float16), bitcast=True)
        offsets = (record + offset_at).to(tl.pointer_type(tl.float16), bitcast=True)
        if is_per_channel:
            scale = tl.load(scales + head * dim + channel, mask=is_channel, other=0)[None, :]
            offset = tl.load(offsets + head * dim + channel, mask=is_channel, other=0)[None, :]
        else:
            scale = tl.load(scales + vector, mask=is_token, other=0)[:, None]
            offset = tl.load(offsets + vector, mask=is_token, other=0)[:, None]
        x = offset.to(tl.float32) + code.to(tl.float32) * scale.to(tl.float32)
    return x


@triton.jit
def _norm_factor(squared_norm, own_record, norm_at, token, head, is_token, num_heads: tl.constexpr):
    """The factor that gives vectors of ``squared_norm [T]`` the layer's own stored norms: ``[T, 1]``."""
    norms = (own_record + norm_at).to(tl.pointer_type(tl.float16), bitcast=True)
    norm = tl.load(norms + token * num_heads + head, mask=is_token, other=0).to(tl.float32)
    return (norm / tl.maximum(tl.sqrt(squared_norm), SMALLEST_NORM))[:, None]


@triton.jit
def _restore_vectors(
    record, own_record, data_at, scale_at, offset_at, norm_at,
    cos_table, sin_table, angle_stride,
    position, token, is_token, slot, first_head, buffer, slot_stride, head_stride,
    num_heads: tl.constexpr, num_program_heads: tl.constexpr, dim: tl.constexpr, padded_half: tl.constexpr,
    bits: tl.constexpr, is_per_channel: tl.constexpr, has_norm: tl.constexpr,
    rotary_half: tl.constexpr, is_neox: tl.constexpr,
):  # fmt: skip
    """Decode keys, or values, of the tokens ``token [T]`` of a record into ``buffer`` at ``slot [T]``.

    Channels at pair ``p`` of the halves::

        neox:        [0, rotary_half)     p              p + rotary_half
                     [rotary_half, half)  p + rotary_half  p + half    what is not rotated, in two halves too
        neighbours:  2 p                  2 p + 1
    """
    half: tl.constexpr = (dim + 1) // 2
    is_partial: tl.constexpr = rotary_half > 0 and rotary_half < half
    are_neighbours: tl.constexpr = rotary_half > 0 and not is_neox
    pair = tl.arange(0, padded_half)
    if rotary_half > 0:
        is_angle = is_token[:, None] & (pair < rotary_half)[None, :]
        angle_at = position[:, None] * angle_stride + pair[None, :]
        cos = tl.load(cos_table + angle_at, mask=is_angle, other=1)
        sin = tl.load(sin_table + angle_at, mask=is_angle, other=0)
    if are_neighbours:
        channel = tl.arange(0, 2 * padded_half)
        is_channel = channel < dim
        byte, shift = _code_place(channel, dim, bits)
    else:
        # By arithmetic and not by a choice: the compiler then knows which channels are neighbours.
        first_channel = pair
        second_channel = pair + half
        if is_partial:
            is_rotated = (pair < rotary_half).to(tl.int32)
            first_channel += (1 - is_rotated) * rotary_half
            second_channel -= is_rotated * (half - rotary_half)
        is_first = pair < half
        is_second = is_first if dim % 2 == 0 else is_first & (second_channel < dim)
        first_byte, first_shift = _code_place(first_channel, dim, bits)
        second_byte, second_shift = _code_place(second_channel, dim, bits)
        if (bits == 4 or bits == 2) and dim * bits % 16 == 0 and not is_partial:
            # The codes of both halves are in the same bytes, and one load is enough.
            second_byte = first_byte

    for program_head in tl.static_range(num_program_heads):
        head = first_head + program_head
        rows = buffer + slot[:, None] * slot_stride + head * head_stride
        if are_neighbours:
            x = _read_vectors(
                record, data_at, scale_at, offset_at, token, head, channel, byte, shift, is_token, is_channel,
                buffer, num_heads, dim, bits, is_per_channel,
            )  # fmt: skip
            x = x.to(tl.float32)
            if has_norm:
                squared_norm = tl.sum(tl.where(is_channel[None, :], x * x, 0), axis=1)
                x *= _norm_factor(squared_norm, own_record, norm_at, token, head, is_token, num_heads)
            first, second = tl.split(tl.reshape(x, [x.shape[0], padded_half, 2]))
            x = tl.interleave(first * cos - second * sin, second * cos + first * sin)
            mask = is_token[:, None] & is_channel[None, :]
            tl.store(rows + channel[None, :], x.to(buffer.dtype.element_ty), mask=mask)
        else:
            first = _read_vectors(
                record, data_at, scale_at, offset_at, token, head, first_channel, first_byte, first_shift,
                is_token, is_first, buffer, num_heads, dim, bits, is_per_channel,
            )  # fmt: skip
            second = _read_vectors(
                record, data_at, scale_at, offset_at, token, head, second_channel, second_byte, second_shift,
                is_token, is_second, buffer, num_heads, dim, bits, is_per_channel,
            )  # fmt: skip
            if has_norm:
                first = first.to(tl.float32)
                second = second.to(tl.float32)
                # What is no channel was read as zero, but its code may stand for something else.
                squares = tl.where(is_first[None, :], first * first, 0)
                squares += tl.where(is_second[None, :], second * second, 0)
                factor = _norm_factor(
                    tl.sum(squares, axis=1), own_record, norm_at, token, head, is_token, num_heads
                )
                first *= factor
                second *= factor
            if rotary_half > 0:
                turned = first * cos - second * sin
                second = second * cos + first * sin
                first = turned
            first_mask = is_token[:, None] & is_first[None, :]
            second_mask = is_token[:, None] & is_second[None, :]
            tl.store(rows + first_channel[None, :], first.to(buffer.dtype.element_ty), mask=first_mask)
            tl.store(rows + second_channel[None, :], second.to(buffer.dtype.element_ty), mask=second_mask)


@triton.jit(
    do_not_specialize=["first_token", "end_token", "start_token", "num_full_groups"],
    # They begin at any token.
    do_not_specialize_on_alignment=["slots"],
)
def restore_groups(
    block, own_block, missing_bytes, own_missing_bytes,
    cos_table, sin_table, angle_stride,
    k_buffer, k_slot_stride, k_head_stride, v_buffer, v_slot_stride, v_head_stride, slots,
    first_token, end_token, start_token, num_full_groups, own_record_bytes, k_norm_at, v_norm_at,
    last_k_data_at, last_k_scale_at, last_k_offset_at, last_k_norm_at,
    last_v_data_at, last_v_scale_at, last_v_offset_at, last_v_norm_at,
    k_data_at: tl.constexpr, k_scale_at: tl.constexpr, k_offset_at: tl.constexpr,
    v_data_at: tl.constexpr, v_scale_at: tl.constexpr, v_offset_at: tl.constexpr,
    record_bytes: tl.constexpr, group_size: tl.constexpr, num_heads: tl.constexpr,
    k_dim: tl.constexpr, v_dim: tl.constexpr, k_padded_half: tl.constexpr, v_padded_half: tl.constexpr,
    k_bits: tl.constexpr, v_bits: tl.constexpr,
    is_k_per_channel: tl.constexpr, is_v_per_channel: tl.constexpr,
    has_norm: tl.constexpr, rotary_half: tl.constexpr, is_neox: tl.constexpr,
    num_program_tokens: tl.constexpr, num_program_heads: tl.constexpr,
):  # fmt: skip
    """Decode tokens ``[first_token, end_token)`` of a segment into ``slots [end_token - first_token]``.

    ``block``, ``own_block``: uint8, with the vectors and with the layer's own norms; their first
    ``missing_bytes`` are not there. ``*_at``: first byte of a section in a full record, ``last_*_at`` in the
    shorter last one. What differs between the two layers of a pair is no constant: both use one compilation.
    """
    head_blocks: tl.constexpr = num_heads // num_program_heads
    blocks_per_group: tl.constexpr = (group_size + num_program_tokens - 1) // num_program_tokens
    first_head = tl.program_id(0) % head_blocks * num_program_heads
    token_block = tl.program_id(0) // head_blocks
    group = first_token // group_size + token_block // blocks_per_group
    in_group = token_block % blocks_per_group * num_program_tokens + tl.arange(0, num_program_tokens)
    token = group * group_size + in_group
    is_token = (in_group < group_size) & (token >= first_token) & (token < end_token)
    slot = tl.load(slots + (token - first_token), mask=is_token, other=0).to(tl.int64)
    position = start_token + token
    is_last = group == num_full_groups
    record = block + (group.to(tl.int64) * record_bytes - missing_bytes)
    own_record = own_block + (group.to(tl.int64) * own_record_bytes - own_missing_bytes)
    if tl.program_id(1) == 0:
        _restore_vectors(
            record, own_record,
            tl.where(is_last, last_k_data_at, k_data_at),
            tl.where(is_last, last_k_scale_at, k_scale_at),
            tl.where(is_last, last_k_offset_at, k_offset_at),
            tl.where(is_last, last_k_norm_at, k_norm_at),
            cos_table, sin_table, angle_stride, position, in_group, is_token, slot, first_head,
            k_buffer, k_slot_stride, k_head_stride, num_heads, num_program_heads, k_dim, k_padded_half,
            k_bits, is_k_per_channel, has_norm, rotary_half, is_neox,
        )  # fmt: skip
    else:
        _restore_vectors(
            record, own_record,
            tl.where(is_last, last_v_data_at, v_data_at),
            tl.where(is_last, last_v_scale_at, v_scale_at),
            tl.where(is_last, last_v_offset_at, v_offset_at),
            tl.where(is_last, last_v_norm_at, v_norm_at),
            cos_table, sin_table, angle_stride, position, in_group, is_token, slot, first_head,
            v_buffer, v_slot_stride, v_head_stride, num_heads, num_program_heads, v_dim, v_padded_half,
            v_bits, is_v_per_channel, has_norm, 0, is_neox,
        )  # fmt: skip


@triton.jit
def _restore_rows(
    tokens, rows, head_ends, num_rows, slots, first_token, end_token, buffer, slot_stride, head_stride,
    num_heads: tl.constexpr, padded_heads: tl.constexpr, dim: tl.constexpr, padded_dim: tl.constexpr,
    num_program_rows: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * num_program_rows + tl.arange(0, num_program_rows)
    is_row = row < num_rows
    token = tl.load(tokens + row, mask=is_row, other=0).to(tl.int32)
    is_wanted = is_row & (token >= first_token) & (token < end_token)
    slot = tl.load(slots + (token - first_token), mask=is_wanted, other=0).to(tl.int64)
    heads = tl.arange(0, padded_heads)
    # Rows lie head after head: a row's head is the number of heads that end before it.
    head_end = tl.load(head_ends + heads, mask=heads < num_heads, other=2147483647)
    head = tl.sum((row[:, None] >= head_end[None, :]).to(tl.int32), axis=1)
    channel = tl.arange(0, padded_dim)
    mask = is_wanted[:, None] & (channel < dim)[None, :]
    x = tl.load(rows + row.to(tl.int64)[:, None] * dim + channel[None, :], mask=mask, other=0)
    out = buffer + slot[:, None] * slot_stride + head[:, None] * head_stride
    tl.store(out + channel[None, :], x, mask=mask)


@triton.jit(
    do_not_specialize=["first_token", "end_token", "num_k_rows", "num_v_rows"],
    # They begin at any token.
    do_not_specialize_on_alignment=["slots"],
)
def restore_retained(
    k_tokens, k_rows, k_head_ends, num_k_rows, v_tokens, v_rows, v_head_ends, num_v_rows,
    slots, first_token, end_token,
    k_buffer, k_slot_stride, k_head_stride, v_buffer, v_slot_stride, v_head_stride,
    num_heads: tl.constexpr, padded_heads: tl.constexpr,
    k_dim: tl.constexpr, k_padded_dim: tl.constexpr, v_dim: tl.constexpr, v_padded_dim: tl.constexpr,
    num_program_rows: tl.constexpr,
):  # fmt: skip
    """Write retained rows ``k_rows [num_k_rows, k_dim]`` and ``v_rows`` over what ``restore_groups`` wrote.

    Each row is one head of one token.

    ``k_tokens [num_k_rows]``: the token of each row; ``k_head_ends [num_heads]``: where its rows end.
    """
    if tl.program_id(1) == 0:
        _restore_rows(
            k_tokens, k_rows, k_head_ends, num_k_rows, slots, first_token, end_token,
            k_buffer, k_slot_stride, k_head_stride, num_heads, padded_heads, k_dim, k_padded_dim,
            num_program_rows,
        )  # fmt: skip
    else:
        _restore_rows(
            v_tokens, v_rows, v_head_ends, num_v_rows, slots, first_token, end_token,
            v_buffer, v_slot_stride, v_head_stride, num_heads, padded_heads, v_dim, v_padded_dim,
            num_program_rows,
        )  # fmt: skip
