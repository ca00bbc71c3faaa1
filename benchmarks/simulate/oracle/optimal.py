"""The planner that minimises the end of the pipeline."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from benchmarks.simulate.oracle.branch_and_bound import LayerSearch, search_weights
from benchmarks.simulate.oracle.dual import DualTables, make_levels
from benchmarks.simulate.oracle.staircase import BestHeads, move_steps, offer_between
from krul_backend.planner.interface import RestorePlan, RestorePlanner, RestoreProblem
from krul_backend.planner.planners import full_load_heads, pyramid_heads, uniform_heads
from krul_backend.planner.timing import RestoreTiming

_MAX_PAGES = 96
"""Up to so many pages every page may end a head, beyond that the ends of about ``_MAX_CELLS`` cells."""
_MAX_CELLS = 40
_MAX_ROUNDS = 12


@dataclass(frozen=True)
class Solution:
    """A plan, and the seconds before which no plan ends."""

    plan: RestorePlan
    bound_s: float

    @property
    def gap(self) -> float:
        """How much later than the best plan this one may end, relative to the bound."""
        return (self.plan.end_s - self.bound_s) / self.bound_s if self.bound_s > 0 else 0.0


class OptimalPlanner(RestorePlanner):
    """The plan that ends first, of all allowed head ends and recomputation.

    A restore must end earlier than recomputation by its overhead (``RestoreCosts.overhead_s``), too.

    Within ``tolerance``, relative, wherever the proof succeeds; ``solve`` says how far it came. Three steps,
    each only if the one before did not prove enough: a lower bound by duality and the best head ends between
    those that come with it; their steps moved; a search over all head ends, layer by layer, that keeps
    ``max_nodes`` partial plans of a layer. Up to 96 pages every page may end a head there, and the search is
    part of the proof; in longer prefixes it takes the ends of about 40 cells and only improves the plan. With
    a ``tolerance`` of 0 every page counts in a prefix of any length: raise ``max_nodes`` until
    ``Solution.gap`` is 0, which may take long.

    Never later than the other planners of this package.
    """

    name = "optimal"

    def __init__(self, tolerance: float = 1e-3, max_nodes: int = 32) -> None:
        self.tolerance = tolerance
        self.max_nodes = max_nodes

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        return self.solve(problem).plan

    def solve(self, problem: RestoreProblem) -> Solution:
        """The plan and what is proven about it."""
        timing = RestoreTiming(problem)
        recompute = RestorePlan.recompute(problem)
        if not timing.is_possible:
            return Solution(recompute, recompute.end_s)
        num_pages = (timing.highest - problem.device_tokens) // problem.page_size
        has_every_page = num_pages <= _MAX_PAGES or self.tolerance == 0
        tables = DualTables(timing, make_levels(timing, max(num_pages, 1) if has_every_page else _MAX_CELLS))
        dual = tables.solve(self.tolerance)
        overhead_s = problem.costs.overhead_s
        if recompute.end_s <= dual.bound_s + overhead_s:
            return Solution(recompute, recompute.end_s)

        best = BestHeads(timing)
        offer_between(best, dual.fewer, dual.more)
        for heads in (full_load_heads(timing), uniform_heads(timing), pyramid_heads(timing)):
            best.offer(heads[None])
        goal_s = dual.bound_s * (1 + self.tolerance)
        move_steps(best, goal_s, _MAX_ROUNDS)
        bound_s = dual.bound_s
        ends = np.stack([dual.fewer, dual.more])
        if best.end_s > goal_s and timing.num_lengths(ends).max() > problem.max_lengths:
            dual = tables.solve(self.tolerance, problem.max_lengths)
            bound_s = max(bound_s, dual.bound_s)
            goal_s = bound_s * (1 + self.tolerance)
            offer_between(best, dual.fewer, dual.more)
            move_steps(best, goal_s, _MAX_ROUNDS)
        if best.end_s > goal_s:
            search = LayerSearch(tables, search_weights(dual.weights, problem.num_layers))
            searched_s = search.run(best, self.tolerance, self.max_nodes)
            if has_every_page:
                bound_s = max(bound_s, searched_s)
            else:
                move_steps(best, goal_s, _MAX_ROUNDS)
        if recompute.end_s < best.end_s + overhead_s:
            return Solution(recompute, min(bound_s, recompute.end_s))
        return Solution(timing.plan(best.head_ends), bound_s)
