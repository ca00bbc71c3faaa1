"""One append-only file of records."""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Iterator, Sequence
from pathlib import Path

from krul_backend.errors import RecordError
from krul_backend.tiers.common.record import (
    FIXED_NUM_BYTES,
    MAGIC,
    RECORD_ALIGN,
    SegmentRecord,
    decode_header,
    decode_size,
)
from krul_backend.tiers.ssd.disk import Buffer, Disk, open_for_reading, read_up_to, write_all
from krul_backend.tiers.ssd.own_files import FILE_HEADER_NUM_BYTES, LogStamp, encode_file_header, log_name

_FIRST_READ_BYTES = 4096
_SEARCH_NUM_BYTES = 1 << 20


class LogFile:
    """The file ``<number>.log``: a header of 4096 bytes, then records, and holes in place of those that are
    gone. One thread at a time changes it.

    ``file_id`` is random; with a record's offset it makes the ``place`` that its header is bound to.
    ``num_bytes`` is the file's size with all holes, ``num_synced_bytes`` how much of it is durable,
    ``taken_bytes`` what it takes of the disk, ``live_bytes`` the part of that with records that can be found.
    The descriptors stay open while ``num_holds`` is not 0; a removed file takes its space until then. These
    counts are changed under the tier's lock.
    """

    def __init__(
        self, disk: Disk, path: Path, number: int, file_id: int, fd: int, read_fd: int, num_bytes: int
    ) -> None:
        self._disk = disk
        self.path = path
        self.number = number
        self.file_id = file_id
        self.read_fd = read_fd
        self._fd = fd
        self.num_bytes = num_bytes
        self.num_synced_bytes = num_bytes
        self.taken_bytes = num_bytes
        self.live_bytes = 0
        self.num_damaged_bytes = 0
        self.num_holds = 0
        self.is_removed = False

    @classmethod
    def create(cls, disk: Disk, directory: Path, number: int) -> LogFile:
        """Make a new, empty file: it is written under another name, synced, and renamed. Raises OSError."""
        path = directory / log_name(number)
        temporary = path.with_suffix(".tmp")
        file_id = secrets.randbits(64)
        fd = disk.open(temporary, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(disk, fd, [encode_file_header(number, file_id)], 0)
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
        return cls(disk, path, number, file_id, fd, read_fd, FILE_HEADER_NUM_BYTES)

    @classmethod
    def open(cls, disk: Disk, path: Path, stamp: LogStamp) -> LogFile:
        """Open an existing file; ``stamp`` is what its header says. Raises OSError."""
        assert stamp.file_id is not None, f"{path} is not of this format"
        fd = disk.open(path, os.O_RDWR)
        try:
            disk.expect_random_reads(fd)
            num_bytes = disk.size(fd)
            read_fd = open_for_reading(disk, path)
        except BaseException:
            disk.close(fd)
            raise
        return cls(disk, path, stamp.number, stamp.file_id, fd, read_fd, num_bytes)

    def place(self, offset: int) -> int:
        """The number that binds the header of a record to ``offset`` in this file; see ``record.py``."""
        return (self.file_id + offset) % (1 << 64)

    def scan(self, start: int = FILE_HEADER_NUM_BYTES) -> Iterator[tuple[int, SegmentRecord]]:
        """Iterate over offset and header of each record from ``start`` on whose header is right.

        After a damaged header the next right one is looked for, at each multiple of 4096. At the end of the
        scan what is between right records becomes a hole, and the file is truncated after the last one. Until
        then ``num_synced_bytes`` is where the last one ended.

        Raises:
            OSError: the file cannot be read or changed.
        """
        if start == self.num_bytes > FILE_HEADER_NUM_BYTES:
            return
        offset = end = start
        damaged: list[tuple[int, int]] = []
        while (offset := self._next_data(offset)) < self.num_bytes:
            record = self._record_at(offset)
            if record is None:
                after = self._next_magic(offset + RECORD_ALIGN)
                damaged.append((offset, after))
                offset = after
            else:
                self.num_synced_bytes = offset + record.num_bytes
                yield offset, record
                offset = end = offset + record.num_bytes
        for begin, after in damaged:
            if begin < end:
                self.num_damaged_bytes += after - begin
                self.punch(begin, after - begin)
        # Sync even if nothing was cut off: the process that wrote the records may not have synced them.
        self._disk.truncate(self._fd, end)
        self._disk.fdatasync(self._fd)
        self._disk.drop_cache(self._fd, 0, 0)
        self.num_bytes = self.num_synced_bytes = self.taken_bytes = end

    def _next_data(self, offset: int) -> int:
        """Where a record may begin, from ``offset`` on, that is not in a hole; the file's end if nowhere."""
        data = self._disk.next_data(self._fd, offset) if offset < self.num_bytes else offset
        return max(offset, data // RECORD_ALIGN * RECORD_ALIGN)

    def _record_at(self, offset: int) -> SegmentRecord | None:
        try:
            first = read_up_to(self._disk, self._fd, _FIRST_READ_BYTES, offset)
            header_num_bytes, record_num_bytes = decode_size(first[:FIXED_NUM_BYTES])
            if offset + record_num_bytes > self.num_bytes:
                return None
            rest = header_num_bytes - len(first)
            if rest > 0:
                first += read_up_to(self._disk, self._fd, rest, offset + len(first))
            return decode_header(first, self.place(offset))
        except RecordError:
            return None

    def _next_magic(self, offset: int) -> int:
        """The next offset at which a header may start; the file's end if there is none."""
        while (offset := self._next_data(offset)) < self.num_bytes:
            data = read_up_to(self._disk, self._fd, _SEARCH_NUM_BYTES, offset)
            for at in range(0, len(data), RECORD_ALIGN):
                if data.startswith(MAGIC, at):
                    return offset + at
            offset += _SEARCH_NUM_BYTES
        return self.num_bytes

    def append(self, buffers: Sequence[Buffer], num_bytes: int) -> int:
        """Write at the end, without syncing; returns the offset. ``num_bytes`` is the size of ``buffers``.

        Raises:
            OSError: not everything could be written; call ``cut_back`` before anything else.
        """
        offset = self.num_bytes
        write_all(self._disk, self._fd, buffers, offset)
        self.num_bytes = offset + num_bytes
        return offset

    def punch(self, offset: int, num_bytes: int) -> bool:
        """Make a hole, which is durable after a ``sync``; False if the file system cannot. Raises OSError."""
        try:
            self._disk.punch(self._fd, offset, num_bytes)
        except OSError as error:
            if error.errno not in (errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            return False
        return True

    def sync(self) -> None:
        """Make appended bytes and holes durable, and drop the former from the page cache. Raises OSError."""
        self._disk.fdatasync(self._fd)
        if self.num_bytes > self.num_synced_bytes:
            self._disk.drop_cache(self._fd, self.num_synced_bytes, self.num_bytes - self.num_synced_bytes)
        self.num_synced_bytes = self.num_bytes

    def cut_back(self) -> bool:
        """Truncate the file to what was last synced; False if that fails, too.

        Then nothing may ever be appended again, because the file's end is not known. ``num_bytes`` is its
        size as the system then tells it.
        """
        is_clean, old_num_bytes = True, self.num_bytes
        try:
            self._disk.truncate(self._fd, self.num_synced_bytes)
            self._disk.fdatasync(self._fd)
        except OSError:
            is_clean = False
        self.num_bytes = self._disk.size(self._fd)
        self.taken_bytes += self.num_bytes - old_num_bytes
        return is_clean

    def close(self) -> None:
        self._disk.close(self.read_fd)
        self._disk.close(self._fd)
