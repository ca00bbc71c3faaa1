"""The cheapest non-increasing layer counts: one per cell of tokens."""

from __future__ import annotations

import numpy as np

from krul_backend.planner.timing import Floats, Tokens


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
