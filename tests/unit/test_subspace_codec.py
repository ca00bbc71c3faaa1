"""Segments in a common subspace: what comes back, how far it may be off, and what is refused."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import orjson
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.codec.coefficients.coders import CoefficientCoder, FixedWidthCoder, RansCoder
from krul_backend.codec.coefficients.compiled import RECORD_TOKENS
from krul_backend.codec.interface import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, group_vectors
from krul_backend.codec.subspace.codec import EncodedSegment, SubspaceCodec
from krul_backend.codec.subspace.decoder import SegmentTokens, SubspaceDecoder
from krul_backend.codec.subspace.parameters import GroupParameters, SubspaceParameters
from krul_backend.codec.subspace.quantizer import (
    COARSEST_SHIFT,
    FINEST_SHIFT,
    ROUNDING,
    SHRINK,
    dequantize,
    quantize,
    step_shifts,
    token_steps,
)
from krul_backend.device import Device
from krul_backend.errors import CodecError
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import SHARE, make_bases, make_layers

CODERS: tuple[CoefficientCoder, ...] = (RansCoder(), FixedWidthCoder())
LARGEST_ERROR = max(ROUNDING + SHRINK, 1 - ROUNDING) + SHRINK
"""Of a coefficient, in steps of its token, unless it is clipped."""


@dataclass(frozen=True, eq=False)
class Case:
    """A segment before and after."""

    codec: SubspaceCodec
    rotary: RotaryTable | None
    layers: Sequence[LayerKV]
    start_token: int
    encoded: EncodedSegment
    decoder: SubspaceDecoder

    @property
    def bases(self) -> ModelBases:
        return self.codec.bases

    @property
    def num_tokens(self) -> int:
        return len(self.layers[0].k)

    def decode(self, group: int, first_token: int = 0) -> list[LayerKV]:
        block = self.encoded.blocks[group][self.decoder.tail_start(group, first_token) :]
        return self.decoder.decode(group, block, first_token)

    def coefficients(self, group: int, layers: Sequence[LayerKV]) -> torch.Tensor:
        """fp64 ``[T, R]`` of the KV of a group's layers."""
        positions = torch.arange(self.start_token, self.start_token + self.num_tokens)
        bare = [
            kv if self.rotary is None else LayerKV(self.rotary.unrotate(kv.k, positions), kv.v)
            for kv in layers
        ]
        basis = self.bases.groups[group]
        return (group_vectors(bare).double() - basis.mean.double()) @ basis.encoder.double()

    def errors(self, group: int) -> torch.Tensor:
        """What was lost of each coefficient, fp64 ``[T, R]``."""
        layers = self.bases.groups[group].layers
        true = [self.layers[layer] for layer in layers]
        return self.coefficients(group, self.decode(group)) - self.coefficients(group, true)


def make_case(
    bases: ModelBases,
    *,
    num_tokens: int = 150,
    start_token: int = 0,
    with_rotary: bool = True,
    coder: str = "rans",
    max_damage: float = 0.1,
    attention: torch.Tensor | None = None,
    num_first_tokens: int = 1,
    layers: Sequence[LayerKV] | None = None,
) -> Case:
    rotary = rotary_table(bases.shape.k_head_dim) if with_rotary else None
    codec = SubspaceCodec(bases, rotary, CODERS, num_first_tokens=num_first_tokens)
    if layers is None:
        layers = make_layers(bases, num_tokens, rotary, start_token=start_token)
    encoded = codec.encode(
        layers.__getitem__,
        start_token=start_token,
        num_tokens=num_tokens,
        attention=attention,
        max_damage=max_damage,
        coder=coder,
    )
    # What is stored is JSON.
    params = orjson.loads(orjson.dumps(encoded.params))
    decoder = codec.open(params, start_token=start_token, num_tokens=num_tokens)
    return Case(codec, rotary, layers, start_token, encoded, decoder)


@cache
def standard_bases() -> ModelBases:
    return make_bases(LayerShape(2, 32, 32, torch.float32), [2, 1], rank=20)


@cache
def standard_case(coder: str = "rans") -> Case:
    return make_case(standard_bases(), coder=coder)


@settings(max_examples=40, deadline=None)
@given(st.data())
def test_what_comes_back_is_within_the_step_of_each_token(data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.bfloat16, torch.float16, torch.float32]), "dtype")
    shape = LayerShape(
        data.draw(st.integers(1, 4), "KV heads"),
        data.draw(st.sampled_from([32, 64, 128, 256]), "size of a key"),
        data.draw(st.sampled_from([32, 64, 256]), "size of a value"),
        dtype,
    )
    # Groups of equal size, and what is left over.
    size, num_layers = data.draw(st.tuples(st.integers(1, 4), st.integers(1, 6)), "layers of a group, layers")
    sizes = [min(size, num_layers - first) for first in range(0, num_layers, size)]
    bases = make_bases(shape, sizes, rank=data.draw(st.sampled_from([1, 15, 16, 40, 70]), "rank"))
    case = make_case(
        bases,
        num_tokens=data.draw(st.one_of(st.integers(1, 140), st.sampled_from([63, 64, 65, 128])), "tokens"),
        start_token=data.draw(st.sampled_from([0, 1, 64, 333]), "start"),
        with_rotary=data.draw(st.booleans(), "with rotary embedding"),
        coder=data.draw(st.sampled_from([coder.name for coder in CODERS]), "coder"),
        max_damage=data.draw(st.sampled_from([1e-3, 0.1, 3.0]), "limit"),
        num_first_tokens=data.draw(st.integers(0, 5), "first tokens"),
    )
    num_first_tokens = case.encoded.params["first_tokens"]
    assert case.decoder.group_num_bytes == tuple(len(block) for block in case.encoded.blocks)
    assert case.encoded.num_bytes == sum(case.decoder.group_num_bytes)
    assert case.decoder.damage == case.encoded.damage
    for group, basis in enumerate(bases.groups):
        decoded = case.decode(group)
        for layer, kv in zip(basis.layers, decoded, strict=True):
            true = case.layers[layer]
            assert (kv.k.dtype, kv.v.dtype) == (dtype, dtype)
            assert (kv.k.shape, kv.v.shape) == (true.k.shape, true.v.shape)
            # Those are stored as they are.
            assert torch.equal(kv.k[:num_first_tokens], true.k[:num_first_tokens])
            assert torch.equal(kv.v[:num_first_tokens], true.v[:num_first_tokens])
        # All tokens are worth the same. What the pool's dtype rounds off comes on top, twice: rotary
        # embedding turns and rounds keys again.
        decoded_vectors = group_vectors(decoded).abs().double()
        rounded = 2 * torch.finfo(dtype).eps * (decoded_vectors + 1) @ basis.encoder.abs().double()
        step = case.encoded.params["step"]
        assert (case.errors(group).abs() <= LARGEST_ERROR * step + 2 * rounded + 1e-5).all()


@pytest.mark.parametrize("is_fast", [False, True])
def test_products_in_bf16_leave_the_largest_coefficients_exact(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(Device, "multiplies_bf16_fast", is_fast)
    bases = make_bases(LayerShape(2, 32, 32, torch.bfloat16), [2], rank=128)
    rotary = rotary_table(32)
    layers = make_layers(bases, 150, rotary)
    codec = SubspaceCodec(bases, rotary, CODERS)
    segment = SegmentTokens(0, 150, 1)
    found = codec._coefficients(0, layers.__getitem__, slice(0, 150), segment)
    bare = [LayerKV(rotary.unrotate(kv.k, torch.arange(150)), kv.v) for kv in layers]
    basis = bases.groups[0]
    exact = (group_vectors(bare).double() - basis.mean.double()) @ basis.encoder.double()
    errors = (found - exact).abs()
    assert errors[:, :64].max() < 3e-6
    assert errors[:, 64:].max() < (3e-3 if is_fast else 3e-6)
    assert (errors[:, 64:].max() > 1e-5) == is_fast
    rows = torch.tensor([0, 3, 77])
    sampled = codec._coefficients(0, layers.__getitem__, rows, segment)
    torch.testing.assert_close(sampled, found[rows], rtol=0, atol=2e-3 if is_fast else 3e-6)


@pytest.mark.parametrize("coder", ["rans", "fixed-width"])
@pytest.mark.parametrize(("num_tokens", "num_first_tokens"), [(1, 0), (5, 3), (70, 3), (193, 0)])
def test_any_tail_is_the_end_of_everything(coder: str, num_tokens: int, num_first_tokens: int) -> None:
    case = make_case(standard_bases(), num_tokens=num_tokens, coder=coder, num_first_tokens=num_first_tokens)
    for group in range(2):
        everything = case.decode(group)
        # Around the ends of records and of the segment.
        for first_token in sorted({*range(5), 62, 63, 64, 65, *range(num_tokens - 15, num_tokens)}):
            if not 0 <= first_token < num_tokens:
                continue
            for whole, tail in zip(everything, case.decode(group, first_token), strict=True):
                assert torch.equal(tail.k, whole.k[first_token:]), first_token
                assert torch.equal(tail.v, whole.v[first_token:]), first_token


def test_a_tail_leaves_out_the_records_before_it() -> None:
    case = make_case(standard_bases(), num_tokens=200)
    starts = [case.decoder.tail_start(0, token) for token in range(200)]
    for record in range(4):
        tokens = starts[record * RECORD_TOKENS : (record + 1) * RECORD_TOKENS]
        assert len(set(tokens)) == 1
    assert starts[0] == 0
    # The first token's own bytes, and those of one record.
    assert starts[64] > 2 * 2 * 2 * 32 * 4
    assert starts[64] < starts[128] < starts[192] < case.decoder.group_num_bytes[0]


def damage_of(case: Case) -> float:
    """What the errors that were made cost, all tokens being worth the same."""
    errors = [case.errors(group)[case.encoded.params["first_tokens"] :] for group in range(2)]
    return sum(float(each.square().sum()) for each in errors) / 2


@pytest.mark.parametrize("num_tokens", [40, 128])
def test_damage_is_what_was_expected_and_just_within_the_limit(num_tokens: int) -> None:
    for limit in (1e-3, 1e-2, 0.1, 1.0):
        case = make_case(standard_bases(), num_tokens=num_tokens, max_damage=limit)
        # Every token is in the sample. The search for the step ends within 2^(1 / 128), which is 1.1 % of
        # damage; that damage moves in jumps where coefficients are few takes some more.
        assert 0.95 * limit < case.encoded.damage <= limit * (1 + 1e-5)
        assert damage_of(case) == pytest.approx(case.encoded.damage, rel=1e-2)


def test_damage_of_a_long_segment_is_near_the_limit() -> None:
    case = make_case(standard_bases(), num_tokens=1000, max_damage=0.3)
    # 127 tokens with errors in 40 coefficients are the sample: its mean is off by 2 to 3 %.
    assert case.encoded.damage == pytest.approx(0.3, rel=0.08)
    assert damage_of(case) == pytest.approx(case.encoded.damage, rel=1e-2)


@settings(max_examples=40, deadline=None)
@given(
    # Below, the largest levels and the precision of fp32 set the damage, not the limit.
    limit=st.floats(-3, 1).map(lambda exponent: 10**exponent),
    factor=st.floats(1.2, 100),
    num_tokens=st.integers(2, 100),
    spread=st.sampled_from([0.01, 1.0]),
)
def test_a_smaller_limit_costs_bytes_and_gives_a_smaller_error(
    limit: float, factor: float, num_tokens: int, spread: float
) -> None:
    bases = standard_bases()
    layers = [
        LayerKV(kv.k * spread, kv.v * spread) for kv in make_layers(bases, num_tokens, rotary_table(32))
    ]
    narrow, wide = (
        make_case(bases, num_tokens=num_tokens, max_damage=each, layers=layers)
        for each in (limit, limit * factor)
    )
    assert narrow.encoded.params["step"] <= wide.encoded.params["step"]
    # The damage is within the limit, or both have the same step.
    assert narrow.encoded.damage <= max(limit * (1 + 1e-5), wide.encoded.damage * (1 + 1e-5))
    if wide.encoded.damage > limit:
        assert narrow.encoded.damage < wide.encoded.damage
    # A record of few tokens ends at a multiple of 4 bytes.
    assert 1.05 * narrow.encoded.num_bytes + 16 >= wide.encoded.num_bytes


def test_levels_are_not_clipped_to_reach_a_limit() -> None:
    # A smaller step than this would need larger levels than there are: the error would grow again.
    bases = standard_bases()
    case = make_case(bases, num_tokens=100, max_damage=1e-12, with_rotary=False)
    largest = max(
        float(case.coefficients(group, [case.layers[layer] for layer in basis.layers])[1:].abs().max())
        for group, basis in enumerate(bases.groups)
    )
    assert case.encoded.params["step"] * 32767 == pytest.approx(largest, rel=0.01)
    assert case.encoded.damage < 1e-4
    for group in range(2):
        assert case.errors(group).abs().max() < 1e-4


def test_the_factor_of_the_model_makes_the_step_smaller() -> None:
    plain = make_case(standard_bases(), max_damage=0.1)
    factor = ModelBases(standard_bases().shape, standard_bases().groups, 4.0)
    careful = make_case(factor, max_damage=0.1)
    assert careful.encoded.damage == pytest.approx(plain.encoded.damage, rel=0.02)
    # Damage goes with the square of the step where most levels are not zero.
    assert 0.4 < careful.encoded.params["step"] / plain.encoded.params["step"] < 0.6


def test_a_token_that_attention_dwells_on_loses_less() -> None:
    attention = torch.full((3, 2, 150), SHARE)
    attention[:, :, 77] = SHARE * 256
    attention[:, :, 99] = SHARE / 256
    case = make_case(standard_bases(), attention=attention)
    steps = [case.encoded.params["step"] * 2 ** (shift / 2) for shift in (FINEST_SHIFT, 0, COARSEST_SHIFT)]
    largest = torch.cat([case.errors(group).abs() for group in range(2)], dim=1).max(1).values
    assert largest[77] <= LARGEST_ERROR * steps[0] + 1e-5
    assert largest[99] <= LARGEST_ERROR * steps[2] + 1e-5
    others = torch.tensor([token for token in range(1, 150) if token not in (77, 99)])
    assert (largest[others] <= LARGEST_ERROR * steps[1] + 1e-5).all()
    # And they use what they are given.
    assert largest[77] < largest[others].min() < largest[others].max() < largest[99]


def test_attention_that_is_average_everywhere_counts_as_none_at_all() -> None:
    average = make_case(standard_bases(), attention=torch.full((3, 2, 150), SHARE))
    assert average.encoded.params["step"] == pytest.approx(standard_case().encoded.params["step"], rel=1e-4)
    assert average.encoded.num_bytes == standard_case().encoded.num_bytes


def test_a_conversation_of_first_tokens_only_comes_back_as_it_was() -> None:
    for num_tokens in (1, 3):
        case = make_case(standard_bases(), num_tokens=num_tokens, num_first_tokens=3)
        assert case.encoded.damage == case.decoder.damage == 0
        for group, basis in enumerate(case.bases.groups):
            for layer, kv in zip(basis.layers, case.decode(group), strict=True):
                assert torch.equal(kv.k, case.layers[layer].k)
                assert torch.equal(kv.v, case.layers[layer].v)


def test_segments_of_a_conversation_store_its_first_tokens_once() -> None:
    for start_token, expected in [(0, 4), (1, 3), (4, 0), (90, 0)]:
        case = make_case(standard_bases(), num_tokens=50, start_token=start_token, num_first_tokens=4)
        assert case.encoded.params["first_tokens"] == expected


def test_more_first_tokens_than_a_record_has_are_refused() -> None:
    with pytest.raises(CodecError, match="first tokens"):
        SubspaceCodec(standard_bases(), None, CODERS, num_first_tokens=RECORD_TOKENS + 1)
    with pytest.raises(CodecError, match="first tokens"):
        SubspaceCodec(standard_bases(), None, CODERS, num_first_tokens=-1)
    case = make_case(standard_bases(), num_first_tokens=RECORD_TOKENS)
    assert torch.equal(case.decode(1, 63)[0].k[0], case.layers[2].k[63])


@pytest.mark.parametrize(
    "changes",
    [
        {"num_tokens": 0},
        {"start_token": -1},
        {"max_damage": 0.0},
        {"max_damage": -1.0},
        {"max_damage": math.nan},
        {"coder": "zip"},
        # The table of the tests has 1,024 positions.
        {"start_token": 1000},
    ],
)
def test_what_cannot_be_encoded_is_refused(changes: dict[str, Any]) -> None:
    case = standard_case()
    arguments = {
        "start_token": 0,
        "num_tokens": 150,
        "attention": None,
        "max_damage": 0.1,
        "coder": "rans",
        **changes,
    }
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
        (["version"], 2),
        (["version"], True),
        (["version"], 1.0),
        (["bases"], "0" * 64),
        (["bases"], None),
        (["coder"], "zip"),
        (["coder"], None),
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
    others = SubspaceCodec(make_bases(standard_bases().shape, [2, 1], seed=1), case.rotary, CODERS)
    with pytest.raises(CodecError, match="not with those at hand"):
        others.open(case.encoded.params, start_token=0, num_tokens=150)
    one_coder = SubspaceCodec(standard_bases(), case.rotary, [FixedWidthCoder()])
    with pytest.raises(CodecError, match="coder 'rans' is unknown"):
        one_coder.open(case.encoded.params, start_token=0, num_tokens=150)


_json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just("AAAA"),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@settings(max_examples=100, deadline=None)
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


@settings(max_examples=100, deadline=None)
@given(data=st.data(), coder=st.sampled_from(["rans", "fixed-width"]))
def test_damaged_blocks_decode_to_something_or_are_refused(data: st.DataObject, coder: str) -> None:
    case = standard_case(coder)
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
    whole = case.encoded.blocks[1]
    for place in range(case.decoder.tail_start(1, 64), case.decoder.tail_start(1, 128), 5):
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
        with pytest.raises(CodecError, match=f"token {token} of a segment of 150"):
            case.decoder.decode(0, block, token)
    for blocks in (case.encoded.blocks[:1], (*case.encoded.blocks, block)):
        with pytest.raises(CodecError, match=f"2 groups have as many blocks, got {len(blocks)}"):
            case.decoder.decode_all(blocks)


@settings(max_examples=50, deadline=None)
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
    before = SubspaceParameters(bases.digest, "rans", first_tokens, step, damage, groups)
    after = SubspaceParameters.parse(orjson.loads(orjson.dumps(before.to_json())), bases, num_tokens)
    assert after.to_json() == before.to_json()
    assert (after.coder, after.num_first_tokens, after.step, after.damage) == (
        "rans",
        first_tokens,
        step,
        damage,
    )
    for mine, theirs in zip(groups, after.groups, strict=True):
        assert mine.offsets.tolist() == theirs.offsets.tolist()
        assert mine.record_num_bytes.tolist() == theirs.record_num_bytes.tolist()


def test_a_record_that_is_too_long_for_its_size_is_refused() -> None:
    group = GroupParameters(np.zeros(1, np.uint8), np.array([1 << 18], np.uint32))
    with pytest.raises(CodecError, match="262144 bytes"):
        group.to_json()


@settings(max_examples=60, deadline=None)
@given(seed=st.integers(0, 1000), step_log2=st.floats(-10, 4), scale_log2=st.floats(-8, 4))
def test_rounding_errors_are_bounded_and_small_numbers_are_zero(
    seed: int, step_log2: float, scale_log2: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    coefficients = torch.randn(40, 9, generator=generator) * 2**scale_log2
    shifts = torch.randint(FINEST_SHIFT, COARSEST_SHIFT + 1, (40,), generator=generator, dtype=torch.int8)
    steps = token_steps(2**step_log2, shifts)
    levels = quantize(coefficients, 2**step_log2, shifts)
    clipped = levels.abs() == 32767
    assert torch.equal(levels, levels.round())
    errors = dequantize(levels, 2**step_log2, shifts) - coefficients
    assert ((errors.abs() <= LARGEST_ERROR * steps + coefficients.abs() * 1e-6) | clipped).all()
    is_small = coefficients.abs() < (1 - ROUNDING) * steps * (1 - 1e-6)
    assert (levels[is_small] == 0).all()
    assert (levels[coefficients.abs() > (1 - ROUNDING) * steps * (1 + 1e-6)] != 0).all()
    assert torch.equal(quantize(-coefficients, 2**step_log2, shifts), -levels)


def test_shifts_follow_the_fourth_root_of_worth_within_their_bounds() -> None:
    worth = torch.tensor([0.0, 1e-9, 2.0**-4, 0.25, 1.0, 4.0, 16.0, 2.0**8, 1e9])
    assert step_shifts(worth).tolist() == [2, 2, 2, 1, 0, -1, -2, -4, -4]


def test_a_group_that_is_its_mean_takes_few_bytes() -> None:
    bases = standard_bases()
    layers = make_layers(bases, 100, None)
    basis: GroupBasis = bases.groups[1]
    mean_k, mean_v = basis.mean[:64].view(2, 32), basis.mean[64:].view(2, 32)
    layers[2] = LayerKV(mean_k.expand(100, 2, 32).contiguous(), mean_v.expand(100, 2, 32).contiguous())
    case = make_case(bases, num_tokens=100, with_rotary=False, layers=layers, num_first_tokens=0)
    assert case.decoder.group_num_bytes[1] < 0.2 * case.decoder.group_num_bytes[0]
    torch.testing.assert_close(case.decode(1)[0].k, layers[2].k, rtol=0, atol=1e-6)
