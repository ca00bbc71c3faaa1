"""Which prompts are measured at the start, and which kinds of blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_backend.codec.layout import LayerShape
from krul_backend.codec.registry import ModelCodecs
from krul_backend.codec.subspace.codec import SubspaceCodec
from krul_backend.codec.subspace.restore import GroupRestore
from krul_backend.device import Device
from krul_backend.planner.interface import NO_DECODING, DecodeCost, RestoreCosts, TierCost
from krul_backend.strategy.strategy import Precision
from krul_sglang.adapter import attach, cost_calibration
from krul_sglang.adapter.cost_calibration import CostCalibration, units_in_use
from krul_sglang.adapter.start_proof import Prefilled
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.restore.heads import Head
from tests.support.engine_builders import TensorPool
from tests.support.strict_device import StrictDevice
from tests.support.subspace_builders import make_bases

NUM_LAYERS = 2
SHAPE = LayerShape(1, 8, 8, torch.float32)
PAGE_SIZE = 16
NUM_SLOTS = 512 + PAGE_SIZE


class FakeEngine:
    """Prefills take ``token_s`` seconds per token, and ``past_s`` per token before them; nothing is computed.
    Heads are only remembered."""

    def __init__(
        self,
        token_s: float,
        num_slots: int = NUM_SLOTS,
        context_len: int = 10_000,
        memory_tokens: int = 10_000,
        past_s: float = 0.0,
        window_slots: int | None = None,
    ) -> None:
        self.token_s = token_s
        self.past_s = past_s
        self.memory_tokens = memory_tokens
        self.prefilled: list[int] = []
        self.heads: list[tuple[int, tuple[int, ...]]] = []
        self.pool: Any = TensorPool(SHAPE, NUM_LAYERS, num_slots + 1)
        self.pool.num_tokens = num_slots
        self.allocator = SimpleNamespace(size=min(num_slots, window_slots or num_slots))
        self.model_runner = SimpleNamespace(
            model_config=SimpleNamespace(vocab_size=100, context_len=context_len)
        )

    @contextmanager
    def prefill(self, runner: Any, cache: Any, token_ids: Sequence[int]) -> Iterator[Prefilled]:
        num_tokens = len(token_ids)
        assert num_tokens + cache.page_size <= self.pool.num_tokens, "SGLang asks for a page more"
        if num_tokens > self.memory_tokens:
            raise torch.OutOfMemoryError("CUDA out of memory")
        self.prefilled.append(num_tokens)
        yield Prefilled(
            torch.tensor(token_ids),
            torch.arange(num_tokens),
            self.token_s * num_tokens,
            lambda first: self.token_s * (num_tokens - first) + self.past_s * first,
        )

    def run(self, heads: Sequence[Head]) -> None:
        (head,) = heads
        self.heads.append((head.start, head.ends))

    def calibration(self, has_heads: bool = False) -> CostCalibration:
        heads: Any = self if has_heads else None
        cache = SimpleNamespace(page_size=PAGE_SIZE, token_to_kv_pool_allocator=self.allocator)
        return CostCalibration(self.model_runner, cache, self.pool, heads, RankAgreement(None, 1))


def measured_lengths(engine: FakeEngine, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    monkeypatch.setattr(cost_calibration, "ordinary_prefill", engine.prefill)
    engine.calibration().measure()
    return sorted(set(engine.prefilled))


def test_a_fast_machine_measures_every_length_that_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    assert measured_lengths(FakeEngine(1e-6), monkeypatch) == [32, 64, 128, 256, 512]
    assert measured_lengths(FakeEngine(1e-6, num_slots=NUM_SLOTS - 1), monkeypatch) == [32, 64, 128, 256]
    assert measured_lengths(FakeEngine(1e-6, context_len=200), monkeypatch) == [32, 64, 128]
    assert measured_lengths(FakeEngine(1e-6, window_slots=256), monkeypatch) == [32, 64, 128]


def test_no_longer_prompt_is_measured_once_one_took_long(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(0.8 / 256, num_slots=8192)
    assert measured_lengths(engine, monkeypatch) == [32, 64, 128, 256, 512, 1024]
    # As soon as one takes a quarter of a second, longer ones run once.
    assert [engine.prefilled.count(length) for length in (128, 256, 512, 1024)] == [3, 1, 1, 1]


def test_a_slow_machine_measures_as_many_lengths_as_the_fit_needs(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(1.0)
    assert measured_lengths(engine, monkeypatch) == [32, 64, 128]
    costs = engine.calibration().measure()
    assert costs.own.layer_s(100, 0) == pytest.approx(100 / NUM_LAYERS, rel=1e-3)
    # Without heads these cost what the engine's own layers cost.
    assert costs.head == costs.own


def test_a_question_after_a_long_prompt_pays_for_what_it_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(1e-4, past_s=3e-5)
    monkeypatch.setattr(cost_calibration, "ordinary_prefill", engine.prefill)
    own = engine.calibration().measure().own
    assert own.layer_s(16, 4096) == pytest.approx((16e-4 + 4096 * 3e-5) / NUM_LAYERS, rel=1e-3)
    assert own.layer_s(256, 0) == pytest.approx(256e-4 / NUM_LAYERS, rel=1e-3)


@pytest.mark.parametrize(("known_token_s", "are_too_slow"), [(1e-4, False), (1e-6, False), (3e-4, True)])
def test_costs_of_a_busier_machine_are_noticed(
    known_token_s: float, are_too_slow: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    busier, engine = FakeEngine(known_token_s), FakeEngine(1e-4)
    monkeypatch.setattr(cost_calibration, "ordinary_prefill", busier.prefill)
    known = busier.calibration().measure()
    monkeypatch.setattr(cost_calibration, "ordinary_prefill", engine.prefill)
    assert engine.calibration().are_too_slow(known) == are_too_slow
    assert set(engine.prefilled) == {256}


def test_costs_are_kept_in_a_file_until_a_start_is_twice_as_fast(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    identity = SimpleNamespace(fingerprint="model")

    def costs_of(engine: FakeEngine) -> RestoreCosts:
        monkeypatch.setattr(cost_calibration, "ordinary_prefill", engine.prefill)
        setup: Any = SimpleNamespace(
            pool=engine.pool,
            model=SimpleNamespace(identity=identity, is_lasting=True),
            config=SimpleNamespace(cache_dir=str(tmp_path)),
            start_agreement=RankAgreement(None, 1),
        )
        return attach._costs(engine.calibration(), setup)

    busy, settled = costs_of(FakeEngine(3e-4)), costs_of(FakeEngine(2e-4))
    assert settled == busy
    fast = costs_of(FakeEngine(1e-4))
    assert fast.own.layer_s(256, 0) == pytest.approx(256e-4 / NUM_LAYERS, rel=1e-3)
    assert costs_of(FakeEngine(3e-4)) == fast


def test_longer_prompts_than_there_is_memory_for_follow_from_the_fit(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    engine = FakeEngine(1e-3 / 128, num_slots=8192, memory_tokens=200)
    assert measured_lengths(engine, monkeypatch) == [32, 64, 128]
    assert engine.calibration().measure().own.layer_s(512, 0) == pytest.approx(4e-3 / NUM_LAYERS, rel=1e-3)
    assert "no memory to measure prompts of 256 tokens" in caplog.text


def test_a_machine_without_memory_for_short_prompts_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(torch.OutOfMemoryError):
        measured_lengths(FakeEngine(1e-6, memory_tokens=64), monkeypatch)


def test_heads_are_measured_whole_and_after_a_past(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = FakeEngine(1e-6)
    monkeypatch.setattr(cost_calibration, "ordinary_prefill", engine.prefill)
    engine.calibration(has_heads=True).measure()
    assert set(engine.heads) == {
        shape
        for num_tokens in (32, 64, 128, 256, 512)
        for shape in ((0, (num_tokens,) * NUM_LAYERS), (num_tokens // 2, (num_tokens,) * NUM_LAYERS))
    }


def test_decoding_is_measured_for_every_unit_in_use() -> None:
    engine = FakeEngine(1e-6)
    codec = ModelCodecs(SHAPE, NUM_LAYERS, None)
    units = units_in_use("krul", Precision.INT4, NUM_LAYERS)
    costs = engine.calibration().decode_costs(codec, units, TierCost(0.0, 0.0))
    assert set(costs.single) == {Precision.NATIVE, Precision.INT4}
    assert set(costs.pair) == {Precision.INT4}
    # With copies that cost nothing all the time is decoding; with infinitely slow ones nothing is.
    # What native blocks take is the tier's cost.
    assert costs.single[Precision.NATIVE] == NO_DECODING
    for cost in (costs.single[Precision.INT4], costs.pair[Precision.INT4]):
        assert cost.latency_s == 0
        assert 256 * cost.token_s + cost.segment_s > 1e-6
    hidden = engine.calibration().decode_costs(codec, units, TierCost(1e9, 0.0))
    for cost in (*hidden.single.values(), *hidden.pair.values()):
        assert 256 * cost.token_s + cost.segment_s < 1e-8


def test_segments_that_are_decoded_one_by_one_cost_something_each(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a clock by which a segment takes 1 s, a token 0.1 s, and its two copies 1 s each."""
    calibration = FakeEngine(1e-6).calibration()
    monkeypatch.setattr(
        calibration, "_restore_s", lambda *given: (2.0, 2.0 + 1.0 + 0.1 * given[-1]), raising=True
    )
    codec = ModelCodecs(SHAPE, NUM_LAYERS, None)
    costs = calibration.decode_costs(codec, [((0, 1), Precision.INT4)], TierCost(0.0, 1.0))
    assert costs.pair[Precision.INT4] == DecodeCost(0.0, pytest.approx(0.1), pytest.approx(1.0))


def test_units_in_use_follow_the_strategy() -> None:
    native, int4, int8 = (((0,), each) for each in (Precision.NATIVE, Precision.INT4, Precision.INT8))
    assert units_in_use("none", Precision.NATIVE, 8) == [native]
    assert units_in_use("none", Precision.INT4, 8) == [native, int4]
    assert units_in_use("krul", Precision.INT4, 8) == [native, int4, ((0, 1), Precision.INT4)]
    assert units_in_use("krul", Precision.INT4, 1) == [native, int4]
    # What the bases cannot keep.
    assert units_in_use("subspace", Precision.INT4, 8) == [int4, int8]


@pytest.mark.parametrize("has_all_cores", [False, True])
def test_groups_are_measured_as_they_are_restored(
    monkeypatch: pytest.MonkeyPatch, has_all_cores: bool
) -> None:
    """On a clock by which a restore takes 1 s and 0.1 s per token beyond the copies of two groups."""
    engine, written = FakeEngine(1e-6), list[torch.Tensor]()
    subspace = SubspaceCodec(make_bases(SHAPE, [1, 1], rank=4), None)
    write, cores = GroupRestore.write, torch.get_num_threads()
    num_cores: set[int] = set()

    def timed(device: Device, run: Callable[[], object]) -> float:
        num_cores.add(torch.get_num_threads())
        run()
        return 2.0 + 1.0 + 0.1 * len(written[-1])

    def write_and_keep(begun: GroupRestore, buffers: Any) -> None:
        write(begun, buffers)
        written.extend(keys.clone() for keys, _ in buffers)

    before = engine.pool.copy()
    monkeypatch.setattr(cost_calibration, "timed", timed)
    monkeypatch.setattr(GroupRestore, "write", write_and_keep)
    cost = engine.calibration().group_cost(subspace, TierCost(1.0, 0.0), has_all_cores=has_all_cores)
    assert num_cores == {cores if has_all_cores else 1}
    assert torch.get_num_threads() == cores
    num_tokens = min(cost_calibration._DECODED_TOKENS, NUM_SLOTS // 2)
    assert {len(keys) for keys in written} == {num_tokens, num_tokens // 8}
    assert len(written) == 2 * cost_calibration._REPEATS * NUM_LAYERS
    # All groups of the model are decoded each time.
    for keys, drawn in zip(written[-NUM_LAYERS:], subspace.draw(num_tokens), strict=True):
        assert float((keys - drawn.k).square().mean()) < 0.1 * float(drawn.k.var())
    # Requests may be using the pool.
    for now, old in zip(engine.pool.copy(), before, strict=True):
        assert torch.equal(now.k, old.k)
        assert torch.equal(now.v, old.v)
    assert cost.times(NUM_LAYERS) == DecodeCost(pytest.approx(1.0), pytest.approx(0.1))


def test_loads_are_measured_as_restores_copy() -> None:
    """From page-locked memory: copies of other memory are several times slower."""
    engine, device = FakeEngine(1e-6), StrictDevice()
    engine.pool.streams = device
    codec = ModelCodecs(SHAPE, NUM_LAYERS, None)
    num_bytes, seconds = engine.calibration()._restore_s(codec, (0, 1), Precision.INT4, 64)
    assert seconds > 0
    uploads = [entry for entry in device.module.log if entry.kind == "upload"]
    # Both blocks of the pair, each time.
    assert len(uploads) == 2 * cost_calibration._REPEATS
    assert sum(len(entry.host) for entry in uploads[:2]) == num_bytes
    assert device.module.pageable_copies == 0
    device.check()
