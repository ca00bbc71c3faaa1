"""Planners that are only compared with, and an SGLang server that has them.

``python -m benchmarks.planners`` takes the arguments of ``sglang.launch_server``.
"""

from __future__ import annotations

import runpy

from krul_backend.planner.interface import RestorePlan, RestorePlanner, RestoreProblem
from krul_backend.planner.planners import PLANNERS, HeadsPlanner, LocalSearchPlanner, uniform_heads


class FullRecomputePlanner(RestorePlanner):
    """The engine computes the whole prefix itself (the paper's "full KV recompute")."""

    name = "full-recompute"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        return RestorePlan.recompute(problem)


COMPARED: dict[str, RestorePlanner] = {
    planner.name: planner for planner in (FullRecomputePlanner(), HeadsPlanner("uniform", uniform_heads))
}
# Judged by its search: the earliest plan that it finds, however little heads gain.
ALL_PLANNERS = {**PLANNERS, LocalSearchPlanner.name: LocalSearchPlanner(0.0, 0.0), **COMPARED}


def register() -> None:
    """Let the option ``planner`` have these names in this process."""
    PLANNERS.update(COMPARED)


# SGLang's processes are spawned: each imports the module that the first one was started with.
if __name__ in ("__main__", "__mp_main__"):
    register()
if __name__ == "__main__":
    runpy.run_module("sglang.launch_server", run_name="__main__")
