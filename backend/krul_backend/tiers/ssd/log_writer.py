"""The log files of the SSD tier: appending records, removing files, and how much space they take."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.common.record import record_buffers, segment_num_bytes
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.own_files import FILE_HEADER_NUM_BYTES

GROUP_NUM_BYTES = 64 << 20
"""How many bytes are written per sync: the most that waits for a sync, and that the page cache holds."""


class LogWriter:
    """Owns the log files. One thread at a time may call it, except for ``release`` and the sizes.

    Several records are appended, then made durable by one ``commit``, and published only then. With several
    directories each has a file that is written next, and such groups go to them in turn.
    ``used_bytes`` is raised before bytes are written and lowered after they are gone, so that the files never
    take more than that (a file system's own notes of where their blocks lie come on top). A removed file that
    is still being read takes its space until the last ``release``.

    Args:
        directories: where the files are made, each on a disk of its own; the first is named in messages.
        lock: the tier's; guards ``files``, ``used_bytes`` and the counts in the files. Taken by the methods,
            and never held during a system call that may block.
        files: the log files by number; this alone changes it from ``adopt`` on.
        file_bytes: the size of a file. Only a record that is larger itself makes a larger file.
        can_punch: whether the file system may have holes, as far as is known.
        unread: sizes, by number, of the files that are there, whose records are not known before ``adopt``.
        committed: called after each commit with what was punched before it: the files' numbers and offsets.
        next_number: no file has this number or a larger one.
    """

    def __init__(
        self,
        disk: Disk,
        directories: Sequence[Path],
        lock: threading.Lock,
        files: dict[int, LogFile],
        file_bytes: int,
        can_punch: bool,
        unread: Mapping[int, int],
        next_number: int,
        committed: Callable[[Sequence[tuple[int, int]]], None],
    ) -> None:
        self._disk = disk
        self.directory = directories[0]
        self._directories = tuple(directories)
        # Where the records of this group go; the first group goes to the first directory.
        self._turn = directories[-1]
        # The file of each directory that gets its next record.
        self._actives: dict[Path, LogFile] = {}
        self._lock = lock
        self._file_bytes = file_bytes
        # Of records that were written, but not synced: where they are, and what makes them findable.
        self._unsynced: list[tuple[int, Callable[[LogFile, int], None]]] = []
        self._unread = unread
        self._is_removal_in_doubt = False
        self._committed = committed
        # Files and offsets of what was punched, but is not durable yet.
        self._holes: list[tuple[LogFile, int]] = []
        self.can_punch = can_punch
        self.files = files
        self.next_number = next_number
        self.used_bytes = sum(unread.values())

    def adopt(self, files: Sequence[LogFile], unread: Mapping[int, int], first_open_number: int) -> None:
        """Take over the files that were read at the start, ordered by number; ``unread`` could not be.

        Called once, before anything is appended. The last file of each directory gets its next record, unless
        its number is below ``first_open_number``.
        """
        with self._lock:
            self._unread = unread
            self.files.update((file.number, file) for file in files)
            self.used_bytes = sum(file.taken_bytes for file in files) + sum(unread.values())
        self._actives = {file.path.parent: file for file in files if file.number >= first_open_number}

    @property
    def _active(self) -> LogFile | None:
        return self._actives.get(self._turn)

    def take_turn(self, num_bytes: int) -> None:
        """Let the next records, of so many bytes in all, go to the next directory whose disk has room for
        them; to the same as before if none has, or if earlier ones wait for their sync. Raises OSError."""
        if len(self._directories) > 1 and not self._unsynced:
            after = self._directories.index(self._turn) + 1
            following = (*self._directories[after:], *self._directories[:after])
            fitting = (each for each in following if self._disk.free_bytes(each) >= num_bytes)
            self._turn = next(fitting, self._turn)

    @property
    def oldest_number(self) -> int:
        """No file has a smaller number, not even a removed one that a crash might bring back."""
        if self._is_removal_in_doubt:
            return 0
        return min((*self.files, *self._unread), default=self.next_number)

    @property
    def has_unread(self) -> bool:
        """Whether there are files that could not be read, whose records are not known."""
        return bool(self._unread)

    def num_bytes_for(self, record_num_bytes: int) -> int:
        """How many bytes the files will grow by when a record of this size is appended."""
        return record_num_bytes + (FILE_HEADER_NUM_BYTES if self.needs_file(record_num_bytes) else 0)

    def needs_file(self, record_num_bytes: int) -> bool:
        """Whether a record of this size begins another file."""
        file = self._active
        if file is None:
            return True
        return file.num_bytes > FILE_HEADER_NUM_BYTES and file.num_bytes + record_num_bytes > self._file_bytes

    @property
    def has_unsynced_holes(self) -> bool:
        """Whether what was punched is not durable yet."""
        return bool(self._holes)

    def is_active(self, file: LogFile) -> bool:
        """Whether the next record may go into this file."""
        return file in self._actives.values()

    def is_busy(self, file: LogFile) -> bool:
        """Whether a file has records that are not durable yet."""
        return file is self._active and bool(self._unsynced)

    def append(
        self,
        manifest: SegmentManifest,
        metadata: bytes,
        blocks: Sequence[Block],
        publish: Callable[[LogFile, int], None],
    ) -> None:
        """Write a record; ``commit`` calls ``publish(file, offset)``, under the lock, when it is durable.

        Raises:
            OSError: it could not be written. Everything since the last commit is lost, and never published.
        """
        num_bytes = segment_num_bytes(manifest, metadata)
        if self.needs_file(num_bytes):
            try:
                self.commit()
            finally:
                self._actives.pop(self._turn, None)
            self._actives[self._turn] = self._create_file()
        file = self._active
        assert file is not None, "a file was created, or there was one"
        buffers = record_buffers(manifest, metadata, blocks, file.place(file.num_bytes))
        with self._lock:
            self.used_bytes += num_bytes
        try:
            offset = file.append(buffers, num_bytes)
        except OSError:
            self._give_up(file, num_bytes)
            raise
        with self._lock:
            file.taken_bytes += num_bytes
        self._unsynced.append((offset, publish))

    def commit(self) -> None:
        """Make appended records durable, then publish them; make holes durable. Then say so to ``committed``.

        Raises:
            OSError: a sync failed. If it is that of records, everything since the last commit is lost, and
                never published.
        """
        file = self._active
        if file is not None and self._unsynced:
            try:
                file.sync()
            except OSError:
                self._give_up(file)
                raise
            with self._lock:
                for offset, publish in self._unsynced:
                    publish(file, offset)
            self._unsynced.clear()
        for punched in {file for file, _ in self._holes if not file.is_removed}:
            punched.sync()
        self._committed([(file.number, offset) for file, offset in self._holes])
        self._holes.clear()

    def punch(self, file: LogFile, offset: int, num_bytes: int) -> None:
        """Make a hole of a record that is not needed any more; durable after the next ``commit``.

        ``can_punch`` becomes False if the file system has no holes: then only whole files give space back.

        Raises:
            OSError: the medium failed.
        """
        if file.is_removed or not self.can_punch:
            return
        self.can_punch = file.punch(offset, num_bytes)
        if self.can_punch:
            self._holes.append((file, offset))
            with self._lock:
                file.taken_bytes -= num_bytes
                self.used_bytes -= num_bytes

    def seal(self) -> None:
        """Commit, and let the next record begin a new file, in each directory.

        Raises:
            OSError: as ``commit``; the files are sealed all the same.
        """
        try:
            self.commit()
        finally:
            self._actives.clear()

    def remove(self, file: LogFile) -> None:
        """Unlink a file, durably. Its space is free when nobody holds it any more.

        Raises:
            OSError: it could not be unlinked, or not durably.
        """
        assert not self.is_busy(file), f"{file.path.name} has records that wait for their sync"
        self._end_appending(file)
        # Somebody may have removed it by hand.
        with contextlib.suppress(FileNotFoundError):
            self._disk.unlink(file.path)
        self._let_go(file)
        try:
            self._disk.sync_directory(file.path.parent)
        except OSError:
            self._is_removal_in_doubt = True
            raise

    def release(self, file: LogFile) -> None:
        """End a hold of a file (``num_holds``)."""
        with self._lock:
            file.num_holds -= 1
            is_gone = file.is_removed and file.num_holds == 0
        if is_gone:
            file.close()
            with self._lock:
                self.used_bytes -= file.taken_bytes

    def close(self) -> None:
        """Close all files: those that are being read when they are released."""
        self._actives.clear()
        for file in list(self.files.values()):
            self._let_go(file)

    def _end_appending(self, file: LogFile) -> None:
        if self.is_active(file):
            del self._actives[file.path.parent]

    def _let_go(self, file: LogFile) -> None:
        """Forget a file. It is closed, and its space is free, when nobody holds it any more."""
        with self._lock:
            del self.files[file.number]
            file.is_removed = True
            file.num_holds += 1
        self.release(file)

    def _create_file(self) -> LogFile:
        with self._lock:
            self.used_bytes += FILE_HEADER_NUM_BYTES
        try:
            file = LogFile.create(self._disk, self._turn, self.next_number)
        except OSError:
            with self._lock:
                self.used_bytes -= FILE_HEADER_NUM_BYTES
            raise
        finally:
            self.next_number += 1
        with self._lock:
            self.files[file.number] = file
        return file

    def _give_up(self, file: LogFile, reserved_bytes: int = 0) -> None:
        """Drop records that are not synced, and what ``used_bytes`` has for one that could not be written."""
        self._unsynced.clear()
        counted_bytes = file.taken_bytes + reserved_bytes
        if not file.cut_back():
            self._end_appending(file)
        with self._lock:
            self.used_bytes -= counted_bytes - file.taken_bytes
