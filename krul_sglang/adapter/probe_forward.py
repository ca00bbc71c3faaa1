"""Runs a few tokens of a conversation on a history that is given, in SGLang's model, for a probe."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.base_attn_backend import AttentionBackend

from krul_backend.codec.layout import LayerKV
from krul_sglang.adapter.head_attention import HeadAttention, register_latent
from krul_sglang.engine.budget import History, RunOnHistory
from krul_sglang.engine.capture import QueryCapture, unrecorded


class HistoryAttention(AttentionBackend):  # type: ignore[misc]
    """Computes causal attention of ``W`` consecutive tokens over a given history and themselves.

    It neither reads nor writes slots. ``history(layer)`` has the ``num_history`` tokens before them.
    ``token_to_kv_pool`` is SGLang's pool, which models that write KV themselves get from their backend.
    Latent KV comes from the history in two parts, see ``DevicePool``, and from the model as one key.

    An error does not end the forward, since other ranks wait in its collectives: the output is zero instead,
    and ``error`` is the first one.
    """

    decode_attention_backend_str = HeadAttention.prefill_attention_backend_str

    def __init__(
        self, num_history: int, num_tokens: int, history: History, device: torch.device, token_to_kv_pool: Any
    ) -> None:
        register_latent(self.decode_attention_backend_str)
        self.token_to_kv_pool = token_to_kv_pool
        self.error: Exception | None = None
        self._history = history
        # [W, num_history + W]: token t sees the history and the tokens up to itself.
        self._mask = torch.ones(num_tokens, num_history + num_tokens, dtype=torch.bool, device=device).tril(
            num_history
        )

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Nothing to plan: there is one sequence, and its mask is known."""

    def forward(
        self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: Any, *args: Any, **kwargs: Any
    ) -> torch.Tensor:
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        own = LayerKV(
            k.view(-1, layer.tp_k_head_num, layer.qk_head_dim),
            v.view(-1, layer.tp_v_head_num, layer.v_head_dim),
        )
        try:
            return self._attend(queries, self._history(layer.layer_id), own, layer.scaling)
        except Exception as error:
            self.error = self.error or error
            return q.new_zeros(len(queries), layer.tp_q_head_num * layer.v_head_dim)

    def _attend(self, q: torch.Tensor, history: LayerKV, own: LayerKV, scaling: float) -> torch.Tensor:
        history = LayerKV(history.k.to(own.k.dtype), history.v.to(own.v.dtype))
        if history.k.shape[-1] != own.k.shape[-1]:
            history = LayerKV(torch.cat([history.v, history.k], dim=-1), history.v)
        keys = torch.cat([history.k, own.k]).transpose(0, 1)
        values = torch.cat([history.v, own.v]).transpose(0, 1)
        # [H, W, D] over [Hkv, T, D] -> [H, W, Dv] -> [W, H * Dv]
        output = F.scaled_dot_product_attention(
            q.transpose(0, 1)[None],
            keys[None],
            values[None],
            attn_mask=self._mask,
            scale=scaling,
            enable_gqa=True,
        )
        return output[0].transpose(0, 1).flatten(1)


@torch.no_grad()
def probe_forward(
    model_runner: Any,
    token_ids: torch.Tensor,
    first_position: int,
    attention: HistoryAttention,
    suspended: AbstractContextManager[None],
) -> torch.Tensor:
    """Logits ``[W, vocabulary]`` (float32) of ``token_ids`` ``[W]`` at ``first_position`` and after.

    The model sees a decode batch of ``W`` rows, so that each row gets logits; attention treats the rows as
    one sequence. If a model writes KV itself, it writes to slot 0, which SGLang keeps for padding.
    """
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch, ForwardMode
    from sglang.srt.model_executor.forward_context import ForwardContext, forward_context
    from sglang.srt.runtime_context import get_model

    num_tokens = len(token_ids)
    device = token_ids.device
    positions = torch.arange(first_position, first_position + num_tokens, device=device)
    seq_lens_cpu = torch.arange(first_position + 1, first_position + num_tokens + 1)
    nowhere = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    batch = ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        batch_size=num_tokens,
        input_ids=token_ids,
        req_pool_indices=nowhere,
        seq_lens=positions + 1,
        seq_lens_cpu=seq_lens_cpu,
        seq_lens_sum=int(seq_lens_cpu.sum()),
        out_cache_loc=nowhere,
        positions=positions,
        capture_hidden_mode=CaptureHiddenMode.NULL,
    )
    with (
        suspended,
        get_model().override(shared_experts=model_runner.model.shared_experts_config),
        forward_context(ForwardContext(attn_backend=attention), forward_batch=batch),
    ):
        output = model_runner.model.forward(token_ids, positions, batch)
    logits: torch.Tensor = output.next_token_logits.float()
    return logits


def prepare_probe(
    model_runner: Any, capture: QueryCapture | None, num_history: int, num_tokens: int, history: History
) -> RunOnHistory:
    """A forward of ``num_tokens`` tokens, see ``PrepareForward``; ``capture`` records nothing of it."""
    device, pool = torch.device(model_runner.device), model_runner.token_to_kv_pool
    attention = HistoryAttention(num_history, num_tokens, history, device, pool)

    def run(token_ids: torch.Tensor) -> torch.Tensor:
        logits = probe_forward(model_runner, token_ids, num_history, attention, unrecorded(capture))
        if attention.error is not None:
            raise attention.error
        return logits

    return run
