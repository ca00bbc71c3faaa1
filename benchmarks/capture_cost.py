"""What the engine's own query capture adds to a decode step."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from krul_sglang.engine.capture.query_capture import DECODE_INTERVAL, CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape

_NUM_ROWS = 256
_STEPS = 10 * DECODE_INTERVAL


class _Attention(nn.Module):
    """Takes what SGLang's attention modules take, and computes nothing."""

    def forward(self, q: torch.Tensor, k: None, v: None, forward_batch: Any) -> torch.Tensor:
        return q


class _Mode:
    """A forward mode, as far as the capture asks."""

    def __init__(self, is_decode: bool) -> None:
        self._is_decode = is_decode

    def is_decode(self) -> bool:
        return self._is_decode

    def is_extend_without_speculative(self) -> bool:
        return not self._is_decode


@dataclass
class _Request:
    rid: str = "request"


@dataclass
class _Batch:
    """One request's batch, as far as the capture looks at it."""

    forward_mode: _Mode
    seq_lens_cpu: torch.Tensor
    req_pool_indices_cpu: torch.Tensor
    reqs: tuple[_Request, ...] = (_Request(),)
    decoding_reqs: None = None
    prefix_lens: tuple[int, ...] = (0,)
    extend_lens: tuple[int, ...] = (16,)


def capture_seconds_per_step(shape: QueryShape, device: torch.device, repeats: int) -> list[float]:
    """Seconds that the capture adds to one decode step of one request: one sample per repeat.

    Each sample is a run of decode steps through hooked modules against the same run through modules without
    hooks, and covers the steps that record and those between them in the engine's proportion.
    """
    plan = CapturePlan.fit(shape, max_requests=4, num_rows=_NUM_ROWS, max_bytes=1 << 30)
    capture = QueryCapture(shape, plan, device=device)
    plain = [_Attention() for _ in range(shape.num_layers)]
    hooked = [_Attention() for _ in range(shape.num_layers)]
    capture.install(hooked)
    slot = torch.zeros(1, dtype=torch.int64)
    width = shape.num_query_heads * shape.head_dim
    with capture.recording(_Batch(_Mode(False), torch.tensor([16]), slot)):
        for module in hooked:
            module(torch.zeros(16, width, dtype=shape.dtype, device=device), None, None, None)
    query = torch.zeros(1, width, dtype=shape.dtype, device=device)

    def run(modules: list[_Attention]) -> float:
        started = time.perf_counter()
        for step in range(_STEPS):
            batch = _Batch(_Mode(True), torch.tensor([17 + step]), slot)
            with capture.recording(batch) if modules is hooked else nullcontext():
                for module in modules:
                    module(query, None, None, batch)
        if device.type == "cuda":
            torch.cuda.synchronize()
        return (time.perf_counter() - started) / _STEPS

    run(plain), run(hooked)
    return [run(hooked) - run(plain) for _ in range(repeats)]


def capture_ratio(samples: list[float], step_s: float) -> float:
    """Time per output token with the capture, against a step of ``step_s`` without."""
    return 1 + statistics.median(samples) / step_s
