"""The private directory that holds a daemon's socket."""

from __future__ import annotations

import contextlib
import fcntl
import os
import socket
import stat
import struct
from pathlib import Path

from krul_backend.errors import DaemonError, DaemonUnreachableError

SOCKET_NAME = "daemon.sock"

HINTS_TOKEN_NAME = "hints.token"
"""The file in its runtime directory with the token for hints over HTTP."""

LOG_NAME = "daemon.log"
"""The file in its runtime directory to which a daemon writes its log when an engine started it."""

_LOCK_FILE = "daemon.lock"
_PEER = struct.Struct("iII")
"""``struct ucred``: process, user, group."""

MAX_SOCKET_PATH_BYTES = 107
"""What ``sockaddr_un.sun_path`` holds beside its closing zero."""


class RuntimeDir:
    """A directory that one daemon holds, from the constructor on until ``close``.

    It is made (0700) if it is not there. An existing one must be a directory of this user that nobody else
    may enter. A socket that an earlier daemon left behind is removed. The lock file stays: if it were
    removed, two daemons could each hold a lock.

    Raises:
        DaemonError: the path is too long for a socket, the directory belongs to another user or is open to
            others, or another daemon holds it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path.absolute()
        self._lock: int | None = None
        check_socket_path(self.path)
        try:
            self.path.mkdir(mode=0o700, parents=True, exist_ok=True)
            check_private(self.path)
            self._lock = _take_lock(self.path)
            self.socket_path.unlink(missing_ok=True)
        except OSError as error:
            self._unlock()
            raise DaemonError(
                f"{self.path} cannot be a runtime directory: {error.strerror or error}"
            ) from error

    @property
    def socket_path(self) -> Path:
        return self.path / SOCKET_NAME

    def close(self) -> None:
        """Remove the socket and let another daemon have the directory. May be called again."""
        if self._lock is not None:
            self.socket_path.unlink(missing_ok=True)
            self._unlock()

    def _unlock(self) -> None:
        if self._lock is not None:
            os.close(self._lock)
            self._lock = None


def runtime_dir_of(endpoint: str | Path) -> Path:
    """The runtime directory that an endpoint means: the directory itself, or ``ipc://<dir>/daemon.sock``.

    Raises:
        DaemonError: the endpoint names no directory; that of TCP does not.
    """
    text = str(endpoint)
    if "://" not in text:
        return Path(text)
    path = Path(text.removeprefix("ipc://"))
    if not text.startswith("ipc://") or path.name != SOCKET_NAME:
        raise DaemonError(
            f"{text} shares no memory: give the daemon's runtime directory, or ipc://<directory>/{SOCKET_NAME}"
        )
    return path.parent


def check_socket_path(directory: Path) -> None:
    """Raises DaemonError if the socket in this directory would have too long a path."""
    num_bytes = len(os.fsencode(directory / SOCKET_NAME))
    if num_bytes > MAX_SOCKET_PATH_BYTES:
        raise DaemonError(
            f"the socket in {directory} would have a path of {num_bytes} bytes, the system takes "
            f"{MAX_SOCKET_PATH_BYTES}: choose a shorter runtime directory"
        )


def check_private(directory: Path) -> None:
    """Check that nobody else can put or open anything in a directory.

    Raises:
        DaemonError: it is no directory, not this user's, or open to others.
        OSError: it cannot be looked at.
    """
    status = os.lstat(directory)
    if not stat.S_ISDIR(status.st_mode):
        raise DaemonError(f"{directory} cannot be a runtime directory: it is a link or no directory")
    if status.st_uid != os.geteuid():
        raise DaemonError(
            f"{directory} belongs to user {status.st_uid}, this is user {os.geteuid()}: "
            "choose a runtime directory of your own"
        )
    if status.st_mode & 0o077:
        raise DaemonError(
            f"{directory} has mode {stat.S_IMODE(status.st_mode):04o}, so others may enter it: chmod 0700 it"
        )


def check_served(directory: Path) -> Path:
    """Check that the socket in a runtime directory can only be this user's; returns its path.

    Raises:
        DaemonUnreachableError: the directory or the socket is not there.
        DaemonError: the directory is a link, another user's or open to others, or the socket is none or
            another user's.
    """
    path = directory / SOCKET_NAME
    try:
        check_private(directory)
        status = os.lstat(path)
    except OSError as error:
        raise DaemonUnreachableError(
            f"no krul daemon serves {directory}: {error.strerror or error}"
        ) from error
    if not stat.S_ISSOCK(status.st_mode):
        raise DaemonError(f"{path} is no socket: no krul daemon made it")
    if status.st_uid != os.geteuid():
        raise DaemonError(
            f"{path} belongs to user {status.st_uid}, this is user {os.geteuid()}: it is not used"
        )
    return path


def peer_of(connection: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end of a Unix socket. Raises OSError if it is gone."""
    pid, uid, _ = _PEER.unpack(connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _PEER.size))
    return pid, uid


def is_own_user(uid: int) -> bool:
    """Return whether a user id is this process's own. Peers of any other user are refused, even root."""
    return uid == os.geteuid()


def remove_if_embedded(directory: Path) -> None:
    """Remove a runtime directory that an engine made for this process alone; leave any other as it is.

    Such a directory is recognised by its log file, to which this process's standard error goes. If it
    contains files that neither the engine nor the daemon made, they stay, and so does the directory.
    """
    with contextlib.suppress(OSError):
        log = directory / LOG_NAME
        if os.path.samestat(os.fstat(2), os.lstat(log)):
            log.unlink()
            (directory / HINTS_TOKEN_NAME).unlink(missing_ok=True)
            (directory / _LOCK_FILE).unlink(missing_ok=True)
            directory.rmdir()


def _take_lock(directory: Path) -> int:
    descriptor = os.open(
        directory / _LOCK_FILE, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, mode=0o600
    )
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, f"{os.getpid()}\n".encode(), 0)
    except BlockingIOError:
        holder = os.pread(descriptor, 32, 0).decode(errors="replace").strip() or "unknown"
        os.close(descriptor)
        raise DaemonError(f"{directory} is in use by another daemon (process {holder})") from None
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor
