"""The planner that restores nothing: what a server without a KV tier does."""

from __future__ import annotations

from typing import ClassVar

from krul_backend.planner.interface import RestorePlan, RestorePlanner
from krul_backend.planner.problem import RestoreProblem


class FullRecomputePlanner(RestorePlanner):
    """The engine computes the whole prefix itself (the paper's "full KV recompute")."""

    name: ClassVar[str] = "full-recompute"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        return RestorePlan.recompute(problem)
