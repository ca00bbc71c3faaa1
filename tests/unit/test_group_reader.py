"""Tails of segments in shared subspaces into the pool: the right rows and nothing else, each group once."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec import interface
from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.coded_tail import CodedTail
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.subspace.restore import GroupRestore
from krul_backend.codec.units import UnitDecoder, UnitPlan
from krul_backend.device import Device
from krul_backend.errors import CodecError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.strategy.strategy import SUBSPACE, Strategy
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments
from krul_sglang.engine.restore.tail_groups import TailGroups
from krul_sglang.engine.save.allocation import trim_path
from tests.support.codec_builders import rotary_table
from tests.support.engine_builders import TensorPool, check_tails, make_load, make_store, read_tails
from tests.support.segment_builders import Stored, in_ranges, lease_of, store_in
from tests.support.subspace_builders import make_bases, make_layers

SHAPE = LayerShape(2, 8, 4, torch.float32)
GROUPS = (range(3), range(3, 4), range(4, 6))
NUM_LAYERS = 6
PAGE_SIZE = 4
BOUNDS = (0, 136, 200, 240)
"""Segments of two records and a short one, of one record, and of less than one."""
END = BOUNDS[-1]
PAGE_KEYS = [f"page-{page}" for page in range(END // PAGE_SIZE)]
MODEL = ModelIdentity("m", "d", "float32", NUM_LAYERS, 2, 8, 4, PAGE_SIZE, 0, 1)
TABLE = rotary_table(SHAPE.k_head_dim)
BASES = make_bases(SHAPE, [len(group) for group in GROUPS])
SUBSPACES = SubspaceCodec(BASES, TABLE)
CODEC = ModelCodecs(SHAPE, NUM_LAYERS, TABLE, subspace=SUBSPACES)
LAYERS = make_layers(BASES, END, TABLE)
Heads = tuple[int, ...]
TOLERANCE = 0.01
"""Segments that are decoded together round products as the one with the largest levels does."""
NO_HEADS: Heads = (0,) * NUM_LAYERS
HEADS = {
    "all loaded": NO_HEADS,
    "the same in all layers": (100,) * NUM_LAYERS,
    "ending inside groups": (140, 72, 72, 72, 64, 20),
    "ending between groups": (140, 140, 140, 68, 12, 12),
    "over whole groups": (240, 240, 240, 240, 160, 0),
}


def stored_in_groups(start: int, end: int, head_ends: Heads = NO_HEADS) -> Stored:
    """Tokens ``[start, end)`` of the conversation as a segment; ``head_ends`` are not stored."""
    encoded = SUBSPACES.encode(
        lambda layer: LayerKV(LAYERS[layer].k[start:end], LAYERS[layer].v[start:end]),
        start_token=start,
        num_tokens=end - start,
        attention=None,
        max_damage=0.1,
    )
    layout = SUBSPACES.open(encoded.params, start_token=start, num_tokens=end - start)
    first_token = layout.kept_from(head_ends)
    num_bytes = layout.kept_num_bytes(first_token)
    blocks = [torch.empty(0, dtype=torch.uint8) for _ in range(NUM_LAYERS)]
    for group, block in zip(GROUPS, encoded.blocks, strict=True):
        blocks[group.start] = block[len(block) - num_bytes[group.start] :]
    return Stored(manifest_of(start, end, SUBSPACE, encoded.params, first_token, num_bytes), tuple(blocks))


def stored_natively(start: int, end: int) -> Stored:
    layers = [LayerKV(kv.k[start:end], kv.v[start:end]) for kv in LAYERS]
    strategy = Strategy.from_pairs(NUM_LAYERS)
    encoding = CODEC.native.encode(TokenRun(layers.__getitem__, start, end - start), UnitPlan(strategy))
    blocks = [block for _, block in encoding.blocks]
    manifest = manifest_of(
        start, end, "krul", encoding.params, encoding.layer_first_token, encoding.layer_num_bytes
    )
    return Stored(manifest, tuple(blocks))


def manifest_of(
    start: int, end: int, codec: str, params: dict[str, object], first_token: Heads, num_bytes: Heads
) -> SegmentManifest:
    first_page = start // PAGE_SIZE
    return SegmentManifest(
        MODEL,
        tuple(PAGE_KEYS[first_page : end // PAGE_SIZE]),
        PAGE_KEYS[first_page - 1] if start else None,
        start,
        np.arange(start, end, dtype=np.int64),
        codec,
        num_bytes,
        params,
        first_token,
    )


@cache
def whole_segments() -> tuple[Stored, ...]:
    return tuple(stored_in_groups(start, end) for start, end in pairwise(BOUNDS))


@cache
def whole_decode() -> list[LayerKV]:
    """Every layer of the conversation, each segment decoded at once from whole blocks."""
    of_segments = []
    for manifest, blocks in whole_segments():
        decoder = SUBSPACES.open(
            manifest.codec_params, start_token=manifest.start_token, num_tokens=manifest.num_tokens
        )
        of_segments.append(decoder.decode_all([blocks[group.start] for group in GROUPS]))
    return [
        LayerKV(torch.cat([kv.k for kv in of_layer]), torch.cat([kv.v for kv in of_layer]))
        for of_layer in zip(*of_segments, strict=True)
    ]


def read_and_check(
    lease: Lease, head_ends: Heads, num_tokens: int | None = None, seed: int = 0
) -> list[SegmentReader]:
    """Read the first ``num_tokens`` of a lease into random slots of a pool, and compare all of its slots."""
    if num_tokens is None:
        num_tokens = lease.num_pages * PAGE_SIZE
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=300)
    before = pool.copy()
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    readers = open_segments(lease, CODEC, num_tokens)
    first_token = readers[0].first_token
    head_ends = tuple(min(end, first_token + num_tokens) for end in head_ends)
    read_tails(lease, readers, head_ends, slots, pool)
    check_tails(whole_decode(), first_token, head_ends, slots, before, pool, tolerance=TOLERANCE)
    return readers


def tail_num_bytes(reader: SegmentReader, head_ends: Heads) -> int:
    """Bytes of a reader's blocks from the record on in which the tail of each group's last layer begins."""
    header, num_bytes = reader.source.header, 0
    for group in GROUPS:
        first = max(head_ends[group[-1]], reader.first_token)
        if first < reader.end_token:
            # Of tokens up to ``first`` all layers but this one are heads, and are not kept.
            heads = [header.end_token] * NUM_LAYERS
            heads[group[-1]] = first
            num_bytes += sum(reader.decoder.kept_num_bytes(reader.decoder.kept_from(heads)))
    return num_bytes


def descending(pages: list[int]) -> Heads:
    return tuple(PAGE_SIZE * page for page in sorted(pages, reverse=True))


any_heads = st.lists(st.integers(0, END // PAGE_SIZE), min_size=NUM_LAYERS, max_size=NUM_LAYERS).map(
    descending
)


@pytest.mark.parametrize("head_ends", HEADS.values(), ids=HEADS.keys())
def test_tails_are_what_the_whole_segment_decodes_to(head_ends: Heads) -> None:
    readers = read_and_check(lease_of(whole_segments(), 0), head_ends)
    assert {type(reader.decoder) for reader in readers} == {SubspaceDecoder}
    assert [reader.num_bytes for reader in readers] == [
        tail_num_bytes(reader, head_ends) for reader in readers
    ]
    if head_ends == NO_HEADS:
        assert [reader.num_bytes for reader in readers] == [
            manifest.num_bytes for manifest, _ in whole_segments()
        ]


@settings(max_examples=40)
@given(
    head_ends=any_heads,
    kept_heads=any_heads | st.just(NO_HEADS),
    first_page=st.integers(0, 33),
    num_missing=st.integers(0, 25),
    seed=st.integers(0, 99),
)
def test_any_part_of_a_lease_is_read_exactly(
    head_ends: Heads, kept_heads: Heads, first_page: int, num_missing: int, seed: int
) -> None:
    """Leased from ``first_page`` on; the last ``num_missing`` pages are not wanted. ``kept_heads`` are not
    stored."""
    segments = tuple(stored_in_groups(start, end, kept_heads) for start, end in pairwise(BOUNDS))
    head_ends = tuple(map(max, head_ends, kept_heads))
    lease = lease_of(segments, first_page * PAGE_SIZE)
    num_tokens = (lease.num_pages - num_missing) * PAGE_SIZE
    for reader in read_and_check(lease, head_ends, num_tokens, seed):
        assert reader.num_bytes == tail_num_bytes(reader, head_ends)
        assert reader.num_bytes <= sum(reader.source.header.layer_num_bytes)


def test_only_leased_pages_are_read() -> None:
    """Of the first segment pages 3 to 30, of which the last is not at the end of a record."""
    (part,) = lease_of(whole_segments()[:1], 12).slices
    readers = read_and_check(Lease(1, 28, (replace(part, end_page=31),)), (60, 60, 40, 16, 16, 12))
    assert [(reader.first_token, reader.end_token) for reader in readers] == [(12, 124)]


@pytest.mark.parametrize("kept_heads", HEADS.values(), ids=HEADS.keys())
@pytest.mark.parametrize("range_bytes", [1, 100])
def test_tails_are_read_from_segments_that_were_trimmed_later(kept_heads: Heads, range_bytes: int) -> None:
    store = make_store(1 << 20)
    for segment in whole_segments():
        store_in(store, in_ranges(segment, range_bytes))
    trim_path(store, MODEL, CODEC, PAGE_KEYS, kept_heads)
    # The shortest head of a group is that of its last layer.
    is_record_left_out = any(kept_heads[group[-1]] >= 64 for group in GROUPS)
    assert (store.stats().trimmed_bytes > 0) == is_record_left_out
    lease = store.lease(MODEL, PAGE_KEYS, np.arange(END, dtype=np.int64))
    assert lease is not None
    readers = read_and_check(lease, kept_heads)
    # Nothing more than what the trim kept is there, and all of it is needed, but for the rest of a range.
    unused_bytes = store.stats().stored_bytes - sum(reader.num_bytes for reader in readers)
    assert 0 <= unused_bytes <= (range_bytes - 1) * len(readers) * NUM_LAYERS
    store.release(lease)
    store.close()


def test_heads_before_what_is_stored_are_an_error_and_never_wrong_kv() -> None:
    segments = (stored_in_groups(0, 136, (128,) * NUM_LAYERS), *whole_segments()[1:])
    lease = lease_of(segments, 0)
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=END)
    before = pool.copy()
    for head_end in (120, 60, 0):
        readers = open_segments(lease, CODEC, END)
        with pytest.raises(CodecError):
            read_tails(lease, readers, (head_end,) * NUM_LAYERS, torch.arange(END), pool)
    for old, new in zip(before, pool.copy(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


def test_a_group_is_decoded_once_by_the_first_layer_with_a_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    decoded: list[tuple[int, int]] = []
    tail = SubspaceDecoder.tail

    def counted(
        decoder: SubspaceDecoder, group: int, block: torch.Tensor, first_token: int, end_token: int
    ) -> CodedTail:
        decoded.append((group, first_token))
        return tail(decoder, group, block, first_token, end_token)

    monkeypatch.setattr(SubspaceDecoder, "tail", counted)
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=END)
    lease = lease_of(whole_segments()[:1], 0)
    (reader,) = open_segments(lease, CODEC, 136)
    read_tails(lease, [reader], (136, 80, 70, 70, 8, 4), torch.arange(136), pool)
    assert decoded == [(0, 70), (1, 70), (2, 4)]


@pytest.mark.parametrize("group", range(len(GROUPS)))
def test_what_is_found_damaged_late_is_an_error_of_the_reader(
    group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a GPU, where blocks are only queued when they are read and written."""

    def write(begun: GroupRestore, buffers: object) -> None:
        is_damaged = begun.targets[0].tail.transform.basis.layers == GROUPS[group]
        begun.damaged = torch.tensor([0, int(is_damaged)], dtype=torch.int32)

    monkeypatch.setattr(GroupRestore, "_write", write)
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=END)
    lease = lease_of(whole_segments()[:1], 0)
    readers = open_segments(lease, CODEC, 136)
    with pytest.raises(CodecError, match=f"1 of the records of {len(GROUPS)} groups"):
        read_tails(lease, readers, NO_HEADS, torch.arange(136), pool)


def test_a_conversation_may_be_stored_in_both_ways() -> None:
    """As it is when nothing is left of its error budget, or its attention was not recorded."""
    segments = (whole_segments()[0], stored_natively(136, 200), whole_segments()[2])
    pool = TensorPool(SHAPE, NUM_LAYERS, num_slots=END)
    before, slots, head_ends = pool.copy(), torch.arange(END).flip(0), (180, 180, 140, 100, 100, 20)
    lease = lease_of(segments, 0)
    readers = open_segments(lease, CODEC, END)
    assert [type(reader.decoder) for reader in readers] == [SubspaceDecoder, UnitDecoder, SubspaceDecoder]
    read_tails(lease, readers, head_ends, slots, pool)
    expected = [
        LayerKV(
            torch.cat([decoded.k[:136], true.k[136:200], decoded.k[200:]]),
            torch.cat([decoded.v[:136], true.v[136:200], decoded.v[200:]]),
        )
        for decoded, true in zip(whole_decode(), LAYERS, strict=True)
    ]
    check_tails(expected, 0, head_ends, slots, before, pool, tolerance=TOLERANCE)


def test_segments_are_decoded_together_if_they_are_not_large(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device holds the coefficients of all of them at once."""
    load = make_load(lease_of(whole_segments(), 0), CODEC, torch.arange(END))
    load.begin()
    token_bytes = SHAPE.k_token_bytes + SHAPE.v_token_bytes
    for max_tokens, starts in ((END, [[0, 136, 200]]), (200, [[0, 136], [200]]), (1, [[0], [136], [200]])):
        monkeypatch.setattr(interface, "MAX_JOINED_BYTES", max_tokens * token_bytes)
        groups = TailGroups(load.readers, Device(torch.device("cpu"))).of_layer(0)
        assert [[block.source.header.start_token for block in group.blocks] for group in groups] == starts


def test_segments_in_bases_that_are_not_here_cannot_be_opened() -> None:
    without_bases = ModelCodecs(SHAPE, NUM_LAYERS, TABLE)
    with pytest.raises(CodecError, match="which are not here"):
        open_segments(lease_of(whole_segments(), 0), without_bases, END)
