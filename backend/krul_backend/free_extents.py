"""Bookkeeping of free space: which byte ranges of an address space are free."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

from sortedcontainers import SortedList


class FreeExtents:
    """Keeps the disjoint, maximal free ranges of ``[0, capacity_bytes)``. Not thread-safe.

    It has no memory of its own and knows no alignment, so that an eviction can be tried on it, or on a copy,
    before anything is evicted.
    """

    def __init__(self, capacity_bytes: int) -> None:
        self.capacity_bytes = capacity_bytes
        self.free_bytes = 0
        # The same ranges three times: by (size, offset) to find the best fit, by both ends to coalesce.
        self._by_size = SortedList()
        self._size_at: dict[int, int] = {}
        self._start_of_end: dict[int, int] = {}
        self._insert(0, capacity_bytes)

    def copy(self) -> FreeExtents:
        """A copy, for trials without the lock of the original."""
        other = FreeExtents.__new__(FreeExtents)
        other.capacity_bytes, other.free_bytes = self.capacity_bytes, self.free_bytes
        other._by_size = self._by_size.copy()
        other._size_at, other._start_of_end = self._size_at.copy(), self._start_of_end.copy()
        return other

    @contextmanager
    def trial(self) -> Iterator[Callable[[int, int], None]]:
        """Free ranges on trial, to see what would fit: call what this yields with offset and size of each.

        The end of the block undoes it, error or not; nothing else may be given or taken meanwhile. Its cost
        grows with the number of these ranges, not with that of all free ranges.
        """
        given: list[tuple[int, int, int, int]] = []

        def give(offset: int, num_bytes: int) -> None:
            given.append((offset, num_bytes, *self.give(offset, num_bytes)))

        try:
            yield give
        finally:
            # The last one first: then each is still in the range that it was joined to.
            for offset, num_bytes, start, joined_bytes in reversed(given):
                end, joined_end = offset + num_bytes, start + joined_bytes
                self._remove(start, joined_bytes)
                if start < offset:
                    self._insert(start, offset - start)
                if end < joined_end:
                    self._insert(end, joined_end - end)

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
        """Take one range per size, or nothing at all. Returns the offsets in the order of ``sizes``.

        Ranges are placed side by side where possible: what is taken together is often given back together,
        and then leaves one large free range instead of many small ones.
        """
        offsets = [0] * len(sizes)
        # Largest first: a small block placed early could split the only range that a large one fits into.
        order = sorted(range(len(sizes)), key=sizes.__getitem__, reverse=True)
        left_bytes = sum(sizes)
        num_taken = 0
        while num_taken < len(order):
            # The smallest range that holds all that is left, or else as many as the largest range holds.
            room = left_bytes if left_bytes <= self.largest else self.largest
            num_fitting = num_bytes = 0
            for i in order[num_taken:]:
                if num_bytes + sizes[i] > room:
                    break
                num_fitting += 1
                num_bytes += sizes[i]
            offset = self.take(num_bytes) if num_fitting else None
            if offset is None:
                self.give_all((offsets[i], sizes[i]) for i in order[:num_taken])
                return None
            for i in order[num_taken : num_taken + num_fitting]:
                offsets[i] = offset
                offset += sizes[i]
            num_taken += num_fitting
            left_bytes -= num_bytes
        return offsets

    def find_all(self, sizes: Sequence[int]) -> list[int] | None:
        """Return what ``take_all`` would return, without taking anything."""
        offsets = self.take_all(sizes)
        if offsets is not None:
            self.give_all(zip(offsets, sizes, strict=True))
        return offsets

    def give_all(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Give taken ranges ``(offset, num_bytes)`` back; those that touch each other are given as one."""
        for offset, num_bytes in joined(ranges):
            self.give(offset, num_bytes)

    def give(self, offset: int, num_bytes: int) -> tuple[int, int]:
        """Give a taken range back and join it with the free ranges that touch it.

        Returns offset and size of the free range that it is in now.
        """
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
        return offset, num_bytes

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


def joined(ranges: Iterable[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Disjoint ranges ``(offset, num_bytes)`` in ascending order, those that touch each other as one."""
    start = end = -1
    for offset, num_bytes in sorted(ranges):
        if offset != end:
            if end > start:
                yield start, end - start
            start = offset
        end = offset + num_bytes
    if end > start:
        yield start, end - start
