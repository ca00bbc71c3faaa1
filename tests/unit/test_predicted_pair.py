from __future__ import annotations

from pathlib import Path

import pytest
import torch

from krul_backend.codec.interface import LayerKV, LayerShape
from krul_backend.codec.layer_map import LayerMap, LayerMapFitter, load_layer_maps, save_layer_maps
from krul_backend.codec.options import CodecOptions, Sharing
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.errors import CodecError
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.codec_builders import START_TOKEN, encode_all, make_codec, rotary_table

SHAPE = LayerShape(2, 16, 8, torch.float32)
WIDTH = 2 * (16 + 8)
TABLE = rotary_table(16)
PREDICTED = CodecOptions(group_size=16, sharing=Sharing.PREDICTED)
CODED = [Precision.INT8, Precision.INT4, Precision.INT2, Precision.INT0]


def related_layers(num_tokens: int, noise: float, seed: int) -> tuple[LayerKV, LayerKV]:
    """The second layer is a fixed affine function of the first one, rotary embedding off, and noise."""
    fixed, own = torch.Generator().manual_seed(99), torch.Generator().manual_seed(seed)
    weight = torch.randn(WIDTH, WIDTH, generator=fixed) / WIDTH**0.5
    bias = torch.randn(WIDTH, generator=fixed)
    first = torch.randn(num_tokens, WIDTH, generator=own)
    second = first @ weight + bias + noise * torch.randn(num_tokens, WIDTH, generator=own)
    positions = torch.arange(START_TOKEN, START_TOKEN + num_tokens)

    def layer(vectors: torch.Tensor) -> LayerKV:
        k, v = vectors[:, :32].view(-1, 2, 16), vectors[:, 32:].view(-1, 2, 8)
        return LayerKV(TABLE.rotate(k, positions), v)

    return layer(first), layer(second)


def fitter(noise: float = 0.1, num_tokens: int = 600) -> LayerMapFitter:
    fitted = LayerMapFitter(SHAPE, TABLE)
    fitted.add(*related_layers(num_tokens, noise, seed=1), start_token=START_TOKEN)
    return fitted


def predicting_codec(noise: float = 0.1) -> SegmentCodec:
    maps = {((0, 1), precision): fitter(noise).fit(precision) for precision in Precision}
    return SegmentCodec(SHAPE, 2, TABLE, PREDICTED, maps)


def relative_error(decoded: torch.Tensor, true: torch.Tensor) -> float:
    return float((decoded - true).square().sum() / (true - true.mean(0)).square().sum())


def test_a_fit_finds_an_affine_function() -> None:
    layer_map = fitter(noise=0.0).fit(Precision.NATIVE)
    first, second = related_layers(40, 0.0, seed=2)
    positions = torch.arange(START_TOKEN, START_TOKEN + 40)
    k, v = layer_map.predict(TABLE.unrotate(first.k, positions), first.v)
    # The weights are half precision.
    torch.testing.assert_close(TABLE.rotate(k, positions), second.k, rtol=0, atol=1e-2)
    torch.testing.assert_close(v, second.v, rtol=0, atol=1e-2)


def test_a_fit_equals_the_normal_equations_and_does_not_depend_on_the_parts() -> None:
    first, second = related_layers(300, 0.3, seed=3)
    at_once, in_parts = LayerMapFitter(SHAPE, None), LayerMapFitter(SHAPE, None)
    at_once.add(first, second, start_token=0)
    for part in (slice(0, 7), slice(7, 200), slice(200, 300)):
        rows = [LayerKV(kv.k[part], kv.v[part]) for kv in (first, second)]
        in_parts.add(*rows, start_token=0)
    assert at_once.num_tokens == in_parts.num_tokens == 300

    x, y = (torch.cat([kv.k.flatten(1), kv.v.flatten(1)], 1).double() for kv in (first, second))
    centred = x - x.mean(0)
    # The share of noise that two bits cause: a code step is a third of 4.7 standard deviations.
    ridge = torch.diag(centred.square().sum(0)) * (4.7 / 3) ** 2 / 12
    weight = torch.linalg.solve(centred.t() @ centred + ridge, centred.t() @ (y - y.mean(0)))
    for fitted in (at_once, in_parts):
        layer_map = fitted.fit(Precision.INT2)
        torch.testing.assert_close(layer_map.weight.double(), weight, rtol=5e-2, atol=2e-3)
        torch.testing.assert_close(
            layer_map.bias.double(), y.mean(0) - x.mean(0) @ layer_map.weight.double(), rtol=0, atol=1e-5
        )


def test_a_map_for_coarse_codes_is_better_there_and_worse_elsewhere() -> None:
    fitted = fitter(noise=0.05)
    first, second = related_layers(400, 0.05, seed=4)
    x = torch.cat([TABLE.unrotate(first.k, torch.arange(128, 528)).flatten(1), first.v.flatten(1)], 1)
    y = torch.cat([TABLE.unrotate(second.k, torch.arange(128, 528)).flatten(1), second.v.flatten(1)], 1)
    noisy = x + 0.45 * torch.randn(x.shape, generator=torch.Generator().manual_seed(5))

    def error(layer_map: LayerMap, source: torch.Tensor) -> float:
        return relative_error(source @ layer_map.weight + layer_map.bias, y)

    fine, coarse = fitted.fit(Precision.NATIVE), fitted.fit(Precision.INT2)
    assert error(coarse, noisy) < error(fine, noisy)
    assert error(fine, x) < error(coarse, x)


def test_constant_elements_and_no_tokens() -> None:
    empty = LayerMapFitter(SHAPE, None)
    with pytest.raises(ValueError, match="no tokens"):
        empty.fit(Precision.INT4)
    k, v = torch.zeros(5, 2, 16), torch.zeros(5, 2, 8)
    empty.add(LayerKV(k, v), LayerKV(k + 2, v - 1), start_token=0)
    predicted_k, predicted_v = empty.fit(Precision.INT4).predict(k, v)
    torch.testing.assert_close(predicted_k, k + 2)
    torch.testing.assert_close(predicted_v, v - 1)


@pytest.mark.parametrize("num_tokens", [15, 16, 17, 200])
def test_prediction_beats_coding_alone_at_fewer_bytes(num_tokens: int) -> None:
    layers = related_layers(num_tokens, 0.1, seed=6)
    for precision in (Precision.INT8, Precision.INT4):
        encoding, blocks, decoder = encode_all(
            predicting_codec(), Strategy.from_pairs(2, [(0, 1)], precision), layers
        )
        assert (decoder.sources(0), decoder.sources(1)) == ((0,), (0, 1))
        alone, alone_blocks, alone_decoder = encode_all(
            make_codec(SHAPE, 2, PREDICTED), Strategy.from_pairs(2, [], precision), layers
        )
        assert torch.equal(blocks[0], alone_blocks[0])
        assert encoding.layer_num_bytes[1] < alone.layer_num_bytes[1]
        decoded = decoder.decode(1, blocks, 0, num_tokens)
        by_itself = alone_decoder.decode(1, alone_blocks, 0, num_tokens)
        if num_tokens > 16:
            worst = 1.5 * relative_error(by_itself.v, layers[1].v) + 1e-6
            assert relative_error(decoded.v, layers[1].v) < worst


@pytest.mark.parametrize(("num_tokens", "num_groups"), [(1, 1), (16, 1), (17, 2), (200, 13)])
def test_zero_bits_of_the_rest_are_one_mean_per_group(num_tokens: int, num_groups: int) -> None:
    layers = related_layers(num_tokens, 0.1, seed=6)
    encoding, _, _ = encode_all(predicting_codec(), Strategy.from_pairs(2, [(0, 1)], Precision.INT2), layers)
    assert encoding.layer_num_bytes[1] == num_groups * 2 * WIDTH


def test_a_native_lower_layer_is_bit_exact() -> None:
    layers = related_layers(50, 0.1, seed=7)
    _, blocks, decoder = encode_all(predicting_codec(), Strategy.from_pairs(2, [(0, 1)]), layers)
    lower = decoder.decode(0, blocks, 0, 50)
    assert torch.equal(lower.k, layers[0].k)
    assert torch.equal(lower.v, layers[0].v)
    upper = decoder.decode(1, blocks, 0, 50)
    assert relative_error(upper.k, layers[1].k) < 1e-5
    assert relative_error(upper.v, layers[1].v) < 1e-5


@pytest.mark.parametrize("precision", list(Precision))
def test_rows_equal_the_rows_of_the_whole(precision: Precision) -> None:
    layers = related_layers(50, 0.1, seed=8)
    _, blocks, decoder = encode_all(predicting_codec(), Strategy.from_pairs(2, [(0, 1)], precision), layers)
    whole = decoder.decode(1, blocks, 0, 50)
    for first, end in ((0, 1), (15, 17), (20, 50), (49, 50)):
        tails = {layer: blocks[layer][decoder.tail_start(layer, first) :] for layer in (0, 1)}
        rows = decoder.decode(1, tails, first, end)
        # A matrix product may sum in another order when it has other rows.
        torch.testing.assert_close(rows.k, whole.k[first:end], rtol=0, atol=1e-5)
        torch.testing.assert_close(rows.v, whole.v[first:end], rtol=0, atol=1e-5)


def test_a_missing_or_another_map_is_refused() -> None:
    layers = related_layers(20, 0.1, seed=9)
    strategy = Strategy.from_pairs(2, [(0, 1)], Precision.INT4)
    without = SegmentCodec(SHAPE, 2, TABLE, PREDICTED)
    with pytest.raises(CodecError, match="no map predicts layer 1 from layer 0 at int4"):
        without.prepare(strategy, lambda layer: layers[layer], start_token=0, num_tokens=20)
    encoding, _, _ = encode_all(predicting_codec(), strategy, layers)
    for codec, message in ((without, "no map"), (predicting_codec(0.2), "were stored with map")):
        with pytest.raises(CodecError, match=message):
            codec.open(encoding.params, start_token=START_TOKEN, num_tokens=20)


def test_maps_survive_the_disk(tmp_path: Path) -> None:
    maps = {((0, 1), precision): fitter().fit(precision) for precision in CODED}
    path = tmp_path / "maps.npz"
    save_layer_maps(path, maps)
    again = load_layer_maps(path)
    assert {key: layer_map.digest for key, layer_map in again.items()} == {
        key: layer_map.digest for key, layer_map in maps.items()
    }
    assert len({layer_map.digest for layer_map in maps.values()}) == len(maps)
    assert [file.name for file in tmp_path.iterdir()] == ["maps.npz"]


@pytest.mark.parametrize("content", [b"", b"not a map", b"PK\x03\x04 broken"])
def test_a_file_of_something_else_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "maps.npz"
    path.write_bytes(content)
    with pytest.raises(CodecError, match="holds no layer maps"):
        load_layer_maps(path)
