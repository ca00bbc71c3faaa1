"""The interface of a store of objects: one client for each kind of store has it."""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from typing import ClassVar, NamedTuple, Protocol

from krul_backend.errors import ConfigError, KrulError
from krul_backend.tiers.common.interface import Block


class ObjectStoreError(KrulError):
    """The store cannot be reached, or answered with an error."""


class StoreFullError(ObjectStoreError):
    """There is no room for an object now; the store itself works."""


class ObjectPart(NamedTuple):
    """A part of an object of ``num_bytes`` that is to be read: ``block`` gets the bytes from ``start`` on."""

    key: str
    block: Block
    num_bytes: int
    start: int = 0


class ObjectStoreOptions(Protocol):
    """Where a store is, and how long to wait for it.

    ``name`` is the tier's, ``place`` what messages call the store. ``given_bytes`` of this host's memory are
    part of it; None: it has no limit. A lookup that takes longer than ``lookup_timeout_s`` is a miss; a late
    answer is remembered for the next. Reading a segment may take ``read_timeout_s``. At most ``queue_bytes``
    wait to be written.
    """

    name: ClassVar[str]
    place: ClassVar[str]

    @property
    def lookup_timeout_s(self) -> float: ...
    @property
    def read_timeout_s(self) -> float: ...
    @property
    def queue_bytes(self) -> int: ...
    @property
    def given_bytes(self) -> int | None: ...

    def connect(self, arena: Block | None) -> ObjectClient:
        """Make a client. Raises what it does."""


def check_limits(options: ObjectStoreOptions) -> None:
    """Raise ConfigError if nothing may wait to be written, or a timeout is not between 0 and 3600 s."""
    if options.queue_bytes < 1:
        raise ConfigError(f"{options.name} queue_bytes must be at least 1, got {options.queue_bytes}")
    for limit in ("lookup_timeout_s", "read_timeout_s"):
        seconds = getattr(options, limit)
        if not 0 < seconds < 3600:
            raise ConfigError(f"{options.name} {limit} must be between 0 and 3600 s, got {seconds}")


class ObjectClient(Protocol):
    """Keeps objects of bytes by name. Thread-safe.

    Any object can be gone at any time. Every method may raise ``ObjectStoreError``. A missing object is no
    error: each method says what it then does.

    ``joins_blocks``: the blocks of a segment are one object, since each costs a request.
    """

    joins_blocks: bool

    def put(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        """Store an object of at least one byte unless there is one of that name, which then stays as it is.

        ``is_pinned``: never evict it, and keep copies on several hosts. Raises ``StoreFullError``, too.
        """

    def put_blocks(self, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        """As ``put``, for many objects. If it raises, any of them may be there.

        Also if it does not, one may be missing that another client is still writing; see ``have_all``.
        """

    def replace(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        """Store an object in place of any other of that name. Raises ``StoreFullError``, too."""

    def get(self, key: str, max_num_bytes: int) -> bytes | None:
        """A small object's bytes; None if there is none, or a larger one."""

    def get_into(self, parts: Sequence[ObjectPart]) -> list[bool]:
        """Fill the blocks of the parts; False for each of which there is no such object.

        Returns when nothing writes to the blocks any more, also after an error.
        """

    def have_all(self, keys: Sequence[str]) -> bool:
        """Whether all these objects are there. Asking protects them from eviction for some seconds."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also while somebody reads them (a reader then finds wrong bytes, or none)."""

    def remove_matching(self, pattern: str) -> None:
        """Remove the objects whose names match a regular expression and that nobody reads."""

    def close(self) -> None:
        """Let go of the store."""


def get_written(store: ObjectClient, key: str, max_num_bytes: int) -> bytes | None:
    """Get an object as ``ObjectClient.get`` does, and wait up to a second if it is still being written."""
    ends_at_s = time.monotonic() + 1.0
    while (value := store.get(key, max_num_bytes)) is None and time.monotonic() < ends_at_s:
        time.sleep(0.002)
    return value


def without_keys(what: str) -> str:
    """A message without the keys of pages, which are long, and of no use in it."""
    return re.sub(r"[0-9a-f]{16,}", "*", what)
