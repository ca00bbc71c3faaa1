"""What differs between a CPU and a GPU: how time is taken, how streams wait, and what host memory is."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch


class Device(ABC):
    """A mark is a moment in the work of the stream that is current in the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    @abstractmethod
    def mark(self) -> Any:
        """A mark after all work that this thread's current stream has been given."""

    @abstractmethod
    def seconds(self, start: Any, end: Any) -> float:
        """From one mark to another; both have passed."""

    @abstractmethod
    def wait_for(self, mark: Any) -> None:
        """What this thread's current stream is given from now on runs after ``mark``."""

    @abstractmethod
    def loading(self) -> AbstractContextManager[None]:
        """A context in which this thread's current stream is the load stream."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait for all work of all streams."""

    @abstractmethod
    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        """uint8 ``[num_bytes]`` in host memory, from which copies to the device are fastest."""

    def bind_load_thread(self) -> None:
        """Called once in the thread that loads."""
        # The forward has its own threads; the loader is to have one core and no more.
        torch.set_num_threads(1)


class CpuDevice(Device):
    """Work is done when it has been given, by the thread that gave it."""

    def __init__(self) -> None:
        super().__init__(torch.device("cpu"))

    def mark(self) -> float:
        return time.perf_counter()

    def seconds(self, start: float, end: float) -> float:
        return end - start

    def wait_for(self, mark: float) -> None:
        """Nothing to wait for: who has the mark knows that the work is done."""

    @contextmanager
    def loading(self) -> Iterator[None]:
        yield

    def synchronize(self) -> None:
        """Nothing is under way."""

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8)


class CudaDevice(Device):
    """Events on a compute stream (the default one) and a load stream of its own; pinned host memory."""

    def __init__(self, index: int = 0) -> None:
        super().__init__(torch.device("cuda", index))
        self._load_stream = torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]

    def mark(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, start: torch.cuda.Event, end: torch.cuda.Event) -> float:
        return float(start.elapsed_time(end)) / 1000

    def wait_for(self, mark: torch.cuda.Event) -> None:
        torch.cuda.current_stream(self.device).wait_event(mark)

    @contextmanager
    def loading(self) -> Iterator[None]:
        with torch.cuda.stream(self._load_stream):
            yield

    def synchronize(self) -> None:
        torch.cuda.synchronize(self.device)

    def host_buffer(self, num_bytes: int) -> torch.Tensor:
        return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)

    def bind_load_thread(self) -> None:
        super().bind_load_thread()
        torch.cuda.set_device(self.device)


def make_device(name: str) -> Device:
    """``cpu`` or ``cuda``."""
    return CudaDevice() if name == "cuda" else CpuDevice()
