"""What an estimator costs beside the forward that it watches: time and memory, prompt and decode step."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile
from transformers import DynamicCache

from benchmarks.baselines import Estimator, ExactEstimator, SampledEstimator
from benchmarks.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from krul_backend.attention.rows import Phase, QueryRows, sample_positions
from krul_sglang.engine.capture.query_capture import DECODE_INTERVAL, CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape
from krul_sglang.learning.reader import CapturedAttention, capture_attention, observed_attention

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


ESTIMATORS = ("exact", "heterogeneous", "sampled")
EVERY_ROW = ("exact", "heterogeneous")
"""Those that reduce the row of every decoded token at its step."""

DECODE_ARMS = 1 + len(EVERY_ROW)


def decode_rounds(repeats: int) -> int:
    """Rounds of one step per arm: steps are short, so their medians need more of them than forwards do."""
    return 5 * repeats + 1


class CostBenchmark:
    """Measures one model. Arms take turns within each repeat, so that a busy machine slows all of them.

    Args:
        sampled_rows: rows that ``sampled`` keeps of a prompt.
        repeats: per arm, after one that is not counted.
    """

    def __init__(self, model: Any, worker: SimilarityWorker, sampled_rows: int, repeats: int) -> None:
        self._model = model
        self._worker = worker
        self._sampled_rows = sampled_rows
        self._repeats = repeats

    @torch.no_grad()
    def prefill(self, ids: Sequence[int]) -> dict[str, Any]:
        """Raw seconds of the forward, of the forward with capture, and of each estimator's two calls.

        ``add_s`` delays the prompt's answer; ``finish_s`` comes at the end of the turn, and for
        ``heterogeneous`` it is the worker's time, which decoding would hide. ``*_peak_bytes`` are tensors of
        this process above the level before; ``queue_bytes`` is shared memory of the heterogeneous job.
        """
        seconds: dict[str, list[float]] = {"forward_s": [], "captured_forward_s": []}
        for name in ESTIMATORS:
            seconds |= {f"{name}_add_s": [], f"{name}_finish_s": []}
        captured = capture_attention(self._model, ids)
        for repeat in range(self._repeats + 1):
            sample = {"forward_s": self._timed(partial(self._forward, ids))}
            sample["captured_forward_s"] = self._timed(partial(capture_attention, self._model, ids))
            for name in ESTIMATORS:
                estimator = self._make(name, captured)
                sample[f"{name}_add_s"] = self._timed(partial(self._add, estimator, name, captured))
                sample[f"{name}_finish_s"] = self._timed(partial(estimator.finish, captured.read_keys))
            if repeat > 0:
                for key, value in sample.items():
                    seconds[key].append(value)
        peaks = {"forward_peak_bytes": self._peak_bytes(partial(self._forward, ids))}
        for name in ESTIMATORS:
            peaks[f"{name}_peak_bytes"] = self._peak_bytes(partial(self._whole_turn, name, captured))
        queue_bytes = captured.rows().queries.nbytes + sum(kv.k.nbytes for kv in captured.layers)
        medians = {key: statistics.median(values) for key, values in seconds.items()}
        ratios = {
            f"{name}_ratio": (medians[f"{name}_add_s"] + medians[f"{name}_finish_s"]) / medians["forward_s"]
            for name in ESTIMATORS
        }
        return {
            "num_tokens": len(ids),
            **peaks,
            "queue_bytes": queue_bytes,
            "medians": medians,
            "ratios_to_forward": ratios,
            "samples": seconds,
        }

    @torch.no_grad()
    def decode(self, ids: Sequence[int]) -> dict[str, Any]:
        """Raw seconds of a decode step after ``ids``, without and with capture and reduction of its row.

        The arms share one cache, which grows by a token per step. The heterogeneous worker has nothing to do
        meanwhile. ``sampled`` does nothing in a step but to keep a query now and then: what the engine's
        capture adds is measured apart, far more finely than two arms of whole steps could tell, and set
        against the step without an estimator.
        """
        cache = DynamicCache(config=self._model.config)
        self._model(self._tensor(ids), past_key_values=cache, logits_to_keep=1)
        probe = capture_attention(self._model, ids[:2])
        estimators = {name: self._make(name, probe) for name in EVERY_ROW}
        token = self._tensor(ids[:1])
        seconds: dict[str, list[float]] = {name: [] for name in ("none", *EVERY_ROW)}

        def plain_step() -> None:
            self._model(token, past_key_values=cache)

        def watched_step(estimator: Estimator) -> None:
            captured = CapturedAttention()
            with observed_attention(self._model, captured.take):
                self._model(token, past_key_values=cache)
            estimator.add(captured.rows(), Phase.DECODE, captured.read_keys)

        steps: dict[str, Callable[[], None]] = {"none": plain_step}
        steps |= {name: partial(watched_step, estimator) for name, estimator in estimators.items()}
        names = list(steps)
        for repeat in range(decode_rounds(self._repeats)):
            # Another order each time: a step finds other things in the caches after each of the arms.
            for name in names[repeat % len(names) :] + names[: repeat % len(names)]:
                taken = self._timed(steps[name])
                if repeat > 0:
                    seconds[name].append(taken)
        medians = {name: statistics.median(values) for name, values in seconds.items()}
        capture_s = capture_seconds_per_step(self._query_shape(), self._model.device, 3 * self._repeats)
        ratios = {name: medians[name] / medians["none"] for name in EVERY_ROW}
        return {
            "num_tokens": len(ids),
            "medians_s": medians,
            "tpot_ratio": {**ratios, "sampled": capture_ratio(capture_s, medians["none"])},
            "samples_s": {**seconds, "sampled_capture": capture_s},
        }

    def _query_shape(self) -> QueryShape:
        config = self._model.config
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return QueryShape(
            num_layers=config.num_hidden_layers,
            num_query_heads=config.num_attention_heads,
            num_kv_heads=config.num_key_value_heads,
            head_dim=head_dim,
            dtype=self._model.dtype,
            scaling=head_dim**-0.5,
        )

    def _make(self, name: str, captured: CapturedAttention) -> Estimator:
        num_layers, num_heads = len(captured.queries), captured.queries[0].shape[1]
        if name == "exact":
            return ExactEstimator(num_layers, num_heads)
        if name == "heterogeneous":
            return HeterogeneousEstimator(num_layers, num_heads, self._worker)
        return SampledEstimator(num_layers, num_heads, self._sampled_rows)

    def _rows(self, name: str, captured: CapturedAttention) -> QueryRows:
        if name != "sampled":
            return captured.rows()
        return captured.rows(sample_positions(0, captured.num_tokens, self._sampled_rows))

    def _add(self, estimator: Estimator, name: str, captured: CapturedAttention) -> None:
        estimator.add(self._rows(name, captured), Phase.PREFILL, captured.read_keys)

    def _whole_turn(self, name: str, captured: CapturedAttention) -> None:
        estimator = self._make(name, captured)
        self._add(estimator, name, captured)
        estimator.finish(captured.read_keys)

    def _forward(self, ids: Sequence[int]) -> None:
        self._model(self._tensor(ids), use_cache=False, logits_to_keep=1)

    def _tensor(self, ids: Sequence[int]) -> torch.Tensor:
        return torch.tensor([list(ids)], device=self._model.device)

    def _synchronize(self) -> None:
        if self._model.device.type == "cuda":
            torch.cuda.synchronize()

    def _timed(self, work: Callable[[], object]) -> float:
        self._synchronize()
        started = time.perf_counter()
        work()
        self._synchronize()
        return time.perf_counter() - started

    def _peak_bytes(self, work: Callable[[], object]) -> int:
        """The most memory that tensors made inside took at one time."""
        if self._model.device.type == "cuda":
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
            work()
            return torch.cuda.max_memory_allocated() - before
        with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
            work()
        events = profiler.profiler.kineto_results.events()
        held, peak = 0, 0
        for event in sorted(events, key=lambda event: event.start_ns()):
            if event.name() == "[memory]":
                held += event.nbytes()
                peak = max(peak, held)
        return peak
