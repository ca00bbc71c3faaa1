"""Codes coefficients in bands of one bit width each, and exceptions where that does not fit: faster."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from krul_backend.codec.coefficients.fixed_width_kernels import decode_block, encode_block, most_words
from krul_backend.codec.coefficients.interface import (
    Classes,
    CoefficientCoder,
    EncodedLevels,
    Levels,
    Values,
    num_records,
)
from krul_backend.codec.coefficients.records import (
    check_levels,
    coded_coefficients,
    output_of,
    record_starts,
)
from krul_backend.errors import CodecError


class FixedWidthCoder(CoefficientCoder):
    """A width of 0 to 8 bits for each record and band of 16 coefficients, chosen for the fewest bytes.

    Of the classes it only looks at which are 0. The layout is in ``fixed_width_kernels.py``.
    """

    name = "fixed-width"
    version = 1

    def encode(self, levels: Levels, classes: Classes) -> EncodedLevels:
        coded = coded_coefficients(classes)
        levels = check_levels(levels, classes)
        record_num_words = np.zeros(num_records(len(levels)), np.int64)
        if not len(coded):
            return EncodedLevels(np.empty(0, np.uint8), record_num_words.astype(np.uint32))
        # The system gives memory for the pages that are written only.
        data = np.empty(len(record_num_words) * most_words(len(coded)), np.uint16)
        end = encode_block(levels, coded, data, record_num_words)
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
        coded = coded_coefficients(classes)
        output = output_of(out, coded, len(classes), shrink)
        starts = record_starts(data, record_num_bytes, len(out))
        if not len(coded):
            if len(data):
                raise CodecError("no coefficient is coded, but the block has bytes")
            out.fill(0)
            return
        good = decode_block(
            data if data.flags.writeable and data.flags.c_contiguous else data.copy(),
            starts,
            len(out),
            coded,
            output.num_leading,
            np.float32(shrink),
            output.levels,
            output.values,
        )
        if good < num_records(len(out)):
            raise CodecError(f"record {good} of {num_records(len(out))} is damaged")
