"""The planners, by the names that a configuration uses."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from krul_backend.errors import RestoreError
from krul_backend.planner.head_search import full_load_heads, pyramid_heads, search_heads, uniform_heads
from krul_backend.planner.interface import (
    RestoreCosts,
    RestorePlan,
    RestorePlanner,
    RestoreProblem,
    StoredRun,
)
from krul_backend.planner.timing import RestoreTiming, Tokens


class LocalSearchPlanner(RestorePlanner):
    """The earliest end that a local search finds, over head ends and recomputation.

    A restore must end earlier than recomputation by its overhead (``RestoreCosts.overhead_s``), too. The plan
    never ends later than those of full load, uniform and pyramid.
    """

    name = "local-search"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        timing, recompute = RestoreTiming(problem), RestorePlan.recompute(problem)
        if not timing.is_possible:
            return recompute
        plan = timing.plan(search_heads(timing))
        return recompute if recompute.end_s < plan.end_s + problem.costs.overhead_s else plan


class FullRecomputePlanner(RestorePlanner):
    """The engine computes the whole prefix itself (the paper's "full KV recompute")."""

    name = "full-recompute"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        return RestorePlan.recompute(problem)


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
        FullRecomputePlanner(),
        HeadsPlanner("uniform", uniform_heads),
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
