"""Codes coefficients with range asymmetric numeral systems (rANS), close to the fewest bits possible."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.interface import (
    RECORD_TOKENS,
    Classes,
    CoefficientCoder,
    EncodedLevels,
    Levels,
    Values,
    num_records,
)
from krul_backend.codec.coefficients.rans_kernels import NUM_LANES, PAYLOAD_BITS, decode_block, encode_block
from krul_backend.codec.coefficients.records import (
    check_levels,
    coded_coefficients,
    output_of,
    record_starts,
)
from krul_backend.codec.coefficients.tables import COARSE, CoderTables, standard_tables
from krul_backend.errors import CodecError


@dataclass(frozen=True)
class _Plan:
    """How each coefficient that is coded is split, int64 ``[num_coded]`` each."""

    coded: NDArray[np.int64]
    table_indices: NDArray[np.int64]
    stream_bits: NDArray[np.int64]
    payload_bits: NDArray[np.int64]
    payload_columns: NDArray[np.int64]
    """Places in ``coded`` of those with payload bits: int64, no more than there are payload bits."""

    @classmethod
    def of(cls, classes: Classes, tables: CoderTables) -> _Plan:
        """Coefficients with low bits in their coarse table give them to the payload, until it is full."""
        coded = coded_coefficients(classes)
        fine = classes[coded].astype(np.int64)
        coarse_bits = tables.low_bits[fine + COARSE].astype(np.int64)
        before = np.cumsum(coarse_bits) - coarse_bits
        payload_bits = np.clip(PAYLOAD_BITS - before, 0, coarse_bits)
        indices = np.where(payload_bits > 0, fine + COARSE, fine)
        return cls(
            coded,
            indices,
            tables.low_bits[indices] - payload_bits,
            payload_bits,
            np.flatnonzero(payload_bits).astype(np.int64),
        )


class RansCoder(CoefficientCoder):
    """32 interleaved lanes of rANS per record, with a static table for each scale class.

    States are 32 bits, words 16, probabilities 12. The layout is in ``rans_kernels.py``.
    """

    name = "rans"
    version = 1

    def __init__(self, tables: CoderTables | None = None) -> None:
        self._tables = standard_tables() if tables is None else tables

    def encode(self, levels: Levels, classes: Classes) -> EncodedLevels:
        plan = _Plan.of(classes, self._tables)
        levels = check_levels(levels, classes)
        num_tokens = len(levels)
        record_num_words = np.zeros(num_records(num_tokens), np.int64)
        if not len(plan.coded):
            return EncodedLevels(np.empty(0, np.uint8), record_num_words.astype(np.uint32))
        # The system gives memory for the pages that are written only.
        most = len(record_num_words) * (2 * NUM_LANES + 3 * RECORD_TOKENS * len(plan.coded) + 1)
        data = np.empty(most, np.uint16)
        end = encode_block(
            levels,
            plan.coded,
            plan.table_indices,
            plan.stream_bits,
            plan.payload_bits,
            plan.payload_columns,
            self._tables.encoding,
            data,
            record_num_words,
        )
        return EncodedLevels(data[:end].copy().view(np.uint8), (2 * record_num_words).astype(np.uint32))

    def decode(
        self,
        data: NDArray[np.uint8],
        record_num_bytes: NDArray[np.uint32],
        classes: Classes,
        out: Levels | Values,
        *,
        shrink: float = 0.0,
    ) -> None:
        plan = _Plan.of(classes, self._tables)
        output = output_of(out, plan.coded, len(classes), shrink)
        starts = record_starts(data, record_num_bytes, len(out))
        if not len(plan.coded):
            if len(data):
                raise CodecError("no coefficient is coded, but the block has bytes")
            out.fill(0)
            return
        good = decode_block(
            data if data.flags.writeable and data.flags.c_contiguous else data.copy(),
            starts,
            len(out),
            plan.coded,
            output.num_leading,
            plan.table_indices,
            plan.stream_bits,
            plan.payload_bits,
            plan.payload_columns,
            self._tables.decoding,
            np.float32(shrink),
            output.levels,
            output.values,
        )
        if good < num_records(len(out)):
            raise CodecError(f"record {good} of {num_records(len(out))} is damaged")
