"""Restoring goes before saving: a request waits for the one, nobody for the other."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class TransferGate:
    """Copies in both directions at once slow each other; savers let restores pass, between two copies."""

    def __init__(self, max_wait_s: float = 1.0) -> None:
        self._max_wait_s = max_wait_s
        self._num_restores = 0
        self._changed = threading.Condition()

    @contextmanager
    def restoring(self) -> Iterator[None]:
        with self._changed:
            self._num_restores += 1
        try:
            yield
        finally:
            with self._changed:
                self._num_restores -= 1
                self._changed.notify_all()

    def let_restores_pass(self) -> None:
        """Wait until nothing is being restored, but never long: a saver must get on, too."""
        with self._changed:
            self._changed.wait_for(lambda: self._num_restores == 0, self._max_wait_s)
