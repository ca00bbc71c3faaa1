"""Small conversations for the store's tests: page keys, token ids, manifests and bytes."""

from __future__ import annotations

import time
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Block, Lease, Reservation, block_checksums
from krul_backend.tiers.common.lower_tier import LowerTier, TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.dram.host_store import HostStore

PAGE_SIZE = 4


class Clock:
    """Stands still until a test moves it."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def make_model(name: str = "tiny", num_layers: int = 2, page_size: int = PAGE_SIZE) -> ModelIdentity:
    return ModelIdentity(
        name=name,
        config_digest="0" * 8,
        dtype="bfloat16",
        num_layers=num_layers,
        num_kv_heads=2,
        k_head_dim=8,
        v_head_dim=8,
        page_size=page_size,
        tp_rank=0,
        tp_size=1,
    )


def page_keys(conversation: str, first: int, end: int) -> tuple[str, ...]:
    return tuple(f"{conversation}/{page}" for page in range(first, end))


def tokens_of(keys: Sequence[str], page_size: int = PAGE_SIZE) -> npt.NDArray[np.int64]:
    """Token ids that are a function of the key, as the engine's are a function of the chained hash."""
    pages = [np.arange(page_size) + zlib.crc32(key.encode()) % 100_000 for key in keys]
    return np.concatenate([np.zeros(0), *pages]).astype(np.int64)


def make_manifest(
    conversation: str,
    first: int,
    end: int,
    layer_num_bytes: tuple[int, ...],
    model: ModelIdentity | None = None,
    tenant: str = "",
    recompute_s: float = 0.0,
    range_bytes: int = 0,
) -> SegmentManifest:
    model = model if model is not None else make_model(num_layers=len(layer_num_bytes))
    keys = page_keys(conversation, first, end)
    return SegmentManifest(
        model=model,
        page_keys=keys,
        parent_key=f"{conversation}/{first - 1}" if first else None,
        start_token=first * model.page_size,
        token_ids=tokens_of(keys, model.page_size),
        codec="raw",
        layer_num_bytes=layer_num_bytes,
        tenant=tenant,
        recompute_s=recompute_s,
        range_bytes=range_bytes,
    )


def fill(reservation: Reservation, seed: int) -> tuple[bytes, ...]:
    """Write random bytes into every block; returns what was written."""
    rng = np.random.default_rng(seed)
    for block in reservation.blocks:
        block[:] = rng.integers(0, 256, block.nbytes, dtype=np.uint8)
    return tuple(block.tobytes() for block in reservation.blocks)


def commit_to(store: KVStore, reservation: Reservation, manifest: SegmentManifest) -> int:
    """Commit what the blocks hold by now."""
    return store.commit(reservation, manifest, block_checksums(reservation.blocks, manifest.range_bytes))


def put(
    store: KVStore,
    conversation: str,
    first: int,
    end: int,
    sizes: tuple[int, ...] = (100, 60),
    model: ModelIdentity | None = None,
    seed: int = 0,
    tenant: str = "",
    recompute_s: float = 0.0,
    *,
    is_fast_copy: bool = False,
    range_bytes: int = 0,
) -> tuple[int, tuple[bytes, ...]]:
    """Reserve, fill and commit one segment; returns its id and its bytes."""
    reservation = store.reserve(sizes, tenant, is_fast_copy=is_fast_copy)
    assert reservation is not None
    written = fill(reservation, seed)
    manifest = make_manifest(conversation, first, end, sizes, model, tenant, recompute_s, range_bytes)
    return commit_to(store, reservation, manifest), written


def read_tail(
    tier: LowerTier, run: PageRun[Any], blocks: Sequence[Block], landed: Callable[[int], None]
) -> None:
    """Let a tier read the ends of a run's blocks into ``blocks``; raises what the read fails with."""
    read = TailRead(run, blocks, landed, lambda error: None)
    tier.fetch([read])
    if read.error is not None:
        raise read.error


def lease_pages(
    store: KVStore, conversation: str, first: int, end: int, model: ModelIdentity | None = None
) -> Lease | None:
    model = model if model is not None else make_model()
    keys = page_keys(conversation, first, end)
    return store.lease(model, keys, tokens_of(keys, model.page_size))


def shorten_ranges(monkeypatch: pytest.MonkeyPatch, num_bytes: int = 16) -> None:
    """Let segments have ranges so short, as far as nothing else is said, that small blocks have many."""
    monkeypatch.setattr("krul_backend.segment.MIN_RANGE_BYTES", num_bytes)
    monkeypatch.setattr("krul_backend.segment._MAX_RANGES", 1 << 20)


def stored_ids(store: KVStore) -> list[int]:
    return [info.segment_id for info in store.list_segments()]


def offset_in(store: HostStore, block: npt.NDArray[np.uint8]) -> int:
    """Where in the arena a block lies."""
    return block.ctypes.data - store.buffer.ctypes.data


def flip_byte(store: HostStore, offset: int) -> None:
    """Damage one byte of the arena behind the store's back."""
    store.buffer[offset] ^= 0x10


def wait_until(condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
    """Wait for another thread to bring something about."""
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen"
        time.sleep(0.001)
