"""Keeps the log files within their capacity: evicts segments, and gives back the space of those that left."""

from __future__ import annotations

import time
from collections.abc import Iterable

from krul_backend.tiers.ssd.catalog import SsdSegment, TierState
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.own_files import FILE_HEADER_NUM_BYTES

MAX_EVICTED = 128
"""The most segments that are evicted in one hold of the tier's lock."""

MAX_FILES = 256
"""As each of them is open; a file stays as long as one record in it is used."""

_STEP_SHARE = 256
"""Of the capacity: so much is evicted at once, as asking for an order costs something."""

LOCK_PAUSE_S = 1e-4
"""Pause between two holds of the lock. It is not a fair lock: without a pause nobody else would get it."""


class Room:
    """Makes room for new records. Called by one thread at a time, which may append to the log.

    Args:
        capacity_bytes: how much the files may take at any moment.
        state: the tier's; its lock is taken here, never held during a system call.
    """

    def __init__(self, capacity_bytes: int, state: TierState, writer: LogWriter) -> None:
        self._capacity_bytes = capacity_bytes
        self._state = state
        self._writer = writer

    @property
    def max_record_bytes(self) -> int:
        return self._capacity_bytes - FILE_HEADER_NUM_BYTES

    def make(self, record_num_bytes: int) -> bool:
        """Free space until a record of this size can be appended.

        False if segments that are held leave no room.

        Raises:
            OSError: a file could not be changed or removed.
        """
        writer = self._writer
        while True:
            self.give_back()
            with self._state.lock:
                grows_by = writer.num_bytes_for(record_num_bytes) if record_num_bytes else 0
                shortfall = writer.used_bytes + grows_by - self._capacity_bytes
                has_too_many = len(writer.files) >= MAX_FILES and writer.needs_file(record_num_bytes)
                if shortfall <= 0 and not has_too_many:
                    return True
                if writer.can_punch and not has_too_many:
                    victims = self._victims(max(shortfall, self._capacity_bytes // _STEP_SHARE))
                else:
                    victims = self._rest()
                self._evict(victims)
            if victims:
                time.sleep(LOCK_PAUSE_S)
            elif any(map(writer.is_busy, writer.files.values())):
                # After the commit its records may be evicted.
                writer.commit()
            else:
                return False

    def give_back(self) -> None:
        """Make holes of the records that left and are not being read; remove files with nothing else.

        Durable after the writer's next ``commit``. Raises OSError; what is left then is given back next time.
        """
        with self._state.lock:
            dead = self._state.catalog.take_dead()
            empty = [
                file for file in self._writer.files.values() if self._is_idle(file) and not file.live_bytes
            ]
        try:
            for file in empty:
                self._writer.remove(file)
            while dead:
                self._writer.punch(dead[-1].file, dead[-1].offset, dead[-1].taken_bytes)
                dead.pop()
        finally:
            with self._state.lock:
                self._state.catalog.dead += dead

    def _is_idle(self, file: LogFile) -> bool:
        is_unused = self._writer.is_active(file) and file.num_bytes <= FILE_HEADER_NUM_BYTES
        return file.num_holds == 0 and not is_unused and not self._writer.is_busy(file)

    def _victims(self, num_bytes: int) -> list[SsdSegment]:
        """The segments to evict for ``num_bytes``, at most ``MAX_EVICTED``, as the lock is held."""
        victims: list[SsdSegment] = []
        # Each step of this iteration costs something: the last one is not taken.
        for segment in self._state.catalog.victims():
            victims.append(segment)
            num_bytes -= segment.taken_bytes
            if num_bytes <= 0 or len(victims) == MAX_EVICTED:
                break
        return victims

    def _rest(self) -> list[SsdSegment]:
        """All segments of one file, of which none is held: of the oldest where only whole files give space
        back, else of the one with the least live bytes."""
        held = {segment.file for segment in self._state.catalog.segments if segment.num_holds}
        files = [file for file in self._writer.files.values() if self._is_idle(file) and file not in held]
        rest = min(
            files, key=lambda file: file.live_bytes if self._writer.can_punch else file.number, default=None
        )
        return [segment for segment in self._state.catalog.segments if segment.file is rest]

    def _evict(self, victims: Iterable[SsdSegment]) -> None:
        for segment in victims:
            self._state.catalog.remove(segment)
            self._state.counters.add(evicted_segments=1, evicted_bytes=segment.manifest.num_bytes)
