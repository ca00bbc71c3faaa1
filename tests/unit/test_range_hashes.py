"""Hashes of a block's ranges: those of the library, and not slowed down by threads that compute."""

from __future__ import annotations

import threading
import time

import numpy as np
import pytest
import xxhash
from numpy.typing import NDArray

from krul_backend.tiers.common import range_hashes
from krul_backend.tiers.common.range_hashes import compile_hashes, hash_ranges


def random_block(num_bytes: int) -> NDArray[np.uint8]:
    return np.random.default_rng(num_bytes).integers(0, 256, num_bytes, np.uint8)


@pytest.fixture(autouse=True)
def interpreted(monkeypatch: pytest.MonkeyPatch) -> None:
    """Other tests of this process may have compiled it, and others may come."""
    monkeypatch.setattr(range_hashes, "_compiled", None)


@pytest.mark.parametrize("is_compiled", [True, False])
@pytest.mark.parametrize("num_bytes", [0, 1, 13, 255, 256, 257, 1000, 1024, 65_536, 70_001])
@pytest.mark.parametrize("range_bytes", [256, 1 << 14])
def test_hashes_are_those_of_the_library(num_bytes: int, range_bytes: int, is_compiled: bool) -> None:
    if is_compiled:
        compile_hashes()
    assert (range_hashes._compiled is not None) is is_compiled
    block = random_block(num_bytes + 3)[3:]
    block.flags.writeable = False
    ends = range(num_bytes, 0, -range_bytes)
    expected = [xxhash.xxh3_64_intdigest(block[max(0, end - range_bytes) : end].data) for end in ends]
    assert hash_ranges(block, range_bytes).tolist() == expected[::-1]


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
