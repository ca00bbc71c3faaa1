"""The contract of the coders of quantized coefficients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

RECORD_TOKENS = 64
"""Tokens of a record; the last one of a block may have fewer."""

Levels = NDArray[np.int16]
Classes = NDArray[np.uint8]
Values = NDArray[np.float32]


@dataclass(frozen=True)
class EncodedLevels:
    """One block: ``data`` uint8 ``[N]``, the records one after the other, and their sizes uint32
    ``[num_records]``.

    Sizes are multiples of 4 bytes and sum to ``N``. They are not in ``data``: whoever decodes must bring
    them.
    """

    data: NDArray[np.uint8]
    record_num_bytes: NDArray[np.uint32]


class CoefficientCoder(ABC):
    """Turns levels ``[T, R]`` (tokens, coefficients) into bytes and back, exactly."""

    name: str
    version: int

    @abstractmethod
    def encode(self, levels: Levels, classes: Classes) -> EncodedLevels:
        """The bytes of ``levels`` int16 ``[T, R]``, coded by ``classes`` uint8 ``[R]`` (see ``class_of``).

        Raises ``CodecError`` for a wrong shape or dtype, an unknown class, or a level of class 0 that is not
        zero.
        """

    @abstractmethod
    def decode(
        self,
        data: NDArray[np.uint8],
        record_num_bytes: NDArray[np.uint32],
        classes: Classes,
        out: Levels | Values,
        *,
        shrink: float = 0.0,
    ) -> None:
        """Write the levels of a block, or of its tail from any record on, into ``out [T, R]``, which is
        contiguous.

        An int16 ``out`` gets the levels ``q``, and float32 gets ``sign(q) * (|q| - shrink)``, ``0 <= shrink <
        0.5``. ``T``, ``data`` and ``record_num_bytes`` are those of the tail; ``classes`` are those it was
        encoded with.

        Raises ``CodecError`` if sizes contradict each other or bytes are not what ``encode`` writes. ``out``
        is undefined then. Damage that happens to make another valid block is not seen: that needs a checksum.
        """


def num_records(num_tokens: int) -> int:
    """Records of a block of ``num_tokens``."""
    return -(-num_tokens // RECORD_TOKENS)
