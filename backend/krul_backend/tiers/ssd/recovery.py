"""Recovery: reading the log files that are in the directory when a daemon starts."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path

from krul_backend.errors import DaemonError, RecordError
from krul_backend.tiers.common.record import SegmentRecord
from krul_backend.tiers.ssd.clear_file import ClearFile
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.own_files import (
    FILE_HEADER_NUM_BYTES,
    LogStamp,
    log_paths,
    read_stamp,
    temporary_paths,
)

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundRecord:
    """A record with a right header that was not cleared."""

    file: LogFile
    offset: int
    record: SegmentRecord


@dataclass(frozen=True)
class Recovered:
    """The result of ``recover``: ``files`` ordered by number, ``records`` by sequence.

    ``unread``: sizes, by number, of files that could not be read; their records are not known. All files have
    numbers below ``next_number``, all records that were found have sequences below ``next_sequence``.
    """

    files: list[LogFile]
    records: list[FoundRecord]
    unread: Mapping[int, int]
    clears: ClearFile
    next_number: int
    next_sequence: int


def recover(disk: Disk, directory: Path) -> Recovered:
    """Read the headers of all records, and cut off half-written ends of files.

    A file is removed only if it has the tier's header, and is of another format, damaged or renamed. A file
    that cannot be read stays for the next start; a file without the header is somebody else's, and stays.

    Raises:
        DaemonError: the directory, or the file of clears in it, cannot be read or written.
    """
    try:
        for leftover in temporary_paths(directory):
            disk.unlink(leftover)
        paths = log_paths(directory)
        clears = _load_clears(disk, directory, paths.values())
        files: list[LogFile] = []
        records: list[FoundRecord] = []
        unread: dict[int, int] = {}
        reasons: list[str] = []
        next_sequence = 1
        for path, number in paths.items():
            num_bytes = path.lstat().st_size
            try:
                stamp = read_stamp(disk, path)
                if stamp is None:
                    reasons.append(f"{path.name} (not a file of this tier)")
                    continue
                if not stamp.is_usable_as(path):
                    logger.warning("removing %s: it is of format %d, or damaged", path, stamp.version)
                    disk.unlink(path)
                    continue
                file, found = _scan(disk, path, stamp)
            except OSError as error:
                unread[number] = num_bytes
                reasons.append(f"{path.name} ({error.strerror or error})")
                continue
            files.append(file)
            for offset, record in found:
                next_sequence = max(next_sequence, record.sequence + 1)
                if not clears.is_cleared(record.manifest.model.fingerprint, number):
                    records.append(FoundRecord(file, offset, record))
        disk.sync_directory(directory)
    except OSError as error:
        raise DaemonError(
            f"the SSD tier's directory {directory} cannot be read ({error}): start again if that may pass, "
            "give another directory, or remove this one"
        ) from error
    if reasons:
        logger.warning("left alone in %s: %s", directory, ", ".join(reasons))
    records.sort(key=lambda found: found.record.sequence)
    next_number = max(clears.first_open_number, *(number + 1 for number in paths.values()), 1)
    return Recovered(files, records, unread, clears, next_number, next_sequence)


def _load_clears(disk: Disk, directory: Path, numbers: Collection[int]) -> ClearFile:
    clears = ClearFile(disk, directory)
    try:
        clears.load()
    except RecordError as error:
        if numbers:
            logger.warning("dropping all segments in %s: %s", directory, error)
        clears.create(max(numbers, default=0) + 1)
    return clears


def _scan(disk: Disk, path: Path, stamp: LogStamp) -> tuple[LogFile, list[tuple[int, SegmentRecord]]]:
    file = LogFile.open(disk, path, stamp)
    try:
        found = list(file.scan())
    except BaseException:
        file.close()
        raise
    num_damaged_bytes = file.num_bytes - FILE_HEADER_NUM_BYTES - sum(r.record_num_bytes for _, r in found)
    if num_damaged_bytes:
        logger.warning("%s is damaged: %d bytes of it are skipped", path, num_damaged_bytes)
    return file, found
