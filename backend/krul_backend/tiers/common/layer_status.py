"""Which layers of a segment have arrived from a lower tier: one byte per layer, in shared memory."""

from __future__ import annotations

import time

import numpy as np
import numpy.typing as npt

from krul_backend.errors import TierReadError

PENDING, LANDED, FAILED = 0, 1, 2

_POLL_S = 0.0002


class LayerStatus:
    """Says which layers of a segment have landed in DRAM. One process writes the flags, all may read them.

    ``flags``: uint8 ``[L]`` inside the arena. A flag changes once, from ``PENDING``, after the layer's block
    was written. Memory ordering is not relied on: a reader that sees a flag too early finds a wrong checksum.
    """

    def __init__(self, flags: npt.NDArray[np.uint8]) -> None:
        self._flags = flags

    @property
    def flags(self) -> npt.NDArray[np.uint8]:
        return self._flags

    def has_landed(self, layer: int) -> bool:
        return bool(self._flags[layer] == LANDED)

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until a layer has landed.

        Raises:
            TierReadError: it cannot be read, or did not land in time.
        """
        deadline_s = time.monotonic() + timeout_s
        while (flag := self._flags[layer]) == PENDING:
            if time.monotonic() >= deadline_s:
                raise TierReadError(f"layer {layer} did not arrive from its tier within {timeout_s:g} s")
            time.sleep(_POLL_S)
        if flag != LANDED:
            raise TierReadError(f"layer {layer} could not be read from its tier")
