"""The lock that lets only one daemon use a directory."""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import sys
import time
from pathlib import Path

from krul_backend.errors import DaemonError
from krul_backend.tiers.ssd.own_files import LOCK_NAME

logger = logging.getLogger(__name__)

_POLL_S = 0.1


class DirectoryLock:
    """An exclusive ``flock`` on a file in the directory, which names the holder. It ends with the process.

    Args:
        directory: is created, for this user only, if it does not exist.
        patience_s: how long to wait for another process to leave.

    Raises:
        DaemonError: the directory cannot be used, is a link, belongs to somebody else, or is in use.
    """

    def __init__(self, directory: Path, patience_s: float = 0.0) -> None:
        try:
            if directory.is_symlink():
                raise DaemonError(
                    f"{directory} is a symbolic link, and what it points to may be somebody else's: "
                    "remove the link, or give as the SSD's directory one where a directory can be made"
                )
            directory.mkdir(mode=0o700, parents=True, exist_ok=True)
            if directory.stat().st_uid != os.geteuid():
                raise DaemonError(f"{directory} belongs to another user: give a directory of your own")
            directory.chmod(0o700)
            flags = os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
            self._fd = os.open(directory / LOCK_NAME, flags, 0o600)
        except OSError as error:
            raise DaemonError(
                f"the SSD tier cannot use {directory} ({error.strerror}): give one that can be written"
            ) from error
        try:
            self._lock(directory, patience_s)
        except BaseException:
            os.close(self._fd)
            raise
        # On a full disk even this may fail.
        with contextlib.suppress(OSError):
            os.ftruncate(self._fd, 0)
            os.pwrite(self._fd, f"process {os.getpid()} ({Path(sys.argv[0]).name})\n".encode(), 0)

    def _lock(self, directory: Path, patience_s: float) -> None:
        deadline_s = time.monotonic() + patience_s
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
