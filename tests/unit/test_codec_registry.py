"""The codecs of a model, found by name: what each of them stores comes back by its parameters alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import orjson
import pytest
import torch

from krul_backend.codec.interface import Codec, TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.registry import CODECS, ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.held_bases import RunLimit
from krul_backend.codec.units import UnitPlan
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.codec_builders import random_layers, rotary_table
from tests.support.subspace_builders import make_bases, make_layers

SHAPE = LayerShape(2, 16, 16, torch.float32)
START, NUM_TOKENS, NUM_LAYERS = 32, 150, 4
ROTARY = rotary_table(16)
SUBSPACE = SubspaceCodec(make_bases(SHAPE, [2, 2]), ROTARY)


@pytest.fixture
def codecs() -> ModelCodecs:
    return ModelCodecs(SHAPE, NUM_LAYERS, ROTARY, subspace=SUBSPACE)


def layers_for(name: str) -> Sequence[LayerKV]:
    if name == "subspace":
        return make_layers(SUBSPACE.bases, NUM_TOKENS, ROTARY, start_token=START)
    return random_layers(SHAPE, NUM_LAYERS, NUM_TOKENS)


def how(name: str, run: TokenRun) -> Any:
    """What each codec is told about a run."""
    if name == "native":
        return UnitPlan(Strategy.from_pairs(NUM_LAYERS), damage=0.25)
    if name == "pairs":
        return UnitPlan(Strategy.from_pairs(NUM_LAYERS, [(0, 2)], Precision.INT8), damage=0.25)
    attention = torch.full((NUM_LAYERS, SHAPE.num_kv_heads, run.num_tokens), 1 / NUM_TOKENS)
    sample = SUBSPACE.sample(
        run.read, start_token=run.start_token, num_tokens=run.num_tokens, attention=attention
    )
    return RunLimit(0.1, sample, 0.25, attention)


@pytest.mark.parametrize("name", [*CODECS, "subspace"])
@pytest.mark.parametrize("head_ends", [None, (START + 130, START + 70, START + 70, START)])
def test_what_a_codec_encodes_is_opened_by_its_name(
    codecs: ModelCodecs, name: str, head_ends: tuple[int, ...] | None
) -> None:
    layers, paused = layers_for(name), list[None]()
    run = TokenRun(layers.__getitem__, START, NUM_TOKENS, head_ends)
    codec: Codec[Any] = codecs[name]
    encoded = codec.encode(run, how(name, run), lambda: paused.append(None))
    blocks = dict(encoded.blocks)
    assert paused
    assert (encoded.codec, encoded.params["codec"]) == (name, name)
    params = orjson.loads(orjson.dumps(encoded.params))
    decoder = codecs.open(params, start_token=START, num_tokens=NUM_TOKENS)
    assert decoder.damage >= 0.25
    # Sizes are those that were announced, and heads are left out of them.
    kept = decoder.kept_from(head_ends or (START,) * NUM_LAYERS)
    assert encoded.layer_first_token == kept
    assert encoded.layer_num_bytes == decoder.kept_num_bytes(kept)
    sizes = [blocks[layer].numel() if layer in blocks else 0 for layer in range(NUM_LAYERS)]
    assert tuple(sizes) == encoded.layer_num_bytes
    assert sum(sizes) + encoded.left_out_num_bytes == sum(decoder.layer_num_bytes)
    assert (encoded.left_out_num_bytes > 0) == (head_ends is not None)


def test_an_unknown_codec_is_answered_with_the_names(codecs: ModelCodecs) -> None:
    with pytest.raises(CodecError, match=r"'zip' is unknown \(known: native, pairs, subspace\)"):
        codecs["zip"]
    with pytest.raises(CodecError, match="'zip' is unknown"):
        codecs.open({"codec": "zip"}, start_token=0, num_tokens=1)


def test_layers_that_come_back_as_they_were_are_stored_by_the_native_codec(codecs: ModelCodecs) -> None:
    native = Strategy.from_pairs(NUM_LAYERS)
    assert codecs.of(native).name == codecs.native.name == "native"
    for strategy in (
        Strategy.from_pairs(NUM_LAYERS, [(0, 1)]),
        Strategy.from_pairs(NUM_LAYERS, (), Precision.INT8),
    ):
        assert codecs.of(strategy).name == "pairs"
        with pytest.raises(CodecError, match="none of the codec native"):
            codecs.native.layer_token_bytes(strategy)
