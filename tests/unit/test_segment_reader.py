"""Tails of leased segments into the pool: the right rows, nothing else, and no byte more than needed."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.interface import LayerKV, LayerShape
from krul_backend.codec.layer_map import LayerMap, LayerMapFitter
from krul_backend.codec.options import CodecOptions, Sharing
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import CodecError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.host_store import HostStore
from krul_backend.store.interface import Lease, SegmentSlice
from krul_backend.strategy.strategy import Pair, Precision, Strategy
from krul_sglang.engine.segment_reader import OpenSlice, SegmentReader, open_slices
from tests.unit.codec_builders import random_layers, rotary_table
from tests.unit.engine_builders import TensorPool

SHAPE = LayerShape(2, 8, 4, torch.float32)
NUM_LAYERS = 4
PAGE_SIZE = 4
GROUP = 8
BOUNDS = (0, 24, 44, 56)
"""Segments of full groups, of a shorter last group, and of one group and a half."""
DEVICE_TOKENS = 8
END = BOUNDS[-1]
PAIRS = [(0, 2), (1, 3)]
TABLE = rotary_table(SHAPE.k_head_dim)
MODEL = ModelIdentity("m", "d", "float32", NUM_LAYERS, 2, 8, 4, PAGE_SIZE, 0, 1)
LAYERS = random_layers(SHAPE, NUM_LAYERS, END)

MIXED = Strategy.from_pairs(
    NUM_LAYERS, [], [Precision.INT8, Precision.INT4, Precision.INT2, Precision.NATIVE]
)
KINDS = {
    "native": (Sharing.SLERP, Strategy.from_pairs(NUM_LAYERS)),
    "coded": (Sharing.SLERP, MIXED),
    "slerp": (Sharing.SLERP, Strategy.from_pairs(NUM_LAYERS, PAIRS)),
    "slerp-int4": (Sharing.SLERP, Strategy.from_pairs(NUM_LAYERS, [(0, 3)], Precision.INT4)),
    "predicted": (Sharing.PREDICTED, Strategy.from_pairs(NUM_LAYERS, PAIRS, Precision.INT4)),
}
kinds = st.sampled_from(list(KINDS))
Heads = tuple[int, ...]


@cache
def codec_of(sharing: Sharing) -> SegmentCodec:
    maps: dict[tuple[Pair, Precision], LayerMap] = {}
    for i, j in PAIRS if sharing is Sharing.PREDICTED else ():
        fitter = LayerMapFitter(SHAPE, TABLE)
        fitter.add(LAYERS[i], LAYERS[j], start_token=0)
        maps[(i, j), Precision.INT4] = fitter.fit(Precision.INT4)
    options = CodecOptions(group_size=GROUP, retained_amount=0.2, sharing=sharing)
    return SegmentCodec(SHAPE, NUM_LAYERS, TABLE, options, maps)


def rows_of(start: int, end: int) -> list[LayerKV]:
    return [LayerKV(kv.k[start:end], kv.v[start:end]) for kv in LAYERS]


class Stored(NamedTuple):
    manifest: SegmentManifest
    blocks: tuple[torch.Tensor, ...]


def stored(kind: str, start: int, end: int, kept_heads: Heads | None = None) -> Stored:
    """One segment as the offloader stores it, without what ``kept_heads`` would recompute."""
    sharing, strategy = KINDS[kind]
    codec, layers = codec_of(sharing), rows_of(start, end)
    encoding = codec.prepare(
        strategy, layers.__getitem__, start_token=start, num_tokens=end - start, head_ends=kept_heads
    )
    blocks = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    for unit in encoding.kept_units:
        encoded = codec.encode_unit(encoding, unit, [layers[layer] for layer in unit])
        for layer, block in zip(unit, encoded, strict=True):
            blocks[layer] = block
    pages = tuple(f"page-{page}" for page in range(start // PAGE_SIZE, end // PAGE_SIZE))
    manifest = SegmentManifest(
        MODEL,
        pages,
        f"page-{start // PAGE_SIZE - 1}" if start else None,
        start,
        np.arange(start, end, dtype=np.int32),
        "krul",
        encoding.layer_num_bytes,
        encoding.params,
        encoding.layer_first_token,
    )
    return Stored(manifest, tuple(blocks))


@cache
def whole_segments(kind: str) -> tuple[Stored, ...]:
    return tuple(stored(kind, start, end) for start, end in zip(BOUNDS, BOUNDS[1:], strict=False))


@cache
def whole_decode(kind: str) -> tuple[LayerKV, ...]:
    """Every layer of the conversation, each segment decoded at once from whole blocks."""
    codec = codec_of(KINDS[kind][0])
    parts: list[list[LayerKV]] = [[] for _ in range(NUM_LAYERS)]
    for manifest, blocks in whole_segments(kind):
        num_tokens = manifest.num_tokens
        decoder = codec.open(
            manifest.codec_params, start_token=manifest.start_token, num_tokens=num_tokens
        )
        for layer in range(NUM_LAYERS):
            parts[layer].append(decoder.decode(layer, dict(enumerate(blocks)), 0, num_tokens))
    return tuple(
        LayerKV(torch.cat([kv.k for kv in of_layer]), torch.cat([kv.v for kv in of_layer]))
        for of_layer in parts
    )


def lease_of(segments: tuple[Stored, ...], device_tokens: int) -> Lease:
    """All pages after ``device_tokens``, which lie in the first segment."""
    slices = []
    for segment_id, (manifest, blocks) in enumerate(segments):
        first_page = max(0, device_tokens - manifest.start_token) // PAGE_SIZE
        arrays = tuple(block.numpy() for block in blocks)
        slices.append(SegmentSlice(segment_id, manifest, arrays, first_page, len(manifest.page_keys)))
    return Lease(1, (END - device_tokens) // PAGE_SIZE, tuple(slices))


def descending(heads: list[int]) -> Heads:
    return tuple(PAGE_SIZE * pages for pages in sorted(heads, reverse=True))


heads_strategy = st.lists(
    st.integers(DEVICE_TOKENS // PAGE_SIZE, END // PAGE_SIZE), min_size=NUM_LAYERS, max_size=NUM_LAYERS
).map(descending)


def read_all(
    opened: list[OpenSlice], head_ends: Heads, slots: torch.Tensor, pool: TensorPool
) -> list[SegmentReader]:
    """As the loader reads: each layer of every segment, then the next layer."""
    readers = [SegmentReader(part, head_ends) for part in opened]
    for layer in range(NUM_LAYERS):
        for reader in readers:
            reader.fetch(layer, pool.device)
        first = 0
        for reader in readers:
            reader.restore(layer, pool, slots[first : first + reader.num_tokens])  # type: ignore[arg-type]
            first += reader.num_tokens
        assert first == len(slots)
    return readers


def tail_num_bytes(part: OpenSlice, head_ends: Heads) -> int:
    """Bytes of a slice's blocks from the group on that the neediest layer needs, by the codec's layout."""
    manifest, decoder = part.source.manifest, part.decoder
    num_bytes = 0
    for source in range(NUM_LAYERS):
        firsts = [
            max(head_ends[layer], part.first_token)
            for layer in range(NUM_LAYERS)
            if source in decoder.sources(layer) and head_ends[layer] < part.end_token
        ]
        if firsts:
            head_len = min(firsts) - manifest.start_token
            kept = [manifest.end_token] * NUM_LAYERS
            kept[source] = manifest.start_token + head_len - head_len % GROUP
            num_bytes += decoder.kept_num_bytes(kept)[source]
    return num_bytes


def check_restored(
    kind: str, before: list[LayerKV], pool: TensorPool, slots: torch.Tensor, head_ends: Heads
) -> None:
    """Rows from the head's end on are those of the whole decode; every other row of the pool is as before."""
    expected = whole_decode(kind)
    positions = torch.arange(DEVICE_TOKENS, DEVICE_TOKENS + len(slots))
    for layer, old in enumerate(before):
        is_tail = positions >= head_ends[layer]
        new = pool.buffers(layer)
        for now, was, wanted in zip(
            new, (old.k, old.v), (expected[layer].k, expected[layer].v), strict=True
        ):
            should_be = was.clone()
            should_be[slots[is_tail]] = wanted[positions[is_tail]]
            assert torch.equal(now, should_be)


@settings(max_examples=40, deadline=None)
@given(kind=kinds, head_ends=heads_strategy, num_missing=st.integers(0, 4), seed=st.integers(0, 99))
def test_tails_of_any_heads_are_read_exactly(
    kind: str, head_ends: Heads, num_missing: int, seed: int
) -> None:
    """``num_missing`` of the leased pages are not wanted: ranks may agree on less."""
    num_tokens = END - DEVICE_TOKENS - num_missing * PAGE_SIZE
    head_ends = tuple(min(end, DEVICE_TOKENS + num_tokens) for end in head_ends)
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.randperm(80, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    codec = codec_of(KINDS[kind][0])
    opened = open_slices(lease_of(whole_segments(kind), DEVICE_TOKENS), codec, num_tokens)
    readers = read_all(opened, head_ends, slots, pool)
    check_restored(kind, before, pool, slots, head_ends)
    for part, reader in zip(opened, readers, strict=True):
        assert reader.num_bytes == tail_num_bytes(part, head_ends)


@settings(max_examples=40, deadline=None)
@given(kind=kinds, kept_heads=heads_strategy, head_ends=heads_strategy)
def test_tails_are_read_from_segments_that_lack_their_first_tokens(
    kind: str, kept_heads: Heads, head_ends: Heads
) -> None:
    head_ends = tuple(map(max, head_ends, kept_heads))
    segments = tuple(
        stored(kind, start, end, kept_heads) for start, end in zip(BOUNDS, BOUNDS[1:], strict=False)
    )
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.arange(20, 20 + END - DEVICE_TOKENS)
    codec = codec_of(KINDS[kind][0])
    opened = open_slices(lease_of(segments, DEVICE_TOKENS), codec, len(slots))
    readers = read_all(opened, head_ends, slots, pool)
    check_restored(kind, before, pool, slots, head_ends)
    for part, reader in zip(opened, readers, strict=True):
        assert reader.num_bytes == tail_num_bytes(part, head_ends)
        assert reader.num_bytes <= part.source.manifest.num_bytes


@pytest.mark.parametrize("kind", KINDS)
def test_tails_are_read_from_segments_that_were_trimmed_later(kind: str) -> None:
    """Stored whole, leased once to prove it, then trimmed by the store and leased again."""
    codec, kept_heads = codec_of(KINDS[kind][0]), (36, 32, 16, 12)
    store = HostStore(1 << 20)
    for manifest, blocks in whole_segments(kind):
        reservation = store.reserve(manifest.layer_num_bytes)
        assert reservation is not None
        for target, block in zip(reservation.blocks, blocks, strict=True):
            target[:] = block.numpy()
        store.commit(reservation, manifest)
    keys = [f"page-{page}" for page in range(END // PAGE_SIZE)]
    for segment in store.path_segments(MODEL, keys):
        manifest = segment.manifest
        decoder = codec.open(
            manifest.codec_params, start_token=manifest.start_token, num_tokens=manifest.num_tokens
        )
        kept_from = decoder.kept_from(kept_heads)
        store.trim(segment.segment_id, kept_from, decoder.kept_num_bytes(kept_from))
    assert store.stats().trimmed_bytes > 0
    first_page = DEVICE_TOKENS // PAGE_SIZE
    lease = store.lease(MODEL, keys[first_page:], np.arange(DEVICE_TOKENS, END, dtype=np.int32))
    assert lease is not None
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.arange(END - DEVICE_TOKENS)
    readers = read_all(open_slices(lease, codec, len(slots)), kept_heads, slots, pool)
    check_restored(kind, before, pool, slots, kept_heads)
    # Nothing more than what the trim kept is there, and all of it is needed.
    assert sum(reader.num_bytes for reader in readers) == store.stats().stored_bytes
    store.release(lease)
    store.close()


@pytest.mark.parametrize("kind", KINDS)
def test_heads_before_what_is_stored_are_an_error_and_never_wrong_kv(kind: str) -> None:
    segments = (stored(kind, 0, 24, (16,) * NUM_LAYERS), *whole_segments(kind)[1:])
    codec = codec_of(KINDS[kind][0])
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    slots = torch.arange(END - DEVICE_TOKENS)
    opened = open_slices(lease_of(segments, DEVICE_TOKENS), codec, len(slots))
    with pytest.raises(CodecError):
        read_all(opened, (12,) * NUM_LAYERS, slots, pool)
    for old, new in zip(before, pool.copy(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


@pytest.mark.parametrize("kind", KINDS)
def test_each_block_is_copied_once_and_dropped_after_its_last_use(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[int] = []
    copy_tail = SegmentReader._copy_tail

    def counted(reader: SegmentReader, source: int, device: torch.device) -> torch.Tensor:
        copied.append(source)
        return copy_tail(reader, source, device)

    monkeypatch.setattr(SegmentReader, "_copy_tail", counted)
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    codec = codec_of(KINDS[kind][0])
    (opened,) = open_slices(lease_of(whole_segments(kind)[:1], DEVICE_TOKENS), codec, 16)
    reader = SegmentReader(opened, (16, 12, 8, 8))
    for layer in range(NUM_LAYERS):
        reader.fetch(layer, pool.device)
        reader.fetch(layer, pool.device)
        needed_later = {source for source in copied if opened.decoder.last_use[source] >= layer}
        assert set(reader._on_device) == needed_later
        reader.restore(layer, pool, torch.arange(16))  # type: ignore[arg-type]
    assert sorted(copied) == list(range(NUM_LAYERS))
    assert reader._on_device == {}


def test_nothing_is_read_of_heads_that_cover_the_slice() -> None:
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=80)
    before = pool.copy()
    opened = open_slices(lease_of(whole_segments("slerp"), DEVICE_TOKENS), codec_of(Sharing.SLERP), 48)
    readers = read_all(opened, (44, 44, 24, 24), torch.arange(48), pool)
    assert [reader.num_bytes == 0 for reader in readers] == [True, False, False]
    check_restored("slerp", before, pool, torch.arange(48), (44, 44, 24, 24))


def test_slices_end_where_the_wanted_tokens_end() -> None:
    lease = lease_of(whole_segments("native"), DEVICE_TOKENS)
    codec = codec_of(Sharing.SLERP)
    for num_tokens, expected in (
        (48, [(8, 24), (24, 44), (44, 56)]),
        (40, [(8, 24), (24, 44), (44, 48)]),
        (36, [(8, 24), (24, 44)]),
        (4, [(8, 12)]),
    ):
        opened = open_slices(lease, codec, num_tokens)
        assert [(part.first_token, part.end_token) for part in opened] == expected
