"""Runs work that would hold up the server's loop in other threads, and gives the results back to the loop."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeVar

from krul_backend.errors import ProtocolError

MAX_PENDING = 256
"""How many operations may wait or run, in all lanes together."""

T = TypeVar("T")
Tag = TypeVar("Tag")


class Lane(Enum):
    """A group of threads for one kind of work, so that what takes minutes holds up only work of its kind."""

    SHORT = "short"
    ROOM = "room"
    FLUSH = "flush"
    VERIFY = "verify"


_NUM_THREADS = {Lane.SHORT: 4, Lane.ROOM: 2, Lane.FLUSH: 2, Lane.VERIFY: 1}


@dataclass(frozen=True)
class Deferred(Generic[T]):
    """``work`` for another thread; then ``finish`` in the server's thread returns the request's result.

    ``finish`` gets the future of the work, whose ``result()`` raises what the work raised.
    """

    work: Callable[[], T]
    finish: Callable[[Future[T]], Any] = Future.result
    lane: Lane = Lane.SHORT


class Lanes(Generic[Tag]):
    """Runs deferred work in the threads of its lane.

    ``fileno`` can be polled: it is readable when work has been done, and after a ``wake``. Each work is
    submitted with a tag of the caller's and given back with it. Only ``wake`` may be called from any thread;
    all else is for the loop's own.
    """

    def __init__(self) -> None:
        self._num_pending = 0
        self._done: SimpleQueue[tuple[Tag, Deferred[Any], Future[Any]]] = SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_closed = False
        self._threads = {
            lane: ThreadPoolExecutor(num_threads, thread_name_prefix=f"krul-{lane.value}")
            for lane, num_threads in _NUM_THREADS.items()
        }

    def fileno(self) -> int:
        return self._wakeup

    def submit(self, tag: Tag, deferred: Deferred[Any]) -> None:
        """Hand work to the threads of its lane. Raises ProtocolError if too much waits already."""
        if self._num_pending >= MAX_PENDING:
            raise ProtocolError(f"{MAX_PENDING} long operations wait already: try later")
        self._num_pending += 1
        future = self._threads[deferred.lane].submit(deferred.work)
        future.add_done_callback(lambda done: self._hand_back(tag, deferred, done))

    def take_done(self) -> list[tuple[Tag, Deferred[Any], Future[Any]]]:
        """The work that was done since the last call, with tags and results. Never waits."""
        try:
            os.eventfd_read(self._wakeup)
        except BlockingIOError:
            return []
        done = []
        while True:
            try:
                done.append(self._done.get_nowait())
            except Empty:
                self._num_pending -= len(done)
                return done

    def wake(self) -> None:
        """Make ``fileno`` readable; from any thread or signal handler, also after ``close``."""
        if not self._is_closed:
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Wait for work that runs, drop work that waits."""
        for threads in self._threads.values():
            threads.shutdown(wait=True, cancel_futures=True)
        # Set first, since a signal handler may call ``wake`` when the descriptor is closed already.
        self._is_closed = True
        os.close(self._wakeup)

    def _hand_back(self, tag: Tag, deferred: Deferred[Any], future: Future[Any]) -> None:
        """Called in the thread that did the work."""
        self._done.put((tag, deferred, future))
        self.wake()
