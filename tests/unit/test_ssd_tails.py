"""Ends of blocks from the SSD: what was asked for and hardly more, layer by layer, each range checked."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import RecordError, TierReadError
from krul_backend.planner.interface import TierCost
from krul_backend.segment import SegmentManifest, tail_num_bytes
from krul_backend.tiers.common.lower_tier import TailRead
from krul_backend.tiers.common.tier_health import MeasuredCost
from krul_backend.tiers.ssd import segment_reads, ssd_tier
from krul_backend.tiers.ssd.reader import PieceReader
from krul_backend.tiers.ssd.segment_reads import BusyRate
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.ssd_builders import FaultyDisk, match, open_tier, put_manifest, random_blocks
from tests.support.store_builders import Clock, make_manifest, make_model

KIB, MIB = 1 << 10, 1 << 20

Sizes = tuple[int, ...]


@pytest.fixture
def disk() -> FaultyDisk:
    return FaultyDisk()


@contextlib.contextmanager
def tier_on(disk: FaultyDisk, directory: Path | None = None, file_bytes: int = 16 * MIB) -> Iterator[SsdTier]:
    with tempfile.TemporaryDirectory() as temporary:
        options = {"capacity_bytes": 4 * file_bytes, "file_bytes": file_bytes}
        tier = open_tier(directory or Path(temporary), disk, **options)
        yield tier
        tier.close()


def manifest_of(name: str, sizes: Sizes, range_bytes: int) -> SegmentManifest:
    """Two pages of a conversation; layers of no bytes hold no tokens."""
    manifest = make_manifest(name, 0, 2, tuple(max(1, size) for size in sizes), range_bytes=range_bytes)
    firsts = tuple(0 if size else manifest.end_token for size in sizes)
    return dataclasses.replace(manifest, layer_num_bytes=sizes, layer_first_token=firsts)


class Reads:
    """Reads of several segments' ends in one fetch: their blocks, and in which order layers landed.

    ``landed(number, layer)`` is called first for each layer that lands.
    """

    def __init__(
        self,
        tier: SsdTier,
        wanted: Sequence[Sizes],
        landed: Callable[[int, int], None] = lambda number, layer: None,
    ) -> None:
        self.order: list[tuple[int, int]] = []
        self.failures: dict[int, TierReadError] = {}
        self._tier = tier
        self._landed = landed
        self._runs = []
        self.reads: list[TailRead] = []
        for number, of_layers in enumerate(wanted):
            (run,) = match(tier, f"c{number}", model=make_model(num_layers=len(of_layers)))
            manifest = run.segment.manifest
            sizes = [
                tail_num_bytes(size, want, manifest.range_bytes)
                for size, want in zip(manifest.layer_num_bytes, of_layers, strict=True)
            ]
            blocks = [np.full(size, 0xAA, np.uint8) for size in sizes]
            self._runs.append(run)
            self.reads.append(TailRead(run, blocks, partial(self._land, number), partial(self._fail, number)))

    @property
    def num_planned_bytes(self) -> int:
        return sum(block.nbytes for read in self.reads for block in read.blocks)

    @property
    def num_ranges(self) -> int:
        return sum(block.nbytes > 0 for read in self.reads for block in read.blocks)

    def fetch(self) -> None:
        try:
            self._tier.fetch(self.reads)
        finally:
            for run in self._runs:
                self._tier.release(run)

    def assert_right(self, number: int) -> None:
        """All layers of a segment landed, in order, and their blocks are the ends of what was put."""
        read = self.reads[number]
        assert [layer for each, layer in self.order if each == number] == list(range(len(read.blocks)))
        whole = random_blocks(read.run.segment.manifest.layer_num_bytes, number)
        for block, right in zip(read.blocks, whole, strict=True):
            np.testing.assert_array_equal(block, right[right.nbytes - block.nbytes :])

    def _land(self, number: int, layer: int) -> None:
        self._landed(number, layer)
        assert number not in self.failures, "nothing lands after a failure"
        self.order.append((number, layer))

    def _fail(self, number: int, error: TierReadError) -> None:
        assert number not in self.failures
        self.failures[number] = error


def put_all(tier: SsdTier, segments: Sequence[Sizes], range_bytes: int) -> None:
    """Segment ``c0``, ``c1``, ...; the bytes of each follow from its number."""
    for number, sizes in enumerate(segments):
        assert put_manifest(tier, manifest_of(f"c{number}", sizes, range_bytes), seed=number)
    assert tier.flush(20)


segments_and_tails = st.integers(1, 4).flatmap(
    lambda num_layers: st.lists(
        st.tuples(
            st.tuples(*[st.integers(0, 40_000) | st.just(0)] * num_layers),
            st.tuples(*[st.integers(0, 40_000) | st.just(0)] * num_layers),
        ),
        min_size=1,
        max_size=4,
    )
)


@settings(max_examples=60)
@given(
    segments=segments_and_tails,
    range_bytes=st.sampled_from([1 << 20, 16 * KIB, 4096, 1000, 97]),
    piece_num_bytes=st.sampled_from([4 * KIB, 8 * KIB, 64 * KIB, 1 * MIB]),
    chunk_num_bytes=st.sampled_from([1, 20_000, 1 * MIB]),
)
def test_any_ends_of_any_segments_are_read_exactly(
    segments: list[tuple[Sizes, Sizes]], range_bytes: int, piece_num_bytes: int, chunk_num_bytes: int
) -> None:
    """Of several segments at once, in pieces of any size; and little more than these ends is read."""
    disk = FaultyDisk()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssd_tier, "PieceReader", partial(PieceReader, piece_num_bytes=piece_num_bytes))
        patch.setattr(segment_reads, "_CHUNK_NUM_BYTES", chunk_num_bytes)
        with tier_on(disk, file_bytes=MIB) as tier:
            put_all(tier, [sizes for sizes, _ in segments], range_bytes)
            reads = Reads(tier, [wanted for _, wanted in segments])
            before = disk.num_bytes_read
            reads.fetch()
            for number in range(len(segments)):
                reads.assert_right(number)
            num_read = disk.num_bytes_read - before
            assert reads.num_planned_bytes <= num_read
            assert num_read <= 1.02 * reads.num_planned_bytes + 8 * KIB * reads.num_ranges
            assert (num_read == 0) == (reads.num_planned_bytes == 0)
            stats = tier.stats()
            assert (stats.read_segments, stats.read_bytes) == (len(segments), num_read)
            assert (stats.corrupted_segments, stats.is_suspended) == (0, False)


@pytest.mark.parametrize("share", [0.0, 0.01, 0.25, 0.5, 1.0])
def test_only_the_ranges_that_are_needed_are_read(disk: FaultyDisk, share: float) -> None:
    """Of segments as large as those of a conversation, with the ranges that they have by default."""
    sizes = (3 * MIB + 64 * KIB, 2 * MIB, 2 * MIB + 100)
    with tier_on(disk) as tier:
        put_all(tier, [sizes] * 3, 0)
        reads = Reads(tier, [tuple(int(share * size) for size in sizes)] * 3)
        before = disk.num_bytes_read
        reads.fetch()
        num_read = disk.num_bytes_read - before
        assert num_read <= 1.02 * reads.num_planned_bytes + 8 * KIB * reads.num_ranges
        # Ranges of 64 KiB, one of which each layer needs in part.
        assert reads.num_planned_bytes <= 3 * (share * sum(sizes) + 3 * 64 * KIB)
        for number in range(3):
            reads.assert_right(number)


# Order


def layer_by_layer(num_segments: int, num_layers: int) -> list[tuple[int, int]]:
    return [(number, layer) for layer in range(num_layers) for number in range(num_segments)]


@pytest.mark.parametrize("num_segments", [2, 5])
def test_layers_beyond_the_chunk_size_land_in_the_order_of_layers(
    disk: FaultyDisk, num_segments: int
) -> None:
    """Layer 0 of all segments, then layer 1 of all: no load waits for what it does not need yet."""
    with tier_on(disk) as tier:
        sizes = (MIB + 5000, MIB + 1, MIB)
        put_all(tier, [sizes] * num_segments, 0)
        reads = Reads(tier, [sizes] * num_segments)
        reads.fetch()
        assert reads.order == layer_by_layer(num_segments, 3)


def test_ends_that_do_not_lie_side_by_side_land_in_the_order_of_layers(disk: FaultyDisk) -> None:
    """However small they are: nothing lies between them that one read would bring along."""
    with tier_on(disk) as tier:
        put_all(tier, [(40_000,) * 4] * 3, 1000)
        reads = Reads(tier, [(3000,) * 4] * 3)
        reads.fetch()
        assert reads.order == layer_by_layer(3, 4)


def test_small_layers_side_by_side_come_together_up_to_the_chunk_size(disk: FaultyDisk) -> None:
    """One read of the disk brings several; the next segment waits for no more than that."""
    num_reads: list[int] = []
    disk.before_read = lambda: num_reads.append(1)
    with tier_on(disk) as tier:
        sizes = (256 * KIB,) * 8
        put_all(tier, [sizes] * 2, 0)
        reads = Reads(tier, [sizes] * 2)
        num_reads.clear()
        reads.fetch()
        assert reads.order == [
            *itertools.product([0], range(4)),
            *itertools.product([1], range(4)),
            *itertools.product([0], range(4, 8)),
            *itertools.product([1], range(4, 8)),
        ]
        # Each chunk begins and ends inside a page, so that it may take a second piece.
        assert len(num_reads) <= 2 * 4


def test_layers_of_which_nothing_is_read_land_too(disk: FaultyDisk) -> None:
    """At the beginning, between others, at the end; also if nothing at all is read."""
    with tier_on(disk) as tier:
        put_all(tier, [(9000, 0, 9000, 9000, 9000)] * 2, 1000)
        reads = Reads(tier, [(0, 5, 0, 2000, 0), (0, 0, 0, 0, 0)])
        before = disk.num_bytes_read
        reads.fetch()
        for number in range(2):
            reads.assert_right(number)
        assert [block.nbytes for block in reads.reads[0].blocks] == [0, 0, 0, 2000, 0]
        assert disk.num_bytes_read - before <= 12 * KIB


# Damage


def flip_in(directory: Path, content: bytes, at: int) -> None:
    """Damage one byte of a block on the disk."""
    (path,) = directory.rglob("00000001.log")
    offset = path.read_bytes().index(content) + at
    with path.open("r+b") as file:
        file.seek(offset)
        old = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([old ^ 0x10]))


SIZES = (30_000, 20_000)
TAILS = (9500, 4000)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("damaged", [0, 1, 2])
@pytest.mark.parametrize("place", ["first", "middle", "last"])
def test_a_flipped_bit_in_an_end_fails_the_segment_that_it_touches(
    disk: FaultyDisk, tmp_path: Path, damaged: int, layer: int, place: str
) -> None:
    """The others come as if nothing had been; the damaged one is found no more."""
    with tier_on(disk, tmp_path) as tier:
        put_all(tier, [SIZES] * 3, 1000)
        first = SIZES[layer] - tail_num_bytes(SIZES[layer], TAILS[layer], 1000)
        at = {"first": first, "middle": SIZES[layer] - TAILS[layer] // 2, "last": SIZES[layer] - 1}[place]
        flip_in(tmp_path, random_blocks(SIZES, damaged)[layer].tobytes(), at)
        reads = Reads(tier, [TAILS] * 3)
        reads.fetch()
        assert list(reads.failures) == [damaged]
        error = reads.failures[damaged]
        assert f"layer {layer} has a wrong checksum" in str(error)
        assert isinstance(error.__cause__, RecordError)
        assert [each for number, each in reads.order if number == damaged] == list(range(layer))
        for number in {0, 1, 2} - {damaged}:
            reads.assert_right(number)
        stats = tier.stats()
        assert (stats.corrupted_segments, stats.read_segments, stats.is_suspended) == (1, 2, False)
        assert [bool(match(tier, f"c{number}")) for number in range(3)] == [
            number != damaged for number in range(3)
        ]


@pytest.mark.parametrize("layer", [0, 1])
def test_a_flipped_bit_that_is_not_read_does_not_matter(disk: FaultyDisk, tmp_path: Path, layer: int) -> None:
    """The last bit before the ranges of an end: the load goes on; whoever reads everything finds it."""
    with tier_on(disk, tmp_path) as tier:
        put_all(tier, [SIZES] * 2, 1000)
        first = SIZES[layer] - tail_num_bytes(SIZES[layer], TAILS[layer], 1000)
        content = random_blocks(SIZES, 1)[layer].tobytes()
        for at in (0, first - 1):
            flip_in(tmp_path, content[100:200] if at else content[:100], at - 100 if at else 0)
        reads = Reads(tier, [TAILS] * 2)
        reads.fetch()
        for number in range(2):
            reads.assert_right(number)
        assert tier.stats().corrupted_segments == 0
        damaged_id = max(info.segment_id for info in tier.list_segments())
        assert tier.verify().bad_segments == (damaged_id,)


def test_no_more_is_read_of_a_segment_that_has_failed(
    disk: FaultyDisk, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The disk has other work; only what was asked for before is still read."""
    monkeypatch.setattr(segment_reads, "_CHUNK_NUM_BYTES", 1)
    sizes = (64 * KIB,) * 40
    with tier_on(disk, tmp_path) as tier:
        put_all(tier, [sizes] * 2, 0)
        flip_in(tmp_path, random_blocks(sizes, 0)[0].tobytes(), 5)
        reads = Reads(tier, [sizes] * 2)
        before = disk.num_bytes_read
        reads.fetch()
        assert list(reads.failures) == [0]
        reads.assert_right(1)
        assert disk.num_bytes_read - before < 1.3 * sum(sizes)


@settings(max_examples=40)
@given(
    damaged=st.integers(0, 2),
    layer=st.integers(0, 1),
    at=st.floats(0, 1, exclude_max=True),
    range_bytes=st.sampled_from([100, 1000, 4096, 16 * KIB]),
    wanted=st.tuples(st.integers(0, SIZES[0]), st.integers(0, SIZES[1])),
)
def test_damage_anywhere_fails_exactly_the_reads_of_its_range(
    damaged: int, layer: int, at: float, range_bytes: int, wanted: Sizes
) -> None:
    disk = FaultyDisk()
    with tempfile.TemporaryDirectory() as temporary:
        directory = Path(temporary)
        with tier_on(disk, directory, 256 * KIB) as tier:
            put_all(tier, [SIZES] * 3, range_bytes)
            byte = int(at * SIZES[layer])
            flip_in(directory, random_blocks(SIZES, damaged)[layer].tobytes(), byte)
            reads = Reads(tier, [wanted] * 3)
            reads.fetch()
            is_read = byte >= SIZES[layer] - tail_num_bytes(SIZES[layer], wanted[layer], range_bytes)
            assert list(reads.failures) == [damaged] * is_read
            for number in {0, 1, 2} - set(reads.failures):
                reads.assert_right(number)


# What changes, or breaks, while it is read


def test_a_segment_that_leaves_while_it_is_read_fails_alone(disk: FaultyDisk) -> None:
    """Its model was cleared: its weights may have changed. Another model's segment goes on."""
    others = make_model("others")

    def clear(number: int, layer: int) -> None:
        if (number, layer) == (0, 0):
            tier.clear(others)

    with tier_on(disk) as tier:
        sizes = (MIB, MIB)
        put_all(tier, [sizes, sizes], 0)
        mine = manifest_of("c0", sizes, 0)
        assert put_manifest(tier, dataclasses.replace(mine, model=others), seed=0)
        assert tier.flush(20)
        reads = Reads(tier, [sizes, sizes], clear)
        (run,) = match(tier, "c0", model=others)
        failed: list[TierReadError] = []
        landed: list[int] = []
        blocks = [np.zeros(size, np.uint8) for size in sizes]
        reads.reads.insert(1, TailRead(run, blocks, landed.append, failed.append))
        tier.fetch(reads.reads)
        assert landed == []
        assert "left the SSD tier while it was read" in str(failed[0])
        del reads.reads[1]
        for number in range(2):
            reads.assert_right(number)
        assert tier.stats().corrupted_segments == 0


def test_a_segment_that_has_left_before_fails_alone(disk: FaultyDisk) -> None:
    with tier_on(disk) as tier:
        put_all(tier, [SIZES] * 2, 1000)
        reads = Reads(tier, [TAILS] * 2)
        tier.discard(manifest_of("c0", SIZES, 1000))
        reads.fetch()
        assert [str(reads.failures[0]), list(reads.failures)] == ["the segment has left the SSD tier", [0]]
        reads.assert_right(1)


def test_a_disk_that_fails_ends_the_whole_fetch(disk: FaultyDisk) -> None:
    """What has landed stays; the rest does not come, and the tier is left alone."""

    def fail(number: int, layer: int) -> None:
        disk.errors["preadv"] = 5

    with tier_on(disk) as tier:
        sizes = (20 * MIB // 8,) * 2
        put_all(tier, [sizes] * 2, 0)
        reads = Reads(tier, [sizes] * 2, fail)
        with pytest.raises(TierReadError, match="cannot be read"):
            reads.fetch()
        assert reads.order[:1] == [(0, 0)]
        assert len(reads.order) < 4
        assert tier.stats().is_suspended
        disk.errors.clear()


def test_all_files_are_released_after_a_fetch(disk: FaultyDisk, tmp_path: Path) -> None:
    """Also of reads that failed: a clear then removes them."""
    with tier_on(disk, tmp_path) as tier:
        put_all(tier, [SIZES] * 3, 1000)
        flip_in(tmp_path, random_blocks(SIZES, 1)[0].tobytes(), SIZES[0] - 1)
        Reads(tier, [TAILS] * 3).fetch()
        tier.clear()
        assert tier.flush(20)
        assert tier.stats().used_bytes == 0


# What reading costs


class Rate:
    """A rate that is measured on a clock of the test's own, from 0 s a byte on."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.cost = MeasuredCost(TierCost(latency_s=0.5, byte_s=0.0))
        self.rate = BusyRate(self.cost, self.clock)

    def come(self, num_bytes: int, seconds: float) -> None:
        self.clock.now_s += seconds
        self.rate.came(num_bytes)

    @property
    def seen(self) -> list[float]:
        return [self.cost.current.byte_s, self.cost.current.latency_s]


def mixed(*rates: float) -> list[Any]:
    """The cost after these rates were measured: each moves it by a fifth of the way."""
    byte_s = 0.0
    for rate in rates:
        byte_s += 0.2 * (rate - byte_s)
    return [pytest.approx(byte_s), 0.5]


def test_a_read_says_how_fast_its_bytes_came() -> None:
    busy = Rate()
    with busy.rate.reading():
        busy.come(2 * MIB, 3.0)
        assert busy.seen == mixed()
    assert busy.seen == mixed(3.0 / (2 * MIB))


def test_a_long_read_is_measured_while_it_runs() -> None:
    """After some MiB the rate is known; what comes later is measured anew."""
    busy = Rate()
    with busy.rate.reading():
        for seconds in (1.0, 5.0):
            for _ in range(8):
                busy.come(MIB, seconds / 8)
        assert busy.seen == mixed(1.0 / (8 * MIB), 5.0 / (8 * MIB))
    assert busy.seen == mixed(1.0 / (8 * MIB), 5.0 / (8 * MIB)), "nothing has come since"


def test_reads_at_once_share_the_time() -> None:
    """Two reads that each take 2 s for 4 MiB, side by side: the disk has delivered 8 MiB in 2 s."""
    busy = Rate()
    with busy.rate.reading(), busy.rate.reading():
        for _ in range(4):
            busy.come(MIB, 0.5)
            busy.come(MIB, 0.0)
    assert busy.seen == mixed(2.0 / (8 * MIB))


def test_time_without_a_read_does_not_count() -> None:
    busy = Rate()
    for _ in range(2):
        with busy.rate.reading():
            busy.come(4 * MIB, 1.0)
        busy.clock.now_s += 1000.0
    assert busy.seen == mixed(1.0 / (4 * MIB), 1.0 / (4 * MIB))


def test_a_read_that_begins_while_another_runs_starts_no_measurement_of_its_own() -> None:
    busy = Rate()
    with busy.rate.reading():
        busy.come(3 * MIB, 3.0)
        with busy.rate.reading():
            busy.come(2 * MIB, 1.0)
        # The second has ended: all that came until then was known.
        assert busy.seen == mixed(4.0 / (5 * MIB))
        busy.come(MIB, 2.0)
    assert busy.seen == mixed(4.0 / (5 * MIB), 2.0 / MIB)


def test_small_reads_say_nothing_of_the_rate() -> None:
    """Most of their time is that of the request."""
    busy = Rate()
    for _ in range(5):
        with busy.rate.reading():
            busy.come(MIB - 1, 1.0)
    assert busy.seen == mixed()


def test_a_read_that_fails_says_how_fast_it_was_until_then() -> None:
    busy = Rate()
    with contextlib.suppress(OSError), busy.rate.reading():
        busy.come(MIB, 1.0)
        raise OSError("broken")
    assert busy.seen == mixed(1.0 / MIB)
    with busy.rate.reading():
        busy.come(MIB, 2.0)
    assert busy.seen == mixed(1.0 / MIB, 2.0 / MIB)


def test_a_tiers_cost_follows_what_its_reads_deliver(disk: FaultyDisk) -> None:
    """A disk that has become slow looks slow after some reads, whatever it was at the start."""
    with tier_on(disk) as tier:
        tier._reads._cost.set(TierCost(1e-4, 0.0))
        put_all(tier, [(4 * MIB, 4 * MIB)], 0)
        Reads(tier, [(4 * MIB, 4 * MIB)]).fetch()
        first = tier.cost()
        assert first.latency_s == 1e-4
        assert first.byte_s > 0
        # All small ones.
        Reads(tier, [(1, 1)]).fetch()
        assert tier.cost() == first
