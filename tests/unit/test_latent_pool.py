"""A pool of latent KV as krul reads and writes it: rotary part and latent, each once."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from krul_backend.codec.interface import TokenRun
from krul_backend.codec.layout import PoolRows
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.unit_restore import restore_layer
from krul_backend.codec.units import UnitPlan
from krul_backend.strategy import Strategy
from krul_sglang.adapter.attach import attach_turn_capture
from krul_sglang.adapter.kv_pool import open_model_pool, open_pool
from krul_sglang.adapter.unsupported import UnsupportedSetupError
from krul_sglang.config import KrulConfig

RANK, ROTARY, NUM_SLOTS = 16, 8, 32


def latent_pool(dtype: torch.dtype) -> Any:
    from sglang.srt.mem_cache.memory_pool import MLATokenToKVPool

    return MLATokenToKVPool(
        size=NUM_SLOTS - 1,
        page_size=1,
        dtype=dtype,
        kv_lora_rank=RANK,
        qk_rope_head_dim=ROTARY,
        layer_num=2,
        device="cpu",
        enable_memory_saver=False,
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_split_and_written_where_attention_reads_them(dtype: torch.dtype) -> None:
    engine = latent_pool(dtype)
    pool = open_pool(engine)
    assert pool.is_latent
    assert (pool.shape.num_kv_heads, pool.shape.k_head_dim, pool.shape.v_head_dim) == (1, ROTARY, RANK)
    rows, slots = torch.randn(5, 1, RANK + ROTARY), torch.tensor([3, 9, 1, 30, 4])
    with get_parallel().override(dcp_enabled=False):
        pool.write(1, slots, rows, rows[..., :RANK])
    keys, values = pool.attended(1)
    expected = rows.to(dtype).float()
    assert torch.equal(keys[slots].float(), expected)
    assert torch.equal(values[slots].float(), expected[..., :RANK])
    stored = pool.elements(1, slots, torch.float32)
    assert torch.equal(stored.k, expected[..., RANK:])
    assert torch.equal(stored.v, expected[..., :RANK])
    # What is restored lands in the engine's own rows.
    kv, elsewhere = pool.gather(1, slots), torch.tensor([5, 6, 7, 8, 10])
    for buffer, part in zip(pool.buffers(1), (kv.k, kv.v), strict=True):
        buffer[elsewhere] = part
    assert torch.equal(engine.kv_buffer[1][elsewhere], engine.kv_buffer[1][slots])


PAGE = 64


def indexed_pool(dtype: torch.dtype, **fields: Any) -> Any:
    """SGLang's pool of a model whose attention chooses tokens by an index, full of random bytes."""
    from sglang.srt.mem_cache.memory_pool import DSATokenToKVPool

    with get_parallel().override(attn_dcp_size=1):
        pool = DSATokenToKVPool(
            size=6 * PAGE,
            page_size=PAGE,
            dtype=dtype,
            kv_lora_rank=RANK,
            qk_rope_head_dim=ROTARY,
            layer_num=2,
            device="cpu",
            index_head_dim=128,
            enable_memory_saver=False,
            # As SGLang packs fp8 rows: with scales, and a rotary part in bf16.
            kv_cache_dim=RANK + 4 + 2 * ROTARY if dtype == torch.float8_e4m3fn else RANK + ROTARY,
            **fields,
        )
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.kv_buffer, *pool.index_k_with_scale_buffer):
        view = buffer.view(torch.uint8)
        view.copy_(torch.randint(0, 256, view.shape, generator=generator, dtype=torch.uint8))
    return pool


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_pages_of_an_index_come_back_with_the_rows_of_their_tokens(dtype: torch.dtype) -> None:
    """Through the codec that stores KV as it is, to other pages in another order."""
    engine = indexed_pool(dtype)
    pool = open_pool(engine)
    assert (pool.is_latent, pool.are_pages) == (True, True)
    codec = ModelCodecs(pool.shape, pool.num_layers, None)
    before, after = [5, 1, 2], [3, 6, 4]
    stored_slots, slots = (
        torch.cat([page * PAGE + torch.arange(PAGE) for page in pages]) for pages in (before, after)
    )
    others = [page for page in range(7) if page not in after]
    untouched = [buffer[others].clone() for buffer in engine.index_k_with_scale_buffer]
    strategy = Strategy.from_pairs(pool.num_layers)
    run = TokenRun(lambda layer: pool.gather(layer, stored_slots), 0, len(slots))
    encoded = codec.of(strategy).encode(run, UnitPlan(strategy))
    decoder = codec.of(strategy).open(encoded.params, start_token=0, num_tokens=len(slots))
    for layer, block in encoded.blocks:
        # A page's row of the index, and the latent rows of its tokens: nothing else is stored.
        page_bytes = engine.index_k_with_scale_buffer[layer][0].nbytes
        assert block.nbytes == len(before) * (page_bytes + PAGE * engine.kv_buffer[layer][0].nbytes)
        restore_layer(
            decoder, layer, {layer: block}, range(len(slots)), PoolRows(*pool.buffers(layer), slots)
        )
    for layer in range(2):
        index, rows = engine.index_k_with_scale_buffer[layer], engine.kv_buffer[layer].view(torch.uint8)
        assert torch.equal(index[after], index[before])
        assert torch.equal(rows[slots], rows[stored_slots])
        assert torch.equal(index[others], untouched[layer])


def runner_of(pool: Any, model_type: str) -> Any:
    model_config = SimpleNamespace(hf_config=SimpleNamespace(model_type=model_type))
    return SimpleNamespace(token_to_kv_pool=pool, model_config=model_config)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
def test_nothing_is_recorded_of_latents_that_have_bases(dtype: torch.dtype) -> None:
    runner = runner_of(latent_pool(dtype), "deepseek_v3")
    assert attach_turn_capture(runner, KrulConfig(strategy="subspace")) is None


@pytest.mark.parametrize(
    ("strategy", "model_type"),
    [("krul", "deepseek_v3"), ("subspace", "minicpm3"), ("subspace", "deepseek_v32")],
)
def test_latents_without_bases_are_refused(strategy: str, model_type: str) -> None:
    runner = runner_of(latent_pool(torch.bfloat16), model_type)
    with pytest.raises(UnsupportedSetupError, match=f'latent KV.*strategy = "{strategy}"'):
        attach_turn_capture(runner, KrulConfig(strategy=strategy))


def test_an_index_that_some_layers_lack_is_refused() -> None:
    pool = indexed_pool(torch.bfloat16, skip_topk_layers=[False, True])
    with pytest.raises(UnsupportedSetupError, match="one row of each page and layer"):
        open_pool(pool)


def test_a_server_with_an_index_is_refused_until_it_was_seen() -> None:
    runner = SimpleNamespace(
        token_to_kv_pool=indexed_pool(torch.bfloat16),
        model=torch.nn.Linear(1, 1),
        prefill_attention_backend_str="dsa",
        decode_attention_backend_str="dsa",
    )
    with pytest.raises(UnsupportedSetupError, match=r"DeepSeek-V3\.2"):
        open_model_pool(runner)
