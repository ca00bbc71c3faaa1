"""An attention backend for servers without an accelerator, which computes nothing that is cached.

SGLang's own backend for CPUs, ``torch_native``, computes attention of a whole sequence to extend it by a few
tokens. This one computes the new rows only, and decodes all requests of a batch together. It also verifies
drafted tokens, and reads the windows of a pool of their own, which ``torch_native`` cannot.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate
from typing import Any

import torch
import torch.nn.functional as F
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.layers.radix_attention import AttentionType
from sglang.srt.mem_cache.memory_pool import KVWriteLoc, MLATokenToKVPool

from krul_sglang.adapter.head_attention import register_latent
from krul_sglang.engine.common.span_attention import GatheredAttention, Span, read_rows

NAME = "krul_cpu"
"""As SGLang's ``--attention-backend`` names it; the default on krul's CPU platform."""

_MAX_PADDING = 2
"""Requests that are decoded in one group are at most this many times as long as the shortest of them."""


def register() -> None:
    """Add the backend to SGLang's registries. Safe to call again."""
    from sglang.srt.layers.attention.attention_registry import register_attention_backend

    register_attention_backend(NAME)(CpuAttention)
    register_latent(NAME)


@dataclass(frozen=True, eq=False)
class DecodeGroup:
    """Requests of similar length, whose next token is computed together.

    ``rows`` (int64 ``[n]``) are theirs in the batch. ``slots`` (int64 ``[n, longest]``) hold their tokens;
    behind the end of a shorter request its last slot is repeated. ``bias`` (``[n, 1, 1, longest]``, in the
    type of the queries) is minus infinity there and 0 elsewhere; None if all are equally long.
    """

    rows: torch.Tensor
    slots: torch.Tensor
    bias: torch.Tensor | None


def decode_groups(
    req_to_token: torch.Tensor, seq_lens: list[int], dtype: torch.dtype
) -> Iterator[DecodeGroup]:
    """Split a batch into groups. ``req_to_token`` (``[batch, longest or more]``): its slots by position."""
    by_length = sorted(range(len(seq_lens)), key=seq_lens.__getitem__)
    while by_length:
        most = _MAX_PADDING * seq_lens[by_length[0]]
        of_group = [row for row in by_length if seq_lens[row] <= most]
        by_length = by_length[len(of_group) :]
        rows = torch.tensor(of_group)
        lengths = torch.tensor([seq_lens[row] for row in of_group])[:, None]
        positions = torch.arange(int(lengths[-1]))
        slots = req_to_token[rows].gather(1, positions.minimum(lengths - 1)).long()
        beyond = (positions >= lengths)[:, None, None]
        bias = torch.zeros(beyond.shape, dtype=dtype).masked_fill(beyond, -torch.inf)
        yield DecodeGroup(rows, slots, bias if beyond.any() else None)


@dataclass(frozen=True, eq=False)
class MaskedSpan:
    """New tokens of one request, ``rows`` of the forward, which do not attend to all tokens before them:
    drafted ones, which the target verifies, and those of a layer with a window.

    ``slots`` (int64 ``[T + n]``) hold tokens before them and, behind these, the new ones. ``sees`` (bool
    ``[n, T + n]``) says which of them each new one attends to.
    """

    rows: slice
    slots: torch.Tensor
    sees: torch.Tensor


def draft_spans(
    req_to_token: torch.Tensor, seq_lens: list[int], spec_info: Any, window: float
) -> Iterator[MaskedSpan]:
    """The spans of drafted tokens that are verified, where each token attends to ``window`` tokens before it.
    ``seq_lens`` are without the drafted tokens; the ``custom_mask`` (bool ``[batch * n * n]``) of SGLang's
    ``spec_info`` is about these alone."""
    num_drafted = spec_info.draft_token_num
    trees = spec_info.custom_mask.view(-1, num_drafted, num_drafted)
    for index, (row, seq_len, tree) in enumerate(zip(req_to_token, seq_lens, trees, strict=True)):
        first = int(max(0, seq_len - window))
        sees = torch.cat([tree.new_ones(num_drafted, seq_len - first), tree], dim=1)
        # Of the drafted ones, a token sees itself and those of its branch before it.
        positions = torch.cat([torch.arange(first, seq_len), seq_len - 1 + tree.sum(dim=1)])
        sees &= positions[-num_drafted:, None] - positions <= window
        rows = slice(index * num_drafted, (index + 1) * num_drafted)
        yield MaskedSpan(rows, row[first : seq_len + num_drafted].long(), sees)


def window_spans(
    req_to_token: torch.Tensor, seq_lens: list[int], num_new: list[int], window: float
) -> Iterator[MaskedSpan]:
    """The spans of a layer in which each token attends to ``window`` tokens before it. ``seq_lens`` are with
    the ``num_new`` tokens of each request."""
    for row, end, first_row, num_tokens in zip(
        req_to_token, seq_lens, accumulate(num_new, initial=0), num_new, strict=False
    ):
        positions = torch.arange(int(max(0, end - num_tokens - window)), end)
        since = positions[-num_tokens:, None] - positions
        rows = slice(first_row, first_row + num_tokens)
        yield MaskedSpan(rows, row[positions].long(), (since >= 0) & (since <= window))


def branch_rows(
    rows: torch.Tensor, seq_lens: list[int], num_branches: int, num_slots: int
) -> tuple[torch.Tensor, list[int]]:
    """The slots by position of each branch of drafts, and the requests' lengths. ``rows`` (``[batch, ...]``):
    those of requests, whose branches lie one after another behind their tokens."""
    rows = rows.repeat_interleave(num_branches, dim=0)
    seq_lens = [seq_len for seq_len in seq_lens for _ in range(num_branches)]
    for index, (row, end) in enumerate(zip(rows, seq_lens, strict=True)):
        first = end + index % num_branches * num_slots
        row[end : end + num_slots] = row[first : first + num_slots].clone()
    return rows, seq_lens


class CpuAttention(TorchNativeAttnBackend):  # type: ignore[misc]
    """Attends to paged KV on a CPU, with results that equal those of ``torch_native`` within rounding.

    Layers that are not causal over a request's own tokens (as in encoders) are left to SGLang's backend.
    """

    def __init__(self, model_runner: Any, num_drafted: int = 0, branches: tuple[int, int] = (1, 0)) -> None:
        """``num_drafted``: tokens that each request has behind its own, when they are decoded; they are the
        first of each of its ``branches``, so many with so many slots."""
        super().__init__(model_runner)
        self._dtype = model_runner.dtype
        self._num_drafted = num_drafted
        self._branches = branches
        self._extend = GatheredAttention()
        self._decode: tuple[DecodeGroup, ...] = ()
        self._are_drafts = False
        self._masked: Callable[[float], Iterator[MaskedSpan]] = lambda window: iter(())
        self._spans: dict[float, tuple[MaskedSpan, ...]] = {}

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """The length of requests that pad a batch: with DP attention all ranks decode as many."""
        return 1

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """Look up the slots of all tokens that the batch's requests have, once for all layers."""
        super().init_forward_metadata(forward_batch)
        self._extend.plan(())
        self._decode = ()
        self._are_drafts = forward_batch.forward_mode.is_target_verify()
        self._spans = {}
        if forward_batch.forward_mode.is_idle():
            return
        rows = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        seq_lens = forward_batch.seq_lens.tolist()
        if forward_batch.forward_mode.is_decode():
            rows, seq_lens = branch_rows(rows, seq_lens, *self._branches)
            seq_lens = [seq_len + self._num_drafted for seq_len in seq_lens]
            self._masked = partial(window_spans, rows, seq_lens, [1] * len(seq_lens))
            self._decode = tuple(decode_groups(rows, seq_lens, self._dtype))
            return
        if self._are_drafts:
            self._masked = partial(draft_spans, rows, seq_lens, forward_batch.spec_info)
            return
        num_new = forward_batch.extend_seq_lens.tolist()
        self._masked = partial(window_spans, rows, seq_lens, num_new)
        self._extend.plan(
            [
                Span(end - num_tokens, num_tokens, row[:seq_len].long())
                for row, seq_len, num_tokens, end in zip(
                    rows, seq_lens, num_new, accumulate(num_new), strict=True
                )
            ]
        )

    def forward_extend(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attention of new tokens: ``q [rows, Hq * D]`` to ``[rows, Hq * Dv]``."""
        if _is_foreign(layer, forward_batch):
            foreign: torch.Tensor = super().forward_extend(q, k, v, layer, forward_batch, save_kv_cache)
            return foreign
        buffers = self._buffers(k, v, layer, forward_batch, save_kv_cache)
        queries = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        if self._are_drafts or layer.sliding_window_size > 0:
            return self._attend_masked(queries, *buffers, layer).flatten(1)
        return self._extend.attend(queries, *buffers, layer).flatten(1)

    def _spans_of(self, layer: Any) -> tuple[MaskedSpan, ...]:
        """The spans of a layer, with slots of the pool of windows if there is one and it has a window."""
        window = layer.sliding_window_size if layer.sliding_window_size > 0 else math.inf
        if window not in self._spans:
            spans = self._masked(window)
            if self.use_sliding_window_kv_pool and window < math.inf:
                translate = self.token_to_kv_pool.translate_loc_from_full_to_swa
                spans = (replace(span, slots=translate(span.slots)) for span in spans)
            self._spans[window] = tuple(spans)
        return self._spans[window]

    def _attend_masked(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        """Attention of the tokens of a layer's spans: ``q [rows, Hq, D]`` to ``[rows, Hq, Dv]``."""
        output = q.new_empty(*q.shape[:2], layer.v_head_dim)
        for span in self._spans_of(layer):
            keys = read_rows(k_buffer, span.slots, q.dtype, layer.k_scale_float)
            values = read_rows(v_buffer, span.slots, q.dtype, layer.v_scale_float)
            # [T, H, D] -> [H, T, D]
            queries, keys, values = (x.transpose(0, 1) for x in (q[span.rows], keys, values))
            attended = F.scaled_dot_product_attention(
                queries, keys, values, attn_mask=span.sees, scale=layer.scaling, enable_gqa=True
            )
            output[span.rows] = attended.transpose(0, 1)
        return output

    def forward_decode(
        self, q: torch.Tensor, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool = True
    ) -> torch.Tensor:
        """Attention of each request's newest token: ``q [batch, Hq * D]`` to ``[batch, Hq * Dv]``."""
        if _is_foreign(layer, forward_batch):
            foreign: torch.Tensor = super().forward_decode(q, k, v, layer, forward_batch, save_kv_cache)
            return foreign
        k_buffer, v_buffer = self._buffers(k, v, layer, forward_batch, save_kv_cache)
        if layer.sliding_window_size > 0:
            rows = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
            return self._attend_masked(rows, k_buffer, v_buffer, layer).flatten(1)
        num_kv_heads = layer.tp_k_head_num
        # [B, Hq * D] -> [B, Hkv, G, D]: the query heads of one KV head are rows of one product
        queries = q.reshape(len(q), num_kv_heads, -1, layer.qk_head_dim)
        output = q.new_empty(len(q), layer.tp_q_head_num, layer.v_head_dim)
        for group in self._decode:
            size, slots = group.slots.shape, group.slots.flatten()
            keys = read_rows(k_buffer, slots, q.dtype, layer.k_scale_float)
            values = read_rows(v_buffer, slots, q.dtype, layer.v_scale_float)
            # [n * T, Hkv, D] -> [n, Hkv, T, D]
            keys, values = (x.view(*size, *x.shape[1:]).transpose(1, 2) for x in (keys, values))
            attended = F.scaled_dot_product_attention(
                queries[group.rows], keys, values, attn_mask=group.bias, scale=layer.scaling
            )
            output[group.rows] = attended.flatten(1, 2)
        return output.flatten(1)

    def _buffers(
        self, k: Any, v: Any, layer: Any, forward_batch: Any, save_kv_cache: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The pool's keys and values of a layer, with the new ones; waits until they are loaded."""
        pool = self.token_to_kv_pool
        if save_kv_cache and k is not None and v is not None:
            loc = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            scales = () if isinstance(pool, MLATokenToKVPool) else (layer.k_scale, layer.v_scale)
            pool.set_kv_buffer(layer, loc, k, v, *scales)
        return pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)


class DraftSteps:
    """The attention of a draft model's decode steps: each sees one drafted token of its branch more than the
    one before."""

    def __init__(self, model_runner: Any, num_steps: int, num_branches: int = 1) -> None:
        branches = num_branches, num_steps + 1
        self.attn_backends = [CpuAttention(model_runner, step + 1, branches) for step in range(num_steps)]

    def init_forward_metadata(self, forward_batch: Any) -> None:
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)


def _is_foreign(layer: Any, forward_batch: Any) -> bool:
    """Whether SGLang's own backend computes this layer: it is not plain causal attention."""
    return bool(
        layer.is_cross_attention
        or layer.attn_type == AttentionType.ENCODER_ONLY
        or forward_batch.encoder_lens is not None
    )
