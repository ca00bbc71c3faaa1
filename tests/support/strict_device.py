"""A ``Device`` over CPU tensors that refuses what a GPU refuses, and remembers who waits for whom.

What a GPU does on its own clock happens here as late as it may: copies to the host arrive when somebody waits
for them, and host memory that is copied from must not have changed until then. Compute is not simulated: it
happens at once, so that the log alone says whether a stream waited before it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from krul_backend.device import Device, Event

INDEX = 1
"""Of the device: a thread that nobody told works on device 0, as with CUDA."""


REFUSED = 2
"""What locking pages answers beyond the limit."""


class StrictError(Exception):
    """What would be undefined, or wrong KV, on a GPU."""


@dataclass(frozen=True)
class Entry:
    """One thing that a stream was given. ``kind``: record, wait, upload or download.

    ``event`` is what was recorded or is waited for; ``host`` the address range of a copy.
    """

    kind: str
    stream: StrictStream
    event: StrictEvent | None = None
    host: range = range(0)


@dataclass
class _Copy:
    host: torch.Tensor
    host_before: torch.Tensor
    arriving: torch.Tensor | None
    """What the host will have; None if the copy goes to the device."""

    @property
    def addresses(self) -> range:
        return _addresses(self.host)


class StrictStream:
    def __init__(self, module: StrictModule) -> None:
        self._module = module
        self.work: list[_Copy | StrictEvent | None] = []
        self.num_done = 0

    def wait_event(self, event: StrictEvent) -> None:
        self._module.log.append(Entry("wait", self, event))
        self.work.append(event)

    def query(self) -> bool:
        return self.num_done == len(self.work)

    def synchronize(self) -> None:
        self._module.on_synchronize(self)
        self.come_to(len(self.work))

    def come_to(self, end: int) -> None:
        """Do the work before ``end``, and what it waits for on other streams."""
        with self._module.lock:
            while self.num_done < end:
                todo, self.work[self.num_done] = self.work[self.num_done], None
                self.num_done += 1
                if isinstance(todo, StrictEvent):
                    todo.come()
                elif todo is not None:
                    self._module.finish(todo)

    def copies_under_way(self) -> list[_Copy]:
        return [todo for todo in self.work[self.num_done :] if isinstance(todo, _Copy)]


class StrictEvent:
    """``stream`` is None until it is recorded."""

    def __init__(self, module: StrictModule, enable_timing: bool) -> None:
        self._module = module
        self._has_time = enable_timing
        self.stream: StrictStream | None = None

    def record(self, stream: StrictStream) -> None:
        self.stream, self._end, self._at_s = stream, len(stream.work), time.perf_counter()
        self._module.log.append(Entry("record", stream, self))

    def come(self) -> None:
        if self.stream is not None:
            self.stream.come_to(self._end)

    def query(self) -> bool:
        return self.stream is None or self.stream.num_done >= self._end

    def synchronize(self) -> None:
        self.come()

    def elapsed_time(self, later: StrictEvent) -> float:
        if not (self._has_time and later._has_time and self.query() and later.query()):
            raise StrictError("both events must be recorded with a time, and have passed")
        return (later._at_s - self._at_s) * 1000


class _Runtime:
    """Page locking, as ``torch.cuda.cudart()`` offers it."""

    def __init__(self, module: StrictModule) -> None:
        self._module = module

    def cudaHostRegister(self, address: int, num_bytes: int, flags: int) -> int:  # noqa: N802
        module, pages = self._module, range(address, address + num_bytes)
        module.check_current("pages are locked")
        module.before_lock(pages)
        if any(_overlap(pages, other) for other in module.locked):
            module.fail("pages are locked twice")
        if module.lock_limit is not None and sum(map(len, module.locked)) + num_bytes > module.lock_limit:
            return REFUSED
        module.locked.append(pages)
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        module = self._module
        module.check_current("pages are unlocked")
        (pages,) = [pages for pages in module.locked if pages.start == address]
        if any(_overlap(pages, copy.addresses) for copy in module.copies_under_way()):
            module.fail("pages are unlocked while a copy from or to them is under way")
        module.locked.remove(pages)
        module.unlocked.release()
        return 0


class StrictModule:
    """Stands for ``torch.cuda``. ``log`` is what all streams were given, in the order of the calls.

    ``errors`` are those that were raised, wherever that was. ``pageable_copies`` waited for their stream, as
    copies of memory that is not locked do; on ``forward_streams`` they are errors. ``lock_limit`` is how many
    bytes may be locked. ``before_lock`` is called before pages are, and ``on_synchronize`` before a stream is
    waited for.
    """

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.log: list[Entry] = []
        self.errors: list[str] = []
        self.locked: list[range] = []
        self.unlocked = threading.Semaphore(0)
        self.pageable_copies = 0
        self.forward_streams: set[StrictStream] = set()
        self.lock_limit: int | None = None
        self.before_lock: Callable[[range], None] = lambda pages: None
        self.on_synchronize = lambda stream: None
        self.streams: list[StrictStream] = []
        self.default_stream = self.Stream(torch.device("cpu", INDEX))
        self._thread = threading.local()

    # ---- what torch.cuda has ----

    def Stream(self, device: torch.device) -> StrictStream:  # noqa: N802
        _index(device)
        self.streams.append(StrictStream(self))
        return self.streams[-1]

    def Event(self, enable_timing: bool = False) -> StrictEvent:  # noqa: N802
        return StrictEvent(self, enable_timing)

    def set_device(self, device: torch.device) -> None:
        self._thread.index = _index(device)

    @contextmanager
    def device(self, device: torch.device) -> Iterator[None]:
        before = self._current_index
        self.set_device(device)
        try:
            yield
        finally:
            self._thread.index = before

    @contextmanager
    def stream(self, stream: StrictStream) -> Iterator[None]:
        before = self._current_stream
        self._thread.stream = stream
        try:
            yield
        finally:
            self._thread.stream = before

    def current_stream(self, device: torch.device) -> StrictStream:
        _index(device)
        return self._current_stream

    def synchronize(self, device: torch.device) -> None:
        _index(device)
        for stream in self.streams:
            stream.synchronize()

    def get_device_name(self, device: torch.device) -> str:
        return f"strict {_index(device)}"

    def cudart(self) -> _Runtime:
        return _Runtime(self)

    # ---- for streams, and for tests ----

    @property
    def _current_index(self) -> int:
        index: int = getattr(self._thread, "index", 0)
        return index

    @property
    def _current_stream(self) -> StrictStream:
        stream: StrictStream = getattr(self._thread, "stream", self.default_stream)
        return stream

    def check_current(self, what: str) -> None:
        if self._current_index != INDEX:
            self.fail(f"{what} in a thread that works on device {self._current_index}")

    def fail(self, error: str) -> None:
        self.errors.append(error)
        raise StrictError(error)

    def is_locked(self, addresses: range) -> bool:
        first, end = addresses.start, addresses.stop
        return first == end or any(pages.start <= first and end <= pages.stop for pages in self.locked)

    def copies_under_way(self) -> list[_Copy]:
        return [copy for stream in self.streams for copy in stream.copies_under_way()]

    def queue(self, copy: _Copy) -> None:
        self.check_current("a copy is queued")
        stream = self._current_stream
        kind = "upload" if copy.arriving is None else "download"
        self.log.append(Entry(kind, stream, host=copy.addresses))
        if self.is_locked(copy.addresses):
            stream.work.append(copy)
            return
        if any(_overlap(pages, copy.addresses) for pages in self.locked):
            self.fail("a copy of memory that is not locked as one: CUDA refuses it")
        if stream in self.forward_streams:
            self.fail("a copy of memory that is not page-locked holds up the forward")
        self.pageable_copies += 1
        stream.come_to(len(stream.work))
        self.finish(copy)

    def finish(self, copy: _Copy) -> None:
        if not torch.equal(_bytes(copy.host), _bytes(copy.host_before)):
            self.fail("host memory was reused while a copy was under way")
        if copy.arriving is not None:
            copy.host.copy_(copy.arriving)

    def waits_before(self, kind: str, stream: StrictStream) -> list[StrictEvent]:
        """What ``stream`` was told to wait for before it was first given something of ``kind``."""
        waits: list[StrictEvent] = []
        for entry in (entry for entry in self.log if entry.stream is stream):
            if entry.kind == kind:
                return waits
            if entry.kind == "wait":
                assert entry.event is not None
                waits.append(entry.event)
        raise AssertionError(f"no {kind} on this stream")


class StrictDevice(Device):
    """``Device``'s own lines over a ``StrictModule``; the thread that makes it is bound to it."""

    def __init__(self) -> None:
        self.module = StrictModule()
        super().__init__(torch.device("cpu", INDEX), self.module)
        # Memory of this kind needs a driver: it is remembered instead, and kept.
        self._pins_memory = False
        self._host_memory: list[torch.Tensor] = []
        self.bind_thread()

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        host = super().host_empty(shape, dtype).view(torch.uint8).random_(0, 256).view(dtype)
        self._host_memory.append(host)
        self.module.locked.append(_addresses(host))
        return host

    def _copy_up(self, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        super()._copy_up(hosts, targets)
        for host in hosts:
            self.module.queue(_Copy(host, host.clone(), None))

    def _copy_down(self, hosts: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        arriving = [torch.empty_like(host) for host in hosts]
        super()._copy_down(arriving, sources)
        for host, of_host in zip(hosts, arriving, strict=True):
            self.module.queue(_Copy(host, host.clone(), of_host))

    def record(self, stream: Any | None = None) -> Event:
        self.module.check_current("an event is recorded")
        return super().record(stream)

    def check(self) -> None:
        """Nothing was refused that somebody swallowed, and nothing is under way."""
        assert self.module.errors == []
        assert self.module.copies_under_way() == []


def lock_all(device: Device, buffer: npt.NDArray[np.uint8]) -> int:
    """Lock pages, and wait for it. Returns the device's error."""
    lock = device.lock_pages(buffer)
    return 0 if lock is None else lock.wait()


DEVICES = ("cpu", "strict")


def make_device(kind: str) -> Device:
    """One of ``DEVICES``: what a server without a GPU runs on, or the double of a GPU."""
    return StrictDevice() if kind == "strict" else Device(torch.device("cpu"))


def check_device(device: Device) -> None:
    """At the end of a test: the double of a GPU has nothing to complain of."""
    if isinstance(device, StrictDevice):
        device.check()


def _index(device: torch.device) -> int:
    if device.index is None:
        raise ValueError(f"expected a device with an index, got {device}")
    return device.index


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(-1).view(torch.uint8)


def _addresses(tensor: torch.Tensor) -> range:
    return range(tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes)


def _overlap(one: range, other: range) -> bool:
    return one.start < other.stop and other.start < one.stop
