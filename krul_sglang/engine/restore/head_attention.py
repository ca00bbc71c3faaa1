"""Computes attention of recomputed tokens over themselves and the KV before them in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend
from torch.nn.attention.bias import causal_lower_right

from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.unsupported import UnsupportedSetupError

_MAX_SCORES = 1 << 25
"""Most scores, over all query heads, that one call of a kernel which keeps them all may have in memory."""

_MIN_QUERIES = 16
"""Fewest queries of one call, however long the prefix is."""


@dataclass(frozen=True, eq=False)
class HeadSpan:
    """Rows ``[first_row, first_row + num_tokens)`` of a forward: neighbouring tokens of one request.

    ``slots`` (int64, on the pool's device) hold the KV of all tokens up to the last of them: the last
    ``num_tokens`` take their own, those before are only read.
    """

    first_row: int
    num_tokens: int
    slots: torch.Tensor


class SpanAttention(Protocol):
    """Computes causal attention of spans whose own KV is in the pool already."""

    def plan(self, spans: Sequence[HeadSpan]) -> None:
        """Say what the next calls of ``attend`` are for, until the next ``plan``."""

    def attend(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        """``q [rows, Hq, D]`` over one layer's buffers ``[num_slots, Hkv, D]``, ``[num_slots, Hkv, Dv]``.

        Buffers of fp8 are to be multiplied by the scales of ``layer``, SGLang's attention module. Returns
        ``[rows, Hq, Dv]`` in the type of ``q``. Row ``i`` of a span sees the tokens up to its own.
        """


class HeadAttention(AttentionBackend):  # type: ignore[misc]
    """Writes the KV of several requests' spans to the pool, and lets ``kernel`` attend to it.

    It waits for no load, and reads of the pool only slots of spans. It works on the pool's buffers directly,
    because the pool's own getters wait for the loads that run meanwhile. ``token_to_kv_pool`` is SGLang's
    pool: models that write KV themselves, together with the rotary embedding, take it from their backend.
    """

    def __init__(self, pool: DevicePool, kernel: SpanAttention, token_to_kv_pool: Any) -> None:
        self.token_to_kv_pool = token_to_kv_pool
        self._pool = pool
        self._kernel = kernel
        self._own_slots = torch.empty(0, dtype=torch.int64)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan: see ``use``."""

    def use(self, spans: Sequence[HeadSpan], own_slots: torch.Tensor) -> None:
        """The next forwards are of these spans, whose rows take ``own_slots`` (int64 ``[rows]``)."""
        self._own_slots = own_slots
        self._kernel.plan(spans)

    def clear(self) -> None:
        """Forget the spans."""
        self.use((), self._own_slots.new_empty(0))

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor | None,
        v: torch.Tensor | None,
        layer: Any,
        forward_batch: Any = None,
        save_kv_cache: bool = True,
        **kwargs: Any,
    ) -> torch.Tensor:
        """``save_kv_cache`` is false where the model has written the KV of these rows itself.

        Raises:
            UnsupportedSetupError: the model asks for another kind of attention.
        """
        asked = sorted(name for name, value in kwargs.items() if value is not None)
        if asked:
            raise UnsupportedSetupError(
                f"--radix-cache-backend krul: attention with {', '.join(asked)} cannot be recomputed"
            )
        if save_kv_cache:
            assert k is not None
            assert v is not None
            self._pool.write(
                layer.layer_id,
                self._own_slots,
                k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
                v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
            )
        k_buffer, v_buffer = self._pool.typed_buffers(layer.layer_id)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        return self._kernel.attend(queries, k_buffer, v_buffer, layer).flatten(1)


def read_rows(
    buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float | None
) -> torch.Tensor:
    """The rows ``slots`` of one layer's keys or values in ``dtype``, copied: ``[n, H, D]``.

    ``scale`` is that of an fp8 pool; it multiplies what the pool keeps. None for 1.
    """
    if buffer.dtype.itemsize > 1:
        return buffer.index_select(0, slots).to(dtype)
    # Of bytes, because few operators know fp8.
    rows = buffer.view(torch.uint8).index_select(0, slots).view(buffer.dtype).to(dtype)
    return rows if scale is None else rows * scale


class GatheredAttention:
    """Attention by torch, one span after another over a copy of its KV. Runs on any device.

    The kernel is torch's choice. Few queries go into one call, so that even one that keeps all scores takes
    bounded memory; one that keeps none (flash attention on a GPU) is handed neither mask nor bias.
    """

    def __init__(self) -> None:
        self._spans: Sequence[HeadSpan] = ()

    def plan(self, spans: Sequence[HeadSpan]) -> None:
        self._spans = spans

    def attend(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        output = q.new_empty(len(q), q.shape[1], v_buffer.shape[2])
        for span in self._spans:
            rows = slice(span.first_row, span.first_row + span.num_tokens)
            k = read_rows(k_buffer, span.slots, q.dtype, layer.k_scale_float)
            v = read_rows(v_buffer, span.slots, q.dtype, layer.v_scale_float)
            _attend(output[rows], q[rows], k, v, layer.scaling)
        return output


def _attend(output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> None:
    """``q [n, Hq, D]`` are the last ``n`` of the tokens of ``k [T, Hkv, D]`` and ``v``.

    The result goes to ``output [n, Hq, Dv]``.
    """
    num_queries, num_tokens = len(q), len(k)
    # [T, H, D] -> [1, H, T, D]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    step = max(_MIN_QUERIES, _MAX_SCORES // (q.shape[1] * num_tokens))
    for first in range(0, num_queries, step):
        end = min(first + step, num_queries)
        seen = num_tokens - num_queries + end
        part = F.scaled_dot_product_attention(
            q[:, :, first:end],
            k[:, :, :seen],
            v[:, :, :seen],
            # The last query sees all of these tokens, each one before it one less.
            attn_mask=causal_lower_right(end - first, seen),
            scale=scaling,
            enable_gqa=True,
        )
        output[first:end] = part[0].transpose(0, 1)
