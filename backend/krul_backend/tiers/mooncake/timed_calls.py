"""Calls that may take longer than their caller has time."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import Callable

logger = logging.getLogger(__name__)


class TimedCalls:
    """Runs calls on a few threads of its own, and lets the caller go on when one is late.

    A call that is late goes on; while there is one, ``is_late`` says so: who asks again would wait again.
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
        """Whether the call ended in time. What it raises is logged: it should raise nothing."""
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
        """Begin nothing more. Does not wait for calls that are late."""
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
