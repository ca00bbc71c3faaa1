"""Says in a microsecond, in every process that uses a daemon, that a page is stored nowhere."""

from __future__ import annotations

import mmap
import os
import threading
import weakref
from collections.abc import Iterable

import numpy as np
import xxhash

from krul_backend.memory import create_memory_file
from krul_backend.segment import ModelIdentity

NUM_BYTES = 16 << 20
"""With 4 million pages, 3% of those that are not stored pass for stored; with 40 million, a quarter does."""

DIGEST_BYTES = 8


def digest_of(fingerprint: str, page_key: str) -> bytes:
    """Stands for a page of a model. The index of the SSD tier has it in its files."""
    return xxhash.xxh3_64_digest(f"{fingerprint}/{page_key}".encode())


class PageFilter:
    """A bit for each page that could ever be found in a daemon, in a memory file that engines map.

    Whoever makes a page findable adds it before. No bit is cleared: a page whose bit is not set was never
    stored, but another one may have the same bit. The last byte is 0 if it ``is_complete``. Thread-safe.

    Args:
        descriptor: of another process's filter, which is only read here; not owned. Without one the filter
            is new.

    Raises:
        OSError, ValueError: there is nothing to map.
    """

    def __init__(self, descriptor: int | None = None) -> None:
        access = mmap.ACCESS_READ
        if descriptor is None:
            access = mmap.ACCESS_WRITE
            descriptor = self._descriptor = create_memory_file("krul-pages", NUM_BYTES + 1)
            weakref.finalize(self, os.close, descriptor)
        self._file = mmap.mmap(descriptor, 0, access=access)
        self._bytes = np.frombuffer(self._file, dtype=np.uint8)
        self._num_bits = 8 * (len(self._file) - 1)
        self._lock = threading.Lock()

    def fileno(self) -> int:
        """Descriptor of a new filter's memory file, closed when the filter is gone."""
        return self._descriptor

    @property
    def is_complete(self) -> bool:
        """True once all pages that can be found have been added. Before, ``may_have`` is always true."""
        return self._file[-1] == 0

    @is_complete.setter
    def is_complete(self, is_complete: bool) -> None:
        self._file[-1] = not is_complete

    def add(self, digests: Iterable[bytes]) -> None:
        """Add pages by their ``digest_of``, several of which may be joined. Only for who made the filter."""
        assert self._bytes.flags.writeable, "another process made this filter"
        bits = np.frombuffer(b"".join(digests), dtype="<u8") % np.uint64(self._num_bits)
        masks = np.uint8(1) << (bits & np.uint64(7)).astype(np.uint8)
        # Of two threads that change one byte at once, one would lose its bit.
        with self._lock:
            np.bitwise_or.at(self._bytes, bits >> np.uint64(3), masks)

    def may_have(self, model: ModelIdentity, page_key: str) -> bool:
        """False if the page was never added, and the filter is complete."""
        digest = digest_of(model.fingerprint, page_key)
        bit = int.from_bytes(digest, "little") % self._num_bits
        # In this order: when it is complete, all bits are there.
        return not self.is_complete or bool(self._file[bit >> 3] >> (bit & 7) & 1)
