"""Lower bounds on the end of a restore, and the head ends that come with them, by Lagrangian duality.

The end is the largest of ``f_0 = heads + L q`` and ``f_k = load steps 0..k + (L - k) q`` over layers ``k``
(``q``: one own layer). Any weights that sum to 1 give a lower bound, the smallest weighted sum over all head
ends. That sum is found cell by cell: tokens are cut into cells, cell ``g`` is recomputed in layers below
``n_g`` and loaded from layer ``n_g`` on, and head ends that do not grow with the layer are ``n_g`` that do
not grow with the cell.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from krul_backend.planner.timing import Floats, RestoreTiming, Tokens


def best_layer_counts(costs: Floats, max_lengths: int | None = None) -> Tokens:
    """[G]: counts ``n_g``, non-increasing, with the smallest sum of ``costs[n_g, g]``; costs [L + 1, G].

    With ``max_lengths`` at most so many cells may have a larger count than the next one (the last one: than
    0), which is the number of different lengths of heads. Infinite costs are forbidden; some counts must be
    allowed. Of equal sums the smaller counts.
    """
    counts: Tokens = costs.argmin(axis=0)
    if (counts[1:] > counts[:-1]).any():
        counts = _monotone(costs)
    if max_lengths is not None and np.count_nonzero(np.diff(counts, append=0)) > max_lengths:
        return _monotone_in_steps(costs, max_lengths)
    return counts


def _monotone(costs: Floats) -> Tokens:
    num_cells = costs.shape[1]
    totals = np.empty((num_cells, costs.shape[0]))  # [g, n]: cells 0..g, the last with n layers
    totals[0] = costs[:, 0]
    for cell in range(1, num_cells):
        totals[cell] = costs[:, cell] + np.minimum.accumulate(totals[cell - 1, ::-1])[::-1]
    counts = np.empty(num_cells, np.int64)
    lowest = 0
    for cell in range(num_cells - 1, -1, -1):
        lowest = counts[cell] = lowest + int(totals[cell, lowest:].argmin())
    return counts


def _monotone_in_steps(costs: Floats, max_lengths: int) -> Tokens:
    num_counts, num_cells = costs.shape
    # [g, s, n]: cells 0..g, the last with n layers, after s falls
    totals = np.full((num_cells, max_lengths + 1, num_counts), np.inf)
    totals[0, 0] = costs[:, 0]
    for cell in range(1, num_cells):
        before = totals[cell - 1]
        totals[cell] = before
        fallen = np.minimum.accumulate(before[:-1, :0:-1], axis=1)[:, ::-1]  # min over more layers than n
        np.minimum(totals[cell, 1:, :-1], fallen, out=totals[cell, 1:, :-1])
        totals[cell] += costs[:, cell]
    counts = np.empty(num_cells, np.int64)
    last = totals[-1].copy()
    last[-1, 1:] = np.inf  # the fall to 0 after the last cell would be one too many
    falls, count = (int(index) for index in np.unravel_index(last.argmin(), last.shape))
    for cell in range(num_cells - 1, -1, -1):
        counts[cell] = count
        if cell == 0:
            break
        before = totals[cell - 1]
        if falls > 0 and count + 1 < num_counts:
            higher = count + 1 + int(before[falls - 1, count + 1 :].argmin())
            if before[falls - 1, higher] < before[falls, count]:
                falls, count = falls - 1, higher
    return counts


_MAX_CUTS = 24
_MAX_PREFIX_STEPS = 6
_CLOSE = 1e-9


@dataclass(frozen=True, eq=False)
class Weights:
    """``compute``: of ``f_0``; ``prefixes`` [L]: of ``f_k``, as shares of ``1 - compute``."""

    compute: float
    prefixes: Floats


@dataclass(frozen=True, eq=False)
class DualSolution:
    """``bound_s``: no allowed head ends end before; ``weights``: those that give it. ``fewer``, ``more`` [L]:
    head ends that both attain the weighted sum, one with too little recomputed, one with too much."""

    bound_s: float
    fewer: Tokens
    more: Tokens
    weights: Weights


@dataclass(frozen=True, eq=False)
class _Point:
    """Layer counts [G] of the cells, and what they sum to."""

    counts: Tokens
    compute_s: float
    load_s: float


class DualTables:
    """Costs of one problem on cells between ``levels`` [G + 1], ascending multiples of the page size.

    The first level is ``device_tokens``, the last ``timing.highest``; every end of a run and every smallest
    head end in between must be a level, so that costs within a cell are even.
    """

    def __init__(self, timing: RestoreTiming, levels: Tokens) -> None:
        problem = timing.problem
        self.timing, self.levels = timing, levels
        self.num_layers = problem.num_layers
        self.own_s = problem.num_layers * timing.own_layer_s
        self.head_s = timing.head_s(levels)  # [G + 1]
        self._cell_head_s = np.diff(self.head_s)  # [G]
        counts = np.arange(problem.num_layers + 1)
        self._compute = counts[:, None] * self._cell_head_s  # [L + 1, G]
        self.min_counts: Tokens = (timing.lowest[:, None] >= levels[1:]).sum(axis=0)  # [G]
        self._forbidden = counts[:, None] < self.min_counts  # [L + 1, G]

        at = np.repeat(levels[:, None], problem.num_layers, axis=1)
        steps = [(part.last_use, part.seconds(at)) for part in timing.load_parts]  # [G + 1, L] each
        self._base_layer_s = timing.load_layer_s(at[:1])[0]  # [L]: load steps with no heads
        # For each part whether so many layers leave a step out [L + 1, L], and what that saves [L, G].
        self._steps = [
            ((np.array(pattern) < counts[:, None]).astype(np.float64), np.diff(step_s, axis=0).T)
            for pattern, step_s in steps
        ]
        pages = np.diff(levels) // problem.page_size
        page_context_s = problem.costs.head.context_s * problem.page_size**2
        # Head ends inside a cell can save this much of compute against those at its ends: with n_g from a
        # to b within the cell, (a - b) * slope * P^2 / 8 of P pages; over all cells a - b sums to at most L.
        inside = (pages**2 - pages % 2).max(initial=0) / 8
        self._inside_s = float(self.num_layers * page_context_s * inside)

    def load_table(self, prefixes: Floats) -> tuple[Floats, float]:
        """The weighted sum of ``f_k``, in two parts.

        [L + 1, G]: what recomputing a cell in so many layers adds to it; and what it is with no heads.
        """
        step_weights = prefixes[::-1].cumsum()[::-1]  # [L]: a step counts in each prefix it is part of
        table = np.zeros_like(self._compute)
        for is_left_out, step_s in self._steps:
            table += is_left_out @ (step_weights[:, None] * step_s)
        base = step_weights @ self._base_layer_s + prefixes @ self.timing.own_after_s
        return table, float(base)

    def heads(self, counts: Tokens) -> Tokens:
        """[L]: the head ends of layer counts [G]."""
        cells = (counts[:, None] > np.arange(self.num_layers)).sum(axis=0)
        head_ends: Tokens = self.levels[cells]
        return head_ends

    def solve(self, tolerance: float, max_lengths: int | None = None) -> DualSolution:
        """The best bound found; ``tolerance``: how far, relative, it may stay below the best there is.

        ``max_lengths``: how many different lengths head ends may have; None to bound those of any number.
        """
        best = self._balance(_unit(self.num_layers, self.num_layers - 1), tolerance, max_lengths)
        prefix, seen = self.num_layers - 1, {self.num_layers - 1}
        current = best
        for _ in range(_MAX_PREFIX_STEPS):
            binding = self._binding_prefix(current, tolerance)
            if binding is None or binding == prefix:
                break
            if binding in seen:
                return self._between(best, prefix, binding, tolerance, max_lengths)
            current = self._balance(_unit(self.num_layers, binding), tolerance, max_lengths)
            prefix = binding
            seen.add(prefix)
            if current.bound_s > best.bound_s:
                best = current
        return best

    def _between(
        self, best: DualSolution, first: int, second: int, tolerance: float, max_lengths: int | None
    ) -> DualSolution:
        """Weight on two prefixes: bisected by which of the two ends later."""
        low, high = 0.0, 1.0
        for _ in range(_MAX_PREFIX_STEPS):
            share = (low + high) / 2
            prefixes = (1 - share) * _unit(self.num_layers, first) + share * _unit(self.num_layers, second)
            current = self._balance(prefixes, tolerance, max_lengths)
            if current.bound_s > best.bound_s:
                best = current
            ends_s = self._mixed_ends_s(current)
            if ends_s[second] > ends_s[first]:
                low = share
            else:
                high = share
            if abs(ends_s[second] - ends_s[first]) <= tolerance / 4 * best.bound_s:
                break
        return best

    def _binding_prefix(self, solution: DualSolution, tolerance: float) -> int | None:
        """The prefix that ends latest, if it ends noticeably after the bound."""
        ends_s = self._mixed_ends_s(solution)
        latest = int(ends_s.argmax())
        limit_s = solution.bound_s * (1 + max(tolerance / 4, _CLOSE))
        return latest if ends_s[latest] > limit_s else None

    def _mixed_ends_s(self, solution: DualSolution) -> Floats:
        """[L]: ``f_k`` of the mixture of both head ends that computes as long as its weighted load lasts."""
        times = self.timing.evaluate(np.stack([solution.fewer, solution.more]))
        ends_s = times.loaded_s + self.timing.own_after_s  # [2, L]
        lacks, exceeds = times.compute_s - ends_s @ solution.weights.prefixes
        # On one side of the balance there is only one: both are the same head ends.
        share = exceeds / (exceeds - lacks) if exceeds > 0 > lacks else 1.0
        return share * ends_s[0] + (1 - share) * ends_s[1]  # type: ignore[no-any-return]

    def _balance(self, prefixes: Floats, tolerance: float, max_lengths: int | None) -> DualSolution:
        """The best bound over the weight of compute: a concave function, cut by lines from both sides."""
        table, base_s = self.load_table(prefixes)

        def solve(compute: float) -> _Point:
            costs = compute * self._compute + (1 - compute) * table
            costs[self._forbidden] = np.inf
            counts = best_layer_counts(costs, max_lengths)
            load_s = base_s + float(np.take_along_axis(table, counts[None], 0).sum())
            return _Point(counts, self.own_s + float(counts @ self._cell_head_s), load_s)

        def result(bound_s: float, compute: float, fewer: _Point, more: _Point) -> DualSolution:
            weights = Weights(compute, prefixes)
            return DualSolution(bound_s, self.heads(fewer.counts), self.heads(more.counts), weights)

        fewer = solve(1.0)  # the smallest head ends there are, whatever the cells
        if fewer.compute_s >= fewer.load_s:
            return result(fewer.compute_s, 1.0, fewer, fewer)
        more = solve(0.0)
        if more.load_s >= more.compute_s:
            return result(more.load_s, 0.0, more, more)
        best_s, best_compute = max((fewer.compute_s, 1.0), (more.load_s, 0.0))
        for _ in range(_MAX_CUTS):
            gain = fewer.load_s - more.load_s
            compute = gain / (gain + more.compute_s - fewer.compute_s)
            line_s = compute * fewer.compute_s + (1 - compute) * fewer.load_s
            point = solve(compute)
            value_s = compute * point.compute_s + (1 - compute) * point.load_s
            if value_s - compute * self._inside_s > best_s:
                best_s, best_compute = value_s - compute * self._inside_s, compute
            if value_s >= line_s * (1 - max(tolerance / 16, _CLOSE)):
                break
            if point.compute_s >= point.load_s:
                more = point
            else:
                fewer = point
        return result(best_s, best_compute, fewer, more)


def make_levels(timing: RestoreTiming, max_cells: int) -> Tokens:
    """Levels for ``DualTables``: every page if they are at most ``max_cells``, else about so many."""
    problem, page = timing.problem, timing.problem.page_size
    first, last = problem.device_tokens, timing.highest
    fixed = np.unique(np.clip(np.concatenate([[first, last], timing.end, timing.lowest]), first, last))
    pages = np.diff(fixed) // page
    cell_pages = -(-int(pages.sum()) // max_cells)
    parts = [
        start + page * (np.arange(cells) * num_pages // cells)
        for start, num_pages, cells in zip(fixed[:-1], pages, -(-pages // max(cell_pages, 1)), strict=True)
    ]
    levels: Tokens = np.concatenate([*parts, [last]]).astype(np.int64)
    return levels


def _unit(size: int, index: int) -> Floats:
    vector = np.zeros(size)
    vector[index] = 1.0
    return vector
