"""Compiles a function of numbers and arrays to machine code."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import numba

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """``function`` as machine code: compiled at its first call, kept on disk, run without the GIL.

    Indices are not checked, and a division by zero does not raise: the caller must have checked what it hands
    over.
    """
    compile_function = numba.njit(nogil=True, cache=True, error_model="numpy")
    return cast(_Function, compile_function(function))
