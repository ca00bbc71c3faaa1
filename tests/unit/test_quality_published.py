from __future__ import annotations

from functools import cache

import pytest
import torch

from benchmarks.quality.methods import Stored, Turn
from benchmarks.quality.model import HistoryModel, token_slice
from benchmarks.quality.published import CodeTables, LayerByLayer, cachegen, grouped, nvfp4, published_methods
from krul_backend.attention.rows import QueryRows
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.rotary import RotaryTable
from krul_sglang.learning.model_kv import pooled, rotary_table
from tests.support.tiny_model import random_llama

NUM_TOKENS, NUM_LAYERS = 320, 3


@cache
def kv_and_rotary() -> tuple[list[LayerKV], RotaryTable]:
    llama = random_llama(num_layers=NUM_LAYERS, hidden_size=64, head_dim=64, max_positions=1024, init_std=0.2)
    model = HistoryModel(llama)
    ids = torch.randint(1, 60, (NUM_TOKENS,), generator=torch.Generator().manual_seed(1)).tolist()
    run = model.run(ids, (), num_logits=1)
    return [pooled(each) for each in run.kv], rotary_table(llama, 1024)


def turn(start: int, end: int) -> Turn:
    kv, _ = kv_and_rotary()
    rows = QueryRows(torch.zeros(NUM_LAYERS, 0, 4, 64), torch.zeros(0, dtype=torch.long), torch.zeros(4), 1.0)
    statistics = AttentionStatistics.zero(NUM_LAYERS, 4)
    return Turn(start, token_slice(kv, start, end), tuple(kv), rows, statistics, 0, NUM_TOKENS)


def bits_of(stored: Stored, num_tokens: int) -> float:
    kv, _ = kv_and_rotary()
    elements = sum(part[0].numel() for each in kv for part in (each.k, each.v))
    return 8 * stored.num_bytes / (num_tokens * elements)


def error(stored: Stored, of: Turn) -> float:
    pairs = zip(of.segment, stored.segment, strict=True)
    errors = [
        (true - found).float().square().sum() / true.float().square().sum()
        for kv, other in pairs
        for true, found in ((kv.k, other.k), (kv.v, other.v))
    ]
    return float(sum(errors) / len(errors)) ** 0.5


def methods() -> dict[str, LayerByLayer]:
    kv, rotary = kv_and_rotary()
    found = published_methods(NUM_LAYERS, rotary, lambda: [kv], lambda _: True)
    return {method.name: method for method in found}  # type: ignore[misc]


def test_four_bit_floats_are_those_of_the_format() -> None:
    x = torch.tensor([0.0, 0.5, -1, 1.5, 2, -3, 4, 6, 0.24, 0.26, 5.1, -4.9, 2.6, 0.7, 0.8, 448 * 6 / 448])
    made = nvfp4(0, True, x.view(1, 1, 16))
    expected = [0.0, 0.5, -1, 1.5, 2, -3, 4, 6, 0, 0.5, 6, -4, 3, 0.5, 1, 6]
    assert made.values.flatten().tolist() == pytest.approx(expected)
    assert (made.bits * 16 + made.scale_bits) == 4 * 16 + 8 + 32


def test_groups_are_of_tokens_for_keys_and_of_channels_for_values() -> None:
    x = torch.rand(40, 2, 64, generator=torch.Generator().manual_seed(2))
    keys, values = grouped(2, 32)(0, True, x), grouped(2, 32)(0, False, x)
    # 32 tokens and the 8 that are left; two halves of each head
    assert (keys.scale_bits, values.scale_bits) == (32 * 2 * 128, 32 * 40 * 2 * 2)
    for made in (keys, values):
        assert int(made.codes.max()) == 3
        assert float((made.values - x).abs().max()) < 0.5 / 3 + 1e-3
    # a channel that is far from the others costs keys nothing
    shifted = x + 100 * (torch.arange(64) == 5)
    assert float((grouped(2, 32)(0, True, shifted).values - shifted).abs().max()) < 0.3
    assert float((grouped(2, 32)(0, False, shifted).values - shifted).abs().max()) > 0.4


def test_first_layers_have_finer_codes() -> None:
    x = torch.randn(8, 2, 64, generator=torch.Generator().manual_seed(3))
    apply = cachegen(30)
    kinds = {
        (layer, is_key): apply(layer, is_key, x).bits for layer in (0, 5, 20) for is_key in (True, False)
    }
    assert [kinds[layer, True] for layer in (0, 5, 20)] == [5, 5, 4]
    assert [kinds[layer, False] for layer in (0, 5, 20)] == [5, 4, 4]
    made = apply(0, True, x)
    largest = x.abs().amax((1, 2), keepdim=True)
    assert bool(((made.values - x).abs() <= largest / 30 + 1e-6).all())


def test_coded_lengths_are_those_of_an_ideal_coder() -> None:
    """Of a code that is always the same nearly nothing; of one of four that are as frequent, two bits."""
    constant = torch.zeros(4096, 1, 2)
    constant[:, :, 1] = torch.arange(4096).view(-1, 1) % 4 / 3
    history = [LayerKV(constant, constant)]
    apply = grouped(2, 4096)
    tables = CodeTables(apply, [history])
    codes = apply(0, True, constant).codes
    assert tables.num_bits(0, True, codes) / 4096 == pytest.approx(2.0, abs=0.01)


def test_exact_tokens_are_exact_and_counted() -> None:
    kv, _ = kv_and_rotary()
    method = LayerByLayer("any", "any", grouped(4, 32), exact_first=4, exact_last=16)
    first, last = method.start()(turn(0, 160)), method.start()(turn(160, NUM_TOKENS))
    for layer in range(NUM_LAYERS):
        assert torch.equal(first.segment[layer].k[:4], kv[layer].k[:4])
        assert not torch.equal(first.segment[layer].k[4:160], kv[layer].k[4:160])
        assert torch.equal(last.segment[layer].v[-16:], kv[layer].v[-16:])
        assert not torch.equal(last.segment[layer].v[:-16], kv[layer].v[160:-16])
    assert bits_of(first, 160) == pytest.approx((4 * 16 + 156 * 5) / 160, abs=0.02)
    assert bits_of(last, 160) == pytest.approx((16 * 16 + 144 * 5) / 160, abs=0.1)


def test_every_row_trades_bits_for_errors() -> None:
    rows = methods()
    whole = turn(0, NUM_TOKENS)
    found = {name: method.start()(whole) for name, method in rows.items()}
    bits = {name: bits_of(stored, NUM_TOKENS) for name, stored in found.items()}
    errors = {name: error(stored, whole) for name, stored in found.items()}
    assert bits["kivi2"] < bits["kivi4"]
    assert errors["kivi2"] > errors["kivi4"] > 0
    assert bits["nvfp4"] == pytest.approx(4.5, abs=0.01)
    assert 0 < errors["nvfp4"] < 0.15
    # coded codes never take more than plain ones, and lose the same
    plain = LayerByLayer("plain", "plain", grouped(4, 64), exact_first=4).start()(whole)
    assert bits["int4 coded"] < bits_of(plain, NUM_TOKENS)
    assert errors["int4 coded"] == error(plain, whole)
    assert errors["int8 coded"] < errors["int4 coded"] / 10
    assert 0 < errors["cachegen"] < 0.2
    steps = [name for name in rows if name.startswith("all-layers")]
    assert [errors[name] for name in steps] == sorted(errors[name] for name in steps)
    assert [bits[name] for name in steps] == sorted((bits[name] for name in steps), reverse=True)
    assert 0 < errors[steps[0]] < 0.2
