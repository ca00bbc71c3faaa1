"""A small model whose layers are like those of SGLang's models, its pool, and what recomputes its heads."""

from __future__ import annotations

from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.layers.layer_boundary.residual import batch as residual_batch
from sglang.srt.layers.radix_attention import RadixAttention
from sglang.srt.models.utils import create_fused_set_kv_buffer_arg, enable_fused_set_kv_buffer

from krul_backend.codec.layout import LayerShape
from krul_sglang.adapter.head_recompute import HeadRecompute
from tests.support.engine_builders import TensorPool

NUM_LAYERS, NUM_SLOTS, VOCAB_SIZE, HIDDEN_SIZE = 4, 64, 50, 24
NUM_HEADS, NUM_KV_HEADS, HEAD_DIM = 4, 2, 6
SHAPE = LayerShape(NUM_KV_HEADS, HEAD_DIM, HEAD_DIM, torch.float32)


class EnginePool:
    """SGLang's pool as models see it: the same buffers behind getters that wait for loads."""

    dtype = torch.bfloat16

    def __init__(self, pool: Any) -> None:
        self._pool = pool
        self.asked: list[int] = []

    def get_key_buffer(self, layer: int) -> torch.Tensor:
        self.asked.append(layer)
        return self._pool.buffers(layer)[0]  # type: ignore[no-any-return]

    def get_value_buffer(self, layer: int) -> torch.Tensor:
        return self._pool.buffers(layer)[1]  # type: ignore[no-any-return]


class Layer(torch.nn.Module):
    """Attention and a residual. ``writes_kv``: as Qwen3-MoE does on a GPU, with the rotary embedding."""

    def __init__(self, index: int, *, writes_kv: bool) -> None:
        super().__init__()
        self.q, self.k, self.v = (
            torch.nn.Linear(HIDDEN_SIZE, heads * HEAD_DIM)
            for heads in (NUM_HEADS, NUM_KV_HEADS, NUM_KV_HEADS)
        )
        self.out = torch.nn.Linear(NUM_HEADS * HEAD_DIM, HIDDEN_SIZE)
        self.attn = RadixAttention(NUM_HEADS, HEAD_DIM, 0.4, NUM_KV_HEADS, layer_id=index)
        self.attn_boundary = SimpleNamespace(from_pp=self._from_pp)
        self._writes_kv = writes_kv

    def forward(
        self, positions: torch.Tensor, hidden_states: torch.Tensor, forward_batch: Any
    ) -> torch.Tensor:
        x = hidden_states + positions[:, None].sin()
        q, k, v = self.q(x), self.k(x), self.v(x)
        if self._writes_kv:
            assert enable_fused_set_kv_buffer(forward_batch)
            fused = create_fused_set_kv_buffer_arg(v, self.attn, forward_batch)
            fused.k_buffer[fused.cache_loc], fused.v_buffer[fused.cache_loc] = k, v
            # Nobody may need them any more.
            k, v = k * torch.nan, v * torch.nan
        attended = self.attn(q, k, v, forward_batch, save_kv_cache=not self._writes_kv)
        hidden = hidden_states + self.out(attended)
        return residual_batch.stream_of(forward_batch).write(hidden)  # type: ignore[no-any-return]

    def _from_pp(self, proxy: Any, forward_batch: Any) -> torch.Tensor:
        residual_batch.start(forward_batch)
        hidden = proxy.tensors["hidden_states"]
        return residual_batch.stream_of(forward_batch).write(hidden)  # type: ignore[no-any-return]


class ExpertsForCausalLM(torch.nn.Module):
    shared_experts_config = None

    def __init__(self, *, writes_kv: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.model = torch.nn.Module()
            self.model.embed_tokens = torch.nn.Embedding(VOCAB_SIZE, HIDDEN_SIZE)
            layers = [Layer(index, writes_kv=writes_kv) for index in range(NUM_LAYERS)]
            self.model.layers = torch.nn.ModuleList(layers)


class Rig:
    """A model, its pool, and what recomputes heads of it."""

    def __init__(self, *, writes_kv: bool = False, device: str = "cpu") -> None:
        self.pool: Any = TensorPool(SHAPE, NUM_LAYERS, NUM_SLOTS)
        self.pool._layers = [tuple(x.to(device) for x in layer) for layer in self.pool._layers]
        self.engine_pool = EnginePool(self.pool)
        self.model = ExpertsForCausalLM(writes_kv=writes_kv).to(device)
        runner = SimpleNamespace(
            model=self.model, token_to_kv_pool=self.engine_pool, dtype=torch.float32, device=device
        )
        self.heads = HeadRecompute(runner, self.pool, None)


def fake_engine(patch: pytest.MonkeyPatch) -> None:
    """The little that layers ask of SGLang beside their arguments."""
    get_model = SimpleNamespace(override=lambda **values: nullcontext())
    patch.setattr("sglang.srt.runtime_context.get_model", lambda: get_model)
    patch.setattr("sglang.srt.models.utils._is_cuda", True)
    patch.setattr("sglang.srt.models.utils.is_cp_active", lambda batch: False)
