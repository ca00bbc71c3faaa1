"""The directory of the SSD tier: its lock, and names and headers of its files.

Files of others are never counted, written or removed.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import stat
import struct
import sys
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import xxhash

from krul_backend.errors import DaemonError
from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.ssd.disk import Disk, read_up_to

logger = logging.getLogger(__name__)

FILE_HEADER_NUM_BYTES = 4096
LOCK_NAME = "lock"
CLEARS_NAME = "clears"
INDEX_NAME = "index"
INDEX_FILES = (INDEX_NAME, f"{INDEX_NAME}-lock")
CLEARS_MAGIC = b"KRULCLR"
"""The same in every format; a digit follows it."""

_LOG_NAME = re.compile(r"(\d{8,18})\.log")
_TEMPORARY_NAME = re.compile(rf"(\d{{8,18}}|{CLEARS_NAME}|probe)\.tmp")
_DIRECTORY_NAME = re.compile(r"krul-v([1-9]\d*)")

_MAGIC = b"KRULLOG1"
_STAMP = struct.Struct("<8sQQI")
"""Magic, XXH3-64 of what follows, number, format version: the same in the files of every format."""
_FILE_ID = struct.Struct("<QQ")
_FILE_ID_AT = 32
_SECOND_COPY_AT = 2048

_SECTOR_NUM_BYTES = 512
"""The unit of ``st_blocks``, whatever the file system."""

_POLL_S = 0.1


@dataclass(frozen=True)
class LogStamp:
    """The contents of a log file's header. ``file_id`` is None for another format, or damage."""

    number: int
    version: int
    file_id: int | None

    def is_usable_as(self, path: Path) -> bool:
        """Whether the file is of this format, not damaged, and still has its original name."""
        is_whole = self.version == FORMAT_VERSION and self.file_id is not None
        return is_whole and path.name == log_name(self.number)


def format_directory(directory: Path) -> Path:
    """The directory for files of this format, inside the configured one."""
    return directory / f"krul-v{FORMAT_VERSION}"


def log_name(number: int) -> str:
    return f"{number:08d}.log"


def log_paths(directory: Path) -> dict[Path, int]:
    """All paths with the name of a log file, whoever made them, by number, with it. Raises OSError."""
    matches = ((path, _LOG_NAME.fullmatch(path.name)) for path in directory.iterdir())
    numbers = {path: int(match[1]) for path, match in matches if match is not None}
    return dict(sorted(numbers.items(), key=lambda item: item[1]))


def temporary_paths(directory: Path) -> list[Path]:
    """The tier's files that a process left half written. Raises OSError."""
    return [path for path in directory.iterdir() if _TEMPORARY_NAME.fullmatch(path.name)]


def remove_index(disk: Disk, directory: Path) -> None:
    """Remove the index of the logs, which can be made again. Raises OSError."""
    _remove_files(disk, directory, INDEX_FILES)


def join_another(disk: Disk, directory: Path) -> None:
    """Make a directory one that has logs alone: what was cleared is noted in another one from now on.

    If a daemon used it alone later, with old notes of clears, it would find what was cleared since. Durable
    on return. Raises OSError.
    """
    _remove_files(disk, directory, (CLEARS_NAME, *INDEX_FILES))
    disk.sync_directory(directory)


def _remove_files(disk: Disk, directory: Path, names: Iterable[str]) -> None:
    for name in names:
        path = directory / name
        if path.is_file() and not path.is_symlink():
            disk.unlink(path)


def one_per_disk(directories: Iterable[Path]) -> list[Path]:
    """One of the directories on each disk, or of what is there of their paths. Raises OSError."""
    return list({path.stat().st_dev: path for path in map(nearest_existing, directories)}.values())


def nearest_existing(path: Path) -> Path:
    """The path itself, or the nearest folder above it that exists."""
    return next(each for each in (path.absolute(), *path.absolute().parents) if each.exists())


def encode_file_header(number: int, file_id: int) -> bytes:
    """The first 4096 bytes of a log file: two copies of the header, so that one may be damaged."""
    body = struct.pack("<QI", number, FORMAT_VERSION)
    stamp = _STAMP.pack(_MAGIC, xxhash.xxh3_64_intdigest(body), number, FORMAT_VERSION)
    stamp = stamp.ljust(_FILE_ID_AT, b"\0")
    checksum = xxhash.xxh3_64_intdigest(stamp + struct.pack("<Q", file_id))
    copy = stamp + _FILE_ID.pack(file_id, checksum)
    return copy.ljust(_SECOND_COPY_AT, b"\0") + copy.ljust(FILE_HEADER_NUM_BYTES - _SECOND_COPY_AT, b"\0")


def read_stamp(disk: Disk, path: Path) -> LogStamp | None:
    """Read a file's header; None if it is not a log file of the tier, of any format.

    Raises:
        OSError: it cannot be read.
    """
    if not stat.S_ISREG(path.lstat().st_mode):
        return None
    fd = disk.open(path, os.O_RDONLY)
    try:
        header = read_up_to(disk, fd, FILE_HEADER_NUM_BYTES, 0)
    finally:
        disk.close(fd)
    copies = [_decode_copy(header[at:]) for at in (0, _SECOND_COPY_AT)]
    found = [stamp for stamp in copies if stamp is not None]
    return next((stamp for stamp in found if stamp.file_id is not None), found[0] if found else None)


def taken_bytes(path: Path) -> int:
    """What a file takes of the disk: holes take nothing. Raises OSError."""
    status = path.lstat()
    return min(status.st_size, status.st_blocks * _SECTOR_NUM_BYTES)


def own_bytes(directory: Path) -> int:
    """Bytes that readable log files take in ``directory``, those of older formats included."""
    disk = Disk()
    num_bytes = 0
    for formats in _format_directories(directory):
        for path in log_paths(formats):
            with contextlib.suppress(OSError):
                if read_stamp(disk, path) is not None:
                    num_bytes += taken_bytes(path)
    return num_bytes


def remove_older_formats(disk: Disk, directory: Path) -> None:
    """Remove the files that daemons of older formats left in ``directory``: no daemon will read them again.

    A format's directory is changed only if it is a real directory of this user, with a lock that no daemon
    holds. Files without the tier's header stay, and then the directory stays, too.
    """
    for formats in _format_directories(directory):
        if formats == format_directory(directory):
            continue
        try:
            _remove_format(disk, formats)
        except OSError as error:
            logger.warning("%s is of an older format and stays: %s", formats, error)


def _format_directories(directory: Path) -> list[Path]:
    """The real directories of this format and older ones; none if ``directory`` cannot be listed."""
    try:
        matches = [(path, _DIRECTORY_NAME.fullmatch(path.name)) for path in directory.iterdir()]
    except OSError:
        return []
    known = (path for path, match in matches if match is not None and int(match[1]) <= FORMAT_VERSION)
    return [path for path in known if not path.is_symlink() and path.is_dir()]


def _remove_format(disk: Disk, formats: Path) -> None:
    if formats.stat().st_uid != os.geteuid():
        raise PermissionError(errno.EPERM, "it belongs to another user")
    lock = formats / LOCK_NAME
    # A directory without a lock file was not made by a daemon.
    lock_fd = disk.open(lock, os.O_RDWR)
    try:
        fcntl.flock(lock_fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        num_bytes = 0
        for path in log_paths(formats):
            if read_stamp(disk, path) is not None:
                num_bytes += taken_bytes(path)
                disk.unlink(path)
        clears = formats / CLEARS_NAME
        if clears.is_file() and not clears.is_symlink():
            with clears.open("rb") as file:
                is_ours = file.read(len(CLEARS_MAGIC)) == CLEARS_MAGIC
            if is_ours:
                disk.unlink(clears)
        for path in temporary_paths(formats):
            disk.unlink(path)
        remove_index(disk, formats)
        if set(formats.iterdir()) == {lock}:
            disk.unlink(lock)
            formats.rmdir()
        logger.info("removed %d bytes of an older format from %s", num_bytes, formats)
    finally:
        disk.close(lock_fd)


def _decode_copy(data: bytes) -> LogStamp | None:
    if len(data) < _STAMP.size:
        return None
    magic, checksum, number, version = _STAMP.unpack_from(data)
    if magic != _MAGIC or checksum != xxhash.xxh3_64_intdigest(data[16 : _STAMP.size]):
        return None
    file_id = None
    if version == FORMAT_VERSION and len(data) >= _FILE_ID_AT + _FILE_ID.size:
        found, checksum = _FILE_ID.unpack_from(data, _FILE_ID_AT)
        if checksum == xxhash.xxh3_64_intdigest(data[: _FILE_ID_AT + 8]):
            file_id = found
    return LogStamp(number, version, file_id)


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
