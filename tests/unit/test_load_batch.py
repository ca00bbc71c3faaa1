"""A batch of loads and the forward that waits for it: failures, deadlines, loads that are given up."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import wait
from typing import Any

import pytest
import torch

from krul_sglang.engine import load_batch
from krul_sglang.engine.load_batch import LoadBatch, LoadFailedError
from krul_sglang.engine.transfer_gate import TransferGate
from tests.unit.engine_builders import PATIENCE_S, in_threads, layer_times
from tests.unit.loading_builders import NUM_LAYERS, NUM_TOKENS, Rig, is_equal

CPU = torch.device("cpu")
SHORT_S = 0.05
"""A deadline that passes soon; what is tested to pass it waits for an event that the test sets."""


def make_batch(timeout_s: float = PATIENCE_S) -> LoadBatch:
    return LoadBatch({}, NUM_LAYERS, CPU, timeout_s)


# ---- the batch alone ----


def begins_to_wait(batch: LoadBatch, monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Set when a thread waits for the batch: what is reported to it afterwards must wake that thread."""
    is_waiting = threading.Event()
    wait_for_change = batch._changed.wait

    def waiting(timeout: float | None = None) -> bool:
        # The lock is held until the wait itself gives it away.
        is_waiting.set()
        return wait_for_change(timeout)

    monkeypatch.setattr(batch._changed, "wait", waiting)
    return is_waiting


def test_a_layer_that_has_landed_is_not_waited_for() -> None:
    batch = make_batch(timeout_s=0.0)
    for _ in range(2):
        batch.landed(layer_times())
    batch.wait_layer(0)
    batch.wait_layer(1)
    assert sorted(batch.wait_times) == [0, 1]
    with pytest.raises(LoadFailedError, match=r"no layer has landed for 0\.0 s"):
        batch.wait_layer(2)
    assert sorted(batch.wait_times) == [0, 1]


def test_a_waiting_forward_goes_on_when_its_layer_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    is_waiting = begins_to_wait(batch, monkeypatch)
    with in_threads() as start:
        waiting = start(lambda: batch.wait_layer(1))
        assert is_waiting.wait(PATIENCE_S)
        batch.landed(layer_times())
        assert not waiting.done()
        batch.landed(layer_times())
        waiting.result(PATIENCE_S / 2)
    assert list(batch.wait_times) == [1]


def test_the_wait_for_a_layer_is_timed_once() -> None:
    batch = make_batch()
    batch.landed(layer_times())
    batch.wait_layer(0)
    first = batch.wait_times[0]
    # The getters of keys and of values both ask.
    batch.wait_layer(0)
    assert batch.wait_times[0] is first


def test_a_failure_reaches_a_waiting_forward_with_its_cause(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    is_waiting = begins_to_wait(batch, monkeypatch)
    cause = OSError("the disk is gone")
    with in_threads() as start:
        waiting = start(lambda: batch.wait_layer(0))
        assert is_waiting.wait(PATIENCE_S)
        batch.fail(cause)
        with pytest.raises(LoadFailedError, match="the disk is gone") as caught:
            waiting.result(PATIENCE_S / 2)
    assert caught.value.__cause__ is cause
    assert batch.wait_times == {}


class ScriptedTime:
    """Stands for the module ``time`` in ``load_batch``: tells these seconds, one for each question."""

    def __init__(self, *seconds: float) -> None:
        self.left = list(seconds)

    def monotonic(self) -> float:
        return self.left.pop(0)


def test_the_deadline_counts_from_the_last_layer_that_landed(monkeypatch: pytest.MonkeyPatch) -> None:
    # Made, landed, waiting from shortly before the deadline of 9 + 10 on, and still waiting after it.
    clock = ScriptedTime(0.0, 9.0, 18.99, 19.01)
    monkeypatch.setattr(load_batch, "time", clock)
    batch = make_batch(timeout_s=10.0)
    batch.landed(layer_times())
    with pytest.raises(LoadFailedError, match=r"10\.0 s"):
        batch.wait_layer(1)
    assert clock.left == []


def test_every_layer_that_lands_moves_the_deadline(monkeypatch: pytest.MonkeyPatch) -> None:
    # Three times 9 s of a deadline of 10 s pass, then nothing comes any more.
    clock = ScriptedTime(0.0, 9.0, 18.0, 27.0, 37.0)
    monkeypatch.setattr(load_batch, "time", clock)
    batch = LoadBatch({}, NUM_LAYERS + 1, CPU, timeout_s=10.0)
    for layer in range(NUM_LAYERS):
        batch.landed(layer_times())
        batch.wait_layer(layer)
    with pytest.raises(LoadFailedError):
        batch.wait_layer(NUM_LAYERS)
    assert clock.left == []


def test_all_layers_are_waited_for_before_ranks_agree() -> None:
    batch = make_batch()
    with in_threads() as start:
        waiting = start(batch.wait_queued)
        for _ in range(NUM_LAYERS - 1):
            batch.landed(layer_times())
        assert not waiting.done()
        batch.landed(layer_times())
        waiting.result(PATIENCE_S)
    failed = make_batch()
    failed.landed(layer_times())
    failed.fail(OSError("no"))
    with pytest.raises(LoadFailedError):
        failed.wait_queued()


def test_giving_up_waits_for_the_write_under_way_and_forbids_the_next() -> None:
    batch = make_batch()
    is_writing, has_given_up, may_end = threading.Event(), threading.Event(), threading.Event()

    def write() -> tuple[bool, bool]:
        with batch.writing() as is_wanted:
            is_writing.set()
            may_end.wait(PATIENCE_S)
            was_overtaken = has_given_up.is_set()
        return is_wanted, was_overtaken

    def give_up() -> None:
        batch.abandon(is_refilled=True)
        has_given_up.set()

    with in_threads() as start:
        writing = start(write)
        assert is_writing.wait(PATIENCE_S)
        giving_up = start(give_up)
        # Cannot be set, however long it takes: the write has not ended.
        assert not has_given_up.wait(SHORT_S)
        assert not batch.is_abandoned
        may_end.set()
        giving_up.result(PATIENCE_S)
        assert writing.result(PATIENCE_S) == (True, False)
    with batch.writing() as is_wanted:
        assert not is_wanted


def test_a_batch_that_was_given_up_is_not_waited_for() -> None:
    batch = make_batch(timeout_s=0.0)
    batch.abandon(is_refilled=False)
    for layer in range(NUM_LAYERS):
        batch.wait_layer(layer)
    assert batch.wait_times == {}
    assert not batch.wait_end()


@pytest.mark.parametrize("ending", ["landed", "failed", "abandoned"])
def test_the_end_is_waited_for_and_told(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    is_waiting = begins_to_wait(batch, monkeypatch)
    reports: list[Callable[[], None]] = [lambda: batch.landed(layer_times())] * NUM_LAYERS
    if ending == "failed":
        reports.append(lambda: batch.fail(OSError("no")))
    with in_threads() as start:
        waiting = start(batch.wait_end)
        assert is_waiting.wait(PATIENCE_S)
        for report in reports:
            is_waiting.clear()
            report()
            # Woken, and not at the end yet.
            assert is_waiting.wait(PATIENCE_S)
        if ending == "abandoned":
            batch.abandon(is_refilled=True)
        else:
            batch.end()
        assert waiting.result(PATIENCE_S / 2) == (ending == "landed")


class FakeEvent:
    """Counts as recorded on the stream that was current then."""

    def __init__(self, log: list[object], enable_timing: bool = False) -> None:
        self._log = log
        self.is_timing = enable_timing

    def record(self) -> None:
        self._log.append(self)


class FakeStream:
    def __init__(self) -> None:
        self.waited: list[object] = []

    def wait_event(self, event: object) -> None:
        self.waited.append(event)


def test_on_a_gpu_what_follows_waits_for_the_writes_that_are_queued(monkeypatch: pytest.MonkeyPatch) -> None:
    """The events of a layer that landed, and of one that failed half-way."""
    recorded: list[Any] = []
    forward = FakeStream()
    monkeypatch.setattr(torch.cuda, "Event", lambda **kwargs: FakeEvent(recorded, **kwargs))
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: forward)
    batch = LoadBatch({}, NUM_LAYERS, torch.device("cuda"), PATIENCE_S)
    with batch.writing():
        batch.landed(layer_times())
    with pytest.raises(OSError, match="half-way"), batch.writing():
        raise OSError("half-way")
    batch.wait_layer(0)
    landed, last_written = forward.waited.copy(), [event for event in recorded if not event.is_timing][-1]
    batch.abandon(is_refilled=True)
    assert len(landed) == 1
    assert forward.waited == [*landed, last_written]
    assert last_written is not landed[0]


# ---- the loader ----


@pytest.fixture
def patient() -> Iterator[Rig]:
    rig = Rig(PATIENCE_S)
    yield rig
    rig.loader.close()
    rig.store.close()


class Stuck:
    """Stops the loading of one layer of the first batch until ``go_on`` is set."""

    def __init__(self, layer: int) -> None:
        self.layer = layer
        self.has_come = threading.Event()
        self.go_on = threading.Event()

    def __call__(self, index: int, layer: int) -> None:
        if (index, layer) == (0, self.layer):
            self.has_come.set()
            self.go_on.wait(PATIENCE_S)


@pytest.fixture
def stuck_rig() -> Iterator[tuple[Rig, Stuck]]:
    rig, stuck = Rig(SHORT_S), Stuck(1)
    rig.before_layer = stuck
    yield rig, stuck
    stuck.go_on.set()
    rig.loader.close()
    rig.store.close()


FIRST_SLOTS = torch.arange(0, NUM_TOKENS)
OTHER_SLOTS = torch.arange(30, 30 + NUM_TOKENS)


def test_layers_land_in_order_and_are_written_when_waited_for(patient: Rig) -> None:
    index = patient.start(FIRST_SLOTS)
    patient.loader.counter.set_consumer(index)
    for layer in range(NUM_LAYERS):
        patient.loader.counter.wait_until(layer)
        assert patient.holds(layer, FIRST_SLOTS)
    assert patient.loader.finish(index)
    assert (patient.num_leases(), patient.loader.num_pending()) == (0, 0)
    assert patient.loader.counters.tokens == NUM_TOKENS
    # Later forwards that still name it wait for nothing.
    patient.loader.counter.wait_until(0)


def test_loads_of_one_batch_land_together(patient: Rig) -> None:
    patient.loader.queue("one", patient.load(FIRST_SLOTS))
    patient.loader.queue("two", patient.load(OTHER_SLOTS))
    assert patient.loader.num_queued() == 2
    index = patient.loader.start()
    assert set(patient.batch(index).loads) == {"one", "two"}
    assert patient.loader.finish(index)
    for layer in range(NUM_LAYERS):
        assert patient.holds(layer, FIRST_SLOTS)
        assert patient.holds(layer, OTHER_SLOTS)
    assert patient.num_leases() == 0


def test_a_failed_layer_fails_those_after_it_and_the_batch(patient: Rig) -> None:
    def fail(index: int, layer: int) -> None:
        if index == 0 and layer == 2:
            raise OSError("injected")

    patient.before_layer = fail
    index = patient.start(FIRST_SLOTS)
    with pytest.raises(LoadFailedError, match="injected"):
        patient.batch(index).wait_layer(2)
    assert not patient.loader.finish(index)
    assert patient.loader.counters.failed_batches == 1
    assert patient.loader.counters.tokens == 0
    assert patient.num_leases() == 0
    # The next one is not affected.
    again = patient.start(OTHER_SLOTS)
    assert patient.loader.finish(again)
    assert patient.holds(2, OTHER_SLOTS)


def test_a_failed_load_whose_slots_were_refilled_counts_as_landed(patient: Rig) -> None:
    def fail(index: int, layer: int) -> None:
        raise OSError("injected")

    patient.before_layer = fail
    index = patient.start(FIRST_SLOTS)
    with pytest.raises(LoadFailedError):
        patient.batch(index).wait_layer(0)
    patient.batch(index).abandon(is_refilled=True)
    assert patient.loader.finish(index)
    assert patient.loader.counters.failed_batches == 1


@pytest.mark.parametrize("is_refilled", [True, False])
def test_a_stuck_load_is_given_up_and_writes_nothing_later(
    stuck_rig: tuple[Rig, Stuck], is_refilled: bool
) -> None:
    rig, stuck = stuck_rig
    index = rig.start(FIRST_SLOTS)
    batch, running = rig.batch(index), rig.loader._running[index]
    assert stuck.has_come.wait(PATIENCE_S)
    batch.wait_layer(0)
    with pytest.raises(LoadFailedError, match="no layer has landed"):
        batch.wait_layer(1)
    batch.abandon(is_refilled=is_refilled)
    # What the engine writes now, in place of the load:
    for layer in range(NUM_LAYERS):
        for buffer in rig.pool.buffers(layer):
            buffer[FIRST_SLOTS] = 7.0
    before = rig.pool.copy()
    assert rig.loader.finish(index) == is_refilled
    assert not running.done()
    assert rig.num_leases() == 1
    stuck.go_on.set()
    running.result(PATIENCE_S)
    assert all(is_equal(new, old) for new, old in zip(rig.pool.copy(), before, strict=True))
    assert rig.num_leases() == 0
    assert rig.loader.counters.tokens == 0


def test_later_loads_do_not_wait_behind_a_stuck_one(stuck_rig: tuple[Rig, Stuck]) -> None:
    rig, stuck = stuck_rig
    index = rig.start(FIRST_SLOTS)
    running = rig.loader._running[index]
    assert stuck.has_come.wait(PATIENCE_S)
    rig.batch(index).abandon(is_refilled=True)
    rig.loader.finish(index)
    for _ in range(2):
        assert rig.loader.finish(rig.start(OTHER_SLOTS))
        assert all(rig.holds(layer, OTHER_SLOTS) for layer in range(NUM_LAYERS))
    assert not running.done()
    assert rig.num_leases() == 1
    stuck.go_on.set()
    running.result(PATIENCE_S)
    assert rig.num_leases() == 0


def test_a_load_that_lands_after_its_deadline_but_before_it_is_given_up_is_whole(
    stuck_rig: tuple[Rig, Stuck],
) -> None:
    rig, stuck = stuck_rig
    index = rig.start(FIRST_SLOTS)
    batch = rig.batch(index)
    with pytest.raises(LoadFailedError):
        batch.wait_layer(1)
    stuck.go_on.set()
    assert batch.wait_end()
    # The forward learned of the deadline and gives up anyway: the slots are its own from then on.
    batch.abandon(is_refilled=True)
    assert all(rig.holds(layer, FIRST_SLOTS) for layer in range(NUM_LAYERS))
    assert rig.loader.finish(index)
    assert rig.num_leases() == 0
    assert rig.loader.finish(rig.start(OTHER_SLOTS))


def test_closing_does_not_wait_for_a_load_that_was_given_up(stuck_rig: tuple[Rig, Stuck]) -> None:
    rig, stuck = stuck_rig
    index = rig.start(FIRST_SLOTS)
    running = rig.loader._running[index]
    assert stuck.has_come.wait(PATIENCE_S)
    rig.batch(index).abandon(is_refilled=False)
    assert rig.loader.finish(index) is False
    rig.loader.close()
    rig.store.close()
    assert not running.done()
    stuck.go_on.set()
    # It ends without an error, though its store is closed.
    running.result(PATIENCE_S)


def test_savers_do_not_wait_for_a_load_that_was_given_up(stuck_rig: tuple[Rig, Stuck]) -> None:
    rig, stuck = stuck_rig
    index = rig.start(FIRST_SLOTS)
    assert stuck.has_come.wait(PATIENCE_S)
    with in_threads() as start:
        waiting = start(rig.gate.let_restores_pass)
        # Cannot have ended, however long it takes: the load goes on.
        assert not wait({waiting}, timeout=SHORT_S).done
        rig.batch(index).abandon(is_refilled=True)
        rig.loader.finish(index)
        start(rig.gate.let_restores_pass).result(PATIENCE_S / 2)
        stuck.go_on.set()
        waiting.result(PATIENCE_S)


def test_savers_let_restores_pass_but_never_wait_long() -> None:
    gate = TransferGate(max_wait_s=SHORT_S)
    patient_gate = TransferGate(max_wait_s=PATIENCE_S)
    order: list[str] = []
    with in_threads() as start:
        with gate.restoring():
            # Returns although the restore goes on.
            start(gate.let_restores_pass).result(PATIENCE_S)
        with patient_gate.restoring(), patient_gate.restoring():

            def save() -> None:
                patient_gate.let_restores_pass()
                order.append("saved")

            saving = start(save)
            order.append("restored")
        saving.result(PATIENCE_S)
    assert order == ["restored", "saved"]
    patient_gate.let_restores_pass()
