"""All ranks come to one plan, whatever each of them stores."""

from __future__ import annotations

import orjson
import pytest
import torch

from krul_backend.planner.interface import RestorePlan, RestorePlanner, RestoreProblem
from tests.support.engine_builders import PATIENCE_S, MeetingPoint, ThreadAgreement, in_threads
from tests.support.planning_builders import (
    FakeAgreement,
    HeadsPlanner,
    OneCannotRead,
    leased,
    longest_heads,
    lowest_heads,
    no_heads,
    planning_of,
)
from tests.support.present import present
from tests.support.segment_builders import DEVICE_TOKENS, END, NUM_LAYERS


def test_the_rank_that_has_least_bounds_the_plan_of_all() -> None:
    agreement = FakeAgreement(other_bounds=[44.0, 12.0, 0.0, 0.0])
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner, agreement=agreement)
    slices = leased(planning, kept_heads=(40, 24, 16, 0))
    planned = present(planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1))
    assert agreement.gathered == [[40.0, 24.0, 16.0, 0.0]]
    assert planned.plan.head_ends == (44, 24, 16, 8)
    for run in planner.problems[0].runs:
        assert all(run.first_token <= token <= run.end_token for token in run.stored_from)


def test_the_first_ranks_plan_is_everyones() -> None:
    others = orjson.dumps([[20, 12, 12, 8], 3.5, False])
    agreement = FakeAgreement(other_bounds=[0.0] * NUM_LAYERS, first_ranks=others)
    planning = planning_of(HeadsPlanner(longest_heads), agreement=agreement)
    planned = present(planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=1))
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


def test_a_prefix_that_one_rank_cannot_read_is_loaded_by_none() -> None:
    agreement = OneCannotRead(other_bounds=[0.0] * NUM_LAYERS)
    planning = planning_of(HeadsPlanner(no_heads), agreement=agreement)
    assert planning.plan(None, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert (planning.counters.refused, agreement.sent) == (1, [])
    assert planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=1) is not None


class ForgetfulPlanner(RestorePlanner):
    """Has no memory to plan with."""

    name = "forgetful"

    def plan(self, problem: RestoreProblem) -> RestorePlan:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_without_memory_to_plan_does_not_leave_the_other_waiting(rank: int) -> None:
    """The first rank's plan counts; of another one it does not matter whether it could have planned."""
    meeting = MeetingPoint()
    planners: list[RestorePlanner] = [HeadsPlanner(no_heads), HeadsPlanner(no_heads)]
    planners[rank] = ForgetfulPlanner()
    plannings = [
        planning_of(planner, agreement=ThreadAgreement(i, meeting)) for i, planner in enumerate(planners)
    ]
    with in_threads() as start:
        running = [
            start(lambda p=p: p.plan(leased(p), device_tokens=DEVICE_TOKENS, new_tokens=1))  # type: ignore[misc]
            for p in plannings
        ]
        plans = [plan.result(PATIENCE_S) for plan in running]
    assert [plan is None for plan in plans] == [rank == 0] * 2
    assert [planning.counters.out_of_memory for planning in plannings] == [int(i == rank) for i in (0, 1)]
