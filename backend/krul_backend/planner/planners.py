"""The planners, by the names that a configuration uses, and their searches for head ends.

They search by one number over simple shapes, or for those with which a restore ends first. The best plans
keep both streams busy to the end, and most of them have one corner: layers before it are recomputed further
than the layers after it. So the search moves two numbers, the layer of the corner and a floor up to which all
layers are recomputed, and for each pair finds the head ends at which computing and loading end together. It
raises heads in this order::

    all layers to the floor | layers before the corner to the top | the corner's layer | the layers after it
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from krul_backend.errors import RestoreError
from krul_backend.planner.interface import (
    RestoreCosts,
    RestorePlan,
    RestorePlanner,
    RestoreProblem,
    StoredRun,
)
from krul_backend.planner.timing import Floats, PlanTimes, RestoreTiming, Tokens

_NUM_CORNERS = 4
_NUM_FLOORS = 4
"""The search starts from a grid of so many corners and floors, and halves its steps from there."""
_FINEST_FLOOR = 64
"""Floors are searched down to this fraction of the prefix, or to a page."""
_CUTS = 1
"""Interpolations between two head ends while corners are compared; the chosen one is cut down to a page."""
_CORNER_MOVES = np.array([1, -1, 2, -2, 4, -4, 0, 0])
_FLOOR_MOVES = np.array([0, 0, 0, 0, 0, 0, 1, -1])
"""The moves that one round tries, in steps of corner and floor."""
_MAX_ROUNDS = 32
_MIN_GAIN = 1e-5
"""Relative gain below which a move does not count: it would not repay the time that it takes to find."""
_SHARES = 1 << 20
"""Shares of head ends are multiples of one over this: whole numbers keep heads from growing by rounding."""
_TIED = 1e-13
"""Ends that differ by less, relative, are equal: sums of many plans at once and of one may differ."""
_FAN_OUT = 16
_MIN_HEAD_GAIN = 1 / 16
"""Heads must save this share of a restore's time. Restores take up to 15% more or less than predicted
(docs/measured.md), and heads err to the late side: a smaller gain would often be a loss."""
_SEARCH_S = 0.015
"""Heads must save this, too: so long a search held up the scheduler of a server on an H100 (docs/gpu.md)."""


def full_load_heads(timing: RestoreTiming) -> Tokens:
    """[L]: the smallest heads that are allowed: none where everything is stored (the paper's "full KV load").

    Some head ends must be possible, here and below.
    """
    problem = timing.problem
    return limit_lengths(timing.lowest, problem.device_tokens, problem.max_lengths)


def uniform_heads(timing: RestoreTiming) -> Tokens:
    """[L]: equal heads in all layers (the paper's "partial KV recompute"), larger only where less is stored.

    They balance computing and loading.
    """
    problem = timing.problem
    if problem.max_lengths == 0:
        return timing.lowest
    num_tokens = problem.total_tokens - problem.device_tokens

    def heads_of(ratios: Floats) -> Tokens:
        ends = problem.device_tokens + np.rint(ratios * num_tokens).astype(np.int64)
        return allowed_heads(timing, np.repeat(ends[:, None], problem.num_layers, axis=1))

    heads = balanced_heads(timing, heads_of, num_tokens // problem.page_size)
    return limit_lengths(heads, problem.device_tokens, problem.max_lengths)


def pyramid_heads(timing: RestoreTiming) -> Tokens:
    """[L]: recomputation falls and loading grows linearly with the layer (the paper, 6.2, eq. 2 to 5).

    The mean ratio over layers is the one that balances computing and loading (eq. 1). Up to a mean of a half
    the line ends at 0 after the last layer; beyond, it starts at 1. It is rounded to ``max_lengths`` steps
    of equally many layers.
    """
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


def balanced_heads(timing: RestoreTiming, heads_of: Callable[[Floats], Tokens], steps: int) -> Tokens:
    """[L]: the head ends at which computing and loading take most nearly the same time (the paper's eq. 1).

    ``heads_of`` maps shares [C] in [0, 1] to head ends [C, L] that nowhere fall with the share. Searched are
    the multiples of ``1 / steps``. Computing is that of the heads and of the request's own forward.
    """

    def excess_s(times: PlanTimes) -> Floats:
        return times.compute_s - times.loaded_s[:, -1]

    points = crossing(timing, lambda at: heads_of(at / max(steps, 1)), steps, excess_s)
    heads = heads_of(points / max(steps, 1))
    best: Tokens = heads[int(np.abs(excess_s(timing.evaluate(heads))).argmin())]
    return best


def crossing(
    timing: RestoreTiming,
    heads_of: Callable[[Tokens], Tokens],
    steps: int,
    excess_of: Callable[[PlanTimes], Floats],
) -> Tokens:
    """Points in [0, steps], at most 17, among them the last with an excess below 0 and the next one.

    ``heads_of`` maps points [C] to head ends [C, L], ``excess_of`` their times to numbers [C] that never fall
    with the point.
    """
    low, high = 0, steps
    while high - low > _FAN_OUT:
        points = np.linspace(low, high, _FAN_OUT + 1).astype(np.int64)
        is_over = excess_of(timing.evaluate(heads_of(points))) >= 0
        first_over = int(is_over.argmax()) if is_over.any() else _FAN_OUT
        low, high = int(points[max(first_over - 1, 0)]), int(points[max(first_over, 1)])
    return np.arange(low, high + 1)


def allowed_heads(timing: RestoreTiming, head_ends: Tokens) -> Tokens:
    """Head ends [C, L] rounded to pages, and moved to what is stored and to the limit of head tokens."""
    page = timing.problem.page_size
    return np.clip((head_ends + page // 2) // page * page, timing.lowest, timing.highest)


def limit_lengths(head_ends: Tokens, device_tokens: int, max_lengths: int) -> Tokens:
    """[L]: head ends with at most ``max_lengths >= 1`` different lengths above none.

    Lengths are raised to the next larger one, those first that add the fewest tokens to the heads.
    """
    starts = np.flatnonzero(np.diff(head_ends, prepend=head_ends[0] + 1))  # of layers with equal heads
    values = [int(value) for value in head_ends[starts]]
    counts = [int(count) for count in np.diff(starts, append=len(head_ends))]
    while sum(value > device_tokens for value in values) > max_lengths:
        num_heads = sum(value > device_tokens for value in values)
        added = [(values[i - 1] - values[i]) * counts[i] for i in range(1, num_heads)]
        merged = 1 + added.index(min(added))
        counts[merged - 1] += counts.pop(merged)
        values.pop(merged)
    return np.repeat(np.array(values, np.int64), counts)


@dataclass(frozen=True, eq=False)
class _Balance:
    """Find where computing begins to outlast loading, for ``C`` shapes.

    ``fewer`` and ``more`` [C, L]: head ends on either side of it. ``end_s`` [C]: the end in between, by
    linear interpolation.
    """

    fewer: Tokens
    more: Tokens
    end_s: Floats


def search_heads(timing: RestoreTiming) -> Tokens:
    """[L]: head ends that end no later than those of full load, uniform and pyramid, and usually earlier.

    Of those that end equally early the ones that recompute least. Some head ends must be possible. Equal
    problems give equal head ends.
    """
    problem = timing.problem
    corner, floor = (np.array([each]) for each in _search_corner(timing))
    balance = _balance(timing, corner, floor, num_cuts=None)
    layers = np.arange(problem.num_layers)
    # Between two neighbouring pages the first layers get one page more.
    between = np.where(layers < np.arange(problem.num_layers + 1)[:, None], balance.more, balance.fewer)
    simple = (full_load_heads(timing), uniform_heads(timing), pyramid_heads(timing))
    candidates = [*simple, *_knots(timing, corner, floor)[:, 0], *between]
    if problem.max_lengths > 0:
        best = between[int(timing.evaluate(between).end_s.argmin())]
        candidates.append(limit_lengths(best, problem.device_tokens, problem.max_lengths))
    heads: Tokens = np.stack(candidates)
    times = timing.evaluate(heads)
    ends_s = np.where(timing.allowed(heads), times.end_s, np.inf)
    is_first = ends_s <= ends_s.min() * (1 + _TIED)
    chosen: Tokens = heads[int(np.where(is_first, times.compute_s, np.inf).argmin())]
    return chosen


def _search_corner(timing: RestoreTiming) -> tuple[int, int]:
    """The corner and the floor whose balance ends first: the best of a grid, then moved by halved steps."""
    problem, page = timing.problem, timing.problem.page_size
    num_layers, first, last = problem.num_layers, problem.device_tokens, timing.highest
    num_pages = (last - first) // page
    grid = np.meshgrid(
        np.unique(np.arange(_NUM_CORNERS + 1) * num_layers // _NUM_CORNERS),
        np.unique(first + page * (np.arange(_NUM_FLOORS) * num_pages // _NUM_FLOORS)),
    )
    corners, floors = (axis.ravel() for axis in grid)
    layer_step = max(num_layers // _NUM_CORNERS // 2, 1)
    page_step = max(num_pages // _NUM_FLOORS // 2, 1)
    corner, floor, end_s = 0, first, np.inf
    for _ in range(_MAX_ROUNDS):
        ends_s = _balance(timing, corners, floors, _CUTS).end_s
        index = int(ends_s.argmin())
        if ends_s[index] < end_s * (1 - _MIN_GAIN):
            corner, floor, end_s = int(corners[index]), int(floors[index]), float(ends_s[index])
        elif layer_step == 1 and page_step <= max(num_pages // _FINEST_FLOOR, 1):
            break
        else:
            layer_step, page_step = max(layer_step // 2, 1), max(page_step // 2, 1)
        corners = np.clip(corner + layer_step * _CORNER_MOVES, 0, num_layers)
        floors = np.clip(floor + page * page_step * _FLOOR_MOVES, first, last)
    return corner, floor


def _balance(timing: RestoreTiming, corners: Tokens, floors: Tokens, num_cuts: int | None) -> _Balance:
    """The balance of shapes with these corners [C] and floors [C].

    ``num_cuts``: how often the head ends around the balance are brought nearer; None until they are less than
    two pages apart.
    """
    page, num_shapes = timing.problem.page_size, len(corners)
    knots = _knots(timing, corners, floors)  # [K, C, L]
    compute_s, excess_s = _times(timing, knots)
    # The last knot before computing outlasts loading, and the one after it.
    after = np.where((excess_s >= 0).any(axis=0), (excess_s >= 0).argmax(axis=0), len(knots) - 1)
    after = np.maximum(after, 1)
    sides, shapes = np.stack([after - 1, after]), np.arange(num_shapes)
    heads = knots[sides, shapes]  # [2, C, L]
    compute_s, excess_s = compute_s[sides, shapes], excess_s[sides, shapes]
    cut = 0
    while num_cuts is None or cut < num_cuts:
        pages = (heads[1] - heads[0]) // page
        if pages.max() <= 1:
            break
        # Every second cut is in the middle: interpolation alone may come nearer from one side only.
        shares = _shares(excess_s) if cut % 2 == 0 else np.full(num_shapes, 0.5)
        parts = np.rint(shares * _SHARES).astype(np.int64)
        middle = heads[0] + page * (pages * parts[:, None] // _SHARES)
        middle_compute_s, middle_excess_s = _times(timing, middle[None])
        side = (middle_excess_s[0] >= 0).astype(np.int64)
        heads[side, shapes] = middle
        compute_s[side, shapes], excess_s[side, shapes] = middle_compute_s[0], middle_excess_s[0]
        cut += 1
    # A stream that outlasts the other on both sides decides the end alone.
    ends_s = compute_s - np.minimum(excess_s, 0.0)
    share = _shares(excess_s)
    crossed_s = compute_s[0] + share * (compute_s[1] - compute_s[0])
    is_crossed = (excess_s[0] < 0) & (excess_s[1] >= 0)
    return _Balance(heads[0], heads[1], np.where(is_crossed, crossed_s, ends_s.min(axis=0)))


def _knots(timing: RestoreTiming, corners: Tokens, floors: Tokens) -> Tokens:
    """[5, C, L]: the head ends between the parts of the order in which heads are raised."""
    layers = np.arange(timing.problem.num_layers)
    top = timing.highest
    floor = np.maximum(floors[:, None], timing.lowest)
    before = layers < corners[:, None]
    through = layers <= corners[:, None]
    bottom = np.broadcast_to(timing.lowest, floor.shape)
    return np.stack(
        [bottom, floor, np.where(before, top, floor), np.where(through, top, floor), np.full_like(floor, top)]
    )


def _times(timing: RestoreTiming, heads: Tokens) -> tuple[Floats, Floats]:
    """[K, C] each, of head ends [K, C, L]: all compute, and by how much it outlasts the last load."""
    times = timing.evaluate(heads.reshape(-1, heads.shape[-1]))
    excess_s = times.compute_s - (times.loaded_s + timing.own_after_s).max(axis=1)
    return times.compute_s.reshape(heads.shape[:2]), excess_s.reshape(heads.shape[:2])


def _shares(excess_s: Floats) -> Floats:
    """[C] in [0, 1]: how far from the first to the second row of excesses [2, C] they reach zero."""
    lack, gain = -excess_s[0], excess_s[1] - excess_s[0]
    shares: Floats = np.clip(lack / np.where(gain > 0, gain, 1.0), 0.0, 1.0)
    return shares


def earliest_end_s(timing: RestoreTiming) -> float:
    """A time before which no plan ends. Some head ends must be possible.

    The lowest heads compute for ``C`` and end at ``E``. If a second of further heads saves ``r`` seconds of
    loading at most, heads that take ``x`` more end no earlier than ``C + x``, nor than ``E - r x``. These
    meet at ``E - (E - C) r / (1 + r)``.
    """
    problem, lowest, cost = timing.problem, timing.lowest, timing.problem.costs.head
    times = timing.evaluate(lowest[None])
    compute_s, end_s = float(times.compute_s[0]), float(times.end_s[0])
    if any(run.front_tier is not None for run in problem.runs):
        return compute_s * (1 - _TIED)
    # A token of a head saves most, on average, if the head ends with a run, or where heads must: [R, L].
    heads = np.clip(timing.end[:, None], lowest, timing.highest)
    saved_s = np.zeros(heads.shape)
    for part in timing.load_parts:
        np.add.at(saved_s.T, list(part.last_use), (part.seconds(lowest[None]) - part.seconds(heads)).T)
    saved_s = (saved_s / np.maximum(heads - lowest, 1)).max(axis=0, initial=0.0)
    # Of n further tokens each takes fixed / n + context n / 2, and what does not depend on n: the least.
    has_head = lowest > problem.device_tokens
    fixed_s = np.where(has_head, 0.0, cost.launch_s + cost.past_s * problem.device_tokens)
    num_tokens = np.sqrt(2 * fixed_s / max(cost.context_s, 1e-300))
    num_tokens = np.clip(num_tokens, 1, np.maximum(timing.highest - lowest, 1))
    token_s = cost.token_s + cost.context_s * (lowest + num_tokens / 2) + fixed_s / num_tokens
    # r / (1 + r)
    share = float((saved_s / np.maximum(saved_s + token_s, 1e-300)).max())
    return (end_s - share * (end_s - compute_s)) * (1 - _TIED)


class LocalSearchPlanner(RestorePlanner):
    """The earliest end that a local search finds, over head ends and recomputation.

    A restore must end earlier than recomputation by its overhead (``RestoreCosts.overhead_s``), too. The plan
    is full load if heads save less than ``search_s`` or than the share ``min_gain`` of its time, counted from
    when its loads can start; where no heads can save that much there is no search.
    """

    name = "local-search"

    def __init__(self, min_gain: float = _MIN_HEAD_GAIN, search_s: float = _SEARCH_S) -> None:
        self._min_gain, self._search_s = min_gain, search_s

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing, recompute = RestoreTiming(problem), RestorePlan.recompute(problem)
        if not timing.is_possible:
            return recompute
        earliest_s, overhead_s = earliest_end_s(timing), problem.costs.overhead_s
        if recompute.end_s < earliest_s + overhead_s:
            return recompute
        plan = timing.plan(full_load_heads(timing))
        limit_s = plan.end_s - max(self._min_gain * (plan.end_s - problem.load_delay_s), self._search_s)
        if earliest_s <= limit_s:
            searched = timing.plan(search_heads(timing))
            plan = searched if searched.end_s <= limit_s else plan
        return recompute if recompute.end_s < plan.end_s + overhead_s else plan


class HeadsPlanner(RestorePlanner):
    """Plans the head ends ``[L]`` that ``heads_of`` finds, if any are possible."""

    def __init__(self, name: str, heads_of: Callable[[RestoreTiming], Tokens]) -> None:
        self.name = name
        self._heads_of = heads_of

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing = RestoreTiming(problem)
        return timing.plan(self._heads_of(timing)) if timing.is_possible else RestorePlan.recompute(problem)


PLANNERS: dict[str, RestorePlanner] = {
    planner.name: planner
    for planner in (
        LocalSearchPlanner(),
        HeadsPlanner("full-load", full_load_heads),
        HeadsPlanner("pyramid", pyramid_heads),
    )
}


def make_planner(name: str) -> RestorePlanner:
    """The planner of this name. Raises RestoreError for an unknown one."""
    if name not in PLANNERS:
        raise RestoreError(f"planner {name!r} is unknown (accepted: {', '.join(PLANNERS)})")
    return PLANNERS[name]


def allocate(
    planner: RestorePlanner,
    conversation: StoredRun,
    costs: RestoreCosts,
    page_size: int,
    new_tokens: int,
    max_head_tokens: int | None = None,
) -> tuple[int, ...]:
    """Head ends that ``planner`` would recompute if the whole conversation came back from its tier.

    Tokens before them need not be stored (the paper's space allocation ``C = {c (1 - r_c)} x N``, 6.1, but
    layer by layer). ``conversation``: tokens ``[0, end_token)`` as they would be stored in full, in the tier
    that they would come back from. ``new_tokens``: expected with the next turn. If recomputing everything is
    faster than any restore, all head ends are ``end_token``.
    """
    num_layers = len(conversation.layer_token_bytes)
    stored = replace(conversation, stored_from=(conversation.first_token,) * num_layers)
    problem = RestoreProblem(
        num_layers=num_layers,
        page_size=page_size,
        device_tokens=conversation.first_token,
        total_tokens=conversation.end_token,
        new_tokens=new_tokens,
        runs=(stored,),
        costs=costs,
        max_head_tokens=max_head_tokens,
    )
    return planner.plan(problem).head_ends
