"""What both coders do with a record: collect its levels, and hand out what was decoded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.compiled import compiled
from krul_backend.codec.coefficients.frequencies import NUM_CLASSES
from krul_backend.codec.coefficients.interface import Classes, Levels, Values, num_records
from krul_backend.errors import CodecError

Index = int | np.int64
"""A whole number of compiled code."""


@dataclass(frozen=True)
class Output:
    """Where decoded records go: one of the two arrays has no rows.

    ``coded`` int64 are the coefficients that are stored; the first ``num_leading`` of them are ``0, 1, 2
    ...``.
    """

    levels: Levels
    values: Values
    coded: NDArray[np.int64]
    num_leading: int


def coded_coefficients(classes: Classes) -> NDArray[np.int64]:
    """The coefficients whose class is not 0, rising.

    Raises ``CodecError`` unless ``classes`` is uint8 ``[R]`` of known classes.
    """
    if classes.dtype != np.uint8 or classes.ndim != 1:
        raise CodecError(f"classes are uint8 [R], not {classes.dtype} {list(classes.shape)}")
    if len(classes) and int(classes.max()) >= NUM_CLASSES:
        raise CodecError(f"scale class {int(classes.max())} is unknown: there are {NUM_CLASSES}")
    return np.flatnonzero(classes).astype(np.int64)


def check_levels(levels: Levels, classes: Classes) -> Levels:
    """``levels``, contiguous.

    Raises ``CodecError`` unless they are int16 ``[T, R]``, and zero where ``classes [R]`` are 0.
    """
    if levels.dtype != np.int16 or levels.ndim != 2 or levels.shape[1] != len(classes):
        raise CodecError(
            f"levels are int16 [T, {len(classes)}] for these classes, not {levels.dtype} {list(levels.shape)}"
        )
    if bool(levels[:, classes == 0].any()):
        raise CodecError("a level of scale class 0 is not zero")
    # The kernels are compiled for arrays that may be written to, once.
    return np.require(levels, requirements=["C", "A", "W"])


def record_starts(
    data: NDArray[np.uint8], record_num_bytes: NDArray[np.uint32], num_tokens: int
) -> NDArray[np.int64]:
    """Where the records begin in ``data``, and the end of the last: int64 ``[num_records + 1]``.

    Raises ``CodecError`` if the sizes contradict ``data`` or the number of tokens.
    """
    if data.dtype != np.uint8 or data.ndim != 1:
        raise CodecError(f"a block is uint8 [N], not {data.dtype} {list(data.shape)}")
    if record_num_bytes.dtype != np.uint32:
        raise CodecError(f"sizes of records are uint32, not {record_num_bytes.dtype}")
    if record_num_bytes.shape != (num_records(num_tokens),):
        raise CodecError(
            f"{num_tokens} tokens have {num_records(num_tokens)} records, "
            f"but {record_num_bytes.size} sizes came"
        )
    starts = np.zeros(len(record_num_bytes) + 1, np.int64)
    np.cumsum(record_num_bytes, out=starts[1:])
    if int(starts[-1]) != len(data):
        raise CodecError(f"records take {int(starts[-1])} bytes together, but the block has {len(data)}")
    if bool((record_num_bytes % 4 != 0).any()):
        raise CodecError("records are a multiple of 4 bytes long")
    return starts


def output_of(out: Levels | Values, coded: NDArray[np.int64], num_coefficients: int, shrink: float) -> Output:
    """``out`` as both decoders take it. Raises ``CodecError`` if it cannot hold what is decoded."""
    if (
        out.ndim != 2
        or out.shape[1] != num_coefficients
        or not out.flags.c_contiguous
        or not out.flags.writeable
    ):
        raise CodecError(
            f"levels are decoded to a contiguous array [T, {num_coefficients}], not {list(out.shape)}"
        )
    if not 0 <= shrink < 0.5:
        raise CodecError(f"levels shrink by 0 to less than 0.5, not {shrink}")
    num_leading = int((coded == np.arange(len(coded))).sum())
    levels, values = np.empty((0, num_coefficients), np.int16), np.empty((0, num_coefficients), np.float32)
    if out.dtype == np.int16:
        levels = cast(Levels, out)
    elif out.dtype == np.float32:
        values = cast(Values, out)
    else:
        raise CodecError(f"levels are decoded to int16 or float32, not {out.dtype}")
    return Output(levels, values, coded, num_leading)


@compiled
def gather_record(
    levels: Levels, first_token: int, num_tokens: int, coded: NDArray[np.int64], columns: Levels
) -> None:
    """``columns[i, t] = levels[first_token + t, coded[i]]``; ``columns`` is ``[num_coded, 64]``."""
    # In stripes: the rows of `columns` that are written side by side stay in the first cache.
    for first in range(0, len(coded), 32):
        end = min(first + 32, len(coded))
        for token in range(num_tokens):
            for index in range(first, end):
                columns[index, token] = levels[first_token + token, coded[index]]


@compiled
def store_record(
    rows: Levels,
    first_token: int,
    num_tokens: int,
    coded: NDArray[np.int64],
    num_leading: int,
    shrink: np.float32,
    out_levels: Levels,
    out_values: Values,
) -> None:
    """Write a decoded record, ``rows [64, num_coded]``, to its tokens of the output that has rows."""
    as_levels = out_levels.shape[0] > 0
    num_coefficients = out_levels.shape[1]
    num_coded = len(coded)
    for token in range(num_tokens):
        row = first_token + token
        if as_levels:
            for index in range(num_leading):
                out_levels[row, index] = rows[token, index]
            for index in range(num_leading, num_coefficients):
                out_levels[row, index] = 0
            for index in range(num_leading, num_coded):
                out_levels[row, coded[index]] = rows[token, index]
        else:
            for index in range(num_leading):
                level = rows[token, index]
                sign = np.float32(np.int32(level > 0) - np.int32(level < 0))
                out_values[row, index] = np.float32(level) - shrink * sign
            for index in range(num_leading, num_coefficients):
                out_values[row, index] = np.float32(0)
            for index in range(num_leading, num_coded):
                level = rows[token, index]
                sign = np.float32(np.int32(level > 0) - np.int32(level < 0))
                out_values[row, coded[index]] = np.float32(level) - shrink * sign


@compiled
def read_words(data: NDArray[np.uint8], start: int, end: int, words: NDArray[np.uint16]) -> None:
    """The bytes ``[start, end)`` as little-endian words, then zeros to the end of ``words``."""
    num_words = (end - start) >> 1
    for index in range(num_words):
        place = start + 2 * index
        words[index] = np.uint16(data[place]) | np.uint16(data[place + 1]) << 8
    for index in range(num_words, len(words)):
        words[index] = 0


@compiled
def copy_words(
    source: NDArray[np.uint16], start: Index, num_words: Index, target: NDArray[np.uint16], begin: Index
) -> None:
    """``target[begin : begin + num_words] = source[start : start + num_words]``."""
    for index in range(num_words):
        target[begin + index] = source[start + index]
