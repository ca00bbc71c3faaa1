"""What is measured of the scheduler's thread."""

from __future__ import annotations

import pytest

from krul_sglang.engine.common.step_times import NUM_STEPS, StepTimes, timed
from tests.support.store_builders import Clock


class Linker:
    """Takes as long as it is told."""

    def __init__(self, clock: Clock) -> None:
        self.steps = StepTimes(clock)
        self._clock = clock

    @timed
    def load(self, plan_s: float, rest_s: float) -> str:
        with self.steps.planning:
            self._clock.now_s += plan_s
        self.work(rest_s)
        return "loaded"

    @timed
    def work(self, seconds: float) -> None:
        self.steps.note_work()
        self._clock.now_s += seconds

    @timed
    def fail(self) -> None:
        self._clock.now_s += 0.5
        raise OSError("injected")


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def linker(clock: Clock) -> Linker:
    return Linker(clock)


def test_calls_within_calls_count_once_and_planning_apart(linker: Linker, clock: Clock) -> None:
    assert linker.load(0.25, 0.5) == "loaded"
    clock.now_s += 100.0
    linker.work(0.125)
    linker.steps.begin_step()
    assert linker.steps.as_dict() == {
        "step_ms": {"p50": 875.0, "p99": 875.0, "largest": 875.0},
        "planning_ms": {"p50": 250.0, "p99": 250.0, "largest": 250.0},
        "beyond_planning_ms": {"p50": 625.0, "p99": 625.0, "largest": 625.0},
        "steps": 1,
    }


def test_a_hook_that_raises_is_measured_too(linker: Linker) -> None:
    with pytest.raises(OSError, match="injected"):
        linker.fail()
    linker.work(0.5)
    linker.steps.begin_step()
    assert linker.steps.as_dict()["step_ms"]["largest"] == 1000.0


def test_steps_without_work_do_not_count(linker: Linker, clock: Clock) -> None:
    nothing = {"p50": 0.0, "p99": 0.0, "largest": 0.0}
    assert linker.steps.as_dict()["step_ms"] == nothing
    for _ in range(1000):
        linker.steps.begin_step()
        with linker.steps.hooks:
            clock.now_s += 1.0
    linker.work(0.5)
    linker.steps.begin_step()
    linker.steps.begin_step()
    assert linker.steps.as_dict()["steps"] == 1
    # What an idle pass took is not added to the next one.
    assert linker.steps.as_dict()["step_ms"]["largest"] == 1500.0


def test_percentiles_are_those_of_the_last_steps(linker: Linker) -> None:
    linker.work(1000.0)
    for number in range(NUM_STEPS):
        linker.steps.begin_step()
        linker.work((number + 1) / 1024)
    linker.steps.begin_step()
    shown = linker.steps.as_dict()
    assert shown["steps"] == NUM_STEPS + 1
    # 99% of 4096 steps, rounded up, are 4056.
    assert shown["step_ms"] == {"p50": 2000.0, "p99": round(4056 * 1000 / 1024, 3), "largest": 4000.0}
