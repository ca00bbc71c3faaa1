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

    def __init__(self, buffer: npt.NDArray[np.uint8], device: torch.device) -> None:
        self._address: int | None = None
        if device.type != "cuda":
            return
        start_s = time.perf_counter()
        with torch.cuda.device(device):
            status = _runtime().cudaHostRegister(buffer.ctypes.data, buffer.nbytes, 0)
        if int(status) != 0:
            logger.warning(
                "krul: host memory could not be pinned (CUDA error %d): copies will be slower", int(status)
            )
            return
        self._address = buffer.ctypes.data
        logger.info("krul: pinned %s in %.1f s", format_bytes(buffer.nbytes), time.perf_counter() - start_s)

    def close(self) -> None:
        """Call it before the arena is unmapped, and when no copy is under way."""
        if self._address is not None:
            _runtime().cudaHostUnregister(self._address)
            self._address = None


def _runtime() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]
