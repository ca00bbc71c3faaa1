"""What a reader asks a lower tier for is what it reads then: KV as of whole segments, and no byte more."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
import test_group_reader as groups
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.interface import TailGroup
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.codec.units import UnitDecoder
from krul_backend.errors import CodecError, TierReadError
from krul_backend.planner.interface import RestorePlan
from krul_backend.tiers.common.interface import Block, SegmentSlice, SegmentTail, checksums_of, tail_is_right
from krul_sglang.engine.restore.load_batch import Load
from krul_sglang.engine.restore.segment_reader import SegmentReader, open_segments
from krul_sglang.engine.restore.tail_groups import TailGroups
from tests.support import segment_builders as units
from tests.support.engine_builders import NO_FORECAST, TensorPool, read_tails
from tests.support.segment_builders import Stored, in_ranges, lease_of

Heads = tuple[int, ...]
PAGE_SIZE = 4
NUM_SLOTS = 300
SLOTS = torch.arange(NUM_SLOTS)


class Conversation:
    """A stored conversation: its segments, and what decodes them."""

    def __init__(self, codec: ModelCodecs, shape: Any, bounds: Sequence[int], store: Any, kind: Any) -> None:
        self.codec = codec
        self.shape = shape
        self.bounds = bounds
        self.kind = kind
        self._store = store

    @property
    def num_pages(self) -> int:
        return self.bounds[-1] // PAGE_SIZE

    def segments(self, kept_heads: Heads | None, range_bytes: int) -> tuple[Stored, ...]:
        """Stored without ``kept_heads``."""
        return tuple(
            in_ranges(self._store(start, end, kept_heads), range_bytes)
            for start, end in pairwise(self.bounds)
        )


def of_units(kind: str) -> Conversation:
    def store(start: int, end: int, kept_heads: Heads | None) -> Stored:
        return units.stored(kind, start, end, kept_heads)

    return Conversation(units.CODEC, units.SHAPE, units.BOUNDS, store, UnitDecoder)


def store_in_groups(start: int, end: int, kept_heads: Heads | None) -> Stored:
    return groups.stored_in_groups(start, end, groups.NO_HEADS if kept_heads is None else kept_heads)


CONVERSATIONS = {kind: of_units(kind) for kind in units.KINDS} | {
    "subspace": Conversation(groups.CODEC, groups.SHAPE, groups.BOUNDS, store_in_groups, SubspaceDecoder)
}


def fetched(segment: Stored, source: SegmentSlice, tail: SegmentTail) -> SegmentSlice:
    """A slice as the store gives it when it has read ``tail`` of a segment."""
    manifest = segment.manifest.trimmed(*tail)
    blocks = tuple(
        block[block.nbytes - num_bytes :]
        for block, num_bytes in zip(source.blocks, manifest.layer_num_bytes, strict=True)
    )
    checksums = checksums_of(manifest, source.checksums)
    return replace(source, header=manifest.header, blocks=blocks, checksums=checksums, tier="ssd")


def load(readers: Sequence[SegmentReader], head_ends: Heads, slots: torch.Tensor, pool: TensorPool) -> None:
    """Read as the loader does; what is announced to be checked is right, and nothing else is read."""
    lease: Any = None
    plan = RestorePlan(head_ends, 1.0)
    batch = Load(lease, tuple(readers), slots, readers[0].first_token, plan, NO_FORECAST)
    batch.begin()
    tails = TailGroups(readers, pool.streams)
    checked: dict[tuple[int, int], int] = {}
    end_of_block = SegmentReader.end_of_block

    def checked_end(reader: SegmentReader, of_layer: int, num_bytes: int) -> Block:
        assert num_bytes <= checked[reader.source.segment_id, of_layer]
        return end_of_block(reader, of_layer, num_bytes)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SegmentReader, "end_of_block", checked_end)
        for layer in range(pool.num_layers):
            for group in tails.of_layer(layer):
                load_group(group, checked, pool)
    tails.check()


def load_group(group: TailGroup, checked: dict[tuple[int, int], int], pool: TensorPool) -> None:
    for source, of_layer, num_bytes in group.blocks:
        block, checksum = source.blocks[of_layer], source.checksums[of_layer]
        assert num_bytes <= block.nbytes
        assert tail_is_right(block, checksum, num_bytes, source.header.range_bytes)
        checked[source.segment_id, of_layer] = num_bytes
    group.fetch(pool.streams)
    group.restore(pool)


def loaded(
    conversation: Conversation,
    segments: tuple[Stored, ...],
    head_ends: Heads,
    first_page: int,
    num_tokens: int,
    shift: int,
    seed: int,
    *,
    is_whole: bool,
) -> tuple[list[LayerKV], list[SegmentReader], list[SegmentSlice]]:
    """All slots of a pool after a load of whole segments, or of what the readers ask for; the readers, and
    what they read from."""
    num_layers = len(head_ends)
    pool = TensorPool(conversation.shape, num_layers, NUM_SLOTS)
    slots = torch.randperm(NUM_SLOTS, generator=torch.Generator().manual_seed(seed))[:num_tokens]
    lease = lease_of(segments[-count_from(conversation, first_page) :], first_page * PAGE_SIZE)
    readers = open_segments(lease, conversation.codec, num_tokens, shift)
    sources: list[SegmentSlice] = []
    for reader in readers:
        assert type(reader.decoder) is conversation.kind
        reader.begin(head_ends, SLOTS[: reader.num_tokens])
        sources.append(reader.source)
        if not is_whole:
            segment = next(
                each for each in segments if each.manifest.start_token == reader.source.header.start_token
            )
            sources[-1] = fetched(segment, reader.source, reader.tail())
            reader.take_blocks_of(sources[-1])
    load(readers, head_ends, slots, pool)
    return pool.copy(), readers, sources


def count_from(conversation: Conversation, first_page: int) -> int:
    """How many segments hold pages from ``first_page`` on."""
    return sum(end > first_page * PAGE_SIZE for end in conversation.bounds[1:])


def descending(num_pages: Sequence[int]) -> Heads:
    return tuple(PAGE_SIZE * pages for pages in sorted(num_pages, reverse=True))


@st.composite
def cases(draw: st.DrawFn) -> dict[str, Any]:
    conversation = CONVERSATIONS[draw(st.sampled_from([*CONVERSATIONS]))]
    num_layers, num_pages = conversation.codec.num_layers, conversation.num_pages
    some_heads = st.lists(st.integers(0, num_pages), min_size=num_layers, max_size=num_layers)
    first_page = draw(st.integers(0, num_pages - 1))
    wanted_pages = draw(st.integers(1, num_pages - first_page))
    first, end = first_page * PAGE_SIZE, (first_page + wanted_pages) * PAGE_SIZE
    kept_heads = draw(st.none() | some_heads.map(descending))
    # Of what is not stored nothing can be read; tokens that were not leased are on the device.
    least = [first if kept_heads is None else max(first, kept) for kept in kept_heads or [first] * num_layers]
    heads = [
        min(max(head, kept), end) for head, kept in zip(descending(draw(some_heads)), least, strict=True)
    ]
    shift = draw(st.sampled_from([0, 0, 12, 400, -first]))
    return {
        "conversation": conversation,
        "segments": conversation.segments(kept_heads, draw(st.sampled_from([1, 50, 1000, 1 << 14]))),
        "head_ends": tuple(head + shift for head in heads),
        "first_page": first_page,
        "num_tokens": wanted_pages * PAGE_SIZE,
        "shift": shift,
        "seed": draw(st.integers(0, 99)),
    }


@settings(max_examples=150)
@given(case=cases())
def test_what_is_asked_for_gives_the_kv_of_whole_segments(case: dict[str, Any]) -> None:
    """Natively stored, coded, in pairs and in subspaces; begun inside a segment, ended before one ends, at
    other positions, without what was never stored: the same bits, and no byte beyond whole ranges."""
    wanted, of_whole, _ = loaded(**case, is_whole=True)
    found, readers, sources = loaded(**case, is_whole=False)
    for layer, (one, other) in enumerate(zip(found, wanted, strict=True)):
        assert torch.equal(one.k, other.k), layer
        assert torch.equal(one.v, other.v), layer
    for reader, whole, source in zip(readers, of_whole, sources, strict=True):
        assert reader.num_bytes == whole.num_bytes
        fetched_bytes = sum(block.nbytes for block in source.blocks)
        num_ranges = sum(block.nbytes > 0 for block in source.blocks)
        assert reader.num_bytes <= fetched_bytes
        assert fetched_bytes <= reader.num_bytes + (source.header.range_bytes - 1) * num_ranges


@settings(max_examples=100)
@given(case=cases())
def test_the_ends_that_are_asked_for_are_records_of_what_is_stored(case: dict[str, Any]) -> None:
    """They start no earlier than what is stored, and a segment of which they were read can be opened."""
    _, readers, sources = loaded(**case, is_whole=False)
    for reader, source in zip(readers, sources, strict=True):
        stored, tail = reader.source.header, reader.tail()
        for layer, (first, size) in enumerate(zip(*tail, strict=True)):
            assert stored.layer_first_token[layer] <= first <= stored.end_token
            assert size <= stored.layer_num_bytes[layer]
        decoder = reader.decoder
        assert decoder.kept_num_bytes(tail.layer_first_token) == tail.layer_num_bytes
        # Each layer can be decoded from the token on from which it is read.
        for layer, first in enumerate(decoder.decodable_from(source.header.layer_first_token)):
            row = reader._first_rows[layer]
            assert not reader.has_tail(layer) or first <= stored.start_token + row


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_of_a_segment_that_heads_cover_nothing_is_asked_for(kind: str) -> None:
    conversation = CONVERSATIONS[kind]
    lease = lease_of(conversation.segments(None, 100), 0)
    readers = open_segments(lease, conversation.codec, conversation.num_pages * PAGE_SIZE)
    second_start = conversation.bounds[1]
    for reader in readers:
        reader.begin((second_start,) * conversation.codec.num_layers, SLOTS[: reader.num_tokens])
    for reader, is_covered in zip(readers, [True, False, False], strict=True):
        header = reader.source.header
        nothing = ((header.end_token,) * len(header.layer_num_bytes), (0,) * len(header.layer_num_bytes))
        everything = (header.layer_first_token, header.layer_num_bytes)
        assert reader.tail() == (nothing if is_covered else everything)


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_a_pair_or_group_is_asked_for_as_far_as_its_neediest_layer_reads(kind: str) -> None:
    """The first layers are heads alone; blocks from which a later layer is decoded are read all the same."""
    conversation = CONVERSATIONS[kind]
    num_layers, end = conversation.codec.num_layers, conversation.bounds[1]
    lease = lease_of(conversation.segments(None, 1)[:1], 0)
    (reader,) = open_segments(lease, conversation.codec, end)
    reader.begin((*([end] * (num_layers - 1)), 0), SLOTS[:end])
    read = {layer for layer, size in enumerate(reader.tail().layer_num_bytes) if size}
    sources = reader.decoder.sources(num_layers - 1)
    assert read == {source for source in sources if reader.source.header.layer_num_bytes[source]}


@pytest.mark.parametrize("kind", CONVERSATIONS)
def test_less_than_was_asked_for_is_an_error_and_never_wrong_kv(kind: str) -> None:
    """As if the store had given a part that it read for somebody else."""
    conversation = CONVERSATIONS[kind]
    num_layers, end = conversation.codec.num_layers, conversation.bounds[1]
    (segment,) = conversation.segments(None, 1)[:1]
    lease = lease_of((segment,), 0)
    (reader,) = open_segments(lease, conversation.codec, end)
    reader.begin((end - PAGE_SIZE,) * num_layers, SLOTS[:end])
    short = fetched(segment, reader.source, reader.tail())
    reader.begin((0,) * num_layers, SLOTS[:end])
    reader.take_blocks_of(short)
    pool = TensorPool(conversation.shape, num_layers, NUM_SLOTS)
    before = pool.copy()
    with pytest.raises(CodecError, match="are needed of it"):
        read_tails(lease, [reader], (0,) * num_layers, torch.arange(end), pool)
    for old, new in zip(before, pool.copy(), strict=True):
        assert torch.equal(old.k, new.k)
        assert torch.equal(old.v, new.v)


def test_blocks_of_another_encoding_are_not_taken() -> None:
    conversation = CONVERSATIONS["coded"]
    (segment,) = conversation.segments(None, 1)[:1]
    (reader,) = open_segments(lease_of((segment,), 0), conversation.codec, 24)
    reader.begin((8,) * 4, SLOTS[:24])
    came = fetched(segment, reader.source, reader.tail())
    for changes in ({"codec": "raw"}, {"codec_params": {}}, {"start_token": 4}, {"num_tokens": 20}):
        with pytest.raises(TierReadError, match="stored again"):
            reader.take_blocks_of(replace(came, header=replace(came.header, **changes)))
    reader.take_blocks_of(came)
