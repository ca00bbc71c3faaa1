"""One ratio of recomputation for all layers."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from krul_backend.planner.arrays import Floats, Tokens
from krul_backend.planner.head_shapes import allowed_heads, balanced_heads, limit_lengths
from krul_backend.planner.interface import RestorePlan, RestorePlanner
from krul_backend.planner.problem import RestoreProblem
from krul_backend.planner.timing import RestoreTiming


class UniformPlanner(RestorePlanner):
    """Equal heads in all layers (the paper's "partial KV recompute"), larger only where less is stored.

    ``ratio``: share of the prefix that is recomputed, in [0, 1]; None for the one that balances computing
    and loading.
    """

    name: ClassVar[str] = "uniform"

    def __init__(self, ratio: float | None = None) -> None:
        self.ratio = ratio

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing = RestoreTiming(problem)
        if not timing.is_possible:
            return RestorePlan.recompute(problem)
        return timing.plan(uniform_heads(timing, self.ratio))


def uniform_heads(timing: RestoreTiming, ratio: float | None = None) -> Tokens:
    """[L]: the head ends of ``UniformPlanner``, if any are possible."""
    problem = timing.problem
    if problem.max_lengths == 0:
        return timing.lowest
    num_tokens = problem.total_tokens - problem.device_tokens

    def heads_of(ratios: Floats) -> Tokens:
        ends = problem.device_tokens + np.rint(ratios * num_tokens).astype(np.int64)
        return allowed_heads(timing, np.repeat(ends[:, None], problem.num_layers, axis=1))

    if ratio is None:
        heads = balanced_heads(timing, heads_of, num_tokens // problem.page_size)
    else:
        heads = heads_of(np.array([ratio]))[0]
    return limit_lengths(heads, problem.device_tokens, problem.max_lengths)
