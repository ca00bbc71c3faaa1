"""The coder of quantized coefficients, rANS: levels to records of bytes, and back."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from itertools import pairwise
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.records import SMALLEST_SHIFT, decode_block, encode_block
from krul_backend.codec.coefficients.scales import (
    BAND,
    NUM_SCALES,
    RECORD_TOKENS,
    CoderTables,
    Integers,
    Levels,
    Scales,
    Shifts,
    Values,
    Words,
    standard_tables,
)
from krul_backend.errors import CodecError

LARGEST_SHIFT = 7

_LEAST_RECORDS_OF_THREAD = 2

_Done = TypeVar("_Done")

_FACTORS = np.exp2(np.arange(SMALLEST_SHIFT, LARGEST_SHIFT + 1) / 2).astype(np.float32)


@dataclass(frozen=True)
class EncodedLevels:
    """The bytes of one block: ``data`` uint8 ``[N]`` has its records one after the other, and
    ``record_num_bytes`` uint32 ``[num_records]`` their sizes, which are multiples of 4 and sum to ``N``.

    The sizes are not part of ``data``. They must be stored beside it, because decoding needs them.
    """

    data: NDArray[np.uint8]
    record_num_bytes: NDArray[np.uint32]


class RansCoder:
    """Turns levels ``[T, R]`` (tokens, coefficients) into bytes and back, exactly.

    A record has 16 interleaved lanes of rANS, and each scale a static table: see ``rans.py``.

    Token ``t`` was quantized with ``step * 2^(shift[t] / 2)``. A coefficient of scale 0 is always zero; scale
    ``s`` stands for a mean magnitude before quantization of ``2^((s - 21) / 4)`` steps.
    """

    def __init__(self) -> None:
        self.tables: CoderTables = standard_tables()

    def encode(
        self, levels: Levels, scales: Scales, shifts: Shifts, *, num_threads: int = 1
    ) -> EncodedLevels:
        """Encode ``levels`` int16 ``[T, R]`` with ``scales`` uint8 ``[R]`` and ``shifts`` int8 ``[T]``.
        ``num_threads`` share the records; the bytes are the same for any number.

        Raises ``CodecError`` for a wrong shape or dtype, a scale above 47, a shift outside -8 to 7, or a
        level of scale 0 that is not zero.
        """
        _check_scales(scales)
        if levels.dtype != np.int16 or levels.ndim != 2 or levels.shape[1] != len(scales):
            raise CodecError(
                f"levels are int16 [T, {len(scales)}] for these scales, "
                f"not {levels.dtype} {list(levels.shape)}"
            )
        if shifts.dtype != np.int8 or shifts.shape != levels.shape[:1]:
            raise CodecError(
                f"shifts are int8 [{len(levels)}] for these levels, not {shifts.dtype} {list(shifts.shape)}"
            )
        if len(shifts) and not SMALLEST_SHIFT <= int(shifts.min()) <= int(shifts.max()) <= LARGEST_SHIFT:
            raise CodecError(f"shifts are {SMALLEST_SHIFT} to {LARGEST_SHIFT}")
        if bool(levels[:, scales == 0].any()):
            raise CodecError("a level of scale 0 is not zero")
        count = num_records(len(levels))
        record_num_words = np.zeros(count, np.int64)
        most_words = _most_words(len(scales))
        # The system gives memory for the pages that are written only.
        data = np.empty(count * most_words, np.uint16)
        places = _coded(scales)
        scales_of_places = scales[places].astype(np.int64)
        # The loops are compiled for arrays that may be written to, once.
        levels = np.require(levels, requirements=["C", "A", "W"])
        shifts = np.require(shifts, requirements=["C", "W"])

        def encode_records(first: int, end: int) -> Words:
            """The words of records ``[first, end)``."""
            rows, words = slice(first * RECORD_TOKENS, end * RECORD_TOKENS), data[first * most_words :]
            num_words = encode_block(
                levels[rows],
                places,
                scales_of_places,
                shifts[rows],
                self.tables.encoding,
                words,
                record_num_words[first:end],
            )
            return words[:num_words]

        parts = _in_parts(encode_records, count, num_threads)
        return EncodedLevels(np.concatenate(parts).view(np.uint8), (2 * record_num_words).astype(np.uint32))

    def decode(
        self,
        data: NDArray[np.uint8],
        record_num_bytes: NDArray[np.uint32],
        scales: Scales,
        out: Levels | Values,
        *,
        shrink: float = 0.0,
        step: float = 1.0,
        num_threads: int = 1,
    ) -> Shifts:
        """Write the levels of a block, or of its tail from any record on, into ``out [T, R]``, which is
        contiguous, and return the shifts of its tokens, int8 ``[T]``.

        An int16 ``out`` gets the levels ``q``, and float32 gets ``sign(q) * (|q| - shrink) * step * 2^(shift
        / 2)``, ``0 <= shrink < 0.5``. ``T``, ``data`` and ``record_num_bytes`` are those of the tail;
        ``scales`` are those it was encoded with. ``num_threads`` share the records.

        Raises ``CodecError`` if sizes contradict each other or bytes are not what ``encode`` writes. ``out``
        is undefined then. Damage that happens to make another valid block is not seen: that needs a checksum.
        """
        _check_scales(scales)
        writable = out.flags.c_contiguous and out.flags.writeable
        if out.ndim != 2 or out.shape[1] != len(scales) or not writable:
            raise CodecError(
                f"levels are decoded to a contiguous array [T, {len(scales)}], not {list(out.shape)}"
            )
        if out.dtype not in (np.int16, np.float32):
            raise CodecError(f"levels are decoded to int16 or float32, not {out.dtype}")
        if not 0 <= shrink < 0.5:
            raise CodecError(f"levels shrink by 0 to less than 0.5, not {shrink}")
        starts = _record_starts(data, record_num_bytes, len(out))
        shifts = np.empty(len(out), np.int8)
        as_values = out.dtype == np.float32
        places = _coded(scales)
        source = np.require(data, requirements=["C", "W"])
        scales_of_places = scales[places].astype(np.int64)

        def decode_records(first: int, end: int) -> int | None:
            """Decode records ``[first, end)``; the first damaged one, if there is one."""
            rows = slice(first * RECORD_TOKENS, end * RECORD_TOKENS)
            good = first + decode_block(
                source,
                starts[first : end + 1],
                places,
                scales_of_places,
                shifts[rows],
                self.tables.decoding,
                np.empty(_most_words(len(scales)) + 2 * RECORD_TOKENS, np.uint16),
                # Levels are values that neither shrink nor grow.
                np.float32(shrink if as_values else 0),
                _FACTORS * np.float32(step) if as_values else np.ones_like(_FACTORS),
                out[rows],
            )
            return good if good < end else None

        count = len(record_num_bytes)
        for damaged in _in_parts(decode_records, count, num_threads):
            if damaged is not None:
                raise CodecError(f"record {damaged} of {count} is damaged")
        return shifts


def _coded(scales: Scales) -> Integers:
    """The coefficients that are coded, those whose scale is not 0: int64."""
    return np.flatnonzero(scales).astype(np.int64)


def num_records(num_tokens: int) -> int:
    """Records of a block of ``num_tokens``."""
    return -(-num_tokens // RECORD_TOKENS)


def _most_words(num_coefficients: int) -> int:
    """The most 16-bit words that a record can take: two per level, one per band, and those of its shifts."""
    return 64 + -(-num_coefficients // BAND) * (1 + 2 * RECORD_TOKENS * BAND)


def _in_parts(work: Callable[[int, int], _Done], num_records: int, num_threads: int) -> list[_Done]:
    """Share records ``[first, end)`` among threads, this one included; return what ``work`` makes of each
    part."""
    num_parts = max(1, min(num_threads, num_records // _LEAST_RECORDS_OF_THREAD))
    bounds = [num_records * part // num_parts for part in range(num_parts + 1)]
    others = [_threads().submit(work, *part) for part in pairwise(bounds[1:])]
    return [work(0, bounds[1]), *(other.result() for other in others)]


@cache
def _threads() -> ThreadPoolExecutor:
    """Threads that code records beside the one that asks."""
    return ThreadPoolExecutor(os.cpu_count(), thread_name_prefix="krul-code")


def _check_scales(scales: Scales) -> None:
    if scales.dtype != np.uint8 or scales.ndim != 1:
        raise CodecError(f"scales are uint8 [R], not {scales.dtype} {list(scales.shape)}")
    if len(scales) and int(scales.max()) >= NUM_SCALES:
        raise CodecError(f"scale {int(scales.max())} is unknown: they are 0 to {NUM_SCALES - 1}")


def _record_starts(
    data: NDArray[np.uint8], record_num_bytes: NDArray[np.uint32], num_tokens: int
) -> NDArray[np.int64]:
    """Return the first byte of each record in ``data``, and the end of the last: int64 ``[num_records + 1]``.

    Raises ``CodecError`` if the sizes do not fit the number of tokens or the bytes of the block.
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
