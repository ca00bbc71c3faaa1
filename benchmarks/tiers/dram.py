"""The memory of a daemon: bytes against memcpy, lookups, and what is free but in too small pieces."""

from __future__ import annotations

import random
import statistics
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.tiers.configuration import Configuration, TiersBenchmarkError
from benchmarks.tiers.segments import (
    Bytes,
    Operations,
    copy_blocks,
    make_manifest,
    make_model,
    page_keys,
    token_ids,
)
from benchmarks.tiers.timing import byte_row, interleaved, percentile, row, seconds_of
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.server.serve import tune_garbage_collection
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease, block_checksum, block_checksums
from krul_backend.tiers.common.record import no_checksums
from krul_backend.tiers.dram.host_store import HostStore

_RING_BYTES = 256 << 20
_PAGE_BYTES = 4096


def dram_rows(configuration: Configuration, runtime_dir: Path) -> list[dict[str, Any]]:
    """Each size as one block and as a whole segment. Raises TiersBenchmarkError for wrong bytes."""
    rows: list[dict[str, Any]] = []
    for block_bytes in configuration.block_bytes:
        for num_blocks in sorted({1, configuration.num_blocks(block_bytes)}):
            with _client(runtime_dir, num_blocks) as store:
                rows += _DramOperations(store, block_bytes, num_blocks).rows(configuration.repeats)
    return rows


@contextmanager
def _client(runtime_dir: Path, num_layers: int) -> Iterator[DaemonStore]:
    """A client whose view of the arena is mapped page by page before anything is measured."""

    def touch(arena: Bytes) -> None:
        # The daemon is this run's alone, and empty. Pages only read would fault at their first write.
        arena[::_PAGE_BYTES] = 0

    store = DaemonStore(runtime_dir, model=make_model(num_layers), request_timeout_s=10.0, on_arena=touch)
    try:
        yield store
    finally:
        store.clear()
        store.close()


class _DramOperations(Operations):
    """Segments in the arena of a daemon."""

    def __init__(self, store: DaemonStore, block_bytes: int, num_blocks: int) -> None:
        super().__init__(block_bytes, num_blocks, _RING_BYTES)
        self._store = store
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
            byte_row(op, seconds, block_bytes=self.block_bytes, num_blocks=self.num_blocks, memcpy_s=memcpy_s)
            for op, seconds in taken.items()
        ]

    def write(self) -> float:
        """Reserve, copy once, take the checksums, commit."""
        number, manifest = self.next_segment()

        def store() -> None:
            reservation = self._store.reserve(manifest.layer_num_bytes)
            if reservation is None:
                raise TiersBenchmarkError("the arena had no room for a segment")
            copy_blocks(self.source.blocks, reservation.blocks)
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
        target = self.ring.take()

        def load() -> None:
            lease = self._lease(number)
            part = lease.slices[0]
            for block, checksum, to in zip(part.blocks, part.checksums, target, strict=True):
                if verifies and block_checksum(block, part.header.range_bytes) != checksum:
                    raise TiersBenchmarkError(f"segment {number} has a wrong checksum")
                to[:] = block
            self._store.release(lease)

        seconds = seconds_of(load)
        self.source.check(number, target, "dram")
        return seconds

    def _lease(self, number: int) -> Lease:
        lease = self._store.lease(self.model, page_keys(number, 0, 1), token_ids(0, 1))
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
            manifest = make_manifest(model, number, 0, 1, sizes)
            store.commit(reservation, manifest, no_checksums(manifest))
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


NUM_LAYERS = 32
TURN_PAGES = 64
"""A turn of 1,024 tokens."""
_BLOCK_BYTES = 64
_INDEX_TURNS, _INDEX_TURN_PAGES = 10, 4


def lookup_rows(configuration: Configuration, runtime_dir: Path) -> list[dict[str, Any]]:
    """Leases of a conversation's first pages, from a daemon process."""
    model = make_model(NUM_LAYERS)
    store = DaemonStore(runtime_dir, model=model, request_timeout_s=10.0)
    try:
        longest = -(-max(configuration.lookup_pages) // TURN_PAGES) * TURN_PAGES
        _store_turns(store, model, 0, longest // TURN_PAGES, TURN_PAGES)
        return [
            row(
                "lookup",
                _lookups(store, model, [0], num_pages, configuration.lookup_repeats),
                num_pages=num_pages,
                num_segments=-(-num_pages // TURN_PAGES),
            )
            for num_pages in configuration.lookup_pages
        ]
    finally:
        store.clear()
        store.close()


def index_rows(configuration: Configuration) -> list[dict[str, Any]]:
    """Leases of whole conversations, chosen at random, in a store of many segments; no socket between."""
    rows = []
    for num_segments in configuration.index_segments:
        num_conversations = -(-num_segments // _INDEX_TURNS)
        store = HostStore(num_conversations * _INDEX_TURNS * _BLOCK_BYTES * 2)
        model = make_model(1)
        try:
            for conversation in range(num_conversations):
                _store_turns(store, model, conversation, _INDEX_TURNS, _INDEX_TURN_PAGES)
            # As in a daemon.
            tune_garbage_collection()
            rng = random.Random(0)
            chosen = [rng.randrange(num_conversations) for _ in range(configuration.index_repeats)]
            num_pages = _INDEX_TURNS * _INDEX_TURN_PAGES
            seconds = _lookups(store, model, chosen, num_pages, configuration.index_repeats)
            num_stored = store.stats().num_segments
        finally:
            store.close()
        if num_stored != num_conversations * _INDEX_TURNS:
            raise TiersBenchmarkError(f"an index of {num_stored} segments instead of {num_segments}")
        rows.append(row("index-lookup", seconds, num_pages=num_pages, num_segments=num_stored))
    return rows


def _store_turns(
    store: KVStore | HostStore, model: ModelIdentity, conversation: int, num_turns: int, turn_pages: int
) -> None:
    sizes = (_BLOCK_BYTES,) * model.num_layers
    for turn in range(num_turns):
        reservation = store.reserve(sizes)
        if reservation is None:
            raise TiersBenchmarkError("the arena had no room for a segment")
        first = turn * turn_pages
        manifest = make_manifest(model, conversation, first, first + turn_pages, sizes)
        store.commit(reservation, manifest, block_checksums(reservation.blocks))


def _lookups(
    store: KVStore | HostStore, model: ModelIdentity, conversations: list[int], num_pages: int, repeats: int
) -> list[float]:
    tokens = token_ids(0, num_pages)
    seconds = []
    # The first fifth warms up.
    for turn in range(-(repeats // 5), repeats):
        keys = page_keys(conversations[turn % len(conversations)], 0, num_pages)
        leases: list[Lease | None] = []
        taken = seconds_of(lambda keys=keys, leases=leases: leases.append(store.lease(model, keys, tokens)))  # type: ignore[misc]
        lease = leases[0]
        if lease is None or lease.num_pages != num_pages:
            raise TiersBenchmarkError(f"a lookup of {num_pages} pages found {lease and lease.num_pages}")
        store.release(lease)
        if turn >= 0:
            seconds.append(taken)
    return seconds
