"""The few system calls that the SSD tier makes, in one place, so that tests can make each of them fail."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

Buffer = bytes | memoryview


class Disk:
    """Files by descriptor. Every method raises ``OSError`` as the system call does."""

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        return os.open(path, flags | os.O_CLOEXEC, mode)

    def close(self, fd: int) -> None:
        os.close(fd)

    def size(self, fd: int) -> int:
        return os.fstat(fd).st_size

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes read, fewer than asked for at the end of the file or whenever the kernel likes."""
        return os.preadv(fd, buffers, offset)

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        """Bytes written, which may be fewer than given."""
        return os.pwritev(fd, buffers, offset)

    def fdatasync(self, fd: int) -> None:
        os.fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        os.ftruncate(fd, num_bytes)

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
        """Let the page cache forget clean pages of a range (``num_bytes`` 0: to the end of the file)."""
        os.posix_fadvise(fd, offset, num_bytes, os.POSIX_FADV_DONTNEED)

    def expect_random_reads(self, fd: int) -> None:
        """Read no further ahead than asked."""
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_RANDOM)

    def free_bytes(self, path: Path) -> int:
        """What the file system has left for this user."""
        status = os.statvfs(path)
        return status.f_bavail * status.f_frsize
