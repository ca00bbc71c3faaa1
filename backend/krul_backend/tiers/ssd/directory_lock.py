"""One daemon per directory."""

from __future__ import annotations

import fcntl
import os
import sys
from pathlib import Path

from krul_backend.errors import DaemonError

_FILE_NAME = "lock"


class DirectoryLock:
    """An exclusive ``flock`` that ends with the process, however it ends. The file says who holds it.

    Args:
        directory: is created, for this user only, if it does not exist.

    Raises:
        DaemonError: the directory cannot be used, belongs to somebody else, or is in use.
    """

    def __init__(self, directory: Path) -> None:
        try:
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.geteuid():
                raise DaemonError(f"{directory} belongs to another user: give a directory of your own")
            directory.chmod(0o700)
            self._fd = os.open(directory / _FILE_NAME, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        except OSError as error:
            raise DaemonError(
                f"the SSD tier cannot use {directory} ({error.strerror}): give one that can be written"
            ) from error
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            holder = os.pread(self._fd, 256, 0).decode(errors="replace").strip() or "an unknown process"
            os.close(self._fd)
            raise DaemonError(
                f"the SSD tier's directory {directory} is in use by {holder}: "
                "stop that process, or give each daemon a directory of its own"
            ) from error
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} ({Path(sys.argv[0]).name})\n".encode(), 0)

    def release(self) -> None:
        """Let others have the directory. The file stays: removing it would race with the next holder."""
        os.close(self._fd)
