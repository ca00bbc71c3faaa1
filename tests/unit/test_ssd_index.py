"""The index of the SSD tier beside its logs: kills between their writes, and what one of them has lost."""

from __future__ import annotations

import random
import shutil
import subprocess
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import lmdb
import pytest

from krul_backend.tiers.common.page_filter import DIGEST_BYTES
from krul_backend.tiers.common.tier_health import FIRST_PAUSE_S
from krul_backend.tiers.ssd.index import Entry, IndexChange, SegmentIndex, place_of
from krul_backend.tiers.ssd.own_files import INDEX_FILES, format_directory
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import FaultyDisk, disk_bytes, has, open_tier, put
from tests.support.store_builders import Clock, make_manifest, make_model

SIZES = (9000, 5000)
NUM_PUT = 65
OLD, OTHER = make_model("old"), make_model("other")
NUM_OF_OLD = 4


def copy(source: Path, target: Path) -> Path:
    """Copy files with their holes."""
    subprocess.run(["cp", "-a", str(source), str(target)], check=True)
    return target


def name_of(number: int) -> str:
    return f"c{number}"


def model_of(number: int) -> object:
    return OLD if number % 10 < NUM_OF_OLD else OTHER


@dataclass
class Left:
    """What a kill left behind: a copy of the directory, and what must not be found in it any more."""

    directory: Path
    at: str
    dropped: frozenset[int]
    is_cleared: bool


class Killer(FaultyDisk):
    """Copies the directory before and after each sync and hole of the logs, and each commit of the index."""

    def __init__(self, directory: Path, copies: Path) -> None:
        super().__init__()
        self._directory, self._copies = directory, copies
        self.left: list[Left] = []
        self.dropped: set[int] = set()
        self.is_cleared = False
        self.is_copying = False

    def kill(self, at: str) -> None:
        if self.is_copying:
            target = copy(self._directory, self._copies / str(len(self.left)))
            self.left.append(Left(target, at, frozenset(self.dropped), self.is_cleared))

    def fdatasync(self, fd: int) -> None:
        self.kill("before a sync")
        super().fdatasync(fd)
        self.kill("after a sync")

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        self.kill("before a hole")
        super().punch(fd, offset, num_bytes)
        self.kill("after a hole")

    def watch(self, patch: pytest.MonkeyPatch) -> None:
        changing = SegmentIndex.changing

        @contextmanager
        def watched(index: SegmentIndex) -> Iterator[IndexChange]:
            with changing(index) as change:
                yield change
                self.kill("before a commit of the index")
            self.kill("after a commit of the index")

        patch.setattr(SegmentIndex, "changing", watched)
        # So that pages come into their table soon.
        patch.setattr("krul_backend.tiers.ssd.index._NUM_PARTS", 4)


@pytest.fixture(scope="module")
def left(tmp_path_factory: pytest.TempPathFactory) -> list[Left]:
    """All that kills could leave of a tier that evicts, drops and clears."""
    directory, copies = tmp_path_factory.mktemp("tier"), tmp_path_factory.mktemp("left")
    disk = Killer(directory, copies)
    with pytest.MonkeyPatch.context() as patch:
        disk.watch(patch)
        tier = open_tier(directory, disk)
        for number in range(NUM_PUT):
            # A copy of each would be too much.
            disk.is_copying = number % 8 == 7
            assert put(tier, name_of(number), sizes=SIZES, model=model_of(number), seed=number)
        disk.is_copying = True
        for number in (NUM_PUT - 7, NUM_PUT - 9):
            tier.discard(make_manifest(name_of(number), 0, 2, SIZES, model_of(number)))
            assert tier.flush(20)
            disk.dropped.add(number)
        tier.clear(OLD)
        disk.is_cleared = True
        assert put(tier, name_of(NUM_PUT), sizes=SIZES, model=OTHER, seed=NUM_PUT)
        disk.is_copying = False
        tier.close()
    assert len({each.at for each in disk.left}) == 6
    return disk.left


def found_in(tier: SsdTier) -> set[int]:
    """Which segments are found; each of them must have its bytes."""
    return {
        number
        for number in range(NUM_PUT + 1)
        if has(tier, name_of(number), seed=number, model=model_of(number))
    }


def test_after_a_kill_between_two_writes_nothing_is_lost_twice(left: list[Left], tmp_path: Path) -> None:
    for number, each in enumerate([*random.Random(0).sample(left, 40), *left[-10:]]):
        directory = copy(each.directory, tmp_path / str(number))
        tier = open_tier(directory)
        found = found_in(tier)
        assert len(found) > 4, each.at
        assert found.isdisjoint(each.dropped), each.at
        if each.is_cleared:
            assert all(model_of(number) is not OLD for number in found), each.at
        stats = tier.stats()
        assert stats.num_segments == len(found), each.at
        # Nothing takes space that is neither found nor given back.
        assert stats.used_bytes == disk_bytes(directory), each.at
        assert stats.corrupted_segments == 0, each.at
        tier.close()


def test_logs_and_an_index_of_other_moments_give_right_bytes_or_misses(
    left: list[Left], tmp_path: Path
) -> None:
    draw = random.Random(0)
    for number in range(40):
        logs, index = draw.choice(left), draw.choice(left)
        directory = copy(logs.directory, tmp_path / str(number))
        for name in INDEX_FILES:
            shutil.copy(format_directory(index.directory) / name, format_directory(directory) / name)
        tier = open_tier(directory)
        found = found_in(tier)
        # What is a hole in the logs is a miss, whatever the index says.
        assert found.isdisjoint(logs.dropped & index.dropped)
        assert put(tier, "new", sizes=SIZES, seed=7)
        assert has(tier, "new", seed=7), (tier.stats(), logs.at, index.at)
        tier.close()


def test_the_index_says_what_was_put_into_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krul_backend.tiers.ssd.index._NUM_PARTS", 16)
    draw = random.Random(0)
    digests = [draw.randbytes(DIGEST_BYTES) for _ in range(200)]
    record = Entry(4096, 100, 0, 0, 16, 1, 1, 10.0, 0.0, bytes(16), bytes(DIGEST_BYTES), b"")
    index, held, records = SegmentIndex(tmp_path, 1 << 20), dict[bytes, int](), dict[int, list[bytes]]()
    for step in range(1, 300):
        pages = draw.sample(digests, draw.randint(1, 6))
        gone = draw.sample(sorted(records), min(len(records), draw.choice((0, 0, 1, 3))))
        is_failing = draw.random() < 0.1
        before = held, records
        with suppress(InterruptedError), index.changing() as change:
            if draw.random() < 0.03:
                change.empty()
                held, records, gone = {}, {}, []
            num_new = change.add(
                place_of(1, step * 4096),
                record._replace(used_at=step, pages=b"".join(pages)),
                lambda place: True,
            )
            assert num_new == len(set(pages) - held.keys())
            num_held = [change.remove(place)[1] for place in gone]
            assert num_held == [list(held.values()).count(place) for place in gone]
            if is_failing:
                raise InterruptedError
        if is_failing:
            held, records = before
        else:
            if num_new:
                records[place_of(1, step * 4096)] = pages
                held = {**dict.fromkeys(pages, place_of(1, step * 4096)), **held}
            held = {page: place for page, place in held.items() if place not in gone}
            records = {place: pages for place, pages in records.items() if place not in gone}
        if draw.random() < 0.2:
            index.close()
            index = SegmentIndex(tmp_path, 1 << 20)
        assert index.pages(digests) == [held.get(digest) for digest in digests]
        assert {place for place, _ in index.records()} == records.keys()
        assert index.sample(draw, 8) <= records.keys()
        assert bool(index.sample(draw, 8)) == bool(records)
    for _ in range(16):
        with index.changing():
            pass
    with index._env.begin() as txn:
        # All have come to where they stay, and what is kept of changes has a bound.
        assert txn.stat(index._pages)["entries"] == len(held)
        assert txn.stat(index._recent)["entries"] == 16
    index.close()


def cut_off(index: Path) -> None:
    index.write_bytes(index.read_bytes()[:5000])


def overwrite(index: Path) -> None:
    index.write_bytes(b"somebody's" * 10_000)


@pytest.mark.parametrize("damage", [Path.unlink, cut_off, overwrite])
def test_an_index_that_is_missing_or_damaged_is_made_again(
    tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    tier = open_tier(tmp_path)
    for number in range(NUM_PUT):
        put(tier, name_of(number), sizes=SIZES, model=model_of(number), seed=number)
    before, used_bytes = found_in(tier), tier.stats().used_bytes
    tier.close()
    damage(format_directory(tmp_path) / "index")
    tier = open_tier(tmp_path)
    assert found_in(tier) == before
    assert tier.stats().used_bytes == used_bytes
    tier.close()


def test_the_index_of_another_directory_is_made_again(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    for name in ("one", "other"):
        tier = open_tier(tmp_path / name)
        put(tier, name, seed=1)
        tier.close()
    for name in INDEX_FILES:
        shutil.copy(format_directory(tmp_path / "other") / name, format_directory(tmp_path / "one") / name)
    tier = open_tier(tmp_path / "one")
    assert "is made again: 00000001.log is not the file that was indexed" in caplog.text
    assert has(tier, "one", seed=1)
    assert not has(tier, "other")
    tier.close()


def test_a_start_reads_the_headers_of_files_alone(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(20):
        put(tier, name_of(number), sizes=SIZES, seed=number)
    tier.close()
    num_files = len(list(tmp_path.rglob("*.log")))
    disk = FaultyDisk()
    # So that what reading costs is not measured.
    disk.num_free_bytes = 0
    tier = open_tier(tmp_path, disk)
    assert tier.stats().num_segments == 20
    assert disk.num_bytes_read <= num_files * 4096 + (128 << 10)
    tier.close()


def test_the_order_of_uses_outlives_the_process(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(20):
        put(tier, name_of(number), sizes=SIZES, seed=number)
    assert has(tier, "c0", seed=0)
    put(tier, "c20", sizes=SIZES, seed=20)
    tier.close()
    tier = open_tier(tmp_path)
    for number in range(21, 45):
        put(tier, name_of(number), sizes=SIZES, seed=number)
        if not has(tier, "c1", seed=1):
            break
    assert has(tier, "c0", seed=0), "it was used after c1"
    tier.close()


def test_an_index_that_turns_out_to_be_damaged_is_made_again_by_the_next_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)

    def fail(*_: object) -> None:
        raise lmdb.CorruptedError("injected")

    with monkeypatch.context() as damaged:
        damaged.setattr(SegmentIndex, "pages", fail)
        assert not has(tier, "a")
        manifest = make_manifest("a", 0, 2, SIZES)
        tier.discard(manifest)
        assert not tier.is_needed(manifest.model, manifest.page_keys[0])
    assert tier.stats().is_suspended
    tier.close()
    assert not (format_directory(tmp_path) / "index").exists()
    tier = open_tier(tmp_path)
    assert has(tier, "a", seed=1)
    tier.close()


@pytest.mark.parametrize("error", [lmdb.MapFullError("injected"), lmdb.DiskError("injected")])
def test_what_the_index_could_not_take_is_found_after_its_next_commit(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: lmdb.Error
) -> None:
    clock = Clock()
    tier = open_tier(tmp_path, clock=clock)
    put(tier, "a", seed=1)

    @contextmanager
    def fail(index: SegmentIndex) -> Iterator[IndexChange]:
        raise error
        yield

    with monkeypatch.context() as failing:
        failing.setattr(SegmentIndex, "changing", fail)
        put(tier, "b", seed=2)
    stats = tier.stats()
    assert (stats.failed_writes, stats.is_suspended) == (1, isinstance(error, lmdb.DiskError))
    clock.now_s += FIRST_PAUSE_S
    assert not has(tier, "b")
    put(tier, "c", seed=3)
    for _ in range(2):
        assert has(tier, "a", seed=1)
        assert has(tier, "b", seed=2)
        assert has(tier, "c", seed=3)
        assert tier.stats().used_bytes == disk_bytes(tmp_path)
        tier.close()
        tier = open_tier(tmp_path)
    tier.close()
