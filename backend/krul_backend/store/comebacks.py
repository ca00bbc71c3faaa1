"""Brings conversations back to DRAM shortly before their next use."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krul_backend.errors import StoreClosedError
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.interface import Clock

logger = logging.getLogger(__name__)

MAX_COMEBACKS = 65_536
"""How many conversations may wait for the time when they come back to DRAM."""

_NUM_SPARE_ENTRIES = 64

PathEnd = tuple[ModelIdentity, str]
"""A model, and the key of the last page of a stored conversation: all keys before it follow from that."""


@dataclass(frozen=True)
class Comeback:
    """A conversation that is to be read into DRAM at ``due_s``, before its next use; takes ``load_s``."""

    end: PathEnd
    due_s: float
    next_use_at_s: float
    load_s: float


class Comebacks:
    """Calls ``bring`` for conversations shortly before their next use, one after the other. Thread-safe.

    Between two calls it waits as long as a tier needs to read what was asked for: many that are due at once
    do not fill the tier's queue. Its thread begins with the first conversation.
    """

    def __init__(
        self, bring: Callable[[Comeback], bool], clock: Clock, max_comebacks: int = MAX_COMEBACKS
    ) -> None:
        self._bring = bring
        self._clock = clock
        self._max_comebacks = max_comebacks
        self._changed = threading.Condition()
        self._waiting: dict[tuple[str, str], Comeback] = {}
        # A heap. Entries of those that were cancelled or replaced stay for a while.
        self._by_due: list[tuple[float, int, Comeback]] = []
        self._numbers = itertools.count()
        self._thread: threading.Thread | None = None
        self._is_closed = False

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, comeback: Comeback) -> None:
        """Wait for the time of a conversation. Does nothing if too many wait already."""
        with self._changed:
            key = _key_of(*comeback.end)
            if self._is_closed or (len(self._waiting) >= self._max_comebacks and key not in self._waiting):
                return
            self._waiting[key] = comeback
            heapq.heappush(self._by_due, (comeback.due_s, next(self._numbers), comeback))
            self._drop_outdated()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="krul-comeback", daemon=True)
                self._thread.start()
            if self._by_due[0][2] is comeback:
                self._changed.notify()

    def cancel(self, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        """Forget the conversations that end with one of these pages."""
        with self._changed:
            if self._waiting:
                for page_key in page_keys:
                    self._waiting.pop(_key_of(model, page_key), None)
                self._drop_outdated()

    def take_due(self) -> Comeback | None:
        """Take out the conversation that is due first, if its time has come."""
        with self._changed:
            while self._by_due and self._by_due[0][0] <= self._clock():
                comeback = heapq.heappop(self._by_due)[2]
                if self._is_waiting(comeback):
                    del self._waiting[_key_of(*comeback.end)]
                    return comeback
            return None

    def close(self) -> None:
        """End the thread. Nothing comes back any more."""
        with self._changed:
            self._is_closed = True
            self._waiting.clear()
            self._by_due.clear()
            self._changed.notify()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while not self._is_closed:
            comeback = self.take_due()
            pause_s = None
            if comeback is not None:
                try:
                    pause_s = comeback.load_s if self._bring(comeback) else 0.0
                except StoreClosedError:
                    return
                except Exception:
                    logger.exception("a conversation did not come back to host memory in time")
            with self._changed:
                if pause_s is not None:
                    self._changed.wait_for(lambda: self._is_closed, pause_s)
                elif not self._by_due:
                    self._changed.wait_for(lambda: self._is_closed or self._by_due)
                elif (wait_s := self._by_due[0][0] - self._clock()) > 0:
                    self._changed.wait(wait_s)

    def _is_waiting(self, comeback: Comeback) -> bool:
        return self._waiting.get(_key_of(*comeback.end)) is comeback

    def _drop_outdated(self) -> None:
        if len(self._by_due) > 2 * len(self._waiting) + _NUM_SPARE_ENTRIES:
            self._by_due = [entry for entry in self._by_due if self._is_waiting(entry[2])]
            heapq.heapify(self._by_due)


def _key_of(model: ModelIdentity, page_key: str) -> tuple[str, str]:
    return model.fingerprint, page_key
