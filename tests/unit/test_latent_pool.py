"""A pool of latent KV as krul reads and writes it: rotary part and latent, each once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from sglang.srt.runtime_context import get_parallel

from krul_sglang.adapter.kv_pool import open_pool

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
