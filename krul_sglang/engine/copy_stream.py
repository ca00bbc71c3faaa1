"""Where copies between device and host run: a side stream on a GPU, the worker thread itself on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


def limit_copy_threads(device: torch.device) -> None:
    """In the calling thread: on a CPU the forward owns the cores, and a copy gets one."""
    if device.type == "cpu":
        torch.set_num_threads(1)


@contextmanager
def copy_threads(device: torch.device) -> Iterator[None]:
    """``limit_copy_threads`` until the block is left."""
    before = torch.get_num_threads()
    limit_copy_threads(device)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class CopyStream:
    """One stream, used by one worker thread."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = (
            torch.cuda.Stream(device) if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        )

    def bind_thread(self) -> None:
        """Call once in the worker thread, before its first copy."""
        limit_copy_threads(self._device)
        if self._stream is not None:
            torch.cuda.set_device(self._device)

    @contextmanager
    def active(self, ready: Sequence[Any] = ()) -> Iterator[None]:
        """Copies inside run after the events ``ready``; they have ended when the block is left."""
        if self._stream is None:
            yield
            return
        for event in ready:
            self._stream.wait_event(event)
        try:
            with torch.cuda.stream(self._stream):
                yield
        finally:
            self._stream.synchronize()

    def synchronize(self) -> None:
        """Wait for the copies queued so far."""
        if self._stream is not None:
            self._stream.synchronize()
