"""How long a lookup takes: over the socket by pages, in the store by segments."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

from benchmarks.tiers.configuration import Configuration, TiersBenchmarkError
from benchmarks.tiers.segments import make_manifest, make_model, page_keys, token_ids
from benchmarks.tiers.timing import row, seconds_of
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.server.serve import tune_garbage_collection
from krul_backend.segment import ModelIdentity
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease, block_checksums
from krul_backend.tiers.dram.host_store import HostStore

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
