"""Reading ranges of files in pieces, several in flight, with a limit on how long one may take."""

from __future__ import annotations

import contextlib
import errno
import itertools
import mmap
import queue
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from krul_backend.tiers.common.interface import Clock
from krul_backend.tiers.common.record import RECORD_ALIGN
from krul_backend.tiers.ssd.disk import Disk

# The best values that were measured for records of 32 to 64 MiB; see docs/tiers.md. A small piece is still in
# the processor's cache when it is checked and copied, and little work is left after the last piece was read.
NUM_THREADS = 3
PIECE_NUM_BYTES = 1 << 20
_MAX_PIECES_OF_A_READ = 8
_NUM_BUFFERS = 2 * _MAX_PIECES_OF_A_READ

Bounce = memoryview
"""A page-aligned buffer of this reader, as O_DIRECT wants it."""


class FileRange(NamedTuple):
    """Bytes ``[offset, offset + num_bytes)`` of an open file; both are multiples of 4096."""

    fd: int
    offset: int
    num_bytes: int


@dataclass(eq=False)
class _Read:
    """A call of ``read``. ``released`` is called when it is over and none of its pieces is being read."""

    released: Callable[[], None]
    num_unfinished: int = 0
    is_over: bool = False


@dataclass(eq=False)
class _Piece:
    """A part of range number ``index`` of a read, on its way into ``bounce``."""

    read: _Read
    bounce: Bounce
    index: int
    part: FileRange
    is_done: bool = False
    error: OSError | None = None


class PieceReader:
    """Reads ranges of files in pieces, with a few threads and buffers of its own. Thread-safe.

    **The threads write only into the reader's own buffers**; the caller's thread copies from there. So a call
    can give up on a read that the disk does not answer: the stuck thread does no harm when it ends later.
    Only then are its buffer and itself usable again, and may the file be closed; ``released`` tells.

    A time-out means that the disk is slow: the time of a piece counts from when a thread begins to read it. A
    piece that waits for a thread, or a call that waits for a buffer, waits as long as any thread makes
    progress. One call takes at most half of the buffers, and no further one while another call has none;
    pieces are read in the order in which they were asked for. So a small read waits for few pieces of a large
    one.

    Args:
        disk: does the system calls.
        timeout_s: how long one piece may take.
        num_disks: how many the files lie on; there are threads and buffers for each.
    """

    def __init__(
        self,
        disk: Disk,
        timeout_s: float,
        num_threads: int = NUM_THREADS,
        piece_num_bytes: int = PIECE_NUM_BYTES,
        num_disks: int = 1,
        clock: Clock = time.monotonic,
    ) -> None:
        self._disk = disk
        self._timeout_s = timeout_s
        self._piece_num_bytes = piece_num_bytes
        self._clock = clock
        # Guards all that follows, and the reads and pieces.
        self._changed = threading.Condition()
        self._free = _make_buffers(num_disks * _NUM_BUFFERS, piece_num_bytes)
        self._num_without_buffer = 0
        # Pieces that a thread is reading, and since when.
        self._started_s: dict[_Piece, float] = {}
        self._is_closed = False
        self._numbers = itertools.count()
        self._jobs: queue.PriorityQueue[tuple[int, int, _Piece | None]] = queue.PriorityQueue()
        # Daemons: a disk that never answers must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._serve, name=f"ssd-read-{i}", daemon=True)
            for i in range(num_disks * num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def read(
        self,
        ranges: Iterable[FileRange],
        take: Callable[[int, int, memoryview], None],
        released: Callable[[], None],
        priority: Callable[[], int] = lambda: 0,
    ) -> None:
        """Call ``take(index, offset, piece)`` in this thread with the bytes of ``ranges``, in order: those of
        the file of range number ``index`` from ``offset`` on.

        A piece is valid during ``take`` only. ``ranges`` is asked for the next one when there is a buffer for
        it. ``released`` is called exactly once, perhaps later and in another thread. Of pieces that wait
        those with the smallest ``priority()`` are read first.

        Raises:
            TimeoutError: a piece took longer than ``timeout_s``, or all threads are stuck in such pieces.
            OSError: the medium failed, a file ends before its range does, or the reader was closed.
        """
        read = _Read(released)
        pieces: deque[_Piece] = deque()
        parts = self._parts(ranges)
        try:
            waiting = next(parts, None)
            while waiting is not None or pieces:
                while waiting is not None:
                    bounce = self._take_bounce(len(pieces))
                    if bounce is None:
                        break
                    piece = _Piece(read, bounce, *waiting)
                    with self._changed:
                        read.num_unfinished += 1
                    pieces.append(piece)
                    self._jobs.put((priority(), next(self._numbers), piece))
                    waiting = next(parts, None)
                piece = pieces[0]
                with self._changed:
                    self._wait(piece)
                if piece.error is not None:
                    raise piece.error
                take(piece.index, piece.part.offset, piece.bounce[: piece.part.num_bytes])
                pieces.popleft()
                self._give_back(piece)
        finally:
            self._give_up(read, pieces)

    def _parts(self, ranges: Iterable[FileRange]) -> Iterator[tuple[int, FileRange]]:
        """The ranges in parts that fit into a buffer, with the number of the range."""
        for index, (fd, offset, num_bytes) in enumerate(ranges):
            for first in range(0, num_bytes, self._piece_num_bytes):
                size = min(self._piece_num_bytes, num_bytes - first)
                yield index, FileRange(fd, offset + first, size)

    def close(self) -> None:
        """End the threads; those that are stuck end when the disk answers."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for _ in self._threads:
            self._jobs.put((sys.maxsize, next(self._numbers), None))
        for thread in self._threads:
            thread.join(timeout=self._timeout_s)

    def _take_bounce(self, num_taken: int) -> Bounce | None:
        """A buffer for a call that has ``num_taken``. Waits for a first one; None if it may have no more."""
        with self._changed:
            if num_taken:
                # Only calls without a buffer wait for one, so two calls cannot wait for each other.
                is_enough = num_taken >= _MAX_PIECES_OF_A_READ or self._num_without_buffer > 0
                return None if is_enough or not self._free else self._free.pop()
            self._num_without_buffer += 1
            try:
                self._wait(None)
            finally:
                self._num_without_buffer -= 1
            return self._free.pop()

    def _give_back(self, piece: _Piece) -> None:
        with self._changed:
            self._free.append(piece.bounce)
            self._changed.notify_all()

    def _wait(self, piece: _Piece | None) -> None:
        """Wait until ``piece`` is read or (None) a buffer is free. Called with the lock."""
        while not (piece.is_done if piece is not None else self._free):
            if self._is_closed:
                raise OSError(errno.ESHUTDOWN, "the reader was closed")
            now_s = self._clock()
            since_s = self._stuck_since_s(piece, now_s)
            if now_s - since_s >= self._timeout_s:
                raise TimeoutError(f"the disk has not answered for {now_s - since_s:.3g} s")
            self._changed.wait(since_s + self._timeout_s - now_s)

    def _stuck_since_s(self, piece: _Piece | None, now_s: float) -> float:
        """Since when the disk has kept a call waiting: ``now_s`` if a thread can still make progress."""
        if piece is not None and piece in self._started_s:
            return self._started_s[piece]
        if len(self._started_s) < len(self._threads):
            return now_s
        return max(self._started_s.values())

    def _give_up(self, read: _Read, pieces: deque[_Piece]) -> None:
        with self._changed:
            read.is_over = True
            # From now on a thread that finishes a piece of this read gives the buffer back itself.
            self._free += [piece.bounce for piece in pieces if piece.is_done]
            self._changed.notify_all()
            is_released = read.num_unfinished == 0
        if is_released:
            read.released()

    def _serve(self) -> None:
        while (piece := self._jobs.get()[2]) is not None:
            read = piece.read
            with self._changed:
                is_wanted = not read.is_over
                self._started_s[piece] = self._clock()
            if is_wanted:
                try:
                    self._fill(piece)
                except OSError as error:
                    piece.error = error
            with self._changed:
                del self._started_s[piece]
                piece.is_done = True
                read.num_unfinished -= 1
                is_last = read.is_over and read.num_unfinished == 0
                if read.is_over:
                    self._free.append(piece.bounce)
                self._changed.notify_all()
            if is_last:
                read.released()

    def _fill(self, piece: _Piece) -> None:
        num_read, (fd, offset, num_bytes) = 0, piece.part
        while num_read < num_bytes:
            rest = piece.bounce[num_read:num_bytes]
            step = self._disk.preadv(fd, [rest], offset + num_read)
            # Reading past the page cache can only go on at a multiple of the sector size.
            num_whole = step // RECORD_ALIGN * RECORD_ALIGN
            if num_whole <= 0:
                raise OSError(errno.EIO, f"the read ended {len(rest)} bytes too soon")
            num_read += num_whole
        # For file systems that cannot read past the page cache.
        self._disk.drop_cache(fd, offset, num_bytes)


def _make_buffers(num_buffers: int, num_bytes: int) -> list[Bounce]:
    """Make the buffers in one mapping, of huge pages if possible: each read pins the pages of its buffer."""
    mapping = mmap.mmap(-1, num_buffers * num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    # A kernel without huge pages refuses; small pages work, too.
    with contextlib.suppress(OSError):
        mapping.madvise(mmap.MADV_HUGEPAGE)
    whole = memoryview(mapping)
    return [whole[i * num_bytes : (i + 1) * num_bytes] for i in range(num_buffers)]
