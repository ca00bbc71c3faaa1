"""Bookkeeping of free space: which byte ranges of an address space nobody holds."""

from __future__ import annotations

from collections.abc import Sequence

from sortedcontainers import SortedList


class FreeExtents:
    """Disjoint, maximal free ranges of ``[0, capacity_bytes)``. No memory, no alignment, not thread-safe.

    Kept apart from the memory itself so that an eviction can be tried on a copy before anything is evicted.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.free_bytes = 0
        # The same ranges three times: by (size, offset) to find the best fit, by both ends to coalesce.
        self._by_size = SortedList()
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._insert(0, capacity_bytes)

    def copy(self) -> FreeExtents:
        """An independent copy; linear in the number of free ranges."""
        twin = FreeExtents.__new__(FreeExtents)
        twin.free_bytes = self.free_bytes
        twin._by_size = self._by_size.copy()
        twin._size_at = self._size_at.copy()
        twin._start_of_end = self._start_of_end.copy()
        return twin

    @property
    def num_ranges(self) -> int:
        return len(self._size_at)

    @property
    def largest(self) -> int:
        """Bytes of the largest free range, 0 when nothing is free."""
        return int(self._by_size[-1][0]) if self._by_size else 0

    def take(self, num_bytes: int) -> int | None:
        """Take ``num_bytes`` from the start of the smallest range that holds them (the lowest among equals).

        Returns the offset, or None when no single range is large enough.
        """
        position = self._by_size.bisect_left((num_bytes, 0))
        if position == len(self._by_size):
            return None
        size, offset = self._by_size[position]
        self._remove(offset, size)
        if size > num_bytes:
            self._insert(offset + num_bytes, size - num_bytes)
        return int(offset)

    def take_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Take one range per size, or nothing at all. Returns the offsets in the order of ``sizes``."""
        offsets = [0] * len(sizes)
        # Largest first: a small block placed early could split the only range that a large one fits into.
        order = sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True)
        for num_taken, i in enumerate(order):
            offset = self.take(sizes[i])
            if offset is None:
                for j in order[:num_taken]:
                    self.give(offsets[j], sizes[j])
                return None
            offsets[i] = offset
        return offsets

    def fits_all(self, sizes: Sequence[int]) -> bool:
        """Would ``take_all`` succeed? Leaves the free ranges as they were."""
        offsets = self.take_all(sizes)
        if offsets is None:
            return False
        for offset, size in zip(offsets, sizes, strict=True):
            self.give(offset, size)
        return True

    def give(self, offset: int, num_bytes: int) -> None:
        """Give a taken range back and join it with the free ranges that touch it."""
        end = offset + num_bytes
        size_after = self._size_at.get(end)
        if size_after is not None:
            self._remove(end, size_after)
            num_bytes += size_after
        start_before = self._start_of_end.get(offset)
        if start_before is not None:
            size_before = offset - start_before
            self._remove(start_before, size_before)
            offset, num_bytes = start_before, num_bytes + size_before
        self._insert(offset, num_bytes)

    def _insert(self, offset: int, size: int) -> None:
        self._by_size.add((size, offset))
        self._size_at[offset] = size
        self._start_of_end[offset + size] = offset
        self.free_bytes += size

    def _remove(self, offset: int, size: int) -> None:
        self._by_size.remove((size, offset))
        del self._size_at[offset]
        del self._start_of_end[offset + size]
        self.free_bytes -= size
