"""A bucket of an object storage (S3 and what speaks like it), or a directory, as the tier uses it."""

from __future__ import annotations

import importlib
import re
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, ClassVar

import numpy as np

from krul_backend.errors import ConfigError, DaemonError
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.objects.object_client import (
    ObjectClient,
    ObjectPart,
    ObjectStoreError,
    check_limits,
    without_keys,
)
from krul_backend.tiers.objects.stored_object import ROOT

_NUM_THREADS = 8
_MAX_RETRIES = 2
_CONNECT_TIMEOUT = timedelta(seconds=2)


@dataclass(frozen=True)
class BucketOptions:
    """Says where the bucket is, and how long to wait for it.

    ``url`` is ``s3://bucket/prefix``, ``gs://``, ``az://``, or ``file:///directory`` that hosts share. Access
    keys, region and endpoint come from the environment (``AWS_ACCESS_KEY_ID``, ``AWS_REGION``,
    ``AWS_ENDPOINT`` and the like), as the storage's own tools take them.

    The others: see ``ObjectStoreOptions``.

    Raises:
        ConfigError: a value that cannot be used.
    """

    name: ClassVar[str] = "bucket"
    place: ClassVar[str] = "bucket"
    given_bytes: ClassVar[None] = None

    url: str
    lookup_timeout_s: float = 0.2
    read_timeout_s: float = 30.0
    queue_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        if "://" not in self.url:
            raise ConfigError(f"bucket url must be like s3://bucket/prefix, got {self.url!r}")
        check_limits(self)

    def connect(self, arena: Block | None) -> BucketClient:
        return BucketClient(self)


class BucketClient(ObjectClient):
    """Keeps objects in a bucket, with ``obstore``: nothing is registered, pinned, evicted or full.

    Raises:
        ConfigError: no such storage, or a setting that it does not take.
        DaemonError: ``obstore`` is not installed.
        ObjectStoreError: the storage does not answer, or does not let us in.
    """

    joins_blocks = True

    def __init__(self, options: BucketOptions) -> None:
        self._obstore = require_obstore()
        limit = timedelta(seconds=options.read_timeout_s)
        settings: dict[str, Any] = {
            # An address that begins with http:// is what the operator has chosen.
            "client_options": {"timeout": limit, "connect_timeout": _CONNECT_TIMEOUT, "allow_http": True},
            "retry_config": {"max_retries": _MAX_RETRIES, "retry_timeout": limit},
        }
        if options.url.startswith("file:"):
            settings["mkdir"] = True
        try:
            self._bucket = self._obstore.store.from_url(options.url, **settings)
        except (self._obstore.exceptions.BaseError, ValueError, OSError) as error:
            raise ConfigError(f"bucket url={options.url}: {_first_line(error)}") from error
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="krul-bucket")

    def put(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        self._put(key, value)

    def put_blocks(self, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        list(self._threads.map(self._put, keys, blocks))

    def replace(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        with self._asking(f"replace {key}"):
            self._obstore.put(self._bucket, key, value)

    def get(self, key: str, max_num_bytes: int) -> bytes | None:
        with self._asking(f"get {key}"), suppress(FileNotFoundError):
            found = self._obstore.get(self._bucket, key)
            if found.meta["size"] <= max_num_bytes:
                return bytes(found.bytes())
        return None

    def get_into(self, parts: Sequence[ObjectPart]) -> list[bool]:
        # Parts of one object are asked for together, objects side by side.
        of_keys: dict[str, list[ObjectPart]] = {}
        for part in parts:
            of_keys.setdefault(part.key, []).append(part)
        reads = {key: self._threads.submit(self._get_ranges, of_key) for key, of_key in of_keys.items()}
        # All of them, also if one fails: the blocks are given to others then.
        wait(reads.values())
        are_read = {key: iter(read.result()) for key, read in reads.items()}
        return [next(are_read[part.key]) for part in parts]

    def have_all(self, keys: Sequence[str]) -> bool:
        return all(self._threads.map(self._has, keys))

    def remove(self, keys: Sequence[str]) -> None:
        list(self._threads.map(self._remove, keys))

    def remove_matching(self, pattern: str) -> None:
        matches = re.compile(pattern).match
        with self._asking(f"remove {pattern}"):
            for some in self._obstore.list(self._bucket, ROOT):
                self.remove([each["path"] for each in some if matches(each["path"])])

    def close(self) -> None:
        self._threads.shutdown(wait=False)

    def _put(self, key: str, value: bytes | Block) -> None:
        with self._asking(f"put {key}"), suppress(self._obstore.exceptions.AlreadyExistsError):
            self._obstore.put(self._bucket, key, value, mode="create")

    def _get_ranges(self, parts: Sequence[ObjectPart]) -> list[bool]:
        """Parts of one object."""
        key = parts[0].key
        starts = [part.start for part in parts]
        ends = [part.start + part.block.nbytes for part in parts]
        with self._asking(f"get {key}"):
            try:
                found = self._obstore.get_ranges(self._bucket, key, starts=starts, ends=ends)
            except FileNotFoundError:
                return [False] * len(parts)
        for part, value in zip(parts, found, strict=True):
            if len(value) == part.block.nbytes:
                part.block[:] = np.frombuffer(value, np.uint8)
        return [len(value) == part.block.nbytes for part, value in zip(parts, found, strict=True)]

    def _has(self, key: str) -> bool:
        with self._asking(f"existence of {key}"), suppress(FileNotFoundError):
            self._obstore.head(self._bucket, key)
            return True
        return False

    def _remove(self, key: str) -> None:
        with self._asking(f"removal of {key}"), suppress(FileNotFoundError):
            self._obstore.delete(self._bucket, key)

    @contextmanager
    def _asking(self, what: str) -> Iterator[None]:
        """Within this context errors of the storage are ``ObjectStoreError``."""
        try:
            yield
        except (self._obstore.exceptions.BaseError, OSError) as error:
            raise ObjectStoreError(f"{without_keys(what)}: {_first_line(error)}") from error


def require_obstore() -> Any:
    """Import the module ``obstore``.

    Raises:
        DaemonError: it is not installed.
    """
    try:
        importlib.import_module("obstore.store")
        return importlib.import_module("obstore")
    except ImportError as error:
        raise DaemonError(
            f"the bucket tier cannot load its client ({error}): pip install 'krul-sglang[bucket]'"
        ) from error


def _first_line(error: Exception) -> str:
    """The first line of a message: the library quotes its own source in those behind it."""
    return str(error).partition("\n")[0]
