"""Computes how long each of many plans of one problem takes, for planners to search with.

A plan is judged by a model of the restore::

    compute stream   head 0 | head 1 | ... | head L-1 | own 0 | own 1 | ... | own L-1
    load stream      load 0 | load 1 | ... | load L-1

Both streams start at 0, or after their delays, and never pause by themselves, but for one rule: own layer
``l``, of the request's own forward, starts when load ``l`` has ended. Head ``l`` computes tokens
``[device_tokens, h_l)`` of layer ``l``.
Load ``l`` copies block ``l`` of each run, one copy each, and decodes the rows ``[h_l, total_tokens)``. If
the problem ``is_serial``, loads start when all heads have ended, and own layers when all loads have.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
from numpy.typing import NDArray

from krul_backend.errors import RestoreError
from krul_backend.planner.interface import RestorePlan, RestoreProblem, StoredRun, TierCost

Floats = NDArray[np.float64]
Tokens = NDArray[np.int64]
Flags = NDArray[np.bool_]


@dataclass(frozen=True)
class PlanTimes:
    """Of ``C`` plans. ``compute_s`` [C]: heads and own layers, without a wait. ``loaded_s`` [C, L]: when load
    ``l`` has ended. ``end_s`` [C]: when the last own layer has."""

    compute_s: Floats
    loaded_s: Floats
    end_s: Floats


class LoadPart:
    """The part of every load step ``l`` that begins at the head of one layer, ``last_use[l]``.

    Between two ends of runs it falls evenly with the token at which it begins, so that a look-up finds it
    however many runs there are. ``latency_s`` [R, L] is paid by a run with any token, ``token_s`` [R, L] by
    each token; both are 0 in runs that belong to another part.
    """

    def __init__(
        self, last_use: tuple[int, ...], first: Tokens, end: Tokens, latency_s: Floats, token_s: Floats
    ) -> None:
        self.last_use = last_use
        layers = np.arange(len(last_use))
        self._layers = layers
        self._from: Tokens | None = None if last_use == tuple(layers) else np.array(last_use, np.int64)
        self._ends = end
        whole_s = (latency_s + token_s * (end - first)[:, None])[::-1].cumsum(axis=0)[::-1]
        # Row r: a load that begins in run r; the last row one that begins after all of them.
        nothing = np.zeros((1, len(last_use)))
        after_s = np.concatenate([whole_s[1:], nothing, nothing]) if len(end) else nothing
        latency_s, token_s = np.concatenate([latency_s, nothing]), np.concatenate([token_s, nothing])
        # From the token t of run r on: rest + (end - t) * token_s.
        self._token_s = token_s.ravel()
        last_end = end[-1] if len(end) else 0
        self._at_zero_s = (after_s + latency_s + token_s * np.append(end, last_end)[:, None]).ravel()

    def seconds(self, head_ends: Tokens) -> Floats:
        """[C, L]: of each step for head ends [C, L], none before the first run."""
        begin = head_ends if self._from is None else head_ends[:, self._from]
        places = np.searchsorted(self._ends, begin, side="right") * len(self._layers) + self._layers
        seconds: Floats = self._at_zero_s.take(places) - begin * self._token_s.take(places)
        return seconds


class FrontPart:
    """Extra seconds of load steps that read the beginnings of one run's blocks from its ``front_tier``."""

    def __init__(self, run: StoredRun, tier: TierCost, front: TierCost) -> None:
        self.last_use = run.last_use
        self._from = np.array(run.last_use, np.int64)
        self._first, self._end = run.first_token, np.array(run.front_end, np.int64)
        self._latency_s = max(0.0, front.latency_s - tier.latency_s)
        self._token_s: Floats = max(0.0, front.byte_s - tier.byte_s) * np.array(run.layer_token_bytes)

    def seconds(self, head_ends: Tokens) -> Floats:
        """[C, L]: the extra seconds of each step, for head ends [C, L]."""
        tokens = (self._end - np.maximum(head_ends[:, self._from], self._first)).clip(0)
        seconds: Floats = self._token_s * tokens + np.where(tokens > 0, self._latency_s, 0.0)
        return seconds


class RestoreTiming:
    """Times of the head ends of one problem, and which are allowed.

    ``lowest`` [L]: the smallest head ends that are stored, non-increasing. ``highest``: the largest head end.
    ``is_possible``: whether any head ends are allowed.

    Raises:
        RestoreError: a run in a tier that has no costs.
    """

    def __init__(self, problem: RestoreProblem) -> None:
        runs, num_layers = problem.runs, problem.num_layers
        shape = (len(runs), num_layers)
        self.problem = problem
        self.own_layer_s = problem.own_layer_s
        # A load that ends late holds up its own layer and all after it.
        self.own_after_s: Floats = self.own_layer_s * np.arange(num_layers, 0, -1, np.float64)  # [L]
        tiers = [_tier(problem, run.tier) for run in runs]
        self.first: Tokens = np.array([max(run.first_token, problem.device_tokens) for run in runs], np.int64)
        self.end: Tokens = np.array([run.end_token for run in runs], np.int64)
        self.token_bytes: Floats = _floats([run.layer_token_bytes for run in runs], shape)
        self.last_use: Tokens = _tokens([run.last_use for run in runs], shape)
        latency_s = np.array([tier.latency_s for tier in tiers], np.float64)
        byte_s = np.array([tier.byte_s for tier in tiers], np.float64)
        is_copied = (self.token_bytes > 0) & (self.end > self.first)[:, None]
        copy_s: Floats = np.where(is_copied, latency_s[:, None], 0.0)  # [R, L]
        token_s: Floats = self.token_bytes * byte_s[:, None]  # [R, L]
        scale = problem.costs.decode_scale
        once_s, segment_s, decode_s = scale * _decode_seconds(runs, num_layers)
        # The last segment that is decoded pays what is paid once.
        is_last = (once_s[::-1] > 0).cumsum(axis=0)[::-1] == 1
        self._decode_run_s: Floats = segment_s + np.where(is_last, once_s, 0.0)  # [R, L]
        self._decode_token_s: Floats = decode_s  # [R, L]
        fronts = (
            FrontPart(run, tier, _tier(problem, run.front_tier))
            for run, tier in zip(runs, tiers, strict=True)
            if run.front_tier is not None
        )
        self.load_parts: tuple[LoadPart | FrontPart, ...] = (*self._load_parts(copy_s, token_s), *fronts)

        page = problem.page_size
        stored_from: Tokens = _tokens([run.stored_from for run in runs], shape)
        left_out = stored_from > self.first[:, None]
        needed = np.where(left_out, -(-stored_from // page) * page, problem.device_tokens)
        needed = needed.max(axis=0, initial=problem.device_tokens)
        self.lowest: Tokens = np.maximum.accumulate(needed[::-1])[::-1]
        self.highest = problem.total_tokens
        if problem.max_head_tokens is not None:
            limit = (problem.device_tokens + problem.max_head_tokens) // page * page
            self.highest = min(self.highest, max(limit, problem.device_tokens))
        has_heads = bool(self.lowest[0] > problem.device_tokens)
        self.is_possible = bool(self.lowest[0] <= self.highest) and not (
            has_heads and problem.max_lengths < 1
        )

    def head_s(self, head_ends: Tokens) -> Floats:
        """Seconds to compute heads that end at ``head_ends``, elementwise."""
        cost, past = self.problem.costs.head, self.problem.device_tokens
        tokens = (head_ends - past).astype(np.float64)
        time: Floats = tokens * (cost.token_s + cost.context_s * (past + tokens / 2))
        time += np.where(tokens > 0, cost.launch_s + cost.past_s * past, 0.0)
        return time

    def load_layer_s(self, head_ends: Tokens) -> Floats:
        """[C, L]: seconds of each load step, for head ends [C, L]."""
        seconds = np.zeros(head_ends.shape)
        for part in self.load_parts:
            seconds += part.seconds(head_ends)
        return seconds

    def evaluate(self, head_ends: Tokens) -> PlanTimes:
        """Times of head ends [C, L], whether they are allowed or not."""
        heads_s = self.head_s(head_ends).sum(axis=1)
        own_s = self.problem.num_layers * self.own_layer_s
        compute_s = self.problem.compute_delay_s + heads_s + own_s
        loaded_s = self.problem.load_delay_s + self.load_layer_s(head_ends).cumsum(axis=1)
        if self.problem.is_serial:
            return PlanTimes(compute_s, loaded_s, compute_s + loaded_s[:, -1])
        end_s = np.maximum(compute_s, (loaded_s + self.own_after_s).max(axis=1))
        return PlanTimes(compute_s, loaded_s, end_s)

    def num_lengths(self, head_ends: Tokens) -> Tokens:
        """[C]: how many different lengths above none; head ends [C, L] are non-increasing."""
        last = head_ends[:, -1] > self.problem.device_tokens
        lengths: Tokens = (head_ends[:, 1:] != head_ends[:, :-1]).sum(axis=1) + last
        return lengths

    def allowed(self, head_ends: Tokens) -> Flags:
        """[C]: which of the head ends [C, L] are allowed."""
        flags = (head_ends[:, 1:] <= head_ends[:, :-1]).all(axis=1)
        flags &= (head_ends >= self.lowest).all(axis=1) & (head_ends[:, 0] <= self.highest)
        flags &= (head_ends % self.problem.page_size == 0).all(axis=1)
        return flags & (self.num_lengths(head_ends) <= self.problem.max_lengths)

    def plan(self, head_ends: Tokens) -> RestorePlan:
        """The plan with head ends [L]."""
        end_s = self.evaluate(head_ends[None]).end_s[0]
        return RestorePlan(tuple(int(end) for end in head_ends), float(end_s))

    def work_s(self, head_ends: Sequence[int]) -> tuple[float, float, float]:
        """Seconds of all heads, of all loads, and of the decoding in these, for head ends [L]: each without
        waits for the other."""
        ends = np.array([head_ends], np.int64)
        # [R, L]: tokens that are decoded
        tokens = (self.end[:, None] - np.maximum(ends, self.first[:, None])).clip(0)
        decode_s = self._decode_token_s * tokens + np.where(tokens > 0, self._decode_run_s, 0.0)
        return float(self.head_s(ends).sum()), float(self.load_layer_s(ends).sum()), float(decode_s.sum())

    def _load_parts(self, copy_s: Floats, token_s: Floats) -> Iterator[LoadPart]:
        """A part for each way in which layers are paired; rows are decoded from their own layer's head on."""
        own = tuple(range(self.problem.num_layers))
        patterns = [run.last_use for run in self.problem.runs]
        for pattern in dict.fromkeys([*patterns, own]):
            is_in_part = np.array([each == pattern for each in patterns], np.bool_)[:, None]
            part_token_s = np.where(is_in_part, token_s, 0.0)
            part_copy_s = np.where(is_in_part, copy_s, 0.0)
            if pattern == own:
                part_token_s += self._decode_token_s
                part_copy_s += self._decode_run_s
            if part_token_s.any() or part_copy_s.any():
                yield LoadPart(pattern, self.first, self.end, part_copy_s, part_token_s)


def _tier(problem: RestoreProblem, name: str) -> TierCost:
    tiers = problem.costs.tiers
    if name not in tiers:
        raise RestoreError(f"tier {name!r} has no costs (known: {', '.join(tiers)})")
    return tiers[name]


def _decode_seconds(runs: Sequence[StoredRun], num_layers: int) -> Floats:
    """[3, R, L]: seconds of decoding once, for a segment and for a token. Neighbours often cost the same."""
    groups = [(costs, len(list(equal))) for costs, equal in groupby(run.decode for run in runs)]
    rows = [[(cost.latency_s, cost.segment_s, cost.token_s) for cost in costs] for costs, _ in groups]
    seconds = np.array(rows, np.float64).reshape(-1, num_layers, 3)
    return np.moveaxis(seconds.repeat(np.array([num for _, num in groups], np.int64), axis=0), 2, 0)


def _floats(rows: Sequence[tuple[float, ...]], shape: tuple[int, int]) -> Floats:
    return np.array(rows, np.float64).reshape(shape)


def _tokens(rows: Sequence[tuple[int, ...]], shape: tuple[int, int]) -> Tokens:
    return np.array(rows, np.int64).reshape(shape)
