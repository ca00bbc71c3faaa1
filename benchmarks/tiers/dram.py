"""Writing to and reading from a daemon's arena, against memcpy of the same blocks."""

from __future__ import annotations

import itertools
import random
import statistics
from collections import deque
from pathlib import Path
from typing import Any

from benchmarks.tiers.configuration import Configuration, TiersBenchmarkError
from benchmarks.tiers.segments import (
    Bytes,
    Ring,
    Source,
    copy_blocks,
    make_manifest,
    make_model,
    page_keys,
    token_ids,
)
from benchmarks.tiers.timing import byte_row, interleaved, percentile, seconds_of
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.tiers.common.hashing import block_checksum, block_checksums
from krul_backend.tiers.common.interface import Lease
from krul_backend.tiers.dram.host_store import HostStore

_RING_BYTES = 256 << 20
_PAGE_BYTES = 4096


def dram_rows(configuration: Configuration, runtime_dir: Path) -> list[dict[str, Any]]:
    """Each size as one block and as a whole segment. Raises TiersBenchmarkError for wrong bytes."""
    rows: list[dict[str, Any]] = []
    for block_bytes in configuration.block_bytes:
        for num_blocks in sorted({1, configuration.num_blocks(block_bytes)}):
            with _Client(runtime_dir, num_blocks) as store:
                rows += _Operations(store, block_bytes, num_blocks).rows(configuration.repeats)
    return rows


class _Client:
    """A client whose view of the arena is mapped page by page before anything is measured."""

    def __init__(self, runtime_dir: Path, num_layers: int) -> None:
        self._store = DaemonStore(
            runtime_dir,
            model=make_model(num_layers),
            request_timeout_s=10.0,
            # The daemon is this run's alone, and empty. Pages only read would fault at their first write.
            on_arena=_touch,
        )

    def __enter__(self) -> DaemonStore:
        return self._store

    def __exit__(self, *_: object) -> None:
        self._store.clear()
        self._store.close()


def _touch(arena: Bytes) -> None:
    arena[::_PAGE_BYTES] = 0


class _Operations:
    """What is timed. Each operation returns its seconds; sources are filled and bytes compared outside."""

    def __init__(self, store: DaemonStore, block_bytes: int, num_blocks: int) -> None:
        self._store = store
        self._model = make_model(num_blocks)
        self._block_bytes, self._num_blocks = block_bytes, num_blocks
        self._source = Source(block_bytes, num_blocks)
        self._ring = Ring(block_bytes, num_blocks, _RING_BYTES)
        self._numbers = itertools.count()
        # Read again only after others: the oldest of the last few.
        self._stored: deque[int] = deque(maxlen=3)

    def rows(self, repeats: int) -> list[dict[str, Any]]:
        taken = interleaved(
            {
                "dram-write": self.write,
                "memcpy": self.memcpy,
                "dram-read": self.read,
                "dram-verify-read": self.verify_read,
            },
            repeats,
        )
        memcpy_s = taken.pop("memcpy")
        return [
            byte_row(
                op, seconds, block_bytes=self._block_bytes, num_blocks=self._num_blocks, memcpy_s=memcpy_s
            )
            for op, seconds in taken.items()
        ]

    def memcpy(self) -> float:
        target = self._ring.take()
        return seconds_of(lambda: copy_blocks(self._source.blocks, target))

    def write(self) -> float:
        """Reserve, copy once, take the checksums, commit."""
        number = next(self._numbers)
        self._source.stamp(number)
        sizes = (self._block_bytes,) * self._num_blocks
        manifest = make_manifest(self._model, number, 0, 1, sizes)

        def store() -> None:
            reservation = self._store.reserve(sizes)
            if reservation is None:
                raise TiersBenchmarkError("the arena had no room for a segment")
            copy_blocks(self._source.blocks, reservation.blocks)
            self._store.commit(reservation, manifest, block_checksums(reservation.blocks))

        seconds = seconds_of(store)
        self._stored.append(number)
        return seconds

    def read(self) -> float:
        """Lease, copy out, release."""
        return self._read(verifies=False)

    def verify_read(self) -> float:
        """As an engine does: each block's checksum is compared before the block is copied."""
        return self._read(verifies=True)

    def _read(self, verifies: bool) -> float:
        number = self._stored[0]
        target = self._ring.take()

        def load() -> None:
            lease = self._lease(number)
            part = lease.slices[0]
            for block, checksum, to in zip(part.blocks, part.checksums, target, strict=True):
                if verifies and block_checksum(block) != checksum:
                    raise TiersBenchmarkError(f"segment {number} has a wrong checksum")
                to[:] = block
            self._store.release(lease)

        seconds = seconds_of(load)
        self._source.check(number, target, "dram")
        return seconds

    def _lease(self, number: int) -> Lease:
        lease = self._store.lease(self._model, page_keys(number, 0, 1), token_ids(0, 1))
        if lease is None:
            raise TiersBenchmarkError(f"segment {number} was not found")
        return lease


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
