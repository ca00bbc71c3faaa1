"""The connection of a tier to its store of objects: the cost of reading, and calls that may take too long."""

from __future__ import annotations

import logging
import queue
import secrets
import statistics
import threading
import time
from collections.abc import Callable, Sequence

from krul_backend.planner import TierCost
from krul_backend.tiers.common.tier_health import MeasuredCost, Suspension
from krul_backend.tiers.objects.object_client import ObjectClient, ObjectStoreError
from krul_backend.tiers.objects.stored_object import ROOT

logger = logging.getLogger(__name__)

_CLOSE_TIMEOUT_S = 5.0
_PROBE_NUM_BYTES = 4 << 20
_NUM_LATENCY_READS = 5
_LEAST_RATE_NUM_BYTES = 1 << 18
"""Smaller reads tell of the latency, larger ones of the rate."""

UNMEASURED = TierCost(latency_s=5e-3, byte_s=1e-8)
"""The cost of a slow network."""


class ObjectStoreConnection:
    """Connects to the object store when it is first needed, and measures its speed then. Thread-safe.

    Once connected the client reconnects by itself; until then each call of ``store`` tries again.
    """

    def __init__(
        self, place: str, connect: Callable[[], ObjectClient], suspension: Suspension, cost: MeasuredCost
    ) -> None:
        self._place = place
        self._connect = connect
        self._suspension = suspension
        self._cost = cost
        self._lock = threading.Lock()
        self._store: ObjectClient | None = None
        self._is_closed = False

    def store(self) -> ObjectClient:
        """The connected store. May take long the first time.

        Raises:
            ObjectStoreError: suspended, closed, or the object store cannot be joined.
        """
        if self._suspension.is_active:
            raise ObjectStoreError(f"the tier in the {self._place} is suspended")
        with self._lock:
            if self._is_closed:
                raise ObjectStoreError(f"the tier in the {self._place} was closed")
            if self._store is None:
                self._store = self._connect()
                logger.info("joined the %s", self._place)
                try:
                    self._cost.set(_measure(self._store))
                except ObjectStoreError as error:
                    logger.warning("the speed of the %s could not be measured: %s", self._place, error)
            return self._store

    def close(self) -> None:
        """Leave the object store. Gives up after some seconds: a client without its master can take long."""
        thread = threading.Thread(target=self._leave, name="krul-objects-close", daemon=True)
        thread.start()
        thread.join(_CLOSE_TIMEOUT_S)
        if thread.is_alive():
            logger.warning("the client of the %s does not end: left to itself", self._place)

    def _leave(self) -> None:
        with self._lock:
            self._is_closed = True
            store, self._store = self._store, None
        if store is not None:
            store.close()


def seen_cost(cost: TierCost, sizes: Sequence[int], took_s: float) -> TierCost:
    """The cost that a read of blocks shows: large ones tell the rate, small ones the latency of each.

    The probe of ``ObjectStoreConnection`` may lie in this host's own part of the object store, and
    then reads faster than blocks on other hosts do. These reads move the cost to what is true for them.
    """
    num_bytes, num_blocks = sum(sizes), len(sizes)
    if num_bytes >= _LEAST_RATE_NUM_BYTES * num_blocks:
        return TierCost(cost.latency_s, max(took_s - cost.latency_s * num_blocks, 0.0) / num_bytes)
    return TierCost(max(took_s - cost.byte_s * num_bytes, 0.0) / num_blocks, cost.byte_s)


def _measure(store: ObjectClient) -> TierCost:
    """Put two objects, get them, remove them. Raises ``ObjectStoreError``."""
    name = f"{ROOT}/probe/{secrets.token_hex(8)}"
    keys = [f"{name}/small", f"{name}/large"]
    store.put(keys[0], bytes(64))
    store.put(keys[1], bytes(_PROBE_NUM_BYTES))
    small_s = statistics.median(_seconds_to_get(store, keys[0]) for _ in range(_NUM_LATENCY_READS))
    large_s = _seconds_to_get(store, keys[1])
    store.remove(keys)
    return TierCost(small_s, max(large_s - small_s, 0.0) / _PROBE_NUM_BYTES)


def _seconds_to_get(store: ObjectClient, key: str) -> float:
    started_s = time.monotonic()
    store.get(key, _PROBE_NUM_BYTES)
    return time.monotonic() - started_s


class TimedCalls:
    """Runs calls on a few threads of its own; a caller waits for its call for a limited time.

    A late call goes on. ``is_late`` is true while there is one: a new call would likely be late, too.

    Args:
        max_waiting: how many calls of ``begin`` may wait for a thread.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int = 1024) -> None:
        self._max_waiting = max_waiting
        self._lock = threading.Lock()
        self._num_late = 0
        self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._work, name=f"{name}-{i}", daemon=True) for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    @property
    def is_late(self) -> bool:
        with self._lock:
            return self._num_late > 0

    def run(self, function: Callable[[], None], timeout_s: float) -> bool:
        """Run a call; False if it did not end in time. It should raise nothing; an exception is logged."""
        call = _Call(function)
        self._calls.put(call)
        if call.ended.wait(timeout_s):
            return True
        with self._lock:
            if call.ended.is_set():
                return True
            call.is_late = True
            self._num_late += 1
        return False

    def begin(self, function: Callable[[], None]) -> bool:
        """Run a call that nobody waits for; False if too many wait for a thread."""
        if self._calls.qsize() >= self._max_waiting:
            return False
        self._calls.put(_Call(function))
        return True

    def close(self) -> None:
        """End the threads after the calls that were begun. Does not wait for them."""
        for _ in self._threads:
            self._calls.put(None)

    def _work(self) -> None:
        while (call := self._calls.get()) is not None:
            try:
                call.function()
            except Exception:
                logger.exception("a call of a tier of objects failed")
            with self._lock:
                call.ended.set()
                self._num_late -= call.is_late


class _Call:
    def __init__(self, function: Callable[[], None]) -> None:
        self.function = function
        self.ended = threading.Event()
        self.is_late = False
