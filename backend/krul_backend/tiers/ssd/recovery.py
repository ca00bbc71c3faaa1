"""What is left in a directory of logs when a daemon starts."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from pathlib import Path

from krul_backend.errors import DaemonError, RecordError
from krul_backend.tiers.ssd.clear_file import ClearFile
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.record import SegmentRecord

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class FoundRecord:
    """A whole record that was not cleared."""

    file: LogFile
    offset: int
    record: SegmentRecord


@dataclass(frozen=True)
class Recovered:
    """``files`` by number, ``records`` by sequence; ``next_sequence`` is greater than any that was used."""

    files: list[LogFile]
    records: list[FoundRecord]
    clears: ClearFile
    next_sequence: int


def recover(disk: Disk, directory: Path) -> Recovered:
    """Read all headers. Cuts off torn ends, and removes files that cannot be read: they are only copies.

    Raises:
        DaemonError: there are files that can neither be read nor removed.
    """
    try:
        for leftover in directory.glob("*.tmp"):
            disk.unlink(leftover)
        paths = sorted(directory.glob("*.log"))
        clears = ClearFile(disk, directory)
        try:
            clears.load()
        except (RecordError, OSError) as error:
            if paths:
                logger.warning("dropping all of %s: %s", directory, error)
            for path in paths:
                disk.unlink(path)
            paths = []
            disk.sync_directory(directory)
            clears.add(None, 0, 0)
        files: list[LogFile] = []
        records: list[FoundRecord] = []
        next_sequence = clears.max_sequence + 1
        for path in paths:
            file = _open(disk, path)
            if file is None:
                continue
            found: list[tuple[int, SegmentRecord]] = []
            try:
                found.extend(file.scan())
            except OSError as error:
                logger.warning("dropping %s, which cannot be read: %s", path, error)
                file.close()
                disk.unlink(path)
                continue
            files.append(file)
            for offset, record in found:
                next_sequence = max(next_sequence, record.sequence + 1)
                file.min_sequence = min(record.sequence, file.min_sequence or record.sequence)
                if not clears.is_cleared(record.manifest.model.fingerprint, record.sequence):
                    records.append(FoundRecord(file, offset, record))
        disk.sync_directory(directory)
    except OSError as error:
        raise DaemonError(
            f"the SSD tier's directory {directory} can be neither read nor emptied ({error}): "
            "give another directory, or remove this one"
        ) from error
    files.sort(key=lambda file: file.number)
    records.sort(key=lambda found: found.record.sequence)
    return Recovered(files, records, clears, next_sequence)


def _open(disk: Disk, path: Path) -> LogFile | None:
    try:
        return LogFile.open(disk, path)
    except (RecordError, OSError) as error:
        logger.warning("dropping %s: %s", path, error)
        disk.unlink(path)
        return None
