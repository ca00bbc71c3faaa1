"""Heads of any length: for showing that whatever a planner chooses, the same KV comes back."""

from __future__ import annotations

import random

import numpy as np

from krul_backend.planner.interface import RestorePlan, RestorePlanner, RestoreProblem
from krul_backend.planner.timing import RestoreTiming


class RandomPlanner(RestorePlanner):
    """Draws head ends that are allowed, without looking at costs. Loads even where that loses."""

    name = "random"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing = RestoreTiming(problem)
        if not timing.is_possible:
            return RestorePlan.recompute(problem)
        page, num_layers = problem.page_size, problem.num_layers
        rng = random.Random(f"{problem.device_tokens} {problem.total_tokens} {problem.new_tokens}")
        shortest, longest = problem.device_tokens // page, timing.highest // page
        num_lengths = min(problem.max_lengths, num_layers)
        lengths = sorted((rng.randint(shortest, longest) * page for _ in range(num_lengths)), reverse=True)
        changes = sorted(rng.sample(range(1, num_layers), num_lengths - 1)) if num_lengths else []
        drawn = [
            lengths[sum(change <= layer for change in changes)] if lengths else problem.device_tokens
            for layer in range(num_layers)
        ]
        head_ends = np.maximum(drawn, timing.lowest)
        if timing.num_lengths(head_ends[None])[0] > problem.max_lengths:
            # What is stored asks for more lengths than were drawn; then the longest one everywhere.
            head_ends[:] = head_ends[0]
        return timing.plan(head_ends)
