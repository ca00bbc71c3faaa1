"""Random spans for the tests of head attention, and a plain softmax in fp64 to compare with."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from krul_backend.codec.layout import LayerShape
from krul_sglang.adapter.head_attention import HeadAttention
from krul_sglang.engine.common.span_attention import GatheredAttention, Span, SpanAttention
from tests.support.engine_builders import TensorPool

NUM_LAYERS = 2
NUM_SLOTS = 64
HEAD_DIM, VALUE_DIM = 8, 4
SCALING = 0.3


def reference(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float = SCALING) -> torch.Tensor:
    """Causal attention of the last ``len(q)`` tokens of ``k [T, Hkv, D]`` and ``v``; ``[n, Hq * Dv]``."""
    q, k, v = q.double(), k.double(), v.double()
    group = q.shape[1] // k.shape[1]
    num_past = len(k) - len(q)
    output = torch.zeros(len(q), q.shape[1], v.shape[2], dtype=torch.float64)
    for row in range(len(q)):
        seen = num_past + row + 1
        for head in range(q.shape[1]):
            weights = (k[:seen, head // group] @ q[row, head] * scaling).softmax(0)
            output[row, head] = weights @ v[:seen, head // group]
    return output.flatten(1)


class Case:
    """Random queries, keys and values of spans, and a pool that holds their past."""

    def __init__(
        self,
        spans: list[tuple[int, int]],
        num_q_heads: int = 4,
        num_kv_heads: int = 2,
        dtype: torch.dtype = torch.float32,
        num_slots: int = NUM_SLOTS,
        value_dim: int = VALUE_DIM,
    ) -> None:
        """``spans``: past tokens and own tokens of each."""
        generator = torch.Generator().manual_seed(len(spans))
        self.shape = LayerShape(num_kv_heads, HEAD_DIM, value_dim, dtype)
        self.pool: Any = TensorPool(self.shape, NUM_LAYERS, num_slots)
        rows = sum(num_tokens for _, num_tokens in spans)
        self.q, self.k, self.v = (
            torch.randn(rows, heads, dim, generator=generator).to(dtype)
            for heads, dim in ((num_q_heads, HEAD_DIM), (num_kv_heads, HEAD_DIM), (num_kv_heads, value_dim))
        )
        slots = torch.randperm(num_slots, generator=generator)
        self.spans: list[Span] = []
        first_row = first_slot = 0
        for num_past, num_tokens in spans:
            of_span = slots[first_slot : first_slot + num_past + num_tokens]
            self.spans.append(Span(first_row, num_tokens, of_span))
            first_row, first_slot = first_row + num_tokens, first_slot + num_past + num_tokens
        self.layer = SimpleNamespace(
            layer_id=1,
            tp_q_head_num=num_q_heads,
            tp_k_head_num=num_kv_heads,
            tp_v_head_num=num_kv_heads,
            qk_head_dim=HEAD_DIM,
            v_head_dim=value_dim,
            scaling=SCALING,
            k_scale_float=None,
            v_scale_float=None,
        )

    def run(self, kernel: SpanAttention | None = None, *, save_kv_cache: bool = True) -> torch.Tensor:
        attention = HeadAttention(self.pool, GatheredAttention() if kernel is None else kernel, None)
        attention.use(self.spans, torch.cat([own_slots(span) for span in self.spans]))
        return attention.forward(
            self.q.flatten(1), self.k.flatten(1), self.v.flatten(1), self.layer, save_kv_cache=save_kv_cache
        )

    def expected(self) -> torch.Tensor:
        """From the pool as it is now, before or after the run: only past slots are read."""
        past = self.pool.buffers(self.layer.layer_id)
        outputs = []
        for span in self.spans:
            rows = slice(span.first_row, span.first_row + span.num_tokens)
            k = torch.cat([past[0][past_slots(span)], self.k[rows]])
            v = torch.cat([past[1][past_slots(span)], self.v[rows]])
            outputs.append(reference(self.q[rows], k, v))
        return torch.cat(outputs)


def own_slots(span: Span) -> torch.Tensor:
    return span.slots[-span.num_tokens :]


def past_slots(span: Span) -> torch.Tensor:
    return span.slots[: -span.num_tokens]
