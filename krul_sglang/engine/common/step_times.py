"""Measures how much time krul takes of the scheduler's thread, step by step."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from functools import update_wrapper
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar

NUM_STEPS = 4096
"""Steps of which times are kept."""

P = ParamSpec("P")
R = TypeVar("R")


class Stopwatch:
    """Adds up the time inside ``with`` blocks; of blocks within each other only the outermost."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.total_s = 0.0
        self._clock = clock
        self._depth = 0
        self._begin_s = 0.0

    def __enter__(self) -> None:
        self._depth += 1
        if self._depth == 1:
            self._begin_s = self._clock()

    def __exit__(self, *error: object) -> None:
        self._depth -= 1
        if not self._depth:
            self.total_s += self._clock() - self._begin_s


class StepTimes:
    """Keeps the times of the last ``NUM_STEPS`` steps. For the scheduler's thread.

    A step is one pass of SGLang's scheduling loop that ran a forward or looked a request up; an idle server
    goes through thousands of others. ``hooks`` is held while SGLang calls krul, ``planning``, within it,
    while a load is planned. A forward is not among them, nor its wait for the layers that are loaded.
    """

    def __init__(self, clock: Callable[[], float] = time.perf_counter) -> None:
        self.hooks = Stopwatch(clock)
        self.planning = Stopwatch(clock)
        self._has_work = False
        self._steps: deque[tuple[float, float]] = deque(maxlen=NUM_STEPS)
        self._num_steps = 0

    def begin_step(self) -> None:
        """The next pass of the loop begins."""
        if self._has_work:
            self._num_steps += 1
            self._steps.append((self.hooks.total_s, self.planning.total_s))
        self._has_work = False
        self.hooks.total_s = self.planning.total_s = 0.0

    def note_work(self) -> None:
        """This step does something for a request."""
        self._has_work = True

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``; ``step_ms`` includes planning."""
        steps = list(self._steps)
        return {
            "step_ms": _spread_ms([hooks_s for hooks_s, _ in steps]),
            "planning_ms": _spread_ms([planning_s for _, planning_s in steps]),
            "beyond_planning_ms": _spread_ms([hooks_s - planning_s for hooks_s, planning_s in steps]),
            "steps": self._num_steps,
        }


def _spread_ms(seconds: Sequence[float]) -> dict[str, float]:
    """Median, 99th percentile (the smallest that 99% do not exceed) and largest, in milliseconds."""
    ordered = sorted(seconds) or [0.0]
    of_rank = {"p50": -(-len(ordered) // 2), "p99": -(-99 * len(ordered) // 100), "largest": len(ordered)}
    return {name: round(1000 * ordered[rank - 1], 3) for name, rank in of_rank.items()}


class Timed(Protocol):
    """Has the ``StepTimes`` of its rank."""

    steps: StepTimes


S = TypeVar("S", bound=Timed)


def timed(method: Callable[Concatenate[S, P], R]) -> Callable[Concatenate[S, P], R]:
    """Count the time of a method that SGLang calls as that of a hook."""

    def with_time(self: S, /, *args: P.args, **kwargs: P.kwargs) -> R:
        with self.steps.hooks:
            return method(self, *args, **kwargs)

    return update_wrapper(with_time, method)
