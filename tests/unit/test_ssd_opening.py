"""The SSD tier while it still reads what lies on the disk: it finds nothing, and loses nothing."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.ssd.catalog import Catalog
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.own_files import format_directory, remove_index
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import (
    SIZES,
    FaultyDisk,
    begin_to_open,
    disk_bytes,
    has,
    match,
    open_tier,
    put,
    put_manifest,
)
from tests.support.store_builders import make_manifest, make_model, page_keys

NUM_STORED = 18
OLD, OTHER = make_model("old"), make_model("other")


class SlowScan(FaultyDisk):
    """Reads of log files wait for ``allow``; the last ``allow`` may be for all."""

    def __init__(self) -> None:
        super().__init__()
        self._allowed = threading.Semaphore(0)
        self._is_free = False

    def allow(self, num_reads: int) -> None:
        self._allowed.release(num_reads)

    def allow_all(self) -> None:
        self._is_free = True
        self._allowed.release(1000)

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self._names[fd].endswith(".log") and not self._is_free:
            assert self._allowed.acquire(timeout=20)
        return super().preadv(fd, buffers, offset)


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[SlowScan]:
    """A slow disk on a directory with segments of two models, the even ones of ``OLD``."""
    tier = open_tier(tmp_path)
    for number in range(NUM_STORED):
        assert put(tier, f"c{number}", model=(OLD, OTHER)[number % 2], seed=number)
    tier.close()
    # So that the logs are read.
    remove_index(Disk(), format_directory(tmp_path))
    slow = SlowScan()
    yield slow
    slow.allow_all()


def found_of(tier: SsdTier) -> list[bool]:
    return [
        has(tier, f"c{number}", seed=number, model=(OLD, OTHER)[number % 2]) for number in range(NUM_STORED)
    ]


def in_thread(call: Callable[[], object]) -> threading.Thread:
    thread = threading.Thread(target=call)
    thread.start()
    return thread


def test_until_it_was_read_nothing_is_found_and_what_is_put_waits(
    tmp_path: Path, disk: SlowScan, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        tier = begin_to_open(tmp_path, disk)
        disk.allow(3)
        assert not tier.wait_until_open(0.01)
        assert tier.stats().is_opening
        assert match(tier, "c0", model=OLD) == ()
        assert tier.find_missing(OLD, page_keys("c0", 0, 2)) == [range(2)]
        # One is new, the other is on the disk already.
        assert put_manifest(tier, make_manifest("new", 0, 2, SIZES), seed=9)
        assert put_manifest(tier, make_manifest("c0", 0, 2, SIZES, OLD), seed=0)
        assert not tier.flush(0.01)
        assert tier.stats().queued_segments == 2
        disk.allow_all()
        assert tier.wait_until_open(20)
    assert not tier.stats().is_opening
    assert tier.flush(20)
    assert found_of(tier) == [True] * NUM_STORED
    assert has(tier, "new", seed=9)
    assert tier.stats().written_segments == 1
    (message,) = [record.message for record in caplog.records if "to find out" in record.message]
    assert message.startswith(f"the SSD tier has {NUM_STORED} segments in ")
    tier.close()


@pytest.mark.parametrize("model", [OLD, None])
def test_a_clear_does_not_wait_until_all_was_read_and_outlives_the_process(
    tmp_path: Path, disk: SlowScan, model: object
) -> None:
    tier = begin_to_open(tmp_path, disk)
    clearing = in_thread(lambda: tier.clear(OLD if model is OLD else None))
    while not tier._state.pending_clears:
        time.sleep(1e-3)
    # The file's header, and the headers of the first few records.
    disk.allow(6)
    clearing.join(20)
    assert tier.stats().is_opening
    assert not tier._state.pending_clears
    closing = in_thread(tier.close)
    while not tier._writes.queue.is_closed:
        time.sleep(1e-3)
    disk.allow_all()
    closing.join(20)
    tier = open_tier(tmp_path)
    assert found_of(tier) == [model is OLD and number % 2 == 1 for number in range(NUM_STORED)]
    tier.close()


def test_what_was_cleared_or_discarded_meanwhile_is_not_found_when_it_has_been_read(
    tmp_path: Path, disk: SlowScan
) -> None:
    tier = begin_to_open(tmp_path, disk)
    tier.discard(make_manifest("c1", 0, 2, SIZES, OTHER))
    clearing = in_thread(lambda: tier.clear(OLD))
    while not tier._state.pending_clears:
        time.sleep(1e-3)
    disk.allow_all()
    clearing.join(20)
    assert tier.wait_until_open(20)
    assert found_of(tier) == [number % 2 == 1 and number != 1 for number in range(NUM_STORED)]
    put(tier, "c0", model=OLD, seed=8)
    assert has(tier, "c0", seed=8, model=OLD)
    tier.close()


def test_a_clear_between_two_steps_of_filling_the_catalog(
    tmp_path: Path, disk: SlowScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("krul_backend.tiers.ssd.ssd_tier._MAX_ENTERED", 1)
    tiers: list[SsdTier] = []
    clearing = threading.Thread(target=lambda: tiers[0].clear(OLD))
    commit = Catalog.commit

    def clear_once(catalog: Catalog, *punched: Any, **options: Any) -> None:
        commit(catalog, *punched, **options)
        # Between the first segment of the index and the second one.
        if clearing.ident is None and tiers and catalog.num_segments:
            clearing.start()
            while not tiers[0]._state.pending_clears:
                time.sleep(1e-3)

    monkeypatch.setattr(Catalog, "commit", clear_once)
    tiers.append(begin_to_open(tmp_path, disk))
    disk.allow_all()
    assert tiers[0].wait_until_open(20)
    monkeypatch.undo()
    clearing.join(20)
    assert found_of(tiers[0]) == [number % 2 == 1 for number in range(NUM_STORED)]
    tiers[0].close()


def test_an_index_that_was_not_made_to_its_end_is_made_further(
    tmp_path: Path, disk: SlowScan, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("krul_backend.tiers.ssd.ssd_tier._MAX_ENTERED", 1)
    tier = begin_to_open(tmp_path, disk)
    disk.allow(9)
    while tier.stats().num_segments < 4:
        time.sleep(1e-3)
    closing = in_thread(tier.close)
    while not tier._writes.queue.is_closed:
        time.sleep(1e-3)
    disk.allow(2)
    closing.join(20)
    assert tier.stats().is_opening
    disk.allow_all()
    tier = open_tier(tmp_path)
    assert found_of(tier) == [True] * NUM_STORED
    assert tier.stats().used_bytes == disk_bytes(tmp_path)
    tier.close()


def test_the_store_serves_from_memory_meanwhile(tmp_path: Path, disk: SlowScan) -> None:
    tier = begin_to_open(tmp_path, disk)
    store = TieredStore(HostStore(1 << 20), [tier])
    assert not store.wait_until_open(0.01)
    assert store.find_missing(OLD, page_keys("c0", 0, 2)) == [range(2)]
    assert store.stats().tiers[0].is_opening
    disk.allow_all()
    assert store.wait_until_open(20)
    assert store.find_missing(OLD, page_keys("c0", 0, 2)) == []
    store.close()
