"""Slots of turns that are being stored: they can be taken at any time, and what is worth it is waited for."""

from __future__ import annotations

import threading
from array import array
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from sglang.srt.mem_cache.base_prefix_cache import EvictParams, InsertParams
from sglang.srt.mem_cache.radix_cache import RadixKey
from sglang.srt.mem_cache.unified_cache.components import ComponentType
from sglang.srt.mem_cache.unified_cache.unified_cache_linker import UnifiedCacheLinkerWrapper
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from krul_sglang.adapter import linker_wrapper
from krul_sglang.adapter.linker_wrapper import WEIGHTS_WAIT_S, WORTH_WAITING_SHARE, KrulLinkerWrapper
from krul_sglang.adapter.radix_cache import KrulRadixCache
from krul_sglang.engine.common.asking import DaemonPatience
from krul_sglang.engine.common.step_times import StepTimes
from krul_sglang.engine.save.turn import Turn
from tests.support.segment_builders import MODEL

PAGE = 16
RECORD, OTHER = SimpleNamespace(name="of the session"), SimpleNamespace(name="of a request")


class FakeOffloader:
    """Remembers what is submitted, and for which turns the scheduler waits how long."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.waits: list[tuple[list[str], float]] = []
        self.was_prompt = True
        self.writer = SimpleNamespace(recompute_s=lambda start, end: (end - start) / 100)

    def submit(self, turn: Turn) -> Any:
        job = SimpleNamespace(turn=turn, name=turn.page_keys[0][0], has_read=threading.Event())
        self.jobs.append(job)
        return job

    def finish(
        self, jobs: list[Any], timeout_s: float, *, is_store_prompt: bool, make_room: Callable[[], None]
    ) -> None:
        make_room()
        self.waits.append(([job.name for job in jobs], timeout_s))
        self.was_prompt = is_store_prompt

    def pop_completed(self) -> bool:
        job = self.jobs.pop(0)
        return job.name != "b"


class BusyTree:
    """Paths of pages, one per letter; ``here``: how many pages of each are still in the tree. An eviction
    takes what ``victims`` say."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(linker_wrapper, "owner_of", lambda req, hints: None)
        self.here: dict[str, int] = {}
        self.events: list[str] = []
        self.victims: dict[str, int] = {}
        self.evictable = 10
        self.offloader = FakeOffloader()
        self.given_back: list[str] = []
        self.cache: Any = KrulRadixCache.__new__(KrulRadixCache)
        self.linker: Any = KrulLinkerWrapper.__new__(KrulLinkerWrapper)
        self.cache.linker, self.linker.cache = self.linker, self.cache
        self.stored: list[int] = []
        self.cache.look_ahead = SimpleNamespace(note_stored=lambda ids: self.stored.append(len(ids)))
        self.cache.root_node_handle = lambda extra_key: None
        self.cache._all_reduce_attn_groups = lambda *args: None
        self.cache.tree_core = SimpleNamespace(
            get_prefix_hash_values=lambda name: [],
            get_hash_values=lambda name: [f"{name}-{page}" for page in range(self.here[name])],
            match_full_device_prefix=self.match,
            is_eagle=False,
        )
        self.cache.page_size = PAGE
        self.cache.path_device_indices = lambda name: torch.arange(PAGE * self.here[name])
        self.linker.pending_offloads = []
        self.linker.cache_linker = SimpleNamespace(
            offloader=self.offloader,
            returning=SimpleNamespace(give_copies_back=lambda: self.given_back.append("all")),
            asking=SimpleNamespace(patience=DaemonPatience()),
            steps=StepTimes(),
            model=SimpleNamespace(is_settled=True),
            provenance=None,
            request_hints=None,
            states=None,
            ended_turn=lambda path, owner, state_slots: Turn(**vars(path), model=MODEL, ready=[]),
            wants_probe=lambda: False,
        )
        monkeypatch.setattr(UnifiedRadixCache, "dec_lock_ref", lambda cache, node, params: self.unlock(node))
        monkeypatch.setattr(UnifiedRadixCache, "evict", lambda cache, params: self.evict(params))
        monkeypatch.setattr(
            UnifiedRadixCache, "free_kv_row", lambda cache, kv, ranges: self.events.append("free")
        )

    def evict(self, params: EvictParams) -> Any:
        self.here.update(self.victims)
        num_tokens = min(self.evictable, params.num_tokens)
        self.evictable -= num_tokens
        self.events.append(f"evict {num_tokens}")
        return SimpleNamespace(num_tokens_evicted=num_tokens)

    def unlock(self, node: str) -> None:
        self.events.append(f"unlock {node}")
        self.evictable += 32

    def match(self, key: Any) -> tuple[int, int, int]:
        """Token ids say which path it is."""
        return self.here[chr(key.token_ids[0])] * PAGE, 0, 0

    def end_turn(self, name: str, num_pages: int) -> None:
        self.here[name] = num_pages
        ids = [ord(name)] * (num_pages * PAGE + 5)
        self.linker.offload_turn(
            SimpleNamespace(last_node=name, extra_key=None, cache_salt=None, full_untruncated_fill_ids=ids)
        )

    def end_session_turn(self, name: str, num_pages: int, num_in_tree: int, record: Any) -> None:
        """The turn of a session, of which ``num_in_tree`` pages lie in the tree."""
        self.here[name] = num_in_tree
        token_ids = np.full(num_pages * PAGE, ord(name), dtype=np.int64)
        turn = Turn([f"{name}-0"], token_ids, torch.arange(len(token_ids)), [], model=MODEL)
        self.linker._submit(
            turn, SimpleNamespace(extra_key=None, cache_salt=None), num_in_tree * PAGE, record
        )

    @property
    def pending(self) -> list[str]:
        return [pending.job.name for pending in self.linker.pending_offloads]


@pytest.fixture
def busy(monkeypatch: pytest.MonkeyPatch) -> BusyTree:
    return BusyTree(monkeypatch)


def worth_s(num_pages: int) -> float:
    """Computing a token takes 10 ms."""
    return WORTH_WAITING_SHARE * num_pages * PAGE / 100


def test_turns_are_submitted_as_they_end_and_lock_nothing(busy: BusyTree) -> None:
    for name in "abc":
        busy.end_turn(name, 40)
    assert [len(job.turn.page_keys) for job in busy.offloader.jobs] == [40] * 3
    assert busy.pending == ["a", "b", "c"]
    busy.linker.commit_completed_offloads([True, False])
    assert busy.pending == ["c"]
    assert busy.stored == [40 * PAGE]


def test_the_token_after_a_turn_names_its_last_page_in_a_tree_of_pairs(busy: BusyTree) -> None:
    busy.cache.tree_core.is_eagle = True
    busy.end_turn("a", 40)
    (pending,) = busy.linker.pending_offloads
    key, _ = pending.key.maybe_to_bigram_view(True)
    assert len(key.page_aligned(PAGE)) == pending.num_in_tree == pending.num_tokens == 40 * PAGE


def test_an_eviction_waits_for_what_has_lost_slots_as_long_as_computing_that_is_worth(busy: BusyTree) -> None:
    for name in "abcd":
        busy.end_turn(name, 4)
    busy.offloader.jobs[0].has_read.set()
    busy.victims = {"a": 0, "b": 1, "d": 3}
    busy.cache.evict(EvictParams(num_tokens=5))
    # What it has evicted lies where it lay: waiting comes after.
    assert busy.events == ["evict 5"]
    assert busy.offloader.waits == [(["b", "d"], pytest.approx(worth_s(3 + 1)))]
    assert busy.given_back == ["all"]


def test_an_eviction_that_takes_other_slots_waits_for_nothing(busy: BusyTree) -> None:
    busy.end_turn("a", 4)
    busy.cache.evict(EvictParams(num_tokens=5))
    assert busy.offloader.waits == []


def test_the_turns_that_are_waited_for_know_of_a_slow_daemon(busy: BusyTree) -> None:
    busy.end_turn("a", 4)
    busy.victims = {"a": 0}
    busy.linker.cache_linker.asking.patience.is_prompt = False
    busy.cache.evict(EvictParams(num_tokens=5))
    assert busy.offloader.waits == [(["a"], pytest.approx(worth_s(4)))]
    assert not busy.offloader.was_prompt


def test_a_path_kept_for_a_probe_is_evicted_if_memory_is_needed(busy: BusyTree) -> None:
    busy.linker._probe_candidate = SimpleNamespace(node="of the probe", lock_params=None)
    assert busy.cache.evict(EvictParams(num_tokens=10)).num_tokens_evicted == 10
    assert busy.events == ["evict 10"]
    busy.evictable = 10
    assert busy.cache.evict(EvictParams(num_tokens=42)).num_tokens_evicted == 42
    assert busy.events[1:] == ["evict 10", "unlock of the probe", "evict 32"]
    assert busy.cache.evict(EvictParams(num_tokens=1)).num_tokens_evicted == 0


@pytest.mark.parametrize(
    ("record", "ranges", "is_waited_for"),
    [
        (RECORD, [(16, 60)], True),
        (RECORD, [(50, 60), (47, 48)], True),
        (RECORD, [(48, 60)], False),
        (RECORD, [(16, 16)], False),
        (OTHER, [(0, 60)], False),
        (None, [(0, 60)], False),
    ],
)
def test_freeing_slots_of_a_session_waits_for_the_turn_that_reads_them(
    record: Any, ranges: list[tuple[int, int]], is_waited_for: bool, busy: BusyTree
) -> None:
    busy.end_turn("a", 1)
    busy.end_session_turn("s", 3, 1, RECORD)
    busy.cache.free_kv_row(record, ranges)
    assert busy.offloader.waits == ([(["s"], pytest.approx(worth_s(2)))] if is_waited_for else [])
    assert busy.events == ["free"]


def test_a_session_turn_is_finished_when_its_part_of_the_tree_is_evicted(busy: BusyTree) -> None:
    busy.end_session_turn("s", 3, 2, RECORD)
    busy.cache.evict(EvictParams(num_tokens=5))
    assert busy.offloader.waits == []
    busy.victims = {"s": 1}
    busy.cache.evict(EvictParams(num_tokens=5))
    assert busy.offloader.waits == [(["s"], pytest.approx(worth_s(1)))]


@pytest.mark.parametrize(
    ("tenant", "first", "adopted", "is_waited_for"),
    [
        (None, "a", (16, 48), True),
        # What the turn does not have.
        (None, "a", (64, 96), False),
        (None, "b", (16, 48), False),
        ("other", "a", (16, 48), False),
    ],
)
def test_a_turn_whose_slots_are_given_up_for_those_of_another_request_is_finished(
    tenant: str | None,
    first: str,
    adopted: tuple[int, int],
    is_waited_for: bool,
    busy: BusyTree,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """SGLang takes the KV of a request that computed what had left its pool of windows, in both pools."""
    inserted: list[InsertParams] = []

    def insert(cache: Any, params: InsertParams) -> Any:
        inserted.append(params)
        return SimpleNamespace(adopted_ranges={ComponentType.FULL: [adopted], ComponentType.SWA: [(0, 96)]})

    monkeypatch.setattr(UnifiedRadixCache, "insert", insert)
    monkeypatch.setattr(UnifiedRadixCache, "supports_swa", lambda cache: True)
    busy.end_turn("a", 4)
    key = RadixKey(array("q", [ord(first)] * 96), tenant)
    busy.cache.insert(InsertParams(key=key))
    assert inserted[0].track_adopted_ranges
    assert busy.offloader.waits == ([(["a"], pytest.approx(worth_s(3)))] if is_waited_for else [])


def test_a_flush_forgets_what_is_being_stored(busy: BusyTree) -> None:
    busy.linker.cache_linker.reset = lambda: None
    UnifiedCacheLinkerWrapper.__init__(
        busy.linker,
        SimpleNamespace(tree_components=(), components={}, _components_tuple=(), tree_core=SimpleNamespace()),
        busy.linker.cache_linker,
    )
    busy.linker.cache = busy.cache
    busy.end_turn("a", 4)
    busy.linker.reset()
    assert busy.pending == []


def test_other_weights_wait_until_all_turns_are_read(busy: BusyTree) -> None:
    changed: list[int] = []
    busy.linker.cache_linker.begin_weights_change = lambda: changed.append(len(busy.offloader.waits))
    for name in "abc":
        busy.end_turn(name, 4)
    busy.linker.begin_weights_change()
    assert (busy.pending, changed, busy.offloader.waits) == ([], [1], [(["a", "b", "c"], WEIGHTS_WAIT_S)])
