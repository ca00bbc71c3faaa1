"""From leases to plans on one rank and on several, and what is left out when a turn is stored."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import orjson
import pytest
import torch

from krul_backend.restore.calibration import OnlineCosts
from krul_backend.restore.costs import ComputeCost, RestoreCosts, TierCost
from krul_backend.restore.full_load import FullLoadPlanner
from krul_backend.restore.full_recompute import FullRecomputePlanner
from krul_backend.restore.interface import RestorePlan, RestorePlanner
from krul_backend.restore.optimal import OptimalPlanner
from krul_backend.restore.problem import RestoreProblem
from krul_backend.restore.timing import RestoreTiming
from krul_backend.store.interface import DRAM_TIER
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine import restore_planning
from krul_sglang.engine.agreement import RankAgreement
from krul_sglang.engine.decode_costs import PAIR_FACTOR, DecodeCosts
from krul_sglang.engine.planned_allocation import EXPECTED_NEW_TOKENS, PlannedAllocation
from krul_sglang.engine.restore_planning import RestorePlanning
from krul_sglang.engine.segment_reader import OpenSlice
from tests.unit.engine_builders import PATIENCE_S, in_threads
from tests.unit.segment_builders import (
    BOUNDS,
    DEVICE_TOKENS,
    END,
    KINDS,
    NUM_LAYERS,
    PAGE_SIZE,
    Heads,
    codec_of,
    lease_of,
    stored,
)

NUM_TOKENS = END - DEVICE_TOKENS
ALONE = RankAgreement(None, 1)
NO_DECODING = DecodeCosts({}, {})
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
    kind: str = "native",
    *,
    costs: RestoreCosts | None = None,
    decode_costs: DecodeCosts = NO_DECODING,
    agreement: RankAgreement = ALONE,
    max_head_tokens: int = 1000,
    max_new_tokens: int = 1000,
    tier_costs: Callable[[], Mapping[str, TierCost]] = dict,
) -> RestorePlanning:
    return RestorePlanning(
        planner,
        OnlineCosts(costs_of() if costs is None else costs),
        decode_costs,
        codec_of(kind),
        agreement,
        page_size=PAGE_SIZE,
        max_head_tokens=max_head_tokens,
        max_new_tokens=max_new_tokens,
        tier_costs=tier_costs,
    )


def leased(
    planning: RestorePlanning,
    kind: str = "native",
    kept_heads: Heads | None = None,
    bounds: Sequence[int] = BOUNDS,
    num_tokens: int = NUM_TOKENS,
) -> list[OpenSlice]:
    segments = tuple(stored(kind, start, end, kept_heads) for start, end in pairwise(bounds))
    return planning.open(lease_of(segments, DEVICE_TOKENS), num_tokens)


def lowest_heads(problem: RestoreProblem) -> list[int]:
    return [int(end) for end in RestoreTiming(problem).lowest]


# ---- one rank ----


def test_a_problem_says_what_is_stored_and_where() -> None:
    planner = HeadsPlanner(no_heads)
    decode_costs = DecodeCosts({Precision.NATIVE: 0.25}, {Precision.NATIVE: 0.5})
    planning = planning_of(planner, "slerp", decode_costs=decode_costs, max_head_tokens=30)
    slices = leased(planning, "slerp", num_tokens=40)
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=7) is not None
    (problem,) = planner.problems
    assert (problem.device_tokens, problem.total_tokens, problem.new_tokens) == (8, 48, 7)
    assert (problem.num_layers, problem.page_size, problem.max_head_tokens) == (NUM_LAYERS, PAGE_SIZE, 30)
    assert [(run.first_token, run.end_token) for run in problem.runs] == [(8, 24), (24, 44), (44, 48)]
    for run, part in zip(problem.runs, slices, strict=True):
        header = part.source.header
        assert run.tier == DRAM_TIER
        # Layers 0 and 2, 1 and 3 are pairs: the direction in the lower layer's block is needed by both.
        assert run.last_use == (2, 3, 2, 3)
        assert run.decode_token_s == (0.5,) * NUM_LAYERS
        assert run.stored_from == (run.first_token,) * NUM_LAYERS
        num_bytes = [per_token * header.num_tokens for per_token in run.layer_token_bytes]
        assert num_bytes == pytest.approx(header.layer_num_bytes)


def test_what_was_left_out_bounds_the_plan() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner)
    slices = leased(planning, kept_heads=(40, 24, 16, 0))
    planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1)
    (problem,) = planner.problems
    assert [run.stored_from for run in problem.runs] == [(24, 24, 16, 8), (40, 24, 24, 24), (44,) * 4]
    assert planned is not None
    assert planned.plan.head_ends == (40, 24, 16, 8)


def test_a_pair_can_be_loaded_from_where_both_blocks_are_kept() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner, "slerp")
    planning.plan(
        leased(planning, "slerp", kept_heads=(24, 24, 8, 16)), device_tokens=DEVICE_TOKENS, new_tokens=1
    )
    first = planner.problems[0].runs[0]
    # The lower layers' blocks are kept from the upper layers' heads on, and can be loaded from there.
    assert first.stored_from == (8, 16, 8, 16)


def test_a_plan_that_loses_is_refused() -> None:
    planning = planning_of(FullRecomputePlanner())
    assert planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    counters = planning.counters
    assert (counters.refused, counters.loads, counters.prefix_tokens) == (1, 0, 0)


@pytest.mark.parametrize(("token_s", "byte_s", "is_loaded"), [(1.0, 1e-6, True), (1e-6, 1.0, False)])
def test_the_optimum_decides_by_the_costs(token_s: float, byte_s: float, is_loaded: bool) -> None:
    planning = planning_of(OptimalPlanner(), costs=costs_of(token_s, byte_s))
    planned = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4)
    assert (planned is not None) == is_loaded
    assert (planning.counters.loads, planning.counters.refused) == (is_loaded, not is_loaded)
    if planned is not None:
        assert planned.plan.head_ends == (DEVICE_TOKENS,) * NUM_LAYERS


def test_costs_that_were_learned_change_the_next_plan() -> None:
    planning = planning_of(OptimalPlanner(), costs=costs_of(1.0, 0.9 / TOKEN_BYTES))
    first = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4)
    for _ in range(50):
        planning.costs.observe_tier(DRAM_TIER, 1.0, 4.0)
    later = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4)
    assert first is not None
    assert later is None or sum(later.plan.head_ends) > sum(first.plan.head_ends)


def test_a_forecast_is_what_the_parts_take_alone() -> None:
    planning = planning_of(HeadsPlanner(lambda problem: (20, 12, 8, 8)), costs=costs_of(2.0, 0.5))
    planned = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=3)
    assert planned is not None
    num_head_tokens = (20 - 8) + (12 - 8)
    num_loaded_tokens = NUM_LAYERS * NUM_TOKENS - num_head_tokens
    assert planned.forecast.head_s == pytest.approx(2.0 * num_head_tokens)
    assert planned.forecast.load_s == pytest.approx(0.5 * TOKEN_BYTES * num_loaded_tokens)
    assert planning.counters.head_tokens == 12
    assert planning.counters.prefix_tokens == NUM_TOKENS


def test_a_request_without_new_tokens_still_has_a_forward() -> None:
    """The last token of a prompt is always computed, and SGLang may count it as part of the prefix."""
    planner = HeadsPlanner(no_heads)
    planning = planning_of(planner)
    planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=0)
    assert planner.problems[0].new_tokens == 1


def test_only_the_first_chunk_of_a_long_prompt_waits_for_the_restore() -> None:
    planner = HeadsPlanner(no_heads)
    planning = planning_of(planner, max_new_tokens=16)
    for new_tokens in (15, 16, 400):
        planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=new_tokens)
    assert [problem.new_tokens for problem in planner.problems] == [15, 16, 16]


def test_requests_of_a_batch_share_the_limit_of_head_tokens() -> None:
    planner = HeadsPlanner(longest_heads)
    planning = planning_of(planner, max_head_tokens=NUM_TOKENS + 20)
    slices = leased(planning)
    head_tokens = []
    for _ in range(3):
        planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1)
        assert planned is not None
        head_tokens.append(planned.plan.head_ends[0] - DEVICE_TOKENS)
    assert head_tokens == [NUM_TOKENS, 20, 0]
    assert [problem.max_head_tokens for problem in planner.problems] == [NUM_TOKENS + 20, 20, 0]
    planning.start_batch()
    planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1)
    assert planned is not None
    assert planned.plan.head_ends[0] == END


def test_a_refused_request_uses_nothing_of_the_limit() -> None:
    class EverySecond(HeadsPlanner):
        def plan(self, problem: RestoreProblem) -> RestorePlan:
            plan = super().plan(problem)
            return RestorePlan.recompute(problem) if len(self.problems) % 2 else plan

    planner = EverySecond(longest_heads)
    planning = planning_of(planner, max_head_tokens=20)
    slices = leased(planning)
    plans = [planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) for _ in range(3)]
    assert [planned is None for planned in plans] == [True, False, True]
    assert [problem.max_head_tokens for problem in planner.problems] == [20, 20, 0]


def test_a_conversation_that_needs_longer_heads_than_allowed_is_refused() -> None:
    planning = planning_of(FullLoadPlanner(), max_head_tokens=20)
    slices = leased(planning, kept_heads=(32, 32, 32, 32))
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert planning.counters.refused == 1


# ---- tiers below DRAM ----


def sunk(slices: Sequence[OpenSlice], tier: str = "ssd", first: int = 1) -> list[OpenSlice]:
    """From slice ``first`` on they lie in a lower tier: no blocks yet."""
    return [
        part if number < first else replace(part, source=replace(part.source, tier=tier, blocks=(), spans=()))
        for number, part in enumerate(slices)
    ]


class AskedTiers:
    """What a store says of its lower tiers; counts how often it was asked."""

    def __init__(self, costs: Mapping[str, TierCost]) -> None:
        self.costs = costs
        self.num_asked = 0

    def __call__(self) -> Mapping[str, TierCost]:
        self.num_asked += 1
        return self.costs


class Clock:
    """Stands for the module ``time`` in ``restore_planning``."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(restore_planning, "time", clock)
    return clock


def test_what_lies_in_a_lower_tier_is_planned_by_its_costs() -> None:
    planner = HeadsPlanner(no_heads)
    tiers = AskedTiers({"ssd": TierCost(0.25, 3.0), "mooncake": TierCost(0.5, 0.1)})
    planning = planning_of(planner, costs=costs_of(byte_s=1.0), tier_costs=tiers)
    slices = sunk(leased(planning))
    slices = [slices[0], slices[1], *sunk(slices[2:], "mooncake", 0)]
    planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1)
    (problem,) = planner.problems
    assert [run.tier for run in problem.runs] == [DRAM_TIER, "ssd", "mooncake"]
    # On its way a block passes through DRAM: the slower of both.
    assert problem.costs.tiers == {
        DRAM_TIER: TierCost(0.0, 1.0),
        "ssd": TierCost(0.25, 3.0),
        "mooncake": TierCost(0.5, 1.0),
    }
    assert planned is not None
    in_dram, on_ssd, on_mooncake = (NUM_LAYERS * TOKEN_BYTES * tokens for tokens in (16, 20, 12))
    latencies_s = NUM_LAYERS * (0.25 + 0.5)
    assert planned.forecast.load_s == pytest.approx(in_dram + 3.0 * on_ssd + on_mooncake + latencies_s)


@pytest.mark.parametrize(("byte_s", "is_loaded"), [(1e-6, True), (1.0, False)])
def test_the_optimum_decides_by_the_costs_of_the_lower_tier(byte_s: float, is_loaded: bool) -> None:
    tiers = AskedTiers({"ssd": TierCost(0.0, byte_s)})
    # Heads are a little slower than the engine's own forward, as they are.
    costs = replace(costs_of(1.0, 1e-6), head=ComputeCost(0.0, 1.1, 0.0))
    planning = planning_of(OptimalPlanner(), costs=costs, tier_costs=tiers)
    slices = sunk(leased(planning), first=0)
    planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=4)
    assert (planned is not None) == is_loaded


def test_a_tier_of_unknown_costs_is_not_loaded_from() -> None:
    planner = HeadsPlanner(no_heads)
    planning = planning_of(planner, tier_costs=AskedTiers({"ssd": TierCost(0.0, 1.0)}))
    slices = leased(planning)
    unknown = sunk(slices, "tape")
    assert planning.plan(unknown, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert (planning.counters.refused, planning.counters.loads, planner.problems) == (1, 0, [])
    for known in (slices, sunk(slices)):
        assert planning.plan(known, device_tokens=DEVICE_TOKENS, new_tokens=1) is not None


def test_costs_of_tiers_are_asked_when_needed_and_seldom(clock: Clock) -> None:
    tiers = AskedTiers({"ssd": TierCost(0.0, 3.0)})
    planner = HeadsPlanner(no_heads)
    planning = planning_of(planner, tier_costs=tiers)
    slices = leased(planning)

    def plan(parts: list[OpenSlice]) -> float | None:
        planning.plan(parts, device_tokens=DEVICE_TOKENS, new_tokens=1)
        cost = planner.problems[-1].costs.tiers.get("ssd")
        return None if cost is None else cost.byte_s

    assert plan(slices) is None
    assert tiers.num_asked == 0
    assert plan(sunk(slices)) == 3.0
    tiers.costs = {"ssd": TierCost(0.0, 7.0)}
    clock.now_s += 4.9
    assert plan(sunk(slices)) == 3.0
    assert tiers.num_asked == 1
    clock.now_s += 0.2
    assert plan(slices) == 3.0
    assert plan(sunk(slices)) == 7.0
    assert tiers.num_asked == 2


def test_a_store_that_knows_no_costs_is_asked_again_later(clock: Clock) -> None:
    tiers = AskedTiers({})
    planning = planning_of(HeadsPlanner(no_heads), tier_costs=tiers)
    slices = sunk(leased(planning))
    for _ in range(3):
        assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert tiers.num_asked == 1
    tiers.costs = {"ssd": TierCost(0.0, 1.0)}
    clock.now_s += 5.0
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is not None


# ---- several ranks ----


class FakeAgreement(RankAgreement):
    """One of two ranks; the other one is this test."""

    def __init__(self, *, other_bounds: Sequence[float], first_ranks: bytes | None = None) -> None:
        super().__init__(None, num_ranks=2)
        self.gathered: list[list[float]] = []
        self.sent: list[bytes] = []
        self._other_bounds = other_bounds
        self._first_ranks = first_ranks

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor]:
        assert values is not None
        assert tuple(values.shape) == tuple(shape) == (NUM_LAYERS,)
        self.gathered.append(values.tolist())
        return [values, torch.tensor(self._other_bounds, dtype=torch.float64)]

    def broadcast(self, content: bytes) -> bytes:
        self.sent.append(content)
        return content if self._first_ranks is None else self._first_ranks


def test_the_rank_that_has_least_bounds_the_plan_of_all() -> None:
    agreement = FakeAgreement(other_bounds=[44.0, 12.0, 0.0, 0.0])
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner, agreement=agreement)
    slices = leased(planning, kept_heads=(40, 24, 16, 0))
    planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1)
    assert agreement.gathered == [[40.0, 24.0, 16.0, 0.0]]
    assert planned is not None
    assert planned.plan.head_ends == (44, 24, 16, 8)
    for run in planner.problems[0].runs:
        assert all(run.first_token <= token <= run.end_token for token in run.stored_from)


def test_the_first_ranks_plan_is_everyones() -> None:
    others = orjson.dumps([[20, 12, 12, 8], 3.5, False])
    agreement = FakeAgreement(other_bounds=[0.0] * NUM_LAYERS, first_ranks=others)
    planning = planning_of(HeadsPlanner(longest_heads), agreement=agreement)
    planned = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=1)
    assert planned is not None
    assert planned.plan == RestorePlan((20, 12, 12, 8), 3.5)
    # What counts for the next request is what is really recomputed.
    assert planning.counters.head_tokens == 12
    assert [orjson.loads(sent)[0] for sent in agreement.sent] == [[END] * NUM_LAYERS]


def test_all_ranks_refuse_what_the_first_one_refuses() -> None:
    refused = orjson.dumps([[END] * NUM_LAYERS, 1.0, True])
    agreement = FakeAgreement(other_bounds=[0.0] * NUM_LAYERS, first_ranks=refused)
    planning = planning_of(HeadsPlanner(no_heads), agreement=agreement)
    assert planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert (planning.counters.refused, planning.counters.loads) == (1, 0)


class MeetingPoint:
    """Where two threads exchange what they have."""

    def __init__(self) -> None:
        self._barrier = threading.Barrier(2, timeout=PATIENCE_S)
        self._values: dict[int, object] = {}

    def exchange(self, rank: int, value: object) -> list[object]:
        self._values[rank] = value
        self._barrier.wait()
        values = [self._values[0], self._values[1]]
        self._barrier.wait()
        return values


class ThreadAgreement(RankAgreement):
    """Two ranks in two threads; tensors of different shapes do not meet, as in a real collective."""

    def __init__(self, rank: int, meeting: MeetingPoint) -> None:
        super().__init__(None, num_ranks=2)
        self._rank = rank
        self._meeting = meeting

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor]:
        of_ranks = [part for part in self._meeting.exchange(self._rank, values) if torch.is_tensor(part)]
        assert [tuple(part.shape) for part in of_ranks] == [tuple(shape)] * 2
        return of_ranks

    def broadcast(self, content: bytes) -> bytes:
        first = self._meeting.exchange(self._rank, content)[0]
        assert isinstance(first, bytes)
        return first


def test_ranks_whose_segments_begin_elsewhere_come_to_one_plan() -> None:
    """One rank evicted and stored again, in one segment, what the other one holds in two."""
    meeting = MeetingPoint()
    planners = [HeadsPlanner(lowest_heads), HeadsPlanner(lowest_heads)]
    plannings = [
        planning_of(planner, agreement=ThreadAgreement(rank, meeting))
        for rank, planner in enumerate(planners)
    ]
    slices = [
        leased(plannings[0], kept_heads=(40, 12, 12, 0)),
        leased(plannings[1], kept_heads=(32, 24, 8, 0), bounds=(0, 48, END)),
    ]
    with in_threads() as start:
        running = [
            start(lambda p=planning, s=part: p.plan(s, device_tokens=DEVICE_TOKENS, new_tokens=1))  # type: ignore[misc]
            for planning, part in zip(plannings, slices, strict=True)
        ]
        plans = [plan.result(PATIENCE_S) for plan in running]
    assert plans[0] is not None
    assert plans[1] is not None
    assert plans[0].plan == plans[1].plan
    # Groups of eight tokens are kept: those from 8 on for a head that ends at 12.
    assert plans[0].plan.head_ends == (40, 24, 8, 8)
    assert lowest_heads(planners[0].problems[0]) == lowest_heads(planners[1].problems[0])


# ---- what is left out when a turn is stored ----


def allocation_of(
    planner: RestorePlanner,
    agreement: RankAgreement = ALONE,
    decode_costs: DecodeCosts = NO_DECODING,
    costs: RestoreCosts | None = None,
) -> PlannedAllocation:
    return PlannedAllocation(
        planner,
        OnlineCosts(costs_of() if costs is None else costs),
        decode_costs,
        agreement,
        page_size=PAGE_SIZE,
        max_head_tokens=24,
    )


def test_an_allocation_plans_the_return_of_the_whole_conversation() -> None:
    planner = HeadsPlanner(lambda problem: (16, 8, 8, 0))
    decode_costs = DecodeCosts({}, {Precision.INT4: 0.5})
    strategy = KINDS["slerp-int4"][1]
    heads = allocation_of(planner, decode_costs=decode_costs).head_ends(
        40, (4.0, 3.0, 3.0, 1.0), (3, 1, 2, 3), strategy
    )
    assert heads == (16, 8, 8, 0)
    (problem,) = planner.problems
    (run,) = problem.runs
    assert (problem.device_tokens, problem.total_tokens, problem.new_tokens) == (0, 40, EXPECTED_NEW_TOKENS)
    assert (problem.page_size, problem.max_head_tokens) == (PAGE_SIZE, 24)
    assert (run.first_token, run.end_token, run.stored_from) == (0, 40, (0,) * NUM_LAYERS)
    assert run.layer_token_bytes == (4.0, 3.0, 3.0, 1.0)
    assert run.last_use == (3, 1, 2, 3)
    assert run.decode_token_s == (0.5, 0.0, 0.0, 0.5)


@pytest.mark.parametrize(
    "planner", [FullRecomputePlanner(), HeadsPlanner(lambda problem: (problem.total_tokens,) * NUM_LAYERS)]
)
def test_a_plan_that_loads_nothing_leaves_out_nothing(planner: RestorePlanner) -> None:
    heads = allocation_of(planner).head_ends(20, (1.0,) * NUM_LAYERS, EACH_ALONE, NATIVE)
    assert heads is None


@pytest.mark.parametrize(("decided", "expected"), [([16, 8, 8, 0], (16, 8, 8, 0)), (None, None)])
def test_the_first_ranks_allocation_is_everyones(decided: list[int] | None, expected: Heads | None) -> None:
    agreement = FakeAgreement(other_bounds=[], first_ranks=orjson.dumps(decided))
    allocation = allocation_of(HeadsPlanner(lambda problem: (4, 4, 4, 4)), agreement)
    assert allocation.head_ends(40, (1.0,) * NUM_LAYERS, EACH_ALONE, NATIVE) == expected
    assert agreement.sent == [b"[4,4,4,4]"]


def test_what_an_allocation_leaves_out_can_be_restored_within_the_limit() -> None:
    """By the same planner at the same costs: what it would recompute then is all that is missing."""
    costs = costs_of(token_s=TOKEN_BYTES * 0.5, byte_s=1.0)
    heads = allocation_of(OptimalPlanner(), costs=costs).head_ends(
        END, (float(TOKEN_BYTES),) * NUM_LAYERS, EACH_ALONE, NATIVE
    )
    assert heads is not None
    assert 0 < heads[0] <= 24
    planning = planning_of(OptimalPlanner(), costs=costs, max_head_tokens=24)
    segments = tuple(stored("native", start, end, heads) for start, end in pairwise(BOUNDS))
    slices = planning.open(lease_of(segments, 0), END)
    planned = planning.plan(slices, device_tokens=0, new_tokens=EXPECTED_NEW_TOKENS)
    assert planned is not None
    assert planned.plan.head_ends == heads


# ---- costs of decoding ----


def test_decoding_costs_follow_the_precision_and_the_pairs() -> None:
    costs = DecodeCosts({Precision.NATIVE: 0.0, Precision.INT8: 2.0}, {Precision.INT8: 7.0})
    strategy = Strategy.from_pairs(4, [(1, 2)], Precision.INT8)
    assert costs.token_s(strategy) == (2.0, 7.0, 7.0, 2.0)
    assert costs.token_s(Strategy.from_pairs(4)) == (0.0,) * 4


def test_what_was_not_measured_costs_as_much_as_the_slowest() -> None:
    costs = DecodeCosts({Precision.NATIVE: 0.0, Precision.INT8: 2.0, Precision.INT4: 3.0}, {})
    assert costs.token_s(Strategy.from_pairs(2, [], Precision.INT2)) == (3.0, 3.0)


def test_a_pair_that_was_not_measured_costs_more_than_its_layers() -> None:
    costs = DecodeCosts({Precision.NATIVE: 0.0, Precision.INT8: 2.0}, {Precision.NATIVE: 1.0})
    assert costs.token_s(Strategy.from_pairs(2, [(0, 1)], Precision.INT8)) == (2 * PAIR_FACTOR,) * 2
    # Measured as nothing is measured.
    free = DecodeCosts({Precision.INT8: 2.0}, {Precision.INT8: 0.0})
    assert free.token_s(Strategy.from_pairs(2, [(0, 1)], Precision.INT8)) == (0.0, 0.0)


def test_without_any_measurement_decoding_is_free() -> None:
    assert NO_DECODING.token_s(Strategy.from_pairs(2, [(0, 1)], Precision.INT4)) == (0.0, 0.0)


class OneCannotRead(FakeAgreement):
    """As ``RankAgreement``: nothing for anybody if a rank has nothing; the other rank has something."""

    num_nothing = 0

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:  # type: ignore[override]
        if values is None:
            self.num_nothing += 1
            return None
        return super().gather(values, shape)


def test_a_tier_that_one_rank_does_not_know_is_loaded_from_by_none() -> None:
    agreement = OneCannotRead(other_bounds=[0.0] * NUM_LAYERS)
    planning = planning_of(HeadsPlanner(no_heads), agreement=agreement)
    slices = leased(planning)
    assert planning.plan(sunk(slices), device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    # It took part in the agreement with nothing, so that the others refuse, too, and nobody sends a plan.
    assert (agreement.num_nothing, agreement.sent) == (1, [])
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is not None


def test_a_prefix_that_one_rank_cannot_read_is_loaded_by_none() -> None:
    agreement = OneCannotRead(other_bounds=[0.0] * NUM_LAYERS)
    planning = planning_of(HeadsPlanner(no_heads), agreement=agreement)
    assert planning.plan(None, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert (planning.counters.refused, agreement.sent) == (1, [])
    assert planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=1) is not None
