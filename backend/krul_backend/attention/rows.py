"""Chooses query rows of a turn, and reduces them to statistics, or to the attention that each token draws."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.device import Device
from krul_backend.machine_code import compiled_for_sums, elements, number_of

CPU_BLOCK_BYTES = 8 << 20
"""Bytes of attention weights that are held at a time on a CPU: about what stays in its caches."""
DEVICE_BLOCK_BYTES = 256 << 20
"""Bytes of attention weights that are held at a time on a GPU, where few large operations are faster."""

_UNROLLED = 64
"""Elements that a compiled loop works on at a time."""

_LEAST_SCORE = np.float32(-1e30)
_SIGN, _NOT_SIGN, _SMALLEST = np.int32(31), np.int32(0x7FFFFFFF), np.int32(-0x80000000)
_ONE, _HALF, _LOG2_E, _FEWEST_OCTAVES = (np.float32(each) for each in (1, 0.5, math.log2(math.e), -126))
_S1, _S2, _S3, _S4, _S5 = (np.float32(math.log(2) ** n / math.factorial(n)) for n in range(1, 6))

PRIOR_ROWS = 2.0
"""Rows of average attention that every token is given beside those that saw it: the last tokens of a turn
were seen by few."""


def default_block_bytes(device: torch.device) -> int:
    """Bytes of attention weights to hold at a time on a device."""
    return CPU_BLOCK_BYTES if Device(device).shares_cores else DEVICE_BLOCK_BYTES


class Phase(Enum):
    """The part of a turn that rows come from: the engine's forward mode says which."""

    PREFILL = "prefill"
    DECODE = "decode"


def sample_positions(start: int, end: int, count: int) -> torch.Tensor:
    """Choose ``count`` evenly spaced positions of the prompt chunk ``[start, end)``, its last one included.

    Returns int64 ``[min(count, end - start)]`` on the CPU, ascending, distinct. On the bundled reference
    model squared distances of rows vary much from one row to the next and hardly with the place in the
    conversation, so no choice of rows beats even spacing; taking half of them from the end is clearly worse.

    Raises:
        ValueError: if the chunk is empty or ``count`` is not positive.
    """
    num_tokens = end - start
    if num_tokens <= 0 or count <= 0:
        raise ValueError(f"cannot place {count} rows in the chunk [{start}, {end})")
    count = min(count, num_tokens)
    return start + (torch.arange(1, count + 1) * num_tokens) // count - 1


@dataclass(frozen=True, eq=False)
class QueryRows:
    """The query vectors of ``R`` tokens of one sequence, in all layers, as attention sees them.

    Args:
        queries: ``[L, R, H, D]``, after the rotary embedding and any norm of queries; any device and dtype.
        positions: int64 ``[R]``: row ``r`` attends to tokens ``0..positions[r]``.
        kv_heads: int64 ``[H]``: which KV head each query head reads. Heads may be a sample of the model's.
        scaling: factor of the scores before the softmax.

    Raises:
        ValueError: if the shapes contradict each other.
    """

    queries: torch.Tensor
    positions: torch.Tensor
    kv_heads: torch.Tensor
    scaling: float

    def __post_init__(self) -> None:
        _, num_rows, num_heads, _ = self.queries.shape
        if self.positions.shape != (num_rows,) or self.kv_heads.shape != (num_heads,):
            raise ValueError(
                f"queries [L, R, H, D] of shape {tuple(self.queries.shape)} need positions [{num_rows}] and "
                f"kv_heads [{num_heads}], got {tuple(self.positions.shape)} and {tuple(self.kv_heads.shape)}"
            )

    @property
    def num_layers(self) -> int:
        return self.queries.shape[0]

    @property
    def num_rows(self) -> int:
        return self.queries.shape[1]

    @property
    def num_heads(self) -> int:
        return self.queries.shape[2]


ReadKeys = Callable[[int], torch.Tensor]
"""Reads one layer's keys ``[T, Hkv, D]`` of the sequence, with rotary embedding; ``T`` > every position."""


def attention_rows(
    queries: torch.Tensor, keys: torch.Tensor, positions: torch.Tensor, kv_heads: torch.Tensor, scaling: float
) -> torch.Tensor:
    """Attention weights of one layer: fp32 ``[H, R, T]``; rows are distributions over tokens ``<= position``.

    ``queries [R, H, D]``, ``keys [T, Hkv, D]`` in any dtype; all on one device.
    """
    # The engine's kernels also hold scores in fp32; bf16 would blur the differences between layers.
    q = queries.float().transpose(0, 1)  # [H, R, D]
    k = keys[:, kv_heads].float().permute(1, 2, 0)  # [H, D, T]
    scores = torch.bmm(q, k).mul_(scaling)  # [H, R, T]
    is_hidden = torch.arange(len(keys), device=keys.device) > positions[:, None]  # [R, T]
    return scores.masked_fill_(is_hidden, -torch.inf).softmax(dim=-1)


def accumulate(
    rows: QueryRows, read_keys: ReadKeys, *, block_bytes: int | None = None
) -> AttentionStatistics:
    """Reduce all rows to statistics, on the device of the queries.

    Works through blocks of rows and heads whose weights in all layers take at most ``block_bytes`` (one row
    of one head is the least), so the memory does not grow with the number of rows; each block reads the keys
    of every layer once. The softmax needs a few layers' share of memory beside that. The default depends on
    the device.
    """
    total = AttentionStatistics.zero(rows.num_layers, rows.num_heads)
    if rows.num_rows == 0:
        return total
    device = rows.queries.device
    if block_bytes is None:
        block_bytes = default_block_bytes(device)
    positions = rows.positions.cpu()
    num_tokens = int(positions.max()) + 1
    squared_distance = total.squared_distance.to(device)
    ir_mass = total.ir_mass.to(device)
    for row_block, heads in _blocks(rows, num_tokens, block_bytes):
        num_visible = int(positions[row_block].max()) + 1
        weights = _weights(rows, row_block, heads, num_visible, read_keys)
        squared_distance[heads] += _squared_distances(weights)
        ir_mass += _initial_recent(weights, positions[row_block].to(device))
        # Freed first, or two blocks are held while the next one is computed.
        del weights
    # Rounding can leave a tiny negative sum where two layers attend alike.
    return AttentionStatistics(squared_distance.clamp(min=0).cpu(), ir_mass.cpu(), rows.num_rows)


def attention_drawn(
    rows: QueryRows, read_keys: ReadKeys, start_token: int, num_tokens: int, *, block_bytes: int | None = None
) -> torch.Tensor:
    """The mean share of its attention that a query spends on each of the tokens ``[start_token, start_token +
    num_tokens)``, over the queries of ``rows`` that see it, summed over the query heads of each KV head.

    Returns fp32 ``[L, Hkv, num_tokens]`` on the device of the queries. All KV heads are read by as many query
    heads. Beside the keys that ``read_keys`` returns, those of some KV heads are held in fp32 at a time, and
    the weights of their query heads, each of at most ``block_bytes`` (one head and one row are the least).
    Without rows that see any of the tokens, all draw the same: ``1 / T`` of each head, where ``T`` is the
    last token's position plus one.
    """
    device, head_dim = rows.queries.device, rows.queries.shape[3]
    of_device = Device(device)
    kv_heads = rows.kv_heads.cpu()
    num_kv_heads = int(kv_heads.max()) + 1
    group = rows.num_heads // num_kv_heads
    queries = rows.queries
    if not bool((kv_heads.diff() >= 0).all()):
        # Those of one KV head side by side: as many of every one.
        queries = queries[:, :, torch.argsort(kv_heads, stable=True).to(device)]
    end = start_token + num_tokens
    positions = rows.positions.cpu()
    used = torch.nonzero(positions >= start_token).flatten()
    totals = torch.zeros(rows.num_layers, num_kv_heads, num_tokens, device=device)
    if len(used) == 0:
        return totals + group / end
    if block_bytes is None:
        # Of keys and of scores.
        block_bytes = default_block_bytes(device) // 2
    num_visible = int(positions.max()) + 1
    # All heads of some layers, or some of one layer.
    most_heads = max(1, block_bytes // (4 * num_visible * head_dim))
    num_heads = min(most_heads, num_kv_heads)
    num_layers = min(max(1, most_heads // num_kv_heads), rows.num_layers)
    block_rows = max(1, block_bytes // (4 * num_visible * group * num_heads * num_layers))
    for first_layer in range(0, rows.num_layers, num_layers):
        layers = slice(first_layer, first_layer + num_layers)
        of_layers = [read_keys(layer)[:num_visible] for layer in range(rows.num_layers)[layers]]
        is_lowered = of_layers[0].dtype is torch.bfloat16 and Device(device).multiplies_bf16_fast
        for first_head in range(0, num_kv_heads, num_heads):
            heads = slice(first_head, first_head + num_heads)
            # [layers, heads, num_visible, D]
            keys = torch.stack([of_layer[:, heads].transpose(0, 1) for of_layer in of_layers])
            keys = keys if is_lowered else keys.float()
            # [layers, R, H, D] -> [layers, heads, R, group, D]
            of_heads = queries[layers].view(len(keys), -1, num_kv_heads, group, head_dim)[:, :, heads]
            of_heads = of_heads.transpose(1, 2)
            for block in torch.split(used, block_rows):
                of_block = keys.new_empty(*keys.shape[:2], len(block), group, head_dim)
                torch.mul(of_heads.index_select(2, of_device.from_host(block)), rows.scaling, out=of_block)
                # [layers * heads, R * group, num_visible]
                scores = torch.bmm(of_block.flatten(2, 3).flatten(0, 1), keys.flatten(0, 1).transpose(1, 2))
                of_rows = positions[block].repeat_interleave(group)
                _add_drawn(scores, of_rows, start_token, totals[layers, heads].view(-1, num_tokens))
    num_seen = (positions[used][:, None] >= torch.arange(start_token, end)).sum(0)
    num_seen = of_device.from_host(num_seen)
    average = totals.sum(-1, keepdim=True) / num_seen.sum()
    return (totals + PRIOR_ROWS * average) / (num_seen + PRIOR_ROWS)


def _add_drawn(scores: torch.Tensor, positions: torch.Tensor, start: int, totals: torch.Tensor) -> None:
    """Add what rows spend on the tokens from ``start`` on to ``totals [heads, num_tokens]``.

    ``scores [heads, rows, T]``, which are overwritten, and ``positions [rows]`` on the CPU: row ``r`` sees
    the tokens up to ``positions[r]``.
    """
    if Device.of(scores).shares_cores:
        room = np.empty(scores.shape[2] + _UNROLLED, np.float32)
        is_bf16 = scores.dtype is torch.bfloat16
        _add_weights(elements(scores), is_bf16, positions.numpy(), start, room, totals.numpy())
        return
    is_hidden = torch.arange(scores.shape[2]) > positions[:, None]
    is_hidden = Device(scores.device).from_host(is_hidden)
    weights = scores.masked_fill_(is_hidden, -torch.inf).softmax(-1, dtype=torch.float32)
    drawn = weights[..., start : start + totals.shape[1]].sum(1)
    totals[:, : drawn.shape[1]] += drawn


@compiled_for_sums
def _add_weights(
    scores: NDArray[Any],
    is_bf16: bool,
    positions: NDArray[np.int64],
    start: int,
    room: NDArray[np.float32],
    totals: NDArray[np.float32],
) -> None:
    for head in range(scores.shape[0]):
        for row in range(scores.shape[1]):
            num_seen = positions[row] + 1
            # Whole vectors: what is left over would be slow.
            weights = room[: (num_seen + _UNROLLED - 1) // _UNROLLED * _UNROLLED]
            of_row = scores[head, row][:num_seen]
            for token in range(len(of_row)):
                weights[token] = number_of(of_row[token], is_bf16)
            weights[num_seen:] = _LEAST_SCORE
            # Integers in the order of the numbers, of which the largest is found many times faster.
            bits = weights.view(np.int32)
            largest = _SMALLEST
            for token in range(len(bits)):
                largest = max(largest, bits[token] ^ (bits[token] >> _SIGN & _NOT_SIGN))
            peak = np.int32(largest ^ (largest >> _SIGN & _NOT_SIGN)).view(np.float32)
            total = np.float32(0)
            for token in range(len(weights)):
                weights[token] = _exp(weights[token] - peak)
                total += weights[token]
            inverse = _ONE / total
            drawn, of_tokens = totals[head][: num_seen - start], weights[start:]
            for token in range(len(drawn)):
                drawn[token] += of_tokens[token] * inverse


@compiled_for_sums
def _exp(x: Any) -> Any:
    """``e ** x`` of a number that is not above 0, to 2e-6 of it; at least 1e-38."""
    octaves = max(x * _LOG2_E, _FEWEST_OCTAVES)
    whole = np.floor(octaves + _HALF)
    part = octaves - whole
    series = _ONE + part * (_S1 + part * (_S2 + part * (_S3 + part * (_S4 + part * _S5))))
    return series * np.int32((np.int32(whole) + np.int32(127)) << np.int32(23)).view(np.float32)


def _blocks(rows: QueryRows, num_tokens: int, block_bytes: int) -> Iterator[tuple[slice, slice]]:
    head_bytes = 4 * num_tokens * (rows.num_layers + rows.queries.shape[3])
    num_heads = min(rows.num_heads, max(1, block_bytes // head_bytes))
    row_bytes = 4 * num_tokens * rows.num_layers * num_heads
    num_rows = min(rows.num_rows, max(1, block_bytes // row_bytes))
    for first_row in range(0, rows.num_rows, num_rows):
        for first_head in range(0, rows.num_heads, num_heads):
            yield slice(first_row, first_row + num_rows), slice(first_head, first_head + num_heads)


def _weights(
    rows: QueryRows, row_block: slice, heads: slice, num_visible: int, read_keys: ReadKeys
) -> torch.Tensor:
    """Attention of a block in all layers: fp32 ``[h, L, r, num_visible]``."""
    queries = rows.queries[:, row_block, heads]
    device = queries.device
    positions = rows.positions[row_block].to(device)
    kv_heads = rows.kv_heads[heads].to(device)
    num_layers, num_rows, num_heads, _ = queries.shape
    weights = torch.empty(num_heads, num_layers, num_rows, num_visible, device=device)
    for layer in range(num_layers):
        keys = read_keys(layer)[:num_visible]
        weights[:, layer] = attention_rows(queries[layer], keys, positions, kv_heads, rows.scaling)
    return weights


def _squared_distances(weights: torch.Tensor) -> torch.Tensor:
    """``[h, L, r, t]`` -> float64 ``[h, L, L]``, summed over rows: ``a^2 + b^2 - 2ab`` (Krul section 7)."""
    flat = weights.flatten(2)  # [h, L, r * t]
    gram = torch.bmm(flat, flat.transpose(1, 2)).double()
    squares = gram.diagonal(dim1=1, dim2=2)  # [h, L]
    distances = squares[:, :, None] + squares[:, None, :] - (gram + gram.transpose(1, 2))
    # Exact by construction, whatever order the products were summed in.
    distances.diagonal(dim1=1, dim2=2).zero_()
    return distances


def _initial_recent(weights: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
    """``[h, L, r, t]`` -> float64 ``[L]``: attention on both tenths, summed over heads and rows."""
    num_seen = positions[:, None] + 1  # [r, 1]
    tenth = -(-num_seen // 10)
    token = torch.arange(weights.shape[3], device=weights.device)
    # Tokens after the row's own are in neither part: their weight is zero.
    is_initial_or_recent = (token < tenth) | (token >= num_seen - tenth)  # [r, t]
    # Heads first: an einsum would lay out all weights once more.
    masses = weights.sum(dim=0).mul_(is_initial_or_recent).sum(dim=2)  # [L, r]
    return masses.double().sum(dim=1)
