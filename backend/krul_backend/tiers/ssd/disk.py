"""The system calls of the SSD tier, in one class, so that tests can make each of them fail."""

from __future__ import annotations

import ctypes
import errno
import os
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | memoryview

_MAX_IOVECS = 1024

_FALLOC_FL_KEEP_SIZE, _FALLOC_FL_PUNCH_HOLE = 1, 2
_libc = ctypes.CDLL(None, use_errno=True)


class Disk:
    """Calls the operating system. Every method raises ``OSError`` as the system call does."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        """Open a file; a symbolic link is refused, because it may point to a file of somebody else."""
        return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Read; returns the number of bytes, which may be smaller than asked for, anywhere in the file."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Write; returns the number of bytes, which may be smaller than given."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        """Give the blocks of a range back to the file system: from then on it reads as zeros.

        Raises:
            OSError: with EOPNOTSUPP, the file system cannot do that.
        """
        mode = _FALLOC_FL_PUNCH_HOLE | _FALLOC_FL_KEEP_SIZE
        if _libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(num_bytes)):
            code = ctypes.get_errno()
            raise OSError(code, os.strerror(code))

    def next_data(self, fd: int, offset: int) -> int:
        """The first offset from ``offset`` on that is not in a hole; the file's size if there is none."""
        try:
            return os.lseek(fd, offset, os.SEEK_DATA)
        except OSError as error:
            if error.errno != errno.ENXIO:
                raise
            return self.size(fd)

    def rename(self, old: Path, new: Path) -> None:
        os.rename(old, new)

    def unlink(self, path: Path) -> None:
        os.unlink(path)

    def sync_directory(self, path: Path) -> None:
        """Make creations, renames and removals in a directory durable."""
        fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    def drop_cache(self, fd: int, offset: int, num_bytes: int) -> None:
        """Drop clean pages of a range from the page cache (``num_bytes`` 0: to the end of the file)."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def expect_random_reads(self, fd: int) -> None:
        """Turn off the kernel's read-ahead for a file."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def block_bytes(self, path: Path) -> int:
        """The size of the file system's blocks: what lies in whole blocks leaves no part of one behind."""
        return os.statvfs(path).f_frsize

    def free_bytes(self, path: Path) -> int:
        """Bytes that the file system has left for this user."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize


def write_all(disk: Disk, fd: int, buffers: Sequence[Buffer], offset: int) -> None:
    """Write all buffers one after the other, however little each call takes.

    Raises:
        OSError: the medium failed, or takes no more bytes.
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
    """Read ``num_bytes`` from ``offset`` on; fewer only at the end of the file. Raises OSError."""
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
    """Open a file for reads past the page cache, or through it if the file system has only that."""
    try:
        return disk.open(path, os.O_RDONLY | os.O_DIRECT)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return disk.open(path, os.O_RDONLY)
