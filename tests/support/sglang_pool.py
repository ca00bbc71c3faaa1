"""SGLang's own KV pool, small and full of random rows."""

from __future__ import annotations

from typing import Any

import torch

PAGE_SIZE = 4
NUM_LAYERS = 3
NUM_SLOTS = 64


def make_pool() -> Any:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    pool = MHATokenToKVPool(
        size=NUM_SLOTS,
        page_size=PAGE_SIZE,
        dtype=torch.float32,
        head_num=2,
        head_dim=16,
        layer_num=NUM_LAYERS,
        device="cpu",
        enable_memory_saver=False,
    )
    generator = torch.Generator().manual_seed(0)
    for buffer in (*pool.k_buffer, *pool.v_buffer):
        buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return pool
