"""The paper's distribution: heads that fall linearly with the layer."""

from __future__ import annotations

from typing import ClassVar

import numpy as np

from krul_backend.planner.arrays import Floats, Tokens
from krul_backend.planner.head_shapes import allowed_heads, balanced_heads, limit_lengths
from krul_backend.planner.interface import RestorePlan, RestorePlanner
from krul_backend.planner.problem import RestoreProblem
from krul_backend.planner.timing import RestoreTiming


class PyramidPlanner(RestorePlanner):
    """Recomputation falls and loading grows linearly with the layer (the paper, 6.2, eq. 2 to 5).

    The mean ratio over layers is the one that balances computing and loading (eq. 1). Up to a mean of a half
    the line ends at 0 after the last layer; beyond, it starts at 1. It is rounded to ``max_lengths`` steps
    of equally many layers.
    """

    name: ClassVar[str] = "pyramid"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing = RestoreTiming(problem)
        return timing.plan(pyramid_heads(timing)) if timing.is_possible else RestorePlan.recompute(problem)


def pyramid_heads(timing: RestoreTiming) -> Tokens:
    """[L]: the head ends of ``PyramidPlanner``, if any are possible."""
    problem = timing.problem
    num_layers, max_lengths = problem.num_layers, problem.max_lengths
    if max_lengths == 0:
        return timing.lowest
    num_tokens = problem.total_tokens - problem.device_tokens
    num_steps = min(max_lengths, num_layers)
    step = np.arange(num_layers) * num_steps // num_layers  # [L]: the step that a layer belongs to
    layers = (np.arange(num_layers) + 0.5) / num_layers
    middle = (np.bincount(step, layers) / np.bincount(step))[step]  # [L] in (0, 1)

    def heads_of(means: Floats) -> Tokens:
        ratios = _line(means[:, None], middle)  # [C, L]
        return allowed_heads(timing, problem.device_tokens + np.rint(ratios * num_tokens).astype(np.int64))

    heads = balanced_heads(timing, heads_of, num_tokens // problem.page_size)
    return limit_lengths(heads, problem.device_tokens, max_lengths)


def _line(mean: Floats, layer: Floats) -> Floats:
    """Ratio at ``layer`` in [0, 1] of the line with this mean that is as steep as [0, 1] allows."""
    slope = 2 * np.minimum(mean, 1 - mean)
    return mean + slope * (0.5 - layer)
