"""What the marks of a restore become, on a clock that the test moves."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend.device import Device, Mark
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import ComputeCost, RestoreCosts, RestorePlan, TierCost
from krul_sglang.engine.restore.load_batch import Forecast, LayerTimes, Load, LoadBatch
from krul_sglang.engine.restore.restore_trace import RestoreTrace, TraceLog

NUM_LAYERS = 3
COSTS = RestoreCosts(ComputeCost(1.0, 0.0, 0.0), ComputeCost(1.0, 0.0, 0.0), {"dram": TierCost(1.0, 0.0)})


class Clock:
    """Marks are the time that the test set."""

    now_s = 0.0
    begin_ns = 5_000

    def mark(self) -> Mark:
        now_s = self.now_s
        return lambda: now_s

    def at(self, now_s: float) -> Mark:
        self.now_s = now_s
        return self.mark()


def make_batch(clock: Clock) -> LoadBatch:
    load = Load(
        lease=SimpleNamespace(),  # type: ignore[arg-type]
        readers=(),
        slots=torch.arange(64),
        device_tokens=16,
        plan=RestorePlan((48, 32, 16), end_s=0.5),
        forecast=Forecast(head_s=1.0, load_s=4.0, recompute_s=8.0, own_layer_s=0.2),
    )
    batch = LoadBatch({"a": load}, NUM_LAYERS, Device(torch.device("cpu")), patience_s=5.0)
    batch.clock = clock  # type: ignore[assignment]
    return batch


def mark_heads(trace: RestoreTrace, clock: Clock, *, begin_s: float, num_layers: int) -> None:
    """Layers of a tenth of a second each."""
    for layer in (*range(num_layers), NUM_LAYERS):
        clock.now_s = begin_s + 0.1 * (num_layers if layer == NUM_LAYERS else layer)
        trace.mark_head_layer(layer)


def ended_restore() -> RestoreTrace:
    """Heads in two chunks, layer by layer loads, and a forward that waits for layers 0 and 1."""
    clock = Clock()
    batch = make_batch(clock)
    trace = RestoreTrace(batch, is_mixed=False)
    mark_heads(trace, clock, begin_s=0.0, num_layers=2)
    mark_heads(trace, clock, begin_s=0.2, num_layers=1)
    for layer in range(NUM_LAYERS):
        batch.landed([LayerTimes(clock.at(0.5 * layer), clock.at(0.5 * layer + 0.5))])
    for layer, (begin_s, end_s) in enumerate([(0.3, 0.5), (0.6, 1.0), (1.5, 1.5)]):
        batch.wait_times[layer] = LayerTimes(clock.at(begin_s), clock.at(end_s))
    trace.end = clock.at(1.7)
    return trace


def seconds(rows: list[list[float]]) -> list[list[float]]:
    return [[layer, pytest.approx(begin_s), pytest.approx(end_s)] for layer, begin_s, end_s in rows]


def test_streams_of_a_restore() -> None:
    value = ended_restore().as_dict()
    assert value["streams"]["load"] == seconds([[0, 0.0, 0.5], [1, 0.5, 1.0], [2, 1.0, 1.5]])
    assert value["streams"]["head"] == seconds([[0, 0.0, 0.1], [1, 0.1, 0.2], [0, 0.2, 0.3]])
    assert value["streams"]["wait"] == seconds([[0, 0.3, 0.5], [1, 0.6, 1.0], [2, 1.5, 1.5]])
    assert value["streams"]["own"] == seconds([[0, 0.5, 0.6], [1, 1.0, 1.5], [2, 1.5, 1.7]])
    assert value["end_s"] == pytest.approx(1.7)
    assert (value["is_mixed"], value["was_rescued"]) == (False, False)
    assert value["requests"] == [
        {
            "rid": "a",
            "device_tokens": 16,
            "restored_tokens": 64,
            "head_ends": [48, 32, 16],
            "tiers": [],
            "planned_s": 0.5,
        }
    ]


@pytest.mark.parametrize("num_landed", [0, 1])
def test_a_load_that_was_given_up_shows_the_heads_before_it(num_landed: int) -> None:
    """With no layer landed, too: then the forward got through no wait at all."""
    clock = Clock()
    batch = make_batch(clock)
    trace = RestoreTrace(batch, is_mixed=False)
    for layer in range(num_landed):
        batch.landed([LayerTimes(clock.at(0.0), clock.at(0.5))])
        batch.wait_times[layer] = LayerTimes(clock.at(0.3), clock.at(0.5))
    mark_heads(trace, clock, begin_s=1.0, num_layers=2)
    batch.abandon(is_refilled=True)
    trace.end = clock.at(2.0)
    value: dict[str, Any] = trace.as_dict()
    assert value["was_rescued"] is True
    assert value["streams"]["head"] == seconds([[0, 1.0, 1.1], [1, 1.1, 1.2]])
    assert len(value["streams"]["load"]) == len(value["streams"]["wait"]) == num_landed
    assert value["streams"]["own"] == []

    costs = OnlineCosts(COSTS)
    log = TraceLog(costs, NUM_LAYERS)
    log.add(trace)
    log.settle()
    assert log.as_list() == [value]
    assert costs.current() == COSTS, "nothing is learned of a restore that failed"


def test_costs_learn_from_a_restore_that_the_device_has_ended() -> None:
    costs = OnlineCosts(COSTS, half_life=1.0)
    log = TraceLog(costs, NUM_LAYERS)
    trace = ended_restore()
    end, trace.end = trace.end, lambda: None
    settled: list[Any] = []
    log.on_settled = lambda begin_ns, restore: settled.append((begin_ns, restore))
    log.add(trace)
    log.settle()
    assert log.as_list() == settled == []
    assert costs.current() == COSTS

    trace.end = end
    log.settle()
    assert len(log.as_list()) == 1
    assert settled == [(Clock.begin_ns, log.as_list()[0])]
    # Half-way on the logarithmic scale, towards measured / predicted.
    learned = costs.current()
    assert learned.head.launch_s == pytest.approx((0.3 / 1.0) ** 0.5)
    assert learned.own == COSTS.own
    assert learned.tiers["dram"].latency_s == pytest.approx((1.5 / 4.0) ** 0.5)
    # Planned to end after 0.5 s, ended after 1.7 s.
    assert learned.overhead_s == pytest.approx(1.2)


def test_a_forward_shared_with_other_requests_says_nothing_about_the_overhead() -> None:
    costs = OnlineCosts(COSTS, half_life=1.0)
    log = TraceLog(costs, NUM_LAYERS)
    trace = ended_restore()
    trace.is_mixed = True
    log.add(trace)
    log.settle()
    assert log.as_list()[0]["is_mixed"] is True
    assert costs.current().overhead_s == 0.0
    assert costs.current().head != COSTS.head
