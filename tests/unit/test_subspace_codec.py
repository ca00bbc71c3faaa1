"""Segments in a common subspace: what comes back, and how far it may be off."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from krul_backend.codec.coefficients.scales import RECORD_TOKENS, ROUNDING
from krul_backend.codec.layout import FP8_TYPES, LayerKV, LayerShape, to_elements
from krul_backend.codec.subspace.bases import GroupBasis, ModelBases, group_vectors
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.quantizer import (
    COARSEST_SHIFT,
    FINEST_SHIFT,
    LARGEST_LEVEL,
    SHRINK,
    RoundedTokens,
    step_shifts,
    token_steps,
)
from krul_backend.codec.subspace.vectors import TokenRows
from krul_backend.device import Device
from krul_backend.errors import CodecError
from tests.support.codec_builders import rotary_table
from tests.support.subspace_builders import SHARE, make_bases, make_layers
from tests.support.subspace_cases import Case, make_case, standard_bases, standard_case

LARGEST_ERROR = max(ROUNDING + SHRINK, 1 - ROUNDING) + SHRINK + 0.1
"""Of a coefficient, in steps of its token, unless it is clipped. A tenth is for products in bf16."""


@settings(max_examples=40)
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
        # All tokens are worth the same. What is rounded off comes on top, twice: rotary embedding turns and
        # rounds keys again. Pools of any dtype are multiplied in bf16: where coefficients are thousands of
        # steps, as of random KV at a low limit, that is more than a tenth of one.
        decoded_vectors = group_vectors(decoded).abs().double()
        rounded = 2 * torch.finfo(torch.bfloat16).eps * (decoded_vectors + 1) @ basis.encoder.abs().double()
        bound = LARGEST_ERROR * case.encoded.params["step"] + 2 * rounded + 1e-5
        num_kept = case.num_kept(group)
        # A step is chosen by a sample of the tokens: others may have a coefficient that is clipped.
        true = case.coefficients(group, [case.layers[layer] for layer in basis.layers])
        bound += (true.abs() - LARGEST_LEVEL * case.encoded.params["step"]).clamp(min=0)
        assert (case.errors(group).abs() <= bound)[:, :num_kept].all()
        # The others come back as the mean.
        left_out = case.coefficients(group, decoded)[num_first_tokens:, num_kept:]
        assert (left_out.abs() <= bound[num_first_tokens:, num_kept:]).all()


@pytest.fixture
def exact_products(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "multiplies_bf16_fast", False)


@pytest.mark.parametrize("is_fast", [False, True])
def test_products_in_bf16_leave_the_largest_coefficients_exact(
    monkeypatch: pytest.MonkeyPatch, is_fast: bool
) -> None:
    monkeypatch.setattr(Device, "multiplies_bf16_fast", is_fast)
    bases = make_bases(LayerShape(2, 32, 32, torch.bfloat16), [2], rank=128)
    rotary = rotary_table(32)
    layers = make_layers(bases, 150, rotary)
    codec = SubspaceCodec(bases, rotary)

    def coefficients(rows: torch.Tensor, num_kept: int = 128) -> torch.Tensor:
        (encoders,) = codec._encoders
        vectors, lowered = encoders.vectors(encoders.read(layers.__getitem__), TokenRows(rows, 0, rotary), 0)
        out = torch.empty(1, len(rows), num_kept)
        encoders.put_coefficients(vectors, lowered, out)
        return out[0]

    found = coefficients(torch.arange(150))
    bare = [LayerKV(rotary.unrotate(kv.k, torch.arange(150)), kv.v) for kv in layers]
    basis = bases.groups[0]
    exact = (group_vectors(bare).double() - basis.mean.double()) @ basis.encoder.double()
    errors = (found - exact).abs()
    assert errors[:, :64].max() < 3e-6
    assert errors[:, 64:].max() < (3e-3 if is_fast else 3e-6)
    assert (errors[:, 64:].max() > 1e-5) == is_fast
    rows = torch.tensor([0, 3, 77])
    torch.testing.assert_close(coefficients(rows), found[rows], rtol=0, atol=2e-3 if is_fast else 3e-6)
    few = coefficients(rows, 80)
    torch.testing.assert_close(few, found[rows, :80], rtol=0, atol=2e-3 if is_fast else 3e-6)


def test_small_coefficients_are_left_out_and_counted() -> None:
    bases = make_bases(LayerShape(2, 32, 32, torch.float32), [2], rank=128)
    some_kept = make_case(bases, max_damage=3.0)
    assert 16 <= some_kept.num_kept(0) < make_case(bases, max_damage=1e-3).num_kept(0)
    errors = some_kept.errors(0)
    lost = float(errors[:, some_kept.num_kept(0) :].square().sum()) / 2 * bases.damage_factor
    assert lost > 0.1
    # The first token loses nothing. What is left out is measured in a sample of the tokens.
    expected = float(errors.square().sum()) / 2 * bases.damage_factor
    assert some_kept.encoded.damage == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize(("num_tokens", "num_first_tokens"), [(1, 0), (5, 3), (70, 3), (193, 0), (1100, 1)])
def test_any_tail_is_the_end_of_everything(num_tokens: int, num_first_tokens: int) -> None:
    bases = make_bases(LayerShape(2, 32, 32, torch.float32), [2, 1], rank=100)
    case = make_case(
        bases,
        num_tokens=num_tokens,
        # The table ends at position 1024.
        with_rotary=num_tokens < 1024,
        num_first_tokens=num_first_tokens,
    )
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


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("num_tokens", [40, 128])
def test_damage_is_what_was_expected_and_just_within_the_limit(num_tokens: int) -> None:
    for limit in (1e-3, 1e-2, 0.1, 1.0):
        case = make_case(standard_bases(), num_tokens=num_tokens, max_damage=limit)
        # Every token is in the sample. The search for the step ends within 2^(1 / 128), which is 1.1 % of
        # damage; that damage moves in jumps where coefficients are few takes some more.
        assert 0.95 * limit < case.encoded.damage <= limit * (1 + 1e-5)
        assert damage_of(case) == pytest.approx(case.encoded.damage, rel=1e-2)


OUTSIDE = 0.3
"""The length of what the bases cannot represent."""


def lost_outside(case: Case) -> float:
    """What the difference between the true KV and what comes back costs outside of the bases."""
    lost = 0.0
    for group, basis in enumerate(case.bases.groups):
        true = group_vectors([case.layers[layer] for layer in basis.layers])
        off = (group_vectors(case.decode(group)) - true).double() @ basis.outside.double()
        lost += float(off.square().sum()) / 2
    return lost


@pytest.mark.usefixtures("exact_products")
@pytest.mark.parametrize("num_tokens", [100, 1000])
def test_what_the_bases_cannot_represent_counts(num_tokens: int) -> None:
    layers = make_layers(standard_bases(), num_tokens, None, outside=OUTSIDE)
    codec, place = SubspaceCodec(standard_bases(), None), {"start_token": 0, "num_tokens": num_tokens}
    outside = codec.sample(layers.__getitem__, attention=None, **place).outside
    familiar = make_layers(standard_bases(), num_tokens, None)
    assert codec.sample(familiar.__getitem__, attention=None, **place).outside < 1e-6 * outside
    limit = 2 * outside
    before, case = (
        make_case(standard_bases(), num_tokens=num_tokens, with_rotary=False, layers=each, max_damage=limit)
        for each in (familiar, layers)
    )
    # All tokens but the first lose as much.
    assert lost_outside(case) == pytest.approx(outside, rel=0.01)
    # Rounding is given the other half of the limit, and both are noted.
    assert case.encoded.damage == pytest.approx(limit, rel=0.08)
    assert case.encoded.damage == pytest.approx(damage_of(case) + outside, rel=0.01)
    assert case.encoded.params["step"] < 0.8 * before.encoded.params["step"]


@pytest.mark.parametrize("start_token", [0, 300])
def test_what_all_tokens_are_off_by_together_costs_on_top(start_token: int) -> None:
    # Groups of as few channels as their costs are added up in: the sums are exact.
    bases = make_bases(standard_bases().shape, [1, 1], rank=20, shift_cost=3.0)
    layers = make_layers(bases, 100, None, outside=OUTSIDE)
    place = {"start_token": start_token, "num_tokens": 100, "attention": None}
    outside = SubspaceCodec(bases, None).sample(layers.__getitem__, **place).outside
    for_free = make_bases(standard_bases().shape, [1, 1], rank=20)
    without = SubspaceCodec(for_free, None).sample(layers.__getitem__, **place).outside
    # The first token of the conversation is stored as it is. A later turn has a quarter of the attention.
    off, share = (OUTSIDE * 0.99, 1.0) if start_token == 0 else (OUTSIDE, 0.25)
    # Of two groups.
    assert outside - without == pytest.approx(2 * share * 3.0 * off**2 / 2, rel=1e-3)
    case = make_case(
        bases, start_token=start_token, num_tokens=100, with_rotary=False, layers=layers, max_damage=5.0
    )
    shift = share * 3.0 * sum(map(common, errors_of(case))) / 2
    assert case.encoded.shift_damage == pytest.approx(shift, rel=1e-2)
    lost = shift + damage_of(case) + lost_outside(case)
    assert case.encoded.damage == pytest.approx(lost, rel=1e-2)
    assert 0.95 * 5.0 < case.encoded.damage <= 5.0 * (1 + 1e-5)


def errors_of(case: Case) -> list[torch.Tensor]:
    """What was lost of each group's vectors, ``[T, D]``."""
    return [
        group_vectors(case.decode(group)) - group_vectors([case.layers[layer] for layer in basis.layers])
        for group, basis in enumerate(case.codec.bases.groups)
    ]


def common(errors: torch.Tensor) -> float:
    """The mean product of the errors of two different tokens."""
    num_tokens = len(errors)
    of_all = float(errors.sum(0).square().sum() - errors.square().sum())
    return of_all / (num_tokens * (num_tokens - 1))


@pytest.mark.parametrize("num_tokens", [1, 8, 400])
def test_errors_with_nothing_in_common_cost_each_for_itself_however_few_they_are(num_tokens: int) -> None:
    bases = make_bases(standard_bases().shape, [2, 1], rank=20, shift_cost=30.0)
    case = make_case(bases, start_token=64, num_tokens=num_tokens, with_rotary=False, max_damage=5.0)
    share = num_tokens / (64 + num_tokens)
    of_means = share * 30.0 * sum(float(errors.mean(0).square().sum()) for errors in errors_of(case)) / 2
    # The mean of few errors is large by chance.
    assert case.encoded.shift_damage < (0.5 if num_tokens < 100 else 1.0) * of_means


def test_a_limit_below_what_is_lost_anyway_is_not_promised() -> None:
    layers = make_layers(standard_bases(), 100, None, outside=OUTSIDE)
    case = make_case(standard_bases(), num_tokens=100, with_rotary=False, layers=layers, max_damage=0.01)
    outside = case.codec.sample(layers.__getitem__, start_token=0, num_tokens=100, attention=None).outside
    assert outside > 0.01
    assert case.encoded.damage == pytest.approx(outside, rel=1e-3)


def test_attention_says_what_is_lost_outside_of_the_bases() -> None:
    layers = make_layers(standard_bases(), 100, None, outside=OUTSIDE)
    codec, place = SubspaceCodec(standard_bases(), None), {"start_token": 0, "num_tokens": 100}
    plain, dwelt_on = (
        codec.sample(layers.__getitem__, attention=torch.full((3, 2, 100), SHARE * share), **place).outside
        for share in (1, 3)
    )
    assert dwelt_on == pytest.approx(3 * plain, rel=1e-4)


@pytest.mark.parametrize(("start_token", "num_tokens"), [(0, 100), (300, 100), (300, 1000)])
def test_errors_cost_as_much_as_was_expected_when_they_were_made(start_token: int, num_tokens: int) -> None:
    """Those of the bases themselves: of what they cannot represent, and of rounding."""
    bases = make_bases(standard_bases().shape, [2, 1], rank=20, shift_cost=3.0)
    layers = make_layers(bases, num_tokens, None, outside=OUTSIDE)
    case = make_case(
        bases,
        start_token=start_token,
        num_tokens=num_tokens,
        with_rotary=False,
        layers=layers,
        max_damage=5.0,
    )
    found = [kv for group in range(len(bases.groups)) for kv in case.decode(group)]
    errors = [LayerKV(a.k - b.k, a.v - b.v) for a, b in zip(found, layers, strict=True)]
    place = {"start_token": start_token, "num_tokens": num_tokens, "attention": None}
    lost = case.codec.sample(errors.__getitem__, **place, are_errors=True).all_lost
    assert lost == pytest.approx(case.encoded.damage, rel=1e-3 if num_tokens <= 128 else 0.1)


def test_errors_of_the_first_token_count_once_however_many_tokens_are_sampled() -> None:
    def all_lost(num_tokens: int) -> float:
        is_first = (torch.arange(num_tokens) == 0)[:, None, None]
        off = [((a.k - b.k)[:num_tokens] * is_first, (a.v - b.v)[:num_tokens] * is_first) for a, b in pairs]
        codec, place = SubspaceCodec(standard_bases(), None), {"start_token": 0, "num_tokens": num_tokens}
        read = [LayerKV(*each) for each in off].__getitem__
        return codec.sample(read, attention=None, are_errors=True, **place).all_lost

    pairs = [*zip(*(make_layers(standard_bases(), 1000, None, seed=seed) for seed in (0, 1)), strict=True)]
    assert all_lost(1000) == pytest.approx(all_lost(100), rel=0.01)


@pytest.mark.parametrize("element_type", FP8_TYPES)
@pytest.mark.parametrize("start_token", [0, 300])
def test_rounding_to_an_fp8_pool_is_expected_to_cost_what_it_does(
    element_type: torch.dtype, start_token: int
) -> None:
    """Of numbers near those of the segment; of its first token, which is stored as it is, nothing."""
    bases = make_bases(standard_bases().shape, [2, 1], rank=20)
    place = {"start_token": start_token, "num_tokens": 100, "attention": None}
    rounding = SubspaceCodec(bases, None, rounds=True)
    layers = [
        LayerKV(*(to_elements(part, element_type) for part in (kv.k, kv.v)))
        for kv in make_layers(bases, 100, None, outside=OUTSIDE)
    ]
    read = layers.__getitem__
    sample, plain = rounding.sample(read, **place), SubspaceCodec(bases, None).sample(read, **place)
    assert plain.rounding == 0
    assert sample.outside == pytest.approx(plain.outside + sample.rounding, rel=1e-6)
    generator = torch.Generator().manual_seed(1)

    def lost(part: torch.Tensor) -> torch.Tensor:
        near = part.float() * torch.empty(part.shape).uniform_(0.8, 1.25, generator=generator)
        off = to_elements(near, element_type).float() - near
        off[: 1 if start_token == 0 else 0] = 0
        return off

    errors = [LayerKV(lost(kv.k), lost(kv.v)) for kv in layers]
    expected = rounding.sample(errors.__getitem__, **place, are_errors=True).all_lost
    # Below a power of two elements are closer than above it.
    assert sample.rounding == pytest.approx(expected, rel=0.15)
    for limit in (1.5, 5):
        max_damage = limit * sample.outside
        encoded = rounding.encode(read, **place, max_damage=max_damage)
        assert encoded.damage == pytest.approx(max_damage, rel=0.01)
        finer = SubspaceCodec(bases, None).encode(read, **place, max_damage=max_damage - sample.rounding)
        assert finer.num_bytes == pytest.approx(encoded.num_bytes, rel=0.01)


@pytest.mark.parametrize(("num_tokens", "mean"), [(100, 4), (600, 4), (600, 1)])
def test_sinks_have_the_finest_step_and_a_large_worth(num_tokens: int, mean: int) -> None:
    """Tokens with KV near zero, whatever attention they have drawn; not where ordinary KV may be as small."""
    groups = [replace(one, mean=mean * one.magnitudes @ one.decoder) for one in standard_bases().groups]
    codec = SubspaceCodec(ModelBases(standard_bases().shape, tuple(groups)), None)
    layers, sinks = make_layers(codec.bases, num_tokens, None), np.arange(5, num_tokens, 50)
    for part in [part for kv in layers for part in (kv.k, kv.v)]:
        part[sinks] *= 0.1
    place: dict[str, Any] = {"start_token": 0, "num_tokens": num_tokens, "attention": None}
    sample = codec.sample(layers.__getitem__, **place)
    encoded = codec.encode(layers.__getitem__, **place, max_damage=0.3, sample=sample)
    # The first token is stored as it is, and loses nothing.
    others = np.setdiff1d(np.arange(1, num_tokens), sinks)
    for rows, shift, worth in ((sinks, *((FINEST_SHIFT, 256) if mean == 4 else (0, 1))), (others, 0, 1)):
        assert ((sample.shifts[:, rows] == shift) & (sample.worth[:, rows] == worth)).all()
    decoded = codec.open(encoded.params, start_token=0, num_tokens=num_tokens).decode_all(encoded.blocks)
    errors = torch.cat([(a.v - b.v).double().flatten(1) for a, b in zip(decoded, layers, strict=True)], 1)
    error_of_sinks, error = (float(errors[rows].square().mean().sqrt()) for rows in (sinks, others))
    assert error_of_sinks < 0.4 * error or mean != 4


def test_a_long_segment_is_read_no_more_often_than_a_short_one() -> None:
    """Once to choose the step, and once to encode it, in whatever pieces; a short one only once."""
    layers = make_layers(standard_bases(), 3000, None)
    codec, reads = SubspaceCodec(standard_bases(), None), Counter[int]()

    def read(layer: int) -> LayerKV:
        reads[layer] += 1
        return LayerKV(layers[layer].k[:num_tokens], layers[layer].v[:num_tokens])

    for num_tokens, times in ((3000, 2), (128, 1)):
        reads.clear()
        place: dict[str, Any] = {"start_token": 0, "num_tokens": num_tokens, "attention": None}
        codec.encode(read, **place, max_damage=0.1)
        assert reads == dict.fromkeys(range(3), times)


@pytest.mark.parametrize("num_tokens", [100, 400])
@pytest.mark.parametrize("max_damage", [1e-2, 0.3])
def test_a_sample_that_was_taken_before_encodes_the_same(num_tokens: int, max_damage: float) -> None:
    layers = make_layers(standard_bases(), num_tokens, None, outside=OUTSIDE / 10)
    codec = SubspaceCodec(standard_bases(), None)
    place: dict[str, Any] = {"start_token": 0, "num_tokens": num_tokens, "attention": None}
    sample = codec.sample(layers.__getitem__, **place)
    assert sample.outside == codec.sample(layers.__getitem__, **place).outside > 0
    alone = codec.encode(layers.__getitem__, **place, max_damage=max_damage)
    # As often as a caller likes.
    for _ in range(2):
        found = codec.encode(layers.__getitem__, **place, max_damage=max_damage, sample=sample)
        assert (found.params, found.damage) == (alone.params, alone.damage)
        assert all(map(torch.equal, found.blocks, alone.blocks))


def test_the_sample_of_another_segment_is_refused() -> None:
    layers = make_layers(standard_bases(), 100, None)
    codec = SubspaceCodec(standard_bases(), None)
    place: dict[str, Any] = {"num_tokens": 100, "attention": None}
    sample = codec.sample(layers.__getitem__, start_token=64, **place)
    with pytest.raises(CodecError, match="sample"):
        codec.encode(layers.__getitem__, start_token=0, **place, max_damage=0.1, sample=sample)


class Launches(TorchDispatchMode):
    """Counts the operations that a device would be given, and how often the host would wait for one."""

    num_launched = num_waits = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Any = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in WAITS:
            self.num_waits += 1
        elif not func.is_view:
            self.num_launched += 1
        return func(*args, **(kwargs or {}))


WAITS = (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.nonzero.default)


@pytest.mark.parametrize("num_tokens", [100, 1000])
def test_the_step_is_chosen_with_few_operations_and_hardly_any_waiting(num_tokens: int) -> None:
    bases = make_bases(LayerShape(2, 32, 32, torch.float32), [2, 2, 2, 2], rank=60, shift_cost=0.1)
    layers = make_layers(bases, num_tokens, None)
    codec = SubspaceCodec(bases, None)
    place: dict[str, Any] = {"start_token": 64, "num_tokens": num_tokens, "attention": None}
    sample = codec.sample(layers.__getitem__, **place)
    with Launches() as launches:
        sample.choose_step(0.1)
    # Each round multiplies once in each group. Bisection took 12 rounds of 20 operations and 5 waits each.
    assert launches.num_launched < 8 * (6 * 4 + 4)
    assert launches.num_waits <= 8 * 4


@pytest.mark.usefixtures("exact_products")
def test_damage_of_a_long_segment_is_near_the_limit() -> None:
    case = make_case(standard_bases(), num_tokens=1000, max_damage=0.3)
    # 127 tokens with errors in 40 coefficients are the sample: its mean is off by 2 to 3 %.
    assert case.encoded.damage == pytest.approx(0.3, rel=0.08)
    assert damage_of(case) == pytest.approx(case.encoded.damage, rel=1e-2)


@settings(max_examples=40)
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
    # Without a mean, KV stays in the subspace when it is scaled.
    groups = (replace(group, mean=torch.zeros_like(group.mean)) for group in standard_bases().groups)
    bases = ModelBases(standard_bases().shape, tuple(groups))
    layers = [
        LayerKV(kv.k * spread, kv.v * spread) for kv in make_layers(bases, num_tokens, rotary_table(32))
    ]
    narrow, wide = (
        make_case(bases, num_tokens=num_tokens, max_damage=each, layers=layers)
        for each in (limit, limit * factor)
    )
    # The search may end a 256th of an octave below the largest step.
    assert narrow.encoded.params["step"] <= wide.encoded.params["step"] * 1.003
    # The damage is within the limit, or both have the same step.
    assert narrow.encoded.damage <= max(limit * (1 + 1e-5), wide.encoded.damage * (1 + 1e-5))
    if wide.encoded.damage > limit:
        assert narrow.encoded.damage < wide.encoded.damage
    # A record of few tokens ends at a multiple of 4 bytes.
    assert 1.05 * narrow.encoded.num_bytes + 16 >= wide.encoded.num_bytes


@pytest.mark.usefixtures("exact_products")
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
        SubspaceCodec(standard_bases(), None, num_first_tokens=RECORD_TOKENS + 1)
    with pytest.raises(CodecError, match="first tokens"):
        SubspaceCodec(standard_bases(), None, num_first_tokens=-1)
    case = make_case(standard_bases(), num_first_tokens=RECORD_TOKENS)
    assert torch.equal(case.decode(1, 63)[0].k[0], case.layers[2].k[63])


@settings(max_examples=60)
@given(seed=st.integers(0, 1000), step_log2=st.floats(-10, 4), scale_log2=st.floats(-8, 4))
def test_rounding_errors_are_bounded_and_small_numbers_are_zero(
    seed: int, step_log2: float, scale_log2: float
) -> None:
    generator = torch.Generator().manual_seed(seed)
    coefficients = torch.randn(40, 9, generator=generator) * 2**scale_log2
    shifts = torch.randint(FINEST_SHIFT, COARSEST_SHIFT + 1, (40,), generator=generator, dtype=torch.int8)
    steps = torch.from_numpy(token_steps(2**step_log2, shifts.numpy()))[:, None]
    worth = torch.rand(40, generator=generator)

    def rounded(values: torch.Tensor) -> RoundedTokens:
        found = RoundedTokens.none(40, 9)
        for rows in (np.arange(0, 40, 3), np.delete(np.arange(40), np.arange(0, 40, 3))):
            found.add(rows, values[rows].numpy(), steps[rows, 0].numpy(), worth[rows].numpy())
        return found

    found = rounded(coefficients)
    levels = torch.from_numpy(found.levels).float()
    clipped = levels.abs() == 32767
    restored = (levels - SHRINK * levels.sign()) * steps
    errors = restored - coefficients
    assert ((errors.abs() <= LARGEST_ERROR * steps + coefficients.abs() * 1e-6) | clipped).all()
    is_small = coefficients.abs() < (1 - ROUNDING) * steps * (1 - 1e-6)
    assert (levels[is_small] == 0).all()
    assert (levels[coefficients.abs() > (1 - ROUNDING) * steps * (1 + 1e-6)] != 0).all()
    scaled = coefficients / steps
    # The format's own rule, operation by operation.
    expected = (scaled.abs() + ROUNDING).floor().clamp(max=LARGEST_LEVEL).copysign(scaled)
    assert torch.equal(levels, expected)
    assert torch.equal(torch.from_numpy(rounded(-coefficients).levels).float(), -levels)
    sums = {"atol": 1e-4 * float(coefficients.abs().sum()), "rtol": 1e-4}
    squares = errors.double().square()
    for of_loop, of_errors in (
        (found.restored, restored.double().sum(0)),
        (found.magnitudes, coefficients.double().abs().sum(0)),
    ):
        torch.testing.assert_close(torch.from_numpy(of_loop), of_errors, **sums)
    torch.testing.assert_close(torch.from_numpy(found.squares), squares.sum(0), rtol=1e-3, atol=1e-9)
    assert found.own_damage == pytest.approx(float(worth.double() @ squares.sum(1)) / 2, rel=1e-3, abs=1e-9)


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
