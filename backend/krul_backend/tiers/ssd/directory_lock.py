"""One daemon per directory."""

from __future__ import annotations

import fcntl
import logging
import os
import sys
import time
from pathlib import Path

from krul_backend.errors import DaemonError

logger = logging.getLogger(__name__)

PATIENCE_S = 20.0
"""How long a daemon waits for another one to leave: that of an engine that was just started again may still
write what it has."""

_FILE_NAME = "lock"
_POLL_S = 0.1


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
            self._lock(directory)
        except BaseException:
            os.close(self._fd)
            raise
        os.ftruncate(self._fd, 0)
        os.pwrite(self._fd, f"process {os.getpid()} ({Path(sys.argv[0]).name})\n".encode(), 0)

    def _lock(self, directory: Path) -> None:
        deadline_s = time.monotonic() + PATIENCE_S
        is_waiting = False
        while True:
            try:
                fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except OSError as error:
                holder = os.pread(self._fd, 256, 0).decode(errors="replace").strip() or "an unknown process"
                if time.monotonic() >= deadline_s:
                    raise DaemonError(
                        f"the SSD tier's directory {directory} is in use by {holder}: "
                        "stop that process, or give each daemon a directory of its own"
                    ) from error
            if not is_waiting:
                is_waiting = True
                logger.info("waiting for %s to leave %s", holder, directory)
            time.sleep(_POLL_S)

    def release(self) -> None:
        """Let others have the directory. The file stays: removing it would race with the next holder."""
        os.close(self._fd)
