"""Lets loads of a server under test fail, or stop."""

from __future__ import annotations

import time

STALL_S = 6.0
"""Longer than any load is waited for in tests, unless the server has a ``load_timeout``."""


class FaultyLoads:
    """Lets every second load fail, or stop for longer than its deadline, at changing layers.

    Ranks take turns: what fails on one of them works on the others. ``fault``: ``load-error`` or
    ``load-stall``. ``patience_s``: of the loader.
    """

    def __init__(
        self, fault: str, rank: int, num_ranks: int, num_layers: int, patience_s: float | None = None
    ) -> None:
        assert fault in ("load-error", "load-stall"), fault
        self._fault = fault
        self._stall_s = STALL_S if patience_s is None else 3 * patience_s
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_layers = num_layers

    def before_layer(self, index: int, layer: int) -> None:
        """Raise or wait at one layer of batch ``index``; see the class."""
        number, is_spared = divmod(index, 2)
        if is_spared or number % self._num_ranks != self._rank or layer != number % self._num_layers:
            return
        if self._fault == "load-error":
            raise OSError(f"injected at layer {layer} of load {index}")
        time.sleep(self._stall_s)
