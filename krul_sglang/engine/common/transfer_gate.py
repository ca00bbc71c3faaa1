"""Lets restores go before saves: a request waits for a restore, nobody waits for a save."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Patience:
    """Seconds that a saver will still wait for restores, over all of its copies."""

    left_s: float


class TransferGate:
    """Makes savers wait between two copies while a restore runs, since copies both ways slow each other."""

    def __init__(self, max_wait_s: float = 1.0) -> None:
        self._max_wait_s = max_wait_s
        self._restores: list[Callable[[], bool]] = []
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

    def patience(self) -> Patience:
        """What one turn may wait. It is bounded, because the turn's path stays locked on the device."""
        return Patience(self._max_wait_s)

    def let_restores_pass(self, patience: Patience) -> None:
        """Wait until nothing is being restored or ``patience`` is used up; takes the time off it."""
        begin_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: patience.left_s <= 0 or not any(is_wanted() for is_wanted in self._restores),
                patience.left_s,
            )
        patience.left_s -= time.monotonic() - begin_s
