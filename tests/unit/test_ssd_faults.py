"""The SSD tier on a disk that fails: a miss or a TierReadError, never wrong bytes, never an exception."""

from __future__ import annotations

import errno
import logging
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from krul_backend.errors import TierReadError
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.common.tier_health import FIRST_PAUSE_S
from krul_backend.tiers.ssd import segment_writes
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import (
    FILE_BYTES,
    SIZES,
    FaultyDisk,
    busy_writer,
    disk_bytes,
    fetch,
    has,
    match,
    open_tier,
    put,
    put_manifest,
    random_blocks,
)
from tests.support.store_builders import Clock, make_manifest, make_model, page_keys, read_tail, wait_until


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(tmp_path: Path, disk: FaultyDisk, clock: Clock) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path, disk, clock=clock, read_timeout_s=1.0)
    yield opened
    disk.gate.set()
    disk.errors.clear()
    opened.close()


def test_short_writes_and_short_reads_are_continued(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.max_step_bytes = 4096 + 100
    tier = open_tier(tmp_path, disk)
    assert put(tier, "a", seed=4)
    assert has(tier, "a", seed=4)
    tier.close()
    tier = open_tier(tmp_path, disk)
    assert has(tier, "a", seed=4)
    tier.close()


def test_a_read_that_brings_nothing_fails(tier: SsdTier, disk: FaultyDisk) -> None:
    put(tier, "a")
    (run,) = match(tier, "a")
    disk.max_step_bytes = 100
    with pytest.raises(TierReadError, match="too soon"):
        fetch(tier, run)
    assert tier.stats().failed_reads == 1
    tier.release(run)


def test_a_flipped_bit_is_never_handed_out(tier: SsdTier, disk: FaultyDisk) -> None:
    put(tier, "a", seed=1)
    (run,) = match(tier, "a")
    # In the second block: the first one may land.
    disk.flipped_read_offset = 8000
    blocks = [np.zeros(size, dtype=np.uint8) for size in SIZES]
    landed: list[int] = []
    with pytest.raises(TierReadError, match="layer 1"):
        read_tail(tier, run, blocks, landed.append)
    assert landed == [0]
    np.testing.assert_array_equal(blocks[0], random_blocks(SIZES, 1)[0])
    tier.release(run)
    stats = tier.stats()
    assert (stats.corrupted_segments, stats.num_segments, stats.is_suspended) == (1, 0, False)


def test_verify_finds_the_damaged_one(tier: SsdTier, tmp_path: Path) -> None:
    put(tier, "a", seed=1)
    put(tier, "b", seed=2)
    (path,) = tmp_path.rglob("*.log")
    right = random_blocks(SIZES, 2)[1].tobytes()
    offset = path.read_bytes().index(right)
    with path.open("r+b") as file:
        file.seek(offset + 5)
        file.write(bytes([right[5] ^ 1]))
    damaged_id = max(info.segment_id for info in tier.list_segments())
    report = tier.verify()
    assert report.bad_segments == (damaged_id,)
    assert (report.num_blocks, report.num_bytes) == (4, 2 * sum(SIZES))
    assert has(tier, "a", seed=1)
    assert not has(tier, "b", seed=2)


def test_a_stalled_read_fails_and_never_writes_into_the_blocks(tier: SsdTier, disk: FaultyDisk) -> None:
    put(tier, "a")
    (run,) = match(tier, "a")
    blocks = [np.full(size, 0xAA, dtype=np.uint8) for size in SIZES]
    disk.gate.clear()
    with pytest.raises(TierReadError, match="too slow"):
        read_tail(tier, run, blocks, lambda layer: None)
    stats = tier.stats()
    assert (stats.slow_reads, stats.is_suspended) == (1, True)
    assert match(tier, "a") == ()
    disk.gate.set()
    # Ends when the stuck read has ended.
    tier.close()
    assert disk.num_stalled == 1
    assert all((block == 0xAA).all() for block in blocks)


def test_a_small_fetch_beside_a_large_one_that_copies_slowly(tmp_path: Path) -> None:
    tier = open_tier(tmp_path, capacity_bytes=128 << 20, file_bytes=32 << 20, read_timeout_s=5.0)
    put(tier, "large", sizes=(1 << 20, 24 << 20), seed=1)
    put(tier, "small", seed=2)
    is_copying, may_go_on = threading.Event(), threading.Event()

    def landed(layer: int) -> None:
        is_copying.set()
        assert may_go_on.wait(20)

    def fetch_large() -> None:
        (run,) = match(tier, "large")
        blocks = [np.zeros(size, dtype=np.uint8) for size in run.segment.manifest.layer_num_bytes]
        read_tail(tier, run, blocks, landed)
        tier.release(run)

    with ThreadPoolExecutor(1) as thread:
        fetching = thread.submit(fetch_large)
        assert is_copying.wait(20)
        try:
            assert has(tier, "small", seed=2)
        finally:
            may_go_on.set()
        fetching.result()
    stats = tier.stats()
    assert (stats.slow_reads, stats.is_suspended, stats.read_segments) == (0, False, 2)
    tier.close()


def test_stuck_reads_hold_their_file_open_and_its_bytes_counted(tier: SsdTier, disk: FaultyDisk) -> None:
    put(tier, "a")
    used_bytes = tier.stats().used_bytes
    (run,) = match(tier, "a")
    disk.gate.clear()
    with pytest.raises(TierReadError):
        fetch(tier, run)
    tier.clear()
    assert tier.stats().used_bytes == used_bytes
    disk.gate.set()
    tier._reader.close()
    tier.clear()
    wait_until(lambda: tier.stats().used_bytes == 0)


def test_a_pause_ends_doubles_and_is_short_again_after_a_success(
    tier: SsdTier, disk: FaultyDisk, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    put(tier, "a", seed=1)
    (run,) = match(tier, "a")

    def pause_s() -> float:
        disk.errors["preadv"] = errno.EIO
        with caplog.at_level(logging.WARNING), pytest.raises(TierReadError):
            fetch(tier, run)
        disk.errors.clear()
        started_s = clock.now_s
        while tier.stats().is_suspended:
            assert not put(tier, "b")
            assert tier.find_missing(make_model(), page_keys("a", 0, 2)) == [range(2)]
            clock.now_s += FIRST_PAUSE_S / 2
        return clock.now_s - started_s

    assert [pause_s() for _ in range(7)] == [30, 60, 120, 240, 480, 600, 600]
    assert len(caplog.records) == 1
    assert has(tier, "a", seed=1)
    assert pause_s() == 30
    assert tier.stats().failed_reads == 8


@pytest.mark.parametrize("method", ["pwritev", "fdatasync"])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EIO])
def test_what_cannot_be_written_is_not_found(
    tier: SsdTier, disk: FaultyDisk, clock: Clock, tmp_path: Path, method: str, code: int
) -> None:
    put(tier, "a", seed=1)
    disk.errors[method] = code
    put(tier, "b", seed=2)
    disk.errors.clear()
    stats = tier.stats()
    assert (stats.failed_writes, stats.is_suspended) == (1, code == errno.EIO)
    assert stats.skipped_segments == {"failed": 1}
    assert stats.used_bytes == disk_bytes(tmp_path)
    assert not put(tier, "b")
    clock.now_s += FIRST_PAUSE_S
    assert not has(tier, "b")
    put(tier, "c", seed=3)
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "a", seed=1)
    assert not has(tier, "b")
    assert has(tier, "c", seed=3)
    tier.close()


def test_a_torn_record_that_cannot_be_cut_off_hides_nothing(
    tier: SsdTier, disk: FaultyDisk, clock: Clock, tmp_path: Path
) -> None:
    put(tier, "a", seed=1)
    # The first call writes a part of the record, the next one fails, and so does the repair.
    disk.max_step_bytes, disk.num_good_writes = 2000, 1
    disk.errors["truncate"] = errno.EIO
    put(tier, "b", seed=2)
    disk.max_step_bytes = disk.num_good_writes = None
    disk.errors.clear()
    assert tier.stats().used_bytes == disk_bytes(tmp_path)
    clock.now_s += FIRST_PAUSE_S
    put(tier, "c", seed=3)
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "a", seed=1)
    assert not has(tier, "b")
    assert has(tier, "c", seed=3)
    tier.close()


def test_torn_tails_are_cut_off(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    whole = disk_bytes(tmp_path)
    put(tier, "b", seed=2)
    tier.close()
    (path,) = tmp_path.rglob("*.log")
    data = path.read_bytes()
    for num_bytes in (len(data) - 4096, whole + 4096, whole + 10):
        path.write_bytes(data[:num_bytes])
        tier = open_tier(tmp_path)
        assert has(tier, "a", seed=1)
        assert not has(tier, "b")
        assert tier.stats().used_bytes == whole == disk_bytes(tmp_path)
        tier.close()


def test_blocks_torn_behind_a_good_header_are_caught_when_read(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    tier.close()
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[-4096:] = bytes(4096)
    path.write_bytes(data)
    tier = open_tier(tmp_path)
    (run,) = match(tier, "a")
    with pytest.raises(TierReadError, match="wrong checksum"):
        fetch(tier, run)
    tier.release(run)
    assert not has(tier, "a")
    tier.close()


def test_a_copy_of_a_log_is_removed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    tier.close()
    (path,) = tmp_path.rglob("*.log")
    path.with_name("00000007.log").write_bytes(path.read_bytes())
    path.with_name("00000009.tmp").write_bytes(b"half")
    tier = open_tier(tmp_path)
    assert has(tier, "a", seed=1)
    assert [left.name for left in tmp_path.rglob("*.*")] == [path.name]
    tier.close()


@pytest.mark.parametrize("method", ["pwritev", "fdatasync"])
def test_a_clear_that_cannot_be_noted_removes_all(
    tier: SsdTier, disk: FaultyDisk, tmp_path: Path, method: str
) -> None:
    put(tier, "a", model=make_model("old"))
    put(tier, "a", model=make_model("other"))
    disk.errors[method] = errno.EIO
    tier.clear(make_model("old"))
    disk.errors.clear()
    assert disk_bytes(tmp_path) == tier.stats().used_bytes == 0
    assert not has(tier, "a", model=make_model("other"))


@pytest.mark.parametrize("is_writable_at_the_end", [False, True])
def test_a_clear_that_leaves_traces_ends_the_use_of_the_disk(
    tmp_path: Path,
    disk: FaultyDisk,
    clock: Clock,
    caplog: pytest.LogCaptureFixture,
    is_writable_at_the_end: bool,
) -> None:
    old, other = make_model("old"), make_model("other")
    tier = open_tier(tmp_path, disk, clock=clock)
    put(tier, "a", model=old, seed=1)
    put(tier, "a", model=other, seed=2)
    disk.errors.update(pwritev=errno.EROFS, unlink=errno.EROFS)
    tier.clear(old)
    tier.clear(old)
    tier.clear(make_model("third"))
    (message,) = [record.message for record in caplog.records if record.levelno == logging.ERROR]
    assert f"remove {tmp_path / 'krul-v'}" in message
    clock.now_s += 100 * FIRST_PAUSE_S
    for model in (old, other):
        assert not put(tier, "b", model=model)
        assert not has(tier, "a", model=model)
        assert tier.holder_of(model, page_keys("a", 0, 2)[1]) is None
    assert (tier.stats().num_segments, tier.stats().is_suspended) == (0, True)
    if is_writable_at_the_end:
        disk.errors.clear()
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "a", model=other, seed=2)
    # On a disk that cannot be written, nothing keeps the promise; the log said so.
    assert has(tier, "a", model=old, seed=1) != is_writable_at_the_end
    tier.close()


def test_a_clear_does_not_wait_for_a_disk_that_hangs(
    tmp_path: Path, disk: FaultyDisk, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(segment_writes, "_CLEAR_TIMEOUT_S", 0.05)
    other = make_model("other")
    tier = open_tier(tmp_path, disk)
    put(tier, "a", seed=1)
    put(tier, "a", model=other, seed=2)
    with busy_writer(tier, disk):
        with caplog.at_level(logging.WARNING):
            tier.clear(make_model())
        assert len(caplog.records) == 1
        assert not has(tier, "a")
        assert has(tier, "a", model=other, seed=2)
        blocks = random_blocks(SIZES, 3)
        checksums = block_checksums(blocks)
        assert tier.put(make_manifest("later", 0, 2, SIZES), blocks, checksums, lambda: None)
    assert tier.flush(20)
    assert not has(tier, "busy"), "it was put before the clear, and written after it"
    assert has(tier, "later", seed=3)
    tier.close()
    tier = open_tier(tmp_path)
    assert not has(tier, "a")
    assert not has(tier, "busy")
    assert has(tier, "later", seed=3)
    assert has(tier, "a", model=other, seed=2)
    tier.close()


def test_what_is_put_during_a_clear_survives_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tier = open_tier(tmp_path)
    for number in range(5):
        put(tier, f"c{number}", seed=number)
    is_put = threading.Event()

    wake = tier._writes.queue.wake

    def put_once() -> None:
        if not is_put.is_set():
            # The clear has begun, and is not noted yet.
            is_put.set()
            assert put_manifest(tier, make_manifest("c4", 0, 2, SIZES), seed=9)
        wake()

    monkeypatch.setattr(tier._writes.queue, "wake", put_once)
    tier.clear()
    assert is_put.is_set()
    assert tier.flush(20)
    for _ in range(2):
        assert has(tier, "c4", seed=9)
        assert tier.stats().num_segments == 1
        tier.close()
        tier = open_tier(tmp_path)
    tier.close()


def test_a_disk_that_fails_at_the_start_suspends_the_tier(tmp_path: Path) -> None:
    disk = FaultyDisk()
    open_tier(tmp_path).close()
    disk.errors["pwritev"] = errno.EIO
    tier = open_tier(tmp_path, disk)
    assert tier.stats().is_suspended
    assert not put(tier, "a")
    tier.close()


def test_a_full_disk_that_still_reads(
    tier: SsdTier, disk: FaultyDisk, clock: Clock, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    old, other = make_model("old"), make_model("other")
    put(tier, "a", model=old, seed=1)
    put(tier, "a", model=other, seed=2)
    disk.is_full = True
    with caplog.at_level(logging.WARNING):
        put(tier, "b", model=other, seed=3)
        assert not put(tier, "b", model=other, seed=3)
    (record,) = caplog.records
    assert "file system full" in record.message
    assert has(tier, "a", model=other, seed=2)
    assert not tier.stats().is_suspended
    tier.clear(old)
    for _ in range(2):
        assert not has(tier, "a", model=old)
        assert has(tier, "a", model=other, seed=2)
        assert not has(tier, "b", model=other)
        tier.close()
        tier = open_tier(tmp_path, disk, clock=clock)
    disk.is_full = False
    clock.now_s += FIRST_PAUSE_S
    put(tier, "b", model=other, seed=3)
    assert has(tier, "b", model=other, seed=3)
    tier.close()


def test_a_full_disk_that_copies_on_write_gives_up_one_file_for_a_clear(
    disk: FaultyDisk, tmp_path: Path
) -> None:
    old, other = make_model("old"), make_model("other")
    tier = open_tier(tmp_path, disk)
    for number in range(6):
        # Two records to a file.
        put(tier, f"c{number}", sizes=(20_000, 99), model=old if number == 3 else other, seed=number)
    assert len(list(tmp_path.rglob("*.log"))) == 3
    disk.errors["pwritev"] = errno.ENOSPC
    remove = disk.unlink

    def unlink_makes_room(path: Path) -> None:
        remove(path)
        disk.errors.clear()

    disk.unlink = unlink_makes_room  # type: ignore[method-assign]
    tier.clear(old)
    tier.close()
    tier = open_tier(tmp_path)
    found = [has(tier, f"c{number}", model=other, seed=number) for number in (0, 1, 2, 4, 5)]
    assert found == [True, True, False, True, True], "only what shared the emptiest file"
    assert not has(tier, "c3", model=old)
    tier.close()


def test_a_disk_smaller_than_the_cap_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    disk.num_free_bytes = 1000
    with caplog.at_level(logging.WARNING):
        open_tier(tmp_path, disk).close()
    assert [record.message for record in caplog.records if "only 1000 left" in record.message]


def test_the_disk_is_measured_with_half_of_what_is_free_at_most(tmp_path: Path) -> None:
    disk = FaultyDisk()
    disk.num_free_bytes = 40_000
    remove = disk.unlink
    sizes: list[int] = []

    def note_size(path: Path) -> None:
        sizes.append(path.stat().st_size)
        remove(path)

    disk.unlink = note_size  # type: ignore[method-assign]
    open_tier(tmp_path, disk).close()
    assert sizes == [16384]


def test_done_is_called_once_whatever_happens(tier: SsdTier, disk: FaultyDisk) -> None:
    blocks = random_blocks(SIZES, 0)
    checksums = block_checksums(blocks)
    calls: list[int] = []
    disk.errors["pwritev"] = errno.EIO
    for number in range(3):
        manifest = make_manifest(f"c{number}", 0, 2, SIZES)
        if not tier.put(manifest, blocks, checksums, lambda number=number: calls.append(number)):
            calls.append(number)
    assert tier.flush(20)
    assert sorted(calls) == [0, 1, 2]


def test_an_unwritable_segment_is_skipped_for_its_size(tier: SsdTier) -> None:
    assert not put(tier, "a", sizes=(8 * FILE_BYTES, 1))
    manifest = make_manifest("a", 0, 2, (8 * FILE_BYTES, 1))
    assert not tier.can_hold(manifest)
    assert tier.stats().skipped_segments == {"too large": 1}
    assert tier.can_hold(make_manifest("a", 0, 2, SIZES))
    assert not tier.stats().is_suspended
