"""Heads of any length: for showing that whatever a planner chooses, the same KV comes back."""

from __future__ import annotations

import random

from krul_backend.restore.interface import RestorePlan, RestorePlanner
from krul_backend.restore.problem import RestoreProblem
from krul_backend.restore.timing import RestoreTiming


class RandomPlanner(RestorePlanner):
    """Draws head ends that are allowed, without looking at costs. Loads even where that loses."""

    name = "random"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing = RestoreTiming(problem)
        if not timing.is_possible:
            return RestorePlan.recompute(problem)
        page = problem.page_size
        rng = random.Random(f"{problem.device_tokens} {problem.total_tokens} {problem.new_tokens}")
        num_draws = min(problem.max_lengths, problem.num_layers) - 1
        changes = sorted(rng.sample(range(1, problem.num_layers), num_draws)) if num_draws > 0 else []
        first, last = problem.device_tokens // page, timing.highest // page
        lengths = sorted((rng.randint(first, last) * page for _ in range(num_draws + 1)), reverse=True)
        head_ends = []
        for layer in range(problem.num_layers):
            drawn = lengths[sum(change <= layer for change in changes)]
            head_ends.append(max(drawn, int(timing.lowest[layer])))
        # What is stored may ask for more lengths than were drawn; then everything up to the longest.
        if len({end for end in head_ends if end > problem.device_tokens}) > problem.max_lengths:
            head_ends = [head_ends[0]] * problem.num_layers
        return RestorePlan(tuple(head_ends), end_s=0.0)
