"""The daemon's sockets: who is let in, who is cut off, and whose turn it is."""

from __future__ import annotations

import errno
import os
import select
import socket
import stat
from collections.abc import Iterator
from pathlib import Path

import pytest

from krul_backend.daemon.protocol.frames import Inbox, pack
from krul_backend.daemon.protocol.runtime_dir import is_own_user
from krul_backend.daemon.server import connections
from krul_backend.daemon.server.connections import SILENCE_S, Connection, Connections
from krul_backend.errors import DaemonError, ProtocolError

MESSAGE = pack(b"{}")


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


class Served:
    """Connections that answer nothing by themselves, and what they told."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.clock = Clock()
        self.messages: list[tuple[Connection, bytes, bytes]] = []
        self.garbage: list[ProtocolError] = []
        self.closed: list[Connection] = []
        self.waker = os.eventfd(0, os.EFD_NONBLOCK)
        self.connections = Connections(
            path,
            self.waker,
            on_message=lambda *message: self.messages.append(message),
            on_garbage=lambda connection, error: self.garbage.append(error),
            on_close=self.closed.append,
            clock=self.clock,
        )

    def connect(self) -> socket.socket:
        peer = socket.socket(socket.AF_UNIX)
        peer.settimeout(5)
        peer.connect(str(self.path))
        self.turn()
        return peer

    def turn(self) -> bool:
        return self.connections.serve(0)

    def speak(self) -> tuple[socket.socket, Connection]:
        """A new peer that has sent one message, and the connection with it."""
        peer = self.connect()
        peer.sendall(MESSAGE)
        self.turn()
        return peer, self.messages[-1][0]


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "d.sock")
    yield served
    served.connections.close()
    os.close(served.waker)


def test_the_socket_is_private_and_nobody_elses(served: Served) -> None:
    status = served.path.stat()
    assert stat.S_ISSOCK(status.st_mode)
    assert stat.S_IMODE(status.st_mode) == 0o600
    with pytest.raises(DaemonError, match=r"cannot serve at .*d\.sock: Address already in use"):
        Served(served.path)


def test_only_the_own_user_is_let_in(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    assert is_own_user(os.geteuid())
    assert not is_own_user(os.geteuid() + 1)
    monkeypatch.setattr(os, "geteuid", lambda: os.getuid() + 1)
    with served.connect() as peer:
        assert peer.recv(1) == b""
    assert len(served.connections) == 0


def test_what_was_sent_before_the_end_comes_before_the_end(served: Served) -> None:
    with socket.socket(socket.AF_UNIX) as peer:
        peer.connect(str(served.path))
        peer.sendall(pack(b"first", b"12345678") + pack(b"second")[:-1])
    served.turn()
    assert [message[1:] for message in served.messages] == [(b"first", b"12345678")]
    served.turn()
    assert served.closed == [served.messages[0][0]]
    assert (len(served.connections), served.closed[0].is_open) == (0, False)


def test_who_sends_much_leaves_others_their_turn(served: Served) -> None:
    busy, other = served.connect(), served.connect()
    busy.sendall(pack(b"busy") * 200)
    other.sendall(pack(b"other"))
    served.turn()
    assert [frame for _, frame, _ in served.messages].count(b"other") == 1
    num_busy = len(served.messages) - 1
    assert 0 < num_busy < 200
    busy_one = next(connection for connection, frame, _ in served.messages if frame == b"busy")
    busy_one.token = "of the busy one"
    assert served.connections.has_more("of the busy one")
    assert not served.connections.has_more("of another")
    while served.connections.has_more("of the busy one"):
        # Nothing new comes: a turn does not wait.
        served.connections.serve(100.0)
    assert len(served.messages) == 201
    busy.close()
    other.close()


def test_garbage_ends_its_connection_alone(served: Served) -> None:
    peer, connection = served.speak()
    other, _ = served.speak()
    peer.sendall(b"\xff" * 100)
    served.turn()
    assert served.closed == [connection]
    assert "is beyond the" in str(served.garbage[0])
    assert peer.recv(1) == b""
    other.sendall(MESSAGE)
    served.turn()
    assert len(served.messages) == 3
    other.close()


def test_a_reply_larger_than_the_socket_takes_arrives_whole(served: Served) -> None:
    peer, connection = served.speak()
    reply = pack(os.urandom(3 << 20))
    served.connections.send(connection, reply)
    served.connections.send(connection, MESSAGE)
    inbox, received = Inbox(), []
    while len(received) < 2:
        inbox.add(peer.recv(1 << 20))
        served.turn()
        while (message := inbox.next()) is not None:
            received.append(message)
    assert [pack(*message) for message in received] == [reply, MESSAGE]
    peer.close()


def test_who_reads_no_replies_is_cut_off(served: Served, caplog: pytest.LogCaptureFixture) -> None:
    peer, connection = served.speak()
    num_sent = 0
    while connection.is_open:
        served.connections.send(connection, pack(bytes(1 << 20)))
        num_sent += 1
    assert num_sent < 20
    assert served.closed == [connection]
    assert "does not read its replies" in caplog.text
    served.connections.send(connection, MESSAGE)
    peer.close()


def test_a_reply_to_who_is_gone_is_dropped(served: Served) -> None:
    peer, connection = served.speak()
    peer.close()
    served.connections.send(connection, MESSAGE)
    served.turn()
    assert served.closed == [connection]


def test_descriptors_come_with_the_message(served: Served) -> None:
    peer, connection = served.speak()
    served.connections.send(connection, MESSAGE, [served.waker])
    received, (descriptor,), _, _ = socket.recv_fds(peer, 100, 2)
    assert received == MESSAGE
    os.eventfd_write(descriptor, 1)
    assert served.turn(), "the waker"
    os.close(descriptor)
    peer.close()


def test_last_replies_are_sent_at_the_end(tmp_path: Path) -> None:
    served = Served(tmp_path / "end.sock")
    peer, connection = served.speak()
    served.connections.send(connection, MESSAGE)
    served.connections.close()
    assert peer.recv(100) == MESSAGE
    assert peer.recv(100) == b""
    os.close(served.waker)


def test_who_does_not_read_holds_up_the_end_for_a_moment_only(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "END_S", 0.05)
    served = Served(tmp_path / "end.sock")
    peers = [served.speak() for _ in range(3)]
    for _, connection in peers:
        served.connections.send(connection, pack(bytes(1 << 20)))
    served.connections.close()
    assert [connection.is_open for _, connection in peers] == [False] * 3
    os.close(served.waker)


def test_too_many_open_files_make_clients_wait_and_nothing_spin(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    peer, _ = served.speak()
    listener = FullListener(served.connections._listener)
    monkeypatch.setattr(served.connections, "_listener", listener)
    first = served.connect()
    assert not select.select([served.connections._epoll], [], [], 0)[0]
    served.turn()
    assert (listener.num_refused, len(served.connections)) == (1, 1)
    listener.is_full = False
    # Somebody leaves, so there is a file for who waits.
    peer.close()
    served.turn()
    assert len(served.connections) == 1
    first.sendall(MESSAGE)
    served.turn()
    assert len(served.messages) == 2
    first.close()


def test_silent_connections_give_way_when_there_are_too_many(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(connections, "MAX_CONNECTIONS", 2)
    speaking, spoken = served.speak()
    silent = served.connect()
    with served.connect() as refused:
        assert refused.recv(1) == b"", "the silent one has its time"
    served.clock.now_s += SILENCE_S + 1
    accepted, _ = served.speak()
    assert silent.recv(1) == b""
    assert len(served.connections) == 2
    assert spoken.is_open
    for peer in (speaking, silent, accepted):
        peer.close()
