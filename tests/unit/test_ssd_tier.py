"""The SSD tier on a disk that works: finding, reading, forgetting, starting again."""

from __future__ import annotations

import dataclasses
import errno
import stat
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from krul_backend.errors import ConfigError, DaemonError
from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.common.record import no_checksums
from krul_backend.tiers.common.tier_health import FIRST_PAUSE_S
from krul_backend.tiers.ssd.segment_reads import _HEADER_NUM_BYTES
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import (
    SIZES,
    FaultyDisk,
    begin_stalled_fetch,
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
from tests.support.store_builders import Clock, make_manifest, make_model, page_keys, tokens_of


@pytest.fixture
def tier(tmp_path: Path) -> Iterator[SsdTier]:
    opened = open_tier(tmp_path)
    yield opened
    opened.close()


def test_what_was_put_is_found_with_its_bytes(tier: SsdTier) -> None:
    assert put(tier, "a", 0, 2, seed=1)
    assert put(tier, "a", 2, 5, seed=2)
    runs = match(tier, "a", 0, 5)
    assert [(run.first_page, run.end_page) for run in runs] == [(0, 2), (0, 3)]
    for run, seed in zip(runs, (1, 2), strict=True):
        right = random_blocks(SIZES, seed)
        assert run.segment.checksums == block_checksums(right)
        for block, expected in zip(fetch(tier, run), right, strict=True):
            np.testing.assert_array_equal(block, expected)
        tier.release(run)
    stats = tier.stats()
    assert (stats.num_segments, stats.num_pages, stats.stored_bytes) == (2, 5, 2 * sum(SIZES))
    assert (stats.written_segments, stats.read_segments) == (2, 2)


def test_pieces_that_cut_blocks_anywhere_give_the_same_bytes(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk, capacity_bytes=64 << 20, file_bytes=16 << 20)
    sizes = (5 << 20, 1, 0, 3 << 20)
    manifest = make_manifest("a", 0, 2, (5 << 20, 1, 1, 3 << 20))
    end = manifest.end_token
    manifest = dataclasses.replace(manifest, layer_num_bytes=sizes, layer_first_token=(0, 0, end, 0))
    assert put_manifest(tier, manifest, seed=3)
    assert tier.flush(20)
    assert has(tier, "a", seed=3, model=manifest.model)
    tier.close()


def test_only_the_missing_pages_are_missing(tier: SsdTier) -> None:
    put(tier, "a", 0, 2)
    put(tier, "a", 2, 4, seed=1)
    put(tier, "a", 4, 6)
    (lost,) = (each for each in tier.list_segments() if each.start_token == 8)
    tier._state.quarantine(lost.segment_id, "in a test")
    assert tier.find_missing(make_model(), page_keys("a", 0, 8)) == [range(2, 4), range(6, 8)]
    assert len(match(tier, "a", 0, 8)) == 1


def test_other_tokens_or_another_position_are_no_hit(tier: SsdTier) -> None:
    put(tier, "a", 0, 2)
    put(tier, "a", 2, 4)
    keys = page_keys("a", 2, 4)
    tokens = tokens_of(keys)
    assert tier.match(make_model(), keys, tokens, 4) == ()
    (run,) = tier.match(make_model(), keys, tokens, 8)
    assert run.end_page == 2
    tokens[5] += 1
    (run,) = tier.match(make_model(), keys, tokens, 8)
    assert run.end_page == 1


def test_a_segment_is_not_written_twice(tier: SsdTier) -> None:
    put(tier, "a")
    used_bytes = tier.stats().used_bytes
    done = threading.Event()
    blocks = random_blocks(SIZES, 0)
    checksums = block_checksums(blocks)
    assert tier.put(make_manifest("a", 0, 2, SIZES), blocks, checksums, done.set)
    assert tier.flush(20)
    assert done.is_set()
    assert tier.stats().used_bytes == used_bytes


def test_a_new_tier_finds_what_was_flushed(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(12):
        put(tier, f"c{number}", seed=number)
    before = tier.stats()
    tier.close()
    tier = open_tier(tmp_path)
    after = tier.stats()
    assert (after.num_segments, after.used_bytes) == (before.num_segments, before.used_bytes)
    assert all(has(tier, f"c{number}", seed=number) for number in range(12))
    # What is written after a start does not hide what was before.
    put(tier, "new", seed=5)
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "new", seed=5)
    assert has(tier, "c11", seed=11)
    tier.close()


def test_close_writes_what_is_queued(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    for number in range(5):
        put_manifest(tier, make_manifest(f"c{number}", 0, 2, SIZES), seed=number)
    tier.close()
    assert not put_manifest(tier, make_manifest("late", 0, 2, SIZES))
    assert match(tier, "c0") == ()
    tier = open_tier(tmp_path)
    assert all(has(tier, f"c{number}", seed=number) for number in range(5))
    tier.close()


def test_a_clear_outlives_the_process_and_frees_the_files(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", seed=1)
    put(tier, "b", seed=2)
    tier.clear()
    assert not has(tier, "a")
    assert tier.flush(20)
    assert disk_bytes(tmp_path) == tier.stats().used_bytes == 0
    put(tier, "b", seed=3)
    tier.close()
    tier = open_tier(tmp_path)
    assert not has(tier, "a")
    assert has(tier, "b", seed=3)
    tier.close()


def test_a_clear_of_one_model_spares_the_others(tmp_path: Path) -> None:
    old, other = make_model("old"), make_model("other")
    tier = open_tier(tmp_path)
    put(tier, "a", model=old, seed=1)
    put(tier, "a", model=other, seed=2)
    tier.clear(old)
    put(tier, "b", model=old, seed=3)
    for _ in range(2):
        assert not has(tier, "a", model=old)
        assert has(tier, "a", model=other, seed=2)
        assert has(tier, "b", model=old, seed=3)
        tier.close()
        tier = open_tier(tmp_path)
    tier.close()


def test_what_is_put_after_a_clear_and_a_restart_is_found_after_the_next(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", model=make_model("old"), seed=1)
    put(tier, "a", model=make_model("other"), seed=2)
    tier.clear(make_model("old"))
    for seed in (3, 4):
        tier.close()
        tier = open_tier(tmp_path)
        put(tier, f"b{seed}", model=make_model("old"), seed=seed)
    tier.close()
    tier = open_tier(tmp_path)
    assert not has(tier, "a", model=make_model("old"))
    assert has(tier, "a", model=make_model("other"), seed=2)
    assert all(has(tier, f"b{seed}", model=make_model("old"), seed=seed) for seed in (3, 4))
    tier.close()


def test_a_clear_holds_although_a_record_before_it_is_damaged(tmp_path: Path) -> None:
    old, other = make_model("old"), make_model("other")
    tier = open_tier(tmp_path)
    put(tier, "a", model=old)
    put(tier, "a", model=other)
    tier.clear(old)
    tier.close()
    (path,) = tmp_path.rglob("*.log")
    data = bytearray(path.read_bytes())
    data[data.rindex(b"KRULSEG1") + 70] ^= 1
    path.write_bytes(data)
    tier = open_tier(tmp_path)
    assert not has(tier, "a", model=old)
    assert not has(tier, "a", model=other)
    assert tier.stats().num_segments == 0
    tier.close()


def test_without_the_record_of_clears_nothing_is_found(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a")
    tier.close()
    (path,) = tmp_path.rglob("clears")
    path.write_bytes(path.read_bytes()[:20])
    tier = open_tier(tmp_path)
    assert tier.stats().num_segments == 0
    assert disk_bytes(tmp_path) == 0
    tier.close()


def test_one_good_copy_of_the_record_of_clears_is_enough(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a", model=make_model("old"))
    put(tier, "a", model=make_model("other"))
    tier.clear(make_model("old"))
    (path,) = tmp_path.rglob("clears")
    for damaged in (40, 40 + path.stat().st_size // 2):
        tier.close()
        data = bytearray(path.read_bytes())
        data[damaged] ^= 1
        path.write_bytes(data)
        tier = open_tier(tmp_path)
        assert not has(tier, "a", model=make_model("old"))
        assert has(tier, "a", model=make_model("other"))
        assert path.read_bytes() != data, "the damaged copy is written again"
    tier.close()


@pytest.mark.parametrize("num_good_writes", [0, 1])
def test_a_clear_that_was_cut_off_is_done_or_not(tmp_path: Path, num_good_writes: int) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk)
    put(tier, "a")
    disk.errors["unlink"] = errno.EIO
    disk.num_good_writes = num_good_writes
    tier.clear()
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "a") == (num_good_writes == 0)
    tier.close()


def test_more_models_are_cleared_than_can_be_noted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disk, clock = FaultyDisk(), Clock()
    tier = open_tier(tmp_path, disk, clock=clock)
    put(tier, "a", model=make_model("kept"))
    monkeypatch.setattr(disk, "fdatasync", lambda fd: None)
    num_models = 0
    while tier.stats().num_segments:
        tier.clear(make_model(f"m{num_models}"))
        num_models += 1
    # Then the oldest file went, and with it the need to remember.
    assert num_models > 1000
    monkeypatch.undo()
    clock.now_s += FIRST_PAUSE_S
    put(tier, "b", model=make_model("m1"), seed=2)
    tier.clear(make_model("m2"))
    tier.close()
    tier = open_tier(tmp_path)
    assert has(tier, "b", model=make_model("m1"), seed=2)
    tier.close()


def test_a_clear_drops_what_is_queued_and_stops_what_is_read(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk)
    put(tier, "a")
    (run,) = match(tier, "a")
    thread, errors = begin_stalled_fetch(tier, disk, run)
    with busy_writer(tier, disk):
        done = threading.Event()
        blocks = random_blocks(SIZES, 0)
        checksums = block_checksums(blocks)
        tier.put(make_manifest("queued", 0, 2, SIZES), blocks, checksums, done.set)
        clearing = threading.Thread(target=tier.clear)
        clearing.start()
    clearing.join(20)
    disk.gate.set()
    thread.join(20)
    assert len(errors) == 1
    assert tier.flush(20)
    assert done.is_set()
    tier.release(run)
    tier.close()


def test_a_directory_has_one_owner_who_is_named(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    with pytest.raises(DaemonError, match=r"in use by process \d+"):
        open_tier(tmp_path)
    tier.close()
    open_tier(tmp_path).close()


def test_files_are_private(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "a")
    (directory,) = tmp_path.iterdir()
    assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in directory.iterdir()} == {0o600}
    names = {path.name for path in directory.iterdir()}
    assert names == {"lock", "clears", "00000001.log", "index", "index-lock"}
    tier.close()


def encoded(manifest: SegmentManifest, kind: str) -> SegmentManifest:
    return dataclasses.replace(manifest, codec_params={"kind": kind})


def test_what_cannot_be_decoded_leaves_and_stays_away(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    old, other = (encoded(make_manifest("a", 0, 2, SIZES), kind) for kind in ("old", "other"))
    assert put_manifest(tier, old)
    assert put_manifest(tier, encoded(make_manifest("b", 0, 2, SIZES), "old"))
    assert tier.flush(20)
    tier.discard(other)
    assert has(tier, "a"), "it is encoded otherwise"
    tier.discard(old)
    assert tier.find_missing(old.model, old.page_keys) == [range(2)]
    assert has(tier, "b"), "it has other pages"
    assert tier.stats().corrupted_segments == 0
    # What is stored instead is what the next process finds, though both records are in the log.
    assert put_manifest(tier, other)
    assert tier.flush(20)
    tier.close()
    tier = open_tier(tmp_path)
    (run,) = match(tier, "a")
    assert run.segment.manifest.codec_params == {"kind": "other"}
    assert has(tier, "b")
    tier.release(run)
    tier.close()


def test_what_cannot_be_decoded_is_not_written_if_it_waits(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk)
    manifest = encoded(make_manifest("a", 0, 2, SIZES), "old")
    done: list[None] = []
    with busy_writer(tier, disk):
        assert tier.put(manifest, random_blocks(SIZES, 0), no_checksums(manifest), lambda: done.append(None))
        tier.discard(manifest)
        assert done == [None]
    assert tier.flush(20)
    assert not has(tier, "a")
    assert tier.stats().written_segments == 1, "the one that kept the writer busy"
    tier.close()


def test_the_queue_is_bounded(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk, max_queued_bytes=20_000)
    with busy_writer(tier, disk):
        taken = [put_manifest(tier, make_manifest(f"c{i}", 0, 2, SIZES)) for i in range(4)]
        assert not tier.flush(0.01)
        assert tier.stats().queued_segments == 3
    assert taken == [True, True, False, False]
    assert tier.flush(20)
    assert tier.stats().skipped_segments == {}, "they can be offered again"
    tier.close()


def test_the_queue_is_bounded_for_segments_without_bytes(tmp_path: Path) -> None:
    disk = FaultyDisk()
    tier = open_tier(tmp_path, disk, max_queued_bytes=20_000)
    with busy_writer(tier, disk):
        whole = [make_manifest(f"c{i}", 0, 2, SIZES) for i in range(4)]
        empty = [
            dataclasses.replace(
                manifest,
                codec_params={"": "x" * 9000},
                layer_first_token=(manifest.end_token,) * 2,
                layer_num_bytes=(0, 0),
            )
            for manifest in whole
        ]
        assert [put_manifest(tier, manifest) for manifest in empty] == [True, True, False, False]
        assert tier.stats().queued_bytes > 2 * 9000
    assert tier.flush(20)
    assert tier.stats().queued_bytes == 0
    tier.close()


def test_segments_are_listed_and_costs_are_measured(tier: SsdTier) -> None:
    put(tier, "a", 0, 2)
    put(tier, "a", 2, 5)
    _, info = tier.list_segments()
    assert (info.start_token, info.num_tokens, info.num_bytes, info.tiers) == (8, 12, sum(SIZES), ("ssd",))
    cost = tier.cost()
    assert cost.latency_s > 0
    assert 0 < cost.byte_s < 1e-5


def test_a_capacity_without_room_for_files_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="4 of them"):
        open_tier(tmp_path, capacity_bytes=100_000)


def test_a_header_that_is_longer_than_the_first_read_is_read_whole(tmp_path: Path) -> None:
    tier = open_tier(tmp_path)
    put(tier, "long", 0, 1000, seed=3)
    put(tier, "short", seed=4)
    tier.close()
    tier = open_tier(tmp_path)
    (run,) = match(tier, "long", 990, 1000)
    assert (run.first_page, run.end_page) == (990, 1000)
    assert run.segment.record.block_offsets[0] > 2 * _HEADER_NUM_BYTES
    assert all(map(np.array_equal, fetch(tier, run), random_blocks(SIZES, 3)))
    tier.release(run)
    assert has(tier, "short", seed=4)
    tier.close()
