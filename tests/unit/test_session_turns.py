"""Slots that a streaming session owns are not given back while a turn of it is being stored."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from krul_sglang.engine.cache.radix_cache import KrulLinkerWrapper, KrulRadixCache, _PendingTurn

RECORD, OTHER = SimpleNamespace(name="of the session"), SimpleNamespace(name="of a request")


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    events: list[str] = []
    monkeypatch.setattr(UnifiedRadixCache, "free_kv_row", lambda self, kv, ranges: events.append("free"))
    monkeypatch.setattr(KrulLinkerWrapper, "settle_offloads", lambda self: events.append("settle"))
    return events


@pytest.fixture
def cache() -> Any:
    """A turn in the tree and one of a session, 48 tokens of its record, wait to be stored."""
    cache: Any = KrulRadixCache.__new__(KrulRadixCache)
    cache.linker = KrulLinkerWrapper.__new__(KrulLinkerWrapper)
    cache.linker.pending_offloads = [_PendingTurn(1, None), _PendingTurn(2, None, kv=RECORD, num_tokens=48)]
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
    record: Any, ranges: list[tuple[int, int]], is_waited_for: bool, cache: Any, events: list[str]
) -> None:
    cache.free_kv_row(record, ranges)
    assert events == (["settle", "free"] if is_waited_for else ["free"])
