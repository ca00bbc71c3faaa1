from __future__ import annotations

import copy
import json
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.units import UnitPlan
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.codec_builders import START_TOKEN, encode_all, make_codec, random_layers

SHAPE = LayerShape(2, 16, 16, torch.float16)
NUM_TOKENS = 20
CODEC = make_codec(SHAPE, 4, CodecOptions(group_size=16))
ENCODING, BLOCKS, _ = encode_all(
    CODEC, Strategy.from_pairs(4, [(0, 2)], Precision.INT4), random_layers(SHAPE, 4, NUM_TOKENS)
)


def changed(path: tuple[str | int, ...], value: object) -> dict[str, Any]:
    params = copy.deepcopy(ENCODING.params)
    *outer, last = path
    place: Any = params
    for key in outer:
        place = place[key]
    place[last] = value
    return params


@pytest.mark.parametrize(
    ("params", "message"),
    [
        (None, "without the name of a codec"),
        ({}, "without the name of a codec"),
        (changed(("codec",), ["pairs"]), "without the name of a codec"),
        (changed(("codec",), "raw"), "codec 'raw' is unknown"),
        (changed(("codec",), "segment"), "codec 'segment' is unknown"),
        (changed(("codec",), "native"), "not the parameters of codec 'native'"),
        (changed(("codec",), "subspace"), "bases"),
        (changed(("version",), 0), "version"),
        (changed(("version",), 2), "version"),
        (changed(("version",), True), "version"),
        (changed(("surplus",), 1), "surplus"),
        (changed(("group_size",), 0), "group_size"),
        (changed(("group_size",), 16.0), "group_size"),
        (changed(("are_keys_unrotated",), 1), "are_keys_unrotated"),
        (changed(("layers", 0, "partner"), 4), "paired with layer 4 of 4"),
        (changed(("layers", 0, "partner"), 0), "paired with itself"),
        (changed(("layers", 1, "partner"), 2), "paired with layer 2, and that one with 0"),
        (changed(("layers", 0, "partner"), None), "layer 2 is paired with layer 0"),
        (changed(("layers", 0, "precision"), "int3"), "int3"),
        (changed(("layers", 0, "precision"), ["int4"]), "precision"),
        (changed(("layers", 0, "precision"), "int8"), "a pair has one precision"),
        (changed(("layers", 0), 3), "a layer of a strategy"),
        (changed(("layers",), "layers"), "array"),
        (changed(("layers",), []), "at least one layer"),
        (changed(("layers",), ENCODING.params["layers"][:3]), "a strategy of 3 layers"),
        (changed(("pairs",), []), "1 pairs have"),
        (changed(("pairs",), [{"k": [1, 1]}]), "field `v`"),
        (changed(("pairs", 0, "sharing"), "slerp"), "field `sharing`"),
        (changed(("pairs", 0), {"sharing": "predicted", "map": "3"}), "field `(k|sharing)`"),
        (changed(("pairs", 0), [[1, 1], [1, 1]]), "got `array`"),
        (changed(("pairs", 0, "k"), [1]), "2 KV heads"),
        (changed(("pairs", 0, "v"), [0, NUM_TOKENS + 1]), "not all in 0..20"),
        (changed(("pairs", 0, "v"), [0, -1]), ">= 0"),
        (changed(("pairs", 0, "v"), [0, 1.5]), "got `float`"),
        (changed(("damage",), -0.1), "damage"),
        (changed(("damage",), True), "damage"),
        (changed(("damage",), "0.1"), "damage"),
    ],
)
def test_contradicting_parameters_are_refused(params: Any, message: str) -> None:
    with pytest.raises(CodecError, match=message):
        CODEC.open(params, start_token=START_TOKEN, num_tokens=NUM_TOKENS)


@pytest.mark.parametrize(("start_token", "num_tokens"), [(-1, 20), (0, 0), (1010, 20)])
def test_impossible_places_are_refused(start_token: int, num_tokens: int) -> None:
    with pytest.raises(CodecError):
        CODEC.open(ENCODING.params, start_token=start_token, num_tokens=num_tokens)


def test_parameters_survive_json() -> None:
    again = json.loads(json.dumps(ENCODING.params))
    assert again == ENCODING.params
    decoder = CODEC.open(again, start_token=START_TOKEN, num_tokens=NUM_TOKENS)
    assert decoder.layer_num_bytes == ENCODING.layer_num_bytes


json_values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-3, 70)
    | st.floats()
    | st.sampled_from(["native", "int8", "int4", "pairs", "k", "partner", ""]),
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(st.sampled_from(["k", "v", "precision", "partner"]), inner, max_size=3)
    ),
    max_leaves=8,
)


def all_paths(value: Any, path: tuple[str | int, ...] = ()) -> list[tuple[str | int, ...]]:
    paths = [path] if path else []
    keys = value if isinstance(value, dict) else range(len(value)) if isinstance(value, list) else ()
    for key in keys:
        paths += all_paths(value[key], (*path, key))
    return paths


@settings(max_examples=400)
@given(path=st.sampled_from(all_paths(ENCODING.params)), value=json_values)
def test_any_parameters_are_refused_or_decode_to_something(
    path: tuple[str | int, ...], value: object
) -> None:
    try:
        decoder = CODEC.open(changed(path, value), start_token=START_TOKEN, num_tokens=NUM_TOKENS)
    except CodecError:
        return
    # Accepted: then blocks of the sizes it states can be decoded, whatever lies in them.
    blocks = {
        layer: torch.full((num_bytes,), 7, dtype=torch.uint8)
        for layer, num_bytes in enumerate(decoder.layer_num_bytes)
    }
    for layer in range(4):
        assert decoder.decode(layer, blocks, 3, NUM_TOKENS).k.shape == (NUM_TOKENS - 3, 2, 16)


@settings(max_examples=100)
@given(layer=st.integers(0, 3), seed=st.integers(0, 10_000))
def test_random_bytes_never_crash_the_decoder(layer: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    blocks = {
        source: torch.randint(0, 256, block.shape, dtype=torch.uint8, generator=generator)
        for source, block in BLOCKS.items()
    }
    decoder = CODEC.open(ENCODING.params, start_token=START_TOKEN, num_tokens=NUM_TOKENS)
    decoded = decoder.decode(layer, blocks, 0, NUM_TOKENS)
    assert (decoded.k.shape, decoded.k.dtype) == ((NUM_TOKENS, 2, 16), torch.float16)


@pytest.mark.parametrize(
    ("strategy", "damage", "written", "read"),
    [
        (Strategy.from_pairs(4), None, "absent", 0.0),
        (Strategy.from_pairs(4, [], Precision.INT8), None, "absent", math.inf),
        (Strategy.from_pairs(4, [], Precision.INT8), 0.25, 0.25, 0.25),
        (Strategy.from_pairs(4), 0.125, 0.125, 0.125),
        (Strategy.from_pairs(4), math.inf, None, math.inf),
    ],
)
def test_what_a_segment_costs_is_read_as_it_was_noted(
    strategy: Strategy, damage: float | None, written: object, read: float
) -> None:
    run = TokenRun(random_layers(SHAPE, 4, NUM_TOKENS).__getitem__, 0, NUM_TOKENS)
    encoding = CODEC.of(strategy).encode(run, UnitPlan(strategy, damage))
    params = json.loads(json.dumps(encoding.params))
    assert params.get("damage", "absent") == written
    assert CODEC.open(params, start_token=0, num_tokens=NUM_TOKENS).damage == read
