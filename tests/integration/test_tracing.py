"""Spans of restores and saves in the traces that SGLang sends to a collector."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from krul_sglang.adapter.request_spans import RequestSpans
from tests.support.forked_server import ForkedServer
from tests.support.scenario import POOL_TOKENS, STRICT, ask, push_out, random_prompt, small_krul_server_args
from tests.support.server_plugin import WITH_PLUGIN
from tests.support.store_builders import wait_until


class Collector:
    """Takes spans over OTLP and HTTP."""

    def __init__(self) -> None:
        self.spans: list[Any] = []
        spans = self.spans

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if self.headers.get("Content-Encoding") == "gzip":
                    body = gzip.decompress(body)
                for resource in ExportTraceServiceRequest.FromString(body).resource_spans:
                    spans.extend(span for scope in resource.scope_spans for span in scope.spans)
                self.send_response(200)
                self.send_header("Content-Length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None:
                """Say nothing."""

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1/traces"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()

    def named(self, name: str) -> list[Any]:
        return [span for span in list(self.spans) if span.name == name]

    def trace_of(self, rid: str) -> list[Any]:
        """All spans of the trace of a request."""
        trace_ids = {
            span.trace_id for span in list(self.spans) if attributes_of(span).get("rid", "").startswith(rid)
        }
        return [span for span in list(self.spans) if span.trace_id in trace_ids]


def attributes_of(span: Any) -> dict[str, Any]:
    def value(of: Any) -> Any:
        kind = of.WhichOneof("value")
        return [value(each) for each in of.array_value.values] if kind == "array_value" else getattr(of, kind)

    return {attribute.key: value(attribute.value) for attribute in span.attributes}


@pytest.fixture(scope="module")
def collector() -> Iterator[Collector]:
    collector = Collector()
    yield collector
    collector.close()


@pytest.fixture(scope="module")
def restored(collector: Collector, tiny_models: dict[str, Path]) -> list[Any]:
    """The spans of a request whose prefix came back from the host."""
    # Both parts: what is loaded, and heads.
    args = (
        *small_krul_server_args(POOL_TOKENS, {"planner": "random", "store_full_tail": True}),
        *("--enable-trace", "--otlp-traces-endpoint", collector.url),
    )
    env = {**STRICT, **WITH_PLUGIN, "OTEL_EXPORTER_OTLP_TRACES_PROTOCOL": "http/protobuf"}
    with ForkedServer(tiny_models["float32"], args=args, env=env) as server:
        prompt = random_prompt("traced", 600)
        ask(server, prompt, rid="first")
        push_out(server, num_tokens=POOL_TOKENS, seed="traced")
        assert ask(server, prompt, rid="again").host_tokens > 300
        # Its spans come when the next prefill finds that the restore has ended.
        ask(server, random_prompt("other", 100), rid="other")
        wait_until(lambda: bool(collector.named("krul restore")) and len(collector.named("krul save")) > 2)
        # SGLang sends its spans together, now and then.
        names = {"Req again", "krul restore", "krul save"}
        wait_until(lambda: names <= {span.name.strip() for span in collector.trace_of("again")})
        return collector.trace_of("again")


def inside(outer: Any, inner: Any) -> bool:
    begins_inside = outer.start_time_unix_nano <= inner.start_time_unix_nano
    return bool(begins_inside and inner.end_time_unix_nano <= outer.end_time_unix_nano)


def test_a_restore_and_its_parts_are_spans_of_the_request(restored: list[Any]) -> None:
    named = {span.name: span for span in restored}
    whole = named["krul restore"]
    for part in ("krul lookup", "krul load", "krul heads"):
        assert named[part].parent_span_id == whole.span_id
        assert named[part].start_time_unix_nano <= named[part].end_time_unix_nano
        assert inside(whole, named[part]), part
    assert named["krul lookup"].end_time_unix_nano <= named["krul load"].start_time_unix_nano
    by_id = {span.span_id: span for span in restored}
    thread = by_id[whole.parent_span_id]
    assert thread.name.startswith("krul [TP 0]")
    assert by_id[thread.parent_span_id].name.strip() == "Req again"
    assert not by_id[thread.parent_span_id].parent_span_id
    attributes = attributes_of(whole)
    assert attributes["krul.restored_tokens"] > 300
    assert attributes["krul.first_layer_head_tokens"] > 0
    assert attributes["krul.tiers"] == ["dram"]
    assert attributes["krul.load_failed"] is False


def test_it_lies_in_the_time_of_its_request(restored: list[Any]) -> None:
    named = {span.name.strip(): span for span in restored}
    assert inside(named["Req again"], named["krul load"])


def test_a_save_is_a_span_of_the_request_whose_turn_it_stores(
    collector: Collector, restored: list[Any]
) -> None:
    first = {span.name: span for span in collector.trace_of("first")}
    assert "krul restore" not in first
    assert attributes_of(first["krul save"]) == {"krul.tokens": 608, "krul.is_stored": True}


def test_a_server_that_traces_nothing_has_no_spans() -> None:
    assert RequestSpans.if_traced(0) is None
