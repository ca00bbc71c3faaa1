"""The SSD tier on a disk that fails: a miss or a TierReadError, never wrong bytes, never an exception."""

from __future__ import annotations

import errno
import logging
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from ssd_builders import (
    FILE_BYTES,
    SIZES,
    FaultyDisk,
    disk_bytes,
    fetch,
    has,
    match,
    open_tier,
    put,
    random_blocks,
)
from store_builders import Clock, make_manifest, make_model, page_keys

from krul_backend.errors import DaemonError, TierReadError
from krul_backend.store.hashing import block_checksum
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from krul_backend.tiers.ssd.suspension import FIRST_PAUSE_S


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def tier(tmp_path: Path, disk: FaultyDisk, clock: Clock) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path, disk, clock=clock, read_timeout_s=0.2)
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
        tier.fetch(run, blocks, landed.append)
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
    damaged_id = next(info.segment_id for info in tier.list_segments() if info.segment_id == 2)
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
        tier.fetch(run, blocks, lambda layer: None)
    stats = tier.stats()
    assert (stats.slow_reads, stats.is_suspended) == (1, True)
    assert match(tier, "a") == ()
    disk.gate.set()
    # Ends when the stuck read has ended.
    tier.close()
    assert disk.num_stalled == 1
    assert all((block == 0xAA).all() for block in blocks)


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
    assert tier.stats().used_bytes == 0


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
    assert (stats.failed_writes, stats.skipped_segments, stats.is_suspended) == (1, 1, True)
    assert stats.used_bytes == disk_bytes(tmp_path)
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


def test_a_log_of_another_file_is_dropped(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    tier.close()
    (path,) = tmp_path.rglob("*.log")
    path.with_name("00000007.log").write_bytes(path.read_bytes())
    path.with_name("00000008.log").write_bytes(b"")
    path.with_name("00000009.tmp").write_bytes(b"half")
    tier = open_tier(tmp_path)
    assert has(tier, "a", seed=1)
    assert [left.name for left in tmp_path.rglob("*.*")] == [path.name]
    tier.close()


@pytest.mark.parametrize("method", ["pwritev", "fdatasync", "rename"])
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


def test_a_clear_that_leaves_traces_says_so(tier: SsdTier, disk: FaultyDisk) -> None:
    put(tier, "a")
    disk.errors.update(rename=errno.EROFS, unlink=errno.EROFS)
    with pytest.raises(DaemonError, match="remove its directory"):
        tier.clear()
    assert tier.stats().num_segments == 0


def test_a_disk_that_fails_at_the_start_suspends_the_tier(tmp_path: Path) -> None:
    disk = FaultyDisk()
    open_tier(tmp_path).close()
    disk.errors["pwritev"] = errno.ENOSPC
    tier = open_tier(tmp_path, disk)
    assert tier.stats().is_suspended
    assert not put(tier, "a")
    tier.close()


def test_a_disk_smaller_than_the_cap_is_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = FaultyDisk()
    disk.num_free_bytes = 1000
    with caplog.at_level(logging.WARNING):
        open_tier(tmp_path, disk).close()
    assert [record.message for record in caplog.records if "only 1000 left" in record.message]


def test_done_is_called_once_whatever_happens(tier: SsdTier, disk: FaultyDisk) -> None:
    blocks = random_blocks(SIZES, 0)
    checksums = [block_checksum(block) for block in blocks]
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
    assert tier.stats().skipped_segments == 1
    assert not tier.stats().is_suspended
