"""Whatever becomes of a request, its place in the capture is free again when it has ended."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.mem_cache.unified_radix_cache import UnifiedRadixCache

from krul_sglang.adapter.radix_cache import KrulRadixCache
from krul_sglang.engine.capture.query_capture import CapturePlan, QueryCapture
from krul_sglang.engine.capture.turn_capture import QueryShape
from tests.support.forward_builders import extend_batch

SHAPE = QueryShape(1, 1, 1, 4, torch.float32, 0.5)


@pytest.fixture
def capture() -> QueryCapture:
    """It has room for one request, and records "a" in row 5."""
    capture = QueryCapture(SHAPE, CapturePlan(1, 4, 0), device=torch.device("cpu"))
    record(capture, "a", 5)
    return capture


@pytest.fixture
def cache(capture: QueryCapture, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(UnifiedRadixCache, "on_release", lambda self, req, checkpointed: None)
    monkeypatch.setattr(UnifiedRadixCache, "claim_kv_row", claim)
    cache: Any = KrulRadixCache.__new__(KrulRadixCache)
    cache.capture = capture
    cache.is_mamba_enabled = False
    cache.linker = SimpleNamespace(cache_linker=SimpleNamespace(release=lambda rid: None))
    return cache


def claim(cache: Any, req: Any) -> bool:
    """As SGLang does: a streaming session takes the row, and the request has none any more."""
    if req.session is None:
        return False
    req.kv = SimpleNamespace(req_pool_idx=None)
    return True


def record(capture: QueryCapture, rid: str, slot: int) -> None:
    with capture.recording(extend_batch((rid, slot, 0, 8))):
        capture.record(0, torch.zeros(8, 4))


def request(session: str | None = None) -> Any:
    kv = SimpleNamespace(req_pool_idx=5)
    return SimpleNamespace(rid="a", kv=kv, session=session, finished=lambda: False)


def has_room(capture: QueryCapture) -> bool:
    record(capture, "b", 6)
    return capture.take("b", 6) is not None


def test_a_running_request_keeps_its_place(capture: QueryCapture) -> None:
    assert not has_room(capture)


@pytest.mark.parametrize("session", [None, "s"])
def test_a_request_whose_turn_is_not_stored_gives_its_place_back(
    session: str | None, cache: Any, capture: QueryCapture
) -> None:
    """It was aborted, or there was nothing to store of it."""
    req = request(session)
    if not cache.claim_kv_row(req):
        cache.on_release(req, checkpointed=False)
    assert has_room(capture)


def test_a_turn_that_is_being_stored_keeps_its_place(cache: Any, capture: QueryCapture) -> None:
    turn = capture.take("a", 5)
    assert turn is not None
    cache.on_release(request(), checkpointed=True)
    assert not has_room(capture)
    turn.release()
    assert has_room(capture)


def test_a_cache_whose_server_records_nothing_releases_as_before(cache: Any) -> None:
    cache.capture = None
    cache.on_release(request(), checkpointed=True)
    assert cache.claim_kv_row(request("s"))
