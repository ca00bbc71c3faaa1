"""Streams, events, copies and locked memory: of a CPU, and what the double of a GPU refuses."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import pytest
import torch

from krul_backend import page_lock
from krul_backend.device import Device, StreamClock
from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.engine.common import store_connection
from krul_sglang.engine.common.store_connection import ArenaLocks
from tests.support.engine_builders import PATIENCE_S, in_threads
from tests.support.present import present
from tests.support.sglang_pool import make_pool
from tests.support.store_builders import wait_until
from tests.support.strict_device import (
    DEVICES,
    INDEX,
    REFUSED,
    StrictDevice,
    StrictError,
    check_device,
    lock_all,
    make_device,
)

CPU = torch.device("cpu")


@pytest.fixture(params=DEVICES)
def device(request: pytest.FixtureRequest) -> Iterator[Device]:
    device = make_device(request.param)
    yield device
    check_device(device)


@pytest.fixture
def strict() -> StrictDevice:
    return StrictDevice()


def mapped(num_bytes: int = 4096) -> npt.NDArray[np.uint8]:
    return np.frombuffer(mmap.mmap(-1, num_bytes), dtype=np.uint8)


# ---- a device ----


def test_an_accelerator_needs_its_index() -> None:
    with pytest.raises(ValueError, match="device cuda needs an index, such as cuda:0"):
        Device(torch.device("cuda"))


def test_the_pool_is_on_the_device_of_its_buffers() -> None:
    """SGLang's own name for it has no index, and a thread's current device may be another one."""
    pool = make_pool()
    pool.device = "cuda"
    found = open_pool(pool)
    assert found.device == pool.k_buffer[0].device == CPU
    assert found.streams.torch_device == CPU


def test_what_each_device_is_called(strict: StrictDevice) -> None:
    assert Device(CPU).name == "cpu"
    assert strict.name == f"strict {INDEX}"
    assert (Device(CPU).shares_cores, strict.shares_cores) == (True, False)


@pytest.mark.parametrize(("name", "index"), [("cpu", None), ("cuda", 0), ("cuda:1", 1)])
def test_a_name_without_an_index_is_that_of_the_first_device(
    name: str, index: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch, "get_device_module", lambda device: None)
    assert Device.named(name).torch_device.index == index


def test_a_background_thread_of_an_accelerator_takes_a_quarter_of_the_cores(strict: Device) -> None:
    def bind() -> tuple[int, int]:
        torch.set_num_threads(9)
        strict.bind_background_thread()
        return torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())

    before = torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())
    with in_threads() as start:
        assert start(bind).result(PATIENCE_S) == (2, before[1])
    assert (torch.get_num_threads(), os.getpriority(os.PRIO_PROCESS, threading.get_native_id())) == before


def test_a_bound_thread_of_a_cpu_works_on_one_core_and_others_are_not_changed() -> None:
    before = torch.get_num_threads()

    def bind() -> int:
        Device(CPU).bind_thread()
        return torch.get_num_threads()

    with in_threads() as start:
        assert start(bind).result(PATIENCE_S) == 1
    assert torch.get_num_threads() == before
    with Device(CPU).as_bound_thread():
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == before


# ---- copies ----


def test_lists_arrive_on_the_device(device: Device) -> None:
    assert device.from_list([3, 1, 2]).tolist() == [3, 1, 2]
    nested = device.from_list([[1, 2], [3, 4]], torch.int32)
    assert (nested.tolist(), nested.dtype) == ([[1, 2], [3, 4]], torch.int32)
    assert device.from_list([]).shape == (0,)
    device.synchronize()


def test_bytes_go_up_and_come_down(device: Device) -> None:
    host, back = (device.host_empty((8,), torch.uint8) for _ in range(2))
    host.copy_(torch.arange(8))
    stream = device.new_stream()
    with device.working_on(stream):
        device.download(back, device.upload(host))
    assert back.tolist() == list(range(8))
    target = torch.zeros(4, dtype=torch.uint8)
    assert device.upload(host[4:], target) is target
    device.synchronize()
    assert target.tolist() == [4, 5, 6, 7]


def test_a_cpu_uses_what_lies_in_host_memory_where_it_is() -> None:
    host = torch.arange(4)
    assert Device(CPU).upload(host) is host


def test_a_clock_tells_times_when_all_streams_have_come_by(device: Device) -> None:
    clock = StreamClock(device)
    with device.working_on(device.new_stream()):
        marks = [clock.mark() for _ in range(2)]
    first_s, second_s = (mark() for mark in marks)
    assert first_s is not None
    assert second_s is not None
    assert 0 <= first_s <= second_s


def test_a_mark_waits_for_the_start_of_its_clock_too(strict: StrictDevice) -> None:
    """Another stream may come by the mark before the first one comes by the start."""
    slow, fast = strict.new_stream(), strict.new_stream()
    host = strict.host_empty((1,), torch.uint8)
    with strict.on_stream(slow):
        strict.upload(host)
        clock = StreamClock(strict)
    with strict.on_stream(fast):
        mark = clock.mark()
    fast.synchronize()
    assert mark() is None
    slow.synchronize()
    assert mark() is not None


# ---- locked memory ----


def test_memory_stays_locked_until_the_last_array_over_it_is_gone(strict: StrictDevice) -> None:
    arena = mapped()
    assert lock_all(strict, arena) == 0
    address = arena.ctypes.data
    block = torch.from_numpy(arena[64:128])
    del arena
    assert strict.module.locked == [range(address, address + 4096)]
    del block
    assert strict.module.unlocked.acquire(timeout=PATIENCE_S)
    assert strict.module.locked == []
    strict.check()


def test_unlocking_is_done_once_by_whoever_comes_first(strict: StrictDevice) -> None:
    arena, other = mapped(), mapped()
    lock = present(strict.lock_pages(arena))
    lock.wait()
    lock_all(strict, other)
    del other
    assert strict.module.unlocked.acquire(timeout=PATIENCE_S)
    assert not strict.module.unlocked.acquire(blocking=False)
    lock.end()
    assert strict.module.unlocked.acquire(blocking=False)
    del arena
    lock.end()
    strict.unlock_pages()
    assert not strict.module.unlocked.acquire(blocking=False)
    assert strict.module.locked == []
    strict.check()


def test_memory_that_cannot_be_locked_is_not_unlocked(strict: StrictDevice) -> None:
    strict.module.lock_limit = 0
    arena = mapped()
    assert lock_all(strict, arena) == REFUSED
    strict.unlock_pages()
    assert not strict.module.unlocked.acquire(blocking=False)


def test_pages_are_locked_in_a_thread_that_ends(strict: StrictDevice) -> None:
    """A refusal would stay this thread's last error, which torch raises at its next kernel."""
    threads: list[threading.Thread] = []
    strict.module.before_lock = lambda pages: threads.append(threading.current_thread())
    arena = mapped()
    lock_all(strict, arena)
    (thread,) = threads
    assert thread is not threading.current_thread()
    assert not thread.is_alive()


def test_all_pages_of_a_chunk_have_memory_before_it_is_locked(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_lock, "_TOUCHED_BYTES", 1 << 18)
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", 1 << 20)
    num_bytes = (3 << 20) + 4096
    file = os.memfd_create("arena", os.MFD_CLOEXEC)
    try:
        os.ftruncate(file, num_bytes)
        arena = np.frombuffer(mmap.mmap(file, num_bytes), dtype=np.uint8)
        assert os.fstat(file).st_blocks == 0
        first, touched = arena.ctypes.data, list[tuple[int, int]]()
        strict.module.before_lock = lambda pages: touched.append(
            (pages.stop - first, 512 * os.fstat(file).st_blocks)
        )
        lock_all(strict, arena)
        assert [num_locked for num_locked, _ in touched] == [given for _, given in touched]
        assert touched[-1][0] == num_bytes
        assert len(touched) in (4, 5)
    finally:
        os.close(file)


def test_a_cpu_has_nothing_to_lock() -> None:
    device = Device(CPU)
    assert device.lock_pages(np.zeros(8, dtype=np.uint8)) is None
    device.unlock_pages()


def test_a_new_arena_leaves_the_old_one_locked_while_it_is_copied_from(strict: StrictDevice) -> None:
    """A daemon that is started again: its link's thread, which is bound to no device, brings the mapping."""
    locks = ArenaLocks(strict)
    old, new = mapped(), mapped()
    old_pages = range(old.ctypes.data, old.ctypes.data + old.nbytes)
    locks.add(old)
    locks.begin()
    wait_until(lambda: strict.module.locked == [old_pages])
    old[:64] = 7
    block = old[:64]
    loading = strict.new_stream()
    with strict.on_stream(loading):
        arrived = strict.upload(torch.from_numpy(block))
    del old
    link = threading.Thread(target=locks.add, args=(new,))
    link.start()
    link.join()
    wait_until(lambda: len(strict.module.locked) == 2)
    assert old_pages in strict.module.locked
    strict.synchronize(loading)
    assert arrived.tolist() == [7] * 64
    del block
    assert strict.module.unlocked.acquire(timeout=PATIENCE_S)
    assert strict.module.locked == [range(new.ctypes.data, new.ctypes.data + new.nbytes)]
    strict.check()


# ---- memory that is locked chunk by chunk ----

PAGE = mmap.PAGESIZE


@pytest.fixture
def chunked(strict: StrictDevice, monkeypatch: pytest.MonkeyPatch) -> Iterator[StrictDevice]:
    """Each page is a chunk of its own."""
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", PAGE)
    yield strict
    strict.check()


class Stopped:
    """Stops the locking before the chunk ``index``, until ``go_on`` is set."""

    def __init__(self, device: StrictDevice, index: int) -> None:
        self.has_come, self.go_on = threading.Event(), threading.Event()
        self._left = index
        device.module.before_lock = self

    def __call__(self, pages: range) -> None:
        if self._left == 0:
            self.has_come.set()
            assert self.go_on.wait(PATIENCE_S)
        self._left -= 1


@pytest.mark.parametrize(
    ("first", "num_bytes", "expected"),
    [
        (0, 0, []),
        (PAGE, 0, []),
        (0, PAGE, []),
        (PAGE - 1, 1, []),
        (PAGE - 1, 2, [1]),
        (PAGE, 3 * PAGE, [PAGE, 2 * PAGE]),
        (3 * PAGE - 64, 2 * PAGE, [64, PAGE + 64]),
    ],
)
def test_memory_is_cut_where_a_chunk_ends(
    first: int, num_bytes: int, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", PAGE)
    assert page_lock.cuts_of(first, num_bytes) == expected


def test_copies_are_right_while_pages_are_being_locked(chunked: StrictDevice) -> None:
    """From and to memory that is locked, that is not yet, and that is both."""
    arena = mapped(4 * PAGE)
    arena[:] = np.random.default_rng(0).integers(0, 256, arena.nbytes, dtype=np.uint8)
    stopped = Stopped(chunked, 2)
    lock = present(chunked.lock_pages(arena))
    assert stopped.has_come.wait(PATIENCE_S)
    assert (lock.locked_bytes, lock.num_bytes) == (2 * PAGE, 4 * PAGE)

    blocks = [arena[start:end] for start, end in ((64, 128), (PAGE - 64, PAGE + 64), (64, 4 * PAGE - 64))]
    expected = [torch.from_numpy(block.copy()) for block in blocks]
    arrived = [chunked.upload(torch.from_numpy(block)) for block in blocks]
    whole = chunked.upload_joined(blocks)
    numbers = chunked.upload(torch.from_numpy(blocks[2]).view(torch.int32).view(-1, 2))
    # Only what is not locked yet holds up the thread: two chunks of the last block, three times.
    assert chunked.module.pageable_copies == 6
    assert all(map(torch.equal, arrived, expected))
    assert torch.equal(whole, torch.cat(expected))
    assert torch.equal(numbers.view(-1).view(torch.uint8), expected[2])

    source = torch.randint(0, 256, (arena.nbytes - 128, 2), dtype=torch.uint8)[:, 1]
    chunked.download(torch.from_numpy(blocks[2]), source)
    chunked.synchronize(chunked.current_stream())
    assert torch.equal(torch.from_numpy(blocks[2]), source)

    stopped.go_on.set()
    assert lock.wait() == 0
    assert lock.locked_bytes == arena.nbytes
    before = chunked.module.pageable_copies
    assert torch.equal(chunked.upload(torch.from_numpy(blocks[2])), source)
    assert chunked.module.pageable_copies == before
    chunked.synchronize()


def test_a_refused_chunk_ends_the_locking_with_one_warning(
    chunked: StrictDevice, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(store_connection, "lock_limit_bytes", lambda: 8 << 20)
    chunked.module.lock_limit = 2 * PAGE
    arena, locks = mapped(5 * PAGE), ArenaLocks(chunked)
    locks.add(arena)
    locks.begin()
    wait_until(lambda: caplog.messages != [])
    expected = {"bytes": 2 * PAGE, "of_bytes": 5 * PAGE, "error": REFUSED}
    assert locks.as_dict() == expected
    (warning,) = caplog.messages
    assert (
        "could not be pinned beyond 8.0 KiB of 20.0 KiB (error 2; the limit on locked memory is 8.0 MiB)"
        in warning
    )
    arena[:] = 3
    assert chunked.upload(torch.from_numpy(arena)).tolist() == [3] * arena.nbytes
    chunked.synchronize()
    chunked.unlock_pages()
    assert chunked.module.locked == []
    assert caplog.messages == [warning]


def test_nothing_is_locked_before_costs_are_measured(chunked: StrictDevice) -> None:
    locks, first, second = ArenaLocks(chunked), mapped(), mapped(2 * PAGE)
    locks.add(first)
    # The daemon came back meanwhile.
    locks.add(second)
    assert locks.as_dict() is None
    assert chunked.module.locked == []
    locks.begin()
    wait_until(lambda: locks.as_dict() == {"bytes": 2 * PAGE, "of_bytes": 2 * PAGE, "error": 0})


@pytest.mark.parametrize("ends_by_itself", [True, False])
def test_locking_ends_with_its_memory(chunked: StrictDevice, ends_by_itself: bool) -> None:
    arena = mapped(4 * PAGE)
    stopped = Stopped(chunked, 2)
    lock = present(chunked.lock_pages(arena))
    assert stopped.has_come.wait(PATIENCE_S)
    with in_threads() as start:
        if ends_by_itself:
            del arena
        else:
            start(chunked.unlock_pages)
        stopped.go_on.set()
    lock.wait()
    wait_until(lambda: lock.is_over)
    assert chunked.module.locked == []
    assert lock.locked_bytes == 0


# ---- what the double refuses ----


def test_the_double_refuses_a_device_without_an_index(strict: StrictDevice) -> None:
    for refused in (strict.module.set_device, strict.module.Stream, strict.module.current_stream):
        with pytest.raises(ValueError, match="with an index"):
            refused(CPU)


def test_the_double_refuses_threads_that_were_not_bound(strict: StrictDevice) -> None:
    host = strict.host_empty((1,), torch.uint8)
    with in_threads() as start:
        for work in (lambda: strict.upload(host), strict.record):
            with pytest.raises(StrictError, match="works on device 0"):
                start(work).result(PATIENCE_S)  # type: ignore[arg-type]


def test_the_double_notices_host_memory_that_is_reused_too_early(strict: StrictDevice) -> None:
    host = strict.host_empty((4,), torch.uint8)
    strict.upload(host)
    host += 1
    with pytest.raises(StrictError, match="reused"):
        strict.synchronize(strict.current_stream())


def test_the_double_brings_bytes_down_when_they_are_waited_for(strict: StrictDevice) -> None:
    host = strict.host_empty((4,), torch.uint8)
    before = host.tolist()
    strict.download(host, torch.tensor([1, 2, 3, 4], dtype=torch.uint8))
    event = strict.record()
    assert host.tolist() == before
    assert not event.has_passed()
    event.synchronize()
    assert host.tolist() == [1, 2, 3, 4]


def test_the_double_knows_what_other_streams_have_waited_for(strict: StrictDevice) -> None:
    first, second = strict.new_stream(), strict.new_stream()
    hosts = [strict.host_empty((1,), torch.uint8) for _ in range(2)]
    with strict.on_stream(first):
        strict.download(hosts[0], torch.tensor([1], dtype=torch.uint8))
        event = strict.record()
        strict.download(hosts[1], torch.tensor([2], dtype=torch.uint8))
    strict.wait_for(event, second)
    strict.synchronize(second)
    assert hosts[0].tolist() == [1]
    assert len(first.copies_under_way()) == 1


def test_the_double_refuses_to_unlock_what_is_being_copied(strict: StrictDevice) -> None:
    arena = mapped()
    lock_all(strict, arena)
    strict.upload(torch.from_numpy(arena[:8]))
    with pytest.raises(StrictError, match="under way"):
        strict.unlock_pages()


def test_the_double_refuses_a_copy_of_memory_that_is_locked_in_parts(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch
) -> None:
    arena = mapped(2 * PAGE)
    with monkeypatch.context() as patched:
        patched.setattr(page_lock, "CHUNK_BYTES", PAGE)
        lock_all(strict, arena)
    with pytest.raises(StrictError, match="not locked as one"):
        strict.upload(torch.from_numpy(arena))


def test_the_double_counts_copies_that_hold_up_their_thread(strict: StrictDevice) -> None:
    host = torch.zeros(4, dtype=torch.uint8)
    strict.upload(host)
    assert strict.module.pageable_copies == 1
    strict.module.forward_streams.add(strict.current_stream())
    with pytest.raises(StrictError, match="holds up the forward"):
        strict.upload(host)
