"""A Hugging Face model that runs some tokens on top of a given KV history."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_sglang.learning.model_kv import POOL_DTYPE, dynamic_cache
from krul_sglang.learning.reader import observed_attention

VisibleTokens = Sequence[Tensor]
"""Per layer bool ``[Hkv, T]``: which history tokens the query heads of a KV head see."""


@dataclass(frozen=True, eq=False)
class Run:
    """``N`` tokens after a history.

    ``logits [K, V]`` fp32 of the last ``K`` tokens asked for, ``queries[l] [N, H, D]`` as attention
    sees them, ``kv[l]`` of the new tokens alone, all three on the model's device.
    """

    logits: Tensor
    queries: tuple[Tensor, ...]
    kv: tuple[LayerKV, ...]


@dataclass
class CapturedAttention:
    """Queries of the captured forward and all keys and values, per layer, on the model's device."""

    queries: list[torch.Tensor] = field(default_factory=list)
    layers: list[LayerKV] = field(default_factory=list)
    scaling: float = 1.0

    def take(
        self, layer: int, queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scaling: float
    ) -> None:
        assert layer == len(self.layers), f"layer {layer} came after {len(self.layers)} layers"
        self.queries.append(queries)
        self.layers.append(LayerKV(keys, values))
        self.scaling = scaling

    @property
    def num_tokens(self) -> int:
        return len(self.layers[0].k)

    def read_keys(self, layer: int) -> torch.Tensor:
        """``[T, Hkv, D]``."""
        return self.layers[layer].k

    def rows(self, positions: torch.Tensor | None = None) -> QueryRows:
        """Rows at ``positions`` (absolute, int64 ``[R]``, all of the captured forward), or all of them."""
        num_queries, num_heads, _ = self.queries[0].shape
        # The forward may have had only the last tokens: the others were in its cache.
        first = self.num_tokens - num_queries
        if positions is None:
            positions = torch.arange(first, self.num_tokens)
        index = (positions - first).to(self.queries[0].device)
        queries = torch.stack([queries[index] for queries in self.queries])  # [L, R, H, D]
        group = num_heads // self.layers[0].k.shape[1]
        return QueryRows(queries, positions, torch.arange(num_heads) // group, self.scaling)


@torch.no_grad()
def capture_attention(model: Any, ids: Sequence[int]) -> CapturedAttention:
    """Run one forward over ``ids`` without a cache, and capture its attention."""
    captured = CapturedAttention()
    with observed_attention(model, captured.take):
        model(torch.tensor([list(ids)], device=model.device), use_cache=False, logits_to_keep=1)
    return captured


class HistoryModel:
    """Wraps a model of the Llama, Qwen2 or Qwen3 family."""

    def __init__(self, model: Any) -> None:
        self.model = model
        config = model.config
        self.num_layers: int = config.num_hidden_layers
        self.num_heads: int = config.num_attention_heads
        self.num_kv_heads: int = config.num_key_value_heads
        attention = model.model.layers[0].self_attn
        self.head_dim: int = attention.head_dim
        self.scaling: float = attention.scaling

    @property
    def shape(self) -> LayerShape:
        return LayerShape(self.num_kv_heads, self.head_dim, self.head_dim, POOL_DTYPE)

    @property
    def kv_heads(self) -> Tensor:
        """``[H]``: the KV head that each query head reads."""
        return torch.arange(self.num_heads) // (self.num_heads // self.num_kv_heads)

    @torch.no_grad()
    def run(self, ids: Sequence[int], history: Sequence[LayerKV], *, num_logits: int) -> Run:
        """Runs ``ids`` after ``history`` (one entry per layer, or none at all).

        ``num_logits`` is how many of the last tokens have their logits computed.
        """
        cache = dynamic_cache(self.model, history)
        num_history = cache.get_seq_length()
        captured = CapturedAttention()
        with observed_attention(self.model, captured.take):
            logits = self._forward(ids, cache, num_logits)
        kv = tuple(LayerKV(layer.k[num_history:], layer.v[num_history:]) for layer in captured.layers)
        return Run(logits, tuple(captured.queries), kv)

    @torch.no_grad()
    def logits(
        self,
        ids: Sequence[int],
        history: Sequence[LayerKV],
        *,
        num_logits: int,
        visible: VisibleTokens | None = None,
    ) -> Tensor:
        """``[num_logits, V]`` fp32 of the last of ``ids`` after ``history``."""
        with self._masked(visible):
            return self._forward(ids, dynamic_cache(self.model, history), num_logits)

    @torch.no_grad()
    def branch_logits(
        self,
        ids: Sequence[int],
        branches: Sequence[Sequence[int]],
        history: Sequence[LayerKV],
        *,
        num_logits: Sequence[int],
        visible: VisibleTokens | None = None,
    ) -> list[Tensor]:
        """Runs each branch as if it alone followed ``history`` and ``ids``: one forward for all of them.

        Returns of each branch ``[num_logits[b], V]`` fp32 of its last tokens.
        """
        lengths = torch.tensor([len(branch) for branch in branches])
        # the branch of each new token; those of `ids` come before all branches
        owner = torch.cat(
            (torch.full((len(ids),), -1), torch.arange(len(branches)).repeat_interleave(lengths))
        )
        is_seen = (owner[None, :] == -1) | (owner[None, :] == owner[:, None])
        starts = lengths.cumsum(0) - lengths
        offsets = torch.arange(int(lengths.sum())) - starts.repeat_interleave(lengths)
        cache = dynamic_cache(self.model, history)
        places = cache.get_seq_length() + torch.cat((torch.arange(len(ids)), len(ids) + offsets))
        ends = len(ids) + starts + lengths
        kept = [torch.arange(end - number, end) for end, number in zip(ends, num_logits, strict=True)]
        if visible is None:
            visible = [
                torch.ones(self.num_kv_heads, cache.get_seq_length(), dtype=torch.bool)
            ] * self.num_layers
        with self._masked(visible, is_seen.tril()):
            flat = (*ids, *(token for branch in branches for token in branch))
            logits = self._forward(flat, cache, torch.cat(kept), position_ids=places[None])
        return list(logits.split_with_sizes(list(num_logits)))

    def _forward(self, ids: Sequence[int], cache: Any, num_logits: int | Tensor, **options: Any) -> Tensor:
        output = self.model(
            torch.tensor([list(ids)], device=self.model.device),
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=num_logits,
            **options,
        )
        logits: Tensor = output.logits[0].float()
        return logits

    @contextmanager
    def _masked(self, visible: VisibleTokens | None, is_seen: Tensor | None = None) -> Iterator[None]:
        """Inside, ``visible`` says which history tokens are seen, ``is_seen [N, N]`` which new ones."""
        handles = [
            layer.self_attn.register_forward_pre_hook(partial(self._mask, tokens, is_seen), with_kwargs=True)
            for layer, tokens in zip(self.model.model.layers, visible or (), strict=visible is not None)
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _mask(
        self,
        visible: Tensor,
        is_seen: Tensor | None,
        module: Any,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The attention mask ``[1, H, N, keys]`` bool: ``visible`` in the history, ``is_seen`` after it."""
        num_queries = kwargs["hidden_states"].shape[1]
        num_before = kwargs["past_key_values"].get_seq_length(module.layer_idx)
        num_after = num_before + num_queries - visible.shape[1]
        if is_seen is None:
            causal = torch.ones(num_queries, num_after, dtype=torch.bool, device=visible.device)
            is_seen = causal.tril(num_after - num_queries)
        # [Hkv, T] -> [H, N, T]
        history = visible.repeat_interleave(self.num_heads // self.num_kv_heads, dim=0)
        parts = (
            history[:, None, :].expand(-1, num_queries, -1),
            is_seen.to(visible.device).expand(self.num_heads, -1, -1),
        )
        return args, {**kwargs, "attention_mask": torch.cat(parts, dim=2)[None]}


def load_model(path: Path, dtype: torch.dtype, device: str) -> Any:
    model: Any = AutoModelForCausalLM.from_pretrained(path, dtype=dtype, attn_implementation="sdpa")
    return model.to(device).train(False)


def concatenate(parts: Sequence[LayerKV]) -> LayerKV:
    """KV of the tokens of all parts, in order."""
    return LayerKV(torch.cat([kv.k for kv in parts]), torch.cat([kv.v for kv in parts]))


def token_slice(kv: Sequence[LayerKV], start: int, end: int) -> tuple[LayerKV, ...]:
    return tuple(LayerKV(layer.k[start:end], layer.v[start:end]) for layer in kv)
