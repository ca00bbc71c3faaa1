"""Planners, costs and ranks without an engine, for the tests of planning restores."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise

import torch

from krul_backend.codec.registry import ModelCodecs
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import (
    ComputeCost,
    RestoreCosts,
    RestorePlan,
    RestorePlanner,
    RestoreProblem,
    TierCost,
)
from krul_backend.planner.timing import RestoreTiming
from krul_backend.strategy.strategy import Strategy
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.restore.restore_planning import DecodeCosts, RestorePlanning
from krul_sglang.engine.restore.segment_reader import SegmentReader
from tests.support.segment_builders import (
    BOUNDS,
    CODEC,
    DEVICE_TOKENS,
    END,
    NUM_LAYERS,
    PAGE_SIZE,
    Heads,
    lease_of,
    stored,
)

NUM_TOKENS = END - DEVICE_TOKENS
ALONE = RankAgreement(None, 1)
NO_DECODE_COSTS = DecodeCosts({}, {})
NATIVE = Strategy.from_pairs(NUM_LAYERS)
EACH_ALONE = tuple(range(NUM_LAYERS))
TOKEN_BYTES = 2 * (8 + 4) * 4
"""Of a native token in one layer."""


def costs_of(token_s: float = 1.0, byte_s: float = 1.0) -> RestoreCosts:
    compute = ComputeCost(0.0, token_s, 0.0)
    return RestoreCosts(compute, compute, {DRAM_TIER: TierCost(0.0, byte_s)})


class HeadsPlanner(RestorePlanner):
    """Takes the heads that a function chooses; remembers the problems."""

    name = "fixed"

    def __init__(self, heads_of: Callable[[RestoreProblem], Sequence[int]]) -> None:
        self.problems: list[RestoreProblem] = []
        self._heads_of = heads_of

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        self.problems.append(problem)
        return RestorePlan(tuple(self._heads_of(problem)), 1.0)


def longest_heads(problem: RestoreProblem) -> Heads:
    """As long as the limit of head tokens allows, in every layer."""
    return (RestoreTiming(problem).highest,) * NUM_LAYERS


def no_heads(problem: RestoreProblem) -> Heads:
    return (problem.device_tokens,) * NUM_LAYERS


def planning_of(
    planner: RestorePlanner,
    *,
    costs: RestoreCosts | None = None,
    decode_costs: DecodeCosts = NO_DECODE_COSTS,
    agreement: RankAgreement = ALONE,
    max_head_tokens: int = 1000,
    max_new_tokens: int = 1000,
    tier_costs: Callable[[], Mapping[str, TierCost]] = dict,
    codec: ModelCodecs = CODEC,
    state_bytes: int = 0,
) -> RestorePlanning:
    return RestorePlanning(
        planner,
        OnlineCosts(costs_of() if costs is None else costs),
        decode_costs,
        codec,
        agreement,
        page_size=PAGE_SIZE,
        max_head_tokens=max_head_tokens,
        max_new_tokens=max_new_tokens,
        tier_costs=tier_costs,
        state_bytes=state_bytes,
    )


def leased(
    planning: RestorePlanning,
    kind: str = "native",
    kept_heads: Heads | None = None,
    bounds: Sequence[int] = BOUNDS,
    num_tokens: int = NUM_TOKENS,
) -> list[SegmentReader]:
    segments = tuple(stored(kind, start, end, kept_heads) for start, end in pairwise(bounds))
    slices = planning.open(lease_of(segments, DEVICE_TOKENS), num_tokens)
    assert slices is not None
    return slices


def lowest_heads(problem: RestoreProblem) -> list[int]:
    return [int(end) for end in RestoreTiming(problem).lowest]


class FakeAgreement(RankAgreement):
    """One of two ranks; the other one is this test."""

    def __init__(self, *, other_bounds: Sequence[float], first_ranks: bytes | None = None) -> None:
        super().__init__(None, num_ranks=2)
        self.gathered: list[list[float]] = []
        self.sent: list[bytes] = []
        self.other_moved: tuple[float, float] | None = None
        self._other_bounds = other_bounds
        self._first_ranks = first_ranks

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor]:
        assert values is not None
        # The bounds of all layers, then where a moved run lies.
        assert tuple(values.shape) == tuple(shape) == (NUM_LAYERS + 2,)
        self.gathered.append(values[:NUM_LAYERS].tolist())
        moved = values[NUM_LAYERS:] if self.other_moved is None else self.other_moved
        return [values, torch.tensor([*self._other_bounds, *moved], dtype=torch.float64)]

    def holds_on_all(self, flag: bool) -> bool:
        return flag

    def broadcast(self, content: bytes) -> bytes:
        self.sent.append(content)
        return content if self._first_ranks is None else self._first_ranks


class OneCannotRead(FakeAgreement):
    """As ``RankAgreement``: nothing for anybody if a rank has nothing; the other rank has something."""

    num_nothing = 0

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:  # type: ignore[override]
        if values is None:
            self.num_nothing += 1
            return None
        return super().gather(values, shape)
