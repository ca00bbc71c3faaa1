"""The index of the SSD tier on disk: which record has a page, and in which order records were used."""

from __future__ import annotations

import logging
import mmap
import random
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import lmdb
import numpy as np
import orjson

from krul_backend.errors import DaemonError
from krul_backend.tiers.common.page_filter import DIGEST_BYTES, digest_of
from krul_backend.tiers.common.record import RECORD_ALIGN, SegmentRecord
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.own_files import INDEX_FILES, INDEX_NAME, remove_index

logger = logging.getLogger(__name__)

_PLACE, _COUNT, _CHANGE = struct.Struct(">Q"), struct.Struct("<I"), struct.Struct(f"{DIGEST_BYTES}s8s")
_FIXED = struct.Struct(f"<QQQQIIIfd16s{DIGEST_BYTES}s")
_NOTHING = bytes(DIGEST_BYTES)
_NOWHERE = _PLACE.pack(0)
"""The place of a page that left."""
_NUM_PARTS = 2048
"""Of all digests: the pages of one part are put into their table with each change of the index."""
_STATE = b"state"
_LEAST_MAP_BYTES = 1 << 30
_MAX_LISTED = 1024


def place_of(file_number: int, offset: int) -> int:
    """The number of a record: places grow in the order of writing."""
    return file_number << 32 | offset // RECORD_ALIGN


def file_number_of(place: int) -> int:
    return place >> 32


def offset_of(place: int) -> int:
    return (place & 0xFFFFFFFF) * RECORD_ALIGN


class Entry(NamedTuple):
    """What the index knows of a record. ``used_at`` grows with every use of any record: it is a time in us.

    ``before``: digest of the page before its first one; zeros at the start of a conversation. ``pages``: the
    digests of its pages, one after the other. Sizes are in bytes.
    """

    record_num_bytes: int
    num_bytes: int
    used_at: int
    start_token: int
    num_tokens: int
    num_pages: int
    num_layers: int
    pause_s: float
    recompute_s: float
    fingerprint: bytes
    before: bytes
    pages: bytes

    @classmethod
    def of(cls, record: SegmentRecord, used_at: int, pause_s: float) -> Entry:
        """The entry of a new record."""
        manifest = record.manifest
        fingerprint, parent = manifest.model.fingerprint, manifest.parent_key
        return cls(
            record.num_bytes,
            manifest.num_bytes,
            used_at,
            manifest.start_token,
            manifest.num_tokens,
            len(manifest.page_keys),
            len(manifest.layer_num_bytes),
            pause_s,
            manifest.recompute_s,
            bytes.fromhex(fingerprint),
            _NOTHING if parent is None else digest_of(fingerprint, parent),
            b"".join(digest_of(fingerprint, key) for key in manifest.page_keys),
        )

    @property
    def digests(self) -> list[bytes]:
        return [self.pages[at : at + DIGEST_BYTES] for at in range(0, len(self.pages), DIGEST_BYTES)]

    def encode(self) -> bytes:
        return _FIXED.pack(*self[:-1]) + self.pages

    @classmethod
    def decode(cls, data: bytes) -> Entry:
        return cls._make((*_FIXED.unpack_from(data), data[_FIXED.size :]))


class State(NamedTuple):
    """What the index knows of the whole. ``files``, by number: the file's id, how far it is indexed, and the
    bytes of the records in it. ``cleared`` stands for the clears that were carried out."""

    files: dict[int, tuple[int, int, int]]
    cleared: int = 0
    num_segments: int = 0
    num_pages: int = 0
    stored_bytes: int = 0

    def with_record(self, entry: Entry, num_pages: int, sign: int = 1) -> State:
        """After a record came, or left with ``sign`` -1, that is the holder of so many pages."""
        return self._replace(
            num_segments=self.num_segments + sign,
            num_pages=self.num_pages + sign * num_pages,
            stored_bytes=self.stored_bytes + sign * entry.num_bytes,
        )


def _part_of(digest: bytes) -> int:
    # Digests of one part lie side by side in their table.
    return int.from_bytes(digest[:2], "big") * _NUM_PARTS >> 16


class SegmentIndex:
    """Six tables in one LMDB file. Any thread may read; one thread changes, and what it changes is seen, and
    durable, when its ``changing`` ends::

        pages      digest of a page        place of the record that has it, but for what is in ``recent``
        recent     number of a change      digests and new places of the pages that changed; 0: left
        segments   place                   Entry
        order      used_at                 place
        follows    digest of a page        how many records continue it, or have it, too
        dead       place                   bytes of a record that left, of which it is not known to be a hole

    As digests are random, each page would cost a block of ``pages``, written once more. So changes of pages
    are written one after the other to ``recent`` and kept in memory, and with each change of the index one of
    ``_NUM_PARTS`` parts of them goes into ``pages``, many to a block.

    Raises:
        lmdb.Error: the file is damaged, or the disk fails; so do all methods.
    """

    def __init__(self, directory: Path, capacity_bytes: int) -> None:
        self._env = lmdb.open(
            str(directory / INDEX_NAME),
            subdir=False,
            # Of addresses, not of memory or disk.
            map_size=max(_LEAST_MAP_BYTES, capacity_bytes // 4),
            max_dbs=8,
            mode=0o600,
            readahead=False,
        )
        if (directory / INDEX_NAME).stat().st_size < (self._env.info()["last_pgno"] + 1) * mmap.PAGESIZE:
            # What is missing of a mapped file would end the process.
            self._env.close()
            raise lmdb.CorruptedError("the file was cut off")
        names = (b"pages", b"recent", b"segments", b"order", b"follows", b"dead")
        self._pages, self._recent, *others = map(self._env.open_db, names)
        self._segments, self._order, self._follows, self._dead = others
        # By part: what may not be in ``pages`` yet, the packed places by digest.
        self._moved: list[dict[bytes, bytes]] = [{} for _ in range(_NUM_PARTS)]
        with self._env.begin(self._recent) as txn:
            rows = [(*_PLACE.unpack(key), data) for key, data in txn.cursor()]
        for number, data in rows:
            parts = np.frombuffer(data, ">u2")[:: _CHANGE.size // 2].astype(np.int64) * _NUM_PARTS >> 16
            # Of parts that have not had their turn since.
            late = np.flatnonzero(number + (parts - number) % _NUM_PARTS > rows[-1][0])
            # A record's pages share one object.
            places = dict[bytes, bytes]()
            for part, at in zip(parts[late].tolist(), (_CHANGE.size * late).tolist(), strict=True):
                digest, place = _CHANGE.unpack_from(data, at)
                self._moved[part][digest] = places.setdefault(place, place)

    def close(self) -> None:
        self._env.close()

    def load_state(self) -> State | None:
        """None if the index is new."""
        with self._env.begin() as txn:
            data = txn.get(_STATE)
        state = None if data is None else orjson.loads(data)
        if state is None:
            return None
        files = {int(number): tuple(of) for number, of in state.pop("files").items()}
        return State(files, **state)

    def pages(self, digests: Iterable[bytes]) -> list[int | None]:
        """For each page the place of its record."""
        # In this order: what is not here any more is in the table then.
        found = [(digest, self._moved[_part_of(digest)].get(digest)) for digest in digests]
        with self._env.begin(self._pages) as txn:
            return [_unpacked(txn.get(digest) if place is None else place) for digest, place in found]

    def entry(self, place: int) -> Entry | None:
        with self._env.begin(self._segments) as txn:
            data = txn.get(_PLACE.pack(place))
        return None if data is None else Entry.decode(data)

    def num_following(self, digests: Iterable[bytes]) -> int:
        """How many records continue these pages, or have them, too."""
        with self._env.begin(self._follows) as txn:
            return sum(_COUNT.unpack(data)[0] for data in map(txn.get, digests) if data is not None)

    def records(self, file_number: int | None = None) -> Iterator[tuple[int, Entry]]:
        """All records, or those of one file, in the order of writing. The index may change meanwhile."""
        place = 0 if file_number is None else place_of(file_number, 0)
        end = 1 << 63 if file_number is None else place_of(file_number + 1, 0)
        # A reader that stays would keep all that changes meanwhile from being used again.
        while found := self._some_records(place, end):
            yield from found
            place = found[-1][0] + 1

    def _some_records(self, place: int, end: int) -> list[tuple[int, Entry]]:
        with self._env.begin(self._segments) as txn:
            cursor = txn.cursor()
            if not cursor.set_range(_PLACE.pack(place)):
                return []
            rows = ((_PLACE.unpack(key)[0], data) for key, data in islice(cursor, _MAX_LISTED))
            return [(place, Entry.decode(data)) for place, data in rows if place < end]

    def dead(self) -> list[tuple[int, int]]:
        """Places and bytes of records that left, and may not be holes yet."""
        with self._env.begin(self._dead) as txn:
            return [(*_PLACE.unpack(key), *_PLACE.unpack(data)) for key, data in txn.cursor()]

    def oldest(self) -> Iterator[tuple[int, int]]:
        """Times of use and places, the one used longest ago first."""
        with self._env.begin(self._order) as txn:
            for key, data in txn.cursor():
                yield _PLACE.unpack(key)[0], _PLACE.unpack(data)[0]

    def sample(self, draw: random.Random, num_places: int) -> set[int]:
        """Some places at random, those behind large records and holes more often."""
        found = set[int]()
        with self._env.begin(self._segments) as txn:
            cursor = txn.cursor()
            if not cursor.first():
                return found
            first = file_number_of(*_PLACE.unpack(cursor.key()))
            cursor.last()
            last = file_number_of(*_PLACE.unpack(cursor.key()))
            for _ in range(num_places):
                number = draw.randint(first, last)
                # To the last record of this file, or of the one before it.
                if cursor.set_range(_PLACE.pack(place_of(number + 1, 0))):
                    cursor.prev()
                else:
                    cursor.last()
                (end,) = _PLACE.unpack(cursor.key())
                cursor.set_range(_PLACE.pack(draw.randint(min(place_of(number, 0), end), end)))
                found.add(*_PLACE.unpack(cursor.key()))
        return found

    @contextmanager
    def changing(self) -> Iterator[IndexChange]:
        """Change the index: all of it, durably, or nothing if an error comes."""
        with self._env.begin(write=True) as txn:
            change = IndexChange(self, txn)
            yield change
            part = change.note_pages()
        self._moved = change.moved
        for digest, place in change.pages.items():
            self._moved[_part_of(digest)][digest] = place
        self._moved[part] = {}


def open_index(disk: Disk, directory: Path, capacity_bytes: int) -> SegmentIndex:
    """Open the index of a directory; a new, empty one if there is none, or none that can be opened.

    Raises:
        DaemonError: no file can be made there, or a link lies in its place.
    """
    for name in INDEX_FILES:
        if (directory / name).is_symlink():
            raise DaemonError(
                f"{directory / name} is a symbolic link, which may point to somebody's file: remove it"
            )
    try:
        index = SegmentIndex(directory, capacity_bytes)
        index.load_state()
        return index
    except (lmdb.Error, ValueError, struct.error) as error:
        logger.warning("the index in %s is made again: %s", directory, error)
    try:
        remove_index(disk, directory)
        return SegmentIndex(directory, capacity_bytes)
    except (lmdb.Error, OSError) as error:
        raise DaemonError(
            f"the SSD tier can make no index in {directory} ({error}): give a directory that can be written"
        ) from error


def _unpacked(place: bytes | None) -> int | None:
    return None if place is None or place == _NOWHERE else _PLACE.unpack(place)[0]


class IndexChange:
    """A transaction of ``SegmentIndex``. ``pages``: the packed places of the pages that it changes; ``moved``
    is the index's, of earlier ones."""

    def __init__(self, index: SegmentIndex, txn: Any) -> None:
        self._txn = txn
        self._pages, self._recent, self._segments = index._pages, index._recent, index._segments
        self._order, self._follows, self._dead = index._order, index._follows, index._dead
        self.pages: dict[bytes, bytes] = {}
        self.moved = index._moved

    def empty(self) -> None:
        """Forget everything."""
        tables = (self._pages, self._recent, self._segments, self._order, self._follows, self._dead)
        for table in tables:
            self._txn.drop(table, delete=False)
        self._txn.delete(_STATE)
        self.pages, self.moved = {}, [{} for _ in range(_NUM_PARTS)]

    def note_pages(self) -> int:
        """Write down the pages that changed, and put those of the next part into their table: returns which
        part that is. The end of each transaction."""
        cursor = self._txn.cursor(self._recent)
        number = _PLACE.unpack(cursor.key())[0] + 1 if cursor.last() else 0
        part = number % _NUM_PARTS
        data = b"".join(digest + place for digest, place in self.pages.items())
        self._txn.put(_PLACE.pack(number), data, append=True, db=self._recent)
        if number >= _NUM_PARTS:
            # All parts have had their turn since.
            self._txn.delete(_PLACE.pack(number - _NUM_PARTS), db=self._recent)
        new = {digest: place for digest, place in self.pages.items() if _part_of(digest) == part}
        for digest, place in sorted({**self.moved[part], **new}.items()):
            if place == _NOWHERE:
                self._txn.delete(digest, db=self._pages)
            else:
                self._txn.put(digest, place, db=self._pages)
        return part

    def _place_of_page(self, digest: bytes) -> int | None:
        place = self.pages.get(digest) or self.moved[_part_of(digest)].get(digest)
        return _unpacked(place or self._txn.get(digest, db=self._pages))

    def has(self, place: int) -> bool:
        return self._txn.get(_PLACE.pack(place), db=self._segments) is not None

    def add(self, place: int, entry: Entry, is_usable: Callable[[int], bool]) -> int:
        """Enter a record for the pages that no usable one has; returns their number. Nothing is done if 0."""
        new, hidden = list[bytes](), list[bytes]()
        for digest in entry.digests:
            holder = self._place_of_page(digest)
            is_new = holder is None or not is_usable(holder)
            (new if is_new else hidden).append(digest)
        if not new:
            return 0
        self.pages.update(dict.fromkeys(new, _PLACE.pack(place)))
        for digest in hidden:
            self._count(digest, 1)
        self._txn.put(_PLACE.pack(place), entry.encode(), db=self._segments)
        self._txn.put(_PLACE.pack(entry.used_at), _PLACE.pack(place), db=self._order)
        self._count(entry.before, 1)
        return len(new)

    def superseded_by(self, pages: Sequence[bytes]) -> list[int]:
        """The records all of whose pages are among these."""
        places = dict.fromkeys(place for place in map(self._place_of_page, pages) if place is not None)
        entries = ((place, self._txn.get(_PLACE.pack(place), db=self._segments)) for place in places)
        return [place for place, data in entries if data and set(Entry.decode(data).digests) <= set(pages)]

    def remove(self, place: int) -> tuple[Entry, int] | None:
        """Take a record out, which is dead then: its entry, and of how many pages it was the holder."""
        data = self._txn.pop(_PLACE.pack(place), db=self._segments)
        if data is None:
            return None
        entry = Entry.decode(data)
        self._txn.delete(_PLACE.pack(entry.used_at), db=self._order)
        num_pages = 0
        for digest in entry.digests:
            if self._place_of_page(digest) == place:
                self.pages[digest] = _NOWHERE
                num_pages += 1
            else:
                self._count(digest, -1)
        self._count(entry.before, -1)
        self.add_dead(place, entry.record_num_bytes)
        return entry, num_pages

    def add_dead(self, place: int, num_bytes: int) -> None:
        self._txn.put(_PLACE.pack(place), _PLACE.pack(num_bytes), db=self._dead)

    def forget_dead(self, place: int) -> None:
        """A record that left is a hole now, durably."""
        self._txn.delete(_PLACE.pack(place), db=self._dead)

    def forget_file(self, number: int) -> None:
        """The dead records of a file went with it."""
        cursor = self._txn.cursor(db=self._dead)
        cursor.set_range(_PLACE.pack(place_of(number, 0)))
        while (key := cursor.key()) and file_number_of(*_PLACE.unpack(key)) == number:
            cursor.delete()

    def use(self, place: int, used_at: int, pause_s: Callable[[float, float], float]) -> None:
        """Note a use of a record, if it is still there; ``pause_s`` of the usual pause and this one."""
        data = self._txn.get(_PLACE.pack(place), db=self._segments)
        if data is None:
            return
        entry = Entry.decode(data)
        self._txn.delete(_PLACE.pack(entry.used_at), db=self._order)
        self._txn.put(_PLACE.pack(used_at), _PLACE.pack(place), db=self._order)
        pause = pause_s(entry.pause_s, (used_at - entry.used_at) / 1e6)
        entry = entry._replace(used_at=used_at, pause_s=pause)
        self._txn.put(_PLACE.pack(place), entry.encode(), db=self._segments)

    def save_state(self, state: State) -> None:
        files = {str(number): of for number, of in state.files.items()}
        data = orjson.dumps({**state._asdict(), "files": files})
        self._txn.put(_STATE, data)

    def _count(self, before: bytes, change: int) -> None:
        if before == _NOTHING:
            return
        data = self._txn.get(before, db=self._follows)
        count = change + (0 if data is None else _COUNT.unpack(data)[0])
        if count > 0:
            self._txn.put(before, _COUNT.pack(count), db=self._follows)
        else:
            self._txn.delete(before, db=self._follows)
