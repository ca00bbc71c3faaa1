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
from krul_backend.tiers.dram.arena import ALIGNMENT_BYTES, Allocation, Arena, aligned_num_bytes


def allocate(arena: Arena, *sizes: int) -> Allocation:
    allocation = arena.allocate(sizes)
    assert allocation is not None
    return allocation


def test_a_fresh_arena_is_one_free_range() -> None:
    arena = Arena(10 * ALIGNMENT_BYTES + 7)
    assert arena.capacity_bytes == 10 * ALIGNMENT_BYTES
    assert (arena.free_bytes, arena.used_bytes, arena.space.largest) == (640, 0, 640)
    assert arena.buffer.nbytes == 640
    assert arena.buffer.ctypes.data % ALIGNMENT_BYTES == 0


def test_alignment_is_accounted_and_the_view_is_exact() -> None:
    arena = Arena(1024)
    allocation = allocate(arena, 65)
    assert arena.used_bytes == allocation.taken_bytes == 128
    (view,) = arena.views(allocation)
    assert view.shape == (65,)
    view[:] = 7
    assert int(arena.buffer.sum()) == 65 * 7


def test_best_fit_leaves_the_large_range_whole() -> None:
    arena = Arena(64 * 10)
    held = [allocate(arena, size) for size in (128, 64, 192, 64)]
    arena.free(held[0])  # [0, 128)
    arena.free(held[2])  # [192, 384), and [448, 640) is free as well
    assert allocate(arena, 100).spans[0].offset == 0
    assert arena.space.largest == 192


def test_what_does_not_fit_is_none_and_takes_nothing() -> None:
    arena = Arena(256)
    allocate(arena, 64)
    assert arena.allocate((193,)) is None
    assert arena.allocate((128, 128)) is None
    assert arena.free_bytes == 192
    allocate(arena, 192)
    assert arena.space.largest == 0


def test_all_or_nothing_places_the_largest_first() -> None:
    arena = Arena(64 * 6)
    held = [allocate(arena, 64) for _ in range(6)]
    for i in (0, 1, 3):
        arena.free(held[i])  # free: [0, 128) and [192, 256)
    assert [span.offset for span in allocate(arena, 64, 128).spans] == [192, 0]


def test_blocks_that_touch_are_one_range_of_what_is_taken() -> None:
    arena = Arena(64 * 8)
    held = [allocate(arena, size) for size in (64, 64, 64, 320)]
    arena.free(held[1])
    arena.free(held[3])
    allocation = allocate(arena, 64, 0, 130, 60)
    assert [span.num_bytes for span in allocation.spans] == [64, 0, 130, 60]
    assert allocation.ranges == ((192, 320),)
    arena.free(allocation)
    filled = allocate(arena, 320, 64)
    assert filled.ranges == ((64, 64), (192, 320))
    assert arena.used_bytes == filled.taken_bytes + 128 == 512


def test_a_block_of_no_bytes_takes_nothing_and_one_of_fewer_is_refused() -> None:
    arena = Arena(64)
    allocate(arena, 64)
    allocation = allocate(arena, 0, 0)
    assert (allocation.ranges, allocation.taken_bytes) == ((), 0)
    assert [view.nbytes for view in arena.views(allocation)] == [0, 0]
    arena.free(allocation)
    with pytest.raises(ValueError, match="no fewer than 0 bytes"):
        arena.allocate((64, -1))


@pytest.mark.parametrize("capacity_bytes", [-64, 0, 63])
def test_an_arena_too_small_for_one_block_is_refused(capacity_bytes: int) -> None:
    with pytest.raises(ValueError, match="at least 64 bytes"):
        Arena(capacity_bytes)


def test_double_free_foreign_and_stale_allocations_raise() -> None:
    arena, other = Arena(256), Arena(256)
    allocation, foreign = allocate(arena, 64), allocate(other, 64)
    with pytest.raises(ValueError, match="not held"):
        arena.free(foreign)
    arena.free(allocation)
    with pytest.raises(ValueError, match="not held"):
        arena.free(allocation)
    with pytest.raises(ValueError, match="not held"):
        arena.views(allocation)
    with pytest.raises(ValueError, match="not held"):
        arena.keep_ends(allocation, (64,))
    again = allocate(arena, 64)
    assert again.spans == allocation.spans
    with pytest.raises(ValueError, match="not held"):
        arena.free(allocation)
    assert arena.used_bytes == 64


def test_the_front_of_a_block_goes_back_in_aligned_steps() -> None:
    arena = Arena(512)
    allocation, behind = allocate(arena, 250), allocate(arena, 256)
    arena.views(allocation)[0][:] = np.arange(250)
    left = allocation
    for size, offset, taken_bytes in ((250, 0, 256), (187, 63, 256), (186, 64, 192), (58, 192, 64)):
        left = arena.keep_ends(left, (size,))
        assert left.spans == ((offset, size),)
        assert (left.taken_bytes, arena.used_bytes) == (taken_bytes, 256 + taken_bytes)
        assert arena.views(left)[0].tolist() == list(range(250 - size, 250))
    assert arena.space.largest == 192
    with pytest.raises(ValueError, match="not held"):
        arena.free(allocation)
    nothing = arena.keep_ends(left, (0,))
    assert (nothing.spans, arena.used_bytes) == (((0, 0),), 256)
    arena.free(nothing)
    arena.free(behind)
    assert (arena.space.num_ranges, arena.space.largest) == (1, 512)


@pytest.mark.parametrize("size", [-1, 101, 164])
def test_an_end_that_a_block_does_not_have_is_refused(size: int) -> None:
    arena = Arena(256)
    allocation = allocate(arena, 100)
    with pytest.raises(ValueError, match="has no end"):
        arena.keep_ends(allocation, (size,))
    assert arena.used_bytes == 128
    arena.free(allocation)


def test_a_view_outlives_its_arena() -> None:
    arena = Arena(4096)
    (view,) = arena.views(allocate(arena, 4096))
    view[:] = 9
    del arena
    assert int(view.sum()) == 9 * 4096


@settings(max_examples=100)
@given(
    steps=st.lists(
        st.tuples(
            st.sampled_from(["take", "take", "free", "trim"]),
            st.lists(st.integers(0, 300), min_size=1, max_size=4),
            st.integers(0, 10**6),
        ),
        max_size=80,
    )
)
def test_any_history_keeps_the_blocks_apart_and_the_totals_right(
    steps: list[tuple[str, list[int], int]],
) -> None:
    arena = Arena(4096)
    held: dict[int, tuple[Allocation, int]] = {}

    def check(allocation: Allocation, value: int) -> None:
        # Each allocation has its own value: a later write that overlaps it would be seen here.
        assert all((view == value).all() for view in arena.views(allocation))

    for step, (kind, sizes, choice) in enumerate(steps):
        if kind == "take":
            free_bytes = arena.free_bytes
            allocation = arena.allocate(sizes)
            needed_bytes = sum(map(aligned_num_bytes, sizes))
            if allocation is None:
                assert needed_bytes > arena.space.largest
                assert arena.free_bytes == free_bytes
                continue
            assert all(span.offset % ALIGNMENT_BYTES == 0 for span in allocation.spans)
            assert allocation.taken_bytes == needed_bytes
            for view in arena.views(allocation):
                view[:] = step % 256
            held[step] = (allocation, step % 256)
        elif held:
            tag = sorted(held)[choice % len(held)]
            allocation, value = held.pop(tag)
            check(allocation, value)
            if kind == "free":
                arena.free(allocation)
            else:
                kept = [choice % (span.num_bytes + 1) for span in allocation.spans]
                held[tag] = (arena.keep_ends(allocation, kept), value)
                assert [span.num_bytes for span in held[tag][0].spans] == kept
                check(*held[tag])
        assert arena.used_bytes == sum(allocation.taken_bytes for allocation, _ in held.values())
        assert arena.used_bytes + arena.free_bytes == arena.capacity_bytes
    for allocation, value in held.values():
        check(allocation, value)
        arena.free(allocation)
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
