"""Page-locks a mapping for a device chunk by chunk, while others use it already."""

from __future__ import annotations

import ctypes
import mmap
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import numpy.typing as npt

CHUNK_BYTES = 128 << 20
"""Chunks begin at addresses that are multiples of this. While one is locked, other calls of the device wait:
on an H200 up to 64 ms for 1 GiB. And drivers refuse to lock very much at once, some of them 512 GiB."""

_TOUCH_THREADS = max(1, min(8, (os.cpu_count() or 1) // 4))
_TOUCHED_BYTES = 16 << 20
"""Of a thread at a time: whole pages."""


def _in_chunks(addresses: range) -> Iterator[range]:
    """Cut a range of addresses where one chunk ends and the next one begins."""
    first = addresses.start
    while first < addresses.stop:
        end = min(addresses.stop, (first // CHUNK_BYTES + 1) * CHUNK_BYTES)
        yield range(first, end)
        first = end


def cuts_of(first: int, num_bytes: int) -> list[int]:
    """Return the offsets, in bytes from the address ``first``, at which chunks cut the memory there."""
    # Almost always nowhere, and each copy asks.
    if first // CHUNK_BYTES == (first + max(num_bytes, 1) - 1) // CHUNK_BYTES:
        return []
    return [chunk.start - first for chunk in _in_chunks(range(first, first + num_bytes))][1:]


class PageLock:
    """Locks the pages of one mapping, chunk by chunk from its beginning, in a thread of its own.

    The pages stay locked, and mapped, until the last array over the mapping is gone, or until ``end``. So
    whoever queues a copy keeps the array until the copy has ended. ``error`` is the device's code of a
    refusal, which leaves the rest unlocked, and ``seconds`` how long all of it took; both are set at the end.

    Args:
        buffer: over a mapping, which is its ``base``.
        call: calls a function of the device's runtime by name, and returns its error code.
        on_done: called in the thread when all is locked or a chunk was refused, unless it is over before.
    """

    def __init__(
        self,
        buffer: npt.NDArray[np.uint8],
        call: Callable[..., int],
        on_done: Callable[[PageLock], None] = lambda lock: None,
    ) -> None:
        assert buffer.base is not None, "memory that ends with its array cannot be unlocked before"
        self.num_bytes = buffer.nbytes
        self.error = 0
        self.seconds = 0.0
        self._addresses = range(buffer.ctypes.data, buffer.ctypes.data + buffer.nbytes)
        self._mapping: object | None = buffer.base
        self._call = call
        self._on_done = on_done
        self._changing = threading.Lock()
        self._locked: list[range] = []
        self._last_array = weakref.finalize(buffer, self._end_aside)
        self._last_array.atexit = False
        # Of its own, and it ends: a refusal stays the last error of the thread that asked, and torch would
        # raise it at that thread's next kernel.
        self._thread = threading.Thread(target=self._run, name="krul-lock", daemon=True)
        self._thread.start()

    @property
    def locked_bytes(self) -> int:
        """How many bytes from the beginning of the mapping are locked."""
        return sum(map(len, self._locked))

    @property
    def is_over(self) -> bool:
        """Whether ``end`` was called, or the last array is gone."""
        return self._mapping is None

    def wait(self) -> int:
        """Wait until all is locked or a chunk was refused; returns ``error``."""
        self._thread.join()
        return self.error

    def end(self) -> None:
        """Unlock what is locked, and lock no more. No copy of it may be under way. May be called again."""
        self._last_array.detach()
        with self._changing:
            for chunk in self._locked:
                self._call("cudaHostUnregister", chunk.start)
            self._locked.clear()
            self._mapping = None

    def _end_aside(self) -> None:
        """``end`` in a thread of its own: it may take seconds."""
        threading.Thread(target=self.end, name="krul-unlock", daemon=True).start()

    def _run(self) -> None:
        began_s = time.perf_counter()
        # Keeps the memory mapped while its pages are touched, although the lock may be over meanwhile.
        mapping = self._mapping
        for chunk in _in_chunks(self._addresses):
            if mapping is None or self.is_over:
                return
            _touch_pages(chunk)
            with self._changing:
                if self.is_over:
                    return
                self.error = self._call("cudaHostRegister", chunk.start, len(chunk), 0)
                if self.error != 0:
                    break
                self._locked.append(chunk)
        self.seconds = time.perf_counter() - began_s
        self._on_done(self)


def _touch_pages(addresses: range) -> None:
    """Have the system give memory for all pages of a mapping, side by side: locking takes them one by one,
    which took 18 s for 14 GiB in a virtual machine."""
    pages = np.ctypeslib.as_array((ctypes.c_uint8 * len(addresses)).from_address(addresses.start))
    parts = [pages[first : first + _TOUCHED_BYTES] for first in range(0, len(addresses), _TOUCHED_BYTES)]
    with ThreadPoolExecutor(_TOUCH_THREADS, thread_name_prefix="krul-touch") as threads:
        # numpy reads without the GIL; a page that was never written is made by reading, too.
        list(threads.map(lambda part: part[:: mmap.PAGESIZE].max(), parts))
