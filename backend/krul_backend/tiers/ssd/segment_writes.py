"""Writing committed segments to the log files in the background, and clearing them."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections import Counter
from collections.abc import Callable, Sequence

from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.record import SegmentRecord, segment_num_bytes
from krul_backend.tiers.common.write_queue import QueuedSegment, WriteQueue
from krul_backend.tiers.ssd.catalog import SsdSegment
from krul_backend.tiers.ssd.index import file_number_of
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.log_writer import GROUP_NUM_BYTES, LogWriter
from krul_backend.tiers.ssd.recovery import ClearFile
from krul_backend.tiers.ssd.room import Room
from krul_backend.tiers.ssd.tier_state import TierState

logger = logging.getLogger(__name__)

_CLEAR_TIMEOUT_S = 5.0
"""A clear waits so long until it is noted on the disk."""

_PATIENCE_S = 0.1
"""A segment waits so long for others: each sync, and each change of the index, writes blocks of its own."""


class SegmentWrites:
    """Writes queued segments, and notes clears, in a thread of its own: no other changes files. Thread-safe.

    What waits is in ``queue``, also while the thread still opens the tier.

    Args:
        open_tier: finds out what lies on the disk, in the writer's thread. It calls the function that it is
            given now and then, which notes clears, and returns False when the tier shall close: then
            ``open_tier`` returns False.
    """

    def __init__(
        self,
        state: TierState,
        writer: LogWriter,
        room: Room,
        clears: ClearFile,
        open_tier: Callable[[Callable[[], bool]], bool],
        max_queued_bytes: int,
    ) -> None:
        self._state = state
        self._writer = writer
        self._room = room
        self._clears = clears
        self._open_tier = open_tier
        self.queue = WriteQueue(max_queued_bytes, state.counters)
        state.wake = self.queue.wake
        # A daemon: a disk that never answers must not keep the process from ending.
        self._thread = threading.Thread(target=self._serve, name="ssd-write", daemon=True)
        self._thread.start()

    def put(self, item: QueuedSegment) -> bool:
        is_fitting = segment_num_bytes(item.manifest, item.metadata) <= self._room.max_record_bytes
        return is_fitting and self._state.is_writable and self.queue.put(item)

    def has_room(self, manifest: SegmentManifest) -> bool:
        """Whether it is of use to ``put`` a segment now; its metadata are not counted."""
        return self._state.is_writable and self.queue.has_room(manifest.num_bytes)

    def can_hold(self, manifest: SegmentManifest, metadata: bytes) -> bool:
        """Whether there can ever be room for a segment; counted if not."""
        is_fitting = segment_num_bytes(manifest, metadata) <= self._room.max_record_bytes
        if not is_fitting:
            self._state.counters.skip("too large")
        return is_fitting

    def clear(self, model: ModelIdentity | None) -> None:
        """As ``LowerTier.clear``. Waits some seconds for the writer, which notes the clear on the disk."""
        fingerprint = None if model is None else model.fingerprint
        with self._state.lock:
            # From here on until the clear is noted, nothing of the model becomes findable.
            noted = self._state.pending_clears.get(fingerprint)
            if noted is None or noted.is_set():
                # An earlier one may have failed: this one is tried again, and waited for.
                noted = self._state.pending_clears[fingerprint] = threading.Event()
            dropped = self.queue.drop(lambda item: _is_of(fingerprint, item))
            self._state.catalog.forget_segments(lambda segment: _is_of(fingerprint, segment))
        self.queue.wake()
        if not self._thread.is_alive() or not noted.wait(_CLEAR_TIMEOUT_S):
            logger.warning(
                "the SSD does not answer: a clear will be noted there when it does. Until then nothing of "
                "what was cleared is found here, but a daemon that starts after a crash would find it again"
            )
        self.queue.settle(dropped)

    def flush(self, timeout_s: float) -> bool:
        """Wait until what was put is durable or given up, and what was dropped durably gone, if the disk is
        used at all and nobody reads it; False if that takes longer."""
        state, deadline_s = self._state, time.monotonic() + timeout_s
        if not self.queue.flush(timeout_s):
            return False

        def is_settled() -> bool:
            is_busy = state.catalog.is_dropping or self._writer.has_unsynced_holes
            is_clearing = state.catalog.cleared != self._clears.digest
            return state.is_opening or not state.is_writable or not (is_busy or is_clearing)

        with state.lock:
            return state.given_back.wait_for(is_settled, max(deadline_s - time.monotonic(), 0.0))

    def close(self, timeout_s: float) -> bool:
        """Write what is queued, for ``timeout_s`` at most; False if a write hangs even then."""
        self.queue.close()
        self._thread.join(timeout_s)
        self.queue.settle(self.queue.drop(lambda item: True))
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _open(self) -> bool:
        """Open the tier; False if it was closed before that was done."""
        try:
            is_open = self._open_tier(self._is_to_go_on)
        except Exception:
            logger.exception("reading what lies on the SSD failed: it is not used by this daemon")
            with self._state.lock:
                self._state.is_given_up, self._state.is_opening = True, False
            return True
        return is_open

    def _is_to_go_on(self) -> bool:
        if self._state.pending_clears:
            self._note_clears()
        # What is queued would be lost: it is written if the tier opens within the time that a close takes.
        return not (self.queue.is_closed and self.queue.sizes()[0] == 0)

    def _serve(self) -> None:
        is_open = self._open()
        while is_open and self.queue.wait(GROUP_NUM_BYTES, _PATIENCE_S):
            items: list[QueuedSegment] = []
            try:
                # Before new segments are taken, and never between two of a group: what was taken before a
                # clear is not published until the clear is noted, and what was put after it is written then.
                self._note_clears()
                items = self.queue.take(GROUP_NUM_BYTES)
                self._write(items)
            except Exception:
                logger.exception("writing to the SSD failed: the segments stay in DRAM only")
            self.queue.settle(items)
            with self._state.lock:
                self._state.given_back.notify_all()
        # Those that failed, once more.
        self._note_clears()
        if is_open:
            with contextlib.suppress(OSError):
                self._state.catalog.commit(is_last=True)

    def _write(self, items: Sequence[QueuedSegment]) -> None:
        """Write a group of segments with one sync. Segments that fail are given up, and counted.

        Before them, what died since the last group is given back.
        """
        if not self._state.is_writable:
            self._state.counters.skip("suspended", len(items))
            return
        published: list[QueuedSegment] = []
        appended: set[tuple[str, str]] = set()
        num_appended = 0
        try:
            self._state.catalog.commit()
            self._room.give_back()
            for item in items:
                # Its use keeps what they continue from being evicted for them.
                with self._state.lock:
                    self._touch_page(item.manifest.model, item.manifest.parent_key)
            sizes = [segment_num_bytes(item.manifest, item.metadata) for item in items]
            self._writer.take_turn(sum(sizes))
            for i, item in enumerate(items):
                manifest = item.manifest
                with self._state.lock:
                    if None not in self._state.catalog.find(manifest.model, manifest.page_keys):
                        continue
                if not self._room.make(sizes[i], sum(sizes[i:])):
                    self._state.counters.skip("no room")
                    continue
                if not self._is_continuing(manifest, appended):
                    self._state.counters.skip("orphan")
                    continue
                appended.update((manifest.model.fingerprint, key) for key in manifest.page_keys)
                publish = self._publisher(item, published)
                num_appended += 1
                self._writer.append(manifest, item.metadata, item.blocks, publish)
            self._writer.commit()
        except OSError as error:
            # If a read or a removal failed, the records that were appended before it are still good.
            with contextlib.suppress(OSError):
                self._writer.commit()
            self._state.counters.add(failed_writes=1)
            self._state.counters.skip("failed", num_appended - len(published))
            self._state.failed("failed write", error)
        else:
            if published:
                self._state.suspension.succeeded()
                self._state.fullness.succeeded()

    def _touch_page(self, model: ModelIdentity, page_key: str | None) -> None:
        (found,) = self._state.catalog.find(model, (page_key,)) if page_key is not None else (None,)
        if found is not None:
            self._state.catalog.touch([found])

    def _is_continuing(self, manifest: SegmentManifest, appended: set[tuple[str, str]]) -> bool:
        """Whether a segment begins a conversation, or continues one here: else it could never be found.

        ``appended``: fingerprints and page keys of the group that is being written.
        """
        key = manifest.parent_key
        if key is None or (manifest.model.fingerprint, key) in appended:
            return True
        with self._state.lock:
            return self._state.catalog.find(manifest.model, (key,)) != [None]

    def _publisher(
        self, item: QueuedSegment, published: list[QueuedSegment]
    ) -> Callable[[LogFile, int], None]:
        """A function that makes a durable record findable; it is called under the tier's lock."""
        state = self._state

        def publish(file: LogFile, offset: int) -> None:
            published.append(item)
            manifest = item.manifest
            record = SegmentRecord.of(manifest, item.checksums, item.metadata)
            is_wanted = not state.is_being_cleared(manifest.model)
            if is_wanted:
                state.counters.add(written_segments=1, written_bytes=manifest.num_bytes)
            else:
                state.counters.skip("dropped")
            state.catalog.add(SsdSegment(record, file, offset), is_wanted=is_wanted)

        return publish

    def _note_clears(self) -> None:
        """Make pending clears durable. If that fails, this process uses the disk no more."""
        state = self._state
        with state.lock:
            pending = dict(state.pending_clears)
        if not pending:
            return
        with contextlib.suppress(OSError):
            # Later records go into new files, which the clears do not cover.
            self._writer.seal()
        try:
            for fingerprint in pending:
                self._forget_durably(fingerprint)
        except OSError as error:
            self._give_up(error)
        else:
            with state.lock:
                for fingerprint, noted in pending.items():
                    if state.pending_clears[fingerprint] is noted:
                        del state.pending_clears[fingerprint]
        for noted in pending.values():
            noted.set()
        # While the tier opens, it is not known yet what is in the files.
        if not state.is_given_up and not state.is_opening:
            self._room.remove_cleared(self._clears)

    def _forget_durably(self, fingerprint: str | None) -> None:
        """Write a note of a clear; while that fails, remove log files, those with least live bytes first.

        On a full disk this makes room for the note; if no note can be written at all, no file is left. While
        the tier opens no file is removed, as it is not known yet what lives in it.

        Raises:
            OSError: the note cannot be written, and a file not be removed.
        """
        is_removing = False
        while True:
            try:
                self._clears.add(fingerprint, self._writer.next_number, self._writer.oldest_number)
                return
            except OSError as error:
                self._state.failed("failed write", error)
                failure = error
            if not is_removing:
                is_removing = True
                logger.warning("a clear cannot be noted on the SSD (%s): removing files instead", failure)
            file = self._emptiest_file()
            if file is None and not self._writer.has_unread:
                return
            if file is None or self._state.is_opening:
                raise failure
            self._room.remove(file)

    def _emptiest_file(self) -> LogFile | None:
        """The file with the least that is not to be cleared."""
        live: Counter[int] = Counter()
        for place, entry in self._state.catalog.index.records():
            if not {None, entry.fingerprint.hex()} & self._state.pending_clears.keys():
                live[file_number_of(place)] += entry.record_num_bytes
        return min(self._writer.files.values(), key=lambda file: live[file.number], default=None)

    def _give_up(self, error: OSError) -> None:
        """Find and write nothing any more: what is on the disk was cleared, and the disk does not know it."""
        with self._state.lock:
            was_given_up, self._state.is_given_up = self._state.is_given_up, True
            self._state.catalog.forget_segments(lambda segment: True)
        if not was_given_up:
            logger.error(
                "the SSD can neither note a clear nor remove what was cleared (%s): this daemon uses it no "
                "more, and tries once more when it ends. If that fails, the next daemon that can write to "
                "the disk finds old KV again: remove %s before",
                error,
                self._writer.directory,
            )


def _is_of(fingerprint: str | None, of: QueuedSegment | SsdSegment) -> bool:
    """Whether something is of a model, given by its fingerprint; None stands for all of them."""
    return fingerprint is None or of.manifest.model.fingerprint == fingerprint
