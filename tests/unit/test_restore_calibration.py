from __future__ import annotations

import random
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest

from krul_backend.errors import RestoreError
from krul_backend.planner.calibration import (
    MAX_OBSERVED_RATIO,
    MAX_SCALE,
    NUM_OVERHEADS,
    OVERHEAD_FADING,
    OnlineCosts,
    fit_compute,
    fit_tier,
)
from krul_backend.planner.interface import ComputeCost, DecodeCost, RestoreCosts, TierCost
from krul_backend.planner.planners import LocalSearchPlanner
from krul_backend.planner.timing import RestoreTiming
from tests.support.restore_builders import make_problem, stored_run

COST = ComputeCost(launch_s=4e-5, token_s=2.5e-6, context_s=1.2e-10)
SHAPES = [(n, past) for n in (16, 128, 512, 2048, 8192) for past in (0, 1024, 16384)]


def samples(cost: ComputeCost, noise: float = 0.0) -> list[tuple[int, int, float]]:
    numbers = random.Random(0)
    return [(n, past, cost.layer_s(n, past) * (1 + noise * numbers.uniform(-1, 1))) for n, past in SHAPES]


@pytest.mark.parametrize(
    "cost",
    [
        COST,
        ComputeCost(0.0, 2.5e-6, 1e-10),
        ComputeCost(4e-5, 2.5e-6, 0.0),
        ComputeCost(1e-3, 0.0, 0.0),
        ComputeCost(4e-5, 2.5e-6, 1e-10, 3e-8),
    ],
)
def test_exact_measurements_give_the_cost_back(cost: ComputeCost) -> None:
    fitted = fit_compute(samples(cost))
    assert fitted.launch_s == pytest.approx(cost.launch_s, rel=1e-6, abs=1e-12)
    assert fitted.token_s == pytest.approx(cost.token_s, rel=1e-6, abs=1e-14)
    assert fitted.context_s == pytest.approx(cost.context_s, rel=1e-6, abs=1e-18)
    assert fitted.past_s == pytest.approx(cost.past_s, rel=1e-6, abs=1e-16)


def test_without_a_past_nothing_is_known_of_reading_it() -> None:
    fitted = fit_compute([(n, 0, COST.layer_s(n, 0)) for n in (16, 128, 512, 2048)])
    assert fitted.past_s == 0
    assert fitted.layer_s(1024, 0) == pytest.approx(COST.layer_s(1024, 0), rel=1e-6)


def test_noise_of_a_tenth_leaves_predictions_within_a_tenth() -> None:
    fitted = fit_compute(samples(COST, noise=0.1))
    for n, past in SHAPES:
        assert fitted.layer_s(n, past) == pytest.approx(COST.layer_s(n, past), rel=0.1)


def test_a_short_measurement_counts_as_much_as_a_long_one() -> None:
    """Of two contradicting pairs the relative error is shared: 1 s becomes closer to 2 s than 100 s would."""
    fitted = fit_tier([(1.0, 1.0), (1.0, 3.0), (1000.0, 1000.0), (1000.0, 3000.0)])
    short, long = fitted.load_s(1.0), fitted.load_s(1000.0)
    assert long / short == pytest.approx(1000.0)
    assert 1.0 < short < 3.0


def test_a_falling_cost_is_fitted_by_none_below_zero() -> None:
    fitted = fit_compute([(16, 0, 2.0), (64, 0, 1.5), (256, 0, 1.0)])
    assert min(fitted.launch_s, fitted.token_s, fitted.context_s) >= 0
    assert fitted.layer_s(64, 0) == pytest.approx(1.5, rel=0.5)


def test_a_tier_is_fitted() -> None:
    cost = TierCost(latency_s=3e-5, byte_s=1 / 22e9)
    fitted = fit_tier([(n, cost.load_s(n)) for n in (1e4, 1e6, 1e8)])
    assert fitted.latency_s == pytest.approx(cost.latency_s, rel=1e-6)
    assert fitted.byte_s == pytest.approx(cost.byte_s, rel=1e-6)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([], "0 measured layers of 0 shapes"),
        ([(16, 0, 1.0), (32, 0, 2.0), (32, 0, 2.1)], "2 shapes"),
        ([(16, 0, 1.0), (16, 8, 2.0), (16, 16, 3.0)], "1 numbers of tokens"),
        ([*samples(COST), (0, 0, 1.0)], "0 tokens after 0"),
        ([*samples(COST), (8, -1, 1.0)], "8 tokens after -1"),
        ([*samples(COST), (8, 0, 0.0)], "took 0.0 s"),
        ([*samples(COST), (8, 0, float("nan"))], "took nan s"),
    ],
)
def test_unusable_layers_are_named(bad: list[tuple[int, int, float]], message: str) -> None:
    with pytest.raises(RestoreError, match=message):
        fit_compute(bad)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ([(8.0, 1.0), (8.0, 2.0)], "1 sizes"),
        ([(8.0, 1.0), (0.0, 2.0)], "0.0 bytes"),
        ([(8.0, 1.0), (16.0, float("inf"))], "took inf s"),
    ],
)
def test_unusable_copies_are_named(bad: list[tuple[float, float]], message: str) -> None:
    with pytest.raises(RestoreError, match=message):
        fit_tier(bad)


START = RestoreCosts(
    COST, ComputeCost(1.0, 2.0, 3.0), {"host": TierCost(1.0, 2.0), "disk": TierCost(3.0, 4.0)}
)


def test_without_observations_costs_are_as_calibrated() -> None:
    assert OnlineCosts(START).current() == START


def test_costs_follow_a_machine_that_is_slower_than_calibrated() -> None:
    online = OnlineCosts(START, half_life=4)
    true_s = 3 * START.tiers["disk"].load_s(100)
    for _ in range(40):
        online.observe_tier("disk", online.current().tiers["disk"].load_s(100), true_s)
    current = online.current()
    assert current.tiers["disk"].load_s(100) == pytest.approx(true_s, rel=0.01)
    assert current.tiers["disk"].latency_s == pytest.approx(9.0, rel=0.01)
    assert (current.head, current.own, current.tiers["host"]) == (START.head, START.own, START.tiers["host"])


def test_heads_and_own_forward_are_corrected_apart() -> None:
    online = OnlineCosts(START, half_life=1)
    online.observe_head(1.0, 4.0)
    online.observe_own(4.0, 1.0)
    current = online.current()
    assert current.head.token_s == pytest.approx(2 * START.head.token_s)
    assert current.head.context_s == pytest.approx(2 * START.head.context_s)
    assert current.own == ComputeCost(pytest.approx(0.5), pytest.approx(1.0), pytest.approx(1.5))


def test_after_the_half_life_an_observation_counts_half() -> None:
    online = OnlineCosts(START, half_life=6)
    for _ in range(6):
        online.observe_own(online.current().own.launch_s, 4.0)
    assert online.current().own.launch_s == pytest.approx(4.0**0.5)


def test_an_outlier_counts_as_the_largest_ratio_and_scales_are_bounded() -> None:
    online = OnlineCosts(START, half_life=1)
    online.observe_own(1.0, 1e9)
    assert online.current().own.launch_s == pytest.approx(MAX_OBSERVED_RATIO**0.5)
    for _ in range(100):
        online.observe_own(1.0, 1e9)
    assert online.current().own.launch_s == pytest.approx(MAX_SCALE)
    for _ in range(100):
        online.observe_own(1.0, 1e-9)
    assert online.current().own.launch_s == pytest.approx(1 / MAX_SCALE)


@pytest.mark.parametrize("measured_s", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_time_teaches_nothing(measured_s: float) -> None:
    online = OnlineCosts(START)
    online.observe_head(1.0, measured_s)
    online.observe_head(measured_s, 1.0)
    assert online.current() == START


def test_a_tier_that_is_stated_later_passes_through_another() -> None:
    """Blocks go on while the next one is read: both latencies, and the slower of both per byte."""
    online = OnlineCosts(START)
    online.set_tier("ssd", TierCost(10.0, 0.5), through="host")
    online.set_tier("tape", TierCost(20.0, 5.0), through="host")
    tiers = online.current().tiers
    assert tiers == {**START.tiers, "ssd": TierCost(11.0, 2.0), "tape": TierCost(21.0, 5.0)}


def test_what_was_observed_of_a_tier_scales_what_is_stated_later() -> None:
    online = OnlineCosts(START, half_life=1)
    online.set_tier("ssd", TierCost(10.0, 4.0), through="host")
    online.observe_tier("ssd", 1.0, 4.0)
    assert online.current().tiers["ssd"] == TierCost(pytest.approx(22.0), pytest.approx(8.0))
    online.set_tier("ssd", TierCost(1.0, 6.0), through="host")
    assert online.current().tiers["ssd"] == TierCost(pytest.approx(4.0), pytest.approx(12.0))
    assert online.current().tiers["host"] == START.tiers["host"]


def test_a_slower_front_tier_is_not_counted_twice() -> None:
    online = OnlineCosts(START, half_life=1)
    online.observe_tier("host", 1.0, 4.0)
    online.set_tier("ssd", TierCost(10.0, 0.5), through="host")
    # Its own observations will tell.
    assert online.current().tiers["ssd"] == TierCost(11.0, 2.0)


def test_a_tier_cannot_pass_through_one_without_costs() -> None:
    online = OnlineCosts(START)
    with pytest.raises(RestoreError, match="'tape' has no costs"):
        online.set_tier("ssd", TierCost(1.0, 1.0), through="tape")
    assert online.current() == START


def test_decoding_is_predicted_right_after_some_loads_and_corrects_nothing_else() -> None:
    """Beside a forward it takes three times as long as it was measured to take."""
    online, problem = OnlineCosts(START), make_problem(stored_run(0, 64, [1.0, 1.0]))
    run = replace(problem.runs[0], decode=(DecodeCost(2.0, 1.0), DecodeCost(2.0, 1.0)))
    true_s, errors = 3.0 * 2 * (2 + 64), []
    for _ in range(40):
        costs = replace(online.current(), tiers=problem.costs.tiers)
        timing = RestoreTiming(replace(problem, runs=(run,), costs=costs))
        _, load_s, decode_s = timing.work_s([0, 0])
        assert load_s == pytest.approx(2 * 64 + decode_s)
        errors.append(abs(true_s / decode_s - 1))
        online.observe_decoding(decode_s, true_s)
    assert errors[0] == pytest.approx(2.0)
    # The half-life is eight observations.
    assert max(errors[24:]) < 0.15
    assert replace(online.current(), decode_scale=1.0) == START


def test_unknown_tiers_and_half_lives_are_refused() -> None:
    with pytest.raises(RestoreError, match="'tape' has no costs"):
        OnlineCosts(START).observe_tier("tape", 1.0, 1.0)
    with pytest.raises(RestoreError, match="half-life of 0"):
        OnlineCosts(START, half_life=0)


def test_no_observation_is_lost_between_threads() -> None:
    online = OnlineCosts(START, half_life=1000)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: online.observe_head(1.0, 1.01), range(4000)))
    alone = OnlineCosts(START, half_life=1000)
    for _ in range(4000):
        alone.observe_head(1.0, 1.01)
    assert online.current().head.token_s == pytest.approx(alone.current().head.token_s)


def test_the_overhead_is_what_most_restores_take_beyond_their_plans() -> None:
    online = OnlineCosts(START)
    for measured_s in (1.3, 1.1):
        online.observe_overhead(1.0, measured_s)
    assert online.current().overhead_s == pytest.approx(0.2)
    for measured_s in (0.0, float("nan"), float("inf")):
        online.observe_overhead(1.0, measured_s)
    assert online.current().overhead_s == pytest.approx(0.2)
    for measured_s in (1.05, 1.05, 4.0, 1.05, 3.0, 1.05, 1.05):
        online.observe_overhead(1.0, measured_s)
    assert online.current().overhead_s == pytest.approx(0.05)
    # Older ones are forgotten.
    for _ in range(NUM_OVERHEADS // 2 + 1):
        online.observe_overhead(1.0, 2.0)
    assert online.current().overhead_s == pytest.approx(1.0)


def test_restores_that_end_early_have_no_overhead() -> None:
    online = OnlineCosts(START)
    online.observe_overhead(1.0, 0.2)
    assert online.current().overhead_s == 0.0


def test_an_overhead_that_nobody_measures_fades() -> None:
    online = OnlineCosts(START)
    online.observe_overhead(1.0, 2.0)
    for _ in range(100):
        online.fade_overhead()
    assert online.current().overhead_s == pytest.approx((1 - OVERHEAD_FADING) ** 100)


def test_a_restore_must_win_by_its_overhead() -> None:
    problem = make_problem(stored_run(0, 64, [1.0, 1.0]), page_size=4, new_tokens=2)
    plan = LocalSearchPlanner().plan(problem)
    gain_s = problem.recompute_s - plan.end_s
    assert gain_s > 0
    for overhead_s, is_recompute in ((0.99 * gain_s, False), (1.01 * gain_s, True)):
        slower = replace(problem, costs=replace(problem.costs, overhead_s=overhead_s))
        assert LocalSearchPlanner().plan(slower).is_recompute == is_recompute
