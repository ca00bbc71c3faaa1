"""Where the bytes of a segment in shared subspaces lie, and which layers need them."""

from __future__ import annotations

import base64
from functools import cache

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.codec import EncodedSegment, SubspaceCodec
from krul_backend.codec.subspace.decoder import SubspaceDecoder
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import LayerGroups
from tests.support.subspace_builders import make_bases, make_layers

NUM_LAYERS = 6
START = 3
NUM_TOKENS = 150
END = START + NUM_TOKENS
"""Two records of 64 tokens, and one of 22."""
NUM_FIRST_TOKENS = 5
"""Of a conversation, stored as in the pool: three of them are before the segment."""
TOKEN_BYTES = (2 * 8 + 2 * 4) * 4
"""Of a token in one layer, as in the pool."""
GROUPS = LayerGroups((3, 4, 6))


@cache
def segment() -> tuple[EncodedSegment, SubspaceDecoder]:
    bases = make_bases(LayerShape(2, 8, 4, torch.float32), [len(group) for group in GROUPS.groups])
    codec = SubspaceCodec(bases, None, num_first_tokens=NUM_FIRST_TOKENS)
    layers = make_layers(bases, NUM_TOKENS, None)
    encoded = codec.encode(
        layers.__getitem__, start_token=START, num_tokens=NUM_TOKENS, attention=None, max_damage=0.1
    )
    return encoded, codec.open(encoded.params, start_token=START, num_tokens=NUM_TOKENS)


def whole_and_tail(head_len: int) -> tuple[list[LayerKV], list[LayerKV]]:
    """All layers of the tokens from ``head_len`` on: of whole blocks, and of what is kept from there on."""
    encoded, layout = segment()
    blocks = encoded.blocks
    whole = [LayerKV(kv.k[head_len:], kv.v[head_len:]) for kv in layout.decode_all(blocks)]
    kept = layout.kept_num_bytes(layout.kept_from((START + head_len,) * NUM_LAYERS))
    tail = [
        kv
        for number, group in enumerate(GROUPS.groups)
        for kv in layout.decode(number, blocks[number][len(blocks[number]) - kept[group.start] :], head_len)
    ]
    return whole, tail


# ---- groups of layers ----


def test_groups_are_the_layers_between_their_ends() -> None:
    assert GROUPS.groups == (range(3), range(3, 4), range(4, 6))
    assert LayerGroups((2,)).groups == (range(2),)


def test_all_layers_of_groups_come_back_changed() -> None:
    assert GROUPS.lossy_layers == (True,) * NUM_LAYERS
    assert not GROUPS.is_lossless


def test_other_groups_are_stored_in_another_way() -> None:
    assert LayerGroups((3, 4, 6)) == GROUPS
    assert LayerGroups((3, 6)) != GROUPS


# ---- the layout ----


def test_a_decoder_says_how_its_layers_are_stored() -> None:
    _, layout = segment()
    assert layout.stored_as == GROUPS
    assert [layout.group_of(layer) for layer in range(NUM_LAYERS)] == [0, 0, 0, 1, 2, 2]


def test_the_block_of_a_group_is_that_of_its_first_layer() -> None:
    encoded, layout = segment()
    blocks = encoded.blocks
    assert [layout.sources(layer) for layer in range(NUM_LAYERS)] == [(0,), (0,), (0,), (3,), (4,), (4,)]
    assert layout.last_use == (2, 1, 2, 3, 5, 5)
    assert layout.layer_num_bytes == (len(blocks[0]), 0, 0, len(blocks[1]), len(blocks[2]), 0)
    assert sum(layout.layer_num_bytes) == encoded.num_bytes


def test_a_block_starts_with_its_first_tokens_and_has_one_part_for_each_record() -> None:
    encoded, layout = segment()
    params = encoded.params
    num_first_tokens = params["first_tokens"]
    assert num_first_tokens == NUM_FIRST_TOKENS - START
    for number, group in enumerate(GROUPS.groups):
        sizes = np.frombuffer(base64.b64decode(params["groups"][number]["records"]), "<u2")
        first, second, third = (4 * int(size) for size in sizes)
        # Those that are stored as they are lie before the first record.
        first += num_first_tokens * len(group) * TOKEN_BYTES
        starts = [layout.tail_start(group.start, token) for token in (0, 63, 64, 127, 128, 149)]
        assert starts == [0, 0, first, first, first + second, first + second]
        assert layout.layer_num_bytes[group.start] == first + second + third
        # The other layers of the group have no block.
        assert {layout.tail_start(layer, 100) for layer in group[1:]} <= {0}


@pytest.mark.parametrize(
    ("head_ends", "kept_from"),
    [
        # From before the segment on, everything is kept; what has no block is kept from the end.
        ((0,) * 6, (START, END, END, START, START, END)),
        ((END,) * 6, (END,) * 6),
        ((END + 9, END, END, START + 64, START + 63, START + 10), (END, END, END, START + 64, START, END)),
        # The layer of a group with the shortest head says from where on its block is kept.
        (
            (START + 140, START + 130, START + 127, START + 100, START + 70, START + 1),
            (START + 64, END, END, START + 64, START, END),
        ),
        (
            (END, END, START + 149, START + 149, START + 128, START + 128),
            (START + 128, END, END, START + 128, START + 128, END),
        ),
    ],
)
def test_blocks_are_kept_from_the_record_of_the_shortest_head_of_their_group(
    head_ends: tuple[int, ...], kept_from: tuple[int, ...]
) -> None:
    _, layout = segment()
    assert layout.kept_from(head_ends) == kept_from
    sizes = layout.kept_num_bytes(kept_from)
    for layer, (first, num_bytes) in enumerate(zip(kept_from, sizes, strict=True)):
        whole = layout.layer_num_bytes[layer]
        assert num_bytes == (0 if first == END else whole - layout.tail_start(layer, first - START))
    # All layers of a group can be decoded from where its block is kept.
    expected = [kept_from[group.start] for group in GROUPS.groups for _ in group]
    assert layout.decodable_from(kept_from) == tuple(expected)


@settings(max_examples=60)
@given(st.lists(st.integers(0, END + 20), min_size=NUM_LAYERS, max_size=NUM_LAYERS))
def test_what_is_kept_is_enough_for_any_heads_and_less_than_a_record_more(head_ends: list[int]) -> None:
    _, layout = segment()
    kept_from = layout.kept_from(head_ends)
    for group in GROUPS.groups:
        shortest = max(START, min(head_ends[layer] for layer in group))
        for layer in group:
            decodable_from = layout.decodable_from(kept_from)[layer]
            assert decodable_from == END if shortest >= END else 0 <= shortest - decodable_from < 64


@pytest.mark.parametrize("head_len", [0, 1, 63, 64, 100, 128, 149])
def test_what_is_kept_decodes_to_the_end_of_everything(head_len: int) -> None:
    for whole, tail in zip(*whole_and_tail(head_len), strict=True):
        assert torch.equal(tail.k, whole.k)
        assert torch.equal(tail.v, whole.v)


def test_layers_and_tokens_that_there_are_not_are_refused() -> None:
    _, layout = segment()
    for layer in (-1, NUM_LAYERS):
        with pytest.raises(CodecError, match=f"layer {layer} of a segment of 6 layers"):
            layout.sources(layer)
        with pytest.raises(CodecError, match=f"layer {layer} of a segment of 6 layers"):
            layout.tail_start(layer, 0)
    with pytest.raises(CodecError, match="5 tokens for a segment of 6 layers"):
        layout.kept_from((0,) * 5)
    for first_token in (START - 64, START + 1, START + 192):
        with pytest.raises(CodecError, match="no record of 64 tokens starts"):
            layout.kept_num_bytes((first_token, END, END, END, END, END))
        with pytest.raises(CodecError, match="no record of 64 tokens starts"):
            layout.decodable_from((first_token, END, END, END, END, END))
