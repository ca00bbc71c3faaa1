"""The arena: one memory mapping, cut into extents of exactly the size that a block needs."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from krul_backend.free_extents import FreeExtents
from krul_backend.memory import create_memory_file, map_shared

ALIGNMENT_BYTES = 64
"""Every extent starts at a multiple of this: a cache line, and the widest vector load of a CPU."""


def aligned_num_bytes(num_bytes: int) -> int:
    """Bytes that an extent of ``num_bytes`` takes from the arena: rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# Identity, not equality, says which extent is meant: another arena's extent, or one that was freed before the
# same range was handed out again, has equal numbers and must still be refused.
@dataclass(frozen=True, eq=False)
class Extent:
    """``[offset, offset + num_bytes)`` of one arena, held until it is freed."""

    offset: int
    num_bytes: int

    @property
    def taken_bytes(self) -> int:
        """Bytes that the arena counts for it, alignment included."""
        return aligned_num_bytes(self.num_bytes)


class Arena:
    """A best-fit allocator over one memory file, mapped shared. Not thread-safe: its store holds the lock.

    The operating system backs a page of the mapping with memory at the first write to it, so an empty arena
    costs nothing; freed extents stay backed. The memory is returned when the arena, the last view and the
    last mapping of its file in another process are gone. The file is sealed: if a process could shrink it,
    an access to the missing part would kill every process that maps it.

    ``space``: its free ranges, in aligned sizes, to look at and for trials. Only the arena takes and gives.

    Args:
        capacity_bytes: size in bytes, rounded down to a multiple of ``ALIGNMENT_BYTES``.

    Raises:
        ValueError: if not even one aligned extent fits.
        OSError: if the mapping is refused.
    """

    def __init__(self, capacity_bytes: int) -> None:
        capacity_bytes -= capacity_bytes % ALIGNMENT_BYTES
        if capacity_bytes <= 0:
            raise ValueError(f"an arena needs at least {ALIGNMENT_BYTES} bytes, got {capacity_bytes}")
        self._descriptor = create_memory_file("krul-arena", capacity_bytes)
        weakref.finalize(self, os.close, self._descriptor)
        self._buffer = np.frombuffer(map_shared(self._descriptor, capacity_bytes), dtype=np.uint8)
        self.space = FreeExtents(capacity_bytes)
        self._live: dict[int, Extent] = {}

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The whole arena, uint8 ``[capacity_bytes]``: its address and size are what CUDA can register."""
        return self._buffer

    def fileno(self) -> int:
        """Descriptor of the memory file, for others to map it. Closed when the arena is gone."""
        return self._descriptor

    @property
    def capacity_bytes(self) -> int:
        return self._buffer.nbytes

    @property
    def free_bytes(self) -> int:
        return self.space.free_bytes

    @property
    def used_bytes(self) -> int:
        """Bytes of all extents, alignment included."""
        return self.capacity_bytes - self.space.free_bytes

    def allocate_all(self, sizes: Sequence[int]) -> tuple[Extent, ...] | None:
        """Take one extent per size in bytes, with whatever content is there; None if not all of them fit.

        Raises:
            ValueError: if a size is not positive.
        """
        if any(num_bytes <= 0 for num_bytes in sizes):
            raise ValueError(f"an extent needs at least one byte, got sizes {tuple(sizes)}")
        offsets = self.space.take_all([aligned_num_bytes(num_bytes) for num_bytes in sizes])
        if offsets is None:
            return None
        extents = tuple(Extent(offset, size) for offset, size in zip(offsets, sizes, strict=True))
        self._live.update((extent.offset, extent) for extent in extents)
        return extents

    def free(self, extent: Extent) -> None:
        """Give an extent back. Views of it must not be used any more.

        Raises:
            ValueError: if the extent was freed before or belongs to another arena.
        """
        self.free_all((extent,))

    def free_all(self, extents: Sequence[Extent]) -> None:
        """Give extents back, each as ``free`` does; extents that touch each other are given as one.

        Raises:
            ValueError: one was freed before, belongs to another arena, or is named twice. None is freed then.
        """
        for extent in extents:
            self._check_live(extent)
        if len({extent.offset for extent in extents}) != len(extents):
            raise ValueError("an extent cannot be freed twice")
        for extent in extents:
            del self._live[extent.offset]
        self.space.give_all((extent.offset, extent.taken_bytes) for extent in extents)

    def free_front(self, extent: Extent, num_bytes: int) -> Extent:
        """Give back as much of the first ``num_bytes`` of an extent as is aligned; returns what is left.

        Up to ``ALIGNMENT_BYTES - 1`` of these bytes stay at the front of the extent that is left. The given
        extent counts as freed, even if it was left whole. Its end, and so its views' bytes, stay in place.

        Raises:
            ValueError: if not even one byte would be left, or the extent is not held in this arena.
        """
        self._check_live(extent)
        if not 0 <= num_bytes < extent.num_bytes:
            raise ValueError(f"{num_bytes} bytes at the front of {extent} leave no extent")
        num_freed = num_bytes - num_bytes % ALIGNMENT_BYTES
        rest = Extent(extent.offset + num_freed, extent.num_bytes - num_freed)
        del self._live[extent.offset]
        self._live[rest.offset] = rest
        if num_freed:
            self.space.give(extent.offset, num_freed)
        return rest

    def view(self, extent: Extent) -> npt.NDArray[np.uint8]:
        """The extent's bytes, uint8 ``[num_bytes]``, writable.

        Raises:
            ValueError: if the extent was freed before or belongs to another arena.
        """
        self._check_live(extent)
        return self._buffer[extent.offset : extent.offset + extent.num_bytes]

    def _check_live(self, extent: Extent) -> None:
        if self._live.get(extent.offset) is not extent:
            raise ValueError(f"{extent} is not held in this arena: freed before, or another arena's")
