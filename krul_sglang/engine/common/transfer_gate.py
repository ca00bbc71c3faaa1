"""Lets restores and forwards go before saves: requests wait for the former, and none for a save."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

IDLE_AFTER_S = 0.05
"""A server is idle when it has computed nothing for so long. Between two steps of decoding it is not."""


@dataclass
class Patience:
    """How long a saver will still wait, over all its pieces of work: ``left_s`` seconds, for restores, and
    also for forwards if it waits ``until_idle``."""

    left_s: float
    until_idle: bool = False


class TransferGate:
    """Makes savers wait between two pieces of work while a restore runs: copies both ways slow each other.

    A saver is a thread that stores turns. Those that can wait longer also wait until the server is idle,
    where forwards share its cores.
    """

    def __init__(self, max_wait_s: float = 1.0, max_idle_wait_s: float = 5.0) -> None:
        self._max_wait_s = max_wait_s
        self._max_idle_wait_s = max_idle_wait_s
        self._restores: list[Callable[[], bool]] = []
        # Infinite while a forward runs.
        self._idle_from_s = -math.inf
        self._changed = threading.Condition()

    @contextmanager
    def restoring(self, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Savers wait while this is held, unless ``is_wanted()`` is False: the restore may be stuck then."""
        with self._changed:
            self._restores.append(is_wanted)
        try:
            yield
        finally:
            with self._changed:
                self._restores.remove(is_wanted)
                self._changed.notify_all()

    @contextmanager
    def computing(self) -> Iterator[None]:
        """The server is not idle while this is held, nor right after. For one thread at a time."""
        self._idle_from_s = math.inf
        try:
            yield
        finally:
            with self._changed:
                self._idle_from_s = time.monotonic() + IDLE_AFTER_S
                self._changed.notify_all()

    def patience(self, *, until_idle: bool = False) -> Patience:
        """What one turn may wait. It is bounded, because the turn's path stays locked on the device."""
        return Patience(self._max_idle_wait_s if until_idle else self._max_wait_s, until_idle)

    def give_way(self, patience: Patience) -> None:
        """Wait until nothing goes before a save, or ``patience`` is used up; takes the time off it."""
        begin_s = time.monotonic()
        end_s = begin_s + patience.left_s
        with self._changed:
            while (now_s := time.monotonic()) < end_s:
                busy_until_s = self._busy_until_s(patience)
                if busy_until_s <= now_s:
                    break
                self._changed.wait(min(end_s, busy_until_s) - now_s)
        patience.left_s -= time.monotonic() - begin_s

    def _busy_until_s(self, patience: Patience) -> float:
        """When a save may go on; infinite if that is not known yet."""
        if any(is_wanted() for is_wanted in self._restores):
            return math.inf
        return self._idle_from_s if patience.until_idle else -math.inf
