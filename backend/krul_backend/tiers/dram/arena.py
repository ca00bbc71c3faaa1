"""The arena: one memory mapping, cut into blocks of exactly the bytes that are asked for."""

from __future__ import annotations

import os
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from krul_backend.free_extents import FreeExtents, joined
from krul_backend.memory import create_memory_file, map_shared
from krul_backend.tiers.common.interface import Span

ALIGNMENT_BYTES = 64
"""Every block starts at a multiple of this: a cache line, and the widest vector load of a CPU."""


def aligned_num_bytes(num_bytes: int) -> int:
    """Bytes that a block of ``num_bytes`` takes from the arena: rounded up to the alignment."""
    return -(-num_bytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES


# Identity, not equality, says which one is meant: another arena's, or one that was freed before the same
# bytes were handed out again, has equal numbers and must still be refused.
@dataclass(frozen=True, eq=False)
class Allocation:
    """Holds the space of one segment's blocks in an arena, until it is freed.

    ``spans``: the bytes of each block; at offset 0 for a block of none. Its ``ranges`` are all that it takes,
    alignment included, ascending; blocks that touch are one range.
    """

    spans: tuple[Span, ...]

    @cached_property
    def ranges(self) -> tuple[Span, ...]:
        unit = ALIGNMENT_BYTES
        taken = ((at - at % unit, aligned_num_bytes(at % unit + size)) for at, size in self.spans if size)
        return tuple(map(Span._make, joined(taken)))

    @cached_property
    def taken_bytes(self) -> int:
        return sum(num_bytes for _, num_bytes in self.ranges)


class Arena:
    """A best-fit allocator over one memory file, mapped shared. Not thread-safe: its store holds the lock.

    The operating system backs a page of the mapping with memory at the first write to it, so an empty arena
    costs nothing; freed blocks stay backed. The memory is returned when the arena, the last view and the
    last mapping of its file in another process are gone. The file is sealed: if a process could shrink it,
    an access to the missing part would kill every process that maps it.

    ``space``: its free ranges, in aligned sizes, to look at and for trials. Only the arena takes and gives.

    Args:
        capacity_bytes: size in bytes, rounded down to a multiple of ``ALIGNMENT_BYTES``.

    Raises:
        ValueError: if not even one aligned block fits.
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
        self._live: set[Allocation] = set()

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
        """Bytes of all that is taken, alignment included."""
        return self.capacity_bytes - self.space.free_bytes

    def allocate(self, sizes: Sequence[int]) -> Allocation | None:
        """Take a block per size in bytes, with whatever content is there; None if not all of them fit.

        Raises:
            ValueError: if a size is negative.
        """
        if min(sizes, default=0) < 0:
            raise ValueError(f"a block has no fewer than 0 bytes, got sizes {tuple(sizes)}")
        offsets = self.space.take_all([aligned_num_bytes(size) for size in sizes if size])
        if offsets is None:
            return None
        of_blocks = iter(offsets)
        allocation = Allocation(tuple(Span(next(of_blocks) if size else 0, size) for size in sizes))
        self._live.add(allocation)
        return allocation

    def free(self, allocation: Allocation) -> None:
        """Give an allocation back. Views of it must not be used any more.

        Raises:
            ValueError: if it was freed before or belongs to another arena.
        """
        self._check_live(allocation)
        self._live.remove(allocation)
        self.space.give_all(allocation.ranges)

    def keep_ends(self, allocation: Allocation, sizes: Sequence[int]) -> Allocation:
        """Keep of each block its last ``sizes`` bytes, which stay in place; returns what is left.

        What is before them goes back as far as it is aligned. The given allocation counts as freed.

        Raises:
            ValueError: a block does not have so many bytes, or the allocation is not held in this arena.
        """
        self._check_live(allocation)
        kept: list[Span] = []
        given: list[tuple[int, int]] = []
        for (at, num_bytes), size in zip(allocation.spans, sizes, strict=True):
            if not 0 <= size <= num_bytes:
                raise ValueError(f"a block of {num_bytes} bytes has no end of {size}")
            start, end = at - at % ALIGNMENT_BYTES, at + num_bytes
            kept.append(Span(end - size if size else 0, size))
            new_start = aligned_num_bytes(end) if not size else end - size - (end - size) % ALIGNMENT_BYTES
            given.append((start, new_start - start))
        rest = Allocation(tuple(kept))
        self._live.remove(allocation)
        self._live.add(rest)
        self.space.give_all(given)
        return rest

    def views(self, allocation: Allocation) -> tuple[npt.NDArray[np.uint8], ...]:
        """The bytes of each block, uint8 ``[num_bytes]``, writable.

        Raises:
            ValueError: if the allocation was freed before or belongs to another arena.
        """
        self._check_live(allocation)
        return tuple(self._buffer[offset : offset + num_bytes] for offset, num_bytes in allocation.spans)

    def _check_live(self, allocation: Allocation) -> None:
        if allocation not in self._live:
            raise ValueError(f"{allocation} is not held in this arena: freed before, or another arena's")
