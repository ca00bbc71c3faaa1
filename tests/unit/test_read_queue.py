"""The queue before a tier's reads: what is wanted most urgently comes first."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest

from krul_backend.errors import StoreClosedError
from krul_backend.tiers.common.read_queue import QueuedRead, ReadPriority, ReadQueue

LOAD, PREFETCH, REST, UPKEEP = ReadPriority


class Held:
    """A queue of one thread, which is held up by its first call until ``go_on``."""

    def __init__(self) -> None:
        self.queue = ReadQueue(1, "read")
        self.ran: list[str] = []
        self._may_go_on = threading.Event()
        has_begun = threading.Event()

        def hold_up() -> None:
            has_begun.set()
            assert self._may_go_on.wait(20)

        self.first = self.queue.submit(hold_up, UPKEEP)
        assert has_begun.wait(20)

    def submit(self, name: str, priority: ReadPriority) -> QueuedRead:
        return self.queue.submit(lambda: self.ran.append(name), priority)

    def go_on(self) -> list[str]:
        """The names of all calls, in the order in which they ran."""
        self._may_go_on.set()
        self.queue.close()
        return self.ran


@pytest.fixture
def held() -> Iterator[Held]:
    made = Held()
    yield made
    made.go_on()


def test_loads_come_before_prefetches_and_these_before_upkeep(held: Held) -> None:
    for number in range(2):
        for priority in (UPKEEP, REST, PREFETCH, LOAD):
            held.submit(f"{priority.name} {number}", priority)
    assert held.go_on() == [f"{priority.name} {number}" for priority in ReadPriority for number in range(2)]


def test_what_somebody_waits_for_moves_up_and_runs_once(held: Held) -> None:
    held.submit("load", LOAD)
    prefetches = [held.submit(f"prefetch {number}", PREFETCH) for number in range(3)]
    prefetches[2].hurry()
    prefetches[2].hurry()
    held.first.hurry()
    held.submit("later load", LOAD)
    assert held.go_on() == ["load", "prefetch 2", "later load", "prefetch 0", "prefetch 1"]


def test_a_call_is_waited_for_with_its_result_or_error() -> None:
    queue = ReadQueue(1, "read")
    assert queue.run(lambda: 5, UPKEEP) == 5
    with pytest.raises(ZeroDivisionError):
        queue.run(lambda: 1 // 0, UPKEEP)
    assert queue.run(lambda: 6, UPKEEP) == 6, "the thread goes on after an error"
    queue.close()
    with pytest.raises(StoreClosedError):
        queue.run(lambda: 5, UPKEEP)


def test_one_thread_of_several_is_kept_for_loads() -> None:
    queue = ReadQueue(2, "read")
    may_go_on, ran = threading.Event(), list[str]()
    begun = {name: threading.Event() for name in ("prefetch", "upkeep", "load")}

    def call(name: str) -> None:
        begun[name].set()
        assert name == "load" or may_go_on.wait(20)
        ran.append(name)

    queue.submit(lambda: call("prefetch"), PREFETCH)
    assert begun["prefetch"].wait(20)
    queue.submit(lambda: call("upkeep"), UPKEEP)
    queue.submit(lambda: call("load"), LOAD)
    assert begun["load"].wait(20)
    assert not begun["upkeep"].is_set()
    may_go_on.set()
    queue.close()
    assert ran == ["load", "prefetch", "upkeep"]


def test_a_prefetch_that_has_begun_becomes_urgent_when_a_load_waits_for_it(held: Held) -> None:
    assert held.first.priority == UPKEEP
    held.first.hurry()
    assert held.first.priority == LOAD
