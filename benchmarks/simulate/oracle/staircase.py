"""Good head ends from those of a dual solution: between its two, and by moving steps."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from krul_backend.planner.planners import crossing, limit_lengths
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
