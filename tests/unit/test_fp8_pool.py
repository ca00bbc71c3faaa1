"""Pools of fp8 elements: bytes copied as they are, heads rounded and read as the engine does it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import PoolRows, as_bytes, put_rows
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.coded_tail import tensors_of
from krul_backend.codec.unit_restore import restore_layer
from krul_backend.codec.units import UnitPlan
from krul_backend.strategy.strategy import Strategy
from krul_sglang.adapter import start_proof
from krul_sglang.adapter.head_attention import HeadAttention, NoHeadsError
from krul_sglang.adapter.kv_pool import open_pool
from krul_sglang.adapter.start_proof import Prefilled, prove_heads
from krul_sglang.adapter.unsupported import UnsupportedSetupError
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.span_attention import GatheredAttention, Span
from krul_sglang.engine.restore.heads import Head
from krul_sglang.engine.restore.restore_path import HeadProof

NUM_LAYERS, NUM_HEADS, HEAD_DIM, NUM_SLOTS = 2, 2, 16, 64
FORMATS = (torch.float8_e4m3fn, torch.float8_e5m2)
SCALES = ((None, None), (1.0, 1.0), (0.25, 3.0))
BACKENDS = ("flashinfer", "fa3")


def engine_pool(dtype: torch.dtype) -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return MHATokenToKVPool(
        size=NUM_SLOTS - 1,
        page_size=1,
        dtype=dtype,
        head_num=NUM_HEADS,
        head_dim=HEAD_DIM,
        layer_num=NUM_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )


def attention_modules(scales: tuple[float | None, float | None]) -> list[Any]:
    """Modules with the scales of a checkpoint, as SGLang leaves them."""
    k_scale, v_scale = scales
    return [
        SimpleNamespace(
            layer_id=layer, k_scale=k_scale, v_scale=v_scale, k_scale_float=k_scale, v_scale_float=v_scale
        )
        for layer in range(NUM_LAYERS)
    ]


def make_pool(dtype: torch.dtype, scales: tuple[float | None, float | None] = (None, None)) -> DevicePool:
    return open_pool(engine_pool(dtype), attention_modules(scales), BACKENDS)


def random_rows(num_tokens: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    k, v = torch.randn(2, num_tokens, NUM_HEADS, HEAD_DIM, generator=generator)
    return k, v


@pytest.mark.parametrize("dtype", FORMATS)
def test_every_byte_is_stored_and_comes_back(dtype: torch.dtype) -> None:
    """Also those that are no number: a copy through floats would lose them."""
    pool = make_pool(dtype)
    generator = torch.Generator().manual_seed(1)
    for buffer in (*pool.buffers(0), *pool.buffers(1)):
        as_bytes(buffer).copy_(torch.randint(0, 256, buffer.shape, dtype=torch.uint8, generator=generator))
    codec = ModelCodecs(pool.shape, NUM_LAYERS, None)
    taken, placed = torch.arange(3, 23), torch.arange(60, 40, -1)
    run = TokenRun(lambda layer: pool.gather(layer, taken), 0, 20)
    encoding = codec.native.encode(run, UnitPlan(Strategy.from_pairs(NUM_LAYERS)))
    assert encoding.layer_num_bytes == (20 * 2 * NUM_HEADS * HEAD_DIM,) * NUM_LAYERS
    decoder = codec.native.open(encoding.params, start_token=0, num_tokens=20)
    for layer, block in encoding.blocks:
        before = [as_bytes(part) for part in tensors_of(pool.gather(layer, taken))]
        restore_layer(decoder, layer, {layer: block}, range(20), PoolRows(*pool.buffers(layer), placed))
        after = [as_bytes(part) for part in tensors_of(pool.gather(layer, placed))]
        assert all(map(torch.equal, after, before))
        assert len(before[0].unique()) > 200


@pytest.mark.parametrize("dtype", FORMATS)
def test_decoded_numbers_never_become_infinite(dtype: torch.dtype) -> None:
    """The format's largest number may be decoded as a larger one."""
    pool, most = make_pool(dtype), torch.finfo(dtype).max
    buffer, _ = pool.buffers(0)
    rows = torch.full((2, NUM_HEADS, HEAD_DIM), most, dtype=torch.bfloat16) * 1.25
    put_rows(buffer, torch.tensor([5, 9]), torch.cat([rows[:1], -rows[1:]]))
    kept = pool.elements(0, torch.tensor([9, 5]), torch.float32).k
    assert torch.equal(kept[:, 0, 0], torch.tensor([-most, most]))
    assert not bool(pool.elements(0, torch.tensor([4, 6]), torch.float32).k.any())


@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_rows_are_rounded_as_the_engine_rounds_them(
    dtype: torch.dtype, scales: tuple[float | None, float | None]
) -> None:
    pool, engine = make_pool(dtype, scales), engine_pool(dtype)
    k, v = random_rows(5)
    slots = torch.tensor([7, 3, 50, 4, 21])
    pool.write(1, slots, k, v)
    own_k, own_v = random_rows(5)
    assert torch.equal(k, own_k)
    assert torch.equal(v, own_v)
    engine.set_kv_buffer(SimpleNamespace(layer_id=1), slots, own_k, own_v, *scales)
    for layer in range(NUM_LAYERS):
        assert torch.equal(as_bytes(pool.buffers(layer)[0]), engine.k_buffer[layer])
        assert torch.equal(as_bytes(pool.buffers(layer)[1]), engine.v_buffer[layer])
    kept = pool.elements(1, slots, torch.float32)
    eps = torch.finfo(dtype).eps
    # Half a step of the format, of numbers that are not subnormal; a forgotten scale is off by 2 and more.
    torch.testing.assert_close(kept.k * (scales[0] or 1.0), k, rtol=eps / 2, atol=0.02)
    torch.testing.assert_close(kept.v * (scales[1] or 1.0), v, rtol=eps / 2, atol=0.02)


def attend(
    pool: DevicePool,
    k: torch.Tensor,
    v: torch.Tensor,
    num_past: int,
    scales: tuple[float | None, float | None],
) -> torch.Tensor:
    """Attention of the tokens behind ``num_past`` ones that are in slots 0, 1, ... already."""
    attention = HeadAttention(pool, GatheredAttention(), None)
    num_tokens = len(k)
    slots = torch.arange(num_past + num_tokens)
    attention.use([Span(0, num_tokens, slots)], slots[num_past:])
    layer = SimpleNamespace(
        layer_id=1,
        tp_q_head_num=NUM_HEADS,
        tp_k_head_num=NUM_HEADS,
        tp_v_head_num=NUM_HEADS,
        qk_head_dim=HEAD_DIM,
        v_head_dim=HEAD_DIM,
        scaling=0.3,
        k_scale_float=scales[0],
        v_scale_float=scales[1],
    )
    return attention.forward(queries(num_tokens).flatten(1), k.flatten(1), v.flatten(1), layer)


def queries(num_tokens: int) -> torch.Tensor:
    return random_rows(num_tokens, seed=9)[0]


@pytest.mark.parametrize("num_past", [0, 12])
@pytest.mark.parametrize("scales", SCALES)
@pytest.mark.parametrize("dtype", FORMATS)
def test_heads_attend_to_what_the_pool_keeps(
    dtype: torch.dtype, scales: tuple[float | None, float | None], num_past: int
) -> None:
    pool = make_pool(dtype, scales)
    past_k, past_v = random_rows(num_past, seed=1)
    k, v = random_rows(7, seed=2)
    pool.write(1, torch.arange(num_past), past_k, past_v)
    output = attend(pool, k, v, num_past, scales)

    def rounded(x: torch.Tensor, scale: float | None) -> torch.Tensor:
        return (x / (scale or 1.0)).to(dtype).double() * (scale or 1.0)

    all_k, all_v = (
        torch.cat([rounded(past, scale), rounded(own, scale)])
        for past, own, scale in ((past_k, k, scales[0]), (past_v, v, scales[1]))
    )
    expected = torch.empty(7, NUM_HEADS, HEAD_DIM, dtype=torch.float64)
    for row, query in enumerate(queries(7).double()):
        seen = num_past + row + 1
        weights = torch.einsum("hd,thd->ht", query, all_k[:seen]).mul(0.3).softmax(-1)
        expected[row] = torch.einsum("ht,thd->hd", weights, all_v[:seen])
    torch.testing.assert_close(output.double(), expected.flatten(1), rtol=1e-5, atol=1e-5)


def test_formats_and_scales_are_never_taken_for_each_other() -> None:
    pools = [
        make_pool(torch.bfloat16),
        make_pool(torch.float8_e4m3fn),
        make_pool(torch.float8_e5m2),
        make_pool(torch.float8_e4m3fn, (0.25, 3.0)),
        make_pool(torch.float8_e4m3fn, (3.0, 0.25)),
    ]
    assert len({pool.format for pool in pools}) == len(pools)
    assert make_pool(torch.float8_e4m3fn, (1.0, 1.0)).format == pools[1].format == "float8_e4m3fn"


@pytest.mark.parametrize("backends", [("torch_native",), ("flashinfer", "trtllm_mha")])
def test_scales_that_a_backend_may_not_use_are_refused(backends: Sequence[str]) -> None:
    with pytest.raises(
        UnsupportedSetupError, match=rf"--kv-cache-dtype.*{backends[-1]}.*--attention-backend"
    ):
        open_pool(engine_pool(torch.float8_e4m3fn), attention_modules((0.25, 3.0)), backends)
    open_pool(engine_pool(torch.float8_e4m3fn), attention_modules((1.0, 1.0)), backends)
    open_pool(engine_pool(torch.bfloat16), attention_modules((0.25, 3.0)), backends)


def test_scales_that_are_only_written_with_are_refused() -> None:
    """As a file of scales leaves them: there is no number to read by."""
    modules = attention_modules((0.25, 0.25))
    modules[1].k_scale_float = modules[1].v_scale_float = None
    with pytest.raises(UnsupportedSetupError, match=r"None.*layer 1"):
        open_pool(engine_pool(torch.float8_e4m3fn), modules, BACKENDS)


def test_elements_that_krul_does_not_know_are_refused() -> None:
    pool = engine_pool(torch.float8_e4m3fn)
    pool.store_dtype = torch.float8_e4m3fn
    with pytest.raises(UnsupportedSetupError, match=r"--kv-cache-dtype.*float8_e4m3fn"):
        open_pool(pool)


class ComputedHeads:
    """Stands in for ``HeadRecompute``: writes what a computation would, over a prefill's KV of all tokens."""

    def __init__(self, pool: DevicePool, k: torch.Tensor, v: torch.Tensor) -> None:
        self._pool = pool
        self._k, self._v = k, v

    def through(self, layers: object) -> AbstractContextManager[None]:
        """There are no layers: they are looked at in ``test_watched_layers.py``."""
        return nullcontext()

    def run(self, heads: Sequence[Head]) -> None:
        for head in heads:
            for layer, end in enumerate(head.ends):
                rows = slice(head.start, end)
                self._pool.write(layer, head.slots[rows], self._k[rows], self._v[rows])


def prove(
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    prefilled: tuple[torch.Tensor, torch.Tensor],
    computed: tuple[torch.Tensor, torch.Tensor],
) -> HeadProof:
    pool = make_pool(dtype, (0.25, 3.0))
    slots = torch.randperm(NUM_SLOTS)[: NUM_SLOTS // 2 - 1]

    @contextmanager
    def prefill(runner: Any, tree_cache: Any, token_ids: Sequence[int]) -> Iterator[Prefilled]:
        for layer in range(NUM_LAYERS):
            pool.write(layer, slots, *prefilled)
        yield Prefilled(torch.tensor(token_ids), slots, 0.0, lambda first: 0.0)

    monkeypatch.setattr(start_proof, "ordinary_prefill", prefill)
    outputs = SimpleNamespace(compare=lambda allowed: (0.0, 0, 0))
    layers = SimpleNamespace(prefill=nullcontext, replay=lambda: nullcontext(outputs))
    monkeypatch.setattr(start_proof, "WatchedLayers", lambda *args: layers)
    runner = SimpleNamespace(
        model=object(), model_config=SimpleNamespace(vocab_size=100), dtype=torch.bfloat16
    )
    heads: Any = ComputedHeads(pool, *computed)
    return prove_heads(runner, None, pool, heads)


@pytest.mark.parametrize("dtype", FORMATS)
def test_a_head_that_is_rounded_differently_passes_the_proof(
    dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = random_rows(NUM_SLOTS // 2 - 1)
    proof = prove(dtype, monkeypatch, (k, v), (k * 1.01, v.bfloat16().float()))
    # Some elements fell on the other side of a step of the format, and no row by more than its eps.
    assert 0 < proof.max_relative_error < torch.finfo(dtype).eps
    assert proof.rows_within_one_ulp == proof.rows


WRONG = {
    "positions of the next token": lambda k, v: (k.roll(1, 0), v.roll(1, 0)),
    "heads exchanged": lambda k, v: (k.flip(1), v),
    "values of another layer": lambda k, v: (k, random_rows(len(v), seed=5)[1]),
    "keys without their scale": lambda k, v: (k * 0.25, v),
    "values twice": lambda k, v: (k, v * 2),
    "not computed": lambda k, v: (k * 0, v * 0),
}


@pytest.mark.parametrize("dtype", FORMATS)
@pytest.mark.parametrize("mistake", WRONG)
def test_a_wrong_head_fails_the_proof(
    mistake: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    k, v = random_rows(NUM_SLOTS // 2 - 1)
    with pytest.raises(NoHeadsError, match="differs by"):
        prove(dtype, monkeypatch, (k, v), WRONG[mistake](k, v))
