"""A forward whose prefixes are restored: heads before it, and the whole prefix if a load fails."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.restore.calibration import OnlineCosts
from krul_backend.restore.costs import ComputeCost, RestoreCosts, TierCost
from krul_sglang.engine.agreement import RankAgreement
from krul_sglang.engine.head_recompute import Head
from krul_sglang.engine.load_batch import Load, LoadBatch, LoadFailedError
from krul_sglang.engine.restore_forward import RestoreForward
from krul_sglang.engine.restore_trace import TraceLog
from tests.unit.engine_builders import PATIENCE_S, bare_load, layer_times

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
    """Remembers the heads of each run."""

    def __init__(self, log: list[str]) -> None:
        self.runs: list[list[Head]] = []
        self._log = log

    def run(self, heads: Sequence[Head], on_layer: Callable[[int], None]) -> None:
        self._log.append("heads")
        self.runs.append(list(heads))
        for layer in range(NUM_LAYERS):
            on_layer(layer)
        on_layer(NUM_LAYERS)


class FakeLoader:
    def __init__(self, batch: LoadBatch | None) -> None:
        self._batch = batch

    def batch(self, index: int) -> LoadBatch | None:
        return self._batch if index == INDEX else None


class FakeAgreement(RankAgreement):
    """This rank and another one, which says ``other`` whenever they gather."""

    def __init__(self, other: float) -> None:
        super().__init__(None, num_ranks=2)
        self.gathered: deque[list[float]] = deque()
        self._other = other

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:
        assert values is not None
        self.gathered.append(values.tolist())
        return [values, torch.full_like(values, self._other)]


class Rig:
    """One batch of loads and a forward that waits for each of its layers."""

    def __init__(
        self,
        loads: Mapping[str, Load],
        *,
        has_heads: bool = True,
        chunk_tokens: int = MAX_TOKENS,
        agreement: RankAgreement | None = None,
        skip_heads: bool = False,
    ) -> None:
        self.log: list[str] = []
        self.batch = LoadBatch(loads, NUM_LAYERS, torch.device("cpu"), PATIENCE_S)
        self.heads = FakeHeads(self.log)
        self.traces = TraceLog(OnlineCosts(COSTS), NUM_LAYERS)
        loader: Any = FakeLoader(self.batch)
        heads: Any = self.heads if has_heads else None
        self.restore = RestoreForward(
            loader,
            heads,
            RankAgreement(None, 1) if agreement is None else agreement,
            self.traces,
            req_to_token=REQ_TO_TOKEN,
            chunk_tokens=chunk_tokens,
            skip_heads=skip_heads,
        )

    def land(self, num_layers: int = NUM_LAYERS) -> None:
        for _ in range(num_layers):
            self.batch.landed(layer_times())

    def forward(self) -> str:
        self.log.append("forward")
        for layer in range(NUM_LAYERS):
            self.batch.wait_layer(layer)
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


def test_heads_that_are_skipped_on_purpose_are_not_recomputed() -> None:
    rig = Rig({"r1": load_of(1, 0, 24, (8,) * NUM_LAYERS)}, skip_heads=True)
    rig.land()
    assert rig.run([1]) == "result"
    assert rig.log == ["forward", "done"]


@settings(max_examples=80, deadline=None)
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


def test_a_failed_load_is_recomputed_and_the_forward_runs_again() -> None:
    loads = {"r1": load_of(1, 8, 24, (20, 16, 8, 8)), "r2": load_of(2, 0, 16, (0, 0, 0, 0))}
    rig = Rig(loads, chunk_tokens=20)
    rig.land(2)
    rig.batch.fail(OSError("injected"))
    assert rig.run([1, 2]) == "result"
    assert rig.log == ["heads", "forward", *["heads"] * 3, "forward", "done"]
    assert rig.batch.is_abandoned
    assert rig.batch.is_refilled
    rescue = rig.heads.runs[1:]
    # Every token that the loads were to bring, in every layer, and none that was on the device.
    assert covered(rescue, 1) == [list(range(8, 32))] * NUM_LAYERS
    assert covered(rescue, 2) == [list(range(16))] * NUM_LAYERS
    assert rig.restore.counters.rescued_requests == 2
    assert rig.restore.counters.rescued_tokens == 24 + 16


def test_a_load_that_fails_in_the_middle_of_the_forward_is_recomputed() -> None:
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
    assert rig.log == ["heads", "forward", "heads", "forward"]
    assert covered(rig.heads.runs[1:], 1) == [list(range(8))] * NUM_LAYERS


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
    # The head of the plan, then the whole prefix: every layer of both.
    assert [layer for layer, *_ in streams["head"]] == [*range(NUM_LAYERS), *range(NUM_LAYERS)]
    assert trace["requests"][0]["restored_tokens"] == 8


def test_without_heads_a_failed_load_is_left_to_the_engine() -> None:
    rig = Rig({"r1": load_of(1, 0, 8, (0,) * NUM_LAYERS)}, has_heads=False)
    rig.batch.fail(OSError("injected"))
    assert rig.run([1]) == "result"
    assert rig.log == ["forward", "forward", "done"]
    assert rig.batch.is_abandoned
    assert not rig.batch.is_refilled
    assert not rig.batch.wait_end()
    assert rig.restore.counters.rescued_requests == 0


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
    assert rig.log == ["forward", "heads", "forward"]


# ---- several ranks ----


def test_ranks_begin_the_forward_when_all_have_landed() -> None:
    agreement = FakeAgreement(other=1.0)
    rig = Rig({"r1": load_of(1, 0, 8, (4,) * NUM_LAYERS)}, agreement=agreement)
    rig.land()
    assert rig.run([1]) == "result"
    assert rig.log == ["heads", "forward", "done"]
    assert list(agreement.gathered) == [[1.0]]


def test_a_failure_on_another_rank_is_recomputed_here_too() -> None:
    agreement = FakeAgreement(other=0.0)
    rig = Rig({"r1": load_of(1, 0, 8, (4, 4, 0, 0))}, agreement=agreement)
    rig.land()
    assert rig.run([1]) == "result"
    # No rank began the forward.
    assert rig.log == ["heads", "heads", "forward", "done"]
    assert covered(rig.heads.runs[1:], 1) == [list(range(8))] * NUM_LAYERS
    assert list(agreement.gathered) == [[1.0]]


def test_a_failure_here_is_told_to_the_other_rank() -> None:
    agreement = FakeAgreement(other=1.0)
    rig = Rig({"r1": load_of(1, 0, 8, (4, 4, 0, 0))}, agreement=agreement)
    rig.land(2)
    rig.batch.fail(OSError("injected"))
    assert rig.run([1]) == "result"
    assert rig.log == ["heads", "heads", "forward", "done"]
    assert list(agreement.gathered) == [[0.0]]
