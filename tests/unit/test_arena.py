from __future__ import annotations

import gc
import mmap
import os
import re
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.free_extents import FreeExtents
from krul_backend.tiers.dram.arena import ALIGNMENT_BYTES, Arena, Extent, aligned_num_bytes


def allocate(arena: Arena, num_bytes: int) -> Extent | None:
    extents = arena.allocate_all((num_bytes,))
    return extents[0] if extents is not None else None


def test_a_fresh_arena_is_one_free_extent() -> None:
    arena = Arena(10 * ALIGNMENT_BYTES + 7)
    assert arena.capacity_bytes == 10 * ALIGNMENT_BYTES
    assert (arena.free_bytes, arena.used_bytes, arena.space.largest) == (640, 0, 640)
    assert arena.buffer.nbytes == 640
    assert arena.buffer.ctypes.data % ALIGNMENT_BYTES == 0


def test_alignment_is_accounted_and_the_view_is_exact() -> None:
    arena = Arena(1024)
    extent = allocate(arena, 65)
    assert extent is not None
    assert arena.used_bytes == 128
    view = arena.view(extent)
    assert view.shape == (65,)
    view[:] = 7
    assert int(arena.buffer.sum()) == 65 * 7


def test_best_fit_leaves_the_large_range_whole() -> None:
    arena = Arena(64 * 10)
    extents = [allocate(arena, size) for size in (128, 64, 192, 64)]
    assert all(extents)
    arena.free(extents[0])  # [0, 128)
    arena.free(extents[2])  # [192, 384), and [448, 640) is free as well
    best = allocate(arena, 100)
    assert best is not None
    assert best.offset == 0
    assert arena.space.largest == 192


def test_what_does_not_fit_is_none_and_takes_nothing() -> None:
    arena = Arena(256)
    held = allocate(arena, 64)
    assert held is not None
    assert allocate(arena, 193) is None
    assert arena.allocate_all((128, 128)) is None
    assert arena.free_bytes == 192
    assert allocate(arena, 192) is not None
    assert arena.space.largest == 0


def test_all_or_nothing_places_the_largest_first() -> None:
    arena = Arena(64 * 6)
    extents = arena.allocate_all((64, 64, 64, 64, 64, 64))
    assert extents is not None
    for i in (0, 1, 3):
        arena.free(extents[i])  # free: [0, 128) and [192, 256)
    placed = arena.allocate_all((64, 128))
    assert placed is not None
    assert [extent.offset for extent in placed] == [192, 0]


@pytest.mark.parametrize("num_bytes", [0, -1])
def test_empty_extents_are_refused(num_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least one byte"):
        allocate(Arena(256), num_bytes)


@pytest.mark.parametrize("capacity_bytes", [-64, 0, 63])
def test_an_arena_too_small_for_one_extent_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 64 bytes"):
        Arena(capacity_bytes)


def test_double_free_foreign_and_stale_extents_raise() -> None:
    arena, other = Arena(256), Arena(256)
    extent, foreign = allocate(arena, 64), allocate(other, 64)
    assert extent is not None
    assert foreign is not None
    with pytest.raises(ValueError, match="not held"):
        arena.free(foreign)
    arena.free(extent)
    with pytest.raises(ValueError, match="not held"):
        arena.free(extent)
    with pytest.raises(ValueError, match="not held"):
        arena.view(extent)
    again = allocate(arena, 64)
    assert again is not None
    assert again.offset == extent.offset
    with pytest.raises(ValueError, match="not held"):
        arena.free(extent)
    assert arena.used_bytes == 64


def test_the_front_of_an_extent_goes_back_in_aligned_steps() -> None:
    arena = Arena(512)
    extent, behind = allocate(arena, 250), allocate(arena, 256)
    assert extent is not None
    assert behind is not None
    arena.view(extent)[:] = np.arange(250)
    left = extent
    for num_bytes, num_left, offset in ((63, 250, 0), (64, 186, 64), (130, 58, 192)):
        left = arena.free_front(left, num_bytes)
        assert (left.num_bytes, left.offset) == (num_left, offset)
        assert arena.used_bytes == 256 + left.taken_bytes
        assert arena.view(left).tolist() == list(range(250 - num_left, 250))
    assert arena.space.largest == 192
    with pytest.raises(ValueError, match="not held"):
        arena.free(extent)
    arena.free(left)
    arena.free(behind)
    assert (arena.space.num_ranges, arena.space.largest) == (1, 512)


@pytest.mark.parametrize("num_bytes", [-1, 100, 164])
def test_an_extent_of_nothing_but_its_front_is_refused(num_bytes: int) -> None:
    arena = Arena(256)
    extent = allocate(arena, 100)
    assert extent is not None
    with pytest.raises(ValueError, match="leave no extent"):
        arena.free_front(extent, num_bytes)
    assert arena.used_bytes == 128


def test_a_view_outlives_its_arena() -> None:
    arena = Arena(4096)
    extent = allocate(arena, 4096)
    assert extent is not None
    view = arena.view(extent)
    view[:] = 9
    del arena, extent
    assert int(view.sum()) == 9 * 4096


@settings(max_examples=60)
@given(steps=st.lists(st.tuples(st.booleans(), st.integers(1, 400), st.integers(0, 10**6)), max_size=80))
def test_any_history_keeps_the_extents_apart_and_the_totals_right(steps: list[tuple[bool, int, int]]) -> None:
    arena = Arena(4096)
    held: dict[int, tuple[object, int]] = {}
    for step, (is_free, num_bytes, choice) in enumerate(steps):
        if is_free and held:
            tag = sorted(held)[choice % len(held)]
            extent, value = held.pop(tag)
            assert (arena.view(extent) == value).all()  # type: ignore[arg-type]
            arena.free(extent)  # type: ignore[arg-type]
        else:
            largest = arena.space.largest
            extent = allocate(arena, num_bytes)
            assert (extent is None) == (aligned_num_bytes(num_bytes) > largest)
            if extent is not None:
                assert extent.offset % ALIGNMENT_BYTES == 0
                # Each extent gets its own value: a later write that overlaps it would be seen above.
                arena.view(extent)[:] = step % 256
                held[step] = (extent, step % 256)
        taken = sum(aligned_num_bytes(extent.num_bytes) for extent, _ in held.values())  # type: ignore[attr-defined]
        assert arena.used_bytes == taken
        assert arena.used_bytes + arena.free_bytes == arena.capacity_bytes
    for extent, value in held.values():
        assert (arena.view(extent) == value).all()  # type: ignore[arg-type]
        arena.free(extent)  # type: ignore[arg-type]
    assert arena.space.num_ranges == 1
    assert arena.space.largest == arena.free_bytes == arena.capacity_bytes


@settings(max_examples=60)
@given(
    sizes=st.lists(st.integers(1, 50), min_size=1, max_size=12),
    freed=st.sets(st.integers(0, 11)),
    wanted=st.lists(st.integers(1, 80), min_size=1, max_size=6),
)
def test_trying_on_free_extents_changes_nothing_and_tells_the_truth(
    sizes: list[int], freed: set[int], wanted: list[int]
) -> None:
    free_extents = FreeExtents(200)
    offsets = [free_extents.take(size) for size in sizes]
    for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
        if i in freed and offset is not None:
            free_extents.give(offset, size)
    before = (dict(free_extents._size_at), list(free_extents._by_size), free_extents.free_bytes)
    found = free_extents.find_all(wanted)
    assert (dict(free_extents._size_at), list(free_extents._by_size), free_extents.free_bytes) == before
    with free_extents.trial() as give:
        given_bytes = 0
        for i, (offset, size) in enumerate(zip(offsets, sizes, strict=True)):
            if i not in freed and offset is not None:
                give(offset, size)
                given_bytes += size
        assert free_extents.free_bytes == before[2] + given_bytes
        assert free_extents.num_ranges == 1
        assert free_extents.find_all(wanted) is not None or sum(wanted) > 200
    assert (dict(free_extents._size_at), list(free_extents._by_size), free_extents.free_bytes) == before
    assert free_extents._start_of_end == {offset + size: offset for offset, size in before[0].items()}
    placed = free_extents.take_all(wanted)
    assert placed == found
    if placed is None:
        assert (dict(free_extents._size_at), list(free_extents._by_size), free_extents.free_bytes) == before
    if placed is not None:
        taken = np.zeros(200, dtype=int)
        for offset, size in zip(placed, wanted, strict=True):
            taken[offset : offset + size] += 1
        for offset, size in free_extents._size_at.items():
            taken[offset : offset + size] += 1
        assert taken.max() == 1


@settings(max_examples=100)
@given(sizes=st.lists(st.integers(1, 30), min_size=1, max_size=12), freed=st.sets(st.integers(0, 11)))
def test_blocks_freed_together_leave_what_they_leave_one_by_one(sizes: list[int], freed: set[int]) -> None:
    single, together = FreeExtents(400), FreeExtents(400)
    ranges = [(single.take(size), size) for size in sizes]
    assert [(together.take(size), size) for size in sizes] == ranges
    gaps = [(offset, size) for i, (offset, size) in enumerate(ranges) if i in freed and offset is not None]
    for offset, size in gaps:
        single.give(offset, size)
    together.give_all(gaps)
    assert dict(together._size_at) == dict(single._size_at)
    assert together.free_bytes == single.free_bytes


def test_freeing_many_extents_frees_all_or_none() -> None:
    arena = Arena(1024)
    extents = arena.allocate_all((64, 64, 64))
    assert extents is not None
    arena.free(extents[1])
    for wrong in (extents, (extents[0], extents[0])):
        with pytest.raises(ValueError, match="freed"):
            arena.free_all(wrong)
        assert arena.used_bytes == 128
    arena.free_all((extents[2], extents[0]))
    assert (arena.used_bytes, arena.space.num_ranges) == (0, 1)


def test_the_descriptor_maps_the_same_bytes_and_cannot_change_their_number() -> None:
    arena = Arena(1 << 16)
    other = mmap.mmap(arena.fileno(), arena.capacity_bytes)
    arena.buffer[12_345] = 7
    assert other[12_345] == 7
    for num_bytes in (0, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(arena.fileno(), num_bytes)


def test_the_descriptor_is_closed_with_the_arena() -> None:
    arena = Arena(1 << 16)
    descriptor, view = arena.fileno(), arena.buffer
    os.fstat(descriptor)
    del arena
    gc.collect()
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(descriptor)
    view[:] = 1


def test_its_pages_are_huge_where_the_system_allows_them() -> None:
    """The kernel notes for the mapping that it was asked to."""
    arena = Arena(4 << 20)
    first = f"{arena.buffer.ctypes.data:x}-"
    of_mapping = Path("/proc/self/smaps").read_text().split("\n" + first)[1]
    (flags,) = re.findall(r"^VmFlags: (.*)$", of_mapping, re.MULTILINE)[:1]
    assert "hg" in flags.split()
