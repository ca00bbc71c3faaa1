"""Eviction of tokens by heavy hitters (H2O, Zhang et al. 2023): the baseline that drops tokens."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from krul_backend.attention.rows import attention_rows
from krul_backend.codec.layout import LayerKV, LayerShape

_ROWS_PER_BLOCK = 256
_INDEX_BYTES = 4


def accumulated_attention(
    queries: Sequence[Tensor], kv: Sequence[LayerKV], kv_heads: Tensor, scaling: float
) -> list[Tensor]:
    """Per layer fp32 ``[Hkv, T]``: the attention each token got from all queries of its KV head's group.

    ``queries[l] [T, H, D]`` of every token of the history.
    """
    totals = []
    for layer_queries, layer in zip(queries, kv, strict=True):
        num_tokens, num_kv_heads, _ = layer.k.shape
        heads = kv_heads.to(layer.k.device)
        total = torch.zeros(num_kv_heads, num_tokens, device=layer.k.device)
        for start in range(0, num_tokens, _ROWS_PER_BLOCK):
            end = min(start + _ROWS_PER_BLOCK, num_tokens)
            positions = torch.arange(start, end, device=layer.k.device)
            # [H, R, T]
            rows = attention_rows(layer_queries[positions], layer.k, positions, heads, scaling)
            total.index_add_(0, heads, rows.sum(1))
        totals.append(total)
    return totals


def num_kept_tokens(num_tokens: int, num_bytes: float, shape: LayerShape, num_layers: int) -> int:
    """How many tokens each head of each layer can keep in ``num_bytes``, a 4-byte index with each."""
    head_bytes = (shape.k_head_dim + shape.v_head_dim) * shape.dtype.itemsize + _INDEX_BYTES
    return min(num_tokens, int(num_bytes / (head_bytes * shape.num_kv_heads * num_layers)))


def stored_bytes(num_kept: int, shape: LayerShape, num_layers: int) -> int:
    head_bytes = (shape.k_head_dim + shape.v_head_dim) * shape.dtype.itemsize + _INDEX_BYTES
    return num_kept * head_bytes * shape.num_kv_heads * num_layers


def visible_tokens(accumulated: Sequence[Tensor], num_kept: int) -> list[Tensor]:
    """Per layer bool ``[Hkv, T]`` with ``num_kept`` tokens of each head: the latest half of them, and those
    before that got the most attention.

    H2O decides token by token while the history grows; here one decision is made at its end, with all that
    the tokens have got until then, which can only help it.
    """
    masks = []
    for total in accumulated:
        num_tokens = total.shape[1]
        num_recent = num_kept // 2
        mask = torch.zeros_like(total, dtype=torch.bool)
        mask[:, num_tokens - num_recent :] = True
        older = total[:, : num_tokens - num_recent]
        mask.scatter_(1, older.topk(num_kept - num_recent, dim=1).indices, True)
        masks.append(mask)
    return masks
