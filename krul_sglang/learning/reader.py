"""Reads text with a Hugging Face model: its attention, and gradients that weigh errors in its KV."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface, AttentionMaskInterface, DynamicCache
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from krul_backend.attention.rows import QueryRows, attention_drawn, sample_positions
from krul_backend.codec.layout import LayerKV, LayerShape
from krul_backend.codec.rotary import RotaryTable
from krul_backend.codec.subspace.learning import LearningText

POOL_DTYPE = torch.bfloat16
"""What a server's KV pool holds; the model itself may compute in another dtype."""


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


@dataclass(frozen=True, eq=False)
class History:
    """The KV of a text, ``layers`` as a server's pool holds it, and ``attention [L, Hkv, T]``; see
    ``GroupBasis.token_worth``."""

    layers: Sequence[LayerKV]
    attention: torch.Tensor


class TextReader:
    """Reads with a model of the Llama, Qwen2 or Qwen3 family, whose parameters need no gradients.

    ``query_rows``: queries of a text by which the attention that its tokens draw is measured.
    """

    def __init__(self, model: Any, *, query_rows: int = 256) -> None:
        self._model = model
        self._query_rows = query_rows
        config = model.config
        self.num_layers: int = config.num_hidden_layers
        head_dim: int = model.model.layers[0].self_attn.head_dim
        self.shape = LayerShape(config.num_key_value_heads, head_dim, head_dim, POOL_DTYPE)
        self.rotary = rotary_table(model, config.max_position_embeddings)
        model.requires_grad_(False)

    def read(self, ids: Sequence[int], num_read: int, seed: int) -> LearningText:
        """Learn from the first ``num_read`` tokens; the others are what the model predicts after them.

        ``seed`` draws the predicted tokens. Raises ValueError unless there are tokens in both parts.
        """
        if not 0 < num_read < len(ids):
            raise ValueError(f"{num_read} of {len(ids)} tokens cannot be read with some left to predict")
        text = self.read_history(ids[:num_read])
        positions = torch.arange(num_read)
        gradients = [
            LayerKV(self.rotary.pull_back(kv.k, positions), kv.v)
            for kv in self._gradients(text.layers, ids[num_read:], seed)
        ]
        layers = [LayerKV(self.rotary.unrotate(kv.k, positions), kv.v) for kv in text.layers]
        return LearningText(layers, gradients, text.attention)

    def read_history(self, ids: Sequence[int]) -> History:
        """The KV of a text as a server's pool would hold it, and the attention that its tokens draw."""
        captured = capture_attention(self._model, ids)
        rows = captured.rows(sample_positions(0, len(ids), self._query_rows))
        attention = attention_drawn(rows, captured.read_keys, 0, len(ids))
        return History([pooled(kv) for kv in captured.layers], attention)

    @torch.no_grad()
    def divergence(self, ids: Sequence[int], true: Sequence[LayerKV], other: Sequence[LayerKV]) -> float:
        """Run ``ids`` after the true history and after the other one. Return the KL divergence of their
        predictions, in nats per token."""
        predictions = [
            self._model(self._batch(ids), past_key_values=dynamic_cache(self._model, layers), use_cache=True)
            .logits[0]
            .double()
            .log_softmax(-1)
            for layers in (true, other)
        ]
        return float(F.kl_div(predictions[1], predictions[0], reduction="batchmean", log_target=True))

    def _gradients(self, layers: Sequence[LayerKV], ids: Sequence[int], seed: int) -> list[LayerKV]:
        """Gradients with respect to ``layers``, keys as they are, of a sample of the predictions after
        them."""
        leaves = [LayerKV(kv.k.float().requires_grad_(), kv.v.float().requires_grad_()) for kv in layers]
        cache = dynamic_cache(self._model, leaves)
        logits = self._model(self._batch(ids), past_key_values=cache, use_cache=True).logits[0].float()
        log_probabilities = logits.log_softmax(-1)
        generator = torch.Generator().manual_seed(seed)
        drawn = torch.multinomial(log_probabilities.detach().exp().cpu(), 1, generator=generator)
        chosen = log_probabilities.gather(1, drawn.to(logits.device))
        (chosen.sum() / len(ids) ** 0.5).backward()
        return [LayerKV(_gradient(kv.k), _gradient(kv.v)) for kv in leaves]

    def _batch(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self._model.device)


def rotary_table(model: Any, max_positions: int) -> RotaryTable:
    """Return the rotary table of a Hugging Face model, on its device."""
    embedding = model.model.rotary_emb
    positions = torch.arange(max_positions, device=embedding.inv_freq.device)
    angles = positions[:, None].float() * embedding.inv_freq[None, :].float()
    scale = float(embedding.attention_scaling)
    return RotaryTable(angles.cos() * scale, angles.sin() * scale, is_neox=True)


def dynamic_cache(model: Any, layers: Sequence[LayerKV]) -> Any:
    """Return a Hugging Face cache that holds ``layers``, in the type that the model computes in."""
    cache = DynamicCache()
    for layer, kv in enumerate(layers):
        # [T, Hkv, D] -> [1, Hkv, T, D]
        keys, values = (x.transpose(0, 1)[None].to(model.dtype) for x in (kv.k, kv.v))
        cache.update(keys, values, layer)
    return cache


def pooled(kv: LayerKV) -> LayerKV:
    """Return ``kv`` in the pool's type, contiguous."""
    return LayerKV(kv.k.to(POOL_DTYPE).contiguous(), kv.v.to(POOL_DTYPE).contiguous())


def _gradient(leaf: torch.Tensor) -> torch.Tensor:
    assert leaf.grad is not None, "the predictions depend on all KV before them"
    return leaf.grad
