"""The planner that loads all that is stored."""

from __future__ import annotations

from typing import ClassVar

from krul_backend.planner.arrays import Tokens
from krul_backend.planner.head_shapes import limit_lengths
from krul_backend.planner.interface import RestorePlan, RestorePlanner
from krul_backend.planner.problem import RestoreProblem
from krul_backend.planner.timing import RestoreTiming


class FullLoadPlanner(RestorePlanner):
    """The smallest heads that are allowed: none where everything is stored (the paper's "full KV load")."""

    name: ClassVar[str] = "full-load"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing = RestoreTiming(problem)
        return timing.plan(full_load_heads(timing)) if timing.is_possible else RestorePlan.recompute(problem)


def full_load_heads(timing: RestoreTiming) -> Tokens:
    """[L]: the head ends of ``FullLoadPlanner``, if any are possible."""
    problem = timing.problem
    return limit_lengths(timing.lowest, problem.device_tokens, problem.max_lengths)
