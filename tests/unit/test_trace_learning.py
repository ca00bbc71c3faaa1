"""What costs learn from several restores and requests, and which restores are kept."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend.device import Device, StreamClock
from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost
from krul_backend.tiers.common.interface import DRAM_TIER
from krul_sglang.engine.restore.load_batch import Forecast, LoadBatch
from krul_sglang.engine.restore.restore_trace import MAX_TRACES, RestoreTrace, TraceLog
from tests.support.engine_builders import PATIENCE_S, bare_load, layer_times

NUM_LAYERS = 2


class RecordingCosts:
    """Stands for ``OnlineCosts``: remembers what was predicted and measured."""

    def __init__(self) -> None:
        self.observed: list[tuple[str, float, float]] = []

    def observe_head(self, predicted_s: float, measured_s: float) -> None:
        self.observed.append(("head", predicted_s, round(measured_s, 6)))

    def observe_own(self, predicted_s: float, measured_s: float) -> None:
        self.observed.append(("own", round(predicted_s, 6), round(measured_s, 6)))

    def observe_overhead(self, predicted_s: float, measured_s: float) -> None:
        self.observed.append(("overhead", predicted_s, round(measured_s, 6)))

    def current(self) -> RestoreCosts:
        own = ComputeCost(launch_s=1.0, token_s=0.1, context_s=0.01)
        return RestoreCosts(head=own, own=own, tiers={DRAM_TIER: TierCost(0.0, 0.0)})

    def observe_tier(self, tier: str, predicted_s: float, measured_s: float) -> None:
        self.observed.append((tier, predicted_s, round(measured_s, 6)))

    def observe_decoding(self, predicted_s: float, measured_s: float) -> None:
        if predicted_s:
            self.observed.append(("decoding", predicted_s, round(measured_s, 6)))


class ScriptedClock:
    """Its marks are at these seconds, one after the other."""

    begin_ns = 0

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def mark(self) -> Any:
        second = self.left.pop(0)
        return lambda: second


def make_log() -> tuple[TraceLog, RecordingCosts]:
    costs: Any = RecordingCosts()
    return TraceLog(costs, NUM_LAYERS), costs


def make_trace(*forecasts: Forecast, has_heads: bool = True, end_s: float | None = 9.0) -> RestoreTrace:
    """Heads in [0, 3) and [3, 4), loads in [0, 2) and [2, 5); the forward waits until 4.5 and until 6, and
    its last layer takes as long after that as was planned, unless a forecast says how long that is."""
    own_layer_s = 0.0 if end_s is None else end_s - 6.0
    loads = {
        f"r{number}": bare_load(
            0, 8, (4, 0), forecast=replace(forecast, own_layer_s=forecast.own_layer_s or own_layer_s)
        )
        for number, forecast in enumerate(forecasts)
    }
    batch = LoadBatch(loads, NUM_LAYERS, Device(torch.device("cpu")), PATIENCE_S)
    clock: Any = ScriptedClock(0.0, 3.0, 4.0)
    batch.clock = clock
    trace = RestoreTrace(batch, is_mixed=False)
    if has_heads:
        for layer in (0, 1, NUM_LAYERS):
            trace.mark_head_layer(layer)
    batch.landed([layer_times(0.0, 2.0)])
    batch.landed([layer_times(2.0, 5.0)])
    batch.wait_times.update({0: layer_times(4.0, 4.5), 1: layer_times(5.5, 6.0)})
    trace.end = lambda: end_s
    return trace


def lie_in(trace: RestoreTrace, *tiers: str) -> None:
    """Let the first load have segments in these tiers."""
    readers: Any = tuple(SimpleNamespace(source=SimpleNamespace(tier=tier)) for tier in tiers)
    trace.batch.loads = {**trace.batch.loads, "r0": replace(trace.batch.loads["r0"], readers=readers)}


def test_costs_learn_the_work_of_each_stream_without_its_waits() -> None:
    log, costs = make_log()
    log.add(make_trace(Forecast(1.0, 2.0, 0.0), Forecast(0.5, 0.25, 0.0)))
    log.settle()
    assert costs.observed == [("head", 1.5, 4.0), (DRAM_TIER, 2.25, 5.0)]


def test_decoding_is_learned_apart_from_the_copies_of_its_load() -> None:
    """Where it takes most of a load, nothing is said of the tier: on a GPU copies are a part of it."""
    log, costs = make_log()
    for decode_s in (1.0, 1.5):
        trace = make_trace(Forecast(0.0, 2.0, 0.0, decode_s))
        trace.batch.decode_times += [layer_times(0.5, 1.0), layer_times(3.0, 4.0)]
        trace.is_mixed = True
        log.add(trace)
        log.settle()
    assert costs.observed == [("decoding", 1.0, 1.5), (DRAM_TIER, 1.0, 3.5), ("decoding", 1.5, 1.5)]


def test_a_request_that_came_alone_tells_what_a_restore_takes_beyond_its_plan() -> None:
    log, costs = make_log()
    log.add(make_trace(Forecast(0.0, 0.0, 0.0)))
    mixed = make_trace(Forecast(0.0, 0.0, 0.0))
    mixed.is_mixed = True
    log.add(mixed)
    log.settle()
    assert costs.observed == [("overhead", 1.0, 9.0)]


def test_a_forward_that_is_slow_without_any_load_is_not_what_a_restore_takes() -> None:
    log, costs = make_log()
    # The last layer takes 3 s.
    for own_layer_s in (1.0, 5.0):
        log.add(make_trace(Forecast(0.0, 0.0, 0.0, own_layer_s=own_layer_s)))
    log.settle()
    assert costs.observed == [("overhead", 1.0, 7.0), ("overhead", 1.0, 11.0)]


def test_the_own_forward_is_learned_from_prefills_that_restore_nothing() -> None:
    log, costs = make_log()
    log.add_prefill(10, 20, begin=lambda: 1.0, end=lambda: 3.5)
    log.add_prefill(10, 20, begin=lambda: 4.0, end=lambda: None)
    log.settle()
    # Two layers of 1 + 0.1 * 10 + 0.01 * 10 * (20 + 10 / 2) seconds.
    assert costs.observed == [("own", 9.0, 2.5)]


def test_what_a_plan_did_not_have_teaches_nothing() -> None:
    log, costs = make_log()
    log.add(make_trace(Forecast(0.0, 2.0, 0.0), has_heads=False))
    log.settle()
    assert [name for name, *_ in costs.observed] == [DRAM_TIER, "overhead"]


def test_a_load_from_a_lower_tier_teaches_about_that_tier_alone() -> None:
    """Nothing about the overhead either: how long a tier takes to answer is not the restore's."""
    log, costs = make_log()
    for tiers in ((DRAM_TIER, "ssd"), ("ssd",), (DRAM_TIER,)):
        trace = make_trace(Forecast(0.0, 2.0, 0.0))
        lie_in(trace, *tiers)
        log.add(trace)
    log.settle()
    assert costs.observed == [
        ("ssd", 2.0, 5.0),
        ("ssd", 2.0, 5.0),
        (DRAM_TIER, 2.0, 5.0),
        ("overhead", 1.0, 9.0),
    ]
    assert [trace["requests"][0]["tiers"] for trace in log.as_list()] == [["dram", "ssd"], ["ssd"], ["dram"]]


def test_a_load_from_two_lower_tiers_teaches_about_neither() -> None:
    log, costs = make_log()
    trace = make_trace(Forecast(1.0, 2.0, 0.0))
    lie_in(trace, "mooncake", DRAM_TIER, "ssd")
    log.add(trace)
    log.settle()
    assert costs.observed == [("head", 1.0, 4.0)]


def test_restores_settle_in_order_when_the_device_has_come_by() -> None:
    log, costs = make_log()
    running = make_trace(Forecast(1.0, 0.0, 0.0), end_s=None)
    log.add(running)
    log.add(make_trace(Forecast(2.0, 0.0, 0.0)))
    log.settle()
    assert (costs.observed, log.as_list()) == ([], [])
    running.end = lambda: 9.0
    log.settle()
    log.settle()
    assert [predicted_s for name, predicted_s, _ in costs.observed if name == "head"] == [1.0, 2.0]
    assert len(log.as_list()) == 2


def test_only_the_last_restores_are_kept() -> None:
    log, costs = make_log()
    for number in range(MAX_TRACES + 3):
        log.add(make_trace(Forecast(1.0 + number, 0.0, 0.0)))
        log.settle()
    assert len(log.as_list()) == MAX_TRACES
    assert [name for name, *_ in costs.observed].count("head") == MAX_TRACES + 3


def test_marks_on_a_cpu_are_in_order_from_the_start() -> None:
    clock = StreamClock(Device(torch.device("cpu")))
    marks = [clock.mark() for _ in range(3)]
    seconds = [mark() for mark in marks]
    assert None not in seconds
    assert seconds == sorted(second for second in seconds if second is not None)
    assert [mark() for mark in marks] == seconds


def test_forecasts_are_compared_with_what_restores_took() -> None:
    log, _ = make_log()
    assert log.accuracy() == {"restores": 0}
    # Planned: 1 s each (``bare_load``).
    for end_s in (0.9, 1.0, 1.1, 1.4):
        log.add(make_trace(Forecast(1.0, 2.0, 8.0), end_s=end_s))
    mixed = make_trace(Forecast(1.0, 2.0, 8.0), end_s=50.0)
    mixed.is_mixed = True
    log.add(mixed)
    log.settle()
    found = log.accuracy()
    assert found["restores"] == 4
    assert found["median_ratio"] == pytest.approx(1.05)
    assert found["error_p50"] == pytest.approx(0.1)
    assert found["error_p95"] == pytest.approx(0.4)


def test_what_restores_have_taken_beyond_their_plans_is_part_of_the_next_forecast() -> None:
    log, costs = make_log()
    for end_s in (1.5, 3.0):
        log.add(make_trace(Forecast(1.0, 2.0, 8.0, overhead_s=0.5), end_s=end_s))
        log.settle()
    assert log.accuracy()["median_ratio"] == pytest.approx((1.5 / 1.5 + 3.0 / 1.5) / 2)
    assert log.as_list()[0]["requests"][0]["planned_s"] == 1.5
    # And is learned as what is beyond the plan alone.
    assert [each for each in costs.observed if each[0] == "overhead"] == [
        ("overhead", 1.0, 1.5),
        ("overhead", 1.0, 3.0),
    ]
