"""Hashes the ranges of a block one after another, without the GIL in between."""

from __future__ import annotations

import logging
from importlib.util import find_spec
from typing import Any

import numpy as np
import xxhash
from llvmlite import binding
from numba import types
from numpy.typing import NDArray

from krul_backend.machine_code import compiled

logger = logging.getLogger(__name__)

Bytes = NDArray[np.uint8]

_XXH3 = types.ExternalFunction("XXH3_64bits", types.uint64(types.uintp, types.uintp))


def hash_ranges(block: Bytes, range_bytes: int) -> NDArray[np.uint64]:
    """XXH3 (64 bit) of each range of a block, one after another. Ranges are counted from the block's end:
    only the first one may be shorter than ``range_bytes``.

    The function of the package ``xxhash`` is called by a compiled loop. Called from Python, it gives the GIL
    back for each range, and waits up to 5 ms to get it again while another thread computes.
    """
    num_ranges = -(-block.nbytes // range_bytes)
    first_bytes = block.nbytes - (num_ranges - 1) * range_bytes
    hashes = np.empty(num_ranges, np.uint64)
    if num_ranges and _IS_FOUND:
        address = block.__array_interface__["data"][0]
        _hash_ranges(np.uint64(address), np.uint64(first_bytes), np.uint64(range_bytes), hashes)
    elif num_ranges:
        ends = range(first_bytes, block.nbytes + 1, range_bytes)
        hashes[:] = [xxhash.xxh3_64_intdigest(block.data[max(0, end - range_bytes) : end]) for end in ends]
    return hashes


def compile_hashes() -> None:
    """Compile what ``hash_ranges`` runs, before the first block has to wait for that."""
    hash_ranges(np.zeros(1, np.uint8), 1)


@compiled
def _hash_ranges(address: Any, first_bytes: Any, range_bytes: Any, hashes: Any) -> None:
    num_bytes = first_bytes
    for number in range(len(hashes)):
        hashes[number] = _XXH3(address, num_bytes)
        address += num_bytes
        num_bytes = range_bytes


def _is_found() -> bool:
    """Let compiled code find the function of ``xxhash``; returns whether its build shows it."""
    module = find_spec("xxhash._xxhash")
    if module is not None and module.origin is not None:
        binding.load_library_permanently(module.origin)
    if binding.address_of_symbol("XXH3_64bits") is not None:
        return True
    logger.warning("krul: xxhash shows no XXH3_64bits: checking KV may wait for other threads")
    return False


_IS_FOUND = _is_found()
