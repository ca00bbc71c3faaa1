"""Restoring goes before saving: a request waits for the one, nobody for the other."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass


@dataclass
class Patience:
    """How many seconds a saver will still wait for restores, in all."""

    left_s: float


class TransferGate:
    """Copies in both directions at once slow each other; savers let restores pass, between two copies."""

    def __init__(self, max_wait_s: float = 1.0) -> None:
        self._max_wait_s = max_wait_s
        self._restores: list[Callable[[], bool]] = []
        self._changed = threading.Condition()

    @contextmanager
    def restoring(self, is_wanted: Callable[[], bool] = lambda: True) -> Iterator[None]:
        """Savers wait meanwhile, but not for a restore that ``is_wanted`` no more: it may be stuck."""
        with self._changed:
            self._restores.append(is_wanted)
        try:
            yield
        finally:
            with self._changed:
                self._restores.remove(is_wanted)
                self._changed.notify_all()

    def patience(self) -> Patience:
        """For saving one turn: its path is locked on the device meanwhile, so it must get on, too."""
        return Patience(self._max_wait_s)

    def let_restores_pass(self, patience: Patience) -> None:
        """Wait until nothing is being restored, or the patience is at its end."""
        begin_s = time.monotonic()
        with self._changed:
            self._changed.wait_for(
                lambda: patience.left_s <= 0 or not any(is_wanted() for is_wanted in self._restores),
                patience.left_s,
            )
        patience.left_s -= time.monotonic() - begin_s
