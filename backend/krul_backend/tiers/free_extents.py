"""Bookkeeping of free space: which byte ranges of an address space nobody holds."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

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
        offsets = self._take_run(num_bytes, 1)
        return offsets[0] if offsets else None

    def take_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Take one range per size, or nothing at all. Returns the offsets in the order of ``sizes``."""
        offsets = [0] * len(sizes)
        # Largest first: a small block placed early could split the only range that a large one fits into.
        order = sorted(range(len(sizes)), key=lambda i: sizes[i], reverse=True)
        num_taken = 0
        while num_taken < len(order):
            size = sizes[order[num_taken]]
            # Most segments have blocks of one size.
            num_equal = 1
            while num_taken + num_equal < len(order) and sizes[order[num_taken + num_equal]] == size:
                num_equal += 1
            run = self._take_run(size, num_equal)
            if not run:
                self.give_all((offsets[j], sizes[j]) for j in order[:num_taken])
                return None
            for offset in run:
                offsets[order[num_taken]] = offset
                num_taken += 1
        return offsets

    def fits_all(self, sizes: Sequence[int]) -> bool:
        """Would ``take_all`` succeed? Leaves the free ranges as they were."""
        offsets = self.take_all(sizes)
        if offsets is None:
            return False
        self.give_all(zip(offsets, sizes, strict=True))
        return True

    def give_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Give taken ranges ``(offset, num_bytes)`` back; those that touch each other go as one."""
        start = end = -1
        for offset, num_bytes in sorted(ranges):
            if offset != end:
                if end > start:
                    self.give(start, end - start)
                start = offset
            end = offset + num_bytes
        if end > start:
            self.give(start, end - start)

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

    def _take_run(self, num_bytes: int, max_blocks: int) -> list[int]:
        """Take up to ``max_blocks`` blocks of ``num_bytes`` each, from one range; none if no range holds one.

        As if one by one: what is left of the smallest range that holds a block is smaller than all others.
        """
        position = self._by_size.bisect_left((num_bytes, 0))
        if position == len(self._by_size):
            return []
        size, offset = self._by_size[position]
        self._remove(offset, size)
        taken_bytes = min(max_blocks, size // num_bytes) * num_bytes
        if size > taken_bytes:
            self._insert(offset + taken_bytes, size - taken_bytes)
        return list(range(offset, offset + taken_bytes, num_bytes))

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
