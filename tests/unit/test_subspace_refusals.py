"""What the subspace codec refuses to encode, parse and decode, and that nothing damaged crashes it."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.coefficients.scales import RECORD_TOKENS
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.parameters import GroupParameters, SubspaceParameters
from krul_backend.errors import CodecError
from tests.support.subspace_builders import make_bases
from tests.support.subspace_cases import make_case, standard_bases, standard_case


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0},
        {"start_token": -1},
        {"max_damage": 0.0},
        {"max_damage": -1.0},
        {"max_damage": math.nan},
        # The table of the tests has 1,024 positions.
        {"start_token": 1000},
    ],
)
def test_what_cannot_be_encoded_is_refused(changes: dict[str, Any]) -> None:
    case = standard_case()
    arguments = {"start_token": 0, "num_tokens": 150, "attention": None, "max_damage": 0.1, **changes}
    with pytest.raises(CodecError):
        case.codec.encode(case.layers.__getitem__, **arguments)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_kv_that_is_no_number_is_refused(value: float) -> None:
    layers = [LayerKV(kv.k.clone(), kv.v.clone()) for kv in standard_case().layers]
    layers[1].v[20, 1, 3] = value
    with pytest.raises(CodecError):
        make_case(standard_bases(), layers=layers)


def change(path: Sequence[str | int], value: Any) -> dict[str, Any]:
    """The standard case's parameters with another value at ``path``."""
    params: dict[str, Any] = orjson.loads(orjson.dumps(standard_case().encoded.params))
    place: Any = params
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return params


@pytest.mark.parametrize(
    ("path", "value"),
    [
        (["codec"], "shared-pair"),
        (["version"], 1),
        (["version"], True),
        (["version"], 2.0),
        (["bases"], "0" * 64),
        (["bases"], None),
        (["first_tokens"], -1),
        (["first_tokens"], 151),
        (["first_tokens"], RECORD_TOKENS + 1),
        (["first_tokens"], True),
        (["first_tokens"], 1.0),
        (["step"], 0),
        (["step"], -0.1),
        (["step"], True),
        (["step"], math.nan),
        (["step"], math.inf),
        (["step"], 1e300),
        (["step"], 1e-300),
        (["step"], 10**400),
        (["step"], "0.1"),
        (["damage"], -0.1),
        (["damage"], math.nan),
        (["damage"], math.inf),
        (["damage"], 10**400),
        (["groups"], None),
        (["groups"], []),
        (["groups"], {}),
        (["groups", 1], None),
        (["groups", 1], {"offsets": "AAAA"}),
        (["groups", 1, "more"], 1),
        (["groups", 0, "offsets"], ""),
        (["groups", 0, "offsets"], "AAAA"),
        (["groups", 0, "offsets"], "//"),
        (["groups", 0, "offsets"], "ä==="),
        (["groups", 0, "offsets"], None),
        (["groups", 0, "records"], ""),
        (["groups", 0, "records"], "AAAA"),
        # Three sizes are 8 digits: a number is no text.
        (["groups", 0, "records"], 12345678),
        (["more"], 1),
    ],
)
def test_other_parameters_are_refused(path: Sequence[str | int], value: Any) -> None:
    with pytest.raises(CodecError):
        standard_case().codec.open(change(path, value), start_token=0, num_tokens=150)


@pytest.mark.parametrize("key", list(standard_case().encoded.params))
def test_missing_parameters_are_refused(key: str) -> None:
    params = {name: value for name, value in standard_case().encoded.params.items() if name != key}
    with pytest.raises(CodecError):
        standard_case().codec.open(params, start_token=0, num_tokens=150)


def test_parameters_of_another_place_or_other_bases_are_refused() -> None:
    case = standard_case()
    for place in ({"num_tokens": 64}, {"num_tokens": 0}, {"start_token": -1}, {"start_token": 1000}):
        with pytest.raises(CodecError):
            case.codec.open(case.encoded.params, **{"start_token": 0, "num_tokens": 150, **place})
    others = SubspaceCodec(make_bases(standard_bases().shape, [2, 1], seed=1), case.rotary)
    with pytest.raises(CodecError, match="not with those at hand"):
        others.open(case.encoded.params, start_token=0, num_tokens=150)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("AAAA"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100)
@given(st.data())
def test_random_parameters_decode_or_are_refused(data: st.DataObject) -> None:
    params = dict(standard_case().encoded.params)
    if data.draw(st.booleans(), "in a group"):
        group = dict(params["groups"][0])
        group[data.draw(st.sampled_from(["offsets", "records"]))] = data.draw(
            _json_values | st.binary(max_size=8).map(lambda raw: base64.b64encode(raw).decode())
        )
        params["groups"] = [group, params["groups"][1]]
    else:
        params[data.draw(st.sampled_from(sorted(params)))] = data.draw(_json_values)
    case = standard_case()
    try:
        decoder = case.codec.open(params, start_token=0, num_tokens=150)
        for kv in decoder.decode_all(case.encoded.blocks):
            assert kv.k.shape == (150, 2, 32)
    except CodecError:
        pass


@settings(max_examples=100)
@given(data=st.data())
def test_damaged_blocks_decode_to_something_or_are_refused(data: st.DataObject) -> None:
    case = standard_case()
    group = data.draw(st.integers(0, 1), "group")
    block = case.encoded.blocks[group].clone()
    if data.draw(st.booleans(), "all of it"):
        seed = data.draw(st.integers(0, 1 << 32), "seed")
        block = torch.from_numpy(np.random.default_rng(seed).integers(0, 256, len(block), np.uint8))
    else:
        for _ in range(data.draw(st.integers(1, 4), "bytes")):
            block[data.draw(st.integers(0, len(block) - 1), "place")] ^= data.draw(st.integers(1, 255))
    try:
        for kv in case.decoder.decode(group, block, 0):
            assert kv.k.shape == (150, 2, 32)
    except CodecError:
        pass


def test_most_damage_to_a_block_is_seen() -> None:
    case = standard_case()
    seen = 0
    whole, layer = case.encoded.blocks[1], case.bases.groups[1].first_layer
    for place in range(case.decoder.tail_start(layer, 64), case.decoder.tail_start(layer, 128), 5):
        damaged = whole.clone()
        damaged[place] ^= 16
        try:
            decoded = case.decoder.decode(1, damaged, 0)[0].k
        except CodecError:
            seen += 1
            continue
        # What is not seen changes the record that it is in, and no other.
        good = case.decode(1)[0].k
        assert not torch.equal(decoded[64:128], good[64:128])
        assert torch.equal(decoded[:64], good[:64])
        assert torch.equal(decoded[128:], good[128:])
    assert seen > 0


def test_blocks_of_another_size_or_kind_are_refused() -> None:
    case = standard_case()
    block = case.encoded.blocks[0]
    for wrong in (
        block[:-1],
        block[4:],
        torch.cat([block, block[:4]]),
        block[:0],
        block.to(torch.int16),
        block[None],
    ):
        with pytest.raises(CodecError, match="a block of"):
            case.decoder.decode(0, wrong, 0)
    tail = block[case.decoder.tail_start(0, 100) :]
    with pytest.raises(CodecError, match="a block of"):
        case.decoder.decode(0, tail, 20)
    for token in (-1, 150):
        with pytest.raises(CodecError, match=f"tokens {token} to 149 of a segment of 150"):
            case.decoder.decode(0, block, token)
    for blocks in (case.encoded.blocks[:1], (*case.encoded.blocks, block)):
        with pytest.raises(CodecError, match=f"2 groups have as many blocks, got {len(blocks)}"):
            case.decoder.decode_all(blocks)


@settings(max_examples=50)
@given(
    num_tokens=st.integers(1, 300),
    rank=st.integers(1, 70),
    seed=st.integers(0, 1000),
    step=st.floats(2**-24, 2**8),
    damage=st.floats(0, 100),
    num_first_tokens=st.integers(0, 5),
)
def test_parameters_are_the_same_after_json(
    num_tokens: int, rank: int, seed: int, step: float, damage: float, num_first_tokens: int
) -> None:
    bases = make_bases(LayerShape(1, 64, 64, torch.float32), [1, 2], rank=rank)
    random = np.random.default_rng(seed)
    groups = tuple(
        GroupParameters(
            random.integers(0, 16, -(-rank // 16), np.uint8),
            random.integers(0, 1 << 16, -(-num_tokens // RECORD_TOKENS), np.uint32) * np.uint32(4),
        )
        for _ in bases.groups
    )
    first_tokens = min(num_first_tokens, num_tokens)
    before = SubspaceParameters(bases.digest, first_tokens, step, damage, groups)
    after = SubspaceParameters.parse(orjson.loads(orjson.dumps(before.to_json())), bases, num_tokens)
    assert after.to_json() == before.to_json()
    assert (after.num_first_tokens, after.step, after.damage) == (first_tokens, step, damage)
    for mine, theirs in zip(groups, after.groups, strict=True):
        assert mine.offsets.tolist() == theirs.offsets.tolist()
        assert mine.record_num_bytes.tolist() == theirs.record_num_bytes.tolist()


def test_a_record_that_is_too_long_for_its_size_is_refused() -> None:
    group = GroupParameters(np.zeros(1, np.uint8), np.array([1 << 18], np.uint32))
    with pytest.raises(CodecError, match="262144 bytes"):
        group.stored()
