"""The daemon's loop on a store that misbehaves."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from krul_backend.daemon.client.client_session import ClientSession
from krul_backend.daemon.protocol.frames import encode, pack
from krul_backend.daemon.protocol.messages import (
    AdviseRequest,
    ClearRequest,
    FetchRequest,
    InspectRequest,
    ListRequest,
    OpenRequest,
    PingRequest,
    ReleaseRequest,
    Reply,
    ReserveRequest,
    StatsRequest,
    TrimRequest,
    VerifyRequest,
    error_code,
)
from krul_backend.daemon.protocol.runtime_dir import RuntimeDir
from krul_backend.daemon.server.server import DaemonServer
from krul_backend.errors import (
    ConfigError,
    DaemonUnreachableError,
    ManifestError,
    ProtocolError,
    StoreClosedError,
    TierReadError,
)
from krul_backend.segment import ModelIdentity
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.hint import Hint, SessionName
from krul_backend.tiers.dram.host_store import HostStore
from tests.support import daemon_client
from tests.support.daemon_client import MODEL, TIMEOUT_S, RawClient, connect_raw, open_raw
from tests.support.stats_builders import make_segment_info
from tests.support.store_builders import wait_until

RESERVE: dict[str, Any] = {"reservation_id": 1, "layer_num_bytes": (64,), "tenant": ""}
TRIM: dict[str, Any] = {"segment_id": 1, "layer_first_token": (0,), "layer_num_bytes": (0,)}


class MoodyStore(TieredStore):
    """Fails where it is told to, and trims, clears and drops when it is let.

    ``begun_clears`` are the models of all clears so far; ``num_ended_clears`` of them have returned.
    """

    def __init__(self) -> None:
        super().__init__(HostStore(1 << 20))
        self.error: Exception | None = None
        self.may_trim = threading.Event()
        self.may_reserve = threading.Event()
        self.may_reserve.set()
        self.may_clear = threading.Event()
        self.may_drop = threading.Event()
        self.begun_clears: list[ModelIdentity | None] = []
        self.num_ended_clears = 0
        self.num_lists = 0

    def reserve(self, *args: Any, at_once: bool = False, **kwargs: Any) -> Any:
        if self.error is not None:
            raise self.error
        if at_once and not self.may_reserve.is_set():
            return None
        assert self.may_reserve.wait(TIMEOUT_S)
        return super().reserve(*args, at_once=at_once, **kwargs)

    def trim(self, *args: Any) -> int:
        assert self.may_trim.wait(TIMEOUT_S)
        return super().trim(*args)

    def clear(self, model: ModelIdentity | None = None) -> None:
        self.begun_clears.append(model)
        self.may_clear.wait(TIMEOUT_S)
        self.num_ended_clears += 1

    def advise(self, *args: Any, **kwargs: Any) -> int:
        assert self.may_drop.wait(TIMEOUT_S)
        return 0

    def verify(self) -> Any:
        raise OSError("the disk is on fire")

    def list_segments(self) -> Any:
        self.num_lists += 1
        return [make_segment_info(number) for number in (3, 1, 2)]


class Observed:
    """An observer that keeps what it is told."""

    def __init__(self) -> None:
        self.answers: list[tuple[str, float, bool]] = []

    def __call__(self, op: str, seconds: float, ok: bool) -> None:
        self.answers.append((op, seconds, ok))


@contextmanager
def serving(path: Path, store: TieredStore, observer: Observed | None = None) -> Iterator[RawClient]:
    runtime_dir = RuntimeDir(path)
    server = DaemonServer(runtime_dir, store, observer=observer)
    thread = threading.Thread(target=server.run)
    thread.start()
    try:
        with RawClient(path) as client:
            yield client
    finally:
        server.stop()
        thread.join(TIMEOUT_S)
        server.disconnect()
        store.close()
        server.close()
        runtime_dir.close()
    assert not thread.is_alive()


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (ManifestError("m"), "manifest", "m"),
        (KeyError("reservation 7"), "key", "reservation 7"),
        (ValueError("v"), "value", "v"),
        (StoreClosedError("c"), "closed", "c"),
        (TierReadError("t"), "tier-read", "t"),
        (ProtocolError("p"), "protocol", "p"),
        (ZeroDivisionError("z"), "internal", "z"),
        (AssertionError(), "internal", "AssertionError()"),
        (MemoryError(), "internal", "MemoryError()"),
    ],
)
def test_every_error_of_the_store_is_an_answer(
    tmp_path: Path, error: Exception, code: str, message: str
) -> None:
    store = MoodyStore()
    store.error = error
    with serving(tmp_path / "run", store) as client:
        answer = client.refusal(ReserveRequest, **RESERVE)
        assert (answer.code, answer.message) == (code, message)
        store.error = None
        assert client.ask(ReserveRequest, **RESERVE) is not None
        assert client.ask(StatsRequest)[1].failed_requests == 1


def test_an_error_of_another_thread_is_an_answer(tmp_path: Path) -> None:
    with serving(tmp_path / "run", MoodyStore()) as client:
        answer = client.refusal(VerifyRequest)
        assert (answer.code, answer.message) == ("internal", "the disk is on fire")


def test_an_unknown_error_has_no_name_of_its_own() -> None:
    assert error_code(ConfigError("x")) == "internal"
    assert error_code(UnicodeDecodeError("utf-8", b"", 0, 0, "x")) == "value"


def test_what_takes_long_holds_up_nobody(tmp_path: Path) -> None:
    store = MoodyStore()
    observed = Observed()
    with serving(tmp_path / "run", store, observed) as client:
        slow = client.send(TrimRequest, **TRIM)
        client.ask(PingRequest)
        store.may_trim.set()
        answer = client.receive()
        assert isinstance(answer, Reply)
        assert (answer.id, answer.result) == (slow, 0)
    ops = [op for op, _, _ in observed.answers]
    assert ops == ["open", "ping", "trim"]
    by_op = {op: seconds for op, seconds, _ in observed.answers}
    assert by_op["trim"] > by_op["ping"] > 0


def test_long_work_that_waits_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krul_backend.daemon.server.lanes.MAX_PENDING", 2)
    store = MoodyStore()
    with serving(tmp_path / "run", store) as client:
        for _ in range(2):
            client.send(TrimRequest, **TRIM)
        refused = client.refusal(TrimRequest, **TRIM)
        assert "2 long operations wait already" in refused.message
        assert client.ask(ReserveRequest, **RESERVE) is not None, "other lanes have their own bound"
        store.may_trim.set()
        assert {type(client.receive()) for _ in range(2)} == {Reply}
        client.ask(InspectRequest, segment_id=1)


def test_a_lease_whose_fetch_is_refused_ends_with_its_release(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with serving(tmp_path / "run", MoodyStore()) as client:
        daemon_client.store(client, "c", 0, 2)
        assert daemon_client.lease(client, "c", 2, number=5)
        monkeypatch.setattr("krul_backend.daemon.server.lanes.MAX_PENDING", 0)
        for _ in range(2):
            assert "wait already" in client.refusal(FetchRequest, lease_id=5).message
        client.ask(ReleaseRequest, lease_id=5)
        assert client.ask(StatsRequest)[0].num_leases == 0


def test_equal_clears_that_wait_are_done_once_and_hold_nobody_up(tmp_path: Path) -> None:
    store = MoodyStore()
    with serving(tmp_path / "run", store) as client:
        fingerprint = client.say_hello(MODEL)
        asked = [client.send(ClearRequest, fingerprint=None)]
        wait_until(lambda: store.begun_clears == [None])
        # What was stored after the first one began is for the second one to forget.
        asked += [client.send(ClearRequest, fingerprint=None) for _ in range(5)]
        asked.append(client.send(ClearRequest, fingerprint=fingerprint))
        assert client.ask(ReserveRequest, **RESERVE) is not None
        store.may_trim.set()
        client.ask(TrimRequest, **TRIM)
        store.may_clear.set()
        answers = [client.receive() for _ in asked]
        assert {type(answer) for answer in answers} == {Reply}
        assert [answer.id for answer in answers] == asked
        assert store.begun_clears == [None, None, MODEL]
        client.ask(ClearRequest, fingerprint=None)
        assert store.begun_clears == [None, None, MODEL, None]


def test_drops_hold_up_no_lookups(tmp_path: Path) -> None:
    store = MoodyStore()
    store.may_trim.set()
    with serving(tmp_path / "run", store) as client:
        for _ in range(8):
            client.send(AdviseRequest, hint=Hint(drop=True), session=SessionName("", "c"))
        client.ask(TrimRequest, **TRIM)
        store.may_drop.set()
        assert {type(client.receive()) for _ in range(8)} == {Reply}


def test_work_that_hangs_does_not_keep_the_server_from_ending(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("krul_backend.daemon.server.lanes._END_TIMEOUT_S", 0.1)
    store = MoodyStore()
    with serving(tmp_path / "run", store) as client:
        client.send(ClearRequest, fingerprint=None)
        wait_until(lambda: store.begun_clears == [None])
    assert store.num_ended_clears == 0
    assert "hangs in krul-clear" in caplog.text
    store.may_clear.set()
    wait_until(lambda: store.num_ended_clears == 1)


def test_who_looks_for_space_holds_nobody_up(tmp_path: Path) -> None:
    store = MoodyStore()
    store.may_reserve.clear()
    with serving(tmp_path / "run", store) as client:
        client.send(ReserveRequest, **RESERVE)
        client.ask(PingRequest)
        store.may_reserve.set()
        reply = client.receive()
        assert isinstance(reply, Reply)
        assert reply.result is not None


def test_the_parts_of_a_list_are_of_one_list(tmp_path: Path) -> None:
    store = MoodyStore()

    def ids(offset: int) -> list[int]:
        infos, num_segments = client.ask(ListRequest, offset=offset, limit=2)
        assert num_segments == 3
        return [info.segment_id for info in infos]

    with serving(tmp_path / "run", store) as client:
        assert (ids(0), ids(2), store.num_lists) == ([1, 2], [3], 1)
        assert (ids(1), store.num_lists) == ([2, 3], 2), "nobody had begun a list"
        assert (ids(0), ids(0), ids(2), store.num_lists) == ([1, 2], [1, 2], [3], 4)
        assert client.ask(ListRequest)[1] == 3
        assert client.ask(ListRequest, offset=3) == ((), 3)
        assert store.num_lists == 6


def test_an_answer_to_a_peer_that_is_gone_is_dropped(tmp_path: Path) -> None:
    store = MoodyStore()
    observed = Observed()
    with serving(tmp_path / "run", store, observed) as client:
        with RawClient(tmp_path / "run") as gone:
            gone.send(TrimRequest, **TRIM)
            gone.ask(PingRequest)
        store.may_trim.set()
        client.ask(PingRequest)
        deadline_s = time.monotonic() + TIMEOUT_S
        while "trim" not in [op for op, _, _ in observed.answers]:
            assert time.monotonic() < deadline_s
            time.sleep(0.01)
        client.ask(PingRequest)


def test_a_session_comes_with_the_arena_and_ends_with_its_connection(tmp_path: Path) -> None:
    store = MoodyStore()
    with serving(tmp_path / "run", store) as client, connect_raw(tmp_path / "run") as connection:
        greeting, (descriptor, *_) = open_raw(connection)
        assert os.path.samestat(os.fstat(descriptor), os.fstat(store.host.fileno()))
        os.close(descriptor)
        assert greeting.token != client.greeting.token
        client.ask(PingRequest, token=greeting.token)
        assert client.ask(StatsRequest)[1].num_sessions == 2
        connection.sendall(pack(encode(OpenRequest(id=2))))
        assert b"has opened a session before" in connection.recv(1 << 16)
        connection.close()
        wait_until(lambda: client.ask(StatsRequest)[1].num_sessions == 1)
        assert client.ask_wrongly(PingRequest, token=greeting.token) == "protocol"


def test_what_a_client_asked_for_before_it_ended_is_done(tmp_path: Path) -> None:
    """More than one turn's work, for its session, which ends only then."""
    num_pings = 1000
    observed = Observed()
    with serving(tmp_path / "run", MoodyStore(), observed) as client:
        gone = RawClient(tmp_path / "run")
        gone.requests.sendall(pack(encode(PingRequest(id=1, token=gone.greeting.token))) * num_pings)
        gone.close()
        wait_until(lambda: client.ask(StatsRequest)[1].num_sessions == 1)
    assert [ok for op, _, ok in observed.answers if op == "ping"] == [True] * num_pings


def test_sessions_are_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("krul_backend.daemon.server.sessions.MAX_SESSIONS", 1)
    full = pytest.raises(DaemonUnreachableError, match="it is ending, or full")
    with serving(tmp_path / "run", MoodyStore()), full:
        ClientSession(tmp_path / "run")


def test_the_observer_is_told_of_failures(tmp_path: Path) -> None:
    observed = Observed()
    with serving(tmp_path / "run", MoodyStore(), observed) as client:
        client.ask_wrongly(VerifyRequest)
        client.ask_wrongly(PingRequest, token="made-up")
        client.requests.sendall(pack(b'{"op":"teleport","version":1,"id":3}'))
        client.receive()
    assert [(op, ok) for op, _, ok in observed.answers] == [
        ("open", True),
        ("verify", False),
        ("ping", False),
        ("invalid", False),
    ]
