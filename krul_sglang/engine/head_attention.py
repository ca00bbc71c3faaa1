"""Attention of recomputed tokens over what is in the pool before them and over themselves."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from krul_sglang.engine.kv_pool import DevicePool

_MASKED_QUERIES = 1024
"""Query rows whose mask is in memory at a time: ``[1024, prefix]`` booleans."""


@dataclass(frozen=True, eq=False)
class HeadSpan:
    """Rows ``[first_row, first_row + num_tokens)`` of a forward: neighbouring tokens of one request.

    ``past_slots`` (int64, on the pool's device) have the tokens before them, ``slots`` take their own KV.
    """

    first_row: int
    num_tokens: int
    past_slots: torch.Tensor
    slots: torch.Tensor


class HeadAttention(AttentionBackend):  # type: ignore[misc]
    """Causal attention of several requests' spans, which also writes their KV to the pool.

    It needs no plan per length, waits for no load, and reads of the pool only ``past_slots``. It works on the
    pool's buffers directly, because the pool's own getters wait for the loads that run meanwhile.
    """

    def __init__(self, pool: DevicePool) -> None:
        self.spans: Sequence[HeadSpan] = ()
        self._pool = pool

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        # q [rows, Hq * D], k [rows, Hkv * D], v [rows, Hkv * Dv]
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        keys = k.view(-1, layer.tp_k_head_num, layer.qk_head_dim)
        values = v.view(-1, layer.tp_v_head_num, layer.v_head_dim)
        k_buffer, v_buffer = self._pool.buffers(layer.layer_id)
        output = queries.new_empty(len(queries), layer.tp_q_head_num, layer.v_head_dim)
        for span in self.spans:
            rows = slice(span.first_row, span.first_row + span.num_tokens)
            own_k, own_v = keys[rows], values[rows]
            k_buffer.index_copy_(0, span.slots, own_k.to(k_buffer.dtype))
            v_buffer.index_copy_(0, span.slots, own_v.to(v_buffer.dtype))
            if len(span.past_slots):
                own_k = torch.cat([k_buffer.index_select(0, span.past_slots).to(own_k.dtype), own_k])
                own_v = torch.cat([v_buffer.index_select(0, span.past_slots).to(own_v.dtype), own_v])
            output[rows] = _attend(queries[rows], own_k, own_v, layer.scaling)
        return output.flatten(1)


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> torch.Tensor:
    """``q [n, Hq, D]`` are the last ``n`` of the tokens of ``k [T, Hkv, D]``, ``v``. ``[n, Hq, Dv]``."""
    num_queries, num_tokens = len(q), len(k)
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    if num_queries == num_tokens:
        output = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scaling, enable_gqa=True)
        return output[0].transpose(0, 1)
    num_past = num_tokens - num_queries
    parts = []
    for first in range(0, num_queries, _MASKED_QUERIES):
        end = min(first + _MASKED_QUERIES, num_queries)
        # Query first + i sees the tokens up to num_past + first + i.
        mask = torch.ones(end - first, num_past + end, dtype=torch.bool, device=q.device)
        parts.append(
            F.scaled_dot_product_attention(
                q[:, :, first:end],
                k[:, :, : num_past + end],
                v[:, :, : num_past + end],
                attn_mask=mask.tril(num_past + first),
                scale=scaling,
                enable_gqa=True,
            )
        )
    return torch.cat(parts, dim=2)[0].transpose(0, 1)
