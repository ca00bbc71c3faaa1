from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.simulate.pipeline import simulate
from krul_backend.errors import RestoreError
from krul_backend.planner.interface import NO_DECODING, ComputeCost, DecodeCost, RestoreProblem, TierCost
from krul_backend.planner.timing import RestoreTiming
from tests.support.restore_builders import DISK, HOST, check, is_allowed, make_problem, problems, stored_run


def naive_load_s(problem: RestoreProblem, head_ends: list[int], layer: int) -> float:
    """One load step, token by token."""
    seconds = 0.0
    for run in problem.runs:
        tier = problem.costs.tiers[run.tier]
        tokens = range(run.first_token, run.end_token)
        copied = sum(token >= head_ends[run.last_use[layer]] for token in tokens)
        num_bytes = copied * run.layer_token_bytes[layer]
        if num_bytes > 0:
            seconds += tier.latency_s + tier.byte_s * num_bytes
        cost, num_decoded = run.decode[layer], sum(token >= head_ends[layer] for token in tokens)
        decoded_s = cost.token_s * num_decoded + cost.segment_s * (num_decoded > 0)
        seconds += problem.costs.decode_scale * decoded_s
    latencies_s = [(run.end_token, run.decode[layer].latency_s) for run in problem.runs]
    end, latency_s = max(((end, each_s) for end, each_s in latencies_s if each_s), default=(0, 0.0))
    if end > head_ends[layer]:
        seconds += problem.costs.decode_scale * latency_s
    return seconds


def naive_ends_s(
    problem: RestoreProblem, head_ends: list[int]
) -> tuple[list[float], list[float], list[float]]:
    """Ends of heads, loads and own layers, one event after the other."""
    head, device = problem.costs.head, problem.device_tokens
    heads, loads, owns, now = [], [], [], 0.0
    for end in head_ends:
        now += head.layer_s(end - device, device)
        heads.append(now)
    loaded = 0.0
    for layer in range(problem.num_layers):
        loaded += naive_load_s(problem, head_ends, layer)
        loads.append(loaded)
        now = max(now, loaded) + problem.costs.own.layer_s(problem.new_tokens, problem.total_tokens)
        owns.append(now)
    return heads, loads, owns


@st.composite
def problems_with_heads(draw: st.DrawFn) -> tuple[RestoreProblem, list[int]]:
    problem = draw(problems(max_layers=6))
    num_pages = (problem.total_tokens - problem.device_tokens) // problem.page_size
    pages = st.lists(st.integers(0, num_pages), min_size=problem.num_layers, max_size=problem.num_layers)
    heads = sorted((problem.device_tokens + problem.page_size * n for n in draw(pages)), reverse=True)
    return problem, heads


@settings(max_examples=200)
@given(problems_with_heads())
def test_the_pipeline_is_that_of_the_events(case: tuple[RestoreProblem, list[int]]) -> None:
    problem, head_ends = case
    heads, loads, owns = naive_ends_s(problem, head_ends)
    pipeline = simulate(problem, head_ends)
    assert pipeline.head.end_s == pytest.approx(heads)
    assert pipeline.load.end_s == pytest.approx(loads)
    assert pipeline.own.end_s == pytest.approx(owns)
    assert pipeline.end_s == pytest.approx(owns[-1])
    assert pipeline.load_s == pytest.approx(loads[-1])
    assert pipeline.compute_s == pytest.approx(heads[-1] + problem.num_layers * problem.own_layer_s)
    assert pipeline.head_tokens == sum(end - problem.device_tokens for end in head_ends)


def test_a_pipeline_worked_by_hand() -> None:
    """Two layers of 4 tokens and 2 bytes; the head takes half of layer 0; an own layer takes 3 s."""
    problem = make_problem(stored_run(0, 4, [2.0, 2.0]), new_tokens=3)
    pipeline = simulate(problem, [2, 0])
    assert pipeline.head.start_s.tolist() == [0, 2]
    assert pipeline.head.end_s.tolist() == [2, 2]
    assert pipeline.load.start_s.tolist() == [0, 4]
    assert pipeline.load.end_s.tolist() == [4, 12]
    assert pipeline.own.start_s.tolist() == [4, 12]
    assert pipeline.own.end_s.tolist() == [7, 15]
    assert (pipeline.end_s, pipeline.compute_s, pipeline.load_s, pipeline.ideal_s) == (15, 8, 12, 12)
    assert (pipeline.bytes_loaded, pipeline.head_tokens) == (12, 2)
    assert pipeline.compute_busy == pytest.approx(8 / 15)
    assert pipeline.load_busy == pytest.approx(12 / 15)


def test_a_shared_block_is_loaded_from_the_head_of_the_layer_that_needs_it_last() -> None:
    run = stored_run(0, 4, [3.0, 0.0], last_use=[1, 1])
    assert simulate(make_problem(run), [4, 1]).bytes_loaded == 9
    assert simulate(make_problem(run), [4, 1]).load.end_s.tolist() == [9, 9]


def test_rows_are_decoded_from_the_head_of_their_own_layer() -> None:
    decode = (DecodeCost(0.0, 10.0), DecodeCost(0.0, 100.0))
    run = replace(stored_run(0, 4, [3.0, 0.0], last_use=[1, 1]), decode=decode)
    assert simulate(make_problem(run), [3, 1]).load.end_s.tolist() == [9 + 10, 9 + 10 + 300]


def test_segments_that_are_decoded_together_pay_once_and_take_as_much_longer_as_all_others() -> None:
    decoded, native = (DecodeCost(5.0, 10.0),), (NO_DECODING,)
    runs = [
        replace(stored_run(first, first + 4, [0.0]), decode=decode)
        for first, decode in ((0, decoded), (4, decoded), (8, native))
    ]
    problem = make_problem(*runs)
    slower = replace(problem, costs=replace(problem.costs, decode_scale=2.0))
    for head_end, seconds in ((0, 5 + 80), (4, 5 + 40), (6, 5 + 20), (8, 0)):
        assert simulate(problem, [head_end]).load_s == seconds
        assert simulate(slower, [head_end]).load_s == 2 * seconds
        assert RestoreTiming(slower).work_s([head_end]) == (head_end, 2 * seconds, 2 * seconds)
    each = [replace(run, decode=(replace(run.decode[0], segment_s=3.0),)) for run in runs]
    for head_end, seconds in ((0, 5 + 80 + 9), (6, 5 + 20 + 6), (8, 3), (12, 0)):
        assert simulate(make_problem(*each), [head_end]).load_s == seconds


def test_each_run_is_a_copy_from_its_own_tier() -> None:
    problem = make_problem(stored_run(0, 4, [1.0]), stored_run(4, 6, [1.0], DISK), host=TierCost(5.0, 1.0))
    assert simulate(problem, [0]).load_s == (5 + 4) + (2 + 4 * 2)
    assert simulate(problem, [4]).load_s == 2 + 4 * 2
    assert simulate(problem, [6]).load_s == 0


def test_compute_grows_with_what_a_token_sees() -> None:
    problem = make_problem(stored_run(8, 12, [1.0]), head=ComputeCost(1.0, 2.0, 0.5, 0.25))
    assert simulate(problem, [12]).compute_s == 1 + 2 * 4 + 0.5 * 4 * (8 + 2) + 0.25 * 8
    assert simulate(problem, [8]).compute_s == 0


def test_nothing_to_restore_takes_the_own_forward_only() -> None:
    problem = make_problem(stored_run(3, 3, [1.0, 1.0]), new_tokens=2)
    pipeline = simulate(problem, [3, 3])
    assert (pipeline.end_s, pipeline.load_s, pipeline.load_busy) == (4, 0, 0)


RULES = [
    ([4, 8], "grow"),
    ([6, 4], "inside a page"),
    ([20, 4], "outside"),
    ([0, 0], "outside"),
    ([16, 4], "limit of head tokens"),
    ([4, 4], "layer 0 ends at 4"),
    ([12, 8], "2 different lengths"),
]


@pytest.mark.parametrize(("head_ends", "message"), RULES)
def test_each_rule_is_named(head_ends: list[int], message: str) -> None:
    run = replace(stored_run(4, 16, [1.0, 1.0]), stored_from=(8, 4))
    problem = make_problem(run, page_size=4, max_head_tokens=9, max_lengths=1)
    assert not is_allowed(problem, head_ends)
    with pytest.raises(RestoreError, match=message):
        check(problem, head_ends)
    assert is_allowed(problem, [12, 4])
    check(problem, [12, 4])


def test_a_layer_is_stored_from_its_last_run_that_left_something_out() -> None:
    first = replace(stored_run(0, 4, [1.0, 1.0]), stored_from=(2, 0))
    second = replace(stored_run(4, 8, [1.0, 1.0]), stored_from=(6, 4))
    problem = make_problem(first, second)
    allowed = [(a, b) for a in range(9) for b in range(9) if is_allowed(problem, [a, b])]
    assert allowed == [(a, b) for a in range(6, 9) for b in range(a + 1)]


def test_one_head_end_per_layer_is_needed() -> None:
    with pytest.raises(RestoreError, match="1 head ends for 2 layers"):
        simulate(make_problem(stored_run(0, 4, [1.0, 1.0])), [4])
    assert not is_allowed(make_problem(stored_run(0, 4, [1.0, 1.0])), [4])


def test_a_tier_without_costs_is_named() -> None:
    problem = make_problem(stored_run(0, 4, [1.0], "tape"))
    with pytest.raises(RestoreError, match="'tape' has no costs"):
        simulate(problem, [0])


def test_streams_are_in_order() -> None:
    pipeline = simulate(make_problem(stored_run(0, 9, [1.0] * 5), new_tokens=2), [7, 5, 5, 1, 0])
    for stage in (pipeline.head, pipeline.load, pipeline.own):
        assert np.all(stage.start_s[1:] >= stage.end_s[:-1])
    assert pipeline.own.start_s[0] >= pipeline.head.end_s[-1]
    assert np.all(pipeline.own.start_s >= pipeline.load.end_s)


@settings(max_examples=100)
@given(problems_with_heads())
def test_loads_that_take_the_forwards_cores_count_beside_nothing(
    case: tuple[RestoreProblem, list[int]],
) -> None:
    problem, head_ends = case
    serial = replace(problem, costs=replace(problem.costs, serial_tiers=(HOST, DISK)))
    both, alone = simulate(problem, head_ends), simulate(serial, head_ends)
    assert (alone.compute_s, alone.load_s) == (both.compute_s, both.load_s)
    assert alone.end_s == pytest.approx(both.compute_s + both.load_s)
    assert alone.load.start_s[0] == pytest.approx(alone.head.end_s[-1])
    assert alone.own.start_s[0] == pytest.approx(alone.load.end_s[-1])
    assert RestoreTiming(serial).plan(np.array(head_ends)).end_s == pytest.approx(alone.end_s)


def test_a_load_with_a_part_in_another_tier_goes_on_beside_the_forward() -> None:
    problem = make_problem(stored_run(0, 4, [1.0, 1.0]), stored_run(4, 8, [1.0, 1.0], DISK), new_tokens=4)
    of_host = replace(problem, costs=replace(problem.costs, serial_tiers=(HOST,)))
    assert not of_host.is_serial
    assert simulate(of_host, [0, 0]).end_s == simulate(problem, [0, 0]).end_s
    assert replace(of_host, runs=of_host.runs[:1], total_tokens=4).is_serial
