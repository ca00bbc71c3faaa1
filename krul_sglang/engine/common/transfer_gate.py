"""Says when saves and encodings may work: restores and forwards go first, since requests wait for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Patience:
    """How long a saver will still wait for restores, over all its pieces of work: ``left_s`` seconds."""

    left_s: float


class TransferGate:
    """Makes savers wait between two pieces of work while a restore runs: copies both ways slow each other.

    A saver is a thread that stores turns. The thread that encodes also works less while the server is not
    idle, and less again while requests wait; the scheduler says with ``has_queue`` whether any do.
    """

    def __init__(self, max_wait_s: float = 1.0) -> None:
        self.has_queue = False
        self._max_wait_s = max_wait_s
        self._restores: list[Callable[[], bool]] = []
        self._is_idle = True
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

    def note_forward(self) -> None:
        """A forward begins: the server is not idle until ``note_idle``, and not between two forwards."""
        self._is_idle = False

    def note_idle(self) -> None:
        """The scheduler has nothing to compute."""
        if not self._is_idle:
            with self._changed:
                self._is_idle = True
                self._changed.notify_all()

    def is_idle(self) -> bool:
        """Whether the server has nothing to compute."""
        return self._is_idle

    def patience(self) -> Patience:
        """What one piece of storing may wait. It is bounded, because a turn's slots may be evicted."""
        return Patience(self._max_wait_s)

    def hurry(self, patience: Patience) -> None:
        """Let a saver go on at once: somebody waits for it."""
        with self._changed:
            patience.left_s = 0.0
            self._changed.notify_all()

    def give_way(self, patience: Patience) -> None:
        """Wait until no restore goes before a save, or ``patience`` is used up; takes the time off it."""
        before_s = time.monotonic()
        with self._changed:
            while patience.left_s > 0 and any(is_wanted() for is_wanted in self._restores):
                self._changed.wait(patience.left_s)
                now_s = time.monotonic()
                patience.left_s -= now_s - before_s
                before_s = now_s

    def rest(self, seconds: float) -> None:
        """Wait so long, or until the server is idle."""
        end_s = time.monotonic() + seconds
        with self._changed:
            while not self._is_idle and (left_s := end_s - time.monotonic()) > 0:
                self._changed.wait(left_s)
