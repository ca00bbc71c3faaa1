"""Chooses the scale of each coefficient from magnitudes known in advance, and corrects it with an offset per
band."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.tables import (
    NUM_SCALES,
    magnitude,
)
from krul_backend.errors import CodecError

BAND = 16
"""Neighbouring coefficients that share an offset; the last band may have fewer."""

NO_OFFSET = 8
"""The number of a band whose scales are the base scales. They are at most 7 lower or higher."""

_LARGEST_OFFSET = 15
_LARGEST_SCALE = NUM_SCALES - 1
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
    # Among numbers that are equally near, argmin takes the first: the one that moves scales least.
    numbers = np.array(sorted(range(1, _LARGEST_OFFSET + 1), key=lambda number: abs(number - NO_OFFSET)))
    moved = np.clip(base + numbers[:, None] - NO_OFFSET, 1, _LARGEST_SCALE)
    starts = np.arange(0, len(base), BAND)
    best = numbers[np.abs(np.add.reduceat(moved - target.astype(np.int64), starts, axis=1)).argmin(axis=0)]
    return np.where(np.logical_or.reduceat(levels.any(axis=0), starts), best, 0).astype(np.uint8)


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
