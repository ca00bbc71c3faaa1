"""Tails of leased segments into the pool: the right rows, nothing else, and no byte more than needed."""

from __future__ import annotations

from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec import unit_restore
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.unit_restore import MAX_KEPT_BYTES, UnitRestorer
from krul_backend.errors import CodecError
from krul_backend.tiers.common.interface import Block, Lease
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments
from krul_sglang.engine.restore.tail_groups import TailGroups
from tests.support.engine_builders import TensorPool, check_tails, make_store, read_tails
from tests.support.segment_builders import (
    BOUNDS,
    CODEC,
    DEVICE_TOKENS,
    END,
    GROUP,
    KINDS,
    MODEL,
    NUM_LAYERS,
    PAGE_SIZE,
    SHAPE,
    Heads,
    in_ranges,
    lease_of,
    store_in,
    stored,
    whole_segments,
)

kinds = st.sampled_from(list(KINDS))


@cache
def whole_decode(kind: str) -> tuple[LayerKV, ...]:
    """Every layer of the conversation, each segment decoded at once from whole blocks."""
    parts: list[list[LayerKV]] = [[] for _ in range(NUM_LAYERS)]
    for manifest, blocks in whole_segments(kind):
        num_tokens = manifest.num_tokens
        decoder = CODEC.open(manifest.codec_params, start_token=manifest.start_token, num_tokens=num_tokens)
        for layer in range(NUM_LAYERS):
            parts[layer].append(decoder.decode(layer, dict(enumerate(blocks)), 0, num_tokens))
    return tuple(
        LayerKV(torch.cat([kv.k for kv in of_layer]), torch.cat([kv.v for kv in of_layer]))
        for of_layer in parts
    )


def descending(heads: list[int]) -> Heads:
    return tuple(PAGE_SIZE * pages for pages in sorted(heads, reverse=True))


heads_strategy = st.lists(
    st.integers(DEVICE_TOKENS // PAGE_SIZE, END // PAGE_SIZE), min_size=NUM_LAYERS, max_size=NUM_LAYERS
).map(descending)


def read_all(
    lease: Lease,
    readers: list[SegmentReader],
    head_ends: Heads,
    slots: torch.Tensor,
    pool: TensorPool,
    kept_bytes: int = MAX_KEPT_BYTES,
) -> None:
    """Reads as the loader does, and checks that no more than ``kept_bytes`` stay from layer to layer."""

    def check_kept(tails: TailGroups) -> None:
        assert sum(block.nbytes for block in restorer_of(tails)._on_device.values()) <= kept_bytes

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(unit_restore, "MAX_KEPT_BYTES", kept_bytes)
        read_tails(lease, readers, head_ends, slots, pool, check_kept)


def restorer_of(tails: TailGroups) -> UnitRestorer:
    """The one that restores all segments, which are stored unit by unit."""
    ((restorer, _),) = tails._restorers
    assert isinstance(restorer, UnitRestorer)
    return restorer


def tail_num_bytes(reader: SegmentReader, head_ends: Heads) -> int:
    """Bytes of a reader's blocks from the group on that the neediest layer needs, by the codec's layout."""
    header, decoder = reader.source.header, reader.decoder
    num_bytes = 0
    for source in range(NUM_LAYERS):
        firsts = [
            max(head_ends[layer], reader.first_token)
            for layer in range(NUM_LAYERS)
            if source in decoder.sources(layer) and head_ends[layer] < reader.end_token
        ]
        if firsts:
            head_len = min(firsts) - header.start_token
            kept = [header.end_token] * NUM_LAYERS
            kept[source] = header.start_token + head_len - head_len % GROUP
            num_bytes += decoder.kept_num_bytes(kept)[source]
    return num_bytes


def check_restored(
    kind: str, before: list[LayerKV], pool: TensorPool, slots: torch.Tensor, head_ends: Heads
) -> None:
    check_tails(whole_decode(kind), DEVICE_TOKENS, head_ends, slots, before, pool)


@settings(max_examples=40)
@given(
    kind=kinds,
    head_ends=heads_strategy,
    num_missing=st.integers(0, 4),
    seed=st.integers(0, 99),
    kept_bytes=st.sampled_from([0, 1000, MAX_KEPT_BYTES]),
)
def test_tails_of_any_heads_are_read_exactly(
    kind: str, head_ends: Heads, num_missing: int, seed: int, kept_bytes: int
) -> None:
    """``num_missing`` of the leased pages are not wanted: ranks may agree on less.

    Blocks for which there is no room on the device until the other layer of their pair are read twice.
    """
    num_tokens = END - DEVICE_TOKENS - num_missing * PAGE_SIZE
    head_ends = tuple(min(end, DEVICE_TOKENS + num_tokens) for end in head_ends)
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    lease = lease_of(whole_segments(kind), DEVICE_TOKENS)
    readers = open_segments(lease, CODEC, num_tokens)
    read_all(lease, readers, head_ends, slots, pool, kept_bytes)
    check_restored(kind, before, pool, slots, head_ends)
    for reader in readers:
        once_bytes = tail_num_bytes(reader, head_ends)
        assert once_bytes <= reader.num_bytes <= 2 * once_bytes
        assert kept_bytes < MAX_KEPT_BYTES or reader.num_bytes == once_bytes


@settings(max_examples=40)
@given(kind=kinds, kept_heads=heads_strategy, head_ends=heads_strategy)
def test_tails_are_read_from_segments_that_lack_their_first_tokens(
    kind: str, kept_heads: Heads, head_ends: Heads
) -> None:
    head_ends = tuple(map(max, head_ends, kept_heads))
    segments = tuple(stored(kind, start, end, kept_heads) for start, end in pairwise(BOUNDS))
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.arange(20, 20 + END - DEVICE_TOKENS)
    lease = lease_of(segments, DEVICE_TOKENS)
    readers = open_segments(lease, CODEC, len(slots))
    read_all(lease, readers, head_ends, slots, pool)
    check_restored(kind, before, pool, slots, head_ends)
    for reader in readers:
        assert reader.num_bytes == tail_num_bytes(reader, head_ends)
        assert reader.num_bytes <= sum(reader.source.header.layer_num_bytes)


@pytest.mark.parametrize("range_bytes", [1, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_tails_are_read_from_segments_that_were_trimmed_later(kind: str, range_bytes: int) -> None:
    """Stored whole, leased once to prove it, then trimmed by the store and leased again."""
    kept_heads = (36, 32, 16, 12)
    store = make_store(1 << 20)
    for segment in whole_segments(kind):
        store_in(store, in_ranges(segment, range_bytes))
    keys = [f"page-{page}" for page in range(END // PAGE_SIZE)]
    for segment in store.path_segments(MODEL, keys):
        header = segment.header
        decoder = CODEC.open(
            header.codec_params, start_token=header.start_token, num_tokens=header.num_tokens
        )
        kept_from = decoder.kept_from(kept_heads)
        store.trim(segment.segment_id, kept_from, decoder.kept_num_bytes(kept_from))
    assert store.stats().trimmed_bytes > 0
    first_page = DEVICE_TOKENS // PAGE_SIZE
    lease = store.lease(MODEL, keys[first_page:], np.arange(DEVICE_TOKENS, END, dtype=np.int64))
    assert lease is not None
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.arange(END - DEVICE_TOKENS)
    readers = open_segments(lease, CODEC, len(slots))
    read_all(lease, readers, kept_heads, slots, pool)
    check_restored(kind, before, pool, slots, kept_heads)
    # Nothing more than what the trim kept is there, and all of it is needed, but for the rest of a range.
    unused_bytes = store.stats().stored_bytes - sum(reader.num_bytes for reader in readers)
    assert 0 <= unused_bytes <= (range_bytes - 1) * len(readers) * NUM_LAYERS
    store.release(lease)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_before_what_is_stored_are_an_error_and_never_wrong_kv(kind: str) -> None:
    segments = (stored(kind, 0, 24, (16,) * NUM_LAYERS), *whole_segments(kind)[1:])
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.arange(END - DEVICE_TOKENS)
    lease = lease_of(segments, DEVICE_TOKENS)
    readers = open_segments(lease, CODEC, len(slots))
    with pytest.raises(CodecError):
        read_all(lease, readers, (12,) * NUM_LAYERS, slots, pool)
    for old, new in zip(before, pool.copy(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_copied_once_and_dropped_after_its_last_use(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    end_of_block = SegmentReader.end_of_block

    def counted(reader: SegmentReader, source: int, num_bytes: int) -> Block:
        copied.append(source)
        return end_of_block(reader, source, num_bytes)

    monkeypatch.setattr(SegmentReader, "end_of_block", counted)
    pool, slots = TensorPool(SHAPE, NUM_LAYERS, num_slots=80), torch.arange(16)
    (reader,) = open_segments(lease_of(whole_segments(kind)[:1], DEVICE_TOKENS), CODEC, 16)
    reader.begin((16, 12, 8, 8), slots)
    tails = TailGroups([reader], pool.streams)
    native = reader.decoder.native_units  # type: ignore[attr-defined]
    for layer in range(NUM_LAYERS):
        groups = tails.of_layer(layer)
        for group in groups:
            group.fetch(pool.streams)
            group.fetch(pool.streams)
        kept = {source for _, source in restorer_of(tails)._on_device}
        assert kept == {
            source for source in copied if native[source] is None and reader.decoder.last_use[source] >= layer
        }
        for group in groups:
            group.restore(pool)
    assert sorted(copied) == list(range(NUM_LAYERS))
    assert restorer_of(tails)._on_device == {}


def test_nothing_is_read_of_heads_that_cover_the_slice() -> None:
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    lease = lease_of(whole_segments("slerp"), DEVICE_TOKENS)
    readers = open_segments(lease, CODEC, 48)
    read_all(lease, readers, (44, 44, 24, 24), torch.arange(48), pool)
    assert [reader.num_bytes == 0 for reader in readers] == [True, False, False]
    check_restored("slerp", before, pool, torch.arange(48), (44, 44, 24, 24))


def test_slices_end_where_the_wanted_tokens_end() -> None:
    lease = lease_of(whole_segments("native"), DEVICE_TOKENS)
    for num_tokens, expected in (
        (48, [(8, 24), (24, 44), (44, 56)]),
        (40, [(8, 24), (24, 44), (44, 48)]),
        (36, [(8, 24), (24, 44)]),
        (4, [(8, 12)]),
    ):
        readers = open_segments(lease, CODEC, num_tokens)
        assert [(part.first_token, part.end_token) for part in readers] == expected
