"""Keeps the log files within their capacity: evicts segments, and gives back the space of those that left."""

from __future__ import annotations

from itertools import islice

from krul_backend.tiers.ssd.index import Entry, file_number_of, offset_of
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.own_files import FILE_HEADER_NUM_BYTES
from krul_backend.tiers.ssd.recovery import ClearFile
from krul_backend.tiers.ssd.tier_state import TierState

MAX_EVICTED = 128
"""The most segments that are evicted in one hold of the tier's lock."""

_MAX_REMOVED = 1024
"""The most segments that a clear takes out of the index at once."""

MAX_FILES = 256
"""As each of them is open; a file stays as long as one record in it is used."""

_LEAST_SHARE, _LARGEST_SHARE = 64, 8
"""Of the capacity: so much is evicted at once, as each time the index is synced; more than the former only
for what waits to be written."""


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

    def make(self, record_num_bytes: int, num_bytes_to_come: int = 0) -> bool:
        """Free space until a record of this size can be appended; if that takes an eviction, for all that the
        caller is about to append, about.

        False if segments that are held leave no room.

        Raises:
            OSError: a file or the index could not be changed.
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
                at_once = min(num_bytes_to_come, self._capacity_bytes // _LARGEST_SHARE)
                victims = self._victims(max(shortfall, self._capacity_bytes // _LEAST_SHARE, at_once))
            else:
                victims = self._rest()
            if self._evict(victims):
                self._state.catalog.commit()
            elif any(map(writer.is_busy, writer.files.values())):
                # After the commit its records may be evicted.
                writer.commit()
            else:
                return False

    def give_back(self) -> None:
        """Make holes of the records that left and are not being read; remove files with nothing else.

        Durable after the writer's next ``commit``. Raises OSError.
        """
        catalog, writer = self._state.catalog, self._writer
        with self._state.lock:
            empty = [file for file in writer.files.values() if self._is_idle(file) and not file.live_bytes]
        for file in empty:
            self.remove(file)
        with self._state.lock:
            places = catalog.not_read()
        for place in places:
            file = writer.files[file_number_of(place)]
            writer.punch(file, offset_of(place), catalog.dead[place])
            with self._state.lock:
                del catalog.dead[place]

    def remove(self, file: LogFile) -> None:
        """Remove a file with all that is in it. Raises OSError."""
        self._writer.remove(file)
        with self._state.lock:
            self._state.catalog.lose_file(file.number)

    def remove_cleared(self, clears: ClearFile) -> None:
        """Take out of the index what was cleared, and give its space back; nothing of it is found already."""
        catalog = self._state.catalog
        cleared = (
            place
            for place, entry in catalog.index.records()
            if clears.is_cleared(entry.fingerprint.hex(), file_number_of(place))
        )
        try:
            while places := list(islice(cleared, _MAX_REMOVED)):
                with self._state.lock:
                    for place in places:
                        catalog.remove(place)
                catalog.commit()
            catalog.cleared = clears.digest
            self.give_back()
        except OSError as error:
            self._state.failed("failed removal", error)

    def _is_idle(self, file: LogFile) -> bool:
        is_unused = self._writer.is_active(file) and file.num_bytes <= FILE_HEADER_NUM_BYTES
        return file.num_holds == 0 and not is_unused and not self._writer.is_busy(file)

    def _victims(self, num_bytes: int) -> list[tuple[int, Entry]]:
        """The segments to evict for ``num_bytes``."""
        victims: list[tuple[int, Entry]] = []
        # Each step of this iteration costs something: the last one is not taken.
        for place, entry in islice(self._state.catalog.victims(), MAX_EVICTED):
            victims.append((place, entry))
            num_bytes -= entry.record_num_bytes
            if num_bytes <= 0:
                break
        return victims

    def _rest(self) -> list[tuple[int, Entry]]:
        """All segments of one file, of which none is held: of the oldest where only whole files give space
        back, else of the one with the least live bytes."""
        files = [file for file in self._writer.files.values() if self._is_idle(file)]
        files.sort(key=lambda file: file.live_bytes if self._writer.can_punch else file.number)
        for file in files:
            records = list(self._state.catalog.index.records(file.number))
            if records and not any(self._state.catalog.is_held(place) for place, _ in records):
                return records
        return []

    def _evict(self, victims: list[tuple[int, Entry]]) -> int:
        """Evict segments that are not held meanwhile; returns their number."""
        with self._state.lock:
            catalog, counters = self._state.catalog, self._state.counters
            evicted = [
                entry for place, entry in victims if not catalog.is_held(place) and catalog.remove(place)
            ]
            counters.add(evicted_segments=len(evicted), evicted_bytes=sum(e.num_bytes for e in evicted))
        return len(evicted)
