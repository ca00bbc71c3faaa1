from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from krul_backend.codec import registry
from krul_backend.codec.interface import EncodedRun, SegmentDecoder, TokenRun
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.options import CodecOptions
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.units import UnitPlan
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.codec_builders import START_TOKEN, encode_all, make_codec, random_layers, rotary_table

CPU = torch.device("cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPE = LayerShape(2, 64, 64, torch.bfloat16)
CODED = [Precision.INT8, Precision.INT4, Precision.INT2]


def bits(x: torch.Tensor) -> bytes:
    return x.contiguous().view(torch.uint8).numpy().tobytes()


def assert_same_bits(first: LayerKV, second: LayerKV) -> None:
    assert bits(first.k) == bits(second.k)
    assert bits(first.v) == bits(second.v)


def unrotated(codec_table: RotaryTable, k: torch.Tensor) -> torch.Tensor:
    return codec_table.unrotate(k, torch.arange(START_TOKEN, START_TOKEN + k.shape[0]))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("heads", [(1, 32, 32), (2, 128, 64), (3, 80, 96), (1, 256, 256)])
def test_native_layers_are_bit_exact(
    dtype: torch.dtype, num_tokens: int, heads: tuple[int, int, int]
) -> None:
    shape = LayerShape(*heads, dtype)
    layers = random_layers(shape, 2, num_tokens)
    # Any bit pattern may be in the pool.
    layers[0].k.view(torch.uint8).random_(0, 256, generator=torch.Generator().manual_seed(1))
    codec = make_codec(shape, 2)
    encoding, blocks, decoder = encode_all(codec, Strategy.from_pairs(2), layers)
    token_bytes = shape.k_token_bytes + shape.v_token_bytes
    assert encoding.layer_num_bytes == (num_tokens * token_bytes,) * 2
    for layer in range(2):
        assert decoder.sources(layer) == (layer,)
        assert_same_bits(decoder.decode(layer, blocks, 0, num_tokens), layers[layer])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4, Precision.INT2])
@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("heads", [(1, 32, 32), (2, 128, 64), (3, 80, 96), (1, 256, 256)])
def test_coded_layers_stay_within_half_a_scale(
    dtype: torch.dtype, precision: Precision, num_tokens: int, heads: tuple[int, int, int]
) -> None:
    shape = LayerShape(*heads, dtype)
    (kv,) = random_layers(shape, 1, num_tokens)
    codec, table = make_codec(shape, 1), rotary_table(shape.k_head_dim)
    _, blocks, decoder = encode_all(codec, Strategy.from_pairs(1, (), precision), [kv])
    decoded = decoder.decode(0, blocks, 0, num_tokens)
    assert (decoded.k.dtype, decoded.v.dtype) == (dtype, dtype)
    num_levels = 2 ** (precision.bits or 0) - 1
    # Scale and offset in fp16 widen a range by up to this share of it, and of the largest number in it.
    widened, offset_ulp = 1 + 2**-9, 2**-10

    for first in range(0, num_tokens, 64):
        keys = unrotated(table, kv.k)[first : first + 64]
        low, high = keys.amin(0), keys.amax(0)
        half_scale = ((high - low) * widened + low.abs() * offset_ulp + 1e-6) / num_levels / 2
        error = unrotated(table, decoded.k)[first : first + 64] - keys
        # The decoded keys are rounded to the pool's dtype with their rotary embedding on.
        rounding = torch.finfo(dtype).eps * keys.norm(dim=-1, keepdim=True) + 1e-5
        assert bool((error.abs() <= half_scale + rounding).all())

    values = kv.v.float()
    low, high = values.amin(-1, keepdim=True), values.amax(-1, keepdim=True)
    half_scale = ((high - low) * widened + low.abs() * offset_ulp + 1e-6) / num_levels / 2
    rounding = torch.finfo(dtype).eps * (values.abs() + half_scale) + 1e-5
    assert bool(((decoded.v.float() - values).abs() <= half_scale + rounding).all())


@pytest.mark.parametrize(
    ("precision", "record_bytes"),
    [
        # 64 tokens, 2 heads, 64 channels: codes; scale and offset per key channel; the same per value vector.
        (Precision.INT8, 2 * 64 * 128 + 4 * 128 + 4 * 128),
        (Precision.INT4, 2 * 64 * 64 + 4 * 128 + 4 * 128),
        (Precision.INT2, 2 * 64 * 32 + 4 * 128 + 4 * 128),
    ],
)
def test_codes_are_packed(precision: Precision, record_bytes: int) -> None:
    layers = random_layers(SHAPE, 1, 128)
    encoding, blocks, _ = encode_all(make_codec(SHAPE, 1), Strategy.from_pairs(1, (), precision), layers)
    assert encoding.layer_num_bytes == (2 * record_bytes,)
    assert blocks[0].numel() == 2 * record_bytes


def slerp_in_float64(x: torch.Tensor, y: torch.Tensor, t: float) -> tuple[torch.Tensor, torch.Tensor]:
    """What a pair's vectors become (MiniCache, equations 3 and 4)."""
    x, y = x.double(), y.double()
    x_norm, y_norm = x.norm(dim=-1, keepdim=True), y.norm(dim=-1, keepdim=True)
    angle = torch.arccos((x / x_norm * (y / y_norm)).sum(-1, keepdim=True))
    merged = (torch.sin((1 - t) * angle) * x / x_norm + torch.sin(t * angle) * y / y_norm) / torch.sin(angle)
    return x_norm * merged, y_norm * merged


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 65, 200])
@pytest.mark.parametrize("heads", [(1, 32, 32), (2, 128, 64), (3, 80, 96)])
@pytest.mark.parametrize("t", [0.6, 0.3])
def test_a_native_pair_equals_the_formula(num_tokens: int, heads: tuple[int, int, int], t: float) -> None:
    shape = LayerShape(*heads, torch.float32)
    layers = random_layers(shape, 3, num_tokens)
    options = CodecOptions(slerp_t=t, retained_amount=0.0, num_first_tokens=0)
    codec, table = make_codec(shape, 3, options), rotary_table(shape.k_head_dim)
    _, blocks, decoder = encode_all(codec, Strategy.from_pairs(3, [(0, 2)]), layers)
    assert (decoder.sources(0), decoder.sources(1), decoder.sources(2)) == ((0,), (1,), (0, 2))
    expected_k = slerp_in_float64(unrotated(table, layers[0].k), unrotated(table, layers[2].k), t)
    expected_v = slerp_in_float64(layers[0].v, layers[2].v, t)
    for layer, k, v in zip((0, 2), expected_k, expected_v, strict=True):
        decoded = decoder.decode(layer, blocks, 0, num_tokens)
        # Norms are fp16.
        torch.testing.assert_close(unrotated(table, decoded.k).double(), k, rtol=1e-3, atol=2e-5)
        torch.testing.assert_close(decoded.v.double(), v, rtol=1e-3, atol=2e-5)
    assert_same_bits(decoder.decode(1, blocks, 0, num_tokens), layers[1])


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("dtype", DTYPES)
def test_retained_rows_are_the_pools_own(precision: Precision, dtype: torch.dtype) -> None:
    shape = LayerShape(2, 32, 64, dtype)
    layers = random_layers(shape, 2, 150)
    codec = make_codec(shape, 2, CodecOptions(retained_amount=0.0, num_first_tokens=START_TOKEN + 17))
    encoding, blocks, decoder = encode_all(codec, Strategy.from_pairs(2, [(0, 1)], precision), layers)
    assert encoding.params["pairs"] == [{"k": [17, 17], "v": [17, 17]}]
    for layer in range(2):
        decoded = decoder.decode(layer, blocks, 0, 150)
        for true, again in ((layers[layer].k, decoded.k), (layers[layer].v, decoded.v)):
            is_exact = (true == again).all(dim=-1)
            assert bool(is_exact[:17].all())
            # And the others are not: what is exact is so because it was kept.
            assert bool((is_exact.sum(dim=0) <= 18).all())


def test_bytes_of_a_pair() -> None:
    layers = random_layers(SHAPE, 2, 128)
    codec = make_codec(SHAPE, 2, CodecOptions(retained_amount=0.0, num_first_tokens=START_TOKEN + 16))
    encoding, _, _ = encode_all(codec, Strategy.from_pairs(2, [(0, 1)], Precision.INT4), layers)
    norms = 2 * 128 * 2 * 2
    directions = 2 * (2 * 64 * 64 + 2 * 4 * 128)
    rows, tokens = 2 * (2 * 16) * 64 * 2, 2 * (2 * 16) * 2
    assert encoding.layer_num_bytes == (directions + norms + rows + tokens, norms + rows)


@settings(max_examples=60)
@given(
    precision=st.sampled_from(list(Precision)),
    is_pair=st.booleans(),
    with_rotary=st.booleans(),
    num_tokens=st.sampled_from([1, 15, 16, 17, 50]),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 100),
    data=st.data(),
)
def test_any_rows_equal_the_rows_of_the_whole(
    precision: Precision,
    is_pair: bool,
    with_rotary: bool,
    num_tokens: int,
    dtype: torch.dtype,
    seed: int,
    data: st.DataObject,
) -> None:
    shape = LayerShape(2, 32, 16, dtype)
    layers = random_layers(shape, 2, num_tokens, seed)
    codec = make_codec(shape, 2, CodecOptions(group_size=16, retained_amount=0.2), with_rotary)
    strategy = Strategy.from_pairs(2, [(0, 1)] if is_pair else [], precision)
    _, blocks, decoder = encode_all(codec, strategy, layers)
    first = data.draw(st.integers(0, num_tokens - 1))
    end = data.draw(st.integers(first + 1, num_tokens))
    for layer in range(2):
        whole = decoder.decode(layer, blocks, 0, num_tokens)
        rows = LayerKV(whole.k[first:end], whole.v[first:end])
        assert_same_bits(decoder.decode(layer, blocks, first, end), rows)
        tails = {
            source: blocks[source][decoder.tail_start(source, first) :] for source in decoder.sources(layer)
        }
        assert_same_bits(decoder.decode(layer, tails, first, end), rows)


def test_encoding_leaves_the_kv_alone_and_says_the_same_twice() -> None:
    layers = random_layers(SHAPE, 2, 70)
    before = [LayerKV(kv.k.clone(), kv.v.clone()) for kv in layers]
    strategy = Strategy.from_pairs(2, [(0, 1)], Precision.INT2)
    first = encode_all(make_codec(SHAPE, 2), strategy, layers)
    second = encode_all(make_codec(SHAPE, 2), strategy, layers)
    assert first[0].params == second[0].params == json.loads(json.dumps(first[0].params))
    for layer in range(2):
        assert torch.equal(first[1][layer], second[1][layer])
        assert_same_bits(layers[layer], before[layer])


def test_keys_keep_their_rotary_embedding_where_it_is_not_known() -> None:
    layers = random_layers(SHAPE, 1, 64)
    strategy = Strategy.from_pairs(1, (), Precision.INT4)
    without, with_table = make_codec(SHAPE, 1, with_rotary=False), make_codec(SHAPE, 1)
    encoding, blocks, decoder = encode_all(without, strategy, layers)
    assert encoding.params["are_keys_unrotated"] is False
    kept = decoder.decode(0, blocks, 0, 64)
    low, high = layers[0].k.float().aminmax(dim=0)
    assert bool(((kept.k - layers[0].k).abs() <= (high - low) / 15 / 2 * 1.02 + 0.02).all())
    # A codec that knows the rotation reads it too; the other way round it must refuse.
    again = with_table.open(encoding.params, start_token=START_TOKEN, num_tokens=64)
    assert_same_bits(again.decode(0, blocks, 0, 64), kept)
    unrotated_params = encode_all(with_table, strategy, layers)[0].params
    with pytest.raises(CodecError, match="rotary"):
        without.open(unrotated_params, start_token=START_TOKEN, num_tokens=64)


def test_a_pair_of_zero_vectors_decodes_to_zero() -> None:
    shape = LayerShape(1, 32, 32, torch.float16)
    zero = torch.zeros(70, 1, 32, dtype=torch.float16)
    layers = [LayerKV(zero, zero), LayerKV(zero, zero)]
    for precision in Precision:
        _, blocks, decoder = encode_all(
            make_codec(shape, 2), Strategy.from_pairs(2, [(0, 1)], precision), layers
        )
        decoded = decoder.decode(1, blocks, 0, 70)
        assert torch.count_nonzero(decoded.k) + torch.count_nonzero(decoded.v) == 0


def test_wrong_calls_are_refused() -> None:
    layers = random_layers(SHAPE, 3, 10)
    codec = make_codec(SHAPE, 3)
    strategy = Strategy.from_pairs(3, [(0, 1)], Precision.INT8)
    _, blocks, decoder = encode_all(codec, strategy, layers)

    def read(layer: int) -> LayerKV:
        return layers[layer]

    def encode(strategy: Strategy, start_token: int = 0, num_tokens: int = 10) -> EncodedRun:
        return codec.of(strategy).encode(TokenRun(read, start_token, num_tokens), UnitPlan(strategy))

    with pytest.raises(CodecError, match="2 layers for a model of 3"):
        encode(Strategy.from_pairs(2))
    for refused in (strategy, Strategy.from_pairs(3)):
        with pytest.raises(CodecError, match="no segment"):
            encode(refused, num_tokens=0)
        with pytest.raises(CodecError, match="position 1025"):
            encode(refused, start_token=1015)
    with pytest.raises(CodecError, match="2 tokens for a segment of 3 layers"):
        codec.of(strategy).encode(TokenRun(read, 0, 10, [0, 0]), UnitPlan(strategy))
    right = layers[2]
    for wrong in (
        LayerKV(right.k[:9], right.v[:9]),
        LayerKV(right.k.half(), right.v.half()),
        LayerKV(right.k, right.v[..., :32]),
    ):
        layers[2] = wrong
        with pytest.raises(CodecError, match="expected"):
            dict(encode(strategy).blocks)
    layers[2] = right
    for layer in (-1, 3):
        with pytest.raises(CodecError, match="of a segment of 3 layers"):
            decoder.decode(layer, blocks, 0, 10)
    for first, end in ((0, 11), (-1, 3), (5, 5)):
        with pytest.raises(CodecError, match="rows"):
            decoder.decode(0, blocks, first, end)
    with pytest.raises(CodecError, match=r"not given: \[0\]"):
        decoder.decode(1, {1: blocks[1]}, 0, 10)
    with pytest.raises(CodecError, match="bytes"):
        decoder.decode(2, {2: blocks[2][:-16]}, 0, 10)


def test_the_error_falls_with_the_precision() -> None:
    layers = random_layers(SHAPE, 1, 256)
    errors, sizes = [], []
    for precision in (Precision.NATIVE, *CODED):
        encoding, blocks, decoder = encode_all(
            make_codec(SHAPE, 1), Strategy.from_pairs(1, (), precision), layers
        )
        decoded = decoder.decode(0, blocks, 0, 256)
        errors.append(float((decoded.v - layers[0].v).float().norm()))
        sizes.append(encoding.layer_num_bytes[0])
    assert errors[0] == 0
    assert errors == sorted(set(errors))
    assert sizes == sorted(set(sizes), reverse=True)


class FromHost(TorchDispatchMode):
    """Counts copies of host tensors to the device, each of which would wait for the stream."""

    num_copies = 0

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        tensors = [argument for argument in args if isinstance(argument, torch.Tensor) and argument.ndim]
        is_moved = isinstance(result, torch.Tensor) and result.device != CPU
        self.num_copies += is_moved and any(tensor.device == CPU for tensor in tensors)
        return result


@pytest.mark.parametrize("precision", [Precision.NATIVE, Precision.INT4])
def test_coding_on_the_device_copies_nothing_from_the_host(precision: Precision) -> None:
    """Tensors of the kind ``meta`` stand for those of a GPU: they have all but contents."""
    device, num_tokens = torch.device("meta"), 100
    on_host = rotary_table(SHAPE.k_head_dim)
    rotary = RotaryTable(on_host.cos.to(device), on_host.sin.to(device), on_host.is_neox)
    codec = ModelCodecs(SHAPE, 2, rotary)
    strategy = Strategy.from_pairs(2, [], precision)
    kv = LayerKV(*torch.empty(2, num_tokens, SHAPE.num_kv_heads, 64, dtype=SHAPE.dtype, device=device))
    with FromHost() as from_host:
        _, blocks, decoder = encode_all(codec, strategy, [kv, kv])
        for layer in range(2):
            decoded = decoder.decode(layer, blocks, 10, num_tokens)
            assert decoded.k.device == device
    assert from_host.num_copies == 0


def test_equal_segments_share_a_decoder_and_others_do_not() -> None:
    codec = make_codec(SHAPE, 2)
    encoding, _, _ = encode_all(codec, Strategy.from_pairs(2), random_layers(SHAPE, 2, 64))
    params = encoding.params

    def opened(start_token: int = START_TOKEN, num_tokens: int = 64, **changed: object) -> SegmentDecoder:
        return codec.open({**params, **changed}, start_token=start_token, num_tokens=num_tokens)

    first = opened()
    assert opened(**json.loads(json.dumps(params))) is first
    others = [opened(START_TOKEN + 64), opened(num_tokens=32), opened(group_size=32), opened(damage=0.5)]
    assert len({id(decoder) for decoder in (first, *others)}) == 5
    assert others[1].layer_num_bytes[0] * 2 == first.layer_num_bytes[0]
    # An error is an error again.
    for _ in range(2):
        with pytest.raises(CodecError):
            opened(version=99)


def test_decoders_that_were_not_asked_for_lately_are_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(registry, "_MAX_OPENED", 3)
    codec = make_codec(SHAPE, 2)
    encoding, _, _ = encode_all(codec, Strategy.from_pairs(2), random_layers(SHAPE, 2, 64))
    codec._opened.clear()

    def opened(number: int) -> SegmentDecoder:
        return codec.open(encoding.params, start_token=64 * number, num_tokens=64)

    first, second = opened(0), opened(1)
    for number in (2, 3):
        assert opened(0) is first
        opened(number)
    assert opened(0) is first
    assert opened(1) is not second
    assert len(codec._opened) == 3
