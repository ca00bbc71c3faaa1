"""One interface to streams, events, copies and page-locked host memory, on a GPU and on a CPU alike.

All asynchronous work goes through ``Device``, so that a machine without a GPU executes the same lines. No
other module asks which kind of device it has.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from krul_backend.memory import memory_limit_bytes
from krul_backend.page_lock import PageLock, cuts_of


class Device:
    """The streams, events and copies of one device. Safe to use from several threads.

    ``torch_device`` has an index unless it is the CPU. ``shares_cores`` is true for a CPU: its kernels run on
    the threads of this process, so copies and kernels compete for them, and every operation has ended when
    its call returns.

    A tensor made while a stream is current belongs to that stream: its memory goes to later work of the same
    stream as soon as the last reference is gone, without a wait. Whoever uses a tensor on another stream
    keeps a reference until that stream has done the work.
    """

    def __init__(self, torch_device: torch.device, module: Any | None = None) -> None:
        """``module`` replaces ``torch.cuda`` in tests.

        Raises:
            ValueError: an accelerator without an index, which would mean each thread's current one.
        """
        if torch_device.type != "cpu" and torch_device.index is None:
            raise ValueError(f"device {torch_device} needs an index, such as {torch_device.type}:0")
        self.torch_device = torch_device
        self.shares_cores = torch_device.type == "cpu" and module is None
        if module is None:
            module = _Cpu() if self.shares_cores else torch.get_device_module(torch_device)
        self._module: Any = module
        self._pins_memory = not self.shares_cores
        self._locks: list[PageLock] = []

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Device:
        """The device on which a tensor lies."""
        return cls(tensor.device)

    @classmethod
    def named(cls, name: str) -> Device:
        """The device of a name such as cpu, cuda or cuda:1; of a kind without an index, the first one."""
        device = torch.device(name)
        return cls(device if device.type == "cpu" or device.index is not None else torch.device(name, 0))

    @classmethod
    def of_machine(cls) -> Device:
        """The first accelerator of this machine; its CPU if there is none."""
        kind = torch.accelerator.current_accelerator() if torch.accelerator.is_available() else None
        return cls(torch.device("cpu") if kind is None else torch.device(kind.type, 0))

    @property
    def name(self) -> str:
        """The model of the device, as its maker calls it; ``cpu`` for any CPU."""
        return str(self._module.get_device_name(self.torch_device))

    @property
    def memory_bytes(self) -> int:
        """The memory that the device has; for a CPU the limit of this machine or cgroup."""
        return int(self._module.get_device_properties(self.torch_device).total_memory)

    @property
    def runs_triton(self) -> bool:
        """Whether krul's Triton kernels run on this device."""
        return self.torch_device.type == "cuda"

    # ---- threads ----

    @property
    def multiplies_bf16_fast(self) -> bool:
        """True if this device multiplies bf16 matrices faster than fp32 ones."""
        return not self.shares_cores or torch.cpu._is_avx512_bf16_supported()

    def bind_thread(self) -> None:
        """Make this the calling thread's current device. Call it once in each thread that copies.

        On a CPU the thread uses one core from now on, to leave the others to the forward.
        """
        self._module.set_device(self.torch_device)

    def bind_background_thread(self) -> None:
        """Bind the calling thread as ``bind_thread`` does, and leave cores to threads that work for requests:
        with an accelerator it takes a quarter of them."""
        self.bind_thread()
        if not self.shares_cores:
            torch.set_num_threads(max(1, torch.get_num_threads() // 4))

    def as_current(self) -> AbstractContextManager[Any]:
        """The calling thread's current device is this one inside, and the one before it afterwards."""
        context: AbstractContextManager[Any] = self._module.device(self.torch_device)
        return context

    @contextmanager
    def as_bound_thread(self) -> Iterator[None]:
        """Do for the time of the block what ``bind_thread`` does for good."""
        num_threads = torch.get_num_threads()
        with self.as_current():
            self.bind_thread()
            try:
                yield
            finally:
                torch.set_num_threads(num_threads)

    @contextmanager
    def on_cores(self, num_cores: int) -> Iterator[None]:
        """On a CPU, let a thread that ``bind_thread`` has bound use so many cores inside the block."""
        if self.shares_cores:
            torch.set_num_threads(num_cores)
        try:
            yield
        finally:
            if self.shares_cores:
                torch.set_num_threads(1)

    # ---- streams and events ----

    def new_stream(self) -> Any:
        """A new stream of this device. On a CPU it has no work of its own: calls run at once."""
        return self._module.Stream(self.torch_device)

    def current_stream(self) -> Any:
        """The stream on which the calling thread's work on this device runs now."""
        return self._module.current_stream(self.torch_device)

    def on_stream(self, stream: Any) -> AbstractContextManager[Any]:
        """Inside the block, work that the calling thread queues runs on ``stream``."""
        context: AbstractContextManager[Any] = self._module.stream(stream)
        return context

    @contextmanager
    def working_on(self, stream: Any, ready: Sequence[Any] = ()) -> Iterator[None]:
        """Run work on ``stream`` after the events ``ready``, and wait for it when the block is left."""
        for event in ready:
            self.wait_for(event, stream)
        try:
            with self.on_stream(stream):
                yield
        finally:
            self.synchronize(stream)

    def record(self, stream: Any | None = None) -> Event:
        """An event that passes after the work queued so far on ``stream`` (None: the current one)."""
        event = self._module.Event(enable_timing=True)
        event.record(self.current_stream() if stream is None else stream)
        return Event(event)

    def wait_for(self, event: Any, stream: Any | None = None) -> None:
        """Let work that is queued from now on on ``stream`` (None: the current one) run after ``event``.

        ``event`` is one of ``record`` or of torch. The calling thread does not wait.
        """
        waiting = self.current_stream() if stream is None else stream
        waiting.wait_event(event.of_torch if isinstance(event, Event) else event)

    def synchronize(self, stream: Any | None = None) -> None:
        """Wait, in the calling thread, for the work queued on ``stream``, if there is any; on all streams if
        None."""
        if stream is None:
            self._module.synchronize(self.torch_device)
        elif not stream.query():
            stream.synchronize()

    def is_capturing(self) -> bool:
        """Whether the current stream records its work into a graph instead of running it."""
        is_capturing = getattr(self._module, "is_current_stream_capturing", None)
        return is_capturing is not None and bool(is_capturing())

    # ---- host memory and copies ----

    def host_empty(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized host memory, page-locked on a GPU so that copies run asynchronously.

        It may be dropped while a copy is under way: torch's caching allocator keeps it until that has ended.
        """
        return torch.empty(tuple(shape), dtype=dtype, pin_memory=self._pins_memory)

    def from_list(self, values: Sequence[Any], dtype: torch.dtype = torch.int64) -> torch.Tensor:
        """Host values (nested, for more dimensions) as a tensor on this device. The thread does not wait."""
        return self.from_host(torch.tensor(values, dtype=dtype))

    def from_host(self, tensor: torch.Tensor) -> torch.Tensor:
        """A copy on this device of a tensor that may lie in any host memory. The thread does not wait."""
        return self.upload(self.host_empty(tensor.shape, tensor.dtype).copy_(tensor))

    def upload(self, host: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        """Copy host memory to the device on the current stream, into ``target`` or a new tensor; return that.

        On a CPU without a ``target`` the result is ``host`` itself. ``host`` must not change before the
        stream has done the copy. It should be page-locked (``host_empty``, ``lock_pages``): a copy from other
        memory blocks the calling thread, and the stream.
        """
        if target is None:
            if self.shares_cores:
                return host
            target = torch.empty(host.shape, dtype=host.dtype, device=self.torch_device)
        self._copy_up(*_cut([host], [target]))
        return target

    def upload_joined(self, hosts: Sequence[npt.NDArray[np.uint8]]) -> torch.Tensor:
        """Copy pieces of host memory ``[num_bytes]`` back to back into one new tensor of the device.

        See ``upload`` about the pieces.
        """
        if self.shares_cores:
            return torch.from_numpy(np.concatenate(hosts))
        sizes = [host.nbytes for host in hosts]
        joined = torch.empty(sum(sizes), dtype=torch.uint8, device=self.torch_device)
        self.upload_each([torch.from_numpy(host) for host in hosts], list(torch.split(joined, sizes)))
        return joined

    def upload_each(self, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        """``upload`` each piece into its target, in one call that takes and gives the GIL once."""
        self._copy_up(*_cut(hosts, targets))

    def download(self, host: torch.Tensor, source: torch.Tensor) -> None:
        """Copy a tensor of this device to host memory of its shape, on the current stream.

        ``host`` has the bytes when the stream has done the copy; nobody else may use it until then. See
        ``upload`` about page-locked memory.
        """
        self._copy_down(*_cut([host], [source.contiguous()]))

    def to_host(self, source: torch.Tensor) -> torch.Tensor:
        """Host memory with a copy of a tensor, once the current stream has made it; on a CPU the tensor."""
        if self.shares_cores:
            return source
        host = self.host_empty(source.shape, source.dtype)
        self.download(host, source)
        return host

    def _copy_up(self, hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        if len(hosts) == 1:
            targets[0].copy_(hosts[0], non_blocking=True)
        else:
            torch._foreach_copy_(list(targets), list(hosts), non_blocking=True)

    def _copy_down(self, hosts: Sequence[torch.Tensor], sources: Sequence[torch.Tensor]) -> None:
        for host, source in zip(hosts, sources, strict=True):
            host.copy_(source, non_blocking=True)

    def lock_pages(
        self, buffer: npt.NDArray[np.uint8], on_done: Callable[[PageLock], None] = lambda lock: None
    ) -> PageLock | None:
        """Begin to page-lock mapped memory, so that this device copies from and to it asynchronously.

        It may be used meanwhile, see ``upload``. Returns what has become of it so far; None on a CPU, where
        nothing is locked. ``on_done`` and how long it stays locked: see ``PageLock``.
        """
        if not hasattr(self._module, "cudart"):
            return None
        lock = PageLock(buffer, self._on_runtime, on_done)
        self._locks = [*(other for other in self._locks if not other.is_over), lock]
        return lock

    def unlock_pages(self) -> None:
        """Unlock all that this object has locked. No copy of it may be under way."""
        for lock in self._locks:
            lock.end()

    def _on_runtime(self, function: str, *arguments: int) -> int:
        with self.as_current():
            call: Callable[..., Any] = getattr(self._module.cudart(), function)
            return int(call(*arguments))


def _cut(
    hosts: Sequence[torch.Tensor], others: Sequence[torch.Tensor]
) -> tuple[Sequence[torch.Tensor], Sequence[torch.Tensor]]:
    """Both sides of copies, all contiguous, cut where a chunk of ``PageLock`` ends on the host's side.

    CUDA refuses a copy of host memory that is locked in part: by its "API synchronization behavior" either
    all of it is registered or none. Where two registrations meet, copies have been refused, too.
    """
    cuts = [cuts_of(host.data_ptr(), host.nbytes) for host in hosts]
    if not any(cuts):
        return hosts, others
    parts: tuple[list[torch.Tensor], list[torch.Tensor]] = ([], [])
    for host, other, at in zip(hosts, others, cuts, strict=True):
        for tensor, cut in zip((host, other), parts, strict=True):
            cut += tensor.view(-1).view(torch.uint8).tensor_split(at) if at else [tensor]
    return parts


class Event:
    """A point in the work of one stream."""

    def __init__(self, of_torch: Any) -> None:
        self.of_torch = of_torch

    def has_passed(self) -> bool:
        """Whether the stream has done all work before this point."""
        return bool(self.of_torch.query())

    def synchronize(self) -> None:
        """Wait, in the calling thread, until the stream has done all work before this point."""
        self.of_torch.synchronize()

    def seconds_until(self, later: Event) -> float:
        """Seconds from this event to a later one of the same device; both must have passed."""
        return float(self.of_torch.elapsed_time(later.of_torch)) / 1000


Mark = Callable[[], float | None]
"""Called later, gives the seconds since the clock was made; None while the device has not got there."""


class StreamClock:
    """Puts marks of several streams on one time axis. Marking never waits for the device.

    ``begin_ns`` is when the axis begins, by the host's wall clock: about, because a device may be later.
    """

    def __init__(self, device: Device) -> None:
        self.begin_ns = time.time_ns()
        self._device = device
        self._start = device.record()

    def mark(self) -> Mark:
        """A mark behind the work queued so far on the current stream."""
        start, event = self._start, self._device.record()
        # The start was recorded on another stream, which may be later than this one.
        return lambda: start.seconds_until(event) if event.has_passed() and start.has_passed() else None


class _CpuStream:
    """A CPU's stream: every operation has ended when its call returns, so there is nothing to wait for."""

    def __init__(self, device: torch.device | None = None) -> None: ...

    def wait_event(self, event: object) -> None: ...

    def query(self) -> bool:
        return True


class _CpuEvent:
    """A CPU's event, which has passed as soon as it is recorded."""

    def __init__(self, enable_timing: bool = False) -> None: ...

    def record(self, stream: object) -> None:
        self._at_s = time.perf_counter()

    def query(self) -> bool:
        return True

    def synchronize(self) -> None: ...

    def elapsed_time(self, later: _CpuEvent) -> float:
        """Milliseconds, as torch's events have it."""
        return (later._at_s - self._at_s) * 1000


class _Cpu:
    """The part of ``torch.cuda`` that ``Device`` needs, for a CPU.

    ``torch.cpu`` does not do: its current stream is one for all threads, and its events have no time.
    """

    Event = _CpuEvent
    Stream = _CpuStream
    _stream = _CpuStream()

    def current_stream(self, device: torch.device) -> _CpuStream:
        return self._stream

    def stream(self, stream: _CpuStream) -> AbstractContextManager[None]:
        return nullcontext()

    def device(self, device: torch.device) -> AbstractContextManager[None]:
        return nullcontext()

    def set_device(self, device: torch.device) -> None:
        torch.set_num_threads(1)

    def synchronize(self, device: torch.device) -> None: ...

    def get_device_name(self, device: torch.device) -> str:
        return "cpu"

    def get_device_properties(self, device: torch.device) -> SimpleNamespace:
        return SimpleNamespace(total_memory=memory_limit_bytes())
