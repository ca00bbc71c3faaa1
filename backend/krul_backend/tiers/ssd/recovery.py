"""Reads what is in the directory when a daemon starts: log files, and the file that says what was cleared."""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import struct
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import orjson
import xxhash

from krul_backend.errors import DaemonError, RecordError
from krul_backend.tiers.common.record import RECORD_ALIGN, SegmentRecord
from krul_backend.tiers.ssd.disk import Disk, read_up_to, write_all
from krul_backend.tiers.ssd.index import State
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.own_files import (
    CLEARS_MAGIC,
    CLEARS_NAME,
    FILE_HEADER_NUM_BYTES,
    join_another,
    log_paths,
    read_stamp,
    taken_bytes,
    temporary_paths,
)

logger = logging.getLogger(__name__)

_MAGIC = CLEARS_MAGIC + b"2"
_PREFIX = struct.Struct("<8sQQQ")
_CHECKED_FROM = 16
_COPY_NUM_BYTES = 64 << 10


class ClearFile:
    """The file ``clears``: two equal copies of ``{"all": n, "models": {fingerprint: n}}``, 64 KiB each.

    A copy is: magic ``KRULCLR2``, XXH3-64 of what follows, generation (u64), the JSON's size (u64), the JSON.

    A record is cleared if its file's number is smaller than ``all`` or than its model's number. This also
    covers files that cannot be read when the clear is made, and damage in a log cannot hide it. The copies
    are overwritten in place, one after the other: that works on a full file system, and one of them is good
    at any moment. The newer good one counts.
    """

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._path = directory / CLEARS_NAME
        self._all = 0
        self._models: dict[str, int] = {}
        self._generation = 0

    @property
    def first_open_number(self) -> int:
        """The smallest number of a file that may get new records: in earlier files they could be cleared."""
        return max(self._all, *self._models.values(), 0)

    @property
    def digest(self) -> int:
        """Stands for all that is noted."""
        noted = {"all": self._all, "models": self._models}
        return xxhash.xxh3_64_intdigest(orjson.dumps(noted, option=orjson.OPT_SORT_KEYS))

    @property
    def all(self) -> int:
        """All records in files with a smaller number are cleared."""
        return self._all

    def is_cleared(self, fingerprint: str, file_number: int) -> bool:
        return file_number < max(self._all, self._models.get(fingerprint, 0))

    def load(self) -> None:
        """Read the file.

        Raises:
            RecordError: it is missing or damaged: nothing in the logs can be trusted.
            OSError: it cannot be read.
        """
        try:
            fd = self._disk.open(self._path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise RecordError("there is no record of what was cleared") from error
        try:
            data = read_up_to(self._disk, fd, 2 * _COPY_NUM_BYTES, 0)
        finally:
            self._disk.close(fd)
        copies = [_decode_copy(data[at : at + _COPY_NUM_BYTES]) for at in (0, _COPY_NUM_BYTES)]
        good = [copy for copy in copies if copy is not None]
        if not good:
            raise RecordError("the record of what was cleared is damaged")
        self._generation, json = max(good)
        cleared = orjson.loads(json)
        self._all, self._models = cleared["all"], cleared["models"]
        if copies[0] != copies[1]:
            # Repair the bad copy: the next damage might hit the good one.
            with contextlib.suppress(OSError):
                self._overwrite(json)

    def create(self, file_number: int) -> None:
        """Replace the file atomically by one that clears all files with a smaller number. Raises OSError."""
        temporary = self._path.with_suffix(".tmp")
        copy = _encode_copy(1, orjson.dumps({"all": file_number, "models": {}}))
        fd = self._disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(self._disk, fd, [copy, copy], 0)
            self._disk.fdatasync(fd)
        finally:
            self._disk.close(fd)
        self._disk.rename(temporary, self._path)
        self._disk.sync_directory(self._directory)
        self._all, self._models, self._generation = file_number, {}, 1

    def add(self, fingerprint: str | None, file_number: int, oldest_number: int) -> None:
        """Clear one model's records, or (None) all, in files with a smaller number; durable on return.

        Notes of clears up to ``oldest_number`` are dropped, as no file has a smaller number than that.

        Raises:
            OSError: it could not be written, or there are too many models for it.
        """
        cleared_all = file_number if fingerprint is None else self._all
        models = {} if fingerprint is None else {**self._models, fingerprint: file_number}
        models = {key: number for key, number in models.items() if number > oldest_number}
        json = orjson.dumps({"all": cleared_all, "models": models})
        if _PREFIX.size + len(json) > _COPY_NUM_BYTES:
            raise OSError(errno.EFBIG, f"{len(models)} models were cleared, which is too many to note")
        self._overwrite(json)
        self._all, self._models = cleared_all, models

    def _overwrite(self, json: bytes) -> None:
        copy = _encode_copy(self._generation + 1, json)
        fd = self._disk.open(self._path, os.O_WRONLY)
        try:
            for at in (0, _COPY_NUM_BYTES):
                write_all(self._disk, fd, [copy], at)
                self._disk.fdatasync(fd)
        finally:
            self._disk.close(fd)
        self._generation += 1


def _encode_copy(generation: int, json: bytes) -> bytes:
    unsealed = _PREFIX.pack(_MAGIC, 0, generation, len(json)) + json
    checksum = xxhash.xxh3_64_intdigest(unsealed[_CHECKED_FROM:])
    return (_PREFIX.pack(_MAGIC, checksum, generation, len(json)) + json).ljust(_COPY_NUM_BYTES, b"\0")


def _decode_copy(data: bytes) -> tuple[int, bytes] | None:
    """Generation and JSON of a copy; None if it is damaged."""
    if len(data) < _PREFIX.size:
        return None
    magic, checksum, generation, num_json_bytes = _PREFIX.unpack_from(data)
    end = _PREFIX.size + num_json_bytes
    if magic != _MAGIC or end > len(data):
        return None
    if xxhash.xxh3_64_intdigest(data[_CHECKED_FROM:end]) != checksum:
        return None
    return generation, data[_PREFIX.size : end]


class IndexOutdatedError(Exception):
    """The index says of a file what cannot be: it was made of other files."""


@dataclass(frozen=True)
class Recovered:
    """The result of ``Recovery.scan``: the log files, ordered by number; ``unread``: sizes, by number, of
    files that could not be read, and of which nothing is found."""

    files: list[LogFile]
    unread: Mapping[int, int]


class Recovery:
    """Reads what is in the directories when a daemon starts: first the clears, later all log files.

    The first directory has the clears and the index; the others have logs alone, each on a disk of its own.

    ``clears`` is read by the constructor, so that further clears can be noted before and during the scan.
    ``sizes`` are what the log files take by number, all of which are below ``next_number``.
    ``can_punch`` is False if records do not lie in whole blocks of the file system.

    Raises:
        DaemonError: a directory, or the file of clears in the first one, cannot be read or written.
    """

    def __init__(self, disk: Disk, directories: Sequence[Path]) -> None:
        self._disk = disk
        self._directory, *others = directories
        paths: dict[Path, int] = {}
        try:
            for directory in directories:
                for leftover in temporary_paths(directory):
                    disk.unlink(leftover)
                paths |= log_paths(directory)
            for directory in others:
                join_another(disk, directory)
            directory = self._directory
            self._paths = dict(sorted(paths.items(), key=lambda item: item[1]))
            self.clears = _load_clears(disk, directory, self._paths.values())
            self.sizes = {number: taken_bytes(path) for path, number in self._paths.items()}
            self.can_punch = all(RECORD_ALIGN % disk.block_bytes(each) == 0 for each in directories)
        except OSError as error:
            raise DaemonError(
                f"the SSD tier's directory {directory} cannot be read ({error}): start again if that may "
                "pass, give another directory, or remove this one"
            ) from error
        self.next_number = max(self.clears.first_open_number, *(number + 1 for number in self.sizes), 1)

    def scan(
        self, known: State, enter: Callable[[LogFile, int, SegmentRecord], None], go_on: Callable[[], bool]
    ) -> Recovered | None:
        """Open all files, and give ``enter`` the records that the index does not know, in the order of
        writing.

        Half-written ends of files are cut off. A file is removed only if it has the tier's header, and is of
        another format, damaged, renamed or cleared; or if it lies in another directory than the first, and
        the index does not know it: clears that were made without it need not cover its number. One that
        cannot be read stays for the next start; a file without the header is somebody else's, and stays.
        ``go_on`` is called after each record; when it returns False, the scan ends with None.

        Raises:
            IndexOutdatedError: ``known`` is of other files.
        """
        files: list[LogFile] = []
        unread: dict[int, int] = {}
        reasons: list[str] = []
        num_strange = 0
        try:
            for path, number in self._paths.items():
                try:
                    stamp = read_stamp(self._disk, path)
                    if stamp is None:
                        reasons.append(f"{path.name} (not a file of this tier)")
                        continue
                    if not stamp.is_usable_as(path):
                        logger.warning("removing %s: it is of format %d, or damaged", path, stamp.version)
                    is_known = known.files.get(number, (None,))[0] == stamp.file_id
                    is_strange = path.parent != self._directory and not is_known
                    if is_strange or not stamp.is_usable_as(path) or number < self.clears.all:
                        num_strange += is_strange
                        self._disk.unlink(path)
                        continue
                    file = LogFile.open(self._disk, path, stamp)
                    files.append(file)
                    if not self._scan(file, known, enter, go_on):
                        raise _StoppedError
                except OSError as error:
                    if files and files[-1].path == path:
                        files.pop().close()
                    unread[number] = self.sizes[number]
                    reasons.append(f"{path.name} ({error.strerror or error})")
        except BaseException as error:
            for file in files:
                file.close()
            if isinstance(error, _StoppedError):
                return None
            raise
        if num_strange:
            logger.warning("removed %d log files that %s does not know", num_strange, self._directory)
        if reasons:
            logger.warning("left alone in %s: %s", self._directory, ", ".join(reasons))
        return Recovered(files, unread)

    def _scan(
        self,
        file: LogFile,
        known: State,
        enter: Callable[[LogFile, int, SegmentRecord], None],
        go_on: Callable[[], bool],
    ) -> bool:
        """Give what the index does not know of a file; False when ``go_on`` says so."""
        file_id, end, file.live_bytes = known.files.get(file.number, (file.file_id, FILE_HEADER_NUM_BYTES, 0))
        if file_id != file.file_id or end > file.num_bytes:
            raise IndexOutdatedError(f"{file.path.name} is not the file that was indexed")
        for offset, record in file.scan(end):
            enter(file, offset, record)
            if not go_on():
                return False
        if file.num_damaged_bytes:
            logger.warning("%s is damaged: %d bytes of it are skipped", file.path, file.num_damaged_bytes)
        return True


class _StoppedError(Exception):
    """The tier shall close before the scan has ended."""


def _load_clears(disk: Disk, directory: Path, numbers: Collection[int]) -> ClearFile:
    clears = ClearFile(disk, directory)
    try:
        clears.load()
    except RecordError as error:
        if numbers:
            logger.warning("dropping all segments in %s: %s", directory, error)
        clears.create(max(numbers, default=0) + 1)
    return clears
