"""What it takes to read a block from the cluster."""

from __future__ import annotations

import secrets
import statistics
import threading
import time

from krul_backend.planner.costs import TierCost
from krul_backend.tiers.mooncake.epochs import ROOT
from krul_backend.tiers.mooncake.object_store import ObjectStore

_PROBE_NUM_BYTES = 4 << 20
_NUM_LATENCY_READS = 5
_LEARNING_RATE = 0.2
_LEAST_LEARNED_NUM_BYTES = 1 << 18
# Of a slow network, for the time before anything was measured.
_UNMEASURED = TierCost(latency_s=5e-3, byte_s=1e-8)


class ClusterCost:
    """``TierCost`` of the cluster: measured once, then corrected by what reads of blocks took. Thread-safe.

    The probe may lie in this host's own part of the cluster and then read faster than from another host;
    what real reads take moves the numbers to where the segments lie.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._cost = _UNMEASURED

    @property
    def current(self) -> TierCost:
        with self._lock:
            return self._cost

    def measure(self, store: ObjectStore) -> None:
        """Put two objects, get them, remove them. Raises ``ObjectStoreError``."""
        name = f"{ROOT}/probe/{secrets.token_hex(8)}"
        keys = [f"{name}/small", f"{name}/large"]
        store.put(keys[0], bytes(64))
        store.put(keys[1], bytes(_PROBE_NUM_BYTES))
        small_s = statistics.median(_seconds_to_get(store, keys[0]) for _ in range(_NUM_LATENCY_READS))
        large_s = _seconds_to_get(store, keys[1])
        store.remove(keys)
        with self._lock:
            self._cost = TierCost(small_s, max(large_s - small_s, 0.0) / _PROBE_NUM_BYTES)

    def learn(self, num_bytes: int, took_s: float) -> None:
        """Note the read of one block: a large one corrects the rate, a small one the latency."""
        with self._lock:
            latency_s, byte_s = self._cost.latency_s, self._cost.byte_s
            if num_bytes >= _LEAST_LEARNED_NUM_BYTES:
                seen_s = max(took_s - latency_s, 0.0) / num_bytes
                byte_s += _LEARNING_RATE * (seen_s - byte_s)
            else:
                latency_s += _LEARNING_RATE * (max(took_s - byte_s * num_bytes, 0.0) - latency_s)
            self._cost = TierCost(latency_s, byte_s)


def _seconds_to_get(store: ObjectStore, key: str) -> float:
    started_s = time.monotonic()
    store.get(key, _PROBE_NUM_BYTES)
    return time.monotonic() - started_s
