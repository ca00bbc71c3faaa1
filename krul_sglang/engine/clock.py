"""Moments in a stream of work: wall time on a CPU, events of the current stream on a GPU."""

from __future__ import annotations

import time
from collections.abc import Callable

import torch

Mark = Callable[[], float | None]
"""Asked later: seconds since the clock was made; None while the GPU has not come by yet."""


class StreamClock:
    """Marks of several streams on one time axis. Marking never waits for the device."""

    def __init__(self, device: torch.device) -> None:
        self._is_cuda = device.type == "cuda"
        self._start_s = time.perf_counter()
        self._start_event = self._event() if self._is_cuda else None

    def mark(self) -> Mark:
        """Now on a CPU; where the current stream is now, on a GPU."""
        if self._start_event is None:
            now_s = time.perf_counter() - self._start_s
            return lambda: now_s
        start, event = self._start_event, self._event()
        return lambda: start.elapsed_time(event) / 1000 if event.query() else None  # type: ignore[no-untyped-call]

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event
