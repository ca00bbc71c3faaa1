"""Measures how much attention each token of a turn draws from the queries after it."""

from __future__ import annotations

import torch

from krul_backend.attention.rows import QueryRows, ReadKeys, attention_rows, default_block_bytes

PRIOR_ROWS = 2.0
"""Rows of average attention that every token is given beside those that saw it: the last tokens of a turn
were seen by few."""


def attention_drawn(
    rows: QueryRows, read_keys: ReadKeys, start_token: int, num_tokens: int, *, block_bytes: int | None = None
) -> torch.Tensor:
    """The mean share of its attention that a query spends on each of the tokens ``[start_token, start_token +
    num_tokens)``, over the queries of ``rows`` that see it, summed over the query heads of each KV head.

    Returns fp32 ``[L, Hkv, num_tokens]`` on the device of the queries. Weights of at most ``block_bytes``
    are held at a time (one row is the least). Without rows that see any of the tokens, all draw the same:
    ``1 / T`` of each head, where ``T`` is the last token's position plus one.
    """
    device = rows.queries.device
    num_kv_heads = int(rows.kv_heads.max()) + 1
    heads = rows.kv_heads.to(device)
    group = rows.num_heads // num_kv_heads
    end = start_token + num_tokens
    positions = rows.positions.cpu()
    used = torch.nonzero(positions >= start_token).flatten()
    totals = torch.zeros(rows.num_layers, num_kv_heads, num_tokens, device=device)
    if len(used) == 0:
        return totals + group / end
    if block_bytes is None:
        block_bytes = default_block_bytes(device)
    num_visible = int(positions.max()) + 1
    block_rows = max(1, block_bytes // (4 * num_visible * rows.num_heads))
    num_seen = torch.zeros(num_tokens)
    tokens = torch.arange(start_token, end)
    for block in torch.split(used, block_rows):
        num_seen += (positions[block][:, None] >= tokens).sum(0)
        block_positions = positions[block].to(device)
        for layer in range(rows.num_layers):
            keys = read_keys(layer)[:num_visible]
            queries = rows.queries[layer, block.to(device)]
            # [H, rows, num_visible] -> [H, tokens of the turn]
            drawn = attention_rows(queries, keys, block_positions, heads, rows.scaling).sum(1)
            part = drawn[:, start_token:end]
            totals[layer, :, : part.shape[1]].index_add_(0, heads, part)
    num_seen = num_seen.to(device)
    average = totals.sum(-1, keepdim=True) / num_seen.sum()
    return (totals + PRIOR_ROWS * average) / (num_seen + PRIOR_ROWS)
