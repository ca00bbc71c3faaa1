"""Causal attention of the last tokens of sequences whose KV lies in a pool."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from krul_backend.codec.layout import FP8_TYPES, take_rows

_MAX_SCORES = 1 << 25
"""Most scores, over all query heads, that one call of a kernel which keeps them all may have in memory."""

_MIN_QUERIES = 16
"""Fewest queries of one call, however long the prefix is."""

_KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""All of torch's but cuDNN's, which takes 50 ms for the first call of each new length: a head has any."""


@dataclass(frozen=True, eq=False)
class Span:
    """Rows ``[first_row, first_row + num_tokens)`` of a forward: neighbouring tokens of one request.

    ``slots`` (int64, on the pool's device) hold the KV of all tokens up to the last of them: the last
    ``num_tokens`` take their own, those before are only read.
    """

    first_row: int
    num_tokens: int
    slots: torch.Tensor


class SpanAttention(Protocol):
    """Computes causal attention of spans whose own KV is in the pool already."""

    name: str
    """Whose kernel it is, for ``/server_info``."""

    def plan(self, spans: Sequence[Span]) -> None:
        """Say what the next calls of ``attend`` are for, until the next ``plan``."""

    def attend(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        """``q [rows, Hq, D]`` over one layer's buffers ``[num_slots, Hkv, D]``, ``[num_slots, Hkv, Dv]``.

        Buffers of fp8 are to be multiplied by the scales of ``layer``, SGLang's attention module. Returns
        ``[rows, Hq, Dv]`` in the type of ``q``. Row ``i`` of a span sees the tokens up to its own.
        """


def read_rows(
    buffer: torch.Tensor, slots: torch.Tensor, dtype: torch.dtype, scale: float | None
) -> torch.Tensor:
    """The rows ``slots`` of one layer's keys or values in ``dtype``, copied: ``[n, H, D]``.

    ``scale`` is that of an fp8 pool; it multiplies what the pool keeps. None for 1.
    """
    rows = take_rows(buffer, slots).to(dtype)
    return rows if scale is None or buffer.dtype not in FP8_TYPES else rows * scale


class GatheredAttention:
    """Attention by torch, one span after another over a copy of its KV. Runs on any device.

    Flash attention, where torch has it for the device, takes a span in one call, without mask or bias. Other
    kernels may keep all scores: they get few queries in one call, so that these take bounded memory.
    """

    name = "torch"

    def __init__(self) -> None:
        self._spans: Sequence[Span] = ()

    def plan(self, spans: Sequence[Span]) -> None:
        self._spans = spans

    def attend(
        self, q: torch.Tensor, k_buffer: torch.Tensor, v_buffer: torch.Tensor, layer: Any
    ) -> torch.Tensor:
        output = q.new_empty(len(q), q.shape[1], v_buffer.shape[2])
        for span in self._spans:
            rows = slice(span.first_row, span.first_row + span.num_tokens)
            k = read_rows(k_buffer, span.slots, q.dtype, layer.k_scale_float)
            v = read_rows(v_buffer, span.slots, q.dtype, layer.v_scale_float)
            _attend(output[rows], q[rows], k, v, layer.scaling)
        return output


def _attend(output: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scaling: float) -> None:
    """``q [n, Hq, D]`` are the last ``n`` of the tokens of ``k [T, Hkv, D]`` and ``v``.

    The result goes to ``output [n, Hq, Dv]``.
    """
    num_queries, num_tokens = len(q), len(k)
    # [T, H, D] -> [1, H, T, D]
    q, k, v = (x.transpose(0, 1)[None] for x in (q, k, v))
    with sdpa_kernel(_KERNELS):
        keeps_scores = not can_use_flash_attention(SDPAParams(q, k, v, None, 0.0, True, True))
        step = max(_MIN_QUERIES, _MAX_SCORES // (q.shape[1] * num_tokens)) if keeps_scores else num_queries
        for first in range(0, num_queries, step):
            end = min(first + step, num_queries)
            seen = num_tokens - num_queries + end
            part = F.scaled_dot_product_attention(
                q[:, :, first:end],
                k[:, :, :seen],
                v[:, :, :seen],
                # The last query sees all of these tokens, each one before it one less.
                attn_mask=causal_lower_right(end - first, seen),
                scale=scaling,
                enable_gqa=True,
            )
            output[first:end] = part[0].transpose(0, 1)
