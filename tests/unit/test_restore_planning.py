"""From leases to plans on one rank."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch

from benchmarks.planners import FullRecomputePlanner
from krul_backend.planner.interface import DecodeCost, RestorePlan, RestoreProblem
from krul_backend.planner.planners import LocalSearchPlanner, make_planner
from krul_backend.strategy.strategy import Precision
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.restore import restore_planning
from krul_sglang.engine.restore.restore_planning import DecodeCosts, RestorePlanning
from krul_sglang.engine.restore.segment_reader import SegmentReader
from tests.support.planning_builders import (
    NUM_TOKENS,
    TOKEN_BYTES,
    FakeAgreement,
    HeadsPlanner,
    costs_of,
    leased,
    longest_heads,
    lowest_heads,
    no_heads,
    planning_of,
)
from tests.support.present import present
from tests.support.segment_builders import BOUNDS, DEVICE_TOKENS, END, NUM_LAYERS, PAGE_SIZE, lease_of, stored


def test_a_problem_says_what_is_stored_and_where() -> None:
    planner = HeadsPlanner(no_heads)
    decode_costs = DecodeCosts({}, {Precision.NATIVE: DecodeCost(0.0, 0.5)})
    planning = planning_of(planner, decode_costs=decode_costs, max_head_tokens=30)
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
        assert run.decode == (DecodeCost(0.0, 0.5),) * NUM_LAYERS
        assert run.stored_from == (run.first_token,) * NUM_LAYERS
        # From its first token on, a block is read to its end.
        share = (header.end_token - run.first_token) / header.num_tokens
        num_bytes = [(run.end_token - run.first_token) * each for each in run.layer_token_bytes]
        assert num_bytes == pytest.approx([share * each for each in header.layer_num_bytes])


def test_a_lease_that_there_is_no_memory_to_open_is_computed(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    planning = planning_of(HeadsPlanner(no_heads))
    slices = leased(planning)

    def refuse(*args: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 MiB")

    monkeypatch.setattr(restore_planning, "open_segments", refuse)
    lease: Any = None
    for _ in range(2):
        assert planning.open(lease, NUM_TOKENS) is None
        assert planning.plan(None, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert (planning.counters.refused, planning.counters.out_of_memory) == (2, 2)
    assert caplog.text.count("the engine computes it") == 1
    # The next one is planned again.
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is not None


def test_what_was_left_out_bounds_the_plan() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner)
    slices = leased(planning, kept_heads=(40, 24, 16, 0))
    planned = present(planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1))
    (problem,) = planner.problems
    assert [run.stored_from for run in problem.runs] == [(24, 24, 16, 8), (40, 24, 24, 24), (44,) * 4]
    assert planned.plan.head_ends == (40, 24, 16, 8)


def test_a_pair_can_be_loaded_from_where_both_blocks_are_kept() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner)
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
    assert planning.declined == "sooner"


@pytest.mark.parametrize(("token_s", "byte_s", "is_loaded"), [(1.0, 1e-6, True), (1e-6, 1.0, False)])
def test_the_plan_follows_the_costs(token_s: float, byte_s: float, is_loaded: bool) -> None:
    planning = planning_of(LocalSearchPlanner(), costs=costs_of(token_s, byte_s))
    planned = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4)
    assert (planned is not None) == is_loaded
    assert (planning.counters.loads, planning.counters.refused) == (is_loaded, not is_loaded)
    if planned is not None:
        assert planned.plan.head_ends == (DEVICE_TOKENS,) * NUM_LAYERS


def test_costs_that_were_learned_change_the_next_plan() -> None:
    planning = planning_of(LocalSearchPlanner(), costs=costs_of(1.0, 0.9 / TOKEN_BYTES))
    first = present(planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4))
    for _ in range(50):
        planning.costs.observe_tier(DRAM_TIER, 1.0, 4.0)
    later = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4)
    assert later is None or sum(later.plan.head_ends) > sum(first.plan.head_ends)


def test_a_forecast_is_what_the_parts_take_alone() -> None:
    planning = planning_of(HeadsPlanner(lambda problem: (20, 12, 8, 8)), costs=costs_of(2.0, 0.5))
    planned = present(planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=3))
    num_head_tokens = (20 - 8) + (12 - 8)
    num_loaded_tokens = NUM_LAYERS * NUM_TOKENS - num_head_tokens
    assert planned.forecast.head_s == pytest.approx(2.0 * num_head_tokens)
    assert planned.forecast.load_s == pytest.approx(0.5 * TOKEN_BYTES * num_loaded_tokens)
    assert planning.counters.head_tokens == 12
    assert planning.counters.prefix_tokens == NUM_TOKENS
    assert planning.counters.saved_s == pytest.approx(planned.forecast.recompute_s - planned.plan.end_s)
    assert planning.counters.saved_s != 0


@pytest.mark.parametrize(("state_tokens", "is_loaded"), [(0, True), (100, True), (2000, False)])
def test_a_state_is_loaded_beside_the_kv(state_tokens: int, is_loaded: bool) -> None:
    """As many bytes as a layer's KV of so many tokens, which take a quarter of a second each."""
    costs = costs_of(1.0, 0.25 / TOKEN_BYTES)
    planning = planning_of(
        LocalSearchPlanner(), costs=costs, max_head_tokens=0, state_bytes=state_tokens * TOKEN_BYTES
    )
    kv_s, state_s = 0.25 * NUM_LAYERS * NUM_TOKENS, 0.25 * state_tokens
    for number in range(2):
        planned = planning.plan(leased(planning), device_tokens=DEVICE_TOKENS, new_tokens=4)
        assert (planned is not None) == is_loaded
        if planned is not None:
            assert planned.forecast.load_s == pytest.approx(kv_s + state_s)
            # After the load before it; only the last layer's forward comes behind the load.
            assert planned.plan.end_s == pytest.approx((number + 1) * (kv_s + state_s) + 4.0)


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
        planned = present(planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1))
        head_tokens.append(planned.plan.head_ends[0] - DEVICE_TOKENS)
    assert head_tokens == [NUM_TOKENS, 20, 0]
    assert [problem.max_head_tokens for problem in planner.problems] == [NUM_TOKENS + 20, 20, 0]
    planning.start_batch()
    planned = present(planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1))
    assert planned.plan.head_ends[0] == END


def test_a_request_is_planned_after_those_of_its_batch() -> None:
    planner = HeadsPlanner(longest_heads)
    planning = planning_of(planner, max_head_tokens=10 * NUM_TOKENS)
    slices = leased(planning)
    planned = [planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) for _ in range(3)]
    delays = [(problem.compute_delay_s, problem.load_delay_s) for problem in planner.problems]
    first, second, _ = planned
    assert first is not None
    assert second is not None
    own_s = NUM_LAYERS * planner.problems[0].own_layer_s
    each = first.forecast.head_s + own_s, first.forecast.load_s
    for number, delay in enumerate(delays):
        assert delay == pytest.approx((number * each[0], number * each[1]))
    # What it would take if the request came alone.
    assert second.forecast.recompute_s == pytest.approx(first.forecast.recompute_s)
    planning.start_batch()
    planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1)
    assert (planner.problems[-1].compute_delay_s, planner.problems[-1].load_delay_s) == (0, 0)


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
    planning = planning_of(make_planner("full-load"), max_head_tokens=20)
    slices = leased(planning, kept_heads=(32, 32, 32, 32))
    assert planning.plan(slices, device_tokens=DEVICE_TOKENS, new_tokens=1) is None
    assert planning.counters.refused == 1


def moved(
    planning: RestorePlanning, shift: int, kept_heads: tuple[int, ...] | None = None
) -> list[SegmentReader]:
    """Readers of tokens [8, 48) of the stored conversation, which the prompt has ``shift`` tokens later."""
    segments = tuple(stored("native", start, end, kept_heads) for start, end in pairwise(BOUNDS))
    return present(planning.open(lease_of(segments, DEVICE_TOKENS), NUM_TOKENS, shift))


def test_what_is_before_a_moved_run_is_computed_and_runs_are_planned_in_whole_pages() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner)
    readers = moved(planning, 2)
    assert [(reader.first_token, reader.end_token) for reader in readers] == [(10, 26), (26, 46), (46, 58)]
    planned = present(planning.plan(readers[:2], device_tokens=4, new_tokens=1, load_from=13))
    (problem,) = planner.problems
    assert [(run.first_token, run.end_token) for run in problem.runs] == [(4, 24), (24, 44)]
    assert [run.stored_from for run in problem.runs] == [(16,) * NUM_LAYERS, (24,) * NUM_LAYERS]
    assert planned.plan.head_ends == (16,) * NUM_LAYERS
    counters = planning.counters
    assert (counters.moved_loads, counters.moved_tokens) == (1, 46 - 16)


def test_a_page_of_two_segments_is_not_loaded_where_the_first_was_trimmed() -> None:
    planner = HeadsPlanner(lowest_heads)
    planning = planning_of(planner)
    readers = moved(planning, 2, kept_heads=(24, 24, 8, 0))
    # Token 24 of the prompt is the last but one of the first segment.
    assert [(reader.first_token, reader.end_token) for reader in readers[:2]] == [(10, 26), (26, 46)]
    assert planning.plan(readers[:2], device_tokens=4, new_tokens=1, load_from=13) is not None
    (problem,) = planner.problems
    assert [run.stored_from for run in problem.runs] == [(24, 24, 16, 16), (28, 28, 24, 24)]


def test_ranks_that_found_their_moved_runs_elsewhere_load_neither() -> None:
    for other, is_loaded in (((13.0, -2.0), True), ((13.0, -6.0), False), ((-1.0, 0.0), False)):
        agreement = FakeAgreement(other_bounds=(0.0,) * NUM_LAYERS)
        agreement.other_moved = other
        planning = planning_of(HeadsPlanner(lowest_heads), agreement=agreement)
        planned = planning.plan(moved(planning, -2), device_tokens=4, new_tokens=1, load_from=13)
        assert (planned is not None) == is_loaded
