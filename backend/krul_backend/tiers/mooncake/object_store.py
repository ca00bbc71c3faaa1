"""The interface of a distributed object store, as the Mooncake tier needs it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import Block


class ObjectStoreError(KrulError):
    """The store cannot be reached, or answered with an error."""


class StoreFullError(ObjectStoreError):
    """There is no room for an object now; the store itself works."""


class ObjectStore(Protocol):
    """Keeps objects of bytes by name. Thread-safe. Any object can be evicted at any time.

    Every method may raise ``ObjectStoreError``. A missing object is not an error: each method says what it
    then does.
    """

    def put(self, key: str, value: Block | bytes, *, is_pinned: bool = False) -> None:
        """Store an object of at least one byte unless there is one of that name, which then stays as it is.

        ``is_pinned``: never evict it, and keep copies on several hosts. Raises ``StoreFullError``, too.
        """

    def replace(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        """Store an object in place of any other of that name. Raises ``StoreFullError``, too."""

    def get(self, key: str, max_num_bytes: int) -> bytes | None:
        """A small object's bytes; None if there is none, or a larger one."""

    def get_into(self, key: str, block: Block) -> bool:
        """Fill ``block`` with an object of exactly its size; False if there is no such object.

        Returns when nothing writes to ``block`` any more, also after an error.
        """

    def have_all(self, keys: Sequence[str]) -> bool:
        """Whether all these objects are there. Asking protects them from eviction for some seconds."""

    def remove(self, keys: Sequence[str]) -> None:
        """Remove objects, also while somebody reads them (a reader then finds wrong bytes, or none)."""

    def remove_matching(self, pattern: str) -> None:
        """Remove the objects whose names match a regular expression and that nobody reads."""

    def close(self) -> None:
        """Leave the cluster; what lies in this process's memory goes with it."""
