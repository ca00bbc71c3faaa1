"""A batch of loads and the forward that waits for it: failures, deadlines, loads that are given up."""

from __future__ import annotations

import sys
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend import page_lock
from krul_backend.device import Device
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.common import transfer_gate
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore import load_batch, loading
from krul_sglang.engine.restore.block_checks import BlockChecks
from krul_sglang.engine.restore.load_batch import Forecast, Load, LoadBatch, LoadFailedError
from krul_sglang.engine.restore.loading import MAX_BYTES_TOGETHER
from tests.support.engine_builders import (
    PATIENCE_S,
    MeetingPoint,
    ThreadAgreement,
    bare_load,
    in_threads,
    layer_times,
)
from tests.support.loading_builders import NUM_LAYERS, NUM_TOKENS, Rig, is_equal
from tests.support.strict_device import DEVICES, StrictDevice, StrictEvent, StrictStream, make_device

FIRST_SLOTS = torch.arange(0, NUM_TOKENS)
OTHER_SLOTS = torch.arange(30, 30 + NUM_TOKENS)
CPU = Device(torch.device("cpu"))
SHORT_S = 0.05
"""A deadline that passes soon; what is tested to pass it waits for an event that the test sets."""


def make_batch(patience_s: float = PATIENCE_S) -> LoadBatch:
    return LoadBatch({}, NUM_LAYERS, Device(torch.device("cpu")), patience_s)


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
    batch = make_batch(patience_s=0.0)
    for _ in range(2):
        batch.landed([layer_times()])
    batch.wait_layer(0)
    batch.wait_layer(1)
    assert sorted(batch.wait_times) == [0, 1]
    with pytest.raises(LoadFailedError, match=r"2 of . layers have landed in time"):
        batch.wait_layer(2)
    assert sorted(batch.wait_times) == [0, 1]


def test_a_waiting_forward_goes_on_when_its_layer_lands(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    is_waiting = begins_to_wait(batch, monkeypatch)
    with in_threads() as start:
        waiting = start(lambda: batch.wait_layer(1))
        assert is_waiting.wait(PATIENCE_S)
        batch.landed([layer_times()])
        assert not waiting.done()
        batch.landed([layer_times()])
        waiting.result(PATIENCE_S / 2)
    assert list(batch.wait_times) == [1]


def test_the_wait_for_a_layer_is_timed_once() -> None:
    batch = make_batch()
    batch.landed([layer_times()])
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


class SetTime:
    """Stands for the module ``time`` in ``load_batch``: tells ``now_s``."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SetTime:
    clock = SetTime()
    monkeypatch.setattr(load_batch, "time", clock)
    return clock


def planned_batch(
    load_s: float, recompute_s: float, patience_s: float | None = None, num_loads: int = 1
) -> LoadBatch:
    """Loads from an SSD that should take so long each, and computing what they bring ``recompute_s``."""
    load = planned_load(load_s, recompute_s, is_in_dram=False)
    return LoadBatch({str(n): load for n in range(num_loads)}, NUM_LAYERS, CPU, patience_s)


def planned_load(load_s: float, recompute_s: float, *, is_in_dram: bool) -> Load:
    load = bare_load(0, 8, (0,) * NUM_LAYERS, forecast=Forecast(0.5, load_s, recompute_s))
    lease: Any = SimpleNamespace(is_in_dram=is_in_dram)
    return replace(load, lease=lease)


def land_at(batch: LoadBatch, clock: SetTime, *seconds: float) -> None:
    for clock.now_s in seconds:
        batch.landed([layer_times()])


def test_given_patience_counts_from_the_plan_and_from_each_layer_that_lands(clock: SetTime) -> None:
    batch = planned_batch(3.0, 0.0, patience_s=10.0, num_loads=2)
    assert batch.deadline_s() == 6 + 10
    land_at(batch, clock, 9.0)
    # Three times the pace so far.
    assert batch.deadline_s() == 9 + 27
    land_at(batch, clock, 9.5)
    assert batch.deadline_s() == pytest.approx(9.5 + 3 * 9.5 / 2)


def test_a_load_that_brings_nothing_gets_its_plan_and_a_twentieth_of_computing(clock: SetTime) -> None:
    batch = planned_batch(2.0, 40.0)
    assert batch.deadline_s() == 2 + 2
    assert planned_batch(2.0, 0.1).deadline_s() == pytest.approx(2.05)


def test_a_load_from_memory_is_given_more_patience(clock: SetTime) -> None:
    loads = {"r": planned_load(2.0, 40.0, is_in_dram=True)}
    assert LoadBatch(loads, NUM_LAYERS, CPU, None).deadline_s() == 2 + 10


def test_a_slow_load_is_waited_for_while_its_rest_is_sooner_than_computing(clock: SetTime) -> None:
    batch = planned_batch(1.0, 10.0)
    land_at(batch, clock, 1.0, 2.0)
    # One layer a second: the rest takes less than computing, the next one is due after three at the latest.
    assert NUM_LAYERS - 2 < 10
    assert batch.deadline_s() == 2 + 3
    slow = planned_batch(1.0, 0.5 * (NUM_LAYERS - 2))
    slow._start_s = 2 - 2.0
    land_at(slow, clock, 1.0, 2.0)
    assert slow.deadline_s() < 1.6, "the rest would take longer than computing everything"


def test_a_forward_that_an_earlier_one_holds_up_does_not_lose_its_patience(clock: SetTime) -> None:
    batch = planned_batch(1.0, 10.0)
    land_at(batch, clock, 0.25, 0.5)
    before_s = batch.deadline_s()
    with batch.standing_still():
        clock.now_s = 100.5
        assert batch.deadline_s() > clock.now_s + 1
    assert batch.deadline_s() == pytest.approx(before_s + 100)


def test_a_forward_gives_up_after_its_loader_should_have(clock: SetTime) -> None:
    batch = planned_batch(2.0, 40.0)
    clock.now_s = 6.1
    with pytest.raises(LoadFailedError, match=r"0 of .* layers have landed in time"):
        batch.wait_layer(0)


def test_a_failed_load_does_not_keep_what_its_frames_hold() -> None:
    """What was fetched is memory that recomputing may need."""
    batch = make_batch()
    fetched = torch.empty(1)
    is_gone = weakref.ref(fetched)

    def load(fetched: torch.Tensor) -> None:
        raise OSError("the disk is gone")

    try:
        load(fetched)
    except OSError as error:
        batch.fail(error)
    del fetched
    assert is_gone() is None
    with pytest.raises(LoadFailedError, match="the disk is gone"):
        batch.wait_layer(0)


# ---- several ranks ----


class Rank:
    """One of two ranks: its batch, and a forward that notes the layers whose collectives it enters."""

    def __init__(self, number: int, meeting: MeetingPoint, num_layers: int) -> None:
        agreement = ThreadAgreement(number, meeting)
        self.batch = LoadBatch({}, num_layers, CPU, PATIENCE_S, agreement=agreement)
        self.entered: list[int] = []
        self.has_entered = [threading.Event() for _ in range(num_layers)]
        self.may_go_on = [threading.Event() for _ in range(num_layers)]
        for event in self.may_go_on:
            event.set()

    def land(self, num_layers: int) -> None:
        for _ in range(num_layers):
            self.batch.landed([layer_times()])

    def forward(self) -> str | None:
        """What the forward failed with."""
        for layer in range(self.batch.num_layers):
            assert self.may_go_on[layer].wait(PATIENCE_S)
            try:
                # The pool's getters of keys and of values both ask.
                self.batch.wait_layer(layer)
                self.batch.wait_layer(layer)
            except LoadFailedError as error:
                return str(error)
            self.entered.append(layer)
            self.has_entered[layer].set()
        return None


def two_ranks(num_layers: int = 4) -> list[Rank]:
    meeting = MeetingPoint()
    return [Rank(number, meeting, num_layers) for number in (0, 1)]


def test_ranks_begin_while_later_layers_are_still_loaded() -> None:
    ranks = two_ranks()
    with in_threads() as start:
        running = [start(rank.forward) for rank in ranks]
        for rank in ranks:
            rank.land(2)
        for rank in ranks:
            assert rank.has_entered[1].wait(PATIENCE_S)
            assert not rank.has_entered[2].is_set()
            rank.land(2)
        assert [forward.result(PATIENCE_S) for forward in running] == [None, None]
    assert [rank.entered for rank in ranks] == [[0, 1, 2, 3]] * 2


def test_no_rank_enters_a_layer_before_it_landed_on_the_other() -> None:
    ranks = two_ranks()
    ranks[0].land(4)
    with in_threads() as start:
        running = [start(rank.forward) for rank in ranks]
        ranks[1].land(1)
        assert ranks[0].has_entered[0].wait(PATIENCE_S)
        # Cannot be set, however long it takes: the other rank has to come, too.
        assert not ranks[0].has_entered[1].wait(SHORT_S)
        ranks[1].land(3)
        assert [forward.result(PATIENCE_S) for forward in running] == [None, None]


@pytest.mark.parametrize("failing", [0, 1])
@pytest.mark.parametrize("num_landed", [0, 2])
def test_a_failure_stops_all_ranks_at_the_same_layer(failing: int, num_landed: int) -> None:
    ranks = two_ranks()
    ranks[1 - failing].land(4)
    ranks[failing].land(num_landed)
    with in_threads() as start:
        running = [start(rank.forward) for rank in ranks]
        if num_landed:
            assert ranks[failing].has_entered[num_landed - 1].wait(PATIENCE_S)
        ranks[failing].batch.fail(OSError("the disk is gone"))
        failures = [forward.result(PATIENCE_S) for forward in running]
    assert failures[failing] == "loading failed: the disk is gone"
    assert failures[1 - failing] == "loading failed on another rank"
    assert [rank.entered for rank in ranks] == [list(range(num_landed))] * 2


def test_a_failure_behind_what_was_agreed_on_stops_no_rank_before() -> None:
    """One rank alone would leave the layer, and the other one wait for it there."""
    ranks = two_ranks()
    for rank in ranks:
        rank.land(3)
        rank.may_go_on[1].clear()
    with in_threads() as start:
        running = [start(rank.forward) for rank in ranks]
        for rank in ranks:
            assert rank.has_entered[0].wait(PATIENCE_S)
        ranks[0].batch.fail(OSError("the disk is gone"))
        ranks[1].land(1)
        for rank in ranks:
            rank.may_go_on[1].set()
        failures = [forward.result(PATIENCE_S) for forward in running]
    assert failures == ["loading failed: the disk is gone", "loading failed on another rank"]
    assert [rank.entered for rank in ranks] == [[0, 1, 2]] * 2


@pytest.mark.parametrize(("num_landed", "num_meetings"), [(32, 1), (0, 8)])
def test_ranks_agree_a_few_times_or_once_if_all_has_landed(
    num_landed: int, num_meetings: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    ranks = two_ranks(num_layers=32)
    meetings: list[int] = []
    gather = ThreadAgreement.gather

    def counted(agreement: ThreadAgreement, values: Any, shape: Any) -> Any:
        meetings.append(1)
        return gather(agreement, values, shape)

    monkeypatch.setattr(ThreadAgreement, "gather", counted)
    for rank in ranks:
        rank.land(num_landed)
        for event in rank.may_go_on:
            event.clear()
    with in_threads() as start:
        running = [start(rank.forward) for rank in ranks]
        for layer in range(32):
            for rank in ranks:
                # A group of four lands when the forward comes to it, and no sooner.
                if num_landed == 0 and layer % 4 == 0:
                    rank.land(4)
            for rank in ranks:
                rank.may_go_on[layer].set()
            for rank in ranks:
                assert rank.has_entered[layer].wait(PATIENCE_S)
        assert [forward.result(PATIENCE_S) for forward in running] == [None, None]
    assert len(meetings) == 2 * num_meetings


def test_a_forward_that_shares_its_cores_with_the_load_waits_once_for_all_of_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    batch = LoadBatch({}, NUM_LAYERS, CPU, PATIENCE_S, lands_whole=True)
    is_waiting = begins_to_wait(batch, monkeypatch)
    with in_threads() as start:
        waiting = start(lambda: batch.wait_layer(0))
        assert is_waiting.wait(PATIENCE_S)
        is_waiting.clear()
        for _ in range(NUM_LAYERS - 1):
            batch.landed([layer_times()])
        # Not even woken: it would wait again.
        assert not is_waiting.wait(SHORT_S)
        assert not waiting.done()
        batch.landed([layer_times()])
        waiting.result(PATIENCE_S / 2)
    batch.wait_layer(NUM_LAYERS - 1)


def test_a_load_that_lands_whole_is_given_up_when_no_layer_lands(clock: SetTime) -> None:
    """Each layer moves the deadline, though the forward waits for the last one."""
    batch = LoadBatch({}, NUM_LAYERS, CPU, 10.0, lands_whole=True)
    land_at(batch, clock, 9.0, 18.0)
    clock.now_s = 18 + 27 + 9.9
    assert batch._left_s() == pytest.approx(0.1)
    clock.now_s += 0.2
    with pytest.raises(LoadFailedError, match="landed in time"):
        batch.wait_layer(0)


def test_a_replayed_graph_asks_for_the_last_layer_alone() -> None:
    ranks = two_ranks()
    with in_threads() as start:
        waiting = [start(lambda rank=rank: rank.batch.wait_layer(3)) for rank in ranks]  # type: ignore[misc]
        ranks[0].land(4)
        ranks[1].land(3)
        assert not wait(waiting, timeout=SHORT_S).done
        ranks[1].land(1)
        for call in waiting:
            call.result(PATIENCE_S)


def test_after_it_was_given_up_no_rank_asks_the_others() -> None:
    (rank, _) = two_ranks()
    rank.batch.abandon(is_refilled=True)
    # The other one never comes.
    assert rank.forward() is None


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
    batch = make_batch(patience_s=0.0)
    batch.abandon(is_refilled=False)
    for layer in range(NUM_LAYERS):
        batch.wait_layer(layer)
    assert batch.wait_times == {}
    assert not batch.wait_end()


@pytest.mark.parametrize("ending", ["landed", "failed", "abandoned"])
def test_the_end_is_waited_for_and_told(ending: str, monkeypatch: pytest.MonkeyPatch) -> None:
    batch = make_batch()
    is_waiting = begins_to_wait(batch, monkeypatch)
    reports: list[Callable[[], None]] = [lambda: batch.landed([layer_times()])] * NUM_LAYERS
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


# ---- on a GPU ----


@pytest.fixture
def strict() -> Iterator[StrictDevice]:
    device = StrictDevice()
    yield device
    device.synchronize()
    device.check()


@pytest.fixture
def strict_rig(strict: StrictDevice) -> Iterator[Rig]:
    rig = Rig(PATIENCE_S, device=strict)
    yield rig
    rig.close()


def events_waited_for(device: StrictDevice, stream: StrictStream) -> list[StrictEvent]:
    return [
        entry.event
        for entry in device.module.log
        if entry.kind == "wait" and entry.stream is stream and entry.event is not None
    ]


def test_what_follows_a_batch_that_is_given_up_waits_for_all_that_is_queued(strict: StrictDevice) -> None:
    """Also for a layer that failed half-way."""
    loading, forward = strict.new_stream(), strict.new_stream()
    batch = LoadBatch({}, NUM_LAYERS, strict, PATIENCE_S)
    host = strict.host_empty((4,), torch.uint8)
    with strict.on_stream(loading):
        with batch.writing():
            strict.upload(host)
            batch.landed([layer_times()])
        with suppress(OSError), batch.writing():
            strict.upload(host)
            raise OSError("half-way")
    with strict.on_stream(forward):
        batch.wait_layer(0)
        batch.abandon(is_refilled=True)
    landed, last = events_waited_for(strict, forward)
    assert len(loading.copies_under_way()) == 2
    landed.come()
    assert len(loading.copies_under_way()) == 1
    last.come()
    assert loading.copies_under_way() == []


def test_loads_wait_for_what_the_engine_still_does_with_their_slots(
    strict: StrictDevice, strict_rig: Rig
) -> None:
    ready = [strict.record(strict.new_stream()).of_torch for _ in ("schedule", "forward")]
    assert strict_rig.loader.finish(strict_rig.loader.start({"r": strict_rig.load(FIRST_SLOTS)}, ready))
    # Staged after the schedule, written after the forward.
    stream = strict_rig.loader._stream
    assert strict.module.waits_before("upload", stream) == ready[:1]
    waits = [entry.event for entry in strict.module.log if entry.stream is stream and entry.kind == "wait"]
    assert waits[:2] == ready
    assert strict.module.pageable_copies == 0


@pytest.mark.parametrize(
    ("bytes_together", "num_copied", "num_pieces"),
    [(0, [1, 2, 3], [1, 1, 1]), (MAX_BYTES_TOGETHER, [1, 3, 3], [1, 2])],
)
def test_layers_wait_for_their_own_load_and_what_is_copied_with_it(
    strict: StrictDevice,
    strict_rig: Rig,
    monkeypatch: pytest.MonkeyPatch,
    bytes_together: int,
    num_copied: list[int],
    num_pieces: list[int],
) -> None:
    """Only small layers, which have been checked, are copied by one call, and never with the first one."""
    pieces, upload_each = list[int](), strict.upload_each

    def count(hosts: Sequence[torch.Tensor], targets: Sequence[torch.Tensor]) -> None:
        pieces.append(len(hosts))
        upload_each(hosts, targets)

    monkeypatch.setattr(strict, "upload_each", count)
    monkeypatch.setattr(loading, "MAX_BYTES_TOGETHER", bytes_together)
    monkeypatch.setattr(BlockChecks, "are_right", lambda checks, blocks: checks.wait(blocks) is None)
    forward = strict.new_stream()
    index = strict_rig.start(FIRST_SLOTS)
    with strict.on_stream(forward):
        for layer in range(NUM_LAYERS):
            strict_rig.batch(index).wait_layer(layer)
            strict_rig.batch(index).wait_layer(layer)
    assert strict_rig.loader.finish(index)
    events = events_waited_for(strict, forward)
    load_stream = strict_rig.loader._stream
    arena = strict_rig.store.host.buffer
    of_arena = range(arena.ctypes.data, arena.ctypes.data + arena.nbytes)
    uploads_before: dict[StrictEvent | None, int] = {}
    num_uploads = 0
    for entry in strict.module.log:
        if entry.stream is load_stream:
            num_uploads += entry.kind == "upload" and entry.host.start in of_arena
            uploads_before[entry.event] = num_uploads
    # One block for each layer, and behind those that are copied together their event.
    assert [uploads_before[event] for event in events] == num_copied
    assert pieces == num_pieces


def test_threads_hand_the_gil_over_sooner_while_a_load_runs(strict_rig: Rig) -> None:
    before_s, during_s = sys.getswitchinterval(), list[float]()
    strict_rig.before_layer = lambda index, layer: during_s.append(sys.getswitchinterval())
    for _ in range(2):
        assert strict_rig.loader.finish(strict_rig.start(FIRST_SLOTS))
    assert during_s == [pytest.approx(loading.SWITCH_INTERVAL_S)] * 2 * NUM_LAYERS
    strict_rig.loader.discard_all()
    assert sys.getswitchinterval() == pytest.approx(before_s)


@pytest.fixture
def slow_copies(strict: StrictDevice, strict_rig: Rig) -> Iterator[threading.Event]:
    """Copies to the pool, which end when this is set."""
    may_end = threading.Event()

    def wait(stream: StrictStream) -> None:
        if stream is strict_rig.loader._stream:
            may_end.wait(20)

    strict.module.on_synchronize = wait
    yield may_end
    may_end.set()


def test_a_forward_that_has_come_to_every_layer_waits_for_no_copy(
    strict: StrictDevice, strict_rig: Rig, slow_copies: threading.Event
) -> None:
    index = strict_rig.start(FIRST_SLOTS)
    with strict.on_stream(strict.new_stream()):
        for layer in range(NUM_LAYERS):
            strict_rig.batch(index).wait_layer(layer)
    assert strict_rig.loader.finish(index)
    assert strict_rig.loader.batch(index) is None
    # What is copied from is held until it has been read.
    assert (strict_rig.num_leases(), strict_rig.loader.num_pending()) == (1, 1)
    slow_copies.set()
    strict_rig.loader.discard_all()
    assert (strict_rig.num_leases(), strict_rig.loader.num_pending()) == (0, 0)
    assert all(strict_rig.holds(layer, FIRST_SLOTS) for layer in range(NUM_LAYERS))


def test_a_layer_that_no_forward_asked_for_is_waited_for(
    strict: StrictDevice, strict_rig: Rig, slow_copies: threading.Event
) -> None:
    """Nothing on the forward's stream comes after its copies."""
    index = strict_rig.start(FIRST_SLOTS)
    with strict.on_stream(strict.new_stream()):
        strict_rig.batch(index).wait_layer(0)
    with ThreadPoolExecutor(1) as thread:
        finished = thread.submit(strict_rig.loader.finish, index)
        with pytest.raises(TimeoutError):
            finished.result(timeout=0.1)
        slow_copies.set()
        assert finished.result(timeout=20)
    assert strict_rig.num_leases() == 0


def test_a_lease_ends_when_no_copy_reads_its_blocks_any_more(
    strict: StrictDevice, strict_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    under_way: list[int] = []
    release = strict_rig.store.release

    def released(lease: Lease) -> None:
        under_way.append(len(strict.module.copies_under_way()))
        release(lease)

    monkeypatch.setattr(strict_rig.store, "release", released)

    def fail(index: int, layer: int) -> None:
        if (index, layer) == (1, 2):
            raise OSError("injected")

    strict_rig.before_layer = fail
    assert strict_rig.loader.finish(strict_rig.start(FIRST_SLOTS))
    assert not strict_rig.loader.finish(strict_rig.start(OTHER_SLOTS))
    assert under_way == [0, 0]


def test_memory_of_the_device_that_runs_out_fails_the_load_and_no_other(
    strict: StrictDevice, strict_rig: Rig, monkeypatch: pytest.MonkeyPatch
) -> None:
    upload = strict.upload
    left = [1]

    def upload_one(host: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        if left.pop() == 0:
            raise torch.OutOfMemoryError("CUDA out of memory")
        left.append(0)
        return upload(host, target)

    monkeypatch.setattr(strict, "upload", upload_one)
    index = strict_rig.start(FIRST_SLOTS)
    with pytest.raises(LoadFailedError, match="out of memory"):
        strict_rig.batch(index).wait_layer(NUM_LAYERS - 1)
    assert not strict_rig.loader.finish(index)
    assert strict_rig.loader.counters.failed_batches == 1
    assert strict_rig.num_leases() == 0
    monkeypatch.setattr(strict, "upload", upload)
    assert strict_rig.loader.finish(strict_rig.start(OTHER_SLOTS))
    assert all(strict_rig.holds(layer, OTHER_SLOTS) for layer in range(NUM_LAYERS))


def test_pages_that_cannot_be_locked_are_loaded_from_all_the_same(strict: StrictDevice) -> None:
    strict.module.lock_limit = 0
    rig = Rig(PATIENCE_S, device=strict)
    assert rig.loader.finish(rig.start(FIRST_SLOTS))
    assert all(rig.holds(layer, FIRST_SLOTS) for layer in range(NUM_LAYERS))
    assert strict.module.pageable_copies == NUM_LAYERS
    rig.close()


@pytest.mark.parametrize("lock_limit", [0, 3 << 9, None])
def test_blocks_that_lie_in_several_chunks_are_loaded_right(
    strict: StrictDevice, monkeypatch: pytest.MonkeyPatch, lock_limit: int | None
) -> None:
    """Also where locking was refused before the first block, or in the middle of one."""
    monkeypatch.setattr(page_lock, "CHUNK_BYTES", 1 << 9)
    monkeypatch.setattr(page_lock, "_touch_pages", lambda chunk: None)
    strict.module.lock_limit = lock_limit
    rig = Rig(PATIENCE_S, device=strict)
    assert rig.loader.finish(rig.start(FIRST_SLOTS))
    assert all(rig.holds(layer, FIRST_SLOTS) for layer in range(NUM_LAYERS))
    arena = rig.store.host.buffer
    of_arena = range(arena.ctypes.data, arena.ctypes.data + arena.nbytes)
    copies = [entry for entry in strict.module.log if entry.kind == "upload" and entry.host.start in of_arena]
    assert [len(copy.host) for copy in copies] == [1 << 9] * 2 * NUM_LAYERS
    num_slow = {0: len(copies), 3 << 9: len(copies) - 3, None: 0}
    assert strict.module.pageable_copies == num_slow[lock_limit]
    rig.close()


# ---- the loader ----


@pytest.fixture(params=DEVICES)
def patient(request: pytest.FixtureRequest) -> Iterator[Rig]:
    rig = Rig(PATIENCE_S, device=make_device(request.param))
    yield rig
    rig.close()


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


@pytest.fixture(params=DEVICES)
def stuck_rig(request: pytest.FixtureRequest) -> Iterator[tuple[Rig, Stuck]]:
    rig, stuck = Rig(SHORT_S, device=make_device(request.param)), Stuck(1)
    rig.before_layer = stuck
    yield rig, stuck
    stuck.go_on.set()
    rig.close()


def test_layers_land_in_order_and_are_written_when_waited_for(patient: Rig) -> None:
    index = patient.start(FIRST_SLOTS)
    patient.loader.counter.set_consumer(index)
    for layer in range(NUM_LAYERS):
        patient.loader.counter.wait_until(layer)
        assert patient.holds(layer, FIRST_SLOTS)
    assert patient.loader.finish(index)
    # On a GPU that waits for no copy.
    patient.loader.discard_all()
    assert (patient.num_leases(), patient.loader.num_pending()) == (0, 0)
    assert patient.loader.counters.tokens == NUM_TOKENS
    # Later forwards that still name it wait for nothing.
    patient.loader.counter.wait_until(0)


def test_loads_of_one_batch_land_together(patient: Rig) -> None:
    index = patient.loader.start({"one": patient.load(FIRST_SLOTS), "two": patient.load(OTHER_SLOTS)})
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
    if not rig.device.shares_cores:
        batch.wait_layer(0)
    with pytest.raises(LoadFailedError, match="layers have landed in time"):
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
        waiting = start(lambda: rig.gate.give_way(rig.gate.patience()))
        # Cannot have ended, however long it takes: the load goes on.
        assert not wait({waiting}, timeout=SHORT_S).done
        rig.batch(index).abandon(is_refilled=True)
        rig.loader.finish(index)
        start(lambda: rig.gate.give_way(rig.gate.patience())).result(PATIENCE_S / 2)
        stuck.go_on.set()
        waiting.result(PATIENCE_S)


def test_savers_give_way_but_never_wait_long() -> None:
    gate = TransferGate(max_wait_s=SHORT_S)
    patient_gate = TransferGate(max_wait_s=PATIENCE_S)
    order: list[str] = []
    with in_threads() as start:
        with gate.restoring():
            # Returns although the restore goes on.
            start(lambda: gate.give_way(gate.patience())).result(PATIENCE_S)
        with patient_gate.restoring(), patient_gate.restoring():

            def save() -> None:
                patient_gate.give_way(patient_gate.patience())
                order.append("saved")

            saving = start(save)
            order.append("restored")
        saving.result(PATIENCE_S)
    assert order == ["restored", "saved"]
    patient_gate.give_way(patient_gate.patience())


@pytest.fixture
def gate_clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock of the gates that are made from now on; waiting moves it, and is noted in ``waited``."""
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s, waited=[])

    def wait_in_vain(condition: threading.Condition, timeout_s: float) -> bool:
        clock.waited.append(pytest.approx(timeout_s))
        clock.now_s += timeout_s
        return False

    monkeypatch.setattr(transfer_gate, "time", clock)
    monkeypatch.setattr(threading.Condition, "wait", wait_in_vain)
    return clock


def test_a_saver_waits_for_restores_once_a_turn_not_once_a_unit(gate_clock: SimpleNamespace) -> None:
    gate = TransferGate(max_wait_s=1.0)
    with gate.restoring():
        for _ in range(2):
            patience = gate.patience()
            for _ in range(80):
                gate.give_way(patience)
    # One second for each of the two turns.
    assert gate_clock.waited == [1.0, 1.0]


def test_the_encoder_rests_from_a_forward_until_the_server_is_idle(gate_clock: SimpleNamespace) -> None:
    gate = TransferGate()
    assert gate.is_idle()
    gate.note_forward()
    assert not gate.is_idle()
    gate.rest(3.0)
    assert gate_clock.waited == [3.0]
    gate.note_idle()
    assert gate.is_idle()
    gate.rest(3.0)
    assert gate_clock.waited == [3.0]


def test_a_server_that_becomes_idle_ends_a_rest() -> None:
    gate = TransferGate()
    gate.note_forward()
    threading.Timer(0.05, gate.note_idle).start()
    began_s = time.monotonic()
    gate.rest(PATIENCE_S)
    assert time.monotonic() < began_s + PATIENCE_S


def test_a_saver_in_a_hurry_waits_no_more() -> None:
    gate = TransferGate(max_wait_s=PATIENCE_S)
    patience = gate.patience()
    with in_threads() as start, gate.restoring():
        saving = start(lambda: gate.give_way(patience))
        assert not wait({saving}, timeout=SHORT_S).done
        gate.hurry(patience)
        saving.result(PATIENCE_S / 2)
