"""Types that every codec takes and gives: the KV of a layer, and its shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class LayerShape:
    """The shape of one layer's KV on one rank.

    ``k [T, num_kv_heads, k_head_dim]``, ``v [T, num_kv_heads, v_head_dim]``.
    """

    num_kv_heads: int
    k_head_dim: int
    v_head_dim: int
    dtype: torch.dtype

    @property
    def k_token_bytes(self) -> int:
        return self.num_kv_heads * self.k_head_dim * self.dtype.itemsize

    @property
    def v_token_bytes(self) -> int:
        return self.num_kv_heads * self.v_head_dim * self.dtype.itemsize


@dataclass(frozen=True)
class LayerKV:
    """Keys ``k [T, num_kv_heads, k_head_dim]`` and values ``v [T, num_kv_heads, v_head_dim]`` of one layer.

    In the pool's dtype, on any device. Keys carry their rotary embedding, as attention sees them.
    """

    k: torch.Tensor
    v: torch.Tensor


def empty_kv(shape: LayerShape, num_tokens: int, device: torch.device) -> LayerKV:
    """Room for the KV of ``num_tokens`` tokens, with undefined values."""
    k, v = (
        torch.empty(num_tokens, shape.num_kv_heads, head_dim, dtype=shape.dtype, device=device)
        for head_dim in (shape.k_head_dim, shape.v_head_dim)
    )
    return LayerKV(k, v)


ReadLayer = Callable[[int], LayerKV]
"""Reads one layer's KV of a segment. It keeps nothing: a second call for a layer reads again."""
