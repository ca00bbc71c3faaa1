"""Hints over HTTP to a real daemon: with a token or not at all; nonsense gets a sentence."""

from __future__ import annotations

import asyncio
import http.client
import logging
import socket
import stat
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from demo.server import find_free_port
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.server import hint_endpoint
from krul_backend.daemon.server.hint_endpoint import HintEndpoint
from krul_backend.daemon.server.status_page import MAX_AGE_S, StatusPage
from krul_backend.errors import HintError
from krul_backend.tiers.common.hint import Hint, SessionName
from krul_sglang.hints import AsyncHintClient, HintClient, HintsUnreachableError, tenant_of
from tests.support.daemon_process import running_daemon, start_daemon
from tests.support.stats_builders import make_daemon_stats, make_store_stats
from tests.support.store_builders import make_model, page_keys, put, wait_until

MODEL = make_model()
TURN_BYTES = 256 << 10


class Daemon(NamedTuple):
    url: str
    token_file: Path
    store: DaemonStore

    @property
    def token(self) -> str:
        return self.token_file.read_text()

    def post(self, body: Any = None, **options: Any) -> httpx.Response:
        headers = {"Authorization": f"Bearer {self.token}"}
        given = {"json": body, "headers": headers, "timeout": 30, "trust_env": False, **options}
        return httpx.post(f"{self.url}/v1/hints", **given)


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    port = find_free_port()
    ssd_dir = tmp_path_factory.mktemp("ssd")
    arguments = ("--host-memory", "1MiB", "--ssd-dir", str(ssd_dir), "--ssd-capacity", "64MiB")
    with running_daemon(*arguments, "--hints-port", str(port)) as (runtime_dir, _):
        store = DaemonStore(runtime_dir, model=MODEL, request_timeout_s=10.0)
        yield Daemon(f"http://127.0.0.1:{port}", runtime_dir / "hints.token", store)
        store.close()
        assert (store.counters.timeouts, store.counters.failures, store.counters.lost) == (0, 0, 0)


def store_turn(daemon: Daemon, name: str, tenant: str = "") -> None:
    """A conversation of one segment, a quarter of the memory, under its name."""
    # What waits to be written cannot make room.
    wait_until(lambda: daemon.store.stats().tiers[0].queued_segments == 0)
    put(daemon.store, name, 0, 2, (TURN_BYTES - 128, 64))
    keys = page_keys(name, 0, 2)
    daemon.store.advise(Hint(), model=MODEL, page_keys=keys, session=SessionName(tenant, name))


def is_in_dram(daemon: Daemon, name: str) -> bool:
    return bool(daemon.store.path_segments(MODEL, page_keys(name, 0, 2)))


def test_the_token_is_for_this_user_alone(daemon: Daemon) -> None:
    assert stat.S_IMODE(daemon.token_file.stat().st_mode) == 0o600
    assert len(daemon.token) >= 32
    body = {"session": "nobody", "ttl_s": 1}
    assert daemon.post(body).status_code == 404
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": daemon.token}):
        reply = daemon.post(body, headers=headers)
        assert reply.status_code == 401
        assert "hints.token" in reply.json()["error"]


def test_the_page_comes_to_everybody_and_what_it_shows_needs_the_token(daemon: Daemon) -> None:
    for path, kind in (("/", "text/html"), ("/page.js", "text/javascript"), ("/uPlot.js", "text/javascript")):
        file = httpx.get(daemon.url + path, trust_env=False)
        assert (file.status_code, file.headers["content-type"]) == (200, f"{kind}; charset=utf-8")
        assert "default-src 'none'; script-src 'self'" in file.headers["content-security-policy"]
    assert httpx.get(f"{daemon.url}/uPlot.LICENSE", trust_env=False).status_code == 404
    url = f"{daemon.url}/v1/status"
    refused = httpx.get(url, trust_env=False)
    assert (refused.status_code, refused.headers["connection"]) == (401, "close")
    store_turn(daemon, "shown")
    time.sleep(MAX_AGE_S)
    answer = httpx.get(url, headers={"Authorization": f"Bearer {daemon.token}"}, trust_env=False)
    assert answer.status_code == 200
    assert "access-control-allow-origin" not in answer.headers
    shown = answer.json()
    assert [tier["name"] for tier in shown["tiers"]] == ["dram", "ssd"]
    assert any(each["held"]["dram"] == TURN_BYTES - 64 for each in shown["conversations"])
    assert shown["samples"]


def test_a_conversation_is_prefetched_before_its_request(daemon: Daemon) -> None:
    with HintClient(daemon.url, daemon.token_file) as hints:
        for number in range(8):
            store_turn(daemon, f"agent-{number}")
        wait_until(lambda: daemon.store.stats().tiers[0].num_segments >= 8)
        assert not is_in_dram(daemon, "agent-0")
        assert hints.send("agent-0", prefetch=True, ttl_s=60) == 2
        assert is_in_dram(daemon, "agent-0")
        for number in range(8):
            store_turn(daemon, f"noise-{number}")
        assert is_in_dram(daemon, "agent-0"), "pinned"
        assert hints.send("agent-0", ttl_s=0) == 0
        stats = daemon.store.stats()
        assert (stats.comeback_pages, stats.pinned_bytes) == (2, 0)


def test_a_conversation_comes_back_when_it_is_expected(daemon: Daemon) -> None:
    for number in range(8):
        store_turn(daemon, f"timed-{number}")
    wait_until(lambda: not daemon.store.find_missing(MODEL, page_keys("timed-0", 0, 2)))
    before = daemon.store.stats().comeback_pages
    with HintClient(daemon.url, daemon.token_file) as hints:
        assert hints.send("timed-0", next_use_s=1.0) is not None
        wait_until(lambda: is_in_dram(daemon, "timed-0"))
    wait_until(lambda: daemon.store.stats().comeback_pages - before == 2)


def test_what_is_demoted_leaves_first_and_stays_below(daemon: Daemon) -> None:
    with HintClient(daemon.url, daemon.token_file) as hints:
        store_turn(daemon, "old")
        store_turn(daemon, "done")
        assert hints.send("done", demote=True) == 2
        store_turn(daemon, "later")
        assert (is_in_dram(daemon, "old"), is_in_dram(daemon, "done")) == (True, False)
        wait_until(lambda: not daemon.store.find_missing(MODEL, page_keys("done", 0, 2)))


def test_what_is_dropped_is_forgotten(daemon: Daemon) -> None:
    tenant = tenant_of("team", "salt")
    store_turn(daemon, "secret", tenant)
    with HintClient(daemon.url, daemon.token_file) as hints:
        assert hints.send("secret", drop=True) is None, "another tenant's"
        assert hints.send("secret", drop=True, extra_key="team", cache_salt="salt") == 0
        assert daemon.store.find_missing(MODEL, page_keys("secret", 0, 2)) == [range(2)]
        assert hints.send("secret", drop=True, extra_key="team", cache_salt="salt") is None


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (b"{", 400, "no JSON"),
        (b"\xff\xfe", 400, "no JSON"),
        (b"[" * 10_000, 400, "no JSON"),
        (b'{"session": "a", "ttl_s": 1e999}', 400, "no JSON"),
        ([], 422, "the body: got a list"),
        ({}, 422, "session: got None, accepted is a name"),
        ({"session": 5, "ttl_s": 1}, 422, "session: got 5"),
        ({"session": "", "ttl_s": 1}, 422, "session: got a name of 0 characters, accepted are 1 to 256"),
        ({"session": "n" * 257, "ttl_s": 1}, 422, "session: got a name of 257 characters"),
        ({"session": "a", "tenant": 1, "ttl_s": 1}, 422, "tenant: got 1"),
        ({"session": "a", "tenant": "t" * 300, "ttl_s": 1}, 422, "tenant: got one of 300"),
        ({"session": "a"}, 422, "says nothing"),
        ({"session": "a", "ttl_s": "1"}, 422, "ttl_s: got '1', accepted are 0 to 86400 seconds"),
        ({"session": "a", "next_use_s": -0.5}, 422, "next_use_s: got -0.5, accepted are 0 to 86400 seconds"),
        ({"session": "a", "priority": 1000}, 422, "priority: got 1000, accepted are 0 to 100"),
        ({"session": "a", "demote": "yes"}, 422, "demote: got 'yes', accepted are true and false"),
        ({"session": "a", "drop": True, "demote": True}, 422, "drop: got it together with other fields"),
        ({"session": "a", "ttl": 5}, 422, "'ttl' is no field of a hint, accepted are ttl_s,"),
        ({"session": "a", "ttl_s": [1] * 1000}, 422, "ttl_s: got [1, 1"),
        ({"session": "a", "x": "y" * (16 << 10)}, 413, "16384"),
        (b'{"session": "\\ud800", "ttl_s": 1}', 400, "no JSON"),
    ],
)
def test_nonsense_gets_one_sentence(daemon: Daemon, body: Any, status: int, said: str) -> None:
    reply = daemon.post(content=body, json=None) if isinstance(body, bytes) else daemon.post(body)
    assert reply.status_code == status
    assert said in reply.json()["error"]
    assert len(reply.json()["error"]) < 400
    assert "\n" not in reply.json()["error"]


def test_the_client_says_what_is_wrong(daemon: Daemon, tmp_path: Path) -> None:
    with HintClient(daemon.url, daemon.token_file) as hints:
        with pytest.raises(HintError, match="priority: got 101, accepted are 0 to 100"):
            hints.send("a", priority=101)
        assert hints.send("nobody", demote=True) is None
    wrong = tmp_path / "token"
    with HintClient(daemon.url, wrong) as hints:
        with pytest.raises(HintsUnreachableError, match="no token can be read"):
            hints.send("a", demote=True)
        wrong.write_text("wrong")
        with pytest.raises(HintsUnreachableError, match="a wrong one"):
            hints.send("a", demote=True)
    with (
        HintClient(f"http://127.0.0.1:{find_free_port()}", wrong) as hints,
        pytest.raises(HintsUnreachableError, match="no krul daemon takes hints"),
    ):
        hints.send("a", demote=True)


def test_an_asynchronous_client(daemon: Daemon) -> None:
    store_turn(daemon, "async")

    async def send() -> list[int | None]:
        async with AsyncHintClient(daemon.url, daemon.token_file) as hints:
            return await asyncio.gather(*(hints.send("async", priority=number) for number in range(20)))

    assert asyncio.run(send()) == [2] * 20


def test_too_many_hints_are_refused_and_cost_little(daemon: Daemon) -> None:
    address = daemon.url.removeprefix("http://")

    def flood(_: int) -> list[int]:
        connection = http.client.HTTPConnection(address, timeout=30)
        headers = {"Authorization": f"Bearer {daemon.token}"}
        statuses = []
        for _ in range(600):
            connection.request("POST", "/v1/hints", b'{"session": "nobody", "demote": true}', headers)
            reply = connection.getresponse()
            reply.read()
            statuses.append(reply.status)
        connection.close()
        return statuses

    with ThreadPoolExecutor(4) as clients:
        statuses = [status for of_client in clients.map(flood, range(4)) for status in of_client]
    assert set(statuses) <= {404, 429}
    wait_until(lambda: daemon.post({"session": "nobody", "demote": True}).status_code == 404)
    # Whoever sends nothing holds nobody up.
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as silent:
        silent.sendall(b"POST /v1/hints HTTP/1.1\r\nHost: x\r\n")
        assert daemon.post({"session": "nobody", "demote": True}).status_code == 404


def ask(connection: http.client.HTTPConnection, token: str) -> http.client.HTTPResponse:
    headers = {"Authorization": f"Bearer {token}"}
    connection.request("POST", "/v1/hints", b'{"session": "a", "demote": true}', headers)
    reply = connection.getresponse()
    reply.read()
    return reply


def test_a_wrong_token_ends_the_connection(daemon: Daemon) -> None:
    with closing(http.client.HTTPConnection(daemon.url.removeprefix("http://"), timeout=10)) as connection:
        reply = ask(connection, daemon.token)
        assert (reply.status, reply.will_close) == (404, False)
        reply = ask(connection, "wrong")
        assert (reply.status, reply.will_close) == (401, True)


def empty_page() -> StatusPage:
    return StatusPage(lambda: (make_store_stats(), make_daemon_stats()), list)


@contextmanager
def serving(directory: Path) -> Iterator[tuple[tuple[str, int], str]]:
    """An endpoint in this process: its address and token."""
    port = find_free_port()
    endpoint = HintEndpoint(port, directory / "token", lambda session, hint: 7, empty_page())
    try:
        yield ("127.0.0.1", port), (directory / "token").read_text()
    finally:
        endpoint.close()


def test_connections_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_endpoint, "MAX_CONNECTIONS", 2)
    monkeypatch.setattr(hint_endpoint, "_IDLE_S", 600.0)
    with serving(tmp_path) as (address, token), ExitStack() as stack:
        # One at a time: those that are being set up do not count yet.
        used = [stack.enter_context(closing(http.client.HTTPConnection(*address))) for _ in range(2)]
        assert [ask(connection, token).status for connection in used] == [200, 200]
        with socket.create_connection(address, timeout=10) as refused:
            assert refused.recv(1) == b""
        assert [ask(connection, token).status for connection in used] == [200, 200]


def test_a_silent_connection_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hint_endpoint, "_IDLE_S", 0.2)
    with (
        serving(tmp_path) as (address, token),
        closing(http.client.HTTPConnection(*address)) as used,
        socket.create_connection(address, timeout=10) as silent,
    ):
        silent.sendall(b"POST /v1/hints HTTP/1.1\r\nHost: x\r\n")
        assert silent.recv(1) == b""
        assert ask(used, token).status == 200
        used.sock.settimeout(10)
        assert used.sock.recv(1) == b""


def test_a_taken_port_is_one_line_and_the_daemon_goes_on(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken, caplog.at_level(logging.INFO):
        port = taken.getsockname()[1]
        endpoint = HintEndpoint(port, tmp_path / "token", lambda session, hint: 0, empty_page())
        endpoint.close()
        endpoint.close()
    (record,) = (record for record in caplog.records if record.name.startswith("krul_backend"))
    assert "choose another hints_port" in record.getMessage()
    assert not (tmp_path / "token").exists()


def test_the_token_ends_with_the_daemon_and_follows_no_link(tmp_path: Path) -> None:
    elsewhere = tmp_path / "elsewhere"
    elsewhere.write_text("kept")
    arguments = ("--host-memory", "1MiB", "--hints-port", str(find_free_port()))
    with running_daemon(*arguments) as (runtime_dir, process):
        token_file = runtime_dir / "hints.token"
        assert token_file.is_file()
        process.terminate()
        assert process.wait(30) == 0
        assert not token_file.exists()
        # As if somebody had put a link there: it is replaced.
        token_file.symlink_to(elsewhere)
        again = start_daemon(runtime_dir, *arguments)
        try:
            assert stat.S_ISREG(token_file.lstat().st_mode)
        finally:
            again.kill()
            again.wait()
    assert elsewhere.read_text() == "kept"
