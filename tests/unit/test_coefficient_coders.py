"""The coder of quantized coefficients: exact round trips, tails, sizes, and damage."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.codec import expected_bits, falling_levels
from krul_backend.codec.coefficients import coders
from krul_backend.codec.coefficients.coders import EncodedLevels, RansCoder, num_records
from krul_backend.codec.coefficients.scales import Levels
from krul_backend.errors import CodecError

CODER = RansCoder()


NO_SHIFTS = np.zeros(3, np.int8)

Block = tuple[Levels, np.ndarray, np.ndarray]


@st.composite
def blocks(draw: st.DrawFn) -> Block:
    """Levels of some distribution, with outliers, and scales and shifts that need not fit them."""
    num_tokens = draw(st.integers(1, 200))
    num_coefficients = draw(st.integers(1, 64))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    magnitudes = np.exp2(generator.uniform(-7, draw(st.sampled_from([0, 5, 9, 14])), num_coefficients))
    levels = np.rint(generator.laplace(size=(num_tokens, num_coefficients)) * magnitudes)
    num_outliers = draw(st.sampled_from([0, 0, 3, 100]))
    token, coefficient = generator.integers(0, levels.shape, (num_outliers, 2)).T
    extremes = np.array([-32768, 32767, 127, 128, -128, -129, 126, -127, 159, 160, -160, -161])
    levels[token, coefficient] = generator.choice(extremes, num_outliers)
    levels = np.clip(levels, -32768, 32767).astype(np.int16)
    if draw(st.booleans()):
        scales = np.clip(np.rint(21 + 4 * np.log2(magnitudes)), 1, 47).astype(np.uint8)
    else:
        scales = generator.integers(1, 48, num_coefficients).astype(np.uint8)
    unused = generator.random(num_coefficients) < draw(st.sampled_from([0, 0, 0.3, 1]))
    levels[:, unused] = 0
    scales[unused] = 0
    return levels, scales, generator.integers(-8, 8, num_tokens).astype(np.int8)


def decoded(
    encoded: EncodedLevels, scales: np.ndarray, num_tokens: int, first_record: int = 0
) -> tuple[Levels, np.ndarray]:
    out = np.full((num_tokens, len(scales)), 77, np.int16)
    start = int(encoded.record_num_bytes[:first_record].sum())
    sizes = encoded.record_num_bytes[first_record:]
    # What is decoded as int16 are levels, whatever values would shrink by.
    return out, CODER.decode(encoded.data[start:], sizes, scales, out, shrink=0.25)


@settings(max_examples=60)
@given(block=blocks(), data=st.data())
def test_every_tail_is_exact(block: Block, data: st.DataObject) -> None:
    levels, scales, shifts = block
    before = levels.copy()
    encoded = CODER.encode(levels, scales, shifts)
    assert np.array_equal(levels, before)
    assert encoded.record_num_bytes.dtype == np.uint32
    assert len(encoded.record_num_bytes) == num_records(len(levels))
    assert int(encoded.record_num_bytes.sum()) == len(encoded.data)
    assert not (encoded.record_num_bytes % 4).any()
    out, out_shifts = decoded(encoded, scales, len(levels))
    assert np.array_equal(out, levels)
    assert np.array_equal(out_shifts, shifts)
    record = data.draw(st.integers(0, num_records(len(levels)) - 1))
    tail, tail_shifts = levels[64 * record :], shifts[64 * record :]
    out, out_shifts = decoded(encoded, scales, len(tail), record)
    assert np.array_equal(out, tail)
    assert np.array_equal(out_shifts, tail_shifts)
    # A record depends on its own tokens only.
    alone = CODER.encode(tail, scales, tail_shifts)
    assert np.array_equal(alone.data, encoded.data[int(encoded.record_num_bytes[:record].sum()) :])


@settings(max_examples=30)
@given(block=blocks(), shrink=st.sampled_from([0.0, 0.125, 0.4375]))
def test_values_are_levels_nearer_to_zero_in_steps_of_their_token(block: Block, shrink: float) -> None:
    levels, scales, shifts = block
    encoded = CODER.encode(levels, scales, shifts)
    values = np.full(levels.shape, np.nan, np.float32)
    out_shifts = CODER.decode(encoded.data, encoded.record_num_bytes, scales, values, shrink=shrink)
    assert np.array_equal(out_shifts, shifts)
    wide = levels.astype(np.float64)
    expected = np.sign(wide) * (np.abs(wide) - shrink) * np.sqrt(2.0) ** shifts[:, None]
    assert np.allclose(values, expected, rtol=2e-7, atol=0)


@pytest.mark.parametrize("num_tokens", [0, 1, 64, 65, 300, 64 * 9 - 1])
def test_threads_that_share_the_records_write_the_same_bytes(num_tokens: int) -> None:
    levels, scales, shifts = falling_levels(num_tokens, 40, 9, 0.05)
    alone = CODER.encode(levels, scales, shifts)
    for num_threads in (2, 3, 8):
        shared = CODER.encode(levels, scales, shifts, num_threads=num_threads)
        assert np.array_equal(shared.data, alone.data)
        assert np.array_equal(shared.record_num_bytes, alone.record_num_bytes)


def test_records_are_encoded_in_as_many_threads_as_were_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    threads: set[int] = set()
    both = threading.Barrier(2)
    encode_block = coders.encode_block

    def watched(*args: Any) -> Any:
        threads.add(threading.get_ident())
        both.wait(timeout=60)
        return encode_block(*args)

    monkeypatch.setattr(coders, "encode_block", watched)
    CODER.encode(*falling_levels(300, 40, 9, 0.05), num_threads=2)
    assert len(threads) == 2


def test_arrays_of_any_layout() -> None:
    levels, scales, shifts = falling_levels(130, 40, 9, 0.05)
    encoded = CODER.encode(levels, scales, shifts)
    wide = np.zeros((130, 80), np.int16)
    wide[:, ::2] = levels
    assert np.array_equal(CODER.encode(wide[:, ::2], scales, np.repeat(shifts, 2)[::2]).data, encoded.data)
    frozen = np.frombuffer(b"x" + encoded.data.tobytes(), np.uint8)[1:]
    out = np.empty_like(levels)
    CODER.decode(frozen, encoded.record_num_bytes, scales, out)
    assert np.array_equal(out, levels)
    spread = np.zeros(2 * len(encoded.data), np.uint8)
    spread[::2] = encoded.data
    out.fill(0)
    CODER.decode(spread[::2], encoded.record_num_bytes, scales, out)
    assert np.array_equal(out, levels)


def test_without_coefficients_only_shifts_are_stored() -> None:
    shifts = (np.arange(70) % 16 - 8).astype(np.int8)
    for scales in (np.zeros(0, np.uint8), np.zeros(20, np.uint8)):
        encoded = CODER.encode(np.zeros((70, len(scales)), np.int16), scales, shifts)
        # 6 tokens are padded to 8. States are 4 bytes per lane.
        assert encoded.record_num_bytes.tolist() == [32 + 64, 4 + 24]
        assert encoded.data[:8].tolist() == [0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]
        out, out_shifts = decoded(encoded, scales, 70)
        assert not out.any()
        assert np.array_equal(out_shifts, shifts)
    nothing = CODER.encode(np.zeros((0, 5), np.int16), np.full(5, 9, np.uint8), shifts[:0])
    assert len(nothing.data) == len(nothing.record_num_bytes) == 0


@pytest.mark.parametrize(
    ("levels", "scales", "shifts", "message"),
    [
        (np.zeros((3, 2), np.int32), np.ones(2, np.uint8), NO_SHIFTS, "int16"),
        (np.zeros((3, 2), np.int16), np.ones(3, np.uint8), NO_SHIFTS, r"\[T, 3\]"),
        (np.zeros(3, np.int16), np.ones(3, np.uint8), NO_SHIFTS, r"\[T, 3\]"),
        (np.zeros((3, 2), np.int16), np.ones(2, np.int64), NO_SHIFTS, "scales are uint8"),
        (np.zeros((3, 2), np.int16), np.array([1, 48], np.uint8), NO_SHIFTS, "scale 48 is unknown"),
        (np.eye(3, 2, dtype=np.int16), np.array([1, 0], np.uint8), NO_SHIFTS, "scale 0 is not zero"),
        (np.zeros((3, 2), np.int16), np.ones(2, np.uint8), np.zeros(2, np.int8), r"int8 \[3\]"),
        (np.zeros((3, 2), np.int16), np.ones(2, np.uint8), np.zeros(3, np.int16), r"int8 \[3\]"),
        (np.zeros((3, 2), np.int16), np.ones(2, np.uint8), np.array([0, 8, 0], np.int8), "-8 to 7"),
        (np.zeros((3, 2), np.int16), np.ones(2, np.uint8), np.array([0, -9, 0], np.int8), "-8 to 7"),
    ],
)
def test_input_that_cannot_be_encoded(
    levels: Levels, scales: np.ndarray, shifts: np.ndarray, message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        CODER.encode(levels, scales, shifts)


def test_sizes_that_contradict_each_other() -> None:
    levels, scales, shifts = falling_levels(100, 30, 9, 0.05)
    encoded = CODER.encode(levels, scales, shifts)
    data, sizes = encoded.data, encoded.record_num_bytes
    out = np.empty_like(levels)
    moved = sizes.copy()
    moved[0] += 4
    moved[1] -= 4
    odd = sizes.copy()
    odd[0] += 2
    odd[1] -= 2
    huge = sizes.copy()
    huge[0] = 2**32 - 4
    for wrong_data, wrong_sizes, wrong_out, shrink, message in (
        (data[:-4], sizes, out, 0, "bytes together"),
        (np.append(data, data[:4]), sizes, out, 0, "bytes together"),
        (data, huge, out, 0, "bytes together"),
        (data, odd, out, 0, "multiple of 4"),
        (data, moved, out, 0, "damaged"),
        (data, sizes, np.empty((200, 30), np.int16), 0, "200 tokens have 4 records"),
        (data, sizes[:1], out, 0, "2 records, but 1 sizes"),
        (data, sizes.astype(np.int64), out, 0, "uint32"),
        (data.view(np.int8), sizes, out, 0, "uint8"),
        (data, sizes, np.empty((100, 31), np.int16), 0, r"\[T, 30\]"),
        (data, sizes, np.empty((100, 60), np.int16)[:, ::2], 0, "contiguous"),
        (data, sizes, np.empty((100, 30), np.float64), 0, "float64"),
        (data, sizes, out, 0.5, "shrink"),
        (data, sizes, out, -0.1, "shrink"),
        (data, sizes, out, float("nan"), "shrink"),
    ):
        with pytest.raises(CodecError, match=message):
            CODER.decode(wrong_data, wrong_sizes, scales, wrong_out, shrink=shrink)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="damaged"):
        CODER.decode(data, sizes, np.zeros(30, np.uint8), out)
    with pytest.raises(CodecError, match="scale 48"):
        CODER.decode(data, sizes, np.full(30, 48, np.uint8), out)


@settings(max_examples=120)
@given(block=blocks(), seed=st.integers(0, 2**32), kind=st.sampled_from(["flip", "random", "cut", "grow"]))
def test_damage_never_reads_or_writes_elsewhere(block: Block, seed: int, kind: str) -> None:
    levels, scales, shifts = block
    encoded = CODER.encode(levels, scales, shifts)
    generator = np.random.default_rng(seed)
    data, sizes = encoded.data.copy(), encoded.record_num_bytes.copy()
    if kind == "flip":
        data[generator.integers(len(data))] ^= np.uint8(1 << generator.integers(8))
    elif kind == "random":
        data = generator.integers(0, 256, len(data), np.uint8)
    elif kind == "cut":
        cut = min(int(sizes[-1]), 4 * int(generator.integers(1, 40)))
        data = data[: len(data) - cut]
        sizes[-1] -= cut
    else:
        data = np.append(data, generator.integers(1, 256, 4, np.uint8))
        sizes[-1] += 4
    guarded = np.full((len(levels) + 2, len(scales)), 12345, np.int16)
    try:
        CODER.decode(data, sizes, scales, guarded[1:-1])
    except CodecError:
        pass
    else:
        # Each lane of rANS takes foreign bytes for its own once in about 2^16 times.
        assert kind == "flip" or len(levels) < 4
    assert (guarded[0] == 12345).all()
    assert (guarded[-1] == 12345).all()


def test_a_changed_bit_of_rans_is_noticed_or_changes_levels() -> None:
    levels, scales, shifts = falling_levels(64, 100, 9, 0.05)
    encoded = CODER.encode(levels, scales, shifts)
    noticed = 0
    for place in range(len(encoded.data)):
        data = encoded.data.copy()
        data[place] ^= 1 << (place % 8)
        out = np.empty_like(levels)
        try:
            out_shifts = CODER.decode(data, encoded.record_num_bytes, scales, out)
        except CodecError:
            noticed += 1
        else:
            assert not (np.array_equal(out, levels) and np.array_equal(out_shifts, shifts))
    assert noticed > 0.95 * len(encoded.data)


@pytest.mark.parametrize(("largest", "smallest", "bits"), [(6.5, 0.003, 1.2), (2.2, 0.002, 0.6)])
def test_rans_is_close_to_the_entropy_of_its_tables(largest: float, smallest: float, bits: float) -> None:
    levels, scales, shifts = falling_levels(64, 800, largest, smallest)
    ideal = expected_bits(levels, scales, shifts).sum() + 4 * len(shifts)
    actual = 8 * len(CODER.encode(levels, scales, shifts).data)
    assert abs(ideal / levels.size - bits) < 0.1
    assert ideal < actual < ideal * 1.02
