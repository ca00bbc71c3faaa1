"""Planners by the names that a configuration uses."""

from __future__ import annotations

from collections.abc import Callable

from krul_backend.errors import RestoreError
from krul_backend.planner.full_load import FullLoadPlanner
from krul_backend.planner.full_recompute import FullRecomputePlanner
from krul_backend.planner.interface import RestorePlanner
from krul_backend.planner.optimal import OptimalPlanner
from krul_backend.planner.pyramid import PyramidPlanner
from krul_backend.planner.uniform import UniformPlanner

PLANNERS: dict[str, Callable[[], RestorePlanner]] = {
    OptimalPlanner.name: OptimalPlanner,
    FullLoadPlanner.name: FullLoadPlanner,
    FullRecomputePlanner.name: FullRecomputePlanner,
    UniformPlanner.name: UniformPlanner,
    PyramidPlanner.name: PyramidPlanner,
}


def make_planner(name: str) -> RestorePlanner:
    """Raises RestoreError for an unknown name."""
    if name not in PLANNERS:
        raise RestoreError(f"planner {name!r} is unknown (accepted: {', '.join(PLANNERS)})")
    return PLANNERS[name]()
