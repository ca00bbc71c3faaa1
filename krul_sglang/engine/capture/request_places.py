"""Hands out the places in which running requests are recorded: a bounded number at a time."""

from __future__ import annotations

import threading
from dataclasses import dataclass


@dataclass
class Recording:
    """A request that is recorded in ``place``, of which ``end`` tokens have run."""

    rid: str
    place: int
    end: int
    num_chunks: int = 0


class RequestPlaces:
    """Hands ``num_places`` places to requests, which are known by their row in SGLang's request pool.

    A place is taken until it is released, also after its request has ended, so that another thread can read
    what was recorded there. A request that was aborted loses its place when its slot gets another one.
    """

    def __init__(self, num_places: int) -> None:
        self._lock = threading.Lock()
        self._free = list(range(num_places))
        self._by_slot: dict[int, Recording] = {}

    def is_empty(self) -> bool:
        """Whether no running request is recorded."""
        return not self._by_slot

    def find(self, rid: str, slot: int) -> Recording | None:
        """The recording of a running request."""
        with self._lock:
            return self._find(rid, slot)

    def enter(self, rid: str, slot: int, start: int) -> tuple[Recording | None, bool]:
        """The recording of a request whose tokens from ``start`` on run now, and whether it is a new one.

        It is new when the request starts, or starts over, in ``slot``. It is None when no place is free.
        Tokens that were decoded since the last call need not be counted in its ``end``.
        """
        with self._lock:
            recording = self._find(rid, slot)
            if recording is not None and recording.end <= start:
                return recording, False
            if slot in self._by_slot:
                self._free.append(self._by_slot.pop(slot).place)
            if not self._free:
                return None, True
            recording = Recording(rid, self._free.pop(0), end=start)
            self._by_slot[slot] = recording
            return recording, True

    def take(self, rid: str, slot: int) -> Recording | None:
        """The recording of a request that has ended; None if it has none. The caller releases its place."""
        with self._lock:
            recording = self._find(rid, slot)
            if recording is not None:
                del self._by_slot[slot]
            return recording

    def release(self, place: int) -> None:
        with self._lock:
            self._free.append(place)

    def _find(self, rid: str, slot: int) -> Recording | None:
        recording = self._by_slot.get(slot)
        return recording if recording is not None and recording.rid == rid else None
