"""The tier on a local SSD."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from krul_backend.errors import ConfigError, RecordError, TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.eviction import EvictionPolicy, LruPolicy
from krul_backend.tiers.common.interface import Block, Clock, DamageReport, SegmentInfo, TierStats
from krul_backend.tiers.common.lower_tier import LowerTier, QueuedSegment, Suspension, TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load
from krul_backend.tiers.common.record import RECORD_ALIGN, encode_metadata, no_checksums
from krul_backend.tiers.ssd.catalog import Catalog, SsdSegment, TierState
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.own_files import DirectoryLock, format_directory, remove_older_formats
from krul_backend.tiers.ssd.reader import PieceReader
from krul_backend.tiers.ssd.recovery import Recovery
from krul_backend.tiers.ssd.room import LOCK_PAUSE_S, Room
from krul_backend.tiers.ssd.segment_reads import MAX_READS_AT_ONCE, PROBE_NUM_BYTES, SegmentReads
from krul_backend.tiers.ssd.segment_writes import SegmentWrites

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_CLOSE_TIMEOUT_S = 5.0
_LEAST_FILE_BYTES = 4 * RECORD_ALIGN

_MAX_ENTERED = 128
"""The most segments that are entered into the catalog in one hold of the tier's lock."""


class SsdTier(LowerTier):
    """Keeps segments in append-only log files in ``<directory>/krul-v<format>/``; see docs/tiers.md.

    Only durable segments can be found. A thread reads the headers of those that lie there already: until that
    is done nothing is found, and what is put waits. A disk that hangs delays neither ``match`` nor ``put``:
    the lock of the bookkeeping is never held during I/O.

    Args:
        capacity_bytes: how much all files together may take, at any moment.
        read_timeout_s: a fetch fails when one piece of some MiB takes longer.
        policy: order of eviction, owned by the tier from here on; least recently used first if not given.
        disk: the system calls.
        clock: seconds, monotonic; for idle times and suspensions.
        max_queued_bytes: size of the segments that may wait to be written; further ones are refused.
        file_bytes: size of a log file; by default a 32nd of the capacity, at least 64 MiB or an eighth of it.
        patience_s: how long to wait for another process to leave the directory.

    Raises:
        ConfigError: the capacity is too small.
        DaemonError: the directory cannot be used, or another process uses it.
    """

    name = "ssd"

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        read_timeout_s: float = 1.0,
        policy: EvictionPolicy | None = None,
        disk: Disk | None = None,
        clock: Clock = time.monotonic,
        max_queued_bytes: int = 256 * _MIB,
        file_bytes: int | None = None,
        patience_s: float = 0.0,
    ) -> None:
        if file_bytes is None:
            file_bytes = max(capacity_bytes // 32, min(64 * _MIB, capacity_bytes // 8))
        if file_bytes < _LEAST_FILE_BYTES or capacity_bytes < 4 * file_bytes:
            raise ConfigError(
                f"an SSD tier of {capacity_bytes} bytes in files of {file_bytes}: files need at least "
                f"{_LEAST_FILE_BYTES} bytes, and the capacity must be 4 of them or more"
            )
        disk = disk if disk is not None else Disk()
        self._capacity_bytes = capacity_bytes
        self._directory = format_directory(directory)
        catalog = Catalog(policy if policy is not None else LruPolicy(), clock)
        fullness = Suspension(f"{self.name}, writing only", clock)
        self._state = TierState(catalog, Suspension(self.name, clock), fullness, clock)
        self._directory_lock = DirectoryLock(self._directory, patience_s)
        try:
            self._recovery = Recovery(disk, self._directory)
        except BaseException:
            self._directory_lock.release()
            raise
        self._disk = disk
        self._reader = PieceReader(disk, read_timeout_s)
        self._writer = LogWriter(
            disk,
            self._directory,
            self._state.lock,
            file_bytes,
            self._recovery.can_punch,
            self._recovery.sizes,
            self._recovery.next_number,
        )
        self.reads = ReadQueue(MAX_READS_AT_ONCE, f"krul-read-{self.name}")
        self._reads = SegmentReads(self._state, self._writer, self._reader, self.reads)
        self._room = Room(capacity_bytes, self._state, self._writer)
        try:
            self._measure()
        except OSError as error:
            self._state.failed("failed start", error)
        # What was discarded while the tier opened: what the scan finds of it later must go, too.
        self._discarded: list[SegmentManifest] = []
        self._has_opened = threading.Event()
        self._writes = SegmentWrites(
            self._state, self._writer, self._room, self._recovery.clears, self._open, max_queued_bytes
        )

    def _measure(self) -> None:
        """Measure what reading costs, with a file that fits. Raises OSError."""
        left_bytes = self._capacity_bytes - self._writer.used_bytes
        disk_free_bytes = self._disk.free_bytes(self._directory)
        if disk_free_bytes < left_bytes:
            logger.warning(
                "the SSD tier may still take %d bytes, but the file system of %s has only %d left",
                left_bytes,
                self._directory,
                disk_free_bytes,
            )
        num_bytes = min(PROBE_NUM_BYTES, left_bytes // 2, disk_free_bytes // 2) // RECORD_ALIGN * RECORD_ALIGN
        if num_bytes > 0:
            self._reads.measure(self._disk, self._directory, num_bytes)

    def _open(self, go_on: Callable[[], bool]) -> int | None:
        """Read what lies on the disk; see ``SegmentWrites``."""
        started_s = time.monotonic()
        found = self._recovery.scan(go_on)
        if found is None:
            return None
        self._writer.adopt(found.files, found.unread, self._recovery.clears.first_open_number)
        if not self._fill_catalog(found.segments, go_on):
            return None
        try:
            self._disk.sync_directory(self._directory)
            remove_older_formats(self._disk, self._directory.parent)
            # The cap may be smaller than it was when the files were written.
            self._room.make(0)
            self._writer.commit()
        except OSError as error:
            self._state.failed("failed start", error)
        with self._state.lock:
            for manifest in self._discarded:
                self._remove_like(manifest)
            self._discarded.clear()
            self._state.is_opening = False
            num_segments = self._state.catalog.num_segments
        self._has_opened.set()
        logger.info(
            "the SSD tier has %d segments in %d files, which took %.1f s to read",
            num_segments,
            len(found.files),
            time.monotonic() - started_s,
        )
        return found.next_sequence

    def _fill_catalog(self, segments: Sequence[SsdSegment], go_on: Callable[[], bool]) -> bool:
        """Enter the segments, ordered by sequence, but those that are cleared meanwhile.

        False if ``go_on`` says so.
        """
        state, clears = self._state, self._recovery.clears
        for first in range(0, len(segments), _MAX_ENTERED):
            with state.lock:
                for segment in segments[first : first + _MAX_ENTERED]:
                    model = segment.manifest.model
                    is_cleared = clears.is_cleared(model.fingerprint, segment.file.number)
                    if is_cleared or state.is_being_cleared(model):
                        state.catalog.dead.append(segment)
                    else:
                        state.catalog.remove_superseded(segment)
                        state.catalog.add(segment)
            if not go_on():
                return False
            time.sleep(LOCK_PAUSE_S)
        return True

    def wait_until_open(self, timeout_s: float) -> bool:
        return self._has_opened.wait(timeout_s)

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._state.lock:
            if not self._state.is_findable:
                # Segments that cannot be read now should be stored again.
                return [range(len(page_keys))] if page_keys else []
            return self._state.catalog.index.find_missing(model, page_keys)

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[SsdSegment], ...]:
        with self._state.lock:
            if not self._state.is_findable:
                return ()
            runs = self._state.catalog.match(model, page_keys, token_ids, next_token)
            for run in runs:
                run.segment.num_holds += 1
            return runs

    def hold(self, run: PageRun[SsdSegment]) -> None:
        with self._state.lock:
            run.segment.num_holds += 1

    def release(self, run: PageRun[SsdSegment]) -> None:
        with self._state.lock:
            run.segment.num_holds -= 1

    def fetch(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        self._reads.read(reads, priority)

    def put(
        self,
        manifest: SegmentManifest,
        blocks: Sequence[Block],
        checksums: Sequence[bytes],
        done: Callable[[], None],
    ) -> bool:
        if not self._writes.has_room(manifest):
            # Known before the metadata are made: it is asked again and again while the disk is behind.
            return False
        metadata = encode_metadata(manifest, tuple(checksums))
        return self._writes.put(QueuedSegment(manifest, tuple(blocks), tuple(checksums), metadata, done))

    def can_hold(self, manifest: SegmentManifest) -> bool:
        metadata = encode_metadata(manifest, no_checksums(manifest))
        return self._writes.can_hold(manifest, metadata)

    def may_hold(self, model: ModelIdentity, page_key: str) -> bool:
        return self._state.is_opening or super().may_hold(model, page_key)

    def discard(self, manifest: SegmentManifest) -> None:
        """As ``LowerTier.discard``. Durable after a ``flush``."""
        self._writes.queue.give_up(lambda item: item.manifest.shares_encoded_pages(manifest))
        with self._state.lock:
            if self._state.is_opening:
                self._discarded.append(manifest)
            self._remove_like(manifest)
        self._state.wake()

    def _remove_like(self, manifest: SegmentManifest) -> None:
        """Take out what holds a page of a segment and is encoded like it. Called with the lock held."""
        for segment in self._state.catalog.index.segments_of(manifest.model, manifest.page_keys):
            if segment.manifest.shares_encoded_pages(manifest):
                self._state.catalog.remove(segment)

    def holder_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        with self._state.lock:
            return self._state.catalog.index.manifest_of(model, page_key)

    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        with self._state.lock:
            return self._state.catalog.index.is_needed(model, page_key)

    def cost(self) -> TierCost:
        return self._reads.cost

    def flush(self, timeout_s: float) -> bool:
        return self._writes.flush(timeout_s)

    def clear(self, model: ModelIdentity | None = None) -> None:
        """As ``LowerTier.clear``.

        If the disk can neither note the clear nor remove files, this process uses it no more.
        """
        self._writes.clear(model)

    def list_segments(self) -> list[SegmentInfo]:
        with self._state.lock:
            now_s = self._state.clock()
            return [
                SegmentInfo.of(
                    segment.segment_id,
                    segment.manifest,
                    self.name,
                    num_leases=segment.num_holds,
                    idle_s=now_s - segment.last_used_s,
                )
                for segment in self._state.catalog.segments
            ]

    def verify(self) -> DamageReport:
        """As ``LowerTier.verify``. Stops when the disk fails: what was not read is not in the report."""
        num_blocks = num_bytes = 0
        bad: list[int] = []
        with self._state.lock:
            segments = self._state.catalog.segments
        for segment in segments:
            try:
                self._reads.read_for_upkeep(segment)
            except TierReadError as error:
                if isinstance(error.__cause__, RecordError):
                    bad.append(segment.segment_id)
                elif isinstance(error.__cause__, OSError):
                    break
                else:
                    # It left meanwhile.
                    continue
            num_blocks += len(segment.manifest.layer_num_bytes)
            num_bytes += segment.manifest.num_bytes
        return DamageReport(num_blocks, num_bytes, tuple(bad))

    def stats(self) -> TierStats:
        queued_segments, queued_bytes = self._writes.queue.sizes()
        with self._state.lock:
            used_bytes = self._writer.used_bytes
            return TierStats(
                name=self.name,
                capacity_bytes=self._capacity_bytes,
                used_bytes=used_bytes,
                free_bytes=self._capacity_bytes - used_bytes,
                stored_bytes=self._state.catalog.stored_bytes,
                num_segments=self._state.catalog.num_segments,
                num_pages=self._state.catalog.index.num_pages,
                queued_segments=queued_segments,
                queued_bytes=queued_bytes,
                is_suspended=self._state.is_suspended,
                is_opening=self._state.is_opening,
                **self._state.counters.snapshot(),
            )

    def close(self) -> None:
        has_ended = self._writes.close(_CLOSE_TIMEOUT_S)
        # No read begins after this; those that run hold their files.
        with self._state.lock:
            was_closed, self._state.is_closed = self._state.is_closed, True
        if was_closed:
            return
        self._reader.close()
        self.reads.close()
        if has_ended:
            self._writer.close()
            self._directory_lock.release()
        else:
            # The write may still reach the disk: the directory stays locked until this process ends.
            logger.error("the SSD tier was closed while a write to %s hangs", self._directory)
