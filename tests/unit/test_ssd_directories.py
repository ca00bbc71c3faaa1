"""An SSD tier on several disks: a directory on each, and one index."""

from __future__ import annotations

import logging
import os
import shutil
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import pytest

from krul_backend.errors import DaemonError
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.own_files import format_directory, one_per_disk, remove_index
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import FaultyDisk, disk_bytes, fetch, has, match, open_tier, put
from tests.support.store_builders import make_model

OLD, OTHER = make_model("old"), make_model("other")


@pytest.fixture
def disks(tmp_path: Path) -> list[Path]:
    return [tmp_path / name for name in ("first", "second", "third")]


def open_all(directories: Sequence[Path], disk: Disk | None = None) -> SsdTier:
    return open_tier(directories[0], disk, others=directories[1:])


def log_names(directory: Path) -> list[str]:
    return sorted(path.name for path in format_directory(directory).glob("*.log"))


def store(directories: Sequence[Path], numbers: range) -> None:
    """Segments, each in a group of its own: the even ones of ``OLD``."""
    tier = open_all(directories)
    for number in numbers:
        assert put(tier, f"c{number}", model=(OLD, OTHER)[number % 2], seed=number)
    tier.close()


def found_of(tier: SsdTier, numbers: range) -> list[int]:
    models = (OLD, OTHER)
    return [n for n in numbers if has(tier, f"c{n}", seed=n, model=models[n % 2])]


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 1, 0)], ids=["as before", "turned round"])
def test_groups_take_turns_and_a_restart_finds_all_of_them(disks: list[Path], order: tuple[int, ...]) -> None:
    store(disks, range(12))
    taken = [disk_bytes(each) for each in disks]
    assert max(taken) < 1.1 * min(taken), "a third of what was written lies on each"
    names = [name for each in disks for name in log_names(each)]
    assert len(names) == len(set(names)), "a number belongs to one file, wherever it lies"
    tier = open_all([disks[number] for number in order])
    assert found_of(tier, range(12)) == [*range(12)]
    used_bytes = tier.stats().used_bytes
    assert used_bytes == sum(taken)
    # What leaves gives its space back where it lies.
    tier.clear(OLD)
    assert tier.flush(20)
    assert found_of(tier, range(12)) == [*range(1, 12, 2)]
    assert sum(map(disk_bytes, disks)) == tier.stats().used_bytes < used_bytes
    tier.close()


def test_a_conversation_goes_on_from_one_disk_to_the_next(disks: list[Path]) -> None:
    tier = open_all(disks)
    for turn in range(6):
        assert put(tier, "c", 2 * turn, 2 * turn + 2, seed=turn)
    runs = match(tier, "c", 0, 12)
    assert [run.num_pages for run in runs] == [2] * 6
    assert len({run.segment.file.path.parent for run in runs}) == 3
    for run in runs:
        fetch(tier, run)
        tier.release(run)
    tier.close()


class OneByOne(FaultyDisk):
    """A read of a log of the first directory waits until one of another directory has begun."""

    def __init__(self, first: Path) -> None:
        super().__init__()
        self._first = first
        self._others = set[int]()
        self._mine = set[int]()
        self.is_met = threading.Event()
        self.is_on = False

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        if path.suffix == ".log":
            (self._mine if path.is_relative_to(self._first) else self._others).add(fd)
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        if self.is_on and fd in self._others:
            self.is_met.set()
        if self.is_on and fd in self._mine:
            assert self.is_met.wait(20), "nobody reads from the other disk meanwhile"
        return super().preadv(fd, buffers, offset)


def test_disks_are_read_at_the_same_time(disks: list[Path]) -> None:
    disk = OneByOne(disks[0])
    tier = open_all(disks[:2], disk)
    for number in range(2):
        assert put(tier, f"c{number}", seed=number)
    runs = [run for number in range(2) for run in match(tier, f"c{number}")]
    assert {run.segment.file.path.parent for run in runs} == {format_directory(each) for each in disks[:2]}
    runs.sort(key=lambda run: not run.segment.file.path.is_relative_to(disks[0]))
    disk.is_on = True
    with ThreadPoolExecutor(2) as threads:
        list(threads.map(partial(fetch, tier), runs))
    assert disk.is_met.is_set()
    for run in runs:
        tier.release(run)
    tier.close()


class FullDisk(Disk):
    """Says of one directory that its disk is full."""

    def __init__(self, full: Path) -> None:
        self.full = full

    def free_bytes(self, path: Path) -> int:
        return 0 if path == format_directory(self.full) else super().free_bytes(path)


@pytest.mark.parametrize("full", range(3))
def test_a_full_disk_is_passed_over(disks: list[Path], full: int) -> None:
    tier = open_all(disks, FullDisk(disks[full]))
    for number in range(6):
        assert put(tier, f"c{number}", seed=number)
    assert [len(log_names(each)) for each in disks] == [number != full for number in range(3)]
    assert all(has(tier, f"c{number}", seed=number) for number in range(6))
    tier.close()


def test_what_was_cleared_without_a_directory_does_not_come_back_with_it(
    disks: list[Path], caplog: pytest.LogCaptureFixture
) -> None:
    store(disks[:2], range(6))
    lost = log_names(disks[1])
    tier = open_all(disks[:1])
    there = found_of(tier, range(6))
    assert 0 < len(there) < 6
    tier.clear(OLD)
    # As long as the first directory alone is used, its numbers go on beyond those of the other one.
    for number in range(6, 9):
        assert put(tier, f"c{number}", model=OTHER, seed=number)
    assert not set(lost) & set(log_names(disks[0]))
    tier.close()
    with caplog.at_level(logging.WARNING):
        tier = open_all(disks[:2])
    assert found_of(tier, range(6)) == [number for number in there if number % 2]
    assert log_names(disks[1]) == []
    assert f"removed {len(lost)} log files" in caplog.text
    tier.close()


def test_directories_of_two_daemons_become_one_tier_of_the_first(disks: list[Path]) -> None:
    store(disks[:1], range(4))
    store(disks[1:2], range(4, 8))
    assert set(log_names(disks[0])) & set(log_names(disks[1])), "the numbers are the same"
    tier = open_all(disks[:2])
    assert found_of(tier, range(8)) == [*range(4)]
    tier.close()
    store(disks[:2], range(8, 12))
    first = open_all(disks[:1])
    first.clear()
    first.close()
    # The second one's own notes do not say so. They are gone, and without notes nothing is trusted.
    assert log_names(disks[1])
    second = open_all(disks[1:2])
    assert found_of(second, range(12)) == []
    second.close()


def test_without_the_index_only_the_first_directory_is_read_again(disks: list[Path]) -> None:
    store(disks[:2], range(6))
    there = len(log_names(disks[0]))
    remove_index(Disk(), format_directory(disks[0]))
    tier = open_all(disks[:2])
    found = found_of(tier, range(6))
    assert 0 < len(found) < 6
    assert len(log_names(disks[0])) == there
    assert log_names(disks[1]) == []
    tier.close()


def test_files_of_others_stay_in_every_directory(disks: list[Path]) -> None:
    store(disks[:2], range(2))
    foreign = [format_directory(each) / name for each in disks[:2] for name in ("90000000.log", "notes")]
    for path in foreign:
        path.write_bytes(b"somebody's")
    tier = open_all(disks[:2])
    assert found_of(tier, range(2)) == [0, 1]
    tier.close()
    assert all(path.read_bytes() == b"somebody's" for path in foreign)


def test_a_directory_that_is_in_use_lets_go_of_the_others(disks: list[Path]) -> None:
    one = open_all(disks[1:2])
    with pytest.raises(DaemonError, match="second"):
        open_all(disks[:2])
    open_all(disks[:1]).close()
    one.close()
    open_all(disks[:2]).close()


def test_a_disk_counts_once_for_the_room_on_it(disks: list[Path]) -> None:
    assert len(one_per_disk(disks)) == 1
    memory = Path("/dev/shm")
    if memory.is_dir() and memory.stat().st_dev != disks[0].parent.stat().st_dev:
        assert len(one_per_disk([*disks, memory])) == 2


def test_a_removed_directory_is_like_an_empty_one(disks: list[Path]) -> None:
    store(disks[:2], range(6))
    shutil.rmtree(disks[1])
    tier = open_all(disks[:2])
    found = found_of(tier, range(6))
    assert 0 < len(found) < 6
    assert put(tier, "new", seed=9)
    assert put(tier, "newer", seed=10)
    assert has(tier, "new", seed=9)
    assert has(tier, "newer", seed=10)
    assert os.listdir(format_directory(disks[1]))
    tier.close()
