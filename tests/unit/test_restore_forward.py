"""A forward whose prefixes are restored: heads before it, and the engine's prefill if a load fails."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.device import Device
from krul_backend.planner.calibration import OnlineCosts
from krul_backend.planner.interface import ComputeCost, RestoreCosts, TierCost
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.restore import restore_forward
from krul_sglang.engine.restore.heads import Head
from krul_sglang.engine.restore.layer_waits import LayerWaits
from krul_sglang.engine.restore.load_batch import Load, LoadBatch, LoadFailedError
from krul_sglang.engine.restore.restore_forward import RestoreForward
from krul_sglang.engine.restore.restore_trace import TraceLog
from tests.support.engine_builders import (
    PATIENCE_S,
    MeetingPoint,
    ThreadAgreement,
    bare_load,
    in_threads,
    layer_times,
)

NUM_LAYERS = 4
MAX_TOKENS = 64
INDEX = 5
COST = ComputeCost(0.0, 1.0, 0.0)
COSTS = RestoreCosts(COST, COST, {"dram": TierCost(0.0, 1.0)})


class FakeRequest:
    """Token ``t`` of request ``r`` has id ``1000 r + t``."""

    def __init__(self, number: int) -> None:
        self.rid = f"r{number}"
        self.full_untruncated_fill_ids = [1000 * number + token for token in range(MAX_TOKENS)]


class FakeScheduleBatch:
    """SGLang's batch of requests, as far as restoring looks at it. Request ``r`` has row ``2 r``."""

    def __init__(self, numbers: Sequence[int], index: int = INDEX) -> None:
        self.reqs = [FakeRequest(number) for number in numbers]
        self.req_pool_indices_cpu = torch.tensor([2 * number for number in numbers])
        self.hicache_consumer_index = index
        self.extend_lens = [40] * len(numbers)
        self.prefix_lens = [0] * len(numbers)


# Token t of request r lies in slot 100 r + t; rows of other requests lie between.
REQ_TO_TOKEN = torch.stack(
    [torch.arange(MAX_TOKENS, dtype=torch.int32) + 50 * row for row in range(10)]
).contiguous()


class FakeHeads:
    """Remembers the heads of each run, and that runs of more than ``max_tokens`` found no memory.

    ``before_run`` is called before each.
    """

    def __init__(self, log: list[str]) -> None:
        self.runs: list[list[Head]] = []
        self.max_tokens = 10**9
        self.error: Exception = OUT_OF_MEMORY
        self.num_refused = 0
        self.before_run: Callable[[], None] = lambda: None
        self._log = log

    def run(self, heads: Sequence[Head], on_layer: Callable[[int], None]) -> None:
        self.before_run()
        if sum(head.ends[0] - head.start for head in heads) > self.max_tokens:
            self.num_refused += 1
            on_layer(0)
            raise self.error
        self._log.append("heads")
        self.runs.append(list(heads))
        for layer in range(NUM_LAYERS):
            on_layer(layer)
        on_layer(NUM_LAYERS)


class FakePrefill:
    """Remembers which tokens of which request of the batch were computed. As ``FakeHeads`` otherwise."""

    def __init__(self, log: list[str]) -> None:
        self.runs: list[tuple[str, range]] = []
        self.max_tokens = 10**9
        self.num_refused = 0
        self.before_run: Callable[[], None] = lambda: None
        self._log = log

    def run(self, schedule_batch: FakeScheduleBatch, index: int, first: int, end: int) -> None:
        self.before_run()
        if end - first > self.max_tokens:
            self.num_refused += 1
            raise OUT_OF_MEMORY
        self._log.append("prefill")
        self.runs.append((schedule_batch.reqs[index].rid, range(first, end)))

    def tokens_of(self, number: int) -> list[int]:
        return [token for rid, tokens in self.runs if rid == f"r{number}" for token in tokens]


class FakeLoader:
    def __init__(self, batch: LoadBatch | None) -> None:
        self.counter = LayerWaits(NUM_LAYERS)
        self._batch = batch

    def batch(self, index: int) -> LoadBatch | None:
        return self._batch if index == INDEX else None

    def start(self, loads: Mapping[str, Load], ready: Sequence[Any]) -> int:
        assert self._batch is not None
        assert self._batch.loads == loads
        return INDEX

    def finish(self, index: int) -> bool:
        assert index == INDEX
        assert self._batch is not None
        return not self._batch.is_abandoned


OUT_OF_MEMORY = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")


class Rig:
    """One batch of loads and a forward that waits for each of its layers."""

    def __init__(
        self,
        loads: Mapping[str, Load],
        *,
        has_heads: bool = True,
        chunk_tokens: int = MAX_TOKENS,
        agreement: RankAgreement | None = None,
        patience_s: float = PATIENCE_S,
    ) -> None:
        self.log: list[str] = []
        self.before_forward: Callable[[], None] = lambda: None
        self.batch = LoadBatch(
            loads, NUM_LAYERS, Device(torch.device("cpu")), patience_s, agreement=agreement
        )
        self.heads = FakeHeads(self.log)
        self.prefill = FakePrefill(self.log)
        self.entered: list[int] = []
        self.failures: list[tuple[str, str, int]] = []
        self.has_begun = threading.Event()
        self.traces = TraceLog(OnlineCosts(COSTS), NUM_LAYERS)
        self.loader: Any = FakeLoader(self.batch)
        prefill: Any = self.prefill
        self.restore = RestoreForward(
            self.loader,
            self.heads.run if has_heads else None,
            prefill.run,
            RankAgreement(None, 1) if agreement is None else agreement,
            self.traces,
            req_to_token=REQ_TO_TOKEN,
            chunk_tokens=chunk_tokens,
            on_failure=lambda *failure: self.failures.append(failure),
        )

    def land(self, num_layers: int = NUM_LAYERS) -> None:
        for _ in range(num_layers):
            self.batch.landed([layer_times()])

    def forward(self) -> str:
        self.log.append("forward")
        if self.log.count("forward") == 1:
            self.before_forward()
        for layer in range(NUM_LAYERS):
            self.batch.wait_layer(layer)
            self.entered.append(layer)
            self.has_begun.set()
        self.log.append("done")
        return "result"

    def run(self, numbers: Sequence[int], index: int = INDEX) -> Any:
        return self.restore.run(FakeScheduleBatch(numbers, index), self.forward)


def load_of(number: int, device_tokens: int, num_tokens: int, head_ends: Sequence[int]) -> Load:
    return bare_load(device_tokens, num_tokens, head_ends, first_slot=100 * number + device_tokens)


def covered(runs: Sequence[Sequence[Head]], number: int) -> list[list[int]]:
    """Per layer the tokens of a request in the order in which they were recomputed."""
    tokens: list[list[int]] = [[] for _ in range(NUM_LAYERS)]
    for run in runs:
        for head in run:
            # Slots of tokens before and inside the head, and ids of those inside.
            assert head.slots.tolist() == [100 * (head.slots[0] // 100) + t for t in range(len(head.slots))]
            assert len(head.slots) == head.ends[0]
            if int(head.slots[0]) // 100 == number:
                assert head.token_ids.tolist() == [1000 * number + t for t in range(head.start, head.ends[0])]
                for layer, end in enumerate(head.ends):
                    tokens[layer] += range(head.start, end)
    return tokens


def test_a_batch_without_loads_is_run_once_and_left_alone() -> None:
    rig = Rig({})
    calls: list[None] = []
    result = object()

    def forward() -> object:
        calls.append(None)
        return result

    assert rig.restore.run(FakeScheduleBatch([1, 2], index=-1), forward) is result
    assert (len(calls), rig.heads.runs, rig.traces.as_list()) == (1, [], [])


def test_heads_of_several_requests_are_recomputed_in_one_go_before_the_forward() -> None:
    loads = {"r1": load_of(1, 8, 24, (20, 16, 8, 8)), "r3": load_of(3, 0, 12, (4, 4, 4, 4))}
    rig = Rig(loads)
    rig.land()
    assert rig.run([1, 3]) == "result"
    assert rig.log == ["heads", "forward", "done"]
    ((first, second),) = rig.heads.runs
    assert (first.start, first.ends) == (8, (20, 16, 8, 8))
    assert (second.start, second.ends) == (0, (4, 4, 4, 4))
    assert covered(rig.heads.runs, 1) == [list(range(8, end)) for end in (20, 16, 8, 8)]
    assert covered(rig.heads.runs, 3) == [list(range(4))] * NUM_LAYERS
    assert (first.slots.dtype, first.token_ids.dtype) == (torch.int64, torch.int64)
    assert rig.restore.counters.head_tokens == 12 + 4
    assert rig.restore.counters.rescued_requests == 0


def test_requests_that_restore_nothing_share_the_forward() -> None:
    rig = Rig({"r2": load_of(2, 0, 16, (8, 8, 0, 0))})
    rig.land()
    assert rig.run([4, 2, 1]) == "result"
    (heads,) = rig.heads.runs
    assert len(heads) == 1
    assert covered([heads], 2)[0] == list(range(8))
    (trace,) = rig.traces._fresh
    assert trace.is_mixed
    pure = Rig({"r2": load_of(2, 0, 16, (8, 8, 0, 0))})
    pure.land()
    pure.run([2])
    assert not pure.traces._fresh[0].is_mixed


def test_a_load_without_heads_is_only_waited_for() -> None:
    rig = Rig({"r1": load_of(1, 8, 24, (8,) * NUM_LAYERS)})
    rig.land()
    assert rig.run([1]) == "result"
    assert rig.log == ["forward", "done"]
    assert list(rig.batch.wait_times) == list(range(NUM_LAYERS))
    assert rig.restore.counters.head_tokens == 0


@settings(max_examples=80)
@given(
    heads=st.lists(
        st.tuples(st.integers(0, 10), st.lists(st.integers(0, 20), min_size=NUM_LAYERS, max_size=NUM_LAYERS)),
        min_size=1,
        max_size=3,
    ),
    chunk_tokens=st.integers(1, 40),
)
def test_chunks_cover_every_token_of_every_layer_once_and_in_order(
    heads: list[tuple[int, list[int]]], chunk_tokens: int
) -> None:
    loads = {}
    for number, (device_tokens, lengths) in enumerate(heads):
        ends = [device_tokens + length for length in sorted(lengths, reverse=True)]
        loads[f"r{number}"] = load_of(number, device_tokens, 20, ends)
    rig = Rig(loads, chunk_tokens=chunk_tokens)
    rig.land()
    assert rig.run(range(len(heads))) == "result"
    for number, load in enumerate(loads.values()):
        expected = [list(range(load.device_tokens, end)) for end in load.plan.head_ends]
        assert covered(rig.heads.runs, number) == expected
    for run in rig.heads.runs:
        # At least one token of each request, however small a chunk is.
        num_tokens = sum(head.ends[0] - head.start for head in run)
        assert 0 < num_tokens <= max(chunk_tokens, len(heads))


def test_a_failed_load_is_computed_and_the_forward_runs_again() -> None:
    loads = {"r1": load_of(1, 8, 24, (20, 16, 8, 8)), "r2": load_of(2, 0, 16, (0, 0, 0, 0))}
    rig = Rig(loads, chunk_tokens=20)
    rig.land(2)
    # After its heads: a load that has failed before has none computed.
    rig.before_forward = lambda: rig.batch.fail(OSError("injected"))
    # Request 4 restores nothing, and request 3 only decodes: nobody touches their slots.
    assert rig.run([4, 1, 2, 3]) == "result"
    assert rig.log == ["heads", "forward", *["prefill"] * 3, "forward", "done"]
    assert rig.batch.is_abandoned
    assert rig.batch.is_refilled
    # Every token that the loads were to bring, and none that was on the device, in steps of a chunk.
    assert rig.prefill.runs == [("r1", range(8, 28)), ("r1", range(28, 32)), ("r2", range(16))]
    assert rig.restore.counters.rescued_requests == 2
    assert rig.restore.counters.rescued_tokens == 24 + 16
    error = "loading failed: injected"
    assert rig.failures == [("r1", error, 8), ("r2", error, 0)]


def test_a_load_that_fails_in_the_middle_of_the_forward_is_computed() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (4, 4, 0, 0))})

    def forward() -> str:
        rig.log.append("forward")
        if rig.log.count("forward") == 1:
            rig.land(3)
            for layer in range(3):
                rig.batch.wait_layer(layer)
            rig.batch.fail(OSError("late"))
        for layer in range(NUM_LAYERS):
            rig.batch.wait_layer(layer)
        return "result"

    assert rig.restore.run(FakeScheduleBatch([1]), forward) == "result"
    assert rig.log == ["heads", "forward", "prefill", "forward"]
    assert rig.prefill.runs == [("r1", range(8))]


@pytest.mark.parametrize("num_landed", range(NUM_LAYERS))
def test_a_rescue_leaves_a_trace_wherever_the_load_stopped(num_landed: int) -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (4, 4, 0, 0))})

    def forward() -> str:
        if not rig.batch.is_abandoned:
            rig.land(num_landed)
            for layer in range(num_landed):
                rig.batch.wait_layer(layer)
            rig.batch.fail(OSError("injected"))
        rig.batch.wait_layer(num_landed)
        return "result"

    rig.restore.run(FakeScheduleBatch([1]), forward)
    rig.traces.settle()
    (trace,) = rig.traces.as_list()
    assert trace["was_rescued"]
    streams = trace["streams"]
    assert [len(streams[name]) for name in ("load", "wait", "own")] == [num_landed, num_landed, 0]
    assert [layer for layer, *_ in streams["head"]] == [*range(NUM_LAYERS)]
    assert trace["requests"][0]["restored_tokens"] == 8


@pytest.mark.parametrize("num_landed", range(NUM_LAYERS))
def test_without_heads_a_load_fails_before_the_forward_begins(num_landed: int) -> None:
    rig = Rig({"r1": load_of(1, 8, 24, (8,) * NUM_LAYERS)}, has_heads=False, chunk_tokens=16)
    rig.land(num_landed)
    rig.batch.fail(OSError("injected"))
    assert rig.run([2, 1]) == "result"
    assert rig.log == ["prefill", "prefill", "forward", "done"]
    assert rig.prefill.runs == [("r1", range(8, 24)), ("r1", range(24, 32))]
    # So SGLang does not end its request.
    assert rig.batch.is_refilled
    assert rig.restore.counters.rescued_requests == 1


def test_without_heads_the_forward_begins_when_all_is_loaded() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (0,) * NUM_LAYERS)}, has_heads=False)
    rig.land()
    assert rig.run([1]) == "result"
    assert rig.log == ["forward", "done"]
    assert list(rig.batch.wait_times) == list(range(NUM_LAYERS))
    assert (rig.prefill.runs, rig.batch.is_abandoned) == ([], False)


def test_other_errors_of_the_forward_are_not_hidden() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (0,) * NUM_LAYERS)})
    rig.land()

    def forward() -> None:
        rig.log.append("forward")
        raise ValueError("out of memory")

    with pytest.raises(ValueError, match="out of memory"):
        rig.restore.run(FakeScheduleBatch([1]), forward)
    assert rig.log == ["forward"]
    assert not rig.batch.is_abandoned


def test_a_second_failure_is_not_rescued_again() -> None:
    """A rescued batch waits for nothing, so this error is not its own."""
    rig = Rig({"r1": load_of(1, 0, 8, (0,) * NUM_LAYERS)})

    def forward() -> None:
        rig.log.append("forward")
        raise LoadFailedError("always")

    with pytest.raises(LoadFailedError, match="always"):
        rig.restore.run(FakeScheduleBatch([1]), forward)
    assert rig.log == ["forward", "prefill", "forward"]


def test_heads_wait_for_no_load() -> None:
    """Models that write KV themselves ask the pool's getters for buffers while heads run."""
    rig = Rig({"r1": load_of(1, 0, 8, (4,) * NUM_LAYERS)}, patience_s=0.0)
    rig.loader.counter.batches[INDEX] = rig.batch
    rig.loader.counter.set_consumer(INDEX)
    # A wait would be in vain, and raise.
    rig.heads.before_run = lambda: rig.loader.counter.wait_until(0)
    rig.before_forward = rig.land
    rig.run([1])
    assert rig.log == ["heads", "forward", "done"]


def test_no_head_is_computed_for_a_load_that_has_no_room() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (4,) * NUM_LAYERS)})
    rig.batch.fail(OSError("no room"))
    assert rig.run([1]) == "result"
    assert rig.log == ["prefill", "forward", "done"]
    assert rig.prefill.runs == [("r1", range(8))]


def test_heads_end_when_their_load_fails() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (4,) * NUM_LAYERS)})
    rig.heads.before_run = lambda: rig.batch.fail(OSError("the disk is gone"), {"r1": 6})
    rig.run([1])
    # What a salvaged segment needs before it, its head, is not complete.
    assert rig.prefill.runs == [("r1", range(8))]


def test_what_has_come_of_a_failed_load_is_not_computed_again() -> None:
    loads = {"r1": load_of(1, 8, 24, (20, 16, 8, 8)), "r2": load_of(2, 0, 16, (0, 0, 0, 0))}
    rig = Rig(loads)
    rig.before_forward = lambda: rig.batch.fail(OSError("injected"), {"r1": 16})
    assert rig.run([1, 2]) == "result"
    assert rig.prefill.runs == [("r1", range(24, 32)), ("r2", range(16))]
    assert rig.restore.counters.rescued_tokens == 8 + 16


# ---- out of memory ----


@pytest.mark.parametrize(
    "error", [OUT_OF_MEMORY, MemoryError(), RuntimeError("DefaultCPUAllocator: can't allocate memory")]
)
def test_heads_without_memory_go_on_in_smaller_steps(
    error: Exception, caplog: pytest.LogCaptureFixture
) -> None:
    loads = {"r1": load_of(1, 8, 56, (60, 50, 8, 8)), "r3": load_of(3, 0, 60, (60, 60, 4, 4))}
    rig = Rig(loads, chunk_tokens=1000)
    rig.heads.error, rig.heads.max_tokens = error, 80
    rig.land()
    with caplog.at_level("WARNING"):
        assert rig.run([1, 3]) == "result"
    assert not rig.batch.is_abandoned
    assert covered(rig.heads.runs, 1) == [list(range(8, end)) for end in (60, 50, 8, 8)]
    assert covered(rig.heads.runs, 3) == [list(range(end)) for end in (60, 60, 4, 4)]
    counters = rig.restore.counters
    assert (counters.out_of_memory, counters.head_tokens) == (rig.heads.num_refused, 52 + 60)
    assert rig.heads.num_refused == 1
    # The next batch tries as much as it may again, and says nothing.
    rig.run([1, 3])
    assert rig.restore.counters.out_of_memory == 2
    assert caplog.text.count("out of memory while computing a prefix") == 1


def test_heads_without_any_memory_are_tried_again_without_the_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """What loads hold on the device goes with them."""
    monkeypatch.setattr(restore_forward, "_MIN_CHUNK_TOKENS", 4)
    rig = Rig({"r1": load_of(1, 0, 60, (40,) * NUM_LAYERS)})
    rig.land()
    rig.heads.max_tokens = 0
    # Memory for ten tokens at a time.
    rig.prefill.max_tokens = 10
    rig.prefill.before_run = lambda: are_given_up.append(rig.batch.is_abandoned)
    are_given_up: list[bool] = []
    assert rig.run([1]) == "result"
    assert all(are_given_up)
    assert rig.batch.is_refilled
    assert rig.prefill.tokens_of(1) == list(range(60))
    assert rig.prefill.num_refused == 3
    assert (rig.restore.counters.rescued_requests, rig.restore.counters.lost_requests) == (1, 0)


@pytest.mark.parametrize("is_loaded", [True, False])
def test_what_can_be_neither_loaded_nor_recomputed_is_ended_by_the_engine(is_loaded: bool) -> None:
    rig = Rig({"r1": load_of(1, 0, 60, (40,) * NUM_LAYERS), "r2": load_of(2, 0, 20, (0,) * NUM_LAYERS)})
    if is_loaded:
        rig.land()
    else:
        rig.batch.fail(OSError("injected"))
    rig.heads.max_tokens = rig.prefill.max_tokens = 0
    # The forward of the other requests runs, and the scheduler goes on.
    assert rig.run([1, 2, 4]) == "result"
    assert rig.log == ["forward", "done"]
    # This is how SGLang learns that its requests must not be answered from these slots.
    assert rig.batch.is_abandoned
    assert not rig.batch.is_refilled
    counters = rig.restore.counters
    assert (counters.lost_requests, counters.rescued_requests, counters.head_tokens) == (2, 0, 0)


def test_indices_of_heads_without_memory_are_no_end_of_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    rig = Rig({"r1": load_of(1, 0, 60, (40,) * NUM_LAYERS)})
    rig.land()
    from_list = Device.from_list

    def refuse_once(device: Device, values: Sequence[int]) -> torch.Tensor:
        monkeypatch.setattr(Device, "from_list", from_list)
        raise OUT_OF_MEMORY

    monkeypatch.setattr(Device, "from_list", refuse_once)
    assert rig.run([1]) == "result"
    assert rig.batch.is_refilled
    assert (rig.heads.runs, rig.prefill.runs) == ([], [("r1", range(60))])
    assert rig.restore.counters.out_of_memory == 1


def test_other_errors_of_heads_are_not_hidden() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (4,) * NUM_LAYERS)})

    def fail() -> None:
        raise RuntimeError("an illegal memory access was encountered")

    rig.heads.before_run = fail
    with pytest.raises(RuntimeError, match="illegal memory access"):
        rig.run([1])


def test_a_rescue_has_the_memory_of_the_forward_that_failed() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (0,) * NUM_LAYERS)})
    hidden_states: list[weakref.ref[torch.Tensor]] = []

    def forward() -> str:
        hidden = torch.empty(1)
        hidden_states.append(weakref.ref(hidden))
        rig.batch.fail(OSError("injected"))
        rig.batch.wait_layer(0)
        return f"result of {len(hidden)} row"

    are_gone: list[bool] = []
    rig.prefill.before_run = lambda: are_gone.append(hidden_states[0]() is None)
    assert rig.restore.run(FakeScheduleBatch([1]), forward) == "result of 1 row"
    assert are_gone == [True]


# ---- loads before any forward ----


def test_a_load_before_its_forward_is_waited_for() -> None:
    load = load_of(1, 8, 24, (8,) * NUM_LAYERS)
    rig = Rig({"r1": load}, has_heads=False)
    with in_threads() as start:
        loading = start(lambda: rig.restore.load_before("r1", load, ()))
        rig.land(NUM_LAYERS - 1)
        assert not loading.done()
        rig.land(1)
        assert loading.result(PATIENCE_S) is rig.batch
    assert list(rig.batch.wait_times) == list(range(NUM_LAYERS))
    assert (rig.log, rig.failures, rig.restore.counters.rescued_requests) == ([], [], 0)
    rig.traces.settle()
    (trace,) = rig.traces.as_list()
    assert trace["is_mixed"]


def test_a_load_that_fails_before_its_forward_is_left_to_the_engine() -> None:
    """Not computed here: ranks that have other requests would not come to that forward."""
    load = load_of(1, 8, 24, (8,) * NUM_LAYERS)
    rig = Rig({"r1": load}, has_heads=False)
    rig.land(2)
    rig.batch.fail(OSError("injected"))
    assert rig.restore.load_before("r1", load, ()) is None
    assert (rig.log, rig.batch.is_abandoned, rig.batch.is_refilled) == ([], True, False)
    assert rig.failures == [("r1", "loading failed: injected", 8)]
    counters = rig.restore.counters
    assert (counters.rescued_requests, counters.rescued_tokens, counters.lost_requests) == (1, 24, 0)


# ---- several ranks ----


def two_ranks(*head_ends: Sequence[int], has_heads: bool = True) -> list[Rig]:
    meeting = MeetingPoint()
    return [
        Rig(
            {f"r{number}": load_of(number, 0, 8, ends) for number, ends in enumerate(head_ends)},
            agreement=ThreadAgreement(rank, meeting),
            has_heads=has_heads,
        )
        for rank in (0, 1)
    ]


def run_together(rigs: Sequence[Rig], numbers: Sequence[int]) -> list[Any]:
    with in_threads() as start:
        running = [start(lambda rig=rig: rig.run(numbers)) for rig in rigs]  # type: ignore[misc]
        return [forward.result(PATIENCE_S) for forward in running]


def test_a_failure_on_another_rank_is_computed_here_too() -> None:
    rigs = two_ranks((4, 4, 0, 0))
    rigs[0].land()
    rigs[1].land(2)
    rigs[1].batch.fail(OSError("injected"))
    assert run_together(rigs, [0]) == ["result"] * 2
    for rig in rigs:
        assert rig.log == ["heads", "forward", "prefill", "forward", "done"]
        assert rig.prefill.runs == [("r0", range(8))]
        assert rig.batch.is_refilled
        # None entered a layer that another one did not.
        assert rig.entered == list(range(NUM_LAYERS))


def test_without_heads_ranks_agree_on_a_failure_before_their_forwards() -> None:
    rigs = two_ranks((0,) * NUM_LAYERS, has_heads=False)
    rigs[0].land()
    rigs[1].land(3)
    rigs[1].batch.fail(OSError("injected"))
    assert run_together(rigs, [0]) == ["result"] * 2
    for rig in rigs:
        assert rig.log == ["prefill", "forward", "done"]
        assert rig.batch.is_refilled


def test_a_load_before_its_forward_fails_on_all_ranks_that_share_its_heads() -> None:
    rigs = two_ranks((0,) * NUM_LAYERS, has_heads=False)
    rigs[0].land()
    rigs[1].land(3)
    rigs[1].batch.fail(OSError("injected"))
    with in_threads() as start:
        loads = [
            start(lambda rig=rig: rig.restore.load_before("r0", rig.batch.loads["r0"], ()))  # type: ignore[misc]
            for rig in rigs
        ]
        assert [load.result(PATIENCE_S) for load in loads] == [None, None]
    assert all(rig.batch.is_abandoned for rig in rigs)


def test_the_forward_of_several_ranks_begins_while_its_last_layers_are_loaded() -> None:
    rigs = two_ranks((4, 4, 0, 0))
    with in_threads() as start:
        running = [start(lambda rig=rig: rig.run([0])) for rig in rigs]  # type: ignore[misc]
        for rig in rigs:
            rig.land(1)
        has_begun = [rig.has_begun.wait(PATIENCE_S) for rig in rigs]
        for rig in rigs:
            rig.land(NUM_LAYERS - 1)
        assert [forward.result(PATIENCE_S) for forward in running] == ["result"] * 2
    assert has_begun == [True, True]


def test_without_heads_ranks_meet_in_the_forward_alone() -> None:
    rigs = two_ranks((0,) * NUM_LAYERS)
    for rig in rigs:
        rig.land()
    assert run_together(rigs, [0]) == ["result"] * 2
    assert [rig.log for rig in rigs] == [["forward", "done"]] * 2


def test_a_rank_without_memory_for_indices_leaves_no_other_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    rigs = two_ranks((4, 4, 0, 0), (8, 0, 0, 0))
    for rig in rigs:
        rig.land()
    head = restore_forward._Prefix.head
    is_refused = iter([True])

    def refuse_once(prefix: Any) -> Head:
        if prefix.load is rigs[0].batch.loads["r1"] and next(is_refused, False):
            raise OUT_OF_MEMORY
        return head(prefix)

    monkeypatch.setattr(restore_forward._Prefix, "head", refuse_once)
    assert run_together(rigs, [0, 1]) == ["result"] * 2
    for rig in rigs:
        # No rank ran the heads of the plan: all computed everything.
        assert rig.log == ["prefill", "prefill", "forward", "done"]
        assert rig.prefill.runs == [("r0", range(8)), ("r1", range(8))]
        assert rig.batch.is_refilled
    assert [rig.restore.counters.out_of_memory for rig in rigs] == [1, 0]


def test_a_rank_without_memory_inside_of_layers_ends_as_the_engine_does() -> None:
    """The others are in this layer's collectives: it must not go on with others, nor be silent."""
    rig = two_ranks((4, 4, 0, 0))[0]
    rig.restore._agreement.gather = lambda values, shape: [values, values]  # type: ignore
    rig.heads.max_tokens = 0
    with pytest.raises(torch.OutOfMemoryError):
        rig.run([0])
    assert rig.heads.num_refused == 1
