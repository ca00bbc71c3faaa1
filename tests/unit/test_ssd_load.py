"""The store over an SSD that is slower than what is asked of it: who is served first, and what is kept."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import Lease
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.ssd.index import file_number_of, offset_of
from krul_backend.tiers.ssd.segment_reads import MAX_READS_AT_ONCE
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import SIZES, FaultyDisk, open_tier, put
from tests.support.store_builders import make_model, page_keys, tokens_of

MIB = 1 << 20
MODEL = make_model()
NUM_PREFETCHED, NUM_LOADED = 200, 10


class ReadOrder(FaultyDisk):
    """Notes where reads of the log begin, in their order; records are small enough for one read each."""

    def __init__(self) -> None:
        super().__init__()
        self.offsets: list[int] = []

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self.offsets.append(offset)
        return super().preadv(fd, buffers, offset)


class Restores:
    """A store over ``NUM_PREFETCHED + NUM_LOADED`` conversations on an SSD that answers when told."""

    def __init__(self, directory: Path) -> None:
        self.disk = ReadOrder()
        self.tier: SsdTier = open_tier(
            directory, self.disk, capacity_bytes=64 * MIB, file_bytes=16 * MIB, read_timeout_s=60.0
        )
        self.offsets: list[int] = []
        for number in range(NUM_PREFETCHED + NUM_LOADED):
            assert put(self.tier, f"c{number}", seed=number)
        self.store = TieredStore(HostStore(16 * MIB), [self.tier])
        records = list(self.tier._index.records())
        # All lies in one file, and the first block is read from the sector on where its header ends.
        assert len({file_number_of(place) for place, _ in records}) == 1
        self.offsets = [offset_of(place) for place, _ in records]
        self.disk.offsets.clear()
        self.disk.gate.clear()

    def prefetch(self, number: int) -> None:
        keys = page_keys(f"c{number}", 0, 2)
        assert self.store.prefetch_pages(MODEL, keys, tokens_of(keys)).num_pages == 2

    def load(self, number: int) -> Lease:
        keys = page_keys(f"c{number}", 0, 2)
        lease = self.store.lease(MODEL, keys, tokens_of(keys))
        assert lease is not None
        assert {piece.tier for piece in lease.slices} == {"ssd"}
        self.store.fetch(lease)
        return lease

    def read_order(self, leases: Sequence[Lease]) -> list[int]:
        """Let the disk go on; the conversations in the order in which they were read, when all have come."""
        self.disk.gate.set()
        for lease in leases:
            for piece in self.store.fetch(lease):
                for layer in range(len(SIZES)):
                    if piece.status is not None:
                        piece.status.wait(layer, 20)
        self.store._fetcher.close()
        for lease in leases:
            self.store.release(lease)
        order = [self.offsets.index(offset) for offset in self.disk.offsets]
        self.store.close()
        return order


@pytest.fixture
def restores(tmp_path: Path) -> Restores:
    return Restores(tmp_path)


def test_restores_are_served_before_prefetches_that_were_queued_earlier(restores: Restores) -> None:
    for number in range(NUM_PREFETCHED):
        restores.prefetch(number)
    loaded = range(NUM_PREFETCHED, NUM_PREFETCHED + NUM_LOADED)
    order = restores.read_order([restores.load(number) for number in loaded])
    # Those that the disk was reading already come first; two threads may swap neighbours.
    assert max(order.index(number) for number in loaded) < MAX_READS_AT_ONCE + NUM_LOADED + 1


def test_a_prefetch_for_which_a_load_waits_is_served_before_other_prefetches(restores: Restores) -> None:
    for number in range(NUM_PREFETCHED):
        restores.prefetch(number)
    loaded = range(NUM_PREFETCHED - NUM_LOADED, NUM_PREFETCHED)
    order = restores.read_order([restores.load(number) for number in loaded])
    assert max(order.index(number) for number in loaded) < MAX_READS_AT_ONCE + NUM_LOADED + 1
    assert len(order) == len(set(order)), "each is read once"


def test_verify_waits_for_restores(restores: Restores) -> None:
    leases = []
    checking = threading.Thread(target=restores.tier.verify)
    checking.start()
    while not restores.disk.num_stalled:
        time.sleep(1e-3)
    for number in range(NUM_PREFETCHED, NUM_PREFETCHED + NUM_LOADED):
        leases.append(restores.load(number))
    order = restores.read_order(leases)
    checking.join(20)
    assert order[0] == 0
    assert set(range(NUM_PREFETCHED, NUM_PREFETCHED + NUM_LOADED)) <= set(order[: NUM_LOADED + 2])
