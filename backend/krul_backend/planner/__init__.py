"""Decides, layer by layer, which part of a prefix is recomputed and which is loaded.

It takes measured costs and the sizes of a prefix, and returns for each layer the token up to which the layer
recomputes. It uses numbers only, no torch and no engine. The engine asks it for each returning prefix, and
when it stores a turn, so that nothing is stored that no return would load.
"""

from krul_backend.planner.calibration import OnlineCosts, fit_compute, fit_tier, load_costs, save_costs
from krul_backend.planner.interface import (
    NO_DECODING,
    ComputeCost,
    DecodeCost,
    RestoreCosts,
    RestorePlan,
    RestorePlanner,
    RestoreProblem,
    StoredRun,
    TierCost,
)
from krul_backend.planner.planners import PLANNERS, allocate, make_planner
from krul_backend.planner.timing import RestoreTiming
