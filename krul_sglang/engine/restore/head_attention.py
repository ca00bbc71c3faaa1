"""Computes attention of recomputed tokens over themselves and the KV before them in the pool."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.span_attention import Span, SpanAttention
from krul_sglang.engine.common.unsupported import UnsupportedSetupError


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

    def use(self, spans: Sequence[Span], own_slots: torch.Tensor) -> None:
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
