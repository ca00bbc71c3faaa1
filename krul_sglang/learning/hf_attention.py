"""Queries, keys and values of a Hugging Face model, as its attention sees them."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from krul_backend.attention.rows import QueryRows
from krul_backend.codec.interface import LayerKV

_NAME = "krul_capture"

OnLayer = Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor, float], None]
"""``(layer, queries [R, H, D], keys [T, Hkv, D], values [T, Hkv, D], scaling)`` of the first sequence."""


@contextmanager
def observed_attention(model: Any, on_layer: OnLayer) -> Iterator[None]:
    """Within this context, ``on_layer`` is called with what each layer's attention reads. The model computes
    as before.

    For models that take their attention from the library's registry (Llama, Qwen2, Qwen3), with any
    implementation. Queries and keys carry rotary embedding and norm; keys and values include the cache's.
    """
    before = model.config._attn_implementation

    def observe(
        module: Any, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, mask: Any, **options: Any
    ) -> Any:
        # Each [1, heads, tokens, D] -> [tokens, heads, D].
        q, k, v = (states[0].transpose(0, 1) for states in (query, key, value))
        on_layer(module.layer_idx, q, k, v, options["scaling"])
        # The plain implementation is no entry of the registry: each model's file has its own.
        plain = sys.modules[type(module).__module__].eager_attention_forward
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(before, plain)
        return attend(module, query, key, value, mask, **options)

    # Without a mask function of its own, an implementation is given no mask at all.
    AttentionMaskInterface.register(_NAME, ALL_MASK_ATTENTION_FUNCTIONS[before])
    AttentionInterface.register(_NAME, observe)
    model.set_attn_implementation(_NAME)
    try:
        yield
    finally:
        model.set_attn_implementation(before)


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

    def read_layer(self, layer: int) -> LayerKV:
        return self.layers[layer]

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
        model(torch.tensor([ids], device=model.device), use_cache=False, logits_to_keep=1)
    return captured
