"""The planner that minimises the end of the pipeline: a dual solution, its steps moved, then a search."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from benchmarks.simulate.oracle.dual import DualTables, Weights, make_levels
from krul_backend.planner.interface import RestorePlan, RestorePlanner, RestoreProblem
from krul_backend.planner.planners import (
    crossing,
    full_load_heads,
    limit_lengths,
    pyramid_heads,
    uniform_heads,
)
from krul_backend.planner.timing import Floats, PlanTimes, RestoreTiming, Tokens


class BestHeads:
    """The allowed head ends [L] that end first, of all that were offered; the first among equals."""

    def __init__(self, timing: RestoreTiming) -> None:
        self.timing = timing
        self.head_ends: Tokens = timing.lowest
        self.end_s = np.inf

    def offer(self, head_ends: Tokens) -> bool:
        """Consider head ends [C, L], allowed or not; whether the best is now among them."""
        ends_s = self.timing.evaluate(head_ends).end_s
        ends_s = np.where(self.timing.allowed(head_ends), ends_s, np.inf)
        index = int(ends_s.argmin())
        if ends_s[index] >= self.end_s:
            return False
        self.head_ends, self.end_s = head_ends[index], float(ends_s[index])
        return True

    def offer_limited(self, head_ends: Tokens) -> None:
        """Like ``offer``; the best of the head ends [C, L] is also tried with as few lengths as allowed."""
        self.offer(head_ends)
        problem = self.timing.problem
        best = head_ends[int(self.timing.evaluate(head_ends).end_s.argmin())]
        if problem.max_lengths > 0:
            self.offer(limit_lengths(best, problem.device_tokens, problem.max_lengths)[None])


def offer_between(best: BestHeads, fewer: Tokens, more: Tokens) -> None:
    """Head ends [L] between ``fewer`` and ``more``: those where computing begins to outlast loading."""
    timing, problem = best.timing, best.timing.problem
    lower, upper = np.minimum(fewer, more), np.maximum(fewer, more)
    page, num_layers = problem.page_size, problem.num_layers
    first = int(lower[-1])
    num_pages = (int(upper[0]) - first) // page
    layers = np.arange(num_layers)
    gap_pages = (upper - lower) // page
    widest = max(int(gap_pages.max(initial=0)), 1)

    def by_token(points: Tokens) -> Tokens:
        """One common end between both, a page later in the first layers."""
        pages, ahead = np.divmod(points, num_layers)
        return np.clip(first + page * (pages[:, None] + (layers < ahead[:, None])), lower, upper)

    def by_page(points: Tokens) -> Tokens:
        """One common end between both."""
        return by_token(points * num_layers)

    def by_layer(points: Tokens) -> Tokens:
        """``more`` in the first layers, ``fewer`` in the last, something between in one layer."""
        full, part = np.divmod(points, widest)
        partial = lower + page * (gap_pages * part[:, None] // widest)
        heads = np.where(layers < full[:, None], upper, lower)
        return np.where(layers == full[:, None], partial, heads)

    for heads_of, steps in (
        (by_token, num_pages * num_layers),
        (by_page, num_pages),
        (by_layer, num_layers * widest),
    ):
        points = crossing(timing, heads_of, steps, lambda times: _excess_s(timing, times))
        best.offer_limited(heads_of(points))


def move_steps(best: BestHeads, goal_s: float, max_rounds: int) -> None:
    """Move the steps of the best head ends, by tokens and by layers, while it helps and until ``goal_s``."""
    for _ in range(max_rounds):
        if best.end_s <= goal_s or not best.offer(_moved(best.head_ends, best.timing)):
            return


def _moved(head_ends: Tokens, timing: RestoreTiming) -> Tokens:
    """[C, L]: head ends with one step higher or lower, one layer range longer or shorter, by powers of 2 and
    each also together with an opposite change of the next step."""
    page = timing.problem.page_size
    starts = np.flatnonzero(np.diff(head_ends, prepend=head_ends[0] + 1))
    bounds = np.append(starts, len(head_ends))
    num_pages = max((timing.highest - timing.problem.device_tokens) // page, 1)
    shifts = [page << power for power in range(num_pages.bit_length())]
    moved = []
    for first, end in pairwise(bounds):
        for shift in shifts:
            for signed in (shift, -shift):
                heads = head_ends.copy()
                heads[first:end] += signed
                moved.append(heads)
    for boundary in starts[1:]:
        for size in (1, 2, 4, 8):
            for start, end, value in (
                (boundary, boundary + size, head_ends[boundary - 1]),
                (max(boundary - size, 0), boundary, head_ends[boundary]),
            ):
                heads = head_ends.copy()
                heads[start:end] = value
                moved.append(heads)
    candidates = np.array(moved)
    # A step may not pass its neighbours.
    return candidates[(candidates[:, 1:] <= candidates[:, :-1]).all(axis=1)] if moved else head_ends[None]


def _excess_s(timing: RestoreTiming, times: PlanTimes) -> Floats:
    excess_s: Floats = times.compute_s - (times.loaded_s + timing.own_after_s).max(axis=1)
    return excess_s


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
