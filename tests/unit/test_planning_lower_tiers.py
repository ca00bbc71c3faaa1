"""Plans for what lies in tiers below DRAM: by their costs, or not at all where these are not known."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from krul_backend.planner.interface import ComputeCost, TierCost
from krul_backend.planner.planners import LocalSearchPlanner
from krul_backend.planner.timing import FrontPart, RestoreTiming
from krul_backend.tiers.common.interface import DRAM_TIER, LowerCopy
from krul_sglang.engine.restore import restore_planning
from krul_sglang.engine.restore.segment_reader import SegmentReader
from tests.support.planning_builders import (
    TOKEN_BYTES,
    HeadsPlanner,
    OneCannotRead,
    costs_of,
    leased,
    lowest_heads,
    no_heads,
    planning_of,
)
from tests.support.present import present
from tests.support.segment_builders import DEVICE_TOKENS, NUM_LAYERS


def sunk(slices: Sequence[SegmentReader], tier: str = "ssd", first: int = 1) -> list[SegmentReader]:
    """From slice ``first`` on they lie in a lower tier: no blocks yet."""
    return [
        part
        if number < first
        else SegmentReader(
            replace(part.source, tier=tier, blocks=(), spans=()), part.decoder, part.num_tokens
        )
        for number, part in enumerate(slices)
    ]


def in_part(slices: Sequence[SegmentReader], num_tokens: int) -> list[SegmentReader]:
    """Of each slice DRAM lacks the first tokens; the SSD has them."""
    parts = []
    for part in slices:
        header = part.source.header
        held = (part.first_token + num_tokens,) * NUM_LAYERS
        source = replace(
            part.source,
            header=replace(header, layer_first_token=held),
            lower=LowerCopy("ssd", header.layer_first_token),
        )
        parts.append(SegmentReader(source, part.decoder, part.num_tokens))
    return parts


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
    planned = present(planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1))
    (problem,) = planner.problems
    assert [run.tier for run in problem.runs] == [DRAM_TIER, "ssd", "mooncake"]
    # On its way a block passes through DRAM: the slower of both.
    assert problem.costs.tiers == {
        DRAM_TIER: TierCost(0.0, 1.0),
        "ssd": TierCost(0.25, 3.0),
        "mooncake": TierCost(0.5, 1.0),
    }
    in_dram, on_ssd, on_mooncake = (NUM_LAYERS * TOKEN_BYTES * tokens for tokens in (16, 20, 12))
    latencies_s = NUM_LAYERS * (0.25 + 0.5)
    assert planned.forecast.load_s == pytest.approx(in_dram + 3.0 * on_ssd + on_mooncake + latencies_s)


def test_blocks_are_read_to_their_ends_however_few_tokens_are_wanted() -> None:
    planner = HeadsPlanner(no_heads)
    planning = planning_of(planner, tier_costs=AskedTiers({"ssd": TierCost(0.0, 1.0)}))
    few = leased(planning, num_tokens=40)
    assert (few[-1].num_tokens, few[-1].source.header.num_tokens) == (4, 12)
    for slices in (few, sunk(few, first=2)):
        assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is not None
        last = planner.problems[-1].runs[-1]
        assert 4 * sum(last.layer_token_bytes) == pytest.approx(NUM_LAYERS * TOKEN_BYTES * 12)


@pytest.mark.parametrize(("byte_s", "is_loaded"), [(1e-6, True), (1.0, False)])
def test_the_plan_follows_the_costs_of_the_lower_tier(byte_s: float, is_loaded: bool) -> None:
    tiers = AskedTiers({"ssd": TierCost(0.0, byte_s)})
    # Heads are a little slower than the engine's own forward, as they are.
    costs = replace(costs_of(1.0, 1e-6), head=ComputeCost(0.0, 1.1, 0.0))
    planning = planning_of(LocalSearchPlanner(), costs=costs, tier_costs=tiers)
    slices = sunk(leased(planning), first=0)
    planned = planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=4)
    assert (planned is not None) == is_loaded


def test_what_dram_lacks_costs_what_its_tier_costs() -> None:
    planner = HeadsPlanner(no_heads)
    tiers = AskedTiers({"ssd": TierCost(0.25, 3.0)})
    planning = planning_of(planner, costs=costs_of(byte_s=1.0), tier_costs=tiers)
    whole = leased(planning)
    parts = in_part(whole, 8)
    planned = present(planning.plan(parts, device_tokens=DEVICE_TOKENS, new_tokens=1))
    (problem,) = planner.problems
    assert lowest_heads(problem) == [DEVICE_TOKENS] * NUM_LAYERS
    assert [run.front_end for run in problem.runs] == [
        (run.first_token + 8,) * NUM_LAYERS for run in problem.runs
    ]
    num_bytes, num_front_bytes = (NUM_LAYERS * TOKEN_BYTES * tokens for tokens in (48, 8 * len(parts)))
    # What comes from the disk passes through DRAM, like all else.
    expected_s = num_bytes + 2.0 * num_front_bytes + 0.25 * NUM_LAYERS * len(parts)
    assert planned.forecast.load_s == pytest.approx(expected_s)
    # Heads that end where DRAM begins leave nothing for the disk.
    timing = RestoreTiming(problem)
    ends = np.array([[DEVICE_TOKENS + tokens] * NUM_LAYERS for tokens in (4, 8)])
    of_fronts = [part.seconds(ends).sum(axis=1) for part in timing.load_parts if isinstance(part, FrontPart)]
    assert of_fronts[0].tolist() == pytest.approx([NUM_LAYERS * (0.25 + 2.0 * 4 * TOKEN_BYTES), 0.0])


@pytest.mark.parametrize(("byte_s", "is_read"), [(1e-6, True), (100.0, False)])
def test_heads_grow_shorter_than_what_dram_lacks_if_its_tier_is_fast(byte_s: float, is_read: bool) -> None:
    tiers = AskedTiers({"ssd": TierCost(0.0, byte_s)})
    planning = planning_of(LocalSearchPlanner(), costs=costs_of(1.0, 1e-6), tier_costs=tiers)
    planned = present(
        planning.plan(in_part(leased(planning), 8)[:1], device_tokens=DEVICE_TOKENS, new_tokens=4)
    )
    assert (planned.plan.head_ends[-1] < DEVICE_TOKENS + 8) == is_read


def test_what_dram_lacks_is_computed_if_the_costs_of_its_tier_are_not_known() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner)
    planned = present(
        planning.plan(in_part(leased(planning), 8)[:1], device_tokens=DEVICE_TOKENS, new_tokens=1)
    )
    assert planned.plan.head_ends == (DEVICE_TOKENS + 8,) * NUM_LAYERS


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

    def plan(parts: list[SegmentReader]) -> float | None:
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


def test_a_tier_that_one_rank_does_not_know_is_loaded_from_by_none() -> None:
    agreement = OneCannotRead(other_bounds=[0.0] * NUM_LAYERS)
    planning = planning_of(HeadsPlanner(no_heads), agreement=agreement)
    slices = leased(planning)
    assert planning.plan(sunk(slices), device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    # It took part in the agreement with nothing, so that the others refuse, too, and nobody sends a plan.
    assert (agreement.num_nothing, agreement.sent) == (1, [])
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is not None
