"""Spans of restores and saves, on a trace context that only notes what it is told."""

from __future__ import annotations

from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any

import pytest

from krul_sglang.adapter import request_spans
from krul_sglang.adapter.request_spans import RequestSpans

RESTORE = {
    "requests": [
        {
            "rid": "a",
            "device_tokens": 16,
            "restored_tokens": 100,
            "head_ends": [48, 16],
            "tiers": ["dram", "ssd"],
            "planned_s": 0.5,
        }
    ],
    "was_rescued": False,
    "end_s": 0.4,
    "streams": {
        "load": [[0, 0.1, 0.2], [1, 0.2, 0.3]],
        "head": [],
        "wait": [[0, 0.0, 0.125], [1, 0.25, 0.375]],
        "own": [],
    },
}
BEGIN_NS = 4_000_000_000


class Context:
    """As SGLang's trace context of a request."""

    def __init__(self, *, is_on: bool = True) -> None:
        self.tracing_enable = is_on
        self.calls: list[tuple[Any, ...]] = []

    def copy_for_thread(self) -> Context:
        return self

    def rebuild_thread_context(self, begin_ns: int) -> None:
        self.calls.append(("thread", begin_ns))

    def trace_slice_start(self, name: str, level: int, begin_ns: int) -> None:
        self.calls.append(("begin", name))

    def trace_slice(self, part: Any) -> None:
        self.calls.append((part.slice_name, part.start_time_ns, part.end_time_ns))

    def trace_slice_end(self, name: str, level: int, end_ns: int, attributes: dict[str, Any]) -> None:
        self.calls.append(("end", name, end_ns, attributes))

    def abort(self, end_ns: int) -> None:
        self.calls.append(("thread ends", end_ns))


def request(rid: str, context: Any) -> Any:
    return SimpleNamespace(rid=rid, time_stats=SimpleNamespace(trace_ctx=context))


@pytest.fixture
def spans(monkeypatch: pytest.MonkeyPatch) -> RequestSpans:
    times = iter(range(1_000_000_000, 10_000_000_000, 1_000_000_000))
    monkeypatch.setattr(request_spans, "time", SimpleNamespace(time_ns=lambda: next(times)))
    return RequestSpans(0)


def settle(spans: RequestSpans) -> None:
    spans._thread.shutdown(wait=True)


def test_parts_have_their_times_and_what_was_not_done_is_no_part(spans: RequestSpans) -> None:
    context = Context()
    req = request("a", context)
    spans.look_up(req)
    spans.look_up(req)
    spans.plan(req)
    spans.restored(BEGIN_NS, RESTORE)
    settle(spans)
    lookup, load = context.calls[2:4]
    assert lookup == ("krul lookup", 1_000_000_000, 2_000_000_000)
    assert load == ("krul load", 4_100_000_000, 4_300_000_000)
    _, name, end_ns, attributes = context.calls[4]
    assert (name, end_ns) == ("krul restore", 4_400_000_000)
    assert attributes == {
        "krul.device_tokens": 16,
        "krul.restored_tokens": 100,
        "krul.first_layer_head_tokens": 32,
        "krul.tiers": ["dram", "ssd"],
        "krul.planned_ms": 500.0,
        "krul.forward_waited_ms": 250.0,
        "krul.requests": 1,
        "krul.load_failed": False,
    }
    assert context.calls[0] == ("thread", 1_000_000_000)
    assert context.calls[-1] == ("thread ends", 4_400_000_000)


def test_a_request_that_is_not_traced_or_not_planned_adds_nothing(spans: RequestSpans) -> None:
    untraced, unplanned = Context(is_on=False), Context()
    spans.look_up(request("a", untraced))
    spans.plan(request("a", untraced))
    spans.restored(BEGIN_NS, RESTORE)
    spans.look_up(request("a", unplanned))
    spans.restored(BEGIN_NS, RESTORE)
    spans.restored(BEGIN_NS, RESTORE)
    settle(spans)
    assert untraced.calls == unplanned.calls == []


def test_requests_that_never_begin_are_forgotten(
    spans: RequestSpans, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_spans, "MAX_WATCHED", 2)
    contexts = {rid: Context() for rid in "abc"}
    for rid, context in contexts.items():
        spans.look_up(request(rid, context))
    spans.plan(request("a", contexts["a"]))
    spans.restored(BEGIN_NS, RESTORE)
    settle(spans)
    assert contexts["a"].calls == []


def test_an_error_is_logged_once_and_serving_goes_on(
    spans: RequestSpans, caplog: pytest.LogCaptureFixture
) -> None:
    broken = SimpleNamespace(tracing_enable=True)
    req = request("a", SimpleNamespace(copy_for_thread=lambda: broken))
    done: Future[bool] = Future()
    done.set_result(True)
    for _ in range(3):
        spans.saving(req, 64)(done)
    settle(spans)
    assert [record.getMessage() for record in caplog.records] == [
        "krul: spans cannot be added to traces; this is not logged again"
    ]
