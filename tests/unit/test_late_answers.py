"""What becomes of leases when the store answers late, never, or with an error."""

from __future__ import annotations

import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, TypeVar

import pytest
import torch

from krul_backend.planner.interface import RestorePlan
from krul_backend.segment import SegmentHeader
from krul_backend.tiers.common.interface import Lease, Prefetched, SegmentSlice
from krul_sglang.engine.common.asking import (
    TRIAL_INTERVAL_S,
    AskingThread,
    DaemonPatience,
    LatestAnswer,
    Question,
)
from krul_sglang.engine.common.moved_runs import MovedRun
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.held_lease import HeldLease
from krul_sglang.engine.restore.load_batch import Forecast, Load
from krul_sglang.engine.restore.returning_request import State
from krul_sglang.engine.restore.returning_requests import UNCLAIMED_S, ReturningRequests
from tests.support.present import present
from tests.support.store_builders import Clock, page_keys, tokens_of, wait_until
from tests.support.tiered_builders import (
    FLAGS_BYTES,
    MODEL,
    TAKEN_BYTES,
    AskedAtOnce,
    Rig,
    look_up,
    put_below,
    put_in_dram,
)

T = TypeVar("T")
KEYS = page_keys("c", 0, 4)


class AskedLater(AskingThread):
    """Answers a question when the test says so; nobody waits for it."""

    def __init__(self) -> None:
        self.patience = DaemonPatience(longest_s=0.0)
        self.questions: list[Question[Any]] = []

    def ask(self, call: Callable[[], T], *, is_urgent: bool = True) -> Question[T]:
        question = Question(call, is_urgent=is_urgent)
        self.questions.append(question)
        return question

    def answer_next(self) -> None:
        """The next urgent question, else the next one; as the thread does."""
        question = next((one for one in self.questions if one.is_urgent), self.questions[0])
        self.questions.remove(question)
        question.run()

    def answer_all(self) -> None:
        while self.questions:
            self.answer_next()


class LeaseBook:
    """Grants leases at random, notes which of them it has not got back, and now and then fails."""

    def __init__(self, rng: random.Random, longest_s: float = 0.0) -> None:
        self._rng = rng
        self._longest_s = longest_s
        self._lock = threading.Lock()
        self._num_granted = 0
        self.granted: set[int] = set()

    def lease(self, model: object, page_keys: Sequence[str], token_ids: object) -> Lease | None:
        self._take_time()
        with self._lock:
            if self._rng.random() < 0.2:
                return None
            self._num_granted += 1
            self.granted.add(self._num_granted)
            num_pages = self._rng.randint(1, len(page_keys))
            tiers = self._rng.choice((("dram",), ("dram", "ssd"), ("ssd",)))
            return Lease(self._num_granted, num_pages, tuple(self._slice(tier) for tier in tiers))

    def prefetch(self, lease: Lease, tails: object = None, priority: object = None) -> Prefetched:
        self._take_time()
        return Prefetched(1, self._rng.choice((None, None, "no room")))

    def release(self, lease: Lease) -> None:
        with self._lock:
            # A KeyError if it is released twice.
            self.granted.remove(lease.lease_id)

    def _take_time(self) -> None:
        time.sleep(self._rng.random() * self._longest_s)
        if self._rng.random() < 0.1:
            raise ValueError("the store fails now and then")

    def _slice(self, tier: str) -> SegmentSlice:
        number = self._rng.randint(0, 5)
        return SegmentSlice(
            number, SegmentHeader(4, 0, 4, "raw", {}, (10,), (0,)), tier, (), (), (bytes([number]) * 8,), 0, 1
        )


class Requests:
    """Calls ``ReturningRequests`` in any order, as the scheduler does for requests that come, wait and go."""

    def __init__(self, rng: random.Random, store: LeaseBook, asking: AskingThread) -> None:
        self._rng = rng
        self._store = store
        self._clock = Clock()
        store_as_any: Any = store
        self.waiting = ReturningRequests(
            store_as_any, ServedModel(MODEL), asking, self._clock, max_ahead_bytes=35
        )
        self._planned: set[str] = set()
        self._loading: list[Lease] = []

    def do_something(self) -> None:
        rid = self._rng.choice("abcd")
        match self._rng.randrange(10):
            case 0 | 1 | 2:
                self._hold(rid)
            case 3:
                self._admit(rid)
            case 4:
                self.waiting.release(rid)
                self._planned.discard(rid)
                assert self.waiting.state(rid) is State.WAITS
            case 8:
                assert self.waiting.cancel_load(rid) == (rid in self._planned)
                self._planned.discard(rid)
            case 9:
                self._start()
            case 5 | 6:
                with self.waiting.looking_ahead() as queue:
                    for waits in self._rng.sample("abcd", self._rng.randint(0, 4)):
                        self._hold(waits)
                        queue.append(waits)
                self._clock.now_s += self._rng.random()
            case 7:
                self.end_loads()

    def _hold(self, rid: str) -> None:
        first = self._rng.randint(0, 1)
        keys = page_keys(rid, first, 4)
        num_pages = look_up(self.waiting, rid, keys, self._run_of(keys))
        assert 0 <= num_pages <= len(keys)
        if not num_pages or self._rng.random() < 0.1:
            self.waiting.set_aside(rid)

    def _run_of(self, keys: Sequence[str]) -> Callable[[int], MovedRun | None]:
        moved = MovedRun(10, 4, keys, tokens_of(keys), 10) if self._rng.random() < 0.3 else None
        return lambda num_found: moved

    def _admit(self, rid: str) -> None:
        """As the radix cache: the lease goes to a load, or nobody needs it."""
        held = None if rid in self._planned else self.waiting.take(rid)
        if held is not None:
            assert held.lease.lease_id in self._store.granted, "what is loaded must be pinned"
            if self._rng.random() < 0.2:
                self._store.release(held.lease)
            else:
                self.waiting.make_room(held.lease, [None] * len(held.lease.slices))
                self.waiting.queue_load(rid, load_of(held))
                self._planned.add(rid)
        self.waiting.end_lease(rid)
        assert self.waiting.state(rid) is (State.PLANNED if rid in self._planned else State.WAITS)

    def _start(self) -> None:
        """Start the planned loads: the table forgets them."""
        loads = self.waiting.start_loads()
        assert set(loads) == self._planned
        assert all(self.waiting.state(rid) is State.WAITS for rid in loads)
        self._planned.clear()
        self._loading += [load.lease for load in loads.values()]

    def check(self) -> None:
        """Each request is known once, and has what its state says."""
        assert len(self.waiting) <= len("abcd")
        for rid in "abcd":
            load = self.waiting.queued_load(rid)
            assert (self.waiting.state(rid) is State.PLANNED) == (load is not None) == (rid in self._planned)
            assert load is None or load.lease.lease_id in self._store.granted

    def end_loads(self) -> None:
        for lease in self._loading:
            self._store.release(lease)
        self._loading.clear()


def load_of(held: HeldLease) -> Load:
    return Load(
        held.lease,
        (),
        torch.empty(0),
        0,
        RestorePlan((0,), 1.0),
        Forecast(head_s=0.0, load_s=0.0, recompute_s=1.0),
    )


@pytest.mark.parametrize("seed", range(200))
def test_no_lease_is_lost_in_any_order_of_calls_and_answers(seed: int) -> None:
    rng = random.Random(seed)
    store, asking = LeaseBook(rng), AskedLater()
    requests = Requests(rng, store, asking)
    for _ in range(rng.randint(1, 80)):
        if asking.questions and rng.random() < 0.4:
            asking.answer_next()
        else:
            requests.do_something()
            requests.check()
    if rng.random() < 0.5:
        asking.answer_all()
    requests.waiting.release_all()
    requests.end_loads()
    asking.answer_all()
    assert (store.granted, len(requests.waiting)) == (set(), 0)


@pytest.mark.parametrize("seed", range(5))
def test_no_lease_is_lost_while_the_store_takes_its_time(seed: int) -> None:
    rng = random.Random(seed)
    store = LeaseBook(rng, longest_s=0.002)
    asking = AskingThread(DaemonPatience(longest_s=0.001), trial=lambda: None)
    requests = Requests(rng, store, asking)
    for _ in range(150):
        requests.do_something()
    requests.waiting.release_all()
    requests.end_loads()
    asking.close()
    assert store.granted == set()


@pytest.fixture
def rig() -> Rig:
    return Rig()


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def asking() -> AskedLater:
    return AskedLater()


@pytest.fixture
def waiting(rig: Rig, asking: AskedLater, clock: Clock) -> ReturningRequests:
    return ReturningRequests(rig.store, ServedModel(MODEL), asking, clock)


def promise(waiting: ReturningRequests, rid: str = "r", keys: tuple[str, ...] = KEYS) -> int:
    return look_up(waiting, rid, keys)


def wait_a_round(waiting: ReturningRequests, rids: str) -> None:
    with waiting.looking_ahead() as queue:
        queue += rids


def test_a_late_answer_is_used_in_the_next_round(
    rig: Rig, waiting: ReturningRequests, asking: AskedLater
) -> None:
    put_in_dram(rig, "c", 0, 3)
    for _ in range(3):
        assert promise(waiting) == 0
        waiting.set_aside("r")
    assert len(asking.questions) == 1
    asking.answer_all()
    assert promise(waiting) == 3
    assert asking.questions == []
    waiting.release("r")
    rig.assert_nothing_is_held()


def test_a_late_answer_goes_back_when_its_request_has_gone(
    rig: Rig, waiting: ReturningRequests, asking: AskedLater, clock: Clock
) -> None:
    put_in_dram(rig, "c", 0, 3)
    promise(waiting)
    wait_a_round(waiting, "r")
    asking.answer_all()
    # While it waits its lease is kept, though nobody looks it up.
    for _ in range(3):
        wait_a_round(waiting, "r")
        clock.now_s += UNCLAIMED_S
    assert waiting.num_leases == 1
    # It was computed, of which nothing is reported.
    wait_a_round(waiting, "")
    assert waiting.num_leases == 0
    rig.assert_nothing_is_held()


def test_the_answer_for_a_request_that_was_aborted_meanwhile_is_released(
    rig: Rig, waiting: ReturningRequests, asking: AskedLater, monkeypatch: pytest.MonkeyPatch
) -> None:
    put_in_dram(rig, "c", 0, 3)
    granted: list[Lease] = []
    lease = rig.store.lease

    def abort_meanwhile(*args: Any) -> Lease | None:
        found = lease(*args)
        waiting.release("r")
        assert rig.store.stats().num_leases == 1
        granted.append(found)
        return found

    monkeypatch.setattr(rig.store, "lease", abort_meanwhile)
    promise(waiting)
    asking.answer_all()
    assert len(granted) == 1
    assert rig.store.stats().num_leases == 0
    rig.assert_nothing_is_held()


def test_a_lease_that_another_rank_lacks_is_kept_for_a_while(
    rig: Rig, waiting: ReturningRequests, asking: AskedLater, clock: Clock
) -> None:
    """The other rank's answer was late: with this lease given back, the next round would lack this one."""
    put_in_dram(rig, "c", 0, 3)
    promise(waiting)
    asking.answer_all()
    assert promise(waiting) == 3
    waiting.set_aside("r")
    assert promise(waiting) == 3
    waiting.set_aside("r")
    assert asking.questions == []
    clock.now_s += UNCLAIMED_S
    wait_a_round(waiting, "")
    rig.assert_nothing_is_held()


def test_a_prefetch_is_sent_without_waiting_and_known_later(
    rig: Rig, waiting: ReturningRequests, asking: AskedLater, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    promise(waiting)
    asking.answer_all()
    wait_a_round(waiting, "r")
    assert (len(asking.questions), rig.ssd.num_reads) == (1, 0)
    # What nobody has asked yet is asked again in the order of now, not twice.
    wait_a_round(waiting, "rs")
    asking.answer_all()
    wait_until(lambda: rig.store.stats().fetched_segments == 1)
    # The answer of before, and then one that is younger than the arrival.
    for _ in range(2):
        clock.now_s += 1.0
        wait_a_round(waiting, "r")
        asking.answer_all()
    assert rig.ssd.num_reads == 1
    held = present(waiting.take("r"))
    assert held.lease.is_in_dram
    rig.store.release(held.lease)
    rig.assert_nothing_is_held()


def test_what_is_admitted_takes_the_lease_it_has_if_a_newer_one_is_late(
    rig: Rig, waiting: ReturningRequests, asking: AskedLater, clock: Clock
) -> None:
    put_below(rig.ssd, "c", 0, 4)
    promise(waiting)
    asking.answer_all()
    assert promise(waiting) == 4
    clock.now_s += 1.0
    held = present(waiting.take("r"))
    assert rig.store.stats().num_leases == 1
    asking.answer_all()
    # The late one has been released, and the one that was taken has not.
    assert rig.store.stats().num_leases == 1
    rig.store.release(held.lease)
    rig.assert_nothing_is_held()


def test_room_is_made_when_the_refusal_comes_late(waiting: ReturningRequests, clock: Clock) -> None:
    rig, asking = Rig(TAKEN_BYTES + FLAGS_BYTES), AskedLater()
    put_in_dram(rig, "a", 0, 4)
    put_below(rig.ssd, "x", 0, 4)
    waiting = ReturningRequests(rig.store, ServedModel(MODEL), asking, clock)
    for name in "ax":
        promise(waiting, name, page_keys(name, 0, 4))
    asking.answer_all()
    wait_a_round(waiting, "a")
    held = present(waiting.take("x"))
    waiting.make_room(held.lease, [None] * len(held.lease.slices))
    assert rig.store.stats().num_leases == 2
    asking.answer_all()
    wait_a_round(waiting, "a")
    assert rig.store.stats().num_leases == 1
    rig.store.release(held.lease)
    rig.assert_nothing_is_held()


@pytest.fixture
def slow() -> Iterator[AskingThread]:
    """Of a store that answers when ``slow.answers`` is set."""
    thread = AskingThread(DaemonPatience(longest_s=0.05), trial=lambda: None)
    yield thread
    thread.close()


def test_only_one_round_waits_for_a_store_that_is_slow(slow: AskingThread) -> None:
    is_slow, answers = threading.Event(), threading.Event()
    is_slow.set()

    def answer() -> int:
        if is_slow.is_set():
            answers.wait(20)
        return 1

    slow._trial = answer
    begin_s = time.monotonic()
    questions = [slow.ask(answer) for _ in range(100)]
    assert [question.wait(slow.patience) for question in questions] == 100 * [False]
    # Once, not 100 times.
    assert 0.05 <= time.monotonic() - begin_s < 2.5
    assert slow.patience.seconds == 0.0
    # It stays so while answers come, but late; nobody has to ask for it to end.
    is_slow.clear()
    answers.set()
    wait_until(lambda: slow.patience.seconds == 0.05)
    assert [question.answer(0) for question in questions if question.wait(slow.patience, 20)] == 100 * [1]


def test_a_trial_finds_out_that_the_store_is_prompt_again(slow: AskingThread) -> None:
    slow.ask(lambda: time.sleep(0.1))
    wait_until(lambda: slow.patience.seconds == 0.0)
    begin_s = time.monotonic()
    wait_until(lambda: slow.patience.seconds == 0.05)
    assert time.monotonic() - begin_s >= 0.5 * TRIAL_INTERVAL_S


def test_urgent_questions_overtake_others(slow: AskingThread) -> None:
    asked: list[int] = []
    may_go_on = threading.Event()
    slow.ask(may_go_on.wait)
    for number in range(3):
        slow.ask(partial(asked.append, number), is_urgent=False)
    last = slow.ask(partial(asked.append, 3))
    may_go_on.set()
    wait_until(lambda: len(asked) == 4)
    assert asked == [3, 0, 1, 2]
    assert last.is_answered


def test_the_latest_answer_is_that_of_now_unless_it_is_late() -> None:
    asking, counter = AskedLater(), itertools.count(1)
    latest = LatestAnswer(asking, lambda: next(counter), before=0)
    assert [latest(), latest()] == [0, 0]
    assert len(asking.questions) == 1
    asking.answer_all()
    # What came late is no answer of now: it is asked again.
    assert latest() == 1
    assert len(asking.questions) == 1
    assert latest() == 1
    asking.answer_all()
    assert latest() == 2
    assert LatestAnswer(AskedAtOnce(), lambda: next(counter), before=0)() == 3


def test_what_is_asked_after_the_end_has_no_answer() -> None:
    asking = AskingThread(DaemonPatience(), trial=lambda: None)
    asking.close()
    assert not asking.ask(lambda: 1).wait(asking.patience)
