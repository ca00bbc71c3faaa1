"""The threads in which a tier is read, and the queue before them: what is wanted most urgently first."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable
from concurrent.futures import Future
from enum import IntEnum
from typing import TypeVar

from krul_backend.errors import StoreClosedError

logger = logging.getLogger(__name__)

T = TypeVar("T")


class ReadPriority(IntEnum):
    """Who waits for a read. A smaller number comes first, whatever came earlier."""

    LOAD = 0
    """A request that runs, or is about to."""

    PREFETCH = 1
    """Nobody yet."""

    REST = 2
    """Nobody yet, and whoever comes can do without."""

    UPKEEP = 3
    """The tier's own verify."""


def of_a_load() -> ReadPriority:
    """The priority of a read for which somebody waits."""
    return ReadPriority.LOAD


class QueuedRead:
    """One call in a ``ReadQueue``; guarded by its lock."""

    def __init__(self, queue: ReadQueue, call: Callable[[], object], priority: ReadPriority) -> None:
        self._queue = queue
        self.call = call
        self.priority = priority
        self.has_begun = False

    def hurry(self) -> None:
        """Make it a load's: somebody waits for it now."""
        self._queue.move_up(self, ReadPriority.LOAD)


class ReadQueue:
    """Calls what was submitted, in a few threads: the most urgent first, of these the first submitted.

    A strict order: upkeep waits as long as there is anything else to do. Loads and prefetches are bounded by
    the room in DRAM, so that there is not always something. One thread of several is kept for loads.
    Thread-safe.

    Args:
        num_threads: how many calls run at once.
    """

    def __init__(self, num_threads: int, name: str) -> None:
        self._changed = threading.Condition()
        # Of a read that was moved up, its earlier entry stays: it has begun when that one comes.
        self._waiting: list[tuple[ReadPriority, int, QueuedRead]] = []
        self._numbers = itertools.count()
        self._is_closed = False
        # Of calls that nobody waits for.
        self._num_running = 0
        self._max_running = max(1, num_threads - 1)
        # Daemons: a disk that never answers must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._serve, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def submit(self, call: Callable[[], object], priority: ReadPriority) -> QueuedRead:
        """Add a call, which must not raise.

        Raises:
            StoreClosedError: the queue was closed.
        """
        read = QueuedRead(self, call, priority)
        with self._changed:
            if self._is_closed:
                raise StoreClosedError("the tier was closed")
            self._push(read)
        return read

    def run(self, call: Callable[[], T], priority: ReadPriority) -> T:
        """Submit a call and wait for its end; returns, or raises, what it does.

        Raises:
            StoreClosedError: the queue was closed.
        """
        future: Future[T] = Future()

        def answer() -> None:
            try:
                future.set_result(call())
            except BaseException as error:
                future.set_exception(error)

        self.submit(answer, priority)
        return future.result()

    def move_up(self, read: QueuedRead, priority: ReadPriority) -> None:
        """Give a call a more urgent priority; if it has not begun, it is the last of these."""
        with self._changed:
            if priority < read.priority:
                read.priority = priority
                if not read.has_begun:
                    self._push(read)

    def close(self) -> None:
        """Accept nothing more; wait until all that was submitted has ended."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
        for thread in self._threads:
            thread.join()

    def _push(self, read: QueuedRead) -> None:
        heapq.heappush(self._waiting, (read.priority, next(self._numbers), read))
        self._changed.notify()

    def _take(self) -> tuple[QueuedRead, bool] | None:
        """Wait for the next call, and say whether it is a load's; None when the queue is closed and empty."""
        with self._changed:
            while True:
                while self._waiting and self._waiting[0][2].has_begun:
                    heapq.heappop(self._waiting)
                if self._waiting:
                    priority, _, read = self._waiting[0]
                    is_load = priority == ReadPriority.LOAD
                    if is_load or self._num_running < self._max_running:
                        heapq.heappop(self._waiting)
                        read.has_begun = True
                        self._num_running += not is_load
                        return read, is_load
                elif self._is_closed:
                    return None
                self._changed.wait()

    def _serve(self) -> None:
        while (taken := self._take()) is not None:
            read, is_load = taken
            try:
                read.call()
            except Exception:
                logger.exception("a read failed in a way that nobody handles")
            with self._changed:
                self._num_running -= not is_load
                self._changed.notify_all()
