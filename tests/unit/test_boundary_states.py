"""States of recurrent layers: stored at the ends of turns, found, loaded to the bit, or computed instead."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from krul_backend.tiers.common.hint import Hint
from krul_sglang.adapter.attach import attach_turn_capture
from krul_sglang.adapter.kv_pool import open_draft, open_pool
from krul_sglang.adapter.state_pool import open_states
from krul_sglang.adapter.unsupported import UnsupportedSetupError
from krul_sglang.config import KrulConfig
from krul_sglang.engine.common import boundary_states
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.boundary_states import BoundaryStates, StateSlot
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.common.transfer_gate import TransferGate
from krul_sglang.engine.restore.held_lease import HeldLease, KeyRun
from krul_sglang.engine.restore.layer_waits import LayerWaits
from krul_sglang.engine.restore.lease_questions import LeaseFinder, find_boundaries
from krul_sglang.engine.restore.load_batch import LoadBatch, LoadFailedError
from krul_sglang.engine.restore.loading import LayerWiseLoader
from krul_sglang.engine.restore.state_loads import NoStateError, StateLoads
from krul_sglang.engine.save.state_saving import StateSaver
from krul_sglang.engine.save.turn import Turn
from tests.support.engine_builders import PATIENCE_S
from tests.support.loading_builders import NUM_LAYERS, NUM_PAGES, NUM_TOKENS, PAGE_SIZE, Rig
from tests.support.present import present

OLD, NEW, OTHER = torch.tensor([1]), torch.tensor([4]), torch.tensor([5])
"""Slots of states: at the end of a turn, where it comes back, and of another prefix."""
SETTINGS: dict[str, Any] = {
    "speculative_algorithm": None,
    "speculative_eagle_topk": None,
    "enable_streaming_session": False,
}
ALONE = RankAgreement(None, 1)


def make_runner(conv: Sequence[tuple[int, ...]] = ((8, 2),), temporal: tuple[int, ...] = (2, 3, 4)) -> Any:
    """SGLang's pool of states with random contents, two layers, in as much of a model runner as is read."""
    from sglang.srt.mem_cache.memory_pool import HybridReqToTokenPool, MambaPool

    generator = torch.Generator().manual_seed(3)

    def random(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(2, 8, *shape, generator=generator).to(dtype)

    states = MambaPool.__new__(MambaPool)
    states.size = 7
    states.mamba_cache = MambaPool.State(
        conv=[random(shape, torch.bfloat16) for shape in conv], temporal=random(temporal, torch.float32)
    )
    requests = HybridReqToTokenPool.__new__(HybridReqToTokenPool)
    requests.mamba_pool = states
    return SimpleNamespace(req_to_token_pool=requests, is_hybrid_swa=False)


class Hybrid:
    """A rig whose model has recurrent layers, too."""

    def __init__(self, **shapes: Any) -> None:
        self.rig = Rig(PATIENCE_S)
        self.runner = make_runner(**shapes)
        self.cache = self.runner.req_to_token_pool.mamba_pool.mamba_cache
        states = present(open_states(self.runner, ServedModel(self.rig.model), SETTINGS, ALONE))
        self.states: BoundaryStates = states
        self.saver = StateSaver(self.rig.store, states, self.rig.pool)
        self.loader = LayerWiseLoader(
            self.rig.store,
            self.rig.pool,
            TransferGate(),
            PATIENCE_S,
            states=StateLoads(self.rig.store, states),
        )

    def close(self) -> None:
        self.loader.close()
        self.rig.close()

    def turn(
        self,
        num_pages: int = NUM_PAGES,
        keys: Sequence[str] | None = None,
        pages_of_prompt: int | None = None,
        **fields: Any,
    ) -> Turn:
        rig = self.rig
        ends = {num_pages, num_pages if pages_of_prompt is None else pages_of_prompt}
        return Turn(
            rig.page_keys[:num_pages] if keys is None else keys,
            rig.token_ids[: num_pages * PAGE_SIZE],
            torch.arange(num_pages * PAGE_SIZE),
            model=rig.model,
            ready=[],
            states={pages * PAGE_SIZE: self.states.copy(OLD) for pages in ends},
            **fields,
        )

    def save(self, turn: Turn, *, is_wanted: bool = True) -> None:
        stream = self.states.pool.streams.new_stream()
        self.saver.save(turn, stream, lambda: None, lambda: is_wanted, lambda: nullcontext(True))
        self.saver.release(turn)

    def boundaries(self, keys: Sequence[str] | None = None) -> list[int]:
        keys = self.rig.page_keys if keys is None else keys
        return find_boundaries(self.rig.store, self.states.identity, keys)

    def start(self) -> tuple[int, LoadBatch]:
        rig = self.rig
        load = rig.load(torch.arange(30, 30 + NUM_TOKENS))
        held = HeldLease(KeyRun.of(rig.page_keys), rig.page_keys, lambda: rig.token_ids, load.lease, 0.0)
        load = dataclasses.replace(load, held=held, state=StateSlot(NEW))
        index = self.loader.start({"r": load})
        batch = present(self.loader.batch(index))
        return index, batch

    def has_equal(self, one: torch.Tensor, other: torch.Tensor) -> bool:
        """Whether two slots hold the same bits."""
        parts = [part for part in (*self.cache.conv, self.cache.temporal) if part.numel()]
        return all(
            torch.equal(part[:, one].view(torch.uint8), part[:, other].view(torch.uint8)) for part in parts
        )

    def spoil(self) -> None:
        """Change a byte of the stored state at the end of the conversation."""
        rig = self.rig
        lease = present(rig.store.lease(self.states.identity, rig.page_keys[-1:], rig.token_ids[-1:]))
        block = lease.slices[0].blocks[1]
        block.flags.writeable = True
        block[0] ^= 1
        rig.store.release(lease)


@pytest.fixture(params=[{}, {"temporal": (2, 3, 0)}], ids=["recurrent", "convolutions alone"])
def hybrid(request: pytest.FixtureRequest) -> Iterator[Hybrid]:
    hybrid = Hybrid(**request.param)
    yield hybrid
    hybrid.close()


def test_a_state_comes_back_to_the_bit_before_the_last_layer(hybrid: Hybrid) -> None:
    turn = hybrid.turn()
    # SGLang gives the slot away before the copy is stored.
    before = [part[:, OLD].clone() for part in (*hybrid.cache.conv, hybrid.cache.temporal)]
    for part in (*hybrid.cache.conv, hybrid.cache.temporal):
        part[:, OLD] = 0
    hybrid.save(turn)
    assert not hybrid.has_equal(OLD, NEW)
    index, batch = hybrid.start()
    batch.wait_layer(NUM_LAYERS - 1)
    after = [part[:, NEW] for part in (*hybrid.cache.conv, hybrid.cache.temporal)]
    assert all(torch.equal(one, other) for one, other in zip(before, after, strict=True))
    assert hybrid.loader.finish(index)
    assert hybrid.rig.num_leases() == 0
    counters = hybrid.states.counters
    assert (counters.stored, counters.num_bytes, counters.restored) == (1, hybrid.states.num_bytes, 1)


@pytest.mark.parametrize("is_spoiled", [True, False])
def test_a_load_without_its_state_fails(hybrid: Hybrid, is_spoiled: bool) -> None:
    if is_spoiled:
        hybrid.save(hybrid.turn())
        hybrid.spoil()
    index, batch = hybrid.start()
    with pytest.raises(LoadFailedError, match="loading failed"):
        batch.wait_layer(NUM_LAYERS - 1)
    assert not hybrid.loader.finish(index)
    # What the state belongs to cannot be used without it.
    assert batch.salvaged == {}
    assert (hybrid.boundaries(), hybrid.rig.num_leases()) == ([], 0)
    assert (hybrid.states.counters.failed_loads, hybrid.states.counters.restored) == (1, 0)


def test_a_prefix_is_found_up_to_the_last_boundary(hybrid: Hybrid) -> None:
    rig = hybrid.rig
    finder = LeaseFinder(rig.store, rig.model, 0, states=hybrid.states)
    assert finder.find(rig.page_keys, rig.token_ids, None) is None
    hybrid.save(hybrid.turn(1))
    held = present(finder.find(rig.page_keys, rig.token_ids, None))
    assert (held.num_pages(PAGE_SIZE), held.boundaries) == (1, [1])
    assert held.run == KeyRun.of(rig.page_keys)
    rig.store.release(held.lease)
    hybrid.save(hybrid.turn())
    held = present(finder.find(rig.page_keys, rig.token_ids, None))
    assert (held.num_pages(PAGE_SIZE), held.boundaries) == (2, [1, 2])
    rig.store.release(held.lease)


def test_a_boundary_without_its_kv_is_not_found(hybrid: Hybrid) -> None:
    rig, keys = hybrid.rig, ["elsewhere-0", "elsewhere-1"]
    hybrid.save(hybrid.turn(keys=keys))
    assert hybrid.boundaries(keys) == [2]
    finder = LeaseFinder(rig.store, rig.model, 0, states=hybrid.states)
    assert finder.find(keys, rig.token_ids, None) is None
    # The pages are there, but not as far as the boundary.
    mixed = [rig.page_keys[0], keys[1]]
    assert hybrid.boundaries(mixed) == [2]
    assert finder.find(mixed, rig.token_ids, None) is None
    assert rig.num_leases() == 0


def test_what_is_dropped_or_revoked_is_not_stored(hybrid: Hybrid) -> None:
    hybrid.save(hybrid.turn(hint=Hint(drop=True)))
    hybrid.save(hybrid.turn(), is_wanted=False)
    hybrid.save(dataclasses.replace(hybrid.turn(), states={}))
    assert hybrid.boundaries() == []
    assert hybrid.states.counters.dropped_turns == 2


def test_others_do_not_find_it(hybrid: Hybrid) -> None:
    hybrid.save(hybrid.turn())
    renamed = dataclasses.replace(hybrid.rig.model, config_digest="other weights")
    identity = hybrid.states.identity_for(renamed)
    assert hybrid.rig.store.find_missing(identity, hybrid.rig.page_keys[-1:]) == [range(1)]


@pytest.fixture
def demoted(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The keys of what was demoted."""
    demoted: list[str] = []
    advise = hybrid.rig.store.advise

    def note(hint: Hint, **at: Any) -> int:
        demoted.extend(at["page_keys"] if hint.demote else ())
        return advise(hint, **at)

    monkeypatch.setattr(hybrid.rig.store, "advise", note)
    return demoted


def test_the_end_of_a_prompt_is_a_boundary_that_leaves_before_the_end_of_its_turn(
    hybrid: Hybrid, demoted: list[str]
) -> None:
    hybrid.save(hybrid.turn(pages_of_prompt=1))
    assert hybrid.boundaries() == [1, 2]
    assert hybrid.states.counters.stored == 2
    assert demoted == [hybrid.rig.page_keys[0]]
    # Both copies were given back.
    assert hybrid.states._num_waiting == 0


def test_the_end_of_a_turn_is_stored_though_no_copy_of_its_prompts_was_made(hybrid: Hybrid) -> None:
    hybrid.save(hybrid.turn(pages_of_prompt=1), is_wanted=False)
    assert (hybrid.boundaries(), hybrid.states.counters.dropped_turns) == ([], 1)
    hybrid.save(hybrid.turn())
    assert hybrid.boundaries() == [2]


def test_an_earlier_boundary_leaves_first_unless_it_is_shared(hybrid: Hybrid, demoted: list[str]) -> None:
    hybrid.save(hybrid.turn(1))
    assert demoted == []
    hybrid.save(hybrid.turn())
    hybrid.save(hybrid.turn())
    assert demoted == [hybrid.rig.page_keys[0]] * 2
    demoted.clear()
    hybrid.save(hybrid.turn(keys=[hybrid.rig.page_keys[0], "another turn"]))
    assert demoted == []


def test_few_copies_wait(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(boundary_states, "MAX_WAITING_BYTES", hybrid.states.num_bytes)
    assert hybrid.states.copy(OLD) is not None
    hybrid.save(hybrid.turn())
    assert (hybrid.boundaries(), hybrid.states.counters.dropped_turns) == ([], 1)
    hybrid.states.release()
    assert hybrid.states.copy(OLD) is not None


def test_a_copy_without_memory_is_not_made(hybrid: Hybrid, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(layer: int, slots: torch.Tensor) -> None:
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(hybrid.states.pool, "gather", fail)
        assert hybrid.states.copy(OLD) is None
    monkeypatch.setattr(boundary_states, "MAX_WAITING_BYTES", hybrid.states.num_bytes)
    assert hybrid.states.copy(OLD) is not None


def test_a_slot_is_reset_to_what_was_before(hybrid: Hybrid) -> None:
    hybrid.states.reset(StateSlot(NEW, before=OTHER))
    assert hybrid.has_equal(NEW, OTHER)
    hybrid.states.reset(StateSlot(NEW))
    assert not any(part[:, NEW].any() for part in (*hybrid.cache.conv, hybrid.cache.temporal))
    assert hybrid.cache.conv[0][:, OTHER].any()


@pytest.mark.parametrize(
    ("shapes", "settings", "message"),
    [
        ({"conv": ((8, 2), (4, 2), (4, 2))}, {}, "4 parts"),
        ({}, {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 1}, "NGRAM of 1 branches"),
        (
            {"temporal": (0, 0, 0)},
            {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 2},
            "EAGLE of 2 branches, 1 parts",
        ),
        ({}, {"enable_streaming_session": True}, "enable_streaming_session"),
    ],
)
def test_other_states_and_settings_are_refused(
    shapes: dict[str, Any], settings: dict[str, Any], message: str
) -> None:
    rig = Rig(PATIENCE_S)
    with pytest.raises(UnsupportedSetupError, match=message):
        open_states(make_runner(**shapes), ServedModel(rig.model), SETTINGS | settings, ALONE)
    rig.close()


def test_a_draft_with_windows_is_refused(tmp_path: Path) -> None:
    runner = SimpleNamespace(is_hybrid_swa=True, token_to_kv_pool="a pool")
    target: Any = None
    options: dict[str, Any] = {"cache_dir": tmp_path, "ranks_per_host": 1, "is_lossless": True}
    with pytest.raises(UnsupportedSetupError, match="a draft model with a pool of windows"):
        open_draft([runner], target, SETTINGS, ALONE, ALONE, **options)


def test_ranks_that_have_the_same_kv_have_states_of_their_own(hybrid: Hybrid) -> None:
    """Of latent KV, whose identity is that of a single rank."""
    agreement = SimpleNamespace(rank=1, num_ranks=2)
    states = present(open_states(hybrid.runner, ServedModel(hybrid.rig.model), SETTINGS, agreement))  # type: ignore[arg-type]
    assert (hybrid.rig.model.tp_rank, hybrid.rig.model.tp_size) == (0, 1)
    assert (states.identity.tp_rank, states.identity.tp_size) == (1, 2)


@pytest.mark.parametrize(
    ("temporal", "settings"),
    [
        ((2, 3, 4), {"speculative_algorithm": "NGRAM", "speculative_eagle_topk": 4}),
        ((2, 3, 4), {"speculative_algorithm": "EAGLE", "speculative_eagle_topk": 1}),
        ((0, 0, 0), {"speculative_algorithm": "STANDALONE", "speculative_eagle_topk": 1}),
    ],
)
def test_states_of_drafted_tokens_are_none_of_boundaries(
    temporal: tuple[int, ...], settings: dict[str, Any]
) -> None:
    """The pool has them beside those of requests. What is stored has the size and the name that it has
    without them."""
    from sglang.srt.mem_cache.memory_pool import MambaPool

    rig, runner = Rig(PATIENCE_S), make_runner(temporal=temporal)
    without = present(open_states(runner, ServedModel(rig.model), SETTINGS, ALONE))
    of_requests = runner.req_to_token_pool.mamba_pool
    parts = of_requests.mamba_cache
    of_requests.mamba_cache = MambaPool.SpeculativeState(
        conv=parts.conv,
        temporal=parts.temporal,
        intermediate_ssm=torch.zeros(2, 3, 4, *temporal),
        intermediate_conv_window=[torch.zeros(2, 3, 4, 8, 2)],
    )
    states = present(open_states(runner, ServedModel(rig.model), SETTINGS | settings, ALONE))
    assert (states.num_bytes, states.identity) == (without.num_bytes, without.identity)
    rig.close()


def test_token_ids_are_those_of_the_boundary(hybrid: Hybrid) -> None:
    """A key that another conversation had by chance is not enough."""
    hybrid.save(hybrid.turn())
    wrong = np.array([9999], dtype=np.int32)
    assert hybrid.rig.store.lease(hybrid.states.identity, hybrid.rig.page_keys[-1:], wrong) is None


@pytest.mark.parametrize(
    ("strategy", "kind"), [("krul", "lfm2"), ("subspace", "jamba"), ("subspace", "laguna")]
)
def test_a_strategy_that_looks_at_attention_is_refused(strategy: str, kind: str) -> None:
    """But bases of models of which they are learned."""
    runner = make_runner()
    runner.token_to_kv_pool = None
    runner.model_config = SimpleNamespace(
        is_multimodal=False,
        is_audio_model=False,
        is_image_understandable_model=False,
        is_audio_understandable_model=False,
        hf_config=SimpleNamespace(model_type=kind),
    )
    with pytest.raises(UnsupportedSetupError, match="a Mamba or hybrid model and a strategy"):
        attach_turn_capture(runner, KrulConfig(strategy=strategy))


def test_the_pool_of_the_layers_with_attention_is_opened() -> None:
    """By their places among these layers; SGLang numbers them among all, also those with scales of fp8."""
    from sglang.srt.mem_cache.memory_pool import HybridLinearKVPool

    of_engine = HybridLinearKVPool(
        size=15,
        dtype=torch.float8_e4m3fn,
        page_size=1,
        head_num=2,
        head_dim=16,
        full_attention_layer_ids=[1, 3],
        device="cpu",
        mamba_pool=make_runner().req_to_token_pool.mamba_pool,
    )
    modules = [
        SimpleNamespace(
            layer_id=layer, k_scale=scale, v_scale=scale, k_scale_float=scale, v_scale_float=scale
        )
        for layer, scale in ((1, 0.5), (3, 2.0))
    ]
    pool = open_pool(of_engine, modules, ("fa3",))
    assert (pool.num_layers, tuple(pool.layer_ids)) == (2, (1, 3))
    k = torch.full((1, 2, 16), 4.0)
    for layer, scale in ((0, 0.5), (1, 2.0)):
        pool.write(layer, OLD, k, k)
        assert pool.buffers(layer)[0].data_ptr() == of_engine.full_kv_pool.k_buffer[layer].data_ptr()
        assert torch.equal(pool.elements(layer, OLD, torch.float32).k, k / scale)


def test_a_forward_waits_by_the_engines_numbers_of_layers() -> None:
    waits = LayerWaits(2, (1, 3))
    asked: list[int] = []
    batch: Any = SimpleNamespace(wait_layer=asked.append)
    waits.batches[0] = batch
    waits.set_consumer(0)
    waits.wait_until(1)
    waits.wait_until(3)
    assert asked == [0, 1]


class Windowed:
    """A rig whose model has a pool of windows of so many pages beside that of KV, with random rows."""

    def __init__(self, num_pages: int = 2) -> None:
        from sglang.srt.mem_cache.swa_memory_pool import SWAKVPool

        self.rig = Rig(PATIENCE_S)
        self.engine = SWAKVPool(
            size=60,
            size_swa=30,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            head_num=2,
            head_dim=8,
            swa_attention_layer_ids=[0, 2],
            full_attention_layer_ids=[1, 3],
            device="cpu",
        )
        generator = torch.Generator().manual_seed(3)
        for rows in (*self.engine.swa_kv_pool.k_buffer, *self.engine.swa_kv_pool.v_buffer):
            rows.copy_(torch.randn(rows.shape, generator=generator))
        runner = SimpleNamespace(
            req_to_token_pool=None,
            token_to_kv_pool=self.engine,
            is_hybrid_swa=True,
            # SGLang's is without the token itself.
            sliding_window_size=num_pages * PAGE_SIZE - 1,
        )
        states = present(open_states(runner, ServedModel(self.rig.model), SETTINGS, ALONE))
        self.states: BoundaryStates = states
        self.saver = StateSaver(self.rig.store, states, self.rig.pool)
        self.loads = StateLoads(self.rig.store, states)

    def save(self, slots: torch.Tensor, num_pages: int = NUM_PAGES) -> None:
        """The window after so many pages of the conversation lies in ``slots``."""
        rig, num_tokens = self.rig, num_pages * PAGE_SIZE
        turn = Turn(
            rig.page_keys[:num_pages],
            rig.token_ids[:num_tokens],
            torch.arange(num_tokens),
            model=rig.model,
            ready=[],
            states={num_tokens: self.states.copy(slots)},
        )
        stream = self.states.pool.streams.new_stream()
        self.saver.save(turn, stream, lambda: None, lambda: True, lambda: nullcontext(True))
        self.saver.release(turn)

    def load(self, slots: torch.Tensor, device_pages: int = 0) -> Any:
        """The load of the window of all pages, of which the first are on the device."""
        rig, first = self.rig, device_pages * PAGE_SIZE
        load = rig.load(torch.arange(30, 30 + NUM_TOKENS))
        keys, token_ids = rig.page_keys[device_pages:], rig.token_ids[first:]
        held = HeldLease(KeyRun.of(keys), keys, lambda: token_ids, load.lease, 0.0)
        load = dataclasses.replace(
            load, held=held, state=StateSlot(slots), slots=load.slots[first:], device_tokens=first
        )
        try:
            (of_window,) = self.loads.lease([load], lambda load: load.begin())
        finally:
            rig.store.release(load.lease)
        return of_window

    def close(self) -> None:
        self.rig.close()


@pytest.fixture
def windowed() -> Iterator[Windowed]:
    windowed = Windowed()
    yield windowed
    windowed.close()


WINDOW = torch.arange(PAGE_SIZE, PAGE_SIZE + NUM_TOKENS)


def test_a_window_is_one_segment_under_the_key_of_its_last_page(windowed: Windowed) -> None:
    windowed.save(WINDOW)
    rig, states = windowed.rig, windowed.states
    assert find_boundaries(rig.store, states.identity, rig.page_keys) == [NUM_PAGES]
    assert (states.counters.stored, states.counters.num_bytes) == (1, states.num_bytes)
    of_window = windowed.load(WINDOW + NUM_TOKENS)
    assert [len(of_window.tail_slots(layer)) for layer in range(2)] == [NUM_TOKENS] * 2
    rig.store.release(of_window.lease)


def test_of_a_window_that_is_partly_on_the_device_the_rest_is_loaded(windowed: Windowed) -> None:
    windowed.save(WINDOW)
    to = torch.arange(20, 20 + PAGE_SIZE)
    of_window = windowed.load(to, device_pages=1)
    for layer in range(2):
        assert torch.equal(of_window.tail_slots(layer), to)
    windowed.rig.store.release(of_window.lease)


def test_a_conversation_shorter_than_the_window_has_a_shorter_one() -> None:
    windowed = Windowed(num_pages=5)
    windowed.save(WINDOW)
    of_window = windowed.load(WINDOW + NUM_TOKENS)
    assert len(of_window.tail_slots(0)) == NUM_TOKENS
    windowed.rig.store.release(of_window.lease)
    windowed.close()


def test_a_window_that_has_left_in_part_is_not_stored(windowed: Windowed) -> None:
    windowed.save(torch.cat([torch.zeros(1, dtype=torch.int64), WINDOW[1:]]))
    rig, states = windowed.rig, windowed.states
    assert find_boundaries(rig.store, states.identity, rig.page_keys) == []
    assert (states.counters.stored, states.counters.dropped_turns) == (0, 1)
    with pytest.raises(NoStateError):
        windowed.load(WINDOW)
    assert rig.num_leases() == 0


def test_the_pool_of_layers_without_windows_is_opened() -> None:
    windowed = Windowed()
    pool = open_pool(windowed.engine)
    assert (pool.num_layers, tuple(pool.layer_ids)) == (2, (1, 3))
    assert pool.buffers(1)[0].data_ptr() == windowed.engine.full_kv_pool.k_buffer[1].data_ptr()
    windows = windowed.states.pool
    assert windows.buffers(1)[0].data_ptr() == windowed.engine.swa_kv_pool.k_buffer[1].data_ptr()
    windowed.engine.layers_mapping = {0: (0, True), 1: (1, True)}
    with pytest.raises(UnsupportedSetupError, match="all layers of SWAKVPool have windows"):
        open_pool(windowed.engine)
    windowed.close()
