"""Keeps the log files within their capacity: evicts segments, compacts and removes files."""

from __future__ import annotations

import logging
import time
from functools import partial

from krul_backend.errors import TierReadError
from krul_backend.tiers.common.record import encode_metadata
from krul_backend.tiers.ssd.catalog import SsdSegment, TierState
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.log_writer import GROUP_NUM_BYTES, LogWriter
from krul_backend.tiers.ssd.own_files import FILE_HEADER_NUM_BYTES
from krul_backend.tiers.ssd.segment_reads import SegmentReads

logger = logging.getLogger(__name__)

MAX_DEAD_SHARE = 0.2
"""The share of the space that may be dead before live records are copied to free it."""

MAX_EVICTED = 128
"""The most segments that are evicted in one hold of the tier's lock."""

LOCK_PAUSE_S = 1e-4
"""Pause between two holds of the lock. It is not a fair lock: without a pause nobody else would get it."""


class Room:
    """Makes room for new records. Called by one thread at a time, which may append to the log.

    Args:
        capacity_bytes: how much the files may take at any moment. One file's size of it is reserved for
            compaction, which writes the records to keep before it removes the file that they were in.
        state: the tier's; its lock is taken here, never held during a system call.
    """

    def __init__(
        self,
        capacity_bytes: int,
        file_bytes: int,
        state: TierState,
        writer: LogWriter,
        reads: SegmentReads,
    ) -> None:
        self._capacity_bytes = capacity_bytes
        self._limit_bytes = capacity_bytes - file_bytes
        self._state = state
        self._writer = writer
        self._reads = reads

    @property
    def max_record_bytes(self) -> int:
        return self._limit_bytes - FILE_HEADER_NUM_BYTES

    def make(self, record_num_bytes: int) -> bool:
        """Free space until a record of this size can be appended.

        False if segments that are held leave no room, if records that must be moved cannot be read now, or if
        a clear waits that would have to wait for that.

        Raises:
            OSError: a file could not be written or removed.
        """
        while True:
            with self._state.lock:
                grows_by = self._writer.num_bytes_for(record_num_bytes) if record_num_bytes else 0
                shortfall = self._writer.used_bytes + grows_by - self._limit_bytes
                if shortfall <= 0:
                    return True
                files = [file for file in self._writer.files.values() if self._is_idle(file)]
                has_dead = any(file.live_bytes == 0 for file in files)
                worst = max(files, key=_dead_bytes, default=None)
                if worst is not None and not self._can_compact(worst):
                    worst = None
                # With less dead space, further evictions may empty a whole file, and no copy is needed.
                lacking_bytes = int(MAX_DEAD_SHARE * self._limit_bytes) - sum(map(_dead_bytes, files))
                is_worth_it = worst is not None and lacking_bytes <= 0
                has_evicted = not has_dead and not is_worth_it and self._evict(max(shortfall, lacking_bytes))
                is_any_busy = any(self._writer.is_busy(file) for file in self._writer.files.values())
            if has_evicted:
                time.sleep(LOCK_PAUSE_S)
            elif has_dead:
                self.remove_dead()
            elif worst is not None:
                if not self._compact(worst):
                    return False
            elif is_any_busy:
                # After the commit the file is idle and may be compacted.
                self._writer.commit()
            else:
                return False

    def remove_dead(self) -> None:
        """Remove the files without live records. Raises OSError."""
        with self._state.lock:
            dead = [f for f in self._writer.files.values() if self._is_idle(f) and f.live_bytes == 0]
        for file in dead:
            self._writer.remove(file)

    def _is_idle(self, file: LogFile) -> bool:
        is_unused = self._writer.is_active(file) and file.num_bytes <= FILE_HEADER_NUM_BYTES
        return file.num_holds == 0 and not is_unused and not self._writer.is_busy(file)

    def _can_compact(self, file: LogFile) -> bool:
        # The records to keep may need up to two new files.
        needed = file.live_bytes + 2 * FILE_HEADER_NUM_BYTES
        return _dead_bytes(file) > 0 and self._writer.used_bytes + needed <= self._capacity_bytes

    def _evict(self, num_bytes: int) -> bool:
        """Evict segments until ``num_bytes`` more are dead, or a whole file; False if there is none to evict.

        Stops after ``MAX_EVICTED`` segments, as the lock is held.
        """
        victims: list[SsdSegment] = []
        live_bytes: dict[LogFile, int] = {}
        num_left = num_bytes
        # Each step of this iteration costs something: the last one is not taken.
        for segment in self._state.catalog.victims():
            victims.append(segment)
            num_left -= segment.taken_bytes
            file = segment.file
            live_bytes[file] = live_bytes.get(file, file.live_bytes) - segment.taken_bytes
            if num_left <= 0 or len(victims) == MAX_EVICTED or (not live_bytes[file] and self._is_idle(file)):
                break
        for segment in victims:
            self._evict_one(segment)
        return bool(victims)

    def _compact(self, file: LogFile) -> bool:
        """Copy a file's live records to the end of the log. The file is dead afterwards, and removed next.

        False if the tier was suspended meanwhile, or a clear waits: then some records were moved and others
        not, and there is no use in trying the file again now.
        """
        if self._state.pending_clears:
            return False
        # Seal first: if this is the file that is written now, its records would be appended to itself.
        self._writer.seal()
        with self._state.lock:
            segments = [segment for segment in self._state.catalog.segments if segment.file is file]
        segments.sort(key=lambda segment: segment.offset)
        num_moved = num_unsynced_bytes = 0
        for segment in segments:
            if self._state.pending_clears:
                break
            manifest = segment.manifest
            try:
                blocks = self._reads.read_for_upkeep(segment)
            except TierReadError as error:
                cause = error.__cause__
                if isinstance(cause, OSError):
                    # A record that cannot be read would keep its file forever; a slow one may be read later.
                    if not isinstance(cause, TimeoutError):
                        with self._state.lock:
                            self._evict_one(segment)
                    raise cause from error
                with self._state.lock:
                    has_left = not segment.is_indexed
                if has_left:
                    # Its bytes were wrong, or it was cleared meanwhile.
                    continue
                break
            metadata = encode_metadata(manifest, segment.checksums)
            self._writer.append(manifest, metadata, blocks, segment.record.sequence, partial(_move, segment))
            num_moved += 1
            num_unsynced_bytes += segment.taken_bytes
            if num_unsynced_bytes >= GROUP_NUM_BYTES:
                self._writer.commit()
                num_unsynced_bytes = 0
        self._writer.commit()
        logger.debug("compacted %s: moved %d of %d segments", file.path.name, num_moved, len(segments))
        with self._state.lock:
            return file.live_bytes == 0

    def _evict_one(self, segment: SsdSegment) -> None:
        """Evict a segment, unless it has left already. Called with the lock held."""
        if segment.is_indexed:
            self._state.catalog.remove(segment)
            self._state.counters.add(evicted_segments=1, evicted_bytes=segment.manifest.num_bytes)


def _dead_bytes(file: LogFile) -> int:
    return file.num_bytes - FILE_HEADER_NUM_BYTES - file.live_bytes


def _move(segment: SsdSegment, file: LogFile, offset: int) -> None:
    """Note a segment's new place; called under the lock. If it has left meanwhile, the copy is dead space."""
    if segment.is_indexed:
        segment.file.live_bytes -= segment.taken_bytes
        segment.file, segment.offset = file, offset
        file.live_bytes += segment.taken_bytes
