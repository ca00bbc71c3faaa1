"""Compiles loops to machine code, and hands them tensors of a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar, cast

import numba
import numpy as np
import torch
from numpy.typing import NDArray

_Function = TypeVar("_Function", bound=Callable[..., object])


def compiled(function: _Function) -> _Function:
    """Compile ``function`` to machine code at its first call. The code is kept on disk and runs without the
    GIL.

    Indices are not checked, and a division by zero does not raise, so the caller must check the arguments.
    """
    return cast(_Function, numba.njit(nogil=True, cache=True, error_model="numpy")(function))


def compiled_for_sums(function: _Function) -> _Function:
    """Compile like ``compiled``, for numbers that are finite, and add them up in any order, which is many
    times faster."""
    freedoms = {"reassoc", "contract", "nnan", "ninf", "nsz"}
    compile_function = numba.njit(nogil=True, cache=True, error_model="numpy", fastmath=freedoms)
    return cast(_Function, compile_function(function))


def elements(x: torch.Tensor) -> NDArray[Any]:
    """The elements of a tensor, for a compiled loop: contiguous, bf16 as its bits in uint16, which
    ``number_of`` reads, and anything else as float32."""
    return (x.view(torch.uint16) if x.dtype is torch.bfloat16 else x.float()).contiguous().numpy()


@compiled
def number_of(element: Any, is_bf16: bool) -> Any:
    """The float32 that one of ``elements`` stands for. For compiled loops."""
    if is_bf16:
        return np.uint32(np.uint32(element) << np.uint32(16)).view(np.float32)
    return np.float32(element)


@compiled
def bits_of(number: Any, is_bf16: bool) -> Any:
    """The bits of a finite float32, or of the nearest bf16. For compiled loops."""
    bits = np.float32(number).view(np.uint32)
    lowered = (bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))) >> np.uint32(16)
    return lowered if is_bf16 else bits
