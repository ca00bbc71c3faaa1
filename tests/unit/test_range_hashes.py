"""Hashes of a block's ranges: those of the library, and not slowed down by threads that compute."""

from __future__ import annotations

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from krul_backend.tiers.common import range_hashes
from krul_backend.tiers.common.range_hashes import ComparedRanges, compile_hashes, hash_ranges


def random_block(num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


def hashes_of(block: NDArray[np.uint8], range_bytes: int) -> list[bytes]:
    ends = range(block.nbytes, 0, -range_bytes)
    return [xxhash.xxh3_64_digest(block[max(0, end - range_bytes) : end].tobytes()) for end in ends][::-1]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled it, and others may come."""
    loops = range_hashes._make_loops(range_hashes._xxh3_at, lambda us: time.sleep(us * 1e-6))
    monkeypatch.setattr(range_hashes, "_loops", range_hashes._Loops(*loops))


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1, 13, 255, 256, 257, 1000, 1024, 65_536, 70_001])
@pytest.mark.parametrize("range_bytes", [256, 1 << 14])
def test_hashes_are_those_of_the_library(num_bytes: int, range_bytes: int, is_compiled: bool) -> None:
    if is_compiled:
        compile_hashes()
    assert (range_hashes._loops.hash_all is not None) is is_compiled
    block = random_block(num_bytes + 3)[3:]
    block.flags.writeable = False
    expected = [int.from_bytes(digest, "big") for digest in hashes_of(block, range_bytes)]
    assert hash_ranges(block, range_bytes).tolist() == expected


SIZES = [(70_001, 1 << 14), (0, 256), (1, 256), (1024, 256), (1000, 256), (0, 1 << 14), (255, 1 << 14)]


@pytest.mark.parametrize("is_compiled", [True, False])
def test_blocks_are_compared_with_hashes_of_the_library(is_compiled: bool) -> None:
    if is_compiled:
        compile_hashes()
    blocks = [random_block(num_bytes + 3)[3:] for num_bytes, _ in SIZES]
    hashes = [hashes_of(block, size) for block, (_, size) in zip(blocks, SIZES, strict=True)]

    def compared() -> ComparedRanges:
        tails = [
            (block, b"".join(of_block), size)
            for block, of_block, (_, size) in zip(blocks, hashes, SIZES, strict=True)
        ]
        return ComparedRanges(tails)

    ranges = compared()
    assert ranges.ends.tolist() == [5, 5, 6, 10, 14, 14, 15]
    assert not ranges.is_right.any()
    assert ranges.compare() is None
    assert ranges.is_right.tolist() == [True] * 15
    range_hashes.wait_a_moment(ranges.is_right, 15)
    first = 0
    for number, of_block in enumerate(hashes):
        for at in range(len(of_block)):
            right, of_block[at] = of_block[at], bytes(8)
            ranges = compared()
            assert ranges.compare() == number
            # Those before it were compared, and none after it.
            assert ranges.is_right.tolist() == [True] * (first + at) + [False] * (15 - first - at)
            of_block[at] = right
        if of_block:
            # A checksum too few.
            left_out = of_block.pop()
            assert compared().compare() == number
            of_block.append(left_out)
        first += len(of_block)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("bytes_at_once", [0, 7, 5000])
def test_threads_together_leave_no_range_out(
    bytes_at_once: int, is_compiled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if is_compiled:
        compile_hashes()
    monkeypatch.setattr(range_hashes, "_BYTES_AT_ONCE", bytes_at_once)
    block = random_block(2_000)
    for _ in range(20):
        ranges = ComparedRanges([(block, b"".join(hashes_of(block, 1)), 1)])
        with ThreadPoolExecutor(8) as threads:
            compared = [threads.submit(ranges.compare) for _ in range(8)]
        assert [future.result() for future in compared] == [None] * 8
        assert ranges.is_right.all()


def test_no_range_is_begun_after_a_stop() -> None:
    block = random_block(1000)
    ranges = ComparedRanges([(block, b"".join(hashes_of(block, 10)), 10)])
    ranges.stop()
    assert ranges.compare() is None
    assert not ranges.is_right.any()


def test_a_thread_that_computes_does_not_hold_up_ranges() -> None:
    """From Python each range would wait 5 ms for the GIL: two seconds and more for all of them."""
    compile_hashes()
    block, is_over = random_block(100 << 20), threading.Event()
    hash_ranges(block, 256 << 10)

    def compute() -> None:
        while not is_over.is_set():
            sum(range(1000))

    other = threading.Thread(target=compute)
    other.start()
    try:
        began_s = time.perf_counter()
        hash_ranges(block, 256 << 10)
        taken_s = time.perf_counter() - began_s
    finally:
        is_over.set()
        other.join()
    assert taken_s < 0.5
