"""Calls with a time limit, after which the caller goes on without them."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class TimedCalls:
    """Runs calls on a few threads of its own; a caller waits for its call for a limited time.

    A late call goes on. ``is_late`` is true while there is one: a new call would likely be late, too.
    """

    def __init__(self, name: str, num_threads: int) -> None:
        self._lock = threading.Lock()
        self._num_late = 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_late(self) -> bool:
        with self._lock:
            return self._num_late > 0

    def run(self, function: Callable[[], None], timeout_s: float) -> bool:
        """Run a call; False if it did not end in time. It should raise nothing; an exception is logged."""
        call = _Call(function)
        self._calls.put(call)
        if call.ended.wait(timeout_s):
            return True
        with self._lock:
            if call.ended.is_set():
                return True
            call.is_late = True
            self._num_late += 1
        return False

    def begin(self, function: Callable[[], None]) -> None:
        """Run a call that nobody waits for."""
        self._calls.put(_Call(function))

    def close(self) -> None:
        """End the threads after the calls that were begun. Does not wait for them."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.function()
            except Exception:
                logger.exception("a call of the Mooncake tier failed")
            with self._lock:
                call.ended.set()
                self._num_late -= call.is_late


class _Call:
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.ended = threading.Event()
        self.is_late = False
