"""One history on one tier: every method planned, restored in turn with the others, checked, and reported."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.baselines import RandomSelector
from benchmarks.restore.configuration import WrongRestoreError
from benchmarks.restore.restorer import LayerLoader, Measured, Restorer, Span, Turn
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from benchmarks.tiers.timing import percentile
from krul_backend.codec.layout import LayerKV
from krul_backend.codec.pairs.selectors import Evidence, MiniCacheSelector, StrategySelector, UnsharedSelector
from krul_backend.planner.interface import RestoreCosts, RestorePlan, RestoreProblem, StoredRun
from krul_backend.planner.planners import make_planner
from krul_backend.strategy.strategy import Precision, Strategy

TOLERANCES = {torch.float32: 1e-3, torch.float16: 0.02, torch.bfloat16: 0.08}
"""Largest relative error of the logits, by the model's dtype: products of other shapes round in another
way, and layers of random weights carry that on. A restore without its head misses by far more."""

_CONTROL_FACTOR = 2
"""The negative control has to differ by so many times the tolerance."""


def relative_error(logits: torch.Tensor, expected: torch.Tensor) -> float:
    """``|logits - expected| / |expected|``; NaN if there is one in either."""
    difference = (logits.float() - expected.float()).norm()
    return float(difference / expected.float().norm())


@dataclass(frozen=True, eq=False)
class Checks:
    """``history[l]`` is the KV of the turn's history as a prompt without restoring computes it."""

    restorer: Restorer
    turn: Turn
    history: Sequence[LayerKV]
    tolerance: float

    @torch.inference_mode()
    def expected(self, stored: StoredConversation, head_ends: Sequence[int]) -> torch.Tensor:
        """Logits after a restore without loss of its own: heads as computed, tails as the codec decodes them.

        For natively stored KV they are those of full recompute, but for rounding.
        """
        pool, slots = self.restorer.pool, self.turn.slots
        for layer, kv in enumerate(self.history):
            pool.write(layer, slots[: self.turn.history_tokens], kv)
        stored.decode_tails(head_ends, pool, slots)
        return self.restorer.own_forward(self.turn, self.turn.history_tokens)[0].clone()

    def check(self, what: str, measured: Measured, expected: torch.Tensor) -> float:
        """The relative error of one restore. Raises WrongRestoreError if it is above the tolerance."""
        error = relative_error(measured.logits, expected)
        if not error <= self.tolerance:
            raise WrongRestoreError(
                f"{what}: logits differ by {error:.3g} of their size (tolerance {self.tolerance:.3g})"
            )
        return error

    @torch.inference_mode()
    def without_head(
        self, loader: LayerLoader, stored: StoredConversation, tier: Tier, expected: torch.Tensor
    ) -> float:
        """The relative error when half of the history is loaded and its head is left at zero.

        Raises:
            WrongRestoreError: it is so small that ``check`` could not tell a wrong restore from a right one.
        """
        self.restorer.pool.fill(0.0)
        head_ends = [self.turn.history_tokens // 2] * stored.num_layers
        loader.start(stored, tier, head_ends, self.turn.slots).finish()
        self.restorer.device.synchronize()
        logits, _ = self.restorer.own_forward(self.turn, self.turn.history_tokens)
        error = relative_error(logits, expected)
        if not error > _CONTROL_FACTOR * self.tolerance:
            raise WrongRestoreError(
                f"a restore without its head differs by {error:.3g} only (tolerance {self.tolerance:.3g})"
            )
        return error


LAYER_RATIO = 0.5
"""``r_l``: the share of layers that share with another one, the paper's setting."""

SELECTORS: dict[str, StrategySelector] = {
    "native": UnsharedSelector(),
    "minicache": MiniCacheSelector(LAYER_RATIO),
    # Which layers a conversation pairs does not matter to the time that its restore takes, only that they
    # are anywhere in the model: with random weights a draw is as good as attention's word.
    "krul": RandomSelector(LAYER_RATIO),
    "krul-int4": RandomSelector(LAYER_RATIO, precision=Precision.INT4),
}


@dataclass(frozen=True)
class Method:
    """A row: ``strategy`` of ``SELECTORS``, ``planner`` of ``krul_backend.planner.planners``."""

    name: str
    strategy: str
    planner: str


METHODS = (
    Method("full-recompute", "native", "full-recompute"),
    Method("full-load", "native", "full-load"),
    Method("minicache-full-load", "minicache", "full-load"),
    Method("partial-recompute", "native", "uniform"),
    Method("native-planned", "native", "local-search"),
    Method("krul-pyramid", "krul", "pyramid"),
    Method("krul-planned", "krul", "local-search"),
    Method("krul-planned-int4", "krul-int4", "local-search"),
)


def strategies(num_layers: int) -> dict[str, Strategy]:
    """All strategies for a model of so many layers."""
    return {name: selector.select(Evidence(num_layers)) for name, selector in SELECTORS.items()}


RECOMPUTE = "recompute"
RESTORE = "restore"


def row(
    method: Method,
    plan: RestorePlan,
    samples: Sequence[Measured],
    *,
    bytes_stored: int,
    relative_error: float,
) -> dict[str, Any]:
    """One method in one setting: medians over ``samples``, and the times of each of them.

    ``bytes_stored``: all that this plan ever reads, so all that has to be kept. ``relative_error``: the
    largest of all samples, against the logits that this method has to give.
    """
    typical = median_sample(samples)
    compute_s = statistics.median(sample.compute_s for sample in samples)
    load_s = statistics.median(sample.load_s for sample in samples)
    return {
        "method": method.name,
        "strategy": method.strategy,
        "planner": method.planner,
        "chosen": RECOMPUTE if plan.is_recompute else RESTORE,
        "ttft_s": spread([sample.ttft_s for sample in samples]),
        "predicted_s": plan.end_s,
        "ideal_s": max(compute_s, load_s),
        "compute_s": compute_s,
        "load_s": load_s,
        "compute_busy": statistics.median(sample.compute_s / sample.length_s for sample in samples),
        "load_busy": statistics.median(sample.load_s / sample.length_s for sample in samples),
        "bytes_loaded": typical.bytes_loaded,
        "bytes_stored": bytes_stored,
        "head_tokens": 0 if plan.is_recompute else sum(plan.head_ends),
        "head_ends": None if plan.is_recompute else list(plan.head_ends),
        "relative_error": relative_error,
    }


def spread(seconds: Sequence[float]) -> dict[str, Any]:
    """Median, minimum, 90th percentile (a sample, at or above it), count, and the samples in their order."""
    return {
        "median": statistics.median(seconds),
        "min": min(seconds),
        "p90": percentile(seconds, 0.9),
        "n": len(seconds),
        "samples": list(seconds),
    }


def median_sample(samples: Sequence[Measured]) -> Measured:
    """The one whose time to the first token is the median, or the next longer."""
    return sorted(samples, key=lambda sample: sample.ttft_s)[len(samples) // 2]


def timeline(sample: Measured) -> dict[str, Any]:
    """What ran when in one restore: ``[start_s, end_s]`` of each layer, from the start of the restore."""

    def spans(of_stage: Sequence[Span]) -> list[list[float]]:
        return [[round(start, 7), round(end, 7)] for start, end in of_stage]

    return {
        "ttft_s": sample.ttft_s,
        "head": spans(sample.heads),
        "load": spans(sample.loads),
        "own": spans(sample.own),
    }


WARM_UPS = 1
"""Restores of each method before the first one that counts."""


def restore_problem(
    stored: StoredConversation,
    turn: Turn,
    tier_name: str,
    costs: RestoreCosts,
    decode_token_s: tuple[float, ...],
    page_size: int,
) -> RestoreProblem:
    """What a planner is asked: the whole history is stored in ``tier_name``, nothing is in the pool."""
    runs = tuple(
        StoredRun(
            tier=tier_name,
            first_token=segment.first_token,
            end_token=segment.end_token,
            layer_token_bytes=tuple(
                block.numel() / (segment.end_token - segment.first_token) for block in segment.blocks
            ),
            decode_token_s=decode_token_s,
            last_use=stored.last_use,
            stored_from=(segment.first_token,) * stored.num_layers,
        )
        for segment in stored.segments
    )
    return RestoreProblem(
        num_layers=stored.num_layers,
        page_size=page_size,
        device_tokens=0,
        total_tokens=turn.history_tokens,
        new_tokens=turn.num_tokens - turn.history_tokens,
        runs=runs,
        costs=costs,
    )


@dataclass(frozen=True, eq=False)
class Setting:
    """``conversations`` and ``problems`` by strategy. ``reference [vocab]``: logits without any restore."""

    restorer: Restorer
    turn: Turn
    tier: Tier
    conversations: Mapping[str, StoredConversation]
    problems: Mapping[str, RestoreProblem]
    checks: Checks
    reference: torch.Tensor

    def rows(self, repeats: int, *, keeps_timelines: bool) -> list[dict[str, Any]]:
        """One row per method. In each repeat every method restores once, so that drift meets all alike.

        Raises:
            WrongRestoreError: a restore gave wrong logits.
        """
        plans = {
            method.name: make_planner(method.planner).plan(self.problems[method.strategy])
            for method in METHODS
        }
        expected = {method.name: self._expected(method, plans[method.name]) for method in METHODS}
        measured: dict[str, list[Measured]] = {method.name: [] for method in METHODS}
        errors = dict.fromkeys(measured, 0.0)
        for repeat in range(WARM_UPS + repeats):
            for method in METHODS:
                sample = self._restore(method, plans[method.name])
                error = self.checks.check(method.name, sample, expected[method.name])
                errors[method.name] = max(errors[method.name], error)
                if repeat >= WARM_UPS:
                    measured[method.name].append(sample)
        rows = []
        for method in METHODS:
            plan, samples = plans[method.name], measured[method.name]
            stored = self.conversations[method.strategy]
            bytes_stored = 0 if plan.is_recompute else stored.tail_bytes(plan.head_ends)
            of_method = row(
                method, plan, samples, bytes_stored=bytes_stored, relative_error=errors[method.name]
            )
            rows.append(of_method)
            if keeps_timelines:
                of_method["timeline"] = timeline(median_sample(samples))
        return rows

    def _restore(self, method: Method, plan: RestorePlan) -> Measured:
        # What is read without having been restored gives NaN, and no check lets that pass.
        self.restorer.pool.fill(float("nan"))
        return self.restorer.run(self.turn, plan, self.conversations[method.strategy], self.tier)

    def _expected(self, method: Method, plan: RestorePlan) -> torch.Tensor:
        stored = self.conversations[method.strategy]
        if plan.is_recompute or stored.strategy.is_lossless:
            return self.reference
        return self.checks.expected(stored, plan.head_ends)
