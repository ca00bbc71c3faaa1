"""``krul-sglang trace`` against a small fake server that has restored."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from krul_sglang.cli import app as cli
from krul_sglang.cli.trace import chrome_trace, format_table
from krul_sglang.traced_restore import TracedRestore

RECORDED: dict[str, Any] = {
    "requests": [
        {
            "rid": "a1",
            "device_tokens": 16,
            "restored_tokens": 64,
            "head_ends": [48, 32, 16],
            "planned_s": 0.0015,
        },
        {
            "rid": "b2",
            "device_tokens": 0,
            "restored_tokens": 32,
            "head_ends": [16, 16, 0],
            "planned_s": 0.0004,
        },
    ],
    "is_mixed": False,
    "was_rescued": False,
    "end_s": 0.002,
    "streams": {
        "load": [[0, 0.0, 0.0005], [1, 0.0005, 0.001], [2, 0.001, 0.0015]],
        "head": [[0, 0.0, 0.0001], [1, 0.0001, 0.0002], [0, 0.0002, 0.0003]],
        "wait": [[0, 0.0003, 0.0005], [1, 0.0006, 0.001], [2, 0.0015, 0.0015]],
        "own": [[0, 0.0005, 0.0006], [1, 0.001, 0.0015], [2, 0.0015, 0.002]],
    },
}
RESCUED: dict[str, Any] = {
    **RECORDED,
    "requests": RECORDED["requests"][:1],
    "is_mixed": True,
    "was_rescued": True,
    "end_s": 0.01,
    "streams": {"load": [], "head": [[0, 0.005, 0.006], [1, 0.006, 0.007]], "wait": [], "own": []},
}
LOAD_ROW, COMPUTE_ROW = 1, 2


@dataclass
class FakeServer:
    """Answers ``/server_info``; each state is one data-parallel rank."""

    states: Any = field(default_factory=lambda: [{"krul": {}, "krul_restores": [RECORDED, RESCUED]}])
    radix_cache_backend: str | None = "krul"
    api_key: str | None = None
    url: str = ""

    def show(self, *restores: Any) -> None:
        self.states = [{"krul": {}, "krul_restores": list(restores)}]


@pytest.fixture
def server() -> Iterator[FakeServer]:
    fake = FakeServer()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            is_allowed = fake.api_key is None or self.headers.get("Authorization") == f"Bearer {fake.api_key}"
            answer = {"internal_states": fake.states, "radix_cache_backend": fake.radix_cache_backend}
            body = json.dumps(answer if self.path == "/server_info" else {}).encode()
            self.send_response(200 if is_allowed else 401)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http_server:
        fake.url = f"http://127.0.0.1:{http_server.server_address[1]}"
        thread = threading.Thread(target=http_server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield fake
        http_server.shutdown()
        thread.join()


def run(*args: object) -> Result:
    return CliRunner().invoke(cli.app, ["trace", *(str(arg) for arg in args)])


def restores(*values: dict[str, Any], rank: int = 0) -> list[TracedRestore]:
    return [TracedRestore.parse(value, index=index, rank=rank) for index, value in enumerate(values)]


def slices(trace: dict[str, Any], **wanted: int) -> list[dict[str, Any]]:
    return [
        event
        for event in trace["traceEvents"]
        if event["ph"] == "X" and all(event[key] == value for key, value in wanted.items())
    ]


def test_sums_over_the_requests_of_a_restore() -> None:
    (restore,) = restores(RECORDED)
    assert restore.prefix_tokens == 96
    assert [restore.head_tokens(layer) for layer in range(3)] == [48, 32, 0]
    assert [restore.tail_tokens(layer) for layer in range(3)] == [48, 64, 96]
    assert restore.planned_s == pytest.approx(0.0015)
    assert restore.load_busy == pytest.approx(0.75)
    assert restore.compute_busy == pytest.approx((0.3 + 1.1) / 2.0)


def test_rows_of_the_trace() -> None:
    trace = chrome_trace(restores(RECORDED))
    loads = slices(trace, tid=LOAD_ROW)
    assert [(event["name"], event["ts"], event["dur"]) for event in loads] == [
        ("load 0", 0.0, 500.0),
        ("load 1", 500.0, 500.0),
        ("load 2", 1000.0, 500.0),
    ]
    assert [event["args"]["tokens_loaded"] for event in loads] == [48, 64, 96]
    assert loads[1]["args"] == {"restore": 0, "rid": "a1, b2", "layer": 1, "tokens_loaded": 64}

    compute = sorted(slices(trace, tid=COMPUTE_ROW), key=lambda event: (event["ts"], event["dur"]))
    assert [(event["name"], event["ts"], event["dur"]) for event in compute] == [
        ("head 0", 0.0, 100.0),
        ("head 1", 100.0, 100.0),
        ("head 0", 200.0, 100.0),
        ("wait", 300.0, 200.0),
        ("own 0", 500.0, 100.0),
        ("wait", 600.0, 400.0),
        ("own 1", 1000.0, 500.0),
        ("wait", 1500.0, 0.0),
        ("own 2", 1500.0, 500.0),
    ]
    heads = [event["args"] for event in compute if event["name"].startswith("head")]
    assert [(args["tokens_recomputed"], args["chunk"]) for args in heads] == [
        (48, "1 of 2"),
        (32, "1 of 1"),
        (48, "2 of 2"),
    ]


def test_processes_and_rows_have_names() -> None:
    trace = chrome_trace([*restores(RECORDED, rank=0), *restores(RECORDED, rank=1)])
    names = {
        (event["name"], event["pid"], event["tid"]): event["args"].get("name")
        for event in trace["traceEvents"]
        if event["ph"] == "M"
    }
    for rank in (0, 1):
        assert names["process_name", rank, 0] == f"rank {rank}"
        assert names["thread_name", rank, LOAD_ROW] == "load stream"
        assert names["thread_name", rank, COMPUTE_ROW] == "compute stream"
    # Ranks have time axes of their own.
    assert slices(trace, pid=1, tid=LOAD_ROW)[0]["ts"] == 0.0


def test_restores_follow_each_other_without_overlap() -> None:
    uneven = json.loads(json.dumps(RECORDED))
    uneven["streams"]["load"] = [[0, 1e-7 / 3, 0.0005 / 3], [1, 0.0005 / 3, 0.0031], [2, 0.0031, 0.0047]]
    trace = chrome_trace(restores(uneven, RESCUED, uneven, RECORDED))
    last_of_each = []
    for index in range(4):
        of_restore = [event for event in slices(trace) if event["args"]["restore"] == index]
        last_of_each.append(max(event["ts"] + event["dur"] for event in of_restore))
        if index:
            assert min(event["ts"] for event in of_restore) > last_of_each[index - 1]
    for row in (LOAD_ROW, COMPUTE_ROW):
        events = sorted(slices(trace, tid=row), key=lambda event: (event["ts"], event["dur"]))
        for before, after in pairwise(events):
            assert round(before["ts"] + before["dur"], 3) <= after["ts"], (before, after)


def test_a_rescue_shows_the_heads_of_the_plan() -> None:
    (restore,) = restores(RESCUED)
    events = slices(chrome_trace([restore]), tid=COMPUTE_ROW)
    assert [event["args"]["tokens_recomputed"] for event in events] == [32, 16]


def test_the_table() -> None:
    header, first, second, quality = format_table(restores(RECORDED, RESCUED)).splitlines()
    assert header.split("  ")[0] == "restore"
    assert first.split() == ["0", "96", "48", "/", "0", "1.5", "2.0", "75%", "70%", "2", "requests"]
    assert second.split()[:9] == ["1", "64", "32", "/", "0", "1.5", "10.0", "0%", "20%"]
    assert second.endswith("beside requests with nothing to restore; the load failed, all was computed")
    # The rescued one had another forward, which was not planned.
    assert quality == "measured is off from planned by 33% in the median, 33% at most"
    assert first.index("2.0") + len("2.0") == header.index("measured ms") + len("measured ms")


def test_the_command_writes_the_trace_and_prints_the_table(server: FakeServer, tmp_path: Path) -> None:
    server.api_key = "secret"
    path = tmp_path / "trace.json"
    result = run("--url", f"{server.url}/", "--output", path, "--api-key", "secret")
    assert result.exit_code == 0, result.output
    assert len(result.stdout.splitlines()) == 4
    trace = json.loads(path.read_text())
    assert len(slices(trace)) == 14
    assert [event["name"] for event in trace["traceEvents"] if event["ph"] == "i"] == [
        "restore 0: 96 tokens",
        "restore 1: 64 tokens",
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["trace.json"]


@pytest.mark.parametrize(
    ("changes", "problem"),
    [
        ({"states": [{}], "radix_cache_backend": None}, "runs without krul"),
        ({"states": [{"krul": {}, "krul_restores": []}]}, "has not restored anything yet"),
        ({"states": [{"krul": {}}]}, "runs another version of krul-sglang"),
        ({"states": [{"krul": {}, "krul_restores": [{"requests": []}]}]}, "another version of krul-sglang"),
        ({"states": [{"krul": {}, "krul_restores": [{**RECORDED, "requests": []}]}]}, "another version"),
        ({"states": None}, "not as an SGLang server does"),
        ({"api_key": "secret"}, "give --api-key"),
    ],
)
def test_nothing_is_written_when_there_is_nothing_to_show(
    server: FakeServer, tmp_path: Path, changes: dict[str, Any], problem: str
) -> None:
    for name, value in changes.items():
        setattr(server, name, value)
    result = run("--url", server.url, "--output", tmp_path / "trace.json")
    assert result.exit_code == 2
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        (["--url", "127.0.0.1:30000"], "is not an address"),
        (["--url", "http://127.0.0.1:1"], "cannot be reached"),
        (["--url", "http://127.0.0.1:1", "--output", "/no/such/dir/file"], "--output /no/such/dir/file"),
        (["--url", "http://127.0.0.1:1", "--gantt", "/"], "--gantt / is a directory"),
        (["--url", "http://127.0.0.1:1", "--index", "0"], "give --gantt"),
        (["--url", "http://127.0.0.1:1", "--timeout", "0"], "--timeout 0"),
    ],
)
def test_bad_input_is_one_line(args: list[str], problem: str) -> None:
    result = run(*args)
    assert result.exit_code == 2
    assert problem in result.stderr
    assert len(result.stderr.splitlines()) == 1


def test_an_index_that_is_not_in_the_table(server: FakeServer, tmp_path: Path) -> None:
    result = run("--url", server.url, "--gantt", tmp_path / "restore.png", "--index", "2")
    assert result.exit_code == 2
    assert "there are restores 0 to 1" in result.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("index", [None, 0])
def test_a_picture(server: FakeServer, tmp_path: Path, index: int | None) -> None:
    figure = pytest.importorskip("matplotlib.figure", reason="matplotlib is a development dependency")
    path = tmp_path / "restore.png"
    titles: list[str] = []
    suptitle = figure.Figure.suptitle

    def keep(self: Any, text: str, **kwargs: Any) -> Any:
        titles.append(text)
        return suptitle(self, text, **kwargs)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(figure.Figure, "suptitle", keep)
        result = run("--url", server.url, "--gantt", path, *(() if index is None else ("--index", index)))
    assert result.exit_code == 0, result.output
    assert path.read_bytes().startswith(b"\x89PNG")
    assert titles == [
        "restore 0: 96 tokens in 2.0 ms" if index == 0 else "restore 1: 64 tokens in 10.0 ms, load failed"
    ]
    assert [entry.name for entry in tmp_path.iterdir()] == ["restore.png"]


def test_without_matplotlib_it_is_said(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("krul_sglang.cli.arguments.find_spec", lambda name: None)
    result = run("--url", server.url, "--gantt", tmp_path / "restore.png")
    assert result.exit_code == 2
    assert "pip install matplotlib" in result.stderr
    assert list(tmp_path.iterdir()) == []
