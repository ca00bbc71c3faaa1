"""The tier on a local SSD."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import islice
from pathlib import Path

import lmdb

from krul_backend.errors import ConfigError, RecordError, TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.interface import Block, Clock, DamageReport, SegmentInfo, TierStats
from krul_backend.tiers.common.lower_tier import LowerTier, TailRead
from krul_backend.tiers.common.page_filter import PageFilter
from krul_backend.tiers.common.page_index import PageRun, missing_runs, num_right_pages
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load
from krul_backend.tiers.common.record import RECORD_ALIGN, SegmentRecord, encode_metadata, no_checksums
from krul_backend.tiers.common.tier_health import Suspension
from krul_backend.tiers.common.write_queue import QueuedSegment
from krul_backend.tiers.ssd.catalog import Catalog, SsdSegment, medium_errors
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.index import Entry, State, file_number_of, open_index, place_of
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.own_files import (
    CLEARS_NAME,
    FILE_HEADER_NUM_BYTES,
    DirectoryLock,
    format_directory,
    one_per_disk,
    remove_index,
    remove_older_formats,
)
from krul_backend.tiers.ssd.reader import PieceReader
from krul_backend.tiers.ssd.recovery import IndexOutdatedError, Recovered, Recovery
from krul_backend.tiers.ssd.room import Room
from krul_backend.tiers.ssd.segment_reads import MAX_READS_AT_ONCE, PROBE_NUM_BYTES, SegmentReads
from krul_backend.tiers.ssd.segment_writes import SegmentWrites
from krul_backend.tiers.ssd.tier_state import TierState

logger = logging.getLogger(__name__)

_MIB = 1 << 20
_CLOSE_TIMEOUT_S = 5.0
_LEAST_FILE_BYTES = 4 * RECORD_ALIGN

_MAX_ENTERED = 1024
"""So many records are entered into the index at once."""


class SsdTier(LowerTier):
    """Keeps segments in append-only log files in ``<directory>/krul-v<format>/``; see docs/tiers.md.

    Only durable segments can be found, by an index on the disk. A thread reads what the index does not know
    yet: until that is done nothing is found, and what is put waits. A disk that hangs delays no ``put``, and
    a ``match`` for ``read_timeout_s`` at most: no lock of the bookkeeping is held while a log is read.

    Args:
        others: further directories, each on a disk of its own: their log files are written in turn with those
            of ``directory``, and read at the same time. One of them that has the notes of clears takes its
            place, so their order does not matter.
        capacity_bytes: how much all files together may take, at any moment.
        read_timeout_s: a fetch fails when one piece of some MiB takes longer.
        eviction: the order of eviction, ``value`` or ``lru``.
        disk: the system calls.
        clock: seconds, monotonic; for idle times and suspensions.
        max_queued_bytes: size of the segments that may wait to be written; further ones are refused.
        file_bytes: size of a log file; by default a 32nd of the capacity, at least 64 MiB or an eighth of it.
        patience_s: how long to wait for another process to leave a directory.
        page_filter: gets all pages that lie on the disk; it is not complete before.

    Raises:
        ConfigError: the capacity is too small.
        DaemonError: a directory cannot be used, or another process uses it.
    """

    name = "ssd"

    def __init__(
        self,
        directory: Path,
        capacity_bytes: int,
        *,
        others: Sequence[Path] = (),
        read_timeout_s: float = 1.0,
        eviction: str = "lru",
        disk: Disk | None = None,
        clock: Clock = time.monotonic,
        max_queued_bytes: int = 256 * _MIB,
        file_bytes: int | None = None,
        patience_s: float = 0.0,
        page_filter: PageFilter | None = None,
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
        self._page_filter = page_filter
        if page_filter is not None:
            page_filter.is_complete = False
            self.notes_pages = True
        directories = [format_directory(each) for each in (directory, *others)]
        directories.sort(key=lambda each: not (each / CLEARS_NAME).is_file())
        self._directory, self._directories = directories[0], directories
        with ExitStack() as stack:
            for each in directories:
                stack.callback(DirectoryLock(each, patience_s).release)
            self._recovery = Recovery(disk, directories)
            self._index = open_index(disk, self._directory, capacity_bytes)
            self._locks = stack.pop_all()
        state = self._index.load_state()
        # Files that are not there now may come back: a clear must cover their numbers.
        known = state.files if state is not None else ()
        next_number = max([self._recovery.next_number, *(number + 1 for number in known)])
        lock, files = threading.Lock(), dict[int, LogFile]()
        catalog = Catalog(self._index, eviction, files, self._recovery.clears.is_cleared, lock)
        fullness = Suspension(f"{self.name}, writing only", clock)
        self._state = TierState(lock, catalog, Suspension(self.name, clock), fullness)
        self._disk = disk
        self._reader = PieceReader(disk, read_timeout_s, num_disks=len(directories))
        self._writer = LogWriter(
            disk,
            directories,
            lock,
            files,
            file_bytes,
            self._recovery.can_punch,
            self._recovery.sizes,
            next_number,
            lambda punched: catalog.commit(place_of(*each) for each in punched),
        )
        self.reads = ReadQueue(MAX_READS_AT_ONCE * len(directories), f"krul-read-{self.name}")
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
        """Measure what reading costs, with files that fit. Raises OSError."""
        left_bytes = self._capacity_bytes - self._writer.used_bytes
        disk_free_bytes = [self._disk.free_bytes(each) for each in one_per_disk(self._directories)]
        if sum(disk_free_bytes) < left_bytes:
            logger.warning(
                "the SSD tier may still take %d bytes, but the file systems of %s have only %d left",
                left_bytes,
                ", ".join(map(str, self._directories)),
                sum(disk_free_bytes),
            )
        num_bytes = min(PROBE_NUM_BYTES, left_bytes // 2, min(disk_free_bytes) // 2)
        if num_bytes >= RECORD_ALIGN:
            self._reads.measure(self._disk, self._directories, num_bytes // RECORD_ALIGN * RECORD_ALIGN)

    def _open(self, go_on: Callable[[], bool]) -> bool:
        """Go on with what lies on the disk; see ``SegmentWrites``."""
        started_s = time.monotonic()
        found = self._scan(go_on)
        if found is None:
            return False
        catalog, writer = self._state.catalog, self._writer
        dead = {
            place: num_bytes
            for place, num_bytes in self._index.dead()
            if file_number_of(place) in writer.files
        }
        for file in found.files:
            here = sum(num_bytes for place, num_bytes in dead.items() if file_number_of(place) == file.number)
            if writer.can_punch:
                file.taken_bytes = FILE_HEADER_NUM_BYTES + file.live_bytes + here
        writer.adopt(found.files, found.unread, self._recovery.clears.first_open_number)
        with self._state.lock:
            catalog.dead.update(dead)
            for number in catalog.known_files:
                if number not in writer.files and number not in found.unread:
                    catalog.lose_file(number)
        try:
            for each in self._directories:
                self._disk.sync_directory(each)
                remove_older_formats(self._disk, each.parent)
            # The cap may be smaller than it was when the files were written.
            self._room.make(0)
            writer.commit()
        except OSError as error:
            self._state.failed("failed start", error)
        with self._state.lock:
            discarded = list(self._discarded)
        for manifest in discarded:
            self._remove_like(manifest)
        if catalog.cleared != self._recovery.clears.digest:
            self._room.remove_cleared(self._recovery.clears)
        with self._state.lock:
            self._state.is_opening = False
            num_segments = catalog.num_segments
        self._has_opened.set()
        logger.info(
            "the SSD tier has %d segments in %d files, which took %.1f s to find out",
            num_segments,
            len(found.files),
            time.monotonic() - started_s,
        )
        self._note_pages(go_on)
        return True

    def _note_pages(self, go_on: Callable[[], bool]) -> None:
        """Add what the index has to the filter, which stays incomplete if the index cannot be read."""
        if self._page_filter is None:
            return
        records = self._index.records()
        with contextlib.suppress(lmdb.Error):
            while some := [*islice(records, _MAX_ENTERED)]:
                self._page_filter.add(entry.pages for _, entry in some)
                if not go_on():
                    return
            self._page_filter.is_complete = True

    def _scan(self, go_on: Callable[[], bool]) -> Recovered | None:
        """Read what the index does not know; all of it if the index is missing or of other files."""
        catalog, files = self._state.catalog, self._writer.files
        num_waiting = 0

        def enter(file: LogFile, offset: int, record: SegmentRecord) -> None:
            nonlocal num_waiting
            with self._state.lock:
                files[file.number] = file
                catalog.add(SsdSegment(record, file, offset))
            num_waiting += 1
            if num_waiting == _MAX_ENTERED:
                num_waiting = 0
                catalog.commit(supersedes=True)

        def scan(state: State) -> Recovered | None:
            catalog.open(state)
            found = None
            try:
                found = self._recovery.scan(state, enter, go_on)
            finally:
                if found is None:
                    # They are closed.
                    files.clear()
            return found

        state = self._index.load_state()
        try:
            found = scan(state if state is not None else State({}))
        except IndexOutdatedError as error:
            logger.warning("the index in %s is made again: %s", self._directory, error)
            with medium_errors(), self._index.changing() as change:
                change.empty()
            found = scan(State({}))
        if found is not None:
            files.update((file.number, file) for file in found.files)
            catalog.commit(supersedes=True)
        return found

    def wait_until_open(self, timeout_s: float) -> bool:
        return self._has_opened.wait(timeout_s)

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        # Segments that cannot be read now should be stored again.
        found = self._find(model, page_keys)
        return missing_runs([each is not None for each in found])

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[SsdSegment], ...]:
        runs: list[PageRun[SsdSegment]] = []
        keys, page_size, at = tuple(page_keys), model.page_size, 0
        while at < len(keys):
            segment = self._holder(model, keys[at])
            if segment is None:
                break
            manifest = segment.manifest
            first_page = manifest.page_keys.index(keys[at])
            start_token = manifest.start_token + first_page * page_size
            num_keys = num_right = 0
            if next_token in (None, start_token):
                num_keys, num_right = num_right_pages(manifest, first_page, keys, at, token_ids)
            if num_right:
                runs.append(PageRun(segment, first_page, first_page + num_right))
            else:
                self._let_go(segment)
            if num_right < num_keys or not num_keys:
                break
            at += num_keys
            next_token = start_token + num_keys * page_size
        if runs:
            self._touch([run.segment.segment_id for run in runs])
        return tuple(runs)

    def _find(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[int | None]:
        """As ``Catalog.find``; nothing while nothing may be found, or if the index cannot be read."""
        state = self._state
        with self._catalog() as catalog:
            if state.is_findable and not state.is_being_cleared(model):
                return catalog.find(model, page_keys)
        return [None] * len(page_keys)

    @contextmanager
    def _catalog(self) -> Iterator[Catalog]:
        """The catalog, with the lock held. If its index cannot be read, the block ends there, the tier is
        left alone for a while, and the next start makes the index again."""
        with self._state.lock:
            try:
                yield self._state.catalog
            except lmdb.Error as error:
                self._state.suspension.failed("damaged index", error)
                with contextlib.suppress(OSError):
                    remove_index(self._disk, self._directory)

    def _touch(self, places: Sequence[int]) -> None:
        has_many = False
        with self._catalog() as catalog:
            has_many = catalog.touch(places)
        if has_many:
            self._state.wake()

    def _segment(self, place: int, is_there: Callable[[], bool] | None = None) -> SsdSegment | None:
        """The segment at a place, held; None if it has left or cannot be read."""
        try:
            return self._reads.load(place, is_there)
        except TierReadError:
            return None

    def _holder(self, model: ModelIdentity, page_key: str) -> SsdSegment | None:
        """The segment that has a page, held; None if there is none, or it cannot be read."""
        (place,) = self._find(model, (page_key,))
        if place is None:
            return None
        segment = self._segment(place, lambda: self._state.catalog.find(model, (page_key,)) == [place])
        # What the index says is checked: digests may be equal.
        if segment is None or (segment.manifest.model == model and page_key in segment.manifest.page_keys):
            return segment
        self._let_go(segment)
        return None

    def _let_go(self, segment: SsdSegment) -> None:
        with self._state.lock:
            segment.num_holds -= 1

    def hold(self, run: PageRun[SsdSegment]) -> None:
        with self._state.lock:
            run.segment.num_holds += 1

    def release(self, run: PageRun[SsdSegment]) -> None:
        self._let_go(run.segment)

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
        return self._state.is_opening or self._find(model, (page_key,)) != [None]

    def discard(self, manifest: SegmentManifest) -> None:
        """As ``LowerTier.discard``. Durable after a ``flush``."""
        self._writes.queue.give_up(lambda item: item.manifest.shares_encoded_pages(manifest))
        with self._state.lock:
            if self._state.is_opening:
                self._discarded.append(manifest)
                return
        self._remove_like(manifest)

    def _remove_like(self, manifest: SegmentManifest) -> None:
        """Take out what holds a page of a segment and is encoded like it."""
        found: Sequence[int | None] = ()
        with self._catalog() as catalog:
            found = catalog.find(manifest.model, manifest.page_keys)
        for place in dict.fromkeys(place for place in found if place is not None):
            segment = self._segment(place)
            if segment is not None:
                self._let_go(segment)
                if segment.manifest.shares_encoded_pages(manifest):
                    with self._catalog() as catalog:
                        catalog.remove(place)
        self._state.wake()

    def holder_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        segment = self._holder(model, page_key)
        if segment is None:
            return None
        self._let_go(segment)
        return segment.manifest

    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        (found,) = self._find(model, (page_key,))
        if found is not None:
            with self._catalog() as catalog:
                return catalog.is_continued(found)
        return False

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
        infos = []
        for place, entry in self._records():
            segment = self._segment(place)
            if segment is None:
                continue
            with self._state.lock:
                segment.num_holds -= 1
                idle_s = max(time.time() - self._state.catalog.used_at_s(place, entry), 0.0)
            infos.append(
                SegmentInfo.of(
                    place, segment.manifest, self.name, num_leases=segment.num_holds, idle_s=idle_s
                )
            )
        return infos

    def _records(self) -> Iterator[tuple[int, Entry]]:
        """What is in the index, and may be found."""
        for place, entry in self._index.records():
            is_cleared = self._recovery.clears.is_cleared(entry.fingerprint.hex(), file_number_of(place))
            if self._state.is_findable and not is_cleared:
                yield place, entry

    def verify(self) -> DamageReport:
        """As ``LowerTier.verify``. Stops when the disk fails: what was not read is not in the report."""
        num_blocks = num_bytes = 0
        bad: list[int] = []
        for place, entry in self._records():
            try:
                segment = self._reads.load(place)
                if segment is None:
                    # It left meanwhile.
                    continue
                try:
                    self._reads.read_for_upkeep(segment)
                finally:
                    self._let_go(segment)
            except TierReadError as error:
                if isinstance(error.__cause__, RecordError):
                    bad.append(place)
                elif isinstance(error.__cause__, OSError):
                    break
                else:
                    continue
            num_blocks += entry.num_layers
            num_bytes += entry.num_bytes
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
                **self._state.num_stored(),
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
            with self._state.lock:
                self._index.close()
            self._locks.close()
        else:
            # The write may still reach the disk: the directory stays locked until this process ends.
            logger.error("the SSD tier was closed while a write to %s hangs", self._directory)
