"""Reads segments of lower tiers into DRAM, in threads of its own for each tier."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor

from krul_backend.errors import StoreClosedError, TierReadError
from krul_backend.tiers.common.lower_tier import LowerTier, TierRun
from krul_backend.tiers.dram.arrivals import Arrival

logger = logging.getLogger(__name__)

NUM_THREADS = 4
"""Segments of one tier that are read at once; a tier reads several pieces of each at a time itself."""


class TierReader:
    """Takes over an arrival and the hold on what it is read from, and ends both whatever happens.

    No tier waits for another one's reads: a cluster that does not answer holds up its own threads alone.

    Args:
        tiers: those that will be read.
        arrived: told of each segment that has arrived whole, in the thread that read it.
    """

    def __init__(self, tiers: Sequence[LowerTier], arrived: Callable[[Arrival, LowerTier], None]) -> None:
        self._arrived = arrived
        self._pools = {tier: ThreadPoolExecutor(NUM_THREADS, f"krul-read-{tier.name}") for tier in tiers}
        self._is_closing = threading.Event()
        self._lock = threading.Lock()
        self.num_fetched = 0
        self.num_failed = 0

    def start(self, tier: LowerTier, run: TierRun, arrival: Arrival) -> None:
        """Read ``run``'s segment into ``arrival``. Returns at once.

        Raises:
            StoreClosedError: the reader is closed. The arrival has failed; the run is still held.
        """
        try:
            self._pools[tier].submit(self._read, tier, run, arrival)
        except RuntimeError as error:
            arrival.fail()
            raise StoreClosedError("the KV store was closed") from error

    def run_later(self, tier: LowerTier, call: Callable[[], None]) -> None:
        """Run something short about a tier in one of its threads; never, once closed."""
        try:
            self._pools[tier].submit(call)
        except RuntimeError:
            logger.debug("closed: a note about a lower tier is dropped")

    def close(self) -> None:
        """End the reads that run, and fail those that wait."""
        self._is_closing.set()
        for pool in self._pools.values():
            pool.shutdown(wait=True)

    def _read(self, tier: LowerTier, run: TierRun, arrival: Arrival) -> None:
        has_arrived = False
        try:
            has_arrived = self._fill(tier, run, arrival)
        finally:
            with self._lock:
                self.num_fetched += has_arrived
                self.num_failed += not has_arrived

    def _fill(self, tier: LowerTier, run: TierRun, arrival: Arrival) -> bool:
        """Read, and end the arrival and the hold; whether the segment has arrived."""
        num_tokens = run.manifest.num_tokens
        try:
            if self._is_closing.is_set():
                return False
            tier.fetch(run, arrival.blocks, arrival.landed)
            arrival.finish()
        except TierReadError as error:
            logger.info("a segment of %d tokens did not come from %s: %s", num_tokens, tier.name, error)
            return False
        except Exception:
            logger.exception("reading a segment of %d tokens from %s failed", num_tokens, tier.name)
            return False
        finally:
            try:
                arrival.fail()
            finally:
                tier.release(run)
        self._arrived(arrival, tier)
        return True
