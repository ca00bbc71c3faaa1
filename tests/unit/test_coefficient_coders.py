"""Both coders of quantized coefficients: exact round trips, tails, sizes, and damage."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.codec import falling_levels
from krul_backend.codec.coefficients.fixed_width import FixedWidthCoder
from krul_backend.codec.coefficients.frequencies import HEAVY_TAILED
from krul_backend.codec.coefficients.interface import CoefficientCoder, EncodedLevels, Levels, num_records
from krul_backend.codec.coefficients.rans import RansCoder
from krul_backend.codec.coefficients.tables import CoderTables, standard_tables
from krul_backend.errors import CodecError

CODERS = [RansCoder(), FixedWidthCoder()]
both_coders = pytest.mark.parametrize("coder", CODERS, ids=["rans", "fixed-width"])


@st.composite
def blocks(draw: st.DrawFn) -> tuple[Levels, np.ndarray]:
    """Levels of some distribution, with outliers, and classes that need not fit them."""
    num_tokens = draw(st.integers(1, 200))
    num_coefficients = draw(st.integers(1, 64))
    generator = np.random.default_rng(draw(st.integers(0, 2**32)))
    scales = np.exp2(generator.uniform(-7, draw(st.sampled_from([0, 5, 9, 14])), num_coefficients))
    levels = np.rint(generator.laplace(size=(num_tokens, num_coefficients)) * scales)
    num_outliers = draw(st.sampled_from([0, 0, 3, 100]))
    token, coefficient = generator.integers(0, levels.shape, (num_outliers, 2)).T
    extremes = np.array([-32768, 32767, 127, 128, -128, -129, 126, -127, 159, 160, -160, -161])
    levels[token, coefficient] = generator.choice(extremes, num_outliers)
    levels = np.clip(levels, -32768, 32767).astype(np.int16)
    if draw(st.booleans()):
        classes = standard_tables().class_of(np.abs(levels.astype(np.int32)).mean(axis=0))
    else:
        classes = generator.integers(1, 64, num_coefficients).astype(np.uint8)
    unused = generator.random(num_coefficients) < draw(st.sampled_from([0, 0, 0.3, 1]))
    levels[:, unused] = 0
    classes[unused] = 0
    return levels, classes


def decoded(
    coder: CoefficientCoder,
    encoded: EncodedLevels,
    classes: np.ndarray,
    num_tokens: int,
    first_record: int = 0,
) -> Levels:
    out = np.full((num_tokens, len(classes)), 77, np.int16)
    start = int(encoded.record_num_bytes[:first_record].sum())
    coder.decode(encoded.data[start:], encoded.record_num_bytes[first_record:], classes, out)
    return out


@both_coders
@settings(max_examples=150, deadline=None)
@given(block=blocks(), data=st.data())
def test_every_tail_is_exact(
    coder: CoefficientCoder, block: tuple[Levels, np.ndarray], data: st.DataObject
) -> None:
    levels, classes = block
    before = levels.copy()
    encoded = coder.encode(levels, classes)
    assert np.array_equal(levels, before)
    assert encoded.record_num_bytes.dtype == np.uint32
    assert len(encoded.record_num_bytes) == num_records(len(levels))
    assert int(encoded.record_num_bytes.sum()) == len(encoded.data)
    assert not (encoded.record_num_bytes % 4).any()
    assert np.array_equal(decoded(coder, encoded, classes, len(levels)), levels)
    record = data.draw(st.integers(0, num_records(len(levels)) - 1))
    tail = levels[64 * record :]
    assert np.array_equal(decoded(coder, encoded, classes, len(tail), record), tail)
    # A record depends on its own tokens only.
    alone = coder.encode(tail, classes)
    assert np.array_equal(alone.data, encoded.data[int(encoded.record_num_bytes[:record].sum()) :])


@both_coders
@settings(max_examples=60, deadline=None)
@given(block=blocks(), shrink=st.sampled_from([0.0, 0.125, 0.4375]))
def test_values_are_levels_nearer_to_zero(
    coder: CoefficientCoder, block: tuple[Levels, np.ndarray], shrink: float
) -> None:
    levels, classes = block
    encoded = coder.encode(levels, classes)
    values = np.full(levels.shape, np.nan, np.float32)
    coder.decode(encoded.data, encoded.record_num_bytes, classes, values, shrink=shrink)
    wide = levels.astype(np.float64)
    assert np.array_equal(values, (np.sign(wide) * (np.abs(wide) - shrink * (wide != 0))).astype(np.float32))


@both_coders
def test_arrays_of_any_layout(coder: CoefficientCoder) -> None:
    levels, classes = falling_levels(130, 40, 9, 0.05)
    encoded = coder.encode(levels, classes)
    wide = np.zeros((130, 80), np.int16)
    wide[:, ::2] = levels
    assert np.array_equal(coder.encode(wide[:, ::2], classes).data, encoded.data)
    frozen = np.frombuffer(b"x" + encoded.data.tobytes(), np.uint8)[1:]
    out = np.empty_like(levels)
    coder.decode(frozen, encoded.record_num_bytes, classes, out)
    assert np.array_equal(out, levels)
    spread = np.zeros(2 * len(encoded.data), np.uint8)
    spread[::2] = encoded.data
    out.fill(0)
    coder.decode(spread[::2], encoded.record_num_bytes, classes, out)
    assert np.array_equal(out, levels)


@both_coders
@pytest.mark.parametrize("shape", [(0, 5), (70, 0)])
def test_nothing_takes_no_bytes(coder: CoefficientCoder, shape: tuple[int, int]) -> None:
    classes = np.full(shape[1], 9, np.uint8)
    encoded = coder.encode(np.zeros(shape, np.int16), classes)
    assert len(encoded.data) == 0
    assert encoded.record_num_bytes.tolist() == [0] * num_records(shape[0])
    assert decoded(coder, encoded, classes, shape[0]).shape == shape


@both_coders
@pytest.mark.parametrize(
    ("levels", "classes", "message"),
    [
        (np.zeros((3, 2), np.int32), np.ones(2, np.uint8), "int16"),
        (np.zeros((3, 2), np.int16), np.ones(3, np.uint8), r"\[T, 3\]"),
        (np.zeros(3, np.int16), np.ones(3, np.uint8), r"\[T, 3\]"),
        (np.zeros((3, 2), np.int16), np.ones(2, np.int64), "classes are uint8"),
        (np.zeros((3, 2), np.int16), np.array([1, 64], np.uint8), "class 64 is unknown"),
        (np.eye(3, 2, dtype=np.int16), np.array([1, 0], np.uint8), "class 0 is not zero"),
    ],
)
def test_input_that_cannot_be_encoded(
    coder: CoefficientCoder, levels: Levels, classes: np.ndarray, message: str
) -> None:
    with pytest.raises(CodecError, match=message):
        coder.encode(levels, classes)


@both_coders
def test_sizes_that_contradict_each_other(coder: CoefficientCoder) -> None:
    levels, classes = falling_levels(100, 30, 9, 0.05)
    encoded = coder.encode(levels, classes)
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
            coder.decode(wrong_data, wrong_sizes, classes, wrong_out, shrink=shrink)  # type: ignore[arg-type]
    with pytest.raises(CodecError, match="no coefficient"):
        coder.decode(data, sizes, np.zeros(30, np.uint8), out)


@both_coders
@settings(max_examples=300, deadline=None)
@given(block=blocks(), seed=st.integers(0, 2**32), kind=st.sampled_from(["flip", "random", "cut", "grow"]))
def test_damage_never_reads_or_writes_elsewhere(
    coder: CoefficientCoder, block: tuple[Levels, np.ndarray], seed: int, kind: str
) -> None:
    levels, classes = block
    encoded = coder.encode(levels, classes)
    assume(len(encoded.data))
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
    guarded = np.full((len(levels) + 2, len(classes)), 12345, np.int16)
    try:
        coder.decode(data, sizes, classes, guarded[1:-1])
    except CodecError:
        pass
    else:
        # Each lane of rANS takes foreign bytes for its own once in about 2^16 times.
        assert kind == "flip" or coder.name == "fixed-width" or len(levels) < 4
    assert (guarded[0] == 12345).all()
    assert (guarded[-1] == 12345).all()


def test_a_changed_bit_of_rans_is_noticed_or_changes_levels() -> None:
    coder = RansCoder()
    levels, classes = falling_levels(64, 100, 9, 0.05)
    encoded = coder.encode(levels, classes)
    noticed = 0
    for place in range(len(encoded.data)):
        data = encoded.data.copy()
        data[place] ^= 1 << (place % 8)
        out = np.empty_like(levels)
        try:
            coder.decode(data, encoded.record_num_bytes, classes, out)
        except CodecError:
            noticed += 1
        else:
            assert not np.array_equal(out, levels)
    assert noticed > 0.95 * len(encoded.data)


@pytest.mark.parametrize(("largest", "smallest"), [(20, 0.02), (8, 0.008), (5, 0.002), (2.5, 0.0004)])
def test_rans_is_close_to_the_entropy_of_its_tables(largest: float, smallest: float) -> None:
    tables = standard_tables()
    levels, classes = falling_levels(64, 800, largest, smallest)
    ideal = tables.expected_bits(levels, classes).sum()
    actual = 8 * len(RansCoder().encode(levels, classes).data)
    assert 0.4 < ideal / levels.size < 2.5
    assert ideal * 0.999 < actual < ideal * 1.02


def test_fixed_width_takes_what_its_layout_says() -> None:
    # 16 coefficients of levels -2 to 1: 2 bits each. 16 of zeros. 3 with levels of 3 bits. Two exceptions.
    levels = np.zeros((64, 35), np.int16)
    levels[:, :16] = np.arange(64)[:, None] % 4 - 2
    levels[:, 32:] = np.arange(64)[:, None] % 8 - 4
    levels[5, 20] = -32
    levels[6, 21] = 34
    encoded = FixedWidthCoder().encode(levels, np.ones(35, np.uint8))
    num_words = (3 + 2) + 64 * 16 * 2 // 16 + 0 + 64 * 3 * 3 // 16 + 1 + 3
    assert encoded.record_num_bytes.tolist() == [2 * (num_words + num_words % 2)]
    headers = encoded.data[:10].view(np.uint16)
    assert headers.tolist() == [2, 0 | 1 << 4, 3, 1, 0]


def test_another_shape_has_other_tables_and_the_same_contract() -> None:
    tables = CoderTables(HEAVY_TAILED)
    assert tables.digest != standard_tables().digest
    levels, classes = falling_levels(100, 60, 20, 0.02)
    coder = RansCoder(tables)
    encoded = coder.encode(levels, classes)
    assert np.array_equal(decoded(coder, encoded, classes, 100), levels)
    assert not np.array_equal(encoded.data, RansCoder().encode(levels, classes).data)
