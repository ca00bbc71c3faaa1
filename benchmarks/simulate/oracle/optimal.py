"""The planner that minimises the end of the pipeline."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np

from benchmarks.simulate.oracle.dual import DualTables, Weights, make_levels
from benchmarks.simulate.oracle.staircase import BestHeads, move_steps, offer_between
from krul_backend.planner.head_search import full_load_heads, pyramid_heads, uniform_heads
from krul_backend.planner.interface import RestorePlan, RestorePlanner, RestoreProblem
from krul_backend.planner.timing import Floats, RestoreTiming, Tokens


class LayerSearch:
    """Partial head ends of layers ``0..l``, all kept that could still lead to a better end.

    For each of the weights ``u``: a partial plan costs the weighted sum of its layers, the rest at least the
    cheapest non-increasing continuation; the largest over ``u`` bounds its end from below.
    """

    def __init__(self, tables: DualTables, weights: Sequence[Weights]) -> None:
        self._tables = tables
        lowest = tables.timing.lowest[:, None] > tables.levels  # [L, V]: less than what is stored
        sums = [self._weighted(each) for each in weights]
        self._base_s = np.array([base_s for base_s, _ in sums])  # [U]
        self._layer_s = np.where(lowest, np.inf, np.stack([layer_s for _, layer_s in sums]))  # [U, L, V]
        num_weights, num_layers, num_levels = self._layer_s.shape
        # [U, l, V]: the cheapest layers l.. with head ends up to a level
        self._rest_s = np.zeros((num_weights, num_layers + 1, num_levels))
        for layer in range(num_layers - 1, -1, -1):
            costs = self._layer_s[:, layer] + self._rest_s[:, layer + 1]
            self._rest_s[:, layer] = np.minimum.accumulate(costs, axis=1)

    def run(self, best: BestHeads, tolerance: float, max_nodes: int) -> float:
        """Improve ``best``; no head ends on the levels end before what is returned.

        Partial plans that cannot improve ``best`` by more than ``tolerance``, relative, are given up; of more
        than ``max_nodes`` of equal length those with the largest bounds are, too.
        """
        num_levels = len(self._tables.levels)
        max_lengths = best.timing.problem.max_lengths
        given_up_s = np.inf
        paths = np.empty((1, 0), np.int64)  # [F, l]: level per layer
        last = np.array([num_levels - 1])
        lengths = np.array([0])
        spent_s = self._base_s[None]  # [F, U]
        for layer in range(self._tables.num_layers):
            costs_s = spent_s[:, :, None] + self._layer_s[:, layer]  # [F, U, V]
            bounds_s = (costs_s + self._rest_s[:, layer + 1]).max(axis=1)  # [F, V]
            levels = np.arange(num_levels)
            is_new = (levels > 0) & ((levels != last[:, None]) if layer else True)
            new_lengths = lengths[:, None] + is_new
            is_allowed = (levels <= last[:, None]) & (new_lengths <= max_lengths)
            bounds_s = np.where(is_allowed, bounds_s, np.inf)
            is_open = bounds_s < best.end_s * (1 - tolerance) - 1e-12 * best.end_s
            given_up_s = min(given_up_s, float(bounds_s[~is_open].min(initial=np.inf)))
            states, chosen = np.nonzero(is_open)
            if len(states) == 0:
                return min(given_up_s, best.end_s)
            if len(states) > max_nodes:
                order = np.argsort(bounds_s[states, chosen], kind="stable")
                given_up_s = min(given_up_s, float(bounds_s[states, chosen][order[max_nodes]]))
                kept = np.sort(order[:max_nodes])
                states, chosen = states[kept], chosen[kept]
            paths = np.concatenate([paths[states], chosen[:, None]], axis=1)
            last, lengths, spent_s = chosen, new_lengths[states, chosen], costs_s[states, :, chosen]
        best.offer(self._tables.levels[paths])
        return min(given_up_s, best.end_s)

    def _weighted(self, weights: Weights) -> tuple[float, Floats]:
        """The weighted sum with no heads, without compute of heads, and [L, V] what a layer's head adds."""
        table, base_s = self._tables.load_table(weights.prefixes)
        saved_s = np.diff(table, axis=0).cumsum(axis=1)  # [L, G]
        load_s = np.concatenate([np.zeros((len(saved_s), 1)), saved_s], axis=1)
        compute = weights.compute
        base_s = compute * self._tables.own_s + (1 - compute) * base_s
        return base_s, compute * self._tables.head_s + (1 - compute) * load_s


def search_weights(best: Weights, num_layers: int) -> list[Weights]:
    """Weights whose bounds prune well together: the dual's own, some beside it, and each stream alone."""
    ends: Tokens = np.unique(np.array([0, num_layers - 1, int(best.prefixes.argmax())]))
    pure = [np.eye(1, num_layers, int(end))[0] for end in ends]
    beside = [min(max(best.compute * factor, 0.0), 1.0) for factor in (0.7, 1.0, 1.3)]
    return [
        *(Weights(compute, best.prefixes) for compute in beside),
        Weights(1.0, best.prefixes),
        *(Weights(0.0, prefixes) for prefixes in pure),
    ]


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

    name: ClassVar[str] = "optimal"

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
