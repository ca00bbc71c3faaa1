"""The scale of each coefficient: how it is chosen, and the table that rANS codes it by.

A level is a transform coefficient ``c`` quantized with a dead zone: ``|level| = floor(|c| / step + 0.4)``. A
scale is a Laplace distribution of coefficients, given by the mean of their magnitude before quantization.
Another distribution is another version of the coder. Tables are in integers that are the same on every host.

Scales are chosen from magnitudes known in advance, and corrected with an offset per band.
"""

from __future__ import annotations

from dataclasses import dataclass
from decimal import ROUND_HALF_EVEN, Context, Decimal, localcontext
from functools import cache

import numpy as np
from numpy.typing import NDArray

from krul_backend.errors import CodecError
from krul_backend.machine_code import compiled

RECORD_TOKENS = 64
"""Tokens of a record; the last one of a block may have fewer."""

Levels = NDArray[np.int16]
Scales = NDArray[np.uint8]
Shifts = NDArray[np.int8]
Values = NDArray[np.float32]
Words = NDArray[np.uint16]
Integers = NDArray[np.int64]
Tables = NDArray[np.uint32]
Index = int | np.int64

NUM_SCALES = 48
"""Scale 0 is for coefficients that are never coded; scales 1 to 47 have a table each."""

SCALE_OF_ONE_STEP = 21
SCALES_PER_OCTAVE = 4
"""Scale ``s`` is a mean magnitude of ``2^((s - 21) / 4)`` steps."""

PROBABILITY_BITS = 12
TOTAL_FREQUENCY = 1 << PROBABILITY_BITS

ROUNDING = 0.4
"""Added to magnitudes in steps before they are rounded down: below 0.5, so that zero has a wider range."""

LARGEST_SYMBOL = 126
"""No alphabet goes beyond it: a level and the escape fit in one byte."""

_ROUNDING = Decimal(str(ROUNDING))
_CONTEXT = Context(prec=30, rounding=ROUND_HALF_EVEN)


@dataclass(frozen=True)
class Alphabet:
    """The levels that a scale has symbols for, ``-largest`` to ``largest``; all others are escaped.

    ``frequencies`` are those of the escape, then of ``-largest`` to ``largest``. They sum to 4096, and none
    is 0.
    """

    largest: int
    frequencies: tuple[int, ...]


def magnitude(scale: float) -> Decimal:
    """The mean magnitude that a scale stands for, in steps; halves of scales have one, too."""
    with localcontext(_CONTEXT):
        return Decimal(2) ** (Decimal(scale - SCALE_OF_ONE_STEP) / SCALES_PER_OCTAVE)


@cache
def alphabets() -> tuple[Alphabet, ...]:
    """The alphabets of scales 1 to 47."""
    with localcontext(_CONTEXT):
        return tuple(_alphabet(magnitude(scale)) for scale in range(1, NUM_SCALES))


def _alphabet(mean: Decimal) -> Alphabet:
    # at_least[k]: the probability of a magnitude of at least k, and of one of the two signs.
    at_least = [
        Decimal("0.5"),
        *(((_ROUNDING - level) / mean).exp() / 2 for level in range(1, LARGEST_SYMBOL + 2)),
    ]
    positive = [at_least[k] - at_least[k + 1] for k in range(LARGEST_SYMBOL + 1)]
    largest = 1
    # A pair of symbols costs all others 2 slots, 0.0007 bits per level, and saves 16 bits where it occurs.
    while largest < LARGEST_SYMBOL and positive[largest + 1] * TOTAL_FREQUENCY * 11 >= 1:
        largest += 1
    side = positive[1 : largest + 1]
    return Alphabet(largest, _rounded([2 * at_least[largest + 1], *side[::-1], 2 * positive[0], *side]))


def _rounded(probabilities: list[Decimal]) -> tuple[int, ...]:
    """Positive integers that sum to 4096 and code these probabilities in the fewest bits."""
    weights = [int(probability * 2**80) for probability in probabilities]
    frequencies = [max(1, weight * TOTAL_FREQUENCY >> 80) for weight in weights]
    missing = TOTAL_FREQUENCY - sum(frequencies)
    change = 1 if missing > 0 else -1
    for _ in range(abs(missing)):
        # One slot more saves about weight / (frequency + 1/2), one fewer costs weight / (frequency - 1/2).
        gains = [
            change * weight // (2 * frequency + change) if frequency + change > 0 else -(2**90)
            for weight, frequency in zip(weights, frequencies, strict=True)
        ]
        frequencies[gains.index(max(gains))] += change
    return tuple(frequencies)


ESCAPE = -128
"""The symbol before a level that the alphabet of its scale does not have."""

SYMBOLS = 256


class CoderTables:
    """The tables of all scales. The arrays are read-only.

    ``encoding`` uint32 ``[48 * 256]``, at ``scale * 256 + symbol + 128``: frequency in bits 0 to 11, start of
    its slots in bits 12 to 23, and bit 24 for levels that are escaped (the rest is that of the escape then).

    ``decoding`` uint32 ``[48 * 4096]``, at ``scale * 4096 + slot``: symbol + 128 in bits 0 to 7, the slot's
    place among those of its symbol in bits 8 to 19, frequency in bits 20 to 31.
    """

    def __init__(self) -> None:
        encoding = np.zeros((NUM_SCALES, SYMBOLS), np.uint32)
        decoding = np.zeros((NUM_SCALES, TOTAL_FREQUENCY), np.uint32)
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
        self.encoding = encoding.reshape(-1)
        self.decoding = decoding.reshape(-1)
        for table in (self.encoding, self.decoding):
            table.setflags(write=False)


@cache
def standard_tables() -> CoderTables:
    """The tables that blocks are coded with."""
    return CoderTables()


BAND = 16
"""Neighbouring coefficients that share an offset; the last band may have fewer."""

NO_OFFSET = 8
"""The number of a band whose scales are the base scales. They are at most 7 lower or higher."""

_LARGEST_OFFSET = 15
_LARGEST_SCALE = NUM_SCALES - 1
# Those that move scales least first: of numbers that are equally near, the first one is taken.
_NUMBERS = np.array(sorted(range(1, _LARGEST_OFFSET + 1), key=lambda number: abs(number - NO_OFFSET)))
_FARTHEST = BAND * NUM_SCALES
_BORDERS = np.array([float(magnitude(scale + 0.5)) for scale in range(1, _LARGEST_SCALE)])


def base_scales(magnitudes: NDArray[np.float32], step: float) -> NDArray[np.uint8]:
    """The scale, 1 to 47, that is nearest to each of ``magnitudes / step``; equal on every host.

    ``magnitudes`` float32 ``[R]`` are means of ``|c|``, and ``step`` is the quantizer's. Raises
    ``CodecError`` unless they are finite, ``magnitudes`` at least 0, and ``step`` above 0.
    """
    _check(magnitudes, np.float32, "magnitudes")
    if not (0 < step < np.inf and bool((magnitudes >= 0).all() & np.isfinite(magnitudes).all())):
        raise CodecError("magnitudes must be finite and at least 0, and their step finite and above 0")
    return (1 + np.searchsorted(_BORDERS, magnitudes.astype(np.float64) / step)).astype(np.uint8)


def best_offsets(
    base: NDArray[np.uint8], observed: NDArray[np.float32], levels: NDArray[np.int16]
) -> NDArray[np.uint8]:
    """Choose an offset, 0 to 15, for each band of 16 coefficients; ``scales_of`` adds it to the base scales.

    0 is for a band whose levels are all zero. Otherwise the band's mean scale comes as near as possible to
    that of ``observed`` float32 ``[R]``: this segment's means of ``|c| / step`` before quantization, with the
    step of shift 0. ``base`` uint8 ``[R]``, ``levels`` int16 ``[T, R]``; result uint8 ``[ceil(R / 16)]``.

    Raises ``CodecError`` if sizes or dtypes contradict each other, or for magnitudes that are none.
    """
    _check_base(base)
    target = base_scales(observed, 1.0)
    if len(target) != len(base) or levels.dtype != np.int16 or levels.shape[1:] != base.shape:
        raise CodecError(
            f"{len(base)} base scales need as many magnitudes and levels int16 [T, {len(base)}], "
            f"not {len(target)} and {levels.dtype} {list(levels.shape)}"
        )
    offsets = np.zeros(num_bands(len(base)), np.uint8)
    _put_best_offsets(base, target, levels, offsets)
    return offsets


@compiled
def _put_best_offsets(base: Scales, target: Scales, levels: Levels, offsets: Scales) -> None:
    for band in range(len(offsets)):
        first, end = band * BAND, min((band + 1) * BAND, len(base))
        is_zero = True
        for token in range(len(levels)):
            for index in range(first, end):
                is_zero &= levels[token, index] == 0
            if not is_zero:
                break
        least = np.int64(-1 if is_zero else _FARTHEST)
        for number in _NUMBERS:
            distance = np.int64(0)
            for index in range(first, end):
                distance += min(max(base[index] + number - NO_OFFSET, 1), _LARGEST_SCALE) - target[index]
            if abs(distance) < least:
                least, offsets[band] = abs(distance), number


def scales_of(base: NDArray[np.uint8], offsets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """The scales uint8 ``[R]`` of a segment: ``base + number - 8``, within 1 to 47, or 0 for number 0.

    Raises ``CodecError`` unless ``base`` are scales 1 to 47, and ``offsets`` are numbers 0 to 15, one for
    each band.
    """
    _check_base(base)
    _check_offsets(offsets, num_bands(len(base)))
    numbers = np.repeat(offsets, BAND)[: len(base)].astype(np.int64)
    moved = np.clip(base + numbers - NO_OFFSET, 1, _LARGEST_SCALE)
    return np.where(numbers == 0, 0, moved).astype(np.uint8)


def pack_offsets(offsets: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Two numbers of 0 to 15 per byte, the lower half first: uint8 ``[ceil(len(offsets) / 2)]``."""
    _check_offsets(offsets, len(offsets))
    even = np.append(offsets, np.zeros(len(offsets) % 2, np.uint8))
    packed: NDArray[np.uint8] = even[::2] | even[1::2] << 4
    return packed


def unpack_offsets(data: NDArray[np.uint8], num_coefficients: int) -> NDArray[np.uint8]:
    """The numbers of the bands of so many coefficients, from ``data`` uint8.

    Raises ``CodecError`` if ``data`` has another size, or an unused half that is not 0.
    """
    count = num_bands(num_coefficients)
    _check(data, np.uint8, "packed offsets")
    if len(data) != -(-count // 2):
        raise CodecError(f"{count} offsets take {-(-count // 2)} bytes, not {len(data)}")
    halves = np.stack([data & 15, data >> 4], axis=1).reshape(-1)
    if bool(halves[count:].any()):
        raise CodecError("the unused half of the last byte of offsets is not 0")
    return halves[:count]


def num_bands(num_coefficients: int) -> int:
    """Bands of so many coefficients."""
    return -(-num_coefficients // BAND)


def _check(array: NDArray[np.generic], dtype: type[np.generic], what: str) -> None:
    if array.dtype != dtype or array.ndim != 1:
        raise CodecError(f"{what} are {np.dtype(dtype)} [N], not {array.dtype} {list(array.shape)}")


def _check_base(base: NDArray[np.uint8]) -> None:
    _check(base, np.uint8, "base scales")
    if bool(((base < 1) | (base > _LARGEST_SCALE)).any()):
        raise CodecError(f"base scales are 1 to {_LARGEST_SCALE}")


def _check_offsets(offsets: NDArray[np.uint8], num_bands: int) -> None:
    _check(offsets, np.uint8, "offsets")
    if len(offsets) != num_bands or bool((offsets > _LARGEST_OFFSET).any()):
        raise CodecError(f"offsets are {num_bands} numbers of 0 to {_LARGEST_OFFSET}")
