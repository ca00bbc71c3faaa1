"""Runs work that would hold up the server's loop in other threads, and gives the results back to the loop."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable
from concurrent.futures import Future
from dataclasses import dataclass
from enum import Enum
from queue import Empty, SimpleQueue
from typing import Any, Generic, TypeAlias, TypeVar

from krul_backend.errors import ProtocolError

logger = logging.getLogger(__name__)

MAX_PENDING = 256
"""How many operations of one lane may wait or run."""

_END_TIMEOUT_S = 2.0

T = TypeVar("T")
Tag = TypeVar("Tag")


class Lane(Enum):
    """A group of threads for one kind of work, so that what takes minutes holds up only work of its kind."""

    SHORT = "short"
    ROOM = "room"
    DROP = "drop"
    CLEAR = "clear"
    FLUSH = "flush"
    VERIFY = "verify"


_NUM_THREADS = {
    Lane.SHORT: 4,
    Lane.ROOM: 2,
    # Each waits a second at most for a tier's writes, and the ranks of a server drop at the same time.
    Lane.DROP: 4,
    # All clears wait for the same locks.
    Lane.CLEAR: 1,
    Lane.FLUSH: 2,
    Lane.VERIFY: 1,
}


@dataclass(frozen=True)
class Deferred(Generic[T]):
    """``work`` for another thread; then ``finish`` in the server's thread returns the request's result.

    ``finish`` gets the future of the work, whose ``result()`` raises what the work raised. If work with an
    equal ``key`` still waits, this one is not done: both get the result of that one, which begins after both
    were asked for. None: no other work is equal.
    """

    work: Callable[[], T]
    finish: Callable[[Future[T]], Any] = Future.result
    lane: Lane = Lane.SHORT
    key: Hashable | None = None


_WorkQueue: TypeAlias = "SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None]"


class Lanes(Generic[Tag]):
    """Runs deferred work in the threads of its lane.

    ``fileno`` can be polled: it is readable when work has been done, and after a ``wake``. Each work is
    submitted with a tag of the caller's and given back with it. Only ``wake`` may be called from any thread;
    all else is for the loop's own.
    """

    def __init__(self) -> None:
        self._num_pending: Counter[Lane] = Counter()
        self._done: SimpleQueue[tuple[Tag, Deferred[Any], Future[Any]]] = SimpleQueue()
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._is_ending = False
        self._is_closed = False
        self._by_key: dict[Hashable, Future[Any]] = {}
        self._waiting: dict[Lane, _WorkQueue] = {lane: SimpleQueue() for lane in Lane}
        # Daemons: work that never ends must not keep the process from ending.
        self._threads = [
            threading.Thread(target=self._serve, args=(queue,), name=f"krul-{lane.value}-{i}", daemon=True)
            for lane, queue in self._waiting.items()
            for i in range(_NUM_THREADS[lane])
        ]
        for thread in self._threads:
            thread.start()

    def fileno(self) -> int:
        return self._wakeup

    def submit(self, tag: Tag, deferred: Deferred[Any]) -> None:
        """Hand work to the threads of its lane. If too much waits there already, it fails (ProtocolError)."""
        self._num_pending[deferred.lane] += 1
        if self._num_pending[deferred.lane] > MAX_PENDING:
            future: Future[Any] = Future()
            future.set_exception(ProtocolError(f"{MAX_PENDING} long operations wait already: try later"))
        else:
            future = self._future_of(deferred)
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
                break
        for _, deferred, future in done:
            self._num_pending[deferred.lane] -= 1
            if self._by_key.get(deferred.key) is future:
                del self._by_key[deferred.key]
        return done

    def wake(self) -> None:
        """Make ``fileno`` readable; from any thread or signal handler, also after ``close``."""
        if not self._is_closed:
            os.eventfd_write(self._wakeup, 1)

    def close(self) -> None:
        """Drop work that waits, and wait for work that runs, for some seconds at most."""
        self._is_ending = True
        for lane, queue in self._waiting.items():
            for _ in range(_NUM_THREADS[lane]):
                queue.put(None)
        deadline_s = time.monotonic() + _END_TIMEOUT_S
        for thread in self._threads:
            thread.join(max(0.0, deadline_s - time.monotonic()))
        hanging = [thread.name for thread in self._threads if thread.is_alive()]
        if hanging:
            # The descriptor stays open: they may still write to it.
            logger.error("ending while work hangs in %s", ", ".join(hanging))
            return
        # Set first, since a signal handler may call ``wake`` when the descriptor is closed already.
        self._is_closed = True
        os.close(self._wakeup)

    def _future_of(self, deferred: Deferred[Any]) -> Future[Any]:
        """The result of work that was just queued, or of equal work that still waits."""
        waiting = self._by_key.get(deferred.key)
        if waiting is not None and not waiting.running() and not waiting.done():
            return waiting
        future: Future[Any] = Future()
        if deferred.key is not None:
            self._by_key[deferred.key] = future
        self._waiting[deferred.lane].put((deferred.work, future))
        return future

    def _serve(self, queue: _WorkQueue) -> None:
        while True:
            item = queue.get()
            if item is None or self._is_ending:
                return
            _do(*item)
            # Nothing of it may be kept until the next work comes.
            del item

    def _hand_back(self, tag: Tag, deferred: Deferred[Any], future: Future[Any]) -> None:
        """Called in the thread that did the work."""
        self._done.put((tag, deferred, future))
        self.wake()


def _do(work: Callable[[], Any], future: Future[Any]) -> None:
    future.set_running_or_notify_cancel()
    try:
        result = work()
    except BaseException as error:
        future.set_exception(error)
        # The future has the error, and the error this frame: so that this is no cycle.
        del future
    else:
        future.set_result(result)
