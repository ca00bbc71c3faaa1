"""Memory that turns hold while they wait to be stored: it is given back when it is needed, and not before."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.base_prefix_cache import EvictParams
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from krul_sglang.engine.cache.radix_cache import KrulLinkerWrapper, KrulRadixCache, _PendingTurn

RECORD, OTHER = SimpleNamespace(name="of the session"), SimpleNamespace(name="of a request")


class FakeTree:
    """Only unlocked tokens can be evicted: at first 10, and 32 more with each path that is unlocked."""

    def __init__(self) -> None:
        self.events: list[str] = []
        self.evictable = 10

    def evict(self, params: EvictParams) -> Any:
        num_tokens = min(self.evictable, params.num_tokens)
        self.evictable -= num_tokens
        self.events.append(f"evict {num_tokens}")
        return SimpleNamespace(num_tokens_evicted=num_tokens)

    def unlock(self, node: Any, lock_params: Any) -> None:
        self.events.append(f"unlock {node}")
        self.evictable += 32


@pytest.fixture
def tree(monkeypatch: pytest.MonkeyPatch) -> FakeTree:
    tree = FakeTree()
    monkeypatch.setattr(UnifiedRadixCache, "free_kv_row", lambda self, kv, ranges: tree.events.append("free"))
    monkeypatch.setattr(UnifiedRadixCache, "evict", lambda self, params: tree.evict(params))
    monkeypatch.setattr(
        UnifiedRadixCache, "dec_lock_ref", lambda self, node, lock_params: tree.unlock(node, lock_params)
    )
    return tree


@pytest.fixture
def cache(tree: FakeTree) -> Any:
    """A turn in the tree, one of a session, 48 tokens of its record, and another wait to be stored."""
    cache: Any = KrulRadixCache.__new__(KrulRadixCache)
    cache.tree_core = SimpleNamespace(finish_external_linker_offload=lambda *args: None)
    cache.linker = linker = KrulLinkerWrapper.__new__(KrulLinkerWrapper)
    linker.cache = cache
    linker.cache_linker = SimpleNamespace(
        pop_completed_offload=lambda: bool(tree.events.append("stored") or True)
    )
    linker.pending_offloads = [
        _PendingTurn("a", None),
        _PendingTurn("b", None, kv=RECORD, num_tokens=48),
        _PendingTurn("c", None),
    ]
    return cache


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
def test_slots_wait_for_the_turn_that_reads_them(
    record: Any, ranges: list[tuple[int, int]], is_waited_for: bool, cache: Any, tree: FakeTree
) -> None:
    """Of the turns behind it none is waited for."""
    cache.free_kv_row(record, ranges)
    waited = ["stored", "unlock a", "stored", "unlock b"] if is_waited_for else []
    assert tree.events == [*waited, "free"]


@pytest.mark.parametrize(
    ("num_tokens", "events"),
    [
        (10, ["evict 10"]),
        (40, ["evict 10", "stored", "unlock a", "evict 30"]),
        (60, ["evict 10", "stored", "unlock a", "evict 32", "stored", "unlock b", "evict 18"]),
    ],
)
def test_eviction_waits_for_as_many_turns_as_it_needs(
    num_tokens: int, events: list[str], cache: Any, tree: FakeTree
) -> None:
    assert cache.evict(EvictParams(num_tokens=num_tokens)).num_tokens_evicted == num_tokens
    assert tree.events == events


def test_a_path_kept_for_a_probe_goes_before_any_turn_is_waited_for(cache: Any, tree: FakeTree) -> None:
    cache.linker._probe_candidate = SimpleNamespace(node="of the probe", lock_params=None)
    assert cache.evict(EvictParams(num_tokens=42)).num_tokens_evicted == 42
    assert tree.events == ["evict 10", "unlock of the probe", "evict 32"]


def test_what_no_path_holds_is_not_evicted(cache: Any, tree: FakeTree) -> None:
    """Eviction ends with less than was asked for when all turns are stored."""
    assert cache.evict(EvictParams(num_tokens=1000)).num_tokens_evicted == 10 + 3 * 32
    assert cache.linker.pending_offloads == []
