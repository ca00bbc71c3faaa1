"""The SSD tier's space: the cap, eviction, holes, and a model of it all."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.interface import Checksums, block_checksums
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.tier_health import FIRST_PAUSE_S
from krul_backend.tiers.ssd import room
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import (
    CAPACITY_BYTES,
    FILE_BYTES,
    FaultyDisk,
    begin_stalled_fetch,
    busy_writer,
    data_ranges,
    disk_bytes,
    has,
    match,
    open_tier,
    put,
    put_manifest,
    random_blocks,
)
from tests.support.store_builders import Clock, make_manifest, make_model, page_keys, read_tail

SIZES = (9000, 5000)
RECORD_BYTES = 16384
BLOCK_BYTES = 4096


def assert_accounted(tier: SsdTier, directory: Path) -> None:
    stats = tier.stats()
    assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
    assert stats.free_bytes >= 0
    assert disk_bytes(directory) == stats.used_bytes
    segments = tier.list_segments()
    assert stats.num_segments == len(segments)
    assert stats.stored_bytes == sum(info.num_bytes for info in segments)


def test_the_cap_holds_and_the_newest_stay(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(60):
        assert put(tier, f"c{number}", sizes=SIZES, seed=number)
        assert_accounted(tier, tmp_path)
    stats = tier.stats()
    assert stats.written_segments == 60
    assert stats.skipped_segments == {}
    assert stats.evicted_segments == 60 - stats.num_segments
    assert not has(tier, "c0")
    newest = range(60 - stats.num_segments, 60)
    assert all(has(tier, f"c{number}", seed=number) for number in newest)
    # All of the cap but the files' headers, and less than a record.
    num_files = len(list(tmp_path.rglob("*.log")))
    assert stats.num_segments == (CAPACITY_BYTES - num_files * BLOCK_BYTES) // RECORD_BYTES
    tier.close()


def test_what_waits_together_keeps_what_it_continues(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk)
    number = 0
    while tier.stats().free_bytes >= RECORD_BYTES:
        assert put(tier, f"c{number}", sizes=SIZES)
        number += 1
    before = tier.stats().evicted_segments
    with busy_writer(tier, disk):
        # Room for these is made at once, and what the last one continues was used longest ago.
        for name in ("x", "y", "z"):
            assert put_manifest(tier, make_manifest(name, 0, 2, SIZES))
        assert put_manifest(tier, make_manifest("c0", 2, 4, SIZES))
    assert tier.flush(20)
    assert tier.stats().skipped_segments == {}
    assert tier.find_missing(make_model(), page_keys("c0", 0, 4)) == []
    assert tier.stats().evicted_segments >= before + 4
    assert_accounted(tier, tmp_path)
    tier.close()


def test_a_conversations_end_leaves_before_its_beginning(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for first in (0, 2, 4):
        put(tier, "a", first, first + 2, sizes=SIZES)
    seen = []
    for number in range(60):
        put(tier, f"c{number}", sizes=SIZES)
        here = [not tier.find_missing(make_model(), page_keys("a", first, first + 2)) for first in (0, 2, 4)]
        # No part without all that come before it.
        assert here == sorted(here, reverse=True)
        if here not in seen:
            seen.append(here)
    assert seen[0] == [True, True, True]
    assert seen[-1] == [False, False, False]
    tier.close()


def put_some_held(tier: SsdTier) -> dict[str, PageRun[Any]]:
    """Sixteen segments, three to a file, the first in each file held: files are never all dead."""
    held = {}
    for number in range(16):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        if number % 3 == 0:
            (held[f"c{number}"],) = match(tier, f"c{number}")
    return held


def test_what_is_held_stays_between_holes(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    held = put_some_held(tier)
    first = held["c0"].segment.file.path
    for number in range(16, 96):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    assert data_ranges(first) == [(0, BLOCK_BYTES + RECORD_BYTES)], "its header and the one that is held"
    assert all(has(tier, name, seed=int(name[1:])) for name in held)
    for run in held.values():
        tier.release(run)
    for number in range(96, 176):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    assert not any(has(tier, name) for name in held)
    assert not first.exists()
    assert_accounted(tier, tmp_path)
    tier.close()


def test_holes_spare_what_is_used(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(120):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        # Every third of the first ones is used again and again: they lie in files with much that is dead.
        for used in range(0, min(number + 1, 15), 3):
            assert has(tier, f"c{used}", seed=used)
    tier.close()
    tier = open_tier(tmp_path)
    for used in range(0, 15, 3):
        assert has(tier, f"c{used}", seed=used)
    assert_accounted(tier, tmp_path)
    tier.close()


def test_when_everything_is_held_nothing_is_written(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    runs = []
    for number in range(40):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        runs += match(tier, f"c{number}")
    assert tier.stats().skipped_segments == {"no room": 40 - tier.stats().num_segments}
    assert_accounted(tier, tmp_path)
    for run in runs:
        tier.release(run)
    assert put(tier, "more", sizes=SIZES, seed=3)
    assert has(tier, "more", seed=3)
    tier.close()


def test_a_segment_larger_than_a_file_has_one_of_its_own(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    sizes = (2 * FILE_BYTES, 3 * FILE_BYTES)
    put(tier, "small", sizes=SIZES, seed=1)
    put(tier, "large", sizes=sizes, seed=2)
    assert has(tier, "small", seed=1)
    assert has(tier, "large", seed=2)
    put(tier, "larger", sizes=sizes, seed=3)
    assert not has(tier, "large")
    assert has(tier, "larger", seed=3)
    assert_accounted(tier, tmp_path)
    tier.close()


def test_what_is_dropped_is_gone_after_a_flush(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(6):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    used_bytes = tier.stats().used_bytes
    (path, _) = sorted(tmp_path.rglob("*.log"))
    blocks_before = path.stat().st_blocks
    secret = random_blocks(SIZES, 1)[0].tobytes()
    assert secret in path.read_bytes()
    tier.discard(make_manifest("c1", 0, 2, SIZES))
    assert tier.flush(20)
    assert secret not in path.read_bytes()
    assert path.stat().st_blocks == blocks_before - RECORD_BYTES // 512
    assert tier.stats().used_bytes == used_bytes - RECORD_BYTES
    assert_accounted(tier, tmp_path)
    tier.close()
    tier = open_tier(tmp_path)
    assert [has(tier, f"c{number}", seed=number) for number in range(6)] == [
        number != 1 for number in range(6)
    ]
    assert_accounted(tier, tmp_path)
    tier.close()


def test_what_is_being_read_keeps_its_bytes_until_the_read_ends(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk)
    put(tier, "a", sizes=SIZES, seed=1)
    put(tier, "b", sizes=SIZES, seed=2)
    (run,) = match(tier, "a")
    thread, errors = begin_stalled_fetch(tier, disk, run)
    while not disk.num_stalled:
        time.sleep(1e-3)
    used_bytes = tier.stats().used_bytes
    tier.discard(run.segment.manifest)
    assert tier.flush(20)
    assert tier.stats().used_bytes == used_bytes == disk_bytes(tmp_path)
    disk.gate.set()
    thread.join(20)
    assert tier.flush(20)
    assert disk_bytes(tmp_path) == used_bytes - RECORD_BYTES
    # It was dropped; its bytes were right.
    assert len(errors) == 1
    assert tier.stats().corrupted_segments == 0
    tier.release(run)
    tier.close()


def without_holes(disk: FaultyDisk) -> FaultyDisk:
    disk.errors["punch"] = errno.EOPNOTSUPP
    return disk


def with_large_blocks(disk: FaultyDisk) -> FaultyDisk:
    """Records do not lie in whole blocks: nothing is punched, as it would free less than it says."""
    disk.num_block_bytes = 65536
    disk.errors["punch"] = errno.EIO
    return disk


@pytest.mark.parametrize("changed", [without_holes, with_large_blocks])
def test_where_there_are_no_holes_the_oldest_files_leave_whole(
    tmp_path: Path, changed: Callable[[FaultyDisk], FaultyDisk]
) -> None:
    tier = open_tier(tmp_path, changed(FaultyDisk()))
    held = put_some_held(tier)
    tier.release(held.pop("c0"))
    for number in range(16, 96):
        assert put(tier, f"c{number}", sizes=SIZES, seed=number)
        assert_accounted(tier, tmp_path)
    assert all(has(tier, name, seed=int(name[1:])) for name in held), "files with what is held stay"
    assert not has(tier, "c1")
    assert has(tier, "c95", seed=95)
    for run in held.values():
        tier.release(run)
    for number in range(96, 176):
        assert put(tier, f"c{number}", sizes=SIZES, seed=number)
    assert not any(has(tier, name) for name in held)
    tier.discard(make_manifest("c175", 0, 2, SIZES))
    assert tier.flush(20)
    assert not has(tier, "c175")
    assert_accounted(tier, tmp_path)
    before = {f"c{number}": has(tier, f"c{number}", seed=number) for number in range(175)}
    tier.close()
    tier = open_tier(tmp_path, changed(FaultyDisk()))
    assert {name: has(tier, name, seed=int(name[1:])) for name in before} == before
    assert_accounted(tier, tmp_path)
    tier.close()


def test_a_disk_that_fails_to_punch_gives_back_later(tmp_path: Path) -> None:
    disk, clock = FaultyDisk(), Clock()
    tier = open_tier(tmp_path, disk, clock=clock)
    put(tier, "a", sizes=SIZES)
    put(tier, "b", sizes=SIZES, seed=2)
    used_bytes = tier.stats().used_bytes
    disk.errors["punch"] = errno.EIO
    tier.discard(make_manifest("a", 0, 2, SIZES))
    assert tier.flush(20)
    assert tier.stats().is_suspended
    assert tier.stats().used_bytes == used_bytes
    disk.errors.clear()
    clock.now_s += FIRST_PAUSE_S
    put(tier, "c", sizes=SIZES, seed=3)
    assert tier.stats().used_bytes == used_bytes
    assert [has(tier, name, seed=seed) for name, seed in (("a", 0), ("b", 2), ("c", 3))] == [
        False,
        True,
        True,
    ]
    assert_accounted(tier, tmp_path)
    tier.close()


def test_the_number_of_files_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "MAX_FILES", 6)
    tier = open_tier(tmp_path)
    for number in range(90):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        # Every third of them is used again and again, so that most files keep something.
        used = [kept for kept in range(0, number, 3) if has(tier, f"c{kept}", seed=kept)]
        assert len(list(tmp_path.rglob("*.log"))) <= 6
    assert len(used) > 1
    assert has(tier, "c89", seed=89)
    assert_accounted(tier, tmp_path)
    tier.close()


def test_a_smaller_cap_is_met_at_the_start(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(25):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    tier.close()
    capacity_bytes = 4 * FILE_BYTES
    tier = open_tier(tmp_path, capacity_bytes=capacity_bytes)
    assert disk_bytes(tmp_path) <= capacity_bytes
    assert_accounted(tier, tmp_path)
    assert has(tier, "c24", seed=24)
    tier.close()


class SsdTierMachine(RuleBasedStateMachine):
    """Random work against a dictionary: what is found is what was put last since the last clear of its model.

    An evicted segment may be found again after a new start, with its own bytes.
    """

    models = (make_model("m0"), make_model("m1"))
    which_model = st.integers(0, 1)
    which_conversation = st.integers(0, 30)

    @initialize()
    def start(self) -> None:
        self.directory = tempfile.TemporaryDirectory()
        self.tier = open_tier(Path(self.directory.name))
        self.seeds: dict[tuple[int, int], set[int]] = {}
        self.next_seed = 1

    @rule(model=which_model, conversation=which_conversation, num_bytes=st.integers(1, 40_000))
    def put(self, model: int, conversation: int, num_bytes: int) -> None:
        was_here = has_any(self.tier, self.models[model], conversation)
        put(
            self.tier,
            f"c{conversation}",
            sizes=(num_bytes, 100),
            model=self.models[model],
            seed=self.next_seed,
        )
        if not was_here:
            self.seeds.setdefault((model, conversation), set()).add(self.next_seed)
        self.next_seed += 1

    @rule(model=which_model, conversation=which_conversation)
    def read(self, model: int, conversation: int) -> None:
        seeds = self.seeds.get((model, conversation), set())
        for run in match(self.tier, f"c{conversation}", model=self.models[model]):
            self.tier.release(run)
            assert any(
                is_of_seed(run.segment.checksums, run.segment.manifest.layer_num_bytes, seed)
                for seed in seeds
            )
            blocks = [np.zeros(size, dtype=np.uint8) for size in run.segment.manifest.layer_num_bytes]
            read_tail(self.tier, run, blocks, lambda layer: None)
            assert block_checksums(blocks) == run.segment.checksums

    @rule(model=which_model)
    def clear_model(self, model: int) -> None:
        self.tier.clear(self.models[model])
        # Its space is given back later.
        assert self.tier.flush(20)
        self.seeds = {key: seeds for key, seeds in self.seeds.items() if key[0] != model}

    @rule()
    def clear_all(self) -> None:
        self.tier.clear()
        assert self.tier.flush(20)
        self.seeds.clear()

    @rule(capacity_files=st.sampled_from([4, 8]))
    def reopen(self, capacity_files: int) -> None:
        num_found = self.tier.stats().num_segments
        self.tier.close()
        self.tier = open_tier(Path(self.directory.name), capacity_bytes=capacity_files * FILE_BYTES)
        if capacity_files == 8:
            assert self.tier.stats().num_segments >= num_found

    @invariant()
    def is_accounted(self) -> None:
        assert_accounted(self.tier, Path(self.directory.name))
        assert self.tier.stats().corrupted_segments == 0

    def teardown(self) -> None:
        self.tier.close()
        self.directory.cleanup()


def has_any(tier: SsdTier, model: ModelIdentity, conversation: int) -> bool:
    return not tier.find_missing(model, page_keys(f"c{conversation}", 0, 2))


def is_of_seed(checksums: Checksums, sizes: tuple[int, ...], seed: int) -> bool:
    return checksums == block_checksums(random_blocks(sizes, seed))


TestSsdTierAgainstADictionary = SsdTierMachine.TestCase
TestSsdTierAgainstADictionary.settings = settings(max_examples=15, stateful_step_count=30)
