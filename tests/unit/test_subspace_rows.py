"""The subspace rows of the quality benchmark: what they store of a turn, and what they count."""

from __future__ import annotations

from functools import cache

import orjson
import torch

from benchmarks.quality.methods import LIMITS, Subspace, Turn, subspace_methods
from krul_backend.attention.rows import QueryRows, attention_drawn
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import make_bases, make_layers

START, NUM_TOKENS = 32, 96
NUM_LAYERS = 3


@cache
def codec() -> SubspaceCodec:
    bases = make_bases(LayerShape(2, 16, 16, torch.bfloat16), [2, 1], rank=20)
    return SubspaceCodec(bases, rotary_table(16))


@cache
def others() -> ModelCodecs:
    return ModelCodecs(codec().bases.shape, NUM_LAYERS, rotary_table(16))


@cache
def turn(outside: float = 0.0) -> Turn:
    end = START + NUM_TOKENS
    kv = tuple(make_layers(codec().bases, end, rotary_table(16), outside=outside))
    segment = tuple(LayerKV(each.k[START:].contiguous(), each.v[START:].contiguous()) for each in kv)
    generator = torch.Generator().manual_seed(1)
    positions = torch.arange(START, end, 8)
    queries = torch.randn(NUM_LAYERS, len(positions), 4, 16, generator=generator)
    rows = QueryRows(queries, positions, torch.arange(4) // 2, 0.25)
    return Turn(START, segment, kv, rows, AttentionStatistics.zero(NUM_LAYERS, 4), 0, 0)


def test_a_row_is_the_codec_with_the_turns_share_of_the_limit() -> None:
    stored = Subspace("row", codec(), others(), 0.1).start()(turn())
    attention = attention_drawn(turn().rows, lambda layer: turn().kv[layer].k, START, NUM_TOKENS)
    encoded = codec().encode(
        turn().segment.__getitem__,
        start_token=START,
        num_tokens=NUM_TOKENS,
        attention=attention,
        # The turn has three quarters of the conversation's tokens.
        max_damage=0.075,
    )
    assert stored.damage == encoded.damage
    assert 0.9 * 0.075 < encoded.damage <= 0.075 * (1 + 1e-5)
    # Blocks, and the parameters as they are stored: sizes and scales are this segment's own.
    params = len(orjson.dumps(encoded.params))
    assert params > 200
    assert stored.num_bytes == sum(len(block) for block in encoded.blocks) + params
    decoder = codec().open(encoded.params, start_token=START, num_tokens=NUM_TOKENS)
    decoded = decoder.decode_all(encoded.blocks)
    assert len(stored.segment) == NUM_LAYERS
    for found, expected, true in zip(stored.segment, decoded, turn().segment, strict=True):
        assert torch.equal(found.k, expected.k)
        assert torch.equal(found.v, expected.v)
        assert 0 < (found.v.float() - true.v.float()).abs().max() < 5


def test_a_turn_that_the_bases_cannot_represent_is_in_few_bits() -> None:
    strange = turn(outside=3.0)
    stored = Subspace("row", codec(), others(), 0.1).start()(strange)
    assert stored.damage is not None
    assert 0 < stored.damage < 0.075
    native = NUM_LAYERS * NUM_TOKENS * 2 * 2 * 16 * 2
    assert native / 4 < stored.num_bytes < 0.7 * native
    for found, true in zip(stored.segment, strange.segment, strict=True):
        assert 0 < (found.v.float() - true.v.float()).abs().max() < 0.1


def test_a_turn_that_few_bits_cannot_keep_either_is_native() -> None:
    strange = turn(outside=3.0)
    stored = Subspace("row", codec(), others(), 1e-5).start()(strange)
    assert stored.damage == 0
    # Keys and values of two heads, 16 elements of bf16 each.
    assert stored.num_bytes == NUM_LAYERS * NUM_TOKENS * 2 * 2 * 16 * 2
    for found, true in zip(stored.segment, strange.segment, strict=True):
        assert torch.equal(found.k, true.k)
        assert torch.equal(found.v, true.v)


def test_there_is_a_row_for_each_limit_and_a_larger_one_takes_fewer_bytes() -> None:
    rows = subspace_methods(codec(), others())
    assert [row.limit for row in rows] == list(LIMITS)
    assert len({row.name for row in rows}) == len(rows)
    sizes = [row.start()(turn()).num_bytes for row in rows[1:]]
    assert sizes == sorted(sizes, reverse=True)
