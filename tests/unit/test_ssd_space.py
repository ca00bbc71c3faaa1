"""The SSD tier's space: the cap, eviction, compaction, and a model of it all."""

from __future__ import annotations

import errno
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.eviction import LruPolicy
from krul_backend.tiers.common.interface import Checksums, block_checksums
from krul_backend.tiers.common.lower_tier import FIRST_PAUSE_S
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.ssd import room
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.room import Room
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import (
    CAPACITY_BYTES,
    FILE_BYTES,
    FaultyDisk,
    disk_bytes,
    has,
    match,
    open_tier,
    put,
    random_blocks,
)
from tests.support.store_builders import Clock, make_model, page_keys, read_tail

SIZES = (9000, 5000)
RECORD_BYTES = 16384


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
    # Less compaction's file, what may be dead, and the ends of files that no record fits into.
    assert stats.num_segments * RECORD_BYTES >= (CAPACITY_BYTES - 2 * FILE_BYTES) * 2 // 3
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


def put_some_held(tier: SsdTier, num_held_of_three: int = 1) -> dict[str, PageRun[Any]]:
    """Sixteen segments, three to a file, of which some in each file are held: files are never all dead."""
    held = {}
    for number in range(16):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        if number % 3 < num_held_of_three:
            (held[f"c{number}"],) = match(tier, f"c{number}")
    return held


def test_what_is_held_is_not_evicted_and_moves_with_its_file(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    held = put_some_held(tier)
    first_file = held["c0"].segment.file
    for number in range(16, 96):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    assert held["c0"].segment.file is not first_file
    assert not first_file.path.exists()
    assert all(has(tier, name, seed=int(name[1:])) for name in held)
    for run in held.values():
        tier.release(run)
    for number in range(96, 176):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    assert not any(has(tier, name) for name in held)
    assert_accounted(tier, tmp_path)
    tier.close()


def test_compaction_keeps_what_is_used(tmp_path: Path) -> None:
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


class CountingPolicy(LruPolicy):
    """Counts how often its order is asked for, and how many segments of it are taken each time."""

    def __init__(self) -> None:
        super().__init__()
        self.num_taken: list[int] = []

    def victims(self) -> Iterator[int]:
        self.num_taken.append(0)
        for segment_id in super().victims():
            self.num_taken[-1] += 1
            yield segment_id


def test_the_order_of_eviction_is_asked_for_once_for_many_victims(tmp_path: Path) -> None:
    policy = CountingPolicy()
    tier = open_tier(tmp_path, policy=policy, capacity_bytes=32 * FILE_BYTES)
    number = 0
    # The first segment of each file is held: no file is dead until a fifth of the space is.
    runs: list[PageRun[Any]] = []
    while not policy.num_taken:
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        runs += match(tier, f"c{number}") if number % 3 == 0 else ()
        number += 1
    assert tier.stats().evicted_segments >= 31 * FILE_BYTES // 5 // RECORD_BYTES
    assert len(policy.num_taken) == 1
    for run in runs:
        tier.release(run)
    assert_accounted(tier, tmp_path)
    tier.close()


def test_no_more_victims_are_looked_for_than_are_evicted(tmp_path: Path) -> None:
    policy = CountingPolicy()
    tier = open_tier(tmp_path, policy=policy)
    for number in range(60):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    # A file of three records is dead with its last one.
    assert set(policy.num_taken) == {3}
    assert tier.stats().evicted_segments == sum(policy.num_taken)
    tier.close()


def test_many_evictions_let_others_have_the_lock(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = CountingPolicy()
    tier = open_tier(tmp_path, policy=policy)
    breaths: list[bool] = []
    monkeypatch.setattr(room, "MAX_EVICTED", 2)
    monkeypatch.setattr(time, "sleep", lambda seconds: breaths.append(tier._state.lock.locked()))
    held = put_some_held(tier)
    for number in range(16, 64):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    assert len(policy.num_taken) > 2
    assert breaths == [False] * len(policy.num_taken)
    for run in held.values():
        tier.release(run)
    assert_accounted(tier, tmp_path)
    tier.close()


def test_damaged_records_do_not_survive_compaction(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk)
    held = put_some_held(tier)
    disk.flipped_read_offset = 5000
    for number in range(16, 96):
        put(tier, f"c{number}", sizes=SIZES, seed=number)
    disk.flipped_read_offset = None
    stats = tier.stats()
    assert stats.corrupted_segments >= 1
    assert not stats.is_suspended
    assert not has(tier, "c0")
    assert_accounted(tier, tmp_path)
    for run in held.values():
        tier.release(run)
    tier.close()


def test_a_file_that_cannot_be_read_loses_its_segments_one_error_at_a_time(tmp_path: Path) -> None:
    disk = FaultyDisk()
    now_s = 0.0
    tier = open_tier(tmp_path, disk, clock=lambda: now_s)
    held = put_some_held(tier)
    disk.errors["preadv"] = errno.EIO
    number = 16
    while not tier.stats().failed_reads:
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        number += 1
    # The record that could not be read is gone, the others are not.
    assert sum(run.segment.is_indexed for run in held.values()) == len(held) - 1
    assert tier.stats().is_suspended
    disk.errors.clear()
    now_s = 1000.0
    for later in range(number, number + 40):
        assert put(tier, f"c{later}", sizes=SIZES, seed=later)
        assert has(tier, f"c{later}", seed=later)
    assert_accounted(tier, tmp_path)
    for run in held.values():
        tier.release(run)
    tier.close()


def test_a_pause_in_the_middle_of_compaction(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk = FaultyDisk()
    clock = Clock()
    tier = open_tier(tmp_path, disk, clock=clock)
    held = put_some_held(tier, num_held_of_three=2)
    compacted: list[Path] = []
    compact = Room._compact

    def count(room: Room, file: LogFile) -> bool:
        compacted.append(file.path)
        # As a compaction that never ends would hold up everybody else for good.
        assert len(compacted) < 100, "the same file again and again"
        return compact(room, file)

    monkeypatch.setattr(Room, "_compact", count)
    # The first read is one of compaction's: that one ends well, those after it find the tier left alone.
    disk.before_read = lambda: tier._state.suspension.failed("a read elsewhere", "injected")
    number = 16
    while not compacted:
        put(tier, f"c{number}", sizes=SIZES, seed=number)
        number += 1
    disk.before_read = lambda: None
    assert tier.stats().is_suspended
    assert len(compacted) == 1
    assert tier.stats().failed_writes == 0
    assert_accounted(tier, tmp_path)
    tier.clear(make_model("other"))
    clock.now_s += FIRST_PAUSE_S
    assert all(has(tier, name, seed=int(name[1:])) for name in held)
    for later in range(number, number + 40):
        assert put(tier, f"c{later}", sizes=SIZES, seed=later)
    assert compacted.count(compacted[0]) == 2, "what was left in it is moved after the pause"
    assert not compacted[0].exists()
    for run in held.values():
        tier.release(run)
    tier.close()
    tier = open_tier(tmp_path)
    assert all(has(tier, name, seed=int(name[1:])) for name in held)
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
        self.seeds = {key: seeds for key, seeds in self.seeds.items() if key[0] != model}

    @rule()
    def clear_all(self) -> None:
        self.tier.clear()
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
TestSsdTierAgainstADictionary.settings = settings(max_examples=15, stateful_step_count=30, deadline=None)
