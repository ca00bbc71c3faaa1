"""One append-only file of records."""

from __future__ import annotations

import errno
import os
import struct
from collections.abc import Iterator, Sequence
from pathlib import Path

import xxhash

from krul_backend.errors import RecordError
from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.ssd.disk import Buffer, Disk
from krul_backend.tiers.ssd.record import (
    FIXED_NUM_BYTES,
    RECORD_ALIGN,
    SegmentRecord,
    decode_header,
    decode_size,
)

FILE_HEADER_NUM_BYTES = RECORD_ALIGN
_MAGIC = b"KRULLOG1"
_FILE_HEADER = struct.Struct("<8sQQI")
_MAX_IOVECS = 1024
_FIRST_READ_BYTES = 4096


class LogFile:
    """``<number>.log``: a header of 4096 bytes, then records. Appends come from one thread at a time.

    File header: magic ``KRULLOG1``, XXH3-64 of what follows, number (u64), format version (u32), zeros.

    ``num_bytes`` is the file's size, ``num_synced_bytes`` what is known to be durable of it. ``live_bytes``
    are the records that can be found. ``min_sequence`` is the smallest of any record in it, dead or alive.
    The descriptors stay open as long as somebody holds the file; a removed file takes its space until then.
    These counts belong to the tier and are changed under its lock.
    """

    def __init__(self, disk: Disk, path: Path, number: int, fd: int, read_fd: int, num_bytes: int) -> None:
        self._disk = disk
        self.path = path
        self.number = number
        self.read_fd = read_fd
        self._fd = fd
        self.num_bytes = num_bytes
        self.num_synced_bytes = num_bytes
        self.live_bytes = 0
        self.min_sequence: int | None = None
        self.num_holds = 0
        self.is_removed = False

    @classmethod
    def create(cls, disk: Disk, directory: Path, number: int) -> LogFile:
        """A new, empty file that appears whole: written under another name, synced, renamed."""
        path = directory / f"{number:08d}.log"
        temporary = path.with_suffix(".tmp")
        body = struct.pack("<QI", number, FORMAT_VERSION)
        header = _FILE_HEADER.pack(_MAGIC, xxhash.xxh3_64_intdigest(body), number, FORMAT_VERSION)
        fd = disk.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(disk, fd, [header.ljust(FILE_HEADER_NUM_BYTES, b"\0")], 0)
            disk.fdatasync(fd)
            disk.rename(temporary, path)
            disk.sync_directory(directory)
            read_fd = open_for_reading(disk, path)
        except OSError:
            disk.close(fd)
            for leftover in (temporary, path):
                if leftover.exists():
                    disk.unlink(leftover)
            raise
        return cls(disk, path, number, fd, read_fd, FILE_HEADER_NUM_BYTES)

    @classmethod
    def open(cls, disk: Disk, path: Path) -> LogFile:
        """A file that exists.

        Raises:
            RecordError: it is no log file of this format.
            OSError: it cannot be read.
        """
        fd = disk.open(path, os.O_RDWR)
        try:
            header = read_up_to(disk, fd, FILE_HEADER_NUM_BYTES, 0)
            if len(header) < FILE_HEADER_NUM_BYTES:
                raise RecordError(f"{path.name} ends within its header")
            magic, checksum, number, version = _FILE_HEADER.unpack_from(header)
            body = header[16 : _FILE_HEADER.size]
            is_right = magic == _MAGIC and checksum == xxhash.xxh3_64_intdigest(body)
            if not is_right or version != FORMAT_VERSION or path.stem != f"{number:08d}":
                raise RecordError(f"{path.name} is no log file of format {FORMAT_VERSION}")
            disk.expect_random_reads(fd)
            num_bytes = disk.size(fd)
            return cls(disk, path, number, fd, open_for_reading(disk, path), num_bytes)
        except BaseException:
            disk.close(fd)
            raise

    def scan(self) -> Iterator[tuple[int, SegmentRecord]]:
        """Offsets and headers of the whole records, from the file's start to the first that does not check.

        What follows that one is cut off when the scan ends.

        Raises:
            OSError: it cannot be read, or not be cut off.
        """
        offset = FILE_HEADER_NUM_BYTES
        while offset < self.num_bytes:
            try:
                first = read_up_to(self._disk, self._fd, _FIRST_READ_BYTES, offset)
                size = decode_size(first[:FIXED_NUM_BYTES])
                if offset + size.record_num_bytes > self.num_bytes:
                    raise RecordError("the file ends within the record")
                rest = size.header_num_bytes - len(first)
                if rest > 0:
                    first += read_up_to(self._disk, self._fd, rest, offset + len(first))
                record = decode_header(first)
            except RecordError:
                break
            yield offset, record
            offset += record.record_num_bytes
        # Also when nothing is torn: what was read may never have been synced by the process that wrote it.
        self._disk.truncate(self._fd, offset)
        self._disk.fdatasync(self._fd)
        self._disk.drop_cache(self._fd, 0, 0)
        self.num_bytes = self.num_synced_bytes = offset

    def append(self, buffers: Sequence[Buffer], num_bytes: int) -> int:
        """Write at the end, without syncing; returns the offset. ``num_bytes`` are all of ``buffers``.

        Raises:
            OSError: not everything could be written; call ``cut_back`` before anything else.
        """
        offset = self.num_bytes
        write_all(self._disk, self._fd, buffers, offset)
        self.num_bytes = offset + num_bytes
        return offset

    def sync(self) -> None:
        """Make durable what was appended, and let the page cache forget it."""
        self._disk.fdatasync(self._fd)
        self._disk.drop_cache(self._fd, self.num_synced_bytes, self.num_bytes - self.num_synced_bytes)
        self.num_synced_bytes = self.num_bytes

    def cut_back(self) -> bool:
        """Drop what was written since the last sync; False if that, too, fails.

        Then nothing more may be appended, ever: after a part of a record no other is found. ``num_bytes`` is
        what the file really takes afterwards.
        """
        is_clean = True
        try:
            self._disk.truncate(self._fd, self.num_synced_bytes)
            self._disk.fdatasync(self._fd)
        except OSError:
            is_clean = False
        self.num_bytes = self._disk.size(self._fd)
        return is_clean

    def close(self) -> None:
        self._disk.close(self.read_fd)
        self._disk.close(self._fd)


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all buffers one after the other, however little each call takes.

    Raises:
        OSError: the medium failed, or takes nothing any more.
    """
    views = [memoryview(buffer) for buffer in buffers if len(buffer)]
    first = 0
    while first < len(views):
        num_written = disk.pwritev(fd, views[first : first + _MAX_IOVECS], offset)
        if num_written <= 0:
            raise OSError(errno.EIO, "nothing could be written")
        offset += num_written
        while first < len(views) and num_written >= len(views[first]):
            num_written -= len(views[first])
            first += 1
        if num_written:
            views[first] = views[first][num_written:]


def read_up_to(disk: Disk, fd: int, num_bytes: int, offset: int) -> bytes:
    """``num_bytes`` from ``offset`` on, fewer only where the file ends. Raises OSError."""
    data = bytearray(num_bytes)
    view = memoryview(data)
    num_read = 0
    while num_read < num_bytes:
        step = disk.preadv(fd, [view[num_read:]], offset + num_read)
        if step <= 0:
            break
        num_read += step
    return bytes(view[:num_read])


def open_for_reading(disk: Disk, path: Path) -> int:
    """For reading past the page cache; through it where the file system cannot do otherwise."""
    try:
        return disk.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return disk.open(path, os.O_RDONLY)
