"""Hashes the ranges of a block one after another, in an engine without the GIL in between."""

from __future__ import annotations

import logging
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from krul_backend.segment import num_ranges

logger = logging.getLogger(__name__)

_compiled: Callable[..., None] | None = None


def hash_ranges(block: NDArray[np.uint8], range_bytes: int) -> NDArray[np.uint64]:
    """XXH3 (64 bit) of each range of a block, one after another. Ranges are counted from the block's end:
    only the first one may be shorter than ``range_bytes``. Faster after ``compile_hashes``."""
    hashes = np.empty(num_ranges(block.nbytes, range_bytes), np.uint64)
    first_bytes = block.nbytes - (len(hashes) - 1) * range_bytes
    if _compiled is not None:
        address = block.__array_interface__["data"][0]
        _compiled(np.uint64(address), np.uint64(first_bytes), np.uint64(range_bytes), hashes)
    else:
        ends = range(first_bytes, block.nbytes + 1, range_bytes)
        hashes[:] = [xxhash.xxh3_64_intdigest(block.data[max(0, end - range_bytes) : end]) for end in ends]
    return hashes


def compile_hashes() -> None:
    """Have ``hash_ranges`` call the function of the package ``xxhash`` in a compiled loop from now on.

    Called from Python, it gives the GIL back for each range, and waits up to 5 ms to get it again while
    another thread computes. The daemon has no such thread, and does without a compiler.
    """
    global _compiled
    from llvmlite import binding
    from numba import types

    from krul_backend.machine_code import compiled

    module = find_spec("xxhash._xxhash")
    if module is not None and module.origin is not None:
        binding.load_library_permanently(module.origin)
    if binding.address_of_symbol("XXH3_64bits") is None:
        logger.warning("krul: xxhash shows no XXH3_64bits: checking KV may wait for other threads")
        return
    xxh3 = types.ExternalFunction("XXH3_64bits", types.uint64(types.uintp, types.uintp))

    @compiled
    def hash_all(address: Any, first_bytes: Any, range_bytes: Any, hashes: Any) -> None:
        num_bytes = first_bytes
        for number in range(len(hashes)):
            hashes[number] = xxh3(address, num_bytes)
            address += num_bytes
            num_bytes = range_bytes

    _compiled = hash_all
    hash_ranges(np.zeros(1, np.uint8), 1)
