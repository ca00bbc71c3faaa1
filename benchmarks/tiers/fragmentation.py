"""How much of a full arena is free, but in pieces that the next segment does not fit into."""

from __future__ import annotations

import random
import statistics
from typing import Any

from benchmarks.tiers.configuration import Configuration, TiersBenchmarkError
from benchmarks.tiers.segments import make_manifest, make_model
from benchmarks.tiers.timing import percentile
from krul_backend.tiers.dram.host_store import HostStore

_SMALLEST_BYTES, _LARGEST_BYTES = 10_000, 8_000_000
_NUM_BLOCKS = 4


def fragmentation_row(configuration: Configuration) -> dict[str, Any]:
    """The share of bytes that were free, and did not help, each time that segments had to leave."""
    rng = random.Random(0)
    store = HostStore(configuration.churn_arena_bytes)
    model = make_model(_NUM_BLOCKS)
    largest = min(_LARGEST_BYTES, configuration.churn_arena_bytes // 32)
    shares: list[float] = []
    try:
        for number in range(configuration.churn):
            # Evenly on a logarithmic scale: small segments are as frequent as large ones.
            size = int(_SMALLEST_BYTES * (largest / _SMALLEST_BYTES) ** rng.random()) // _NUM_BLOCKS
            sizes = (size,) * _NUM_BLOCKS
            before = store.stats()
            reservation = store.reserve(sizes)
            if reservation is None:
                raise TiersBenchmarkError(f"an idle arena had no room for {sum(sizes)} bytes")
            # Nobody reads it.
            store.commit(reservation, make_manifest(model, number, 0, 1, sizes), (0,) * _NUM_BLOCKS)
            if store.stats().evicted_segments > before.evicted_segments:
                shares.append(before.free_bytes / before.capacity_bytes)
    finally:
        store.close()
    if not shares:
        raise TiersBenchmarkError(f"{configuration.churn} segments never filled the arena")
    return {
        "op": "fragmentation",
        "smallest_bytes": _SMALLEST_BYTES,
        "largest_bytes": largest,
        "arena_bytes": configuration.churn_arena_bytes,
        "n": len(shares),
        "free_share_mean": statistics.mean(shares),
        "free_share_p99": percentile(shares, 0.99),
        "samples": [round(share, 5) for share in shares],
    }
