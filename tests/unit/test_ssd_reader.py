"""The piece reader: what is slow is the disk, not our own queues."""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from krul_backend.tiers.ssd.reader import FileRange, PieceReader
from tests.support.ssd_builders import FaultyDisk
from tests.support.store_builders import Clock

PIECE = 4096
TIMEOUT_S = 0.3
NUM_LARGE_PIECES = 40


class SteppedDisk(FaultyDisk):
    """Each read waits until ``step`` lets one go on; ``begun`` has the offsets in the order of the reads."""

    def __init__(self) -> None:
        super().__init__()
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._steps = threading.Semaphore(0)

    def preadv(self, fd: int, buffers: list[memoryview], offset: int) -> int:  # type: ignore[override]
        self.begun.put(offset)
        assert self._steps.acquire(timeout=20)
        return super().preadv(fd, buffers, offset)

    def step(self, num_reads: int = 1) -> None:
        self._steps.release(num_reads)


@pytest.fixture
def fd(tmp_path: Path) -> Iterator[int]:
    path = tmp_path / "data"
    path.write_bytes(b"".join(bytes([i]) * PIECE for i in range(NUM_LARGE_PIECES + 1)))
    opened = os.open(path, os.O_RDONLY)
    yield opened
    os.close(opened)


class Reading(threading.Thread):
    """``PieceReader.read`` of some pieces in a thread of its own."""

    def __init__(
        self,
        reader: PieceReader,
        fd: int,
        first: int,
        num_pieces: int,
        before_take: Callable[[], object] = lambda: None,
    ) -> None:
        super().__init__(daemon=True)
        self.pieces: list[int] = []
        self.error: OSError | None = None
        self.is_released = threading.Event()
        ranges = [FileRange(fd, first * PIECE, num_pieces * PIECE)]
        self._read = lambda: reader.read(ranges, self._take, self.is_released.set)
        self._before_take = before_take
        self.start()

    def _take(self, index: int, offset: int, piece: memoryview) -> None:
        self._before_take()
        assert (index, offset) == (0, PIECE * piece[0])
        assert len(set(piece)) == 1
        self.pieces.append(piece[0])

    def run(self) -> None:
        try:
            self._read()
        except OSError as error:
            self.error = error


def open_data(disk: FaultyDisk, fd: int) -> int:
    return disk.open(Path(f"/proc/self/fd/{fd}").resolve(), os.O_RDONLY)


def test_a_small_read_beside_a_large_one_that_copies_slowly(fd: int) -> None:
    disk = FaultyDisk()
    data = open_data(disk, fd)
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=PIECE)
    is_copying, may_go_on = threading.Event(), threading.Event()

    def copy() -> None:
        is_copying.set()
        assert may_go_on.wait(20)

    large = Reading(reader, data, 0, NUM_LARGE_PIECES, copy)
    assert is_copying.wait(20)
    # The large one has taken all buffers that it may, and gives none back.
    small = Reading(reader, data, NUM_LARGE_PIECES, 1)
    small.join(20)
    assert (small.pieces, small.error) == ([NUM_LARGE_PIECES], None)
    may_go_on.set()
    large.join(20)
    assert (large.pieces, large.error) == (list(range(NUM_LARGE_PIECES)), None)
    reader.close()


def test_more_reads_than_buffers_wait_for_one_another(fd: int) -> None:
    disk = FaultyDisk()
    data = open_data(disk, fd)
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=PIECE)
    copying, may_go_on = threading.Semaphore(0), threading.Event()

    def copy() -> None:
        copying.release()
        assert may_go_on.wait(20)

    large = [Reading(reader, data, 0, NUM_LARGE_PIECES, copy) for _ in range(3)]
    for _ in range(2):
        assert copying.acquire(timeout=20)
    small = Reading(reader, data, NUM_LARGE_PIECES, 1)
    # Longer than the disk may take: nobody asks it for anything now.
    small.join(3 * TIMEOUT_S)
    assert small.error is None
    may_go_on.set()
    small.join(20)
    for reading in large:
        reading.join(20)
    assert small.pieces == [NUM_LARGE_PIECES]
    assert [(reading.pieces, reading.error) for reading in large] == [
        (list(range(NUM_LARGE_PIECES)), None)
    ] * 3
    reader.close()


def test_a_small_read_is_served_after_few_pieces_of_a_large_one_on_a_disk_that_is_just_fast_enough(
    fd: int,
) -> None:
    disk = SteppedDisk()
    data = open_data(disk, fd)
    clock = Clock()
    reader = PieceReader(disk, TIMEOUT_S, num_threads=1, piece_num_bytes=PIECE, clock=clock)
    large = Reading(reader, data, 0, NUM_LARGE_PIECES)
    assert disk.begun.get(timeout=20) == 0
    small = Reading(reader, data, NUM_LARGE_PIECES, 1)
    num_before = 1
    while True:
        # Each piece takes nearly as long as it may; those that wait take many times that.
        clock.now_s += 0.9 * TIMEOUT_S
        disk.step()
        if disk.begun.get(timeout=20) == NUM_LARGE_PIECES * PIECE:
            break
        num_before += 1
    assert 1 <= num_before < NUM_LARGE_PIECES // 2
    disk.step(NUM_LARGE_PIECES)
    small.join(20)
    large.join(20)
    assert (small.pieces, small.error) == ([NUM_LARGE_PIECES], None)
    assert (large.pieces, large.error) == (list(range(NUM_LARGE_PIECES)), None)
    reader.close()


def test_what_waits_for_a_disk_that_hangs_fails_too(fd: int) -> None:
    disk = SteppedDisk()
    data = open_data(disk, fd)
    clock = Clock()
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=PIECE, clock=clock)
    stuck = Reading(reader, data, 0, 3)
    assert {disk.begun.get(timeout=20) for _ in range(3)} == {0, PIECE, 2 * PIECE}
    waiting = Reading(reader, data, NUM_LARGE_PIECES, 1)
    clock.now_s += 2 * TIMEOUT_S
    stuck.join(20)
    waiting.join(20)
    assert isinstance(stuck.error, TimeoutError)
    assert isinstance(waiting.error, TimeoutError)
    assert not stuck.is_released.is_set(), "the file is still being read"
    disk.step(4)
    reader.close()
    assert stuck.is_released.wait(20)
    assert waiting.is_released.wait(20)


def test_nobody_waits_for_a_reader_that_was_closed(fd: int) -> None:
    disk = FaultyDisk()
    data = open_data(disk, fd)
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=PIECE)
    reader.close()
    late = Reading(reader, data, 0, 1)
    late.join(20)
    assert late.pieces == []
    assert late.error is not None
    assert "closed" in str(late.error)


@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    ranges=st.lists(
        st.tuples(st.booleans(), st.integers(0, NUM_LARGE_PIECES), st.integers(0, 12)), max_size=12
    ),
    piece_num_bytes=st.sampled_from([PIECE, 3 * PIECE, 64 * PIECE]),
)
def test_ranges_of_several_files_come_in_order(
    fd: int, tmp_path: Path, ranges: list[tuple[bool, int, int]], piece_num_bytes: int
) -> None:
    """Each with its number and its place in its file, whatever the pieces are."""
    disk = FaultyDisk()
    other_path = tmp_path / "other"
    other_path.write_bytes((tmp_path / "data").read_bytes()[::-1])
    files = [open_data(disk, fd), disk.open(other_path, os.O_RDONLY)]
    contents = [(tmp_path / name).read_bytes() for name in ("data", "other")]
    wanted = [
        (is_other, first * PIECE, min(num_pieces, NUM_LARGE_PIECES + 1 - first) * PIECE)
        for is_other, first, num_pieces in ranges
    ]
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=piece_num_bytes)
    taken: list[list[bytes]] = [[] for _ in wanted]
    order: list[int] = []
    released: list[int] = []

    def take(index: int, offset: int, piece: memoryview) -> None:
        assert offset == wanted[index][1] + sum(map(len, taken[index]))
        taken[index].append(bytes(piece))
        order.append(index)

    reader.read(
        [FileRange(files[is_other], offset, num_bytes) for is_other, offset, num_bytes in wanted],
        take,
        lambda: released.append(1),
    )
    assert order == sorted(order)
    for parts, (is_other, offset, num_bytes) in zip(taken, wanted, strict=True):
        assert b"".join(parts) == contents[is_other][offset : offset + num_bytes]
    assert released == [1]
    reader.close()
    for file in files:
        disk.close(file)


def test_ranges_are_asked_for_when_there_is_a_buffer(fd: int) -> None:
    """So that whoever gives them can leave out what is of no use any more."""
    disk = FaultyDisk()
    data = open_data(disk, fd)
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=PIECE)
    num_taken, ahead = 0, []

    def ranges() -> Iterator[FileRange]:
        for number in range(NUM_LARGE_PIECES):
            ahead.append(number - num_taken)
            yield FileRange(data, number * PIECE, PIECE)

    def take(index: int, offset: int, piece: memoryview) -> None:
        nonlocal num_taken
        num_taken += 1

    reader.read(ranges(), take, lambda: None)
    assert num_taken == NUM_LARGE_PIECES
    assert max(ahead) <= 8
    reader.close()


@pytest.mark.parametrize("is_at_take", [True, False])
def test_an_error_of_the_caller_ends_the_read_and_releases_it(fd: int, is_at_take: bool) -> None:
    disk = FaultyDisk()
    data = open_data(disk, fd)
    reader = PieceReader(disk, TIMEOUT_S, piece_num_bytes=PIECE)
    released = threading.Semaphore(0)

    def ranges() -> Iterator[FileRange]:
        yield FileRange(data, 0, 4 * PIECE)
        if not is_at_take:
            raise ValueError("a bug")

    def take(index: int, offset: int, piece: memoryview) -> None:
        if is_at_take:
            raise ValueError("a bug")

    for _ in range(5):
        with pytest.raises(ValueError, match="a bug"):
            reader.read(ranges(), take, released.release)
        assert released.acquire(timeout=20)
    # No buffer is lost.
    again = Reading(reader, data, 0, NUM_LARGE_PIECES)
    again.join(20)
    assert (again.pieces, again.error) == (list(range(NUM_LARGE_PIECES)), None)
    reader.close()
