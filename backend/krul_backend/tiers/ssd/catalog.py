"""The segments of the SSD tier, how they are found and evicted."""

from __future__ import annotations

import errno
import os
import random
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from heapq import merge
from itertools import chain, islice
from weakref import WeakValueDictionary

import lmdb

from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.eviction import (
    NUM_OLDEST,
    NUM_SAMPLED,
    UNKNOWN_PAUSE_S,
    usual_pause_s,
    value_of,
)
from krul_backend.tiers.common.interface import Checksums
from krul_backend.tiers.common.page_filter import digest_of
from krul_backend.tiers.common.record import SegmentRecord
from krul_backend.tiers.ssd.index import Entry, SegmentIndex, State, file_number_of, place_of
from krul_backend.tiers.ssd.log_file import LogFile

_MAX_KEPT = 256
"""So many records that were found lately are kept in memory, a header each."""

_MAX_USES = 4096
"""So many uses are noted together, if nothing is written before."""


@dataclass(eq=False)
class SsdSegment:
    """A segment whose header was read, or which was just written. It is changed under the tier's lock only.

    ``file`` and ``offset`` are where its record is. ``num_holds`` counts the runs that ``match`` gave out: a
    held segment is not evicted. ``is_indexed`` becomes False by eviction, a clear or a wrong checksum, and
    never True again. While ``num_reads`` is not 0 its bytes stay where they are all the same.
    """

    record: SegmentRecord
    file: LogFile
    offset: int
    num_holds: int = 0
    num_reads: int = 0
    is_indexed: bool = True

    @property
    def segment_id(self) -> int:
        return place_of(self.file.number, self.offset)

    @property
    def manifest(self) -> SegmentManifest:
        return self.record.manifest

    @property
    def checksums(self) -> Checksums:
        return self.record.checksums


class Catalog:
    """Finds segments by the index on disk, and keeps what is not there yet: new segments, those that left,
    and uses. ``commit`` puts all that into the index. Called under the tier's lock, except where it says
    otherwise.

    ``index`` is for looking things up. ``dead``: bytes, by place, of records that left, or never came in, and
    still take space.
    ``cleared`` stands for the clears that are carried out.

    Args:
        order: ``value`` or ``lru``, see ``krul_backend.tiers.common.eviction``.
        files: the log files by number; what lies in others cannot be found.
        is_cleared: asked of a model's fingerprint and the number of a file.
        lock: the tier's.
    """

    def __init__(
        self,
        index: SegmentIndex,
        order: str,
        files: Mapping[int, LogFile],
        is_cleared: Callable[[str, int], bool],
        lock: threading.Lock,
    ) -> None:
        self.index = index
        self._order = order
        self._files = files
        self._is_cleared = is_cleared
        self._lock = lock
        self._random = random.Random(0)
        self._kept: OrderedDict[int, SsdSegment] = OrderedDict()
        self._segments: WeakValueDictionary[int, SsdSegment] = WeakValueDictionary()
        # With what is entered of them: None of those that are not wanted any more.
        self._added: list[tuple[SsdSegment, Entry | None]] = []
        # Records that left, with their entries and the number of pages that were found by them.
        self._gone: dict[int, tuple[Entry, int]] = {}
        self._lost_files: set[int] = set()
        self._punched: list[int] = []
        self._uses: dict[int, int] = {}
        self._last_use = 0
        self._state = State({})
        self.cleared = 0
        self.dead: dict[int, int] = {}

    def open(self, state: State) -> None:
        """Go on with what the index has."""
        self._state = state
        self.cleared = state.cleared
        self._added.clear()

    @property
    def known_files(self) -> Iterable[int]:
        """The numbers of the files that the index knows."""
        return self._state.files

    @property
    def num_segments(self) -> int:
        return self._state.num_segments - len(self._gone)

    @property
    def num_pages(self) -> int:
        return self._state.num_pages - sum(num_pages for _, num_pages in self._gone.values())

    @property
    def stored_bytes(self) -> int:
        return self._state.stored_bytes - sum(entry.num_bytes for entry, _ in self._gone.values())

    def add(self, segment: SsdSegment, *, is_wanted: bool = True) -> None:
        """Make a durable segment findable with the next ``commit``, if one of its pages is not there yet. If
        not, or if it is not wanted, it is dead then."""
        entry = Entry.of(segment.record, self._now(), UNKNOWN_PAUSE_S) if is_wanted else None
        self._added.append((segment, entry))

    def remove(self, place: int) -> bool:
        """Take a segment out at once; False if it has left already. It is dead after the next ``commit``."""
        entry = None if place in self._gone else self.index.entry(place)
        if entry is None:
            return False
        found = self.index.pages(entry.digests)
        self._gone[place] = entry, found.count(place)
        self._forget(place)
        return True

    def forget_segments(self, is_forgotten: Callable[[SsdSegment], bool]) -> None:
        """See to it that reads of these segments end; the index keeps them."""
        for segment in list(self._segments.values()):
            if is_forgotten(segment):
                self._forget(segment.segment_id)

    def lose_file(self, number: int) -> None:
        """Forget a file that was removed, with all that was in it."""
        self._lost_files.add(number)
        self.forget_segments(lambda segment: segment.file.number == number)
        for place in [place for place in self.dead if file_number_of(place) == number]:
            del self.dead[place]

    @property
    def is_dropping(self) -> bool:
        """Whether space can be given back: a record has left, and nobody reads it."""
        return bool(self._gone) or bool(self.not_read())

    def not_read(self) -> list[int]:
        """The dead records that nobody reads."""
        return [place for place in self.dead if not self._is_read(place)]

    def _is_read(self, place: int) -> bool:
        segment = self._segments.get(place)
        return segment is not None and segment.num_reads > 0

    def is_held(self, place: int) -> bool:
        segment = self._segments.get(place)
        return segment is not None and segment.num_holds > 0

    def find(self, model: ModelIdentity, page_keys: Iterable[str]) -> list[int | None]:
        """For each page the place of the record that has it."""
        fingerprint = model.fingerprint
        found = self.index.pages(digest_of(fingerprint, key) for key in page_keys)
        return [
            place if place is not None and self._is_usable(place, fingerprint) else None for place in found
        ]

    def has(self, place: int) -> bool:
        """Whether the record at a place is still stored."""
        return place not in self._gone and self.index.entry(place) is not None

    def kept(self, place: int) -> SsdSegment | None:
        """The segment of a place, if it is in memory."""
        segment = self._segments.get(place)
        if segment is not None:
            self.keep(segment)
        return segment

    def keep(self, segment: SsdSegment) -> SsdSegment:
        """Keep a segment in memory for a while; returns the one that is there already, if there is one."""
        segment = self._segments.setdefault(segment.segment_id, segment)
        self._kept[segment.segment_id] = segment
        self._kept.move_to_end(segment.segment_id)
        if len(self._kept) > _MAX_KEPT:
            self._kept.popitem(last=False)
        return segment

    def touch(self, places: Sequence[int]) -> bool:
        """Note a use of segments that follow each other, and of what the first one continues. True if so many
        uses wait that they should be put into the index."""
        path = list(dict.fromkeys(places))
        while path:
            before = self._before(path[0])
            # Segments that share pages can name each other.
            if before is None or before in path:
                break
            path.insert(0, before)
        for place in reversed(path):
            # Those at the end of a conversation leave before those at its beginning.
            self._uses.pop(place, None)
            self._uses[place] = self._now()
        return len(self._uses) >= _MAX_USES

    def _before(self, place: int) -> int | None:
        """The record that one continues."""
        segment = self._segments.get(place)
        # Read before, so that it is not looked up.
        entry = self.index.entry(place) if segment is None else Entry.of(segment.record, 0, 0.0)
        return self.index.pages([entry.before])[0] if entry is not None else None

    def used_at_s(self, place: int, entry: Entry) -> float:
        """When a segment was used last, as ``time.time``."""
        return self._uses.get(place, entry.used_at) / 1e6

    def is_continued(self, place: int) -> bool:
        """Whether another segment continues a page of this one, or has one of its pages, too."""
        entry = self.index.entry(place)
        if entry is None:
            return False
        found = self.index.pages(entry.digests)
        is_shared = any(each not in (None, place) for each in found)
        return is_shared or self.index.num_following(entry.digests) > 0

    def victims(self) -> Iterator[tuple[int, Entry]]:
        """Segments that may be evicted, the first to evict first. Called by the writer, without the lock.

        With ``value`` those come that no other continues: the ones used longest ago, and some at random.
        """
        with self._lock:
            # As each use is later than the one before, they are in order.
            uses = dict(self._uses)
        noted = (each for each in self.index.oldest() if each[1] not in uses)
        oldest = (place for _, place in merge(noted, ((at, place) for place, at in uses.items())))
        if self._order == "lru":
            candidates = self._last(oldest)
            first = next(candidates, None)
            if first is not None:
                yield from chain([first], candidates)
                return
        else:
            found = dict(islice(self._last(oldest), NUM_OLDEST))
            if len(found) == NUM_OLDEST:
                sampled = self.index.sample(self._random, NUM_SAMPLED)
                found.update(self._last(place for place in sampled if place not in uses))
            if found:
                now_s = time.time()
                yield from sorted(found.items(), key=lambda each: self._worth(each[1], now_s))
                return
        # Segments that continue each other have no last one: then any may leave.
        yield from islice(self._evictable(place for _, place in self.index.oldest()), 1)

    def _last(self, places: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        """Those of them that may be evicted, and that no other segment continues."""
        return (each for each in self._evictable(places) if not self.index.num_following(each[1].digests))

    def _evictable(self, places: Iterable[int]) -> Iterator[tuple[int, Entry]]:
        for place in places:
            if place in self._gone or file_number_of(place) not in self._files or self.is_held(place):
                continue
            if (entry := self.index.entry(place)) is not None:
                yield place, entry

    def _worth(self, entry: Entry, now_s: float) -> float:
        is_reachable = not entry.start_token or self.index.pages([entry.before])[0] is not None
        if not is_reachable:
            return 0.0
        idle_s = max(now_s - entry.used_at / 1e6, entry.pause_s)
        return value_of(entry.recompute_s, entry.num_tokens, entry.record_num_bytes) / idle_s

    def commit(self, punched: Iterable[int] = (), *, supersedes: bool = False, is_last: bool = False) -> None:
        """Put what has changed into the index, durably. Called by the writer, without the lock.

        ``punched``: places of dead records that are durably gone. ``supersedes``: new segments take the place
        of those all of whose pages they have. ``is_last``: nothing is kept for a later commit.

        Raises:
            OSError: it could not be written. It waits for the next commit.
        """
        with self._lock:
            added, gone = list(self._added), dict(self._gone)
            uses = dict(self._uses) if is_last or len(self._uses) >= _MAX_USES else {}
            self._punched += punched
            lost, forgotten = set(self._lost_files), list(self._punched)
            # It does no harm if what is a hole already is made one once more after a crash.
            if not (added or gone or lost or uses or is_last or len(forgotten) >= _MAX_USES):
                return
            files = dict(self._files)
            live = {number: live_bytes for number, (*_, live_bytes) in self._state.files.items()}
            live.update((number, file.live_bytes) for number, file in files.items())
        state = self._state
        dead, entered = dict[int, int](), list[SsdSegment]()
        lost_places = [place for number in lost for place, _ in self.index.records(number)]
        with medium_errors(), self.index.changing() as change:

            def take_out(place: int) -> None:
                nonlocal state
                removed = change.remove(place)
                if removed is not None:
                    entry, num_pages = removed
                    state = state.with_record(entry, num_pages, -1)
                    dead[place] = entry.record_num_bytes
                    number = file_number_of(place)
                    live[number] -= entry.record_num_bytes

            for place in (*lost_places, *gone):
                take_out(place)
            for number in lost:
                change.forget_file(number)
            for segment, entry in added:
                place, fingerprint = segment.segment_id, segment.manifest.model.fingerprint
                if change.has(place):
                    continue
                num_pages = 0
                if entry is not None and not self._is_cleared(fingerprint, segment.file.number):
                    for older in change.superseded_by(entry.digests) if supersedes else ():
                        take_out(older)
                    num_pages = change.add(place, entry, lambda other: file_number_of(other) in self._files)
                if entry is not None and num_pages:
                    state = state.with_record(entry, num_pages)
                    live[segment.file.number] += segment.record.num_bytes
                    entered.append(segment)
                else:
                    change.add_dead(place, segment.record.num_bytes)
                    dead[place] = segment.record.num_bytes
            for place, used_at in uses.items():
                change.use(place, used_at, usual_pause_s)
            for place in forgotten:
                change.forget_dead(place)
            state = state._replace(
                files={
                    **{
                        number: (file_id, end, live[number])
                        for number, (file_id, end, _) in state.files.items()
                        if number not in lost
                    },
                    **{
                        number: (file.file_id, file.num_synced_bytes, live[number])
                        for number, file in files.items()
                    },
                },
                cleared=self.cleared,
            )
            change.save_state(state)
        with self._lock:
            self._state = state
            del self._added[: len(added)], self._punched[: len(forgotten)]
            self._lost_files -= lost
            for place in gone:
                del self._gone[place]
            self._uses = {place: at for place, at in self._uses.items() if uses.get(place) != at}
            for number, file in files.items():
                file.live_bytes = live[number]
            for place, num_bytes in dead.items():
                self._forget(place)
                if file_number_of(place) in self._files:
                    self.dead[place] = num_bytes
            for segment in entered:
                self.keep(segment)
            for _, entry in added:
                # What they continue leaves after them.
                (before,) = self.index.pages([entry.before]) if entry is not None else (None,)
                if before is not None:
                    self.touch([before])

    def _is_usable(self, place: int, fingerprint: str) -> bool:
        number = file_number_of(place)
        return place not in self._gone and number in self._files and not self._is_cleared(fingerprint, number)

    def _forget(self, place: int) -> None:
        self._kept.pop(place, None)
        segment = self._segments.get(place)
        if segment is not None:
            segment.is_indexed = False

    def _now(self) -> int:
        self._last_use = max(self._last_use + 1, time.time_ns() // 1000)
        return self._last_use


@contextmanager
def medium_errors() -> Iterator[None]:
    """Turn errors of the index into those of a medium."""
    try:
        yield
    except lmdb.Error as error:
        is_full = isinstance(error, lmdb.MapFullError) or os.strerror(errno.ENOSPC) in str(error)
        raise OSError(errno.ENOSPC if is_full else errno.EIO, f"the index: {error}") from error
