"""Loads of one forward, under way: which layers have landed, and how a forward waits for them."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from krul_backend.errors import KrulError
from krul_backend.restore.interface import RestorePlan
from krul_backend.store.interface import Lease
from krul_sglang.engine.clock import Mark, StreamClock
from krul_sglang.engine.segment_reader import OpenSlice


class LoadFailedError(KrulError):
    """A layer of a load will not land: its copy failed, or nothing moved for too long."""


@dataclass(frozen=True)
class Forecast:
    """Seconds that heads and loads of a restore should take, each without waiting for the other."""

    head_s: float
    load_s: float


@dataclass(frozen=True, eq=False)
class Load:
    """A leased prefix on its way into the pool.

    Tokens ``[device_tokens, device_tokens + len(slots))`` of the conversation go to ``slots`` (int64, on the
    pool's device): in each layer those from ``plan.head_ends[layer]`` on, out of ``slices`` of the lease.
    """

    lease: Lease
    slices: Sequence[OpenSlice]
    slots: torch.Tensor
    device_tokens: int
    plan: RestorePlan
    forecast: Forecast


@dataclass(frozen=True)
class LayerTimes:
    """When work on a layer began and ended."""

    begin: Mark
    end: Mark


class LoadBatch:
    """What the loader and the forward share about one batch of loads. Thread-safe.

    The loader reports each layer with ``landed`` inside ``writing``; the forward calls ``wait_layer``. What
    comes after ``abandon``, on a GPU in the stream that called it, is not overwritten by this batch any more.
    """

    def __init__(
        self, loads: Mapping[str, Load], num_layers: int, device: torch.device, timeout_s: float
    ) -> None:
        self.loads = loads
        self.clock = StreamClock(device)
        self.load_times: list[LayerTimes] = []
        self.wait_times: dict[int, LayerTimes] = {}
        self.num_layers = num_layers
        self._is_cuda = device.type == "cuda"
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._pool_lock = threading.Lock()
        self._events: list[torch.cuda.Event | None] = []
        self._last_write: torch.cuda.Event | None = None
        self._progress_s = time.monotonic()
        self._error: BaseException | None = None
        self._is_abandoned = False
        self.is_refilled = False
        self._has_ended = False

    # ---- the loader's side ----

    @contextmanager
    def writing(self) -> Iterator[bool]:
        """Held while a layer is written to the pool; False if the batch was abandoned: then do not write."""
        with self._pool_lock:
            try:
                yield not self._is_abandoned
            finally:
                # Also of a layer that fails half-way: some of its writes may be queued.
                self._last_write = self._event()

    def landed(self, times: LayerTimes) -> None:
        """The next layer is in the pool, or, on a GPU, its copies are queued on the current stream."""
        event = self._event()
        with self._changed:
            self.load_times.append(times)
            self._events.append(event)
            self._progress_s = time.monotonic()
            self._changed.notify_all()

    def _event(self) -> torch.cuda.Event | None:
        """Where the current stream is now, on a GPU."""
        if not self._is_cuda:
            return None
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record()
        return event

    def fail(self, error: BaseException) -> None:
        with self._changed:
            self._error = error
            self._changed.notify_all()

    def end(self) -> None:
        """The loader does nothing more for this batch."""
        with self._changed:
            self._has_ended = True
            self._changed.notify_all()

    # ---- the forward's side ----

    def wait_layer(self, layer: int) -> None:
        """Make the current stream wait for a layer; on a CPU the thread. Later calls for it return at once.

        Raises:
            LoadFailedError: the layer will not land.
        """
        if layer in self.wait_times or self._is_abandoned:
            return
        begin = self.clock.mark()
        event = self._wait_landed(layer)
        if event is not None:
            torch.cuda.current_stream().wait_event(event)
        self.wait_times[layer] = LayerTimes(begin, self.clock.mark())

    def _wait_landed(self, layer: int) -> torch.cuda.Event | None:
        with self._changed:
            while len(self._events) <= layer and self._error is None:
                left_s = self._progress_s + self._timeout_s - time.monotonic()
                if left_s <= 0:
                    raise LoadFailedError(f"no layer has landed for {self._timeout_s} s")
                self._changed.wait(left_s)
            if self._error is not None:
                raise LoadFailedError(f"loading failed: {self._error}") from self._error
            return self._events[layer]

    def wait_queued(self) -> None:
        """Wait, on the CPU, until every layer has landed or is queued. Raises LoadFailedError as above."""
        self._wait_landed(self.num_layers - 1)

    def abandon(self, *, is_refilled: bool) -> None:
        """Give the batch up. Waits for a write that is under way, not for one that is stuck before it.

        On a GPU the current stream waits for the writes that are queued.
        ``is_refilled``: whether the slots get their KV in another way.
        """
        with self._pool_lock, self._changed:
            self._is_abandoned = True
            self.is_refilled = is_refilled
            if self._last_write is not None:
                torch.cuda.current_stream().wait_event(self._last_write)
            self._changed.notify_all()

    @property
    def is_abandoned(self) -> bool:
        return self._is_abandoned

    def wait_end(self) -> bool:
        """Wait until nothing of this batch touches the pool; whether everything landed."""
        with self._changed:
            self._changed.wait_for(lambda: self._has_ended or self._is_abandoned)
            return self._error is None and not self._is_abandoned
