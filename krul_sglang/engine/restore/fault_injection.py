"""Faults on purpose, so that a deployment can see what they cost it."""

from __future__ import annotations

import logging
import time

from krul_sglang.config import KrulConfig

logger = logging.getLogger(__name__)


class FaultInjection:
    """Lets every second load fail, or stop for longer than its deadline, at changing layers.

    Ranks take turns: what fails on one of them works on the others.
    """

    def __init__(self, config: KrulConfig, rank: int, num_ranks: int, num_layers: int) -> None:
        self._fault = config.fault_injection
        self._stall_s = 3 * config.load_timeout
        self._rank = rank
        self._num_ranks = num_ranks
        self._num_layers = num_layers
        if self._fault != "none":
            logger.warning("krul: faults are injected on purpose (fault_injection = %r)", self._fault)

    def before_layer(self, index: int, layer: int) -> None:
        """Raises or waits at one layer of batch ``index``; see the class."""
        number, is_spared = divmod(index, 2)
        if is_spared or number % self._num_ranks != self._rank or layer != number % self._num_layers:
            return
        if self._fault == "load-error":
            raise OSError(f"injected at layer {layer} of load {index}")
        if self._fault == "load-stall":
            time.sleep(self._stall_s)
