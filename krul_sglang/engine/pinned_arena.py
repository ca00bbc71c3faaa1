"""The arena as memory that a GPU copies from and to by itself."""

from __future__ import annotations

import logging
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from krul_backend.memory import format_bytes

logger = logging.getLogger(__name__)


class PinnedArena:
    """Registers an arena with CUDA, so that copies neither block their thread nor go through a buffer.

    All of the arena is backed with memory from then on, and cannot be swapped. Where that is refused (a limit
    on locked memory, say), copies work as before, only slower.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # Kept, so that nothing unmaps it while it is registered.
        self._buffer: npt.NDArray[np.uint8] | None = None

    def register(self, buffer: npt.NDArray[np.uint8]) -> None:
        """Take this mapping instead of the one before: that of a daemon that is gone."""
        if self._device.type != "cuda":
            return
        self.close()
        start_s = time.perf_counter()
        with torch.cuda.device(self._device):
            status = _runtime().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)
        if int(status) != 0:
            logger.warning(
                "krul: host memory could not be pinned (CUDA error %d): copies will be slower", int(status)
            )
            return
        self._buffer = buffer
        logger.info("krul: pinned %s in %.1f s", format_bytes(buffer.nbytes), time.perf_counter() - start_s)

    def close(self) -> None:
        """The arena may be unmapped afterwards. Waits for the copies that are under way."""
        if self._buffer is not None:
            with torch.cuda.device(self._device):
                torch.cuda.synchronize()
                _runtime().cudaHostUnregister(self._buffer.ctypes.data)
            self._buffer = None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
