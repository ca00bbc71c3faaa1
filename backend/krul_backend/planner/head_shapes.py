"""Shapes of heads over the layers: searched by one number, and with few different lengths."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from krul_backend.planner.timing import Floats, PlanTimes, RestoreTiming, Tokens

_FAN_OUT = 16


def full_load_heads(timing: RestoreTiming) -> Tokens:
    """[L]: the head ends of ``FullLoadPlanner``, if any are possible."""
    problem = timing.problem
    return limit_lengths(timing.lowest, problem.device_tokens, problem.max_lengths)


def uniform_heads(timing: RestoreTiming) -> Tokens:
    """[L]: the head ends of ``UniformPlanner``, if any are possible."""
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
