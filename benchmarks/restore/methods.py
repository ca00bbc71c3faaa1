"""What is compared: ways to store a conversation, and planners to restore it with."""

from __future__ import annotations

from dataclasses import dataclass

from benchmarks.baselines import RandomSelector
from krul_backend.strategy.selectors import Evidence, MiniCacheSelector, StrategySelector, UnsharedSelector
from krul_backend.strategy.strategy import Precision, Strategy

LAYER_RATIO = 0.5
"""``r_l``: the share of layers that share with another one, the paper's setting."""

SELECTORS: dict[str, StrategySelector] = {
    "native": UnsharedSelector(),
    "minicache": MiniCacheSelector(LAYER_RATIO),
    # Which layers a conversation pairs does not matter to the time that its restore takes, only that they
    # are anywhere in the model: with random weights a draw is as good as attention's word.
    "krul": RandomSelector(LAYER_RATIO),
    "krul-int4": RandomSelector(LAYER_RATIO, precision=Precision.INT4),
}


@dataclass(frozen=True)
class Method:
    """A row: ``strategy`` of ``SELECTORS``, ``planner`` of ``krul_backend.planner.planners``."""

    name: str
    strategy: str
    planner: str


METHODS = (
    Method("full-recompute", "native", "full-recompute"),
    Method("full-load", "native", "full-load"),
    Method("minicache-full-load", "minicache", "full-load"),
    Method("partial-recompute", "native", "uniform"),
    Method("native-planned", "native", "local-search"),
    Method("krul-pyramid", "krul", "pyramid"),
    Method("krul-planned", "krul", "local-search"),
    Method("krul-planned-int4", "krul-int4", "local-search"),
)


def strategies(num_layers: int) -> dict[str, Strategy]:
    """All strategies for a model of so many layers."""
    return {name: selector.select(Evidence(num_layers)) for name, selector in SELECTORS.items()}
