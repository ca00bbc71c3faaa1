from __future__ import annotations

import errno
import os
import select
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from krul_backend.daemon.protocol.frames import decode_greeting
from krul_backend.daemon.server import sessions
from krul_backend.daemon.server.sessions import SILENCE_S, Session, SessionTable, is_own_user
from krul_backend.tiers.dram.arena import Arena


class Clock:
    now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


class FullListener:
    """A listening socket that accepts nobody while ``is_full`` is set, for want of descriptors."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener
        self.is_full = True
        self.num_refused = 0

    def accept(self) -> tuple[socket.socket, object]:
        if self.is_full:
            self.num_refused += 1
            raise OSError(errno.EMFILE, "Too many open files")
        return self._listener.accept()

    def fileno(self) -> int:
        return self._listener.fileno()

    def close(self) -> None:
        self._listener.close()


class Table:
    """A session table, the arena that it hands out, and what it said of ended sessions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.arena = Arena(1 << 16)
        self.ended: list[Session] = []
        self.clock = Clock()
        self.table = SessionTable(path, self.arena.fileno(), 1 << 16, self.ended.append, self.clock)

    def connect(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        connection.settimeout(5)
        connection.connect(str(self.path))
        self.table.serve()
        return connection


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Table]:
    table = Table(tmp_path / "session.sock")
    yield table
    table.table.close()


def token_of(connection: socket.socket) -> str:
    line, descriptors, _, _ = socket.recv_fds(connection, 4096, 1)
    for descriptor in descriptors:
        os.close(descriptor)
    return decode_greeting(line).token


def test_a_client_gets_the_arena_and_a_token(served: Table) -> None:
    with served.connect() as connection:
        line, (descriptor,), _, _ = socket.recv_fds(connection, 4096, 1)
        assert line.endswith(b"\n")
        assert os.path.samestat(os.fstat(descriptor), os.fstat(served.arena.fileno()))
        os.close(descriptor)
        session = served.table.find(decode_greeting(line).token)
        assert session is not None
        assert session.pid == os.getpid()
        assert served.table.find("another") is None


def test_only_the_own_user_is_let_in(served: Table, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own_user(os.geteuid())
    assert not is_own_user(os.geteuid() + 1)
    monkeypatch.setattr(sessions.os, "geteuid", lambda: os.getuid() + 1)
    with served.connect() as connection:
        assert connection.recvmsg(4096, 4096)[:2] == (b"", []), "neither a token nor a descriptor"
    assert len(served.table) == 0


def test_the_end_of_a_connection_is_the_end_of_its_session(served: Table) -> None:
    first, second = served.connect(), served.connect()
    token = token_of(first)
    first.close()
    served.table.serve()
    assert [session.token for session in served.ended] == [token]
    assert len(served.table) == 1
    assert served.table.find(token) is None
    second.close()


def test_a_client_that_leaves_before_its_greeting_is_no_session(served: Table) -> None:
    with socket.socket(socket.AF_UNIX) as connection:
        connection.connect(str(served.path))
    served.table.serve()
    served.table.serve()
    assert len(served.table) == 0


def test_too_many_open_files_make_clients_wait_and_nothing_spin(
    served: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    listener = FullListener(served.table._listener)
    monkeypatch.setattr(served.table, "_listener", listener)
    first = served.connect()
    assert not select.select([served.table], [], [], 0)[0], "there is nothing to do until somebody else comes"
    served.table.serve()
    assert (listener.num_refused, len(served.table)) == (1, 0)
    listener.is_full = False
    second = served.connect()
    assert {token_of(first), token_of(second)} == {session.token for session in served.table}
    first.close()
    second.close()


def test_silent_connections_give_way_when_there_are_too_many(
    served: Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sessions, "MAX_SESSIONS", 2)
    speaking, silent = served.connect(), served.connect()
    token = token_of(speaking)
    assert served.table.find(token) is not None
    with served.connect() as refused:
        assert refused.recv(4096) == b"", "the silent one has its time"
    served.clock.now_s += SILENCE_S + 1
    silent_token = token_of(silent)
    accepted = served.connect()
    assert token_of(accepted)
    assert [session.token for session in served.ended] == [silent_token]
    assert served.table.find(token) is not None
    for connection in (speaking, silent, accepted):
        connection.close()
