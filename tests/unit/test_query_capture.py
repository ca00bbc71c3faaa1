"""Query capture against batches made by hand: which rows are kept, of whom, and where, also in graphs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from krul_backend.device import Device
from krul_backend.errors import ConfigError
from krul_sglang.adapter.factory import forward_with_restore
from krul_sglang.adapter.runtime import KrulRuntime
from krul_sglang.config import KrulConfig
from krul_sglang.engine.capture.query_capture import DECODE_INTERVAL, CapturedRows, CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape
from krul_sglang.engine.common.step_times import StepTimes
from tests.support.forward_builders import GraphRunner, Mode, decode_batch, extend_batch, mixed_batch
from tests.support.present import present

SHAPE = QueryShape(
    num_layers=2, num_query_heads=4, num_kv_heads=2, head_dim=4, dtype=torch.float32, scaling=0.5
)
WIDTH = SHAPE.num_query_heads * SHAPE.head_dim
GRAPH_SIZES = (1, 2, 4, 32, 128, 512)


def query(rid: str, layer: int, position: int) -> torch.Tensor:
    """The query of one token: ``[num_query_heads * head_dim]``, different in every respect."""
    head = torch.arange(WIDTH, dtype=torch.float32)
    return head + 100 * layer + 1000 * position + 1e6 * ord(rid[0])


class Attention(torch.nn.Module):
    """Takes what SGLang's attention modules take."""

    def forward(self, q: torch.Tensor, k: None, v: None, forward_batch: None) -> torch.Tensor:
        return q


class Engine:
    """Runs prompts and decode steps as the scheduler would; with ``replay``, through captured graphs."""

    def __init__(self, *, num_requests: int = 3, num_rows: int = 16) -> None:
        self.capture = QueryCapture(SHAPE, CapturePlan(num_requests, num_rows, 0), device=torch.device("cpu"))
        self.modules = [Attention() for _ in range(SHAPE.num_layers)]
        self.capture.install(self.modules)
        self.graphs: GraphRunner | None = None

    def extend(self, *chunks: tuple[str, int, int, int]) -> None:
        """``(rid, slot, start, end)`` of each request in the batch."""
        self._forward(
            extend_batch(*chunks), [(rid, p) for rid, _, start, end in chunks for p in range(start, end)]
        )

    def decode(self, *requests: tuple[str, int, int]) -> None:
        """``(rid, slot, position)`` of each request in the batch."""
        self._forward(decode_batch(*requests), [(rid, position) for rid, _, position in requests])

    def mixed(self, chunks: Sequence[tuple[str, int, int, int]], *decoding: tuple[str, int, int]) -> None:
        tokens = [(rid, p) for rid, _, start, end in chunks for p in range(start, end)]
        tokens += [(rid, position) for rid, _, position in decoding]
        self._forward(mixed_batch(chunks, *decoding), tokens)

    def run_modules(self, queries: torch.Tensor) -> None:
        if self.graphs is not None:
            self.graphs.run(queries)
            return
        for layer, module in enumerate(self.modules):
            module(queries[layer], None, None, None)

    def _forward(self, batch: Any, tokens: list[tuple[str, int]]) -> None:
        queries = [[query(rid, layer, p) for rid, p in tokens] for layer in range(SHAPE.num_layers)]
        with self.capture.recording(batch):
            self.run_modules(torch.stack([torch.stack(of_layer) for of_layer in queries]))

    def take(self, rid: str, slot: int) -> CapturedRows:
        return present(self.capture.take(rid, slot))


MakeEngine = Callable[..., Engine]


@pytest.fixture(params=["eager", "graphs"])
def make_engine(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> MakeEngine:
    def make(**kwargs: int) -> Engine:
        engine = Engine(**kwargs)
        if request.param == "graphs":
            engine.graphs = GraphRunner(monkeypatch, engine.modules, WIDTH, GRAPH_SIZES)
        return engine

    return make


def assert_rows_are(rid: str, rows: CapturedRows) -> list[int]:
    """Every kept row is the query of its position, with all heads; returns the positions."""
    read = present(rows.rows(10**9))
    positions: list[int] = read.positions.tolist()
    assert positions == sorted(set(positions))
    for row, position in enumerate(positions):
        for layer in range(SHAPE.num_layers):
            heads = query(rid, layer, position).view(SHAPE.num_query_heads, SHAPE.head_dim)
            assert torch.equal(read.queries[layer, row], heads)
    assert read.kv_heads.tolist() == [0, 0, 1, 1]
    assert read.scaling == SHAPE.scaling
    return positions


def test_a_prompt_keeps_half_of_the_rows_spread_over_it_with_the_last_one(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.extend(("a", 5, 0, 100))
    positions = assert_rows_are("a", engine.take("a", 5))
    assert len(positions) == 8
    assert positions[-1] == 99
    assert positions[0] < 25


def test_a_short_prompt_keeps_all_its_rows(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.extend(("a", 5, 16, 19))
    assert assert_rows_are("a", engine.take("a", 5)) == [16, 17, 18]


def test_every_chunk_of_a_long_prompt_keeps_a_share(make_engine: MakeEngine) -> None:
    engine = make_engine(num_rows=32)
    for start in range(0, 400, 100):
        engine.extend(("a", 5, start, start + 100))
    positions = assert_rows_are("a", engine.take("a", 5))
    assert len(positions) == 16
    shares = [sum(start <= p < start + 100 for p in positions) for start in range(0, 400, 100)]
    assert all(2 <= share <= 8 for share in shares), shares


def test_requests_of_one_batch_do_not_mix(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.extend(("a", 5, 0, 30), ("b", 2, 10, 60))
    engine.extend(("c", 1, 0, 40))
    for rid, slot, low, high in (("a", 5, 0, 30), ("b", 2, 10, 60), ("c", 1, 0, 40)):
        positions = assert_rows_are(rid, engine.take(rid, slot))
        assert all(low <= position < high for position in positions)


def test_one_of_many_decoded_tokens_is_kept_and_the_oldest_go_first(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.extend(("a", 5, 0, 10))
    num_steps = 20 * DECODE_INTERVAL
    for step in range(num_steps):
        engine.decode(("a", 5, 10 + step))
    positions = [p for p in assert_rows_are("a", engine.take("a", 5)) if p >= 10]
    assert len(positions) == 8
    assert {later - earlier for earlier, later in itertools.pairwise(positions)} == {DECODE_INTERVAL}
    assert positions[-1] > num_steps - DECODE_INTERVAL


def test_forwards_of_changing_sizes_leave_each_others_rows_alone(make_engine: MakeEngine) -> None:
    """A smaller graph after a larger one, with more padding than tokens."""
    engine = make_engine(num_requests=4)
    engine.extend(("a", 5, 0, 400))
    engine.extend(("b", 2, 0, 3))
    engine.extend(("c", 1, 40, 73), ("d", 0, 8, 9))
    for step in range(2 * DECODE_INTERVAL):
        engine.decode(("b", 2, 3 + step), ("a", 5, 400 + step), ("d", 0, 9 + step))
    for rid, slot, num_decoded in (("a", 5, 2), ("b", 2, 2), ("c", 1, 0), ("d", 0, 2)):
        positions = assert_rows_are(rid, engine.take(rid, slot))
        prompt_end = {"a": 400, "b": 3, "c": 73, "d": 9}[rid]
        assert sum(position >= prompt_end for position in positions) == num_decoded
        assert any(position < prompt_end for position in positions)


def test_a_forward_that_nobody_announced_is_not_recorded(make_engine: MakeEngine) -> None:
    """Warm-ups, dummy batches and the like run the same graphs."""
    engine = make_engine()
    engine.extend(("a", 0, 0, 10))
    before = engine.capture.read(0)
    engine.run_modules(torch.full((SHAPE.num_layers, 7, WIDTH), torch.nan))
    after = engine.capture.read(0)
    assert torch.equal(before.positions, after.positions)
    assert torch.equal(before.queries, after.queries)


def test_a_forward_that_fails_records_nothing_afterwards(make_engine: MakeEngine) -> None:
    engine = make_engine()
    with pytest.raises(RuntimeError, match="lost"), engine.capture.recording(extend_batch(("a", 5, 0, 30))):
        raise RuntimeError("the device is lost")
    before = engine.capture.read(0).queries
    engine.run_modules(torch.full((SHAPE.num_layers, 30, WIDTH), torch.nan))
    assert torch.equal(engine.capture.read(0).queries, before)


def test_decoding_beside_a_prompt_leaves_prompt_rows_alone(make_engine: MakeEngine) -> None:
    """Mixed batches: some tokens of the forward are prompts, some are decoded."""
    engine = make_engine()
    engine.extend(("a", 5, 0, 100))
    prompt = [p for p in assert_rows_are("a", CapturedRows(engine.capture, 0)) if p < 100]
    for step in range(4 * DECODE_INTERVAL):
        engine.mixed([("b", 2, 10 * step, 10 * step + 10)], ("a", 5, 100 + step))
    positions = assert_rows_are("a", engine.take("a", 5))
    assert [p for p in positions if p < 100] == prompt
    assert len([p for p in positions if p >= 100]) == 4
    assert len(assert_rows_are("b", engine.take("b", 2))) == 8


def test_many_prompts_of_one_forward_share_its_rows(make_engine: MakeEngine) -> None:
    engine = make_engine(num_requests=6, num_rows=16)
    chunks = [(rid, slot, 0, 20) for slot, rid in enumerate("abcdef")]
    engine.extend(*chunks)
    kept = [assert_rows_are(rid, engine.take(rid, slot)) for rid, slot, _, _ in chunks]
    assert {len(positions) for positions in kept} == {2}
    assert all(positions[-1] == 19 for positions in kept)


def test_rows_of_two_requests_in_one_slot_never_mix(make_engine: MakeEngine) -> None:
    """The second request finds no place: what it decodes must not go to the first one's."""
    engine = make_engine(num_requests=1)
    engine.extend(("a", 5, 0, 30))
    rows = engine.take("a", 5)
    engine.extend(("b", 5, 0, 30))
    for step in range(2 * DECODE_INTERVAL):
        engine.decode(("b", 5, 30 + step))
    assert max(assert_rows_are("a", rows)) == 29


def test_what_is_kept_goes_to_the_device_in_one_copy(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied: list[torch.Tensor] = []
    upload = Device.upload

    def counted(self: Device, host: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
        copied.append(host.clone())
        return upload(self, host, target)

    engine = make_engine()
    monkeypatch.setattr(Device, "upload", counted)
    engine.extend(("a", 5, 0, 30), ("b", 2, 0, 9))
    assert [int((tokens > 0).sum()) for tokens, _ in copied] == [4 + 4]
    for step in range(DECODE_INTERVAL):
        engine.decode(("a", 5, 30 + step), ("b", 2, 9 + step))
    # The first request's token is number 0.
    assert [int((targets > 0).sum()) for _, targets in copied[1:]] == [2]


def test_a_request_without_a_free_place_is_not_recorded_and_harms_nobody(make_engine: MakeEngine) -> None:
    engine = make_engine(num_requests=1)
    engine.extend(("a", 5, 0, 30), ("b", 2, 0, 30))
    for step in range(2 * DECODE_INTERVAL):
        engine.decode(("a", 5, 30 + step), ("b", 2, 30 + step))
    assert engine.capture.take("b", 2) is None
    assert_rows_are("a", engine.take("a", 5))


def test_a_place_is_free_again_only_when_it_was_released(make_engine: MakeEngine) -> None:
    engine = make_engine(num_requests=1)
    engine.extend(("a", 5, 0, 30))
    rows = engine.take("a", 5)
    engine.extend(("b", 5, 0, 20))
    assert engine.capture.take("b", 5) is None
    assert_rows_are("a", rows)
    rows.release()
    engine.extend(("c", 5, 0, 20))
    assert_rows_are("c", engine.take("c", 5))


def test_an_aborted_request_gives_its_place_to_the_next_one_in_its_slot(make_engine: MakeEngine) -> None:
    engine = make_engine(num_requests=1)
    engine.extend(("a", 5, 0, 30))
    engine.extend(("b", 5, 0, 12))
    assert engine.capture.take("a", 5) is None
    positions = assert_rows_are("b", engine.take("b", 5))
    assert positions[-1] == 11


def test_a_request_that_starts_over_forgets_what_it_had(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.extend(("a", 5, 0, 300))
    engine.extend(("a", 5, 0, 12))
    assert assert_rows_are("a", engine.take("a", 5))[-1] == 11


def test_nothing_is_recorded_while_suspended(make_engine: MakeEngine) -> None:
    engine = make_engine()
    engine.extend(("a", 5, 0, 30))
    batch = decode_batch(("a", 5, 30))
    for _ in range(DECODE_INTERVAL):
        with engine.capture.recording(batch):
            with engine.capture.suspended():
                engine.run_modules(torch.full((SHAPE.num_layers, 1, WIDTH), torch.nan))
            engine.run_modules(torch.stack([query("a", layer, 30)[None] for layer in range(2)]))
    assert assert_rows_are("a", engine.take("a", 5))[-1] == 30


def test_the_plan_stays_within_its_memory() -> None:
    row = SHAPE.row_bytes
    assert row == 2 * 4 * 4 * 4 + 8
    assert CapturePlan.fit(SHAPE, max_requests=9, num_rows=64, max_bytes=10 * 64 * row) == CapturePlan(
        9, 64, (9 * 65 + 32) * row
    )
    assert CapturePlan.fit(SHAPE, max_requests=3, num_rows=64, max_bytes=10**9).num_requests == 3
    # Too little for 16 rows, and the 9 that one forward keeps then: 8.
    assert CapturePlan.fit(SHAPE, max_requests=9, num_rows=64, max_bytes=24 * row).num_rows == 8
    with pytest.raises(ConfigError, match="query_memory"):
        CapturePlan.fit(SHAPE, max_requests=9, num_rows=64, max_bytes=12 * row)


@pytest.mark.parametrize("num_requests", [1, 3, 40])
def test_the_plan_says_what_the_capture_takes(num_requests: int) -> None:
    plan = CapturePlan.fit(SHAPE, max_requests=num_requests, num_rows=32, max_bytes=10**9)
    capture = QueryCapture(SHAPE, plan, device=torch.device("cpu"))
    tensors = [value for value in vars(capture).values() if isinstance(value, torch.Tensor)]
    storages = {tensor.untyped_storage().data_ptr(): tensor.untyped_storage() for tensor in tensors}
    taken = sum(storage.nbytes() for storage in storages.values())
    assert 0.9 * plan.num_bytes < taken <= plan.num_bytes


@pytest.mark.parametrize(
    ("room", "expected"), [(98, (96, 64)), (97, (187, 32)), (48, (180, 16)), (2, (7, 16))]
)
def test_rows_are_given_up_before_requests_are_few(room: int, expected: tuple[int, int]) -> None:
    """``room``: for so many requests of 64 rows."""
    plan = CapturePlan.fit(SHAPE, max_requests=999, num_rows=64, max_bytes=room * 64 * SHAPE.row_bytes)
    assert (plan.num_requests, plan.num_rows) == expected
    few = CapturePlan.fit(SHAPE, max_requests=4, num_rows=64, max_bytes=8 * 64 * SHAPE.row_bytes)
    assert (few.num_requests, few.num_rows) == (4, 64)


def runtime_of(
    engine: Engine, restore: Callable[[Any, Callable[[], Any]], Any], *, has_dp_attention: bool = False
) -> KrulRuntime:
    """That of a rank whose forwards with a prompt go through ``restore``, unless it ``has_dp_attention``."""
    runtime = KrulRuntime(KrulConfig(), capture=engine.capture)
    restore_path = SimpleNamespace(forward=SimpleNamespace(run=restore))
    linker = SimpleNamespace(steps=StepTimes(), provenance=None, draft=None, restore_path=restore_path)
    runtime.cache = cast(Any, SimpleNamespace(linker=SimpleNamespace(cache_linker=linker)))
    setup = SimpleNamespace(has_dp_attention=has_dp_attention)
    runtime.engine = cast(Any, SimpleNamespace(setup=setup))
    return runtime


def test_the_forward_hook_announces_every_forward(make_engine: MakeEngine) -> None:
    """Prompts and decode steps, of which Python sees nothing more when they are replayed."""
    engine = make_engine()
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    runtime_of(engine, lambda batch, forward: forward()).attach_to(worker.model_runner)

    def forward(batch: Any, tokens: Sequence[int]) -> None:
        queries = [[query("a", layer, p) for p in tokens] for layer in range(SHAPE.num_layers)]

        def original(original_worker: Any, original_batch: Any) -> str:
            assert (original_worker, original_batch) == (worker, batch)
            engine.run_modules(torch.stack([torch.stack(of_layer) for of_layer in queries]))
            return "done"

        assert forward_with_restore(original, worker, batch) == "done"

    forward(extend_batch(("a", 5, 0, 30)), range(30))
    for step in range(DECODE_INTERVAL):
        forward(decode_batch(("a", 5, 30 + step)), [30 + step])
    positions = assert_rows_are("a", engine.take("a", 5))
    assert positions[-2:] == [29, 30 + DECODE_INTERVAL - 1]


@pytest.mark.parametrize(("mode", "has_dp_attention"), [("idle", False), ("idle", True), ("extend", True)])
def test_a_forward_with_dp_attention_restores_nothing(
    make_engine: MakeEngine, mode: str, has_dp_attention: bool
) -> None:
    """What it needs has been loaded before; and one without requests is no work of this rank."""
    engine = make_engine()
    restored: list[str] = []

    def restore(batch: Any, forward: Callable[[], Any]) -> Any:
        restored.append(batch.forward_mode.name)

    runtime = runtime_of(engine, restore, has_dp_attention=has_dp_attention)
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    runtime.attach_to(worker.model_runner)
    batch = extend_batch(*([("a", 5, 0, 30)] if mode == "extend" else []))
    batch.forward_mode = Mode(mode)
    assert forward_with_restore(lambda *args: "done", worker, batch) == "done"
    assert restored == []
    runtime.linker.steps.begin_step()
    assert runtime.linker.steps.as_dict()["steps"] == (mode == "extend")


def test_a_forward_that_verifies_restores_and_records_nothing(make_engine: MakeEngine) -> None:
    """SGLang's batch has the lengths and the load of the prompt still."""
    engine = make_engine()
    worker = SimpleNamespace(model_runner=SimpleNamespace())
    restored: list[str] = []
    runtime = runtime_of(engine, lambda batch, forward: restored.append(batch.forward_mode.name) or forward())
    runtime.attach_to(worker.model_runner)

    def original(original_worker: Any, batch: Any) -> None:
        num_rows = 4 if batch.forward_mode.is_target_verify() else 30
        queries = [[query("a", layer, p) for p in range(num_rows)] for layer in range(SHAPE.num_layers)]
        engine.run_modules(torch.stack([torch.stack(of_layer) for of_layer in queries]))

    batch = extend_batch(("a", 5, 0, 30))
    forward_with_restore(original, worker, batch)
    recorded = engine.capture._num_visible.copy()
    for _ in range(DECODE_INTERVAL):
        batch.forward_mode = Mode("verify")
        forward_with_restore(original, worker, batch)
    assert restored == ["extend"]
    assert engine.capture._num_visible.tolist() == recorded.tolist()
    assert assert_rows_are("a", engine.take("a", 5))[-1] == 29
