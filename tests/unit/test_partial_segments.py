"""Blocks that lack their first tokens: what is kept for which heads, and what can be decoded from it."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.interface import EncodedRun, TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.units import UnitPlan
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.codec_builders import START_TOKEN, encode_all, random_layers, rotary_table

SHAPE = LayerShape(2, 16, 8, torch.float32)
GROUP = 16
NUM_LAYERS = 4
PAIRS = [(0, 2), (1, 3)]
TABLE = rotary_table(16)


def make_partial_codec() -> ModelCodecs:
    return ModelCodecs(SHAPE, NUM_LAYERS, TABLE, CodecOptions(group_size=GROUP, retained_amount=0.2))


def encode_kept(
    codec: ModelCodecs, strategy: Strategy, layers: list[LayerKV], head_ends: list[int]
) -> tuple[EncodedRun, dict[int, torch.Tensor]]:
    run = TokenRun(layers.__getitem__, START_TOKEN, layers[0].k.shape[0], head_ends)
    encoding = codec.of(strategy).encode(run, UnitPlan(strategy))
    blocks = {layer: torch.empty(0, dtype=torch.uint8) for layer in range(NUM_LAYERS)}
    blocks.update(encoding.blocks)
    return encoding, blocks


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


@settings(max_examples=150)
@given(
    is_pair=st.booleans(),
    precision=st.sampled_from(list(Precision)),
    num_tokens=st.sampled_from([1, 15, 16, 17, 48, 50]),
    heads=st.lists(st.integers(-20, 80), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
    is_monotone=st.booleans(),
    seed=st.integers(0, 100),
)
def test_what_is_kept_decodes_to_what_the_whole_decodes_to(
    is_pair: bool, precision: Precision, num_tokens: int, heads: list[int], is_monotone: bool, seed: int
) -> None:
    codec = make_partial_codec()
    strategy = Strategy.from_pairs(NUM_LAYERS, PAIRS if is_pair else [], precision)
    layers = random_layers(SHAPE, NUM_LAYERS, num_tokens, seed)
    head_ends = [START_TOKEN + head for head in (sorted(heads, reverse=True) if is_monotone else heads)]
    whole_encoding, whole, whole_decoder = encode_all(codec, strategy, layers)
    encoding, kept = encode_kept(codec, strategy, layers, head_ends)
    assert encoding.layer_num_bytes == tuple(kept[layer].numel() for layer in range(NUM_LAYERS))
    assert encoding.left_out_num_bytes <= sum(whole_encoding.layer_num_bytes) - sum(encoding.layer_num_bytes)
    for layer in range(NUM_LAYERS):
        # A block that is kept is the end of the whole one; of a block that starts elsewhere nothing is.
        assert bits(kept[layer]) == bits(whole[layer][whole[layer].numel() - kept[layer].numel() :])
    decoder = codec.open(encoding.params, start_token=START_TOKEN, num_tokens=num_tokens)
    end_token = START_TOKEN + num_tokens
    for layer, first_token in enumerate(decoder.decodable_from(encoding.layer_first_token)):
        assert first_token <= max(head_ends[layer], START_TOKEN)
        if first_token == end_token:
            continue
        again = decoder.decode(layer, kept, first_token - START_TOKEN, num_tokens)
        expected = whole_decoder.decode(layer, whole, first_token - START_TOKEN, num_tokens)
        assert (bits(again.k), bits(again.v)) == (bits(expected.k), bits(expected.v))


@settings(max_examples=100)
@given(
    is_pair=st.booleans(),
    num_tokens=st.integers(1, 70),
    heads=st.lists(st.integers(-20, 100), min_size=NUM_LAYERS, max_size=NUM_LAYERS),
)
def test_exactly_the_groups_that_some_layer_needs_are_kept(
    is_pair: bool, num_tokens: int, heads: list[int]
) -> None:
    """Against a search through all starts of groups."""
    codec = make_partial_codec()
    strategy = Strategy.from_pairs(NUM_LAYERS, PAIRS if is_pair else [])
    layers = random_layers(SHAPE, NUM_LAYERS, num_tokens)
    _, _, decoder = encode_all(codec, strategy, layers)
    head_ends = [START_TOKEN + head for head in heads]
    end = START_TOKEN + num_tokens
    starts = [*range(START_TOKEN, end, GROUP), end]
    for layer, kept in enumerate(decoder.kept_from(head_ends)):
        users = [layer] if not is_pair or layer > 1 else [layer, layer + 2]
        needed = [token for user in users for token in range(START_TOKEN, end) if token >= head_ends[user]]
        assert kept == max(start for start in starts if all(start <= token for token in needed))


def test_a_pair_keeps_of_its_lower_block_what_the_upper_layer_needs() -> None:
    layers = random_layers(SHAPE, NUM_LAYERS, 64)
    codec = make_partial_codec()
    _, _, decoder = encode_all(codec, Strategy.from_pairs(NUM_LAYERS, [(0, 3)]), layers)
    kept = decoder.kept_from([START_TOKEN + head for head in (64, 40, 32, 20)])
    assert [token - START_TOKEN for token in kept] == [16, 32, 32, 16]
    assert [token - START_TOKEN for token in decoder.decodable_from(kept)] == [16, 32, 32, 16]
    # Trimmed further by somebody who wanted less of the lower layer alone, the upper one loses it as well.
    lower_cut = (START_TOKEN + 48, *kept[1:])
    assert [token - START_TOKEN for token in decoder.decodable_from(lower_cut)] == [48, 32, 32, 48]


def test_layers_of_which_nothing_is_kept_are_not_read() -> None:
    layers = random_layers(SHAPE, NUM_LAYERS, 40)
    read: list[int] = []

    def read_layer(layer: int) -> LayerKV:
        read.append(layer)
        return layers[layer]

    codec = make_partial_codec()
    strategy = Strategy.from_pairs(NUM_LAYERS, PAIRS, Precision.INT4)
    end = START_TOKEN + 40
    run = TokenRun(read_layer, START_TOKEN, 40, [end + 8, START_TOKEN, end, START_TOKEN])
    encoding = codec.of(strategy).encode(run, UnitPlan(strategy))
    assert set(read) == {1, 3}
    assert {layer for layer, _ in encoding.blocks} == {1, 3}
    assert set(read) == {1, 3}
    assert encoding.layer_first_token == (end, START_TOKEN, end, START_TOKEN)
    assert encoding.layer_num_bytes[0] == encoding.layer_num_bytes[2] == 0
    # What can be read of the manifest's parameters does not depend on what was left out.
    whole = codec.open(encoding.params, start_token=START_TOKEN, num_tokens=40).layer_num_bytes
    assert encoding.left_out_num_bytes == whole[0] + whole[2] > 0


def test_a_segment_of_which_nothing_is_kept() -> None:
    layers = random_layers(SHAPE, NUM_LAYERS, 20)
    codec = make_partial_codec()
    encoding, blocks = encode_kept(
        codec, Strategy.from_pairs(NUM_LAYERS, PAIRS), layers, [10**6] * NUM_LAYERS
    )
    assert encoding.layer_num_bytes == (0,) * NUM_LAYERS
    assert all(block.numel() == 0 for block in blocks.values())


def test_blocks_that_start_inside_a_group_are_refused() -> None:
    layers = random_layers(SHAPE, NUM_LAYERS, 40)
    _, _, decoder = encode_all(make_partial_codec(), Strategy.from_pairs(NUM_LAYERS), layers)
    for wrong in (START_TOKEN + 8, START_TOKEN - 16, START_TOKEN + 48):
        first_tokens = [START_TOKEN] * (NUM_LAYERS - 1) + [wrong]
        for ask in (decoder.kept_num_bytes, decoder.decodable_from):
            with pytest.raises(CodecError, match=f"layer 3 is kept from token {wrong} on"):
                ask(first_tokens)
    token_bytes = 2 * (16 + 8) * 4
    end = START_TOKEN + 40
    assert decoder.kept_num_bytes([START_TOKEN, START_TOKEN + 16, START_TOKEN + 32, end]) == (
        40 * token_bytes,
        24 * token_bytes,
        8 * token_bytes,
        0,
    )


def test_heads_of_another_number_of_layers_are_refused() -> None:
    layers = random_layers(SHAPE, NUM_LAYERS, 40)
    codec = make_partial_codec()
    strategy = Strategy.from_pairs(NUM_LAYERS)
    _, _, decoder = encode_all(codec, strategy, layers)
    with pytest.raises(CodecError, match="3 tokens for a segment of 4 layers"):
        encode_kept(codec, strategy, layers, [START_TOKEN] * 3)
    for ask in (decoder.kept_from, decoder.kept_num_bytes, decoder.decodable_from):
        with pytest.raises(CodecError, match="5 tokens for a segment of 4 layers"):
            ask([START_TOKEN] * 5)


@pytest.mark.parametrize("precision", list(Precision))
def test_bytes_of_a_token_are_those_of_full_groups(precision: Precision) -> None:
    codec = make_partial_codec()
    strategy = Strategy.from_pairs(NUM_LAYERS, PAIRS, precision)
    layers = random_layers(SHAPE, NUM_LAYERS, 3 * GROUP)
    _, _, decoder = encode_all(codec, strategy, layers)
    assert codec.of(strategy).last_use(strategy) == decoder.last_use
    for layer, token_bytes in enumerate(codec.of(strategy).layer_token_bytes(strategy)):
        # From one group to the next: without what a pair retains, which lies at the end.
        two_groups = decoder.tail_start(layer, 2 * GROUP) - decoder.tail_start(layer, 0)
        assert token_bytes * 2 * GROUP == two_groups


def test_layers_without_a_partner_are_needed_by_themselves_alone() -> None:
    codec = make_partial_codec()
    alone, paired = Strategy.from_pairs(NUM_LAYERS), Strategy.from_pairs(NUM_LAYERS, [(0, 3)])
    assert codec.of(alone).last_use(alone) == tuple(range(NUM_LAYERS))
    assert codec.of(paired).last_use(paired) == (3, 1, 2, 3)
    with pytest.raises(CodecError):
        codec.of(alone).last_use(Strategy.from_pairs(NUM_LAYERS + 1))
