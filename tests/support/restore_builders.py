"""Small problems of restoring, for the tests of planners."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np
from hypothesis import strategies as st

from krul_backend.errors import RestoreError
from krul_backend.planner.interface import (
    NO_DECODING,
    ComputeCost,
    DecodeCost,
    RestoreCosts,
    RestoreProblem,
    StoredRun,
    TierCost,
)
from krul_backend.planner.timing import RestoreTiming

HOST, DISK = "host", "disk"


def stored_run(
    first: int, end: int, token_bytes: list[float], tier: str = HOST, last_use: list[int] | None = None
) -> StoredRun:
    """Everything stored, nothing to decode, each layer for itself unless ``last_use`` says otherwise."""
    return StoredRun(
        tier=tier,
        first_token=first,
        end_token=end,
        layer_token_bytes=tuple(token_bytes),
        decode=(NO_DECODING,) * len(token_bytes),
        last_use=tuple(last_use or range(len(token_bytes))),
        stored_from=(first,) * len(token_bytes),
    )


def make_problem(
    *runs: StoredRun,
    page_size: int = 1,
    new_tokens: int = 0,
    head: ComputeCost | None = None,
    own: ComputeCost | None = None,
    host: TierCost | None = None,
    max_head_tokens: int | None = None,
    max_lengths: int = 8,
) -> RestoreProblem:
    """By default a token costs 1 s to compute in a layer, a byte 1 s to load, and nothing else costs."""
    head = head or ComputeCost(0.0, 1.0, 0.0)
    tiers = {HOST: host or TierCost(0.0, 1.0), DISK: TierCost(2.0, 4.0)}
    return RestoreProblem(
        num_layers=len(runs[0].layer_token_bytes),
        page_size=page_size,
        device_tokens=runs[0].first_token,
        total_tokens=runs[-1].end_token,
        new_tokens=new_tokens,
        runs=runs,
        costs=RestoreCosts(head, own or head, tiers),
        max_head_tokens=max_head_tokens,
        max_lengths=max_lengths,
    )


@st.composite
def compute_costs(draw: st.DrawFn) -> ComputeCost:
    numbers = ([0.0, 0.5, 4.0], [0.0, 0.1, 1.0, 3.0], [0.0, 0.01, 0.2], [0.0, 0.3])
    return ComputeCost(*(draw(st.sampled_from(each)) for each in numbers))


@st.composite
def stored_runs(draw: st.DrawFn, first: int, end: int, page_size: int, num_layers: int) -> StoredRun:
    """Bytes of any size, now and then a pair, something to decode, or something left out."""
    token_bytes = draw(_per_layer(num_layers, [0.0, 1.0, 2.0, 4.5, 8.0]))
    last_use = list(range(num_layers))
    if num_layers > 1 and draw(st.booleans()):
        lower = draw(st.integers(0, num_layers - 2))
        last_use[lower] = draw(st.integers(lower + 1, num_layers - 1))
    run = stored_run(first, end, token_bytes, draw(st.sampled_from([HOST, DISK])), last_use)
    pages = st.integers(0, (end - first) // page_size)
    left_out = draw(
        st.one_of(st.just([0] * num_layers), st.lists(pages, min_size=num_layers, max_size=num_layers))
    )
    return replace(
        run,
        decode=tuple(map(DecodeCost, *(draw(_per_layer(num_layers, [0.0, s])) for s in (2.0, 0.3, 0.7)))),
        stored_from=tuple(first + page_size * num_pages for num_pages in left_out),
    )


@st.composite
def problems(draw: st.DrawFn, max_layers: int = 4, max_pages: int = 5) -> RestoreProblem:
    num_layers = draw(st.integers(1, max_layers))
    page_size = draw(st.sampled_from([1, 4]))
    num_pages = draw(st.integers(1, max_pages))
    device = draw(st.integers(0, 3))
    cuts = sorted(draw(st.sets(st.integers(1, max(num_pages - 1, 1)), max_size=2)) | {0, num_pages})
    bounds = [page_size * (device + cut) for cut in cuts]
    runs = [draw(stored_runs(first, end, page_size, num_layers)) for first, end in pairwise(bounds)]
    return make_problem(
        *runs,
        page_size=page_size,
        new_tokens=draw(st.sampled_from([0, 1, 5, 20])),
        head=draw(compute_costs()),
        own=draw(compute_costs()),
        host=TierCost(draw(st.sampled_from([0.0, 1.0, 3.0])), draw(st.sampled_from([0.01, 0.1, 1.0]))),
        max_head_tokens=draw(st.sampled_from([None, None, 0, 2 * page_size, 2 * page_size + 1])),
        max_lengths=draw(st.sampled_from([0, 1, 2, 8])),
    )


def _per_layer(num_layers: int, values: list[float]) -> st.SearchStrategy[list[float]]:
    return st.lists(st.sampled_from(values), min_size=num_layers, max_size=num_layers)


def is_allowed(problem: RestoreProblem, head_ends: Sequence[int]) -> bool:
    """Whether a plan may have these head ends, one per layer: all that ``check`` asks for."""
    return len(head_ends) == problem.num_layers and bool(
        RestoreTiming(problem).allowed(np.array([head_ends], np.int64))[0]
    )


def check(problem: RestoreProblem, head_ends: Sequence[int]) -> None:
    """Raises RestoreError that says which rule ``head_ends`` break, if they do."""
    ends, timing = np.array(head_ends, np.int64), RestoreTiming(problem)
    page, device, total = problem.page_size, problem.device_tokens, problem.total_tokens
    if (ends[1:] > ends[:-1]).any():
        raise RestoreError(f"heads grow from layer to layer: {list(head_ends)}")
    if (ends % page != 0).any():
        raise RestoreError(f"heads end inside a page of {page} tokens: {list(head_ends)}")
    if ends[0] > total or ends[-1] < device:
        raise RestoreError(f"heads end outside [{device}, {total}]: {list(head_ends)}")
    if ends[0] > timing.highest:
        raise RestoreError(f"a head ends at {ends[0]}, the limit of head tokens allows {timing.highest}")
    if (ends < timing.lowest).any():
        layer = int((ends < timing.lowest).argmax())
        raise RestoreError(
            f"the head of layer {layer} ends at {ends[layer]}, stored is what follows {timing.lowest[layer]}"
        )
    lengths = int(timing.num_lengths(ends[None])[0])
    if lengths > problem.max_lengths:
        raise RestoreError(f"{lengths} different lengths of heads, {problem.max_lengths} are allowed")
