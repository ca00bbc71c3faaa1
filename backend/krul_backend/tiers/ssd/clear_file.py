"""What was cleared and must never be found again, in a file of its own."""

from __future__ import annotations

import os
import struct
from pathlib import Path

import orjson
import xxhash

from krul_backend.errors import RecordError
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.log_file import read_up_to, write_all

_MAGIC = b"KRULCLR1"
_PREFIX = struct.Struct("<8sQ")
_MAX_NUM_BYTES = 1 << 24


class ClearFile:
    """``clears``: magic ``KRULCLR1``, XXH3-64 of what follows: ``{"all": n, "models": {fingerprint: n}}``.

    A record is cleared if its sequence is smaller than ``all`` or than its model's number. The file is not a
    part of the logs because a log is only read up to its first damaged header: a clear behind that would be
    forgotten, and what it cleared found again. It is replaced as a whole (written, synced, renamed).
    """

    def __init__(self, disk: Disk, directory: Path) -> None:
        self._disk = disk
        self._directory = directory
        self._path = directory / "clears"
        self._all = 0
        self._models: dict[str, int] = {}

    @property
    def max_sequence(self) -> int:
        return max(self._all, *self._models.values(), 0)

    def is_cleared(self, fingerprint: str, sequence: int) -> bool:
        return sequence < max(self._all, self._models.get(fingerprint, 0))

    def load(self) -> None:
        """Read the file.

        Raises:
            RecordError: it is missing or damaged: nothing in the logs can be trusted.
            OSError: it cannot be read.
        """
        try:
            fd = self._disk.open(self._path, os.O_RDONLY)
        except FileNotFoundError as error:
            raise RecordError("there is no record of what was cleared") from error
        try:
            data = read_up_to(self._disk, fd, min(self._disk.size(fd), _MAX_NUM_BYTES), 0)
        finally:
            self._disk.close(fd)
        json = data[_PREFIX.size :]
        if len(data) < _PREFIX.size or _PREFIX.unpack_from(data) != (_MAGIC, xxhash.xxh3_64_intdigest(json)):
            raise RecordError("the record of what was cleared is damaged")
        cleared = orjson.loads(json)
        self._all, self._models = cleared["all"], cleared["models"]

    def add(self, fingerprint: str | None, sequence: int, oldest_sequence: int) -> None:
        """Clear what has a smaller ``sequence``, of one model or (None) of all; durable on return.

        Nothing in the logs has a smaller sequence than ``oldest_sequence``: clears before it are dropped.

        Raises:
            OSError: it could not be written; the file is as it was, or as it should be.
        """
        cleared_all = sequence if fingerprint is None else self._all
        models = {} if fingerprint is None else {**self._models, fingerprint: sequence}
        models = {key: number for key, number in models.items() if number > oldest_sequence}
        json = orjson.dumps({"all": cleared_all, "models": models})
        temporary = self._path.with_suffix(".tmp")
        fd = self._disk.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            prefix = _PREFIX.pack(_MAGIC, xxhash.xxh3_64_intdigest(json))
            write_all(self._disk, fd, [prefix + json], 0)
            self._disk.fdatasync(fd)
        finally:
            self._disk.close(fd)
        self._disk.rename(temporary, self._path)
        self._disk.sync_directory(self._directory)
        self._all, self._models = cleared_all, models
