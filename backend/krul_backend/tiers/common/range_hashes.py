"""Hashes the ranges of blocks one after another, in an engine without the GIL in between."""

from __future__ import annotations

import ctypes
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from krul_backend.segment import num_ranges

logger = logging.getLogger(__name__)

_BYTES_AT_ONCE = 128 << 10
"""Of ranges that a thread takes at once. With fewer, threads often take the same ones."""

CheckedTail = tuple[NDArray[np.uint8], bytes, int]
"""The last ranges of a block, their checksums (XXH3, big endian), and how long ranges are."""


def hash_ranges(block: NDArray[np.uint8], range_bytes: int) -> NDArray[np.uint64]:
    """XXH3 (64 bit) of each range of a block, one after another. Ranges are counted from the block's end:
    only the first one may be shorter than ``range_bytes``. Faster after ``compile_hashes``."""
    hashes = np.empty(num_ranges(block.nbytes, range_bytes), np.uint64)
    first_bytes = block.nbytes - (len(hashes) - 1) * range_bytes
    if _loops.hash_all is not None:
        address = block.__array_interface__["data"][0]
        _loops.hash_all(np.uint64(address), np.uint64(first_bytes), np.uint64(range_bytes), hashes)
    else:
        ends = range(first_bytes, block.nbytes + 1, range_bytes)
        hashes[:] = [xxhash.xxh3_64_intdigest(block.data[max(0, end - range_bytes) : end]) for end in ends]
    return hashes


class ComparedRanges:
    """Compares the ends of blocks with their checksums, range after range, on any number of threads.

    The ranges of all blocks are numbered through: those of block ``b`` end before ``ends[b]``.
    ``is_right[number]`` becomes true once a range was found right.
    """

    def __init__(self, tails: Sequence[CheckedTail]) -> None:
        self._blocks, checksums, range_bytes = zip(*tails, strict=True)
        counts = [num_ranges(block.nbytes, size) for block, _, size in tails]
        # Numbers of each block, not of each range: with more than 500 at once, numpy gives the GIL back.
        firsts = np.array([block.__array_interface__["data"][0] for block in self._blocks])
        num_bytes = np.array([block.nbytes for block in self._blocks])
        self.ends = np.cumsum(counts)
        self._places = firsts, firsts + num_bytes, np.array(range_bytes), self.ends
        # What lacks checksums is wrong.
        wanted = [checksum.rjust(8 * count, b"\0") for checksum, count in zip(checksums, counts, strict=True)]
        self._wanted = np.frombuffer(b"".join(wanted), ">u8").astype(np.uint64)
        self.is_right = np.zeros(len(self._wanted), np.bool_)
        self._next = np.zeros(1, np.int64)
        self._num_at_once = 1 + _BYTES_AT_ONCE * len(self._wanted) // (1 + int(num_bytes.sum()))

    def compare(self) -> int | None:
        """Take part until no range is left, or one is wrong, after which no thread begins another. Returns
        the number of its block."""
        number = _loops.find_wrong(self._places, self._wanted, self.is_right, self._next, self._num_at_once)
        return None if number == len(self._wanted) else int(np.searchsorted(self.ends, number, "right"))

    def stop(self) -> None:
        """Let no thread take more ranges, unless it is just about to."""
        self._next[0] = len(self._wanted)


def wait_a_moment(is_right: NDArray[np.bool_], end: int) -> None:
    """Wait until all before ``end`` are right, for about a millisecond at most."""
    _loops.wait(is_right, end)


@dataclass(frozen=True)
class _Loops:
    """The loops over ranges. Compiled, they run without the GIL; ``hash_all`` is there only then."""

    find_wrong: Callable[..., Any]
    wait: Callable[..., Any]
    hash_all: Callable[..., Any] | None = None


def _make_loops(
    xxh3: Callable[..., Any], sleep_us: Callable[..., Any]
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """``find_wrong`` and ``wait``, in Python that can be compiled: ``xxh3(address, num_bytes)`` hashes."""

    # Several threads may take the same ranges, or ones that were compared since. None is left out: a thread
    # that writes where the next begin has read where its own do, and takes those between.
    def find_wrong(places: Any, wanted: Any, is_right: Any, following: Any, num_at_once: Any) -> Any:
        firsts, lasts, range_bytes, ends = places
        begin = following[0]
        while begin < len(wanted):
            end = min(begin + num_at_once, len(wanted))
            block = np.searchsorted(ends, begin, "right")
            following[0] = end
            for number in range(begin, end):
                while number >= ends[block]:
                    block += 1
                if not is_right[number]:
                    stop = lasts[block] - (ends[block] - number - 1) * range_bytes[block]
                    start = max(firsts[block], stop - range_bytes[block])
                    if xxh3(start, stop - start) != wanted[number]:
                        following[0] = len(wanted)
                        return number
                    is_right[number] = True
            begin = following[0]
        return len(wanted)

    def wait(is_right: Any, end: Any) -> None:
        number = 0
        for _ in range(20):
            while number < end and is_right[number]:
                number += 1
            if number == end:
                break
            sleep_us(20)

    return find_wrong, wait


def _xxh3_at(address: int, num_bytes: int) -> int:
    return xxhash.xxh3_64_intdigest((ctypes.c_char * int(num_bytes)).from_address(int(address)))


_loops = _Loops(*_make_loops(_xxh3_at, lambda us: time.sleep(us * 1e-6)))


def compile_hashes() -> None:
    """Have ranges hashed by the function of the package ``xxhash`` in compiled loops from now on.

    Called from Python, it gives the GIL back for each range, and waits up to 5 ms to get it again while
    another thread computes. The daemon has no such thread, and does without a compiler.
    """
    global _loops
    from llvmlite import binding
    from numba import njit, types

    module = find_spec("xxhash._xxhash")
    if module is not None and module.origin is not None:
        binding.load_library_permanently(module.origin)
    if binding.address_of_symbol("XXH3_64bits") is None:
        logger.warning("krul: xxhash shows no XXH3_64bits: checking KV may wait for other threads")
        return
    xxh3 = types.ExternalFunction("XXH3_64bits", types.uint64(types.uintp, types.uintp))

    # Not kept on disk: code with the address of a function is compiled again by the next process.
    compiled = njit(nogil=True, error_model="numpy")

    @compiled  # type: ignore[untyped-decorator]
    def hash_all(address: Any, first_bytes: Any, range_bytes: Any, hashes: Any) -> None:
        num_bytes = first_bytes
        for number in range(len(hashes)):
            hashes[number] = xxh3(address, num_bytes)
            address += num_bytes
            num_bytes = range_bytes

    usleep = types.ExternalFunction("usleep", types.int32(types.uint32))
    find_wrong, wait = map(compiled, _make_loops(xxh3, usleep))
    _loops = _Loops(find_wrong, wait, hash_all)
    block = np.zeros(1, np.uint8)
    ranges = ComparedRanges([(block, hash_ranges(block, 1).astype(">u8").tobytes(), 1)])
    ranges.compare()
    wait_a_moment(ranges.is_right, 1)
