"""Where copies between device and host run: a side stream on a GPU, the worker thread itself on a CPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch


@contextmanager
def copy_threads(device: torch.device) -> Iterator[None]:
    """As many threads for tensor operations as a copy may use: on a CPU the forward owns the cores."""
    before = torch.get_num_threads()
    if device.type == "cpu":
        torch.set_num_threads(1)
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
        if self._stream is None:
            # The forward owns the cores; a copy that spread over them would slow it down.
            torch.set_num_threads(1)
        else:
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
