"""One history on one tier: every method planned, restored in turn with the others, checked, and reported."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks.restore.checks import Checks
from benchmarks.restore.methods import METHODS, Method
from benchmarks.restore.restorer import Measured, Restorer, Turn
from benchmarks.restore.result import median_sample, row, timeline
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from krul_backend.planner.interface import RestoreCosts, RestorePlan, RestoreProblem, StoredRun
from krul_backend.planner.planners import make_planner

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
