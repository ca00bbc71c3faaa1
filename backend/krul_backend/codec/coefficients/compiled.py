"""Compiles loops to machine code; the names and types that they share."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba
import numpy as np
from numpy.typing import NDArray

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

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` to machine code at its first call. The code is kept on disk and runs without the
    GIL.

    Indices are not checked, and a division by zero does not raise, so the caller must check the arguments.
    """
    compile_function = numba.njit(nogil=True, cache=True, error_model="numpy")
    return cast(_Function, compile_function(function))
