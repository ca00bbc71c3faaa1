"""What threads send to the daemon arrives, and a thread that waits is not left waiting."""

from __future__ import annotations

import socket
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from krul_backend.daemon.client.request_channel import RequestChannels, RequestTimeoutError, SessionEndedError
from krul_backend.daemon.protocol.frames import Inbox, decode_request, encode, pack
from krul_backend.daemon.protocol.messages import ErrorReply, PingRequest, ReleaseRequest, Reply, Request
from krul_backend.errors import DaemonError, ProtocolError

TIMEOUT_S = 10.0


class Peer:
    """The daemon's end of one connection."""

    def __init__(self, listener: socket.socket) -> None:
        listener.settimeout(TIMEOUT_S)
        self.socket, _ = listener.accept()
        self.socket.settimeout(TIMEOUT_S)
        self._inbox = Inbox()

    def next_request(self) -> Request:
        while (message := self._inbox.next()) is None:
            received = self.socket.recv(1 << 16)
            assert received
            self._inbox.add(received)
        return decode_request(message[0])

    def answer(self, request: Request) -> None:
        self.socket.sendall(pack(encode(Reply(id=request.id, result=None))))


@pytest.fixture
def listener() -> Iterator[socket.socket]:
    # Not tmp_path: a socket's path holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="krul-") as path, socket.socket(socket.AF_UNIX) as listener:
        listener.bind(f"{path}/daemon.sock")
        listener.listen()
        yield listener


@pytest.fixture
def channels(listener: socket.socket) -> Iterator[RequestChannels]:
    channels = RequestChannels(Path(listener.getsockname()), "token")
    yield channels
    channels.close()


def in_new_threads(num_threads: int, channels: RequestChannels) -> None:
    """Each of them posts a release, and ends before the next one begins."""
    for lease_id in range(num_threads):
        thread = threading.Thread(target=channels.post, args=(ReleaseRequest(lease_id=lease_id),))
        thread.start()
        thread.join()


class Asking:
    """A thread that sends a ping; ``error`` is how that ended, None for well."""

    def __init__(self, channels: RequestChannels, timeout_s: float = TIMEOUT_S) -> None:
        self.error: Exception | None = None
        self._thread = threading.Thread(target=self._ask, args=(channels, timeout_s))
        self._thread.start()

    def _ask(self, channels: RequestChannels, timeout_s: float) -> None:
        try:
            channels.ask(PingRequest(), timeout_s)
        except Exception as error:
            self.error = error

    def end(self) -> Exception | None:
        self._thread.join(TIMEOUT_S)
        assert not self._thread.is_alive()
        return self.error


def test_threads_that_come_and_go_share_a_connection(
    listener: socket.socket, channels: RequestChannels
) -> None:
    in_new_threads(20, channels)
    peer = Peer(listener)
    requests = [peer.next_request() for _ in range(20)]
    assert [request.lease_id for request in requests if isinstance(request, ReleaseRequest)] == [*range(20)]
    assert {request.token for request in requests} == {"token"}
    listener.settimeout(0)
    with pytest.raises(BlockingIOError):
        listener.accept()


def test_posts_never_wait_and_all_arrive_though_their_thread_has_ended(
    listener: socket.socket, channels: RequestChannels
) -> None:
    """A daemon that hangs: more is posted than the socket takes."""
    num_posts = 5000
    posted: list[float] = []

    def post_all() -> None:
        start_s = time.monotonic()
        for lease_id in range(num_posts):
            channels.post(ReleaseRequest(lease_id=lease_id))
        posted.append(time.monotonic() - start_s)

    thread = threading.Thread(target=post_all)
    thread.start()
    thread.join(TIMEOUT_S)
    assert posted, "a post waited"
    peer = Peer(listener)
    requests = [peer.next_request() for _ in range(num_posts)]
    assert [request.lease_id for request in requests if isinstance(request, ReleaseRequest)] == [
        *range(num_posts)
    ]


def test_a_post_arrives_though_so_many_wait_that_nobody_can_connect(
    listener: socket.socket, channels: RequestChannels
) -> None:
    listener.listen(0)
    with socket.socket(socket.AF_UNIX) as first:
        first.connect(listener.getsockname())
        in_new_threads(1, channels)
        with pytest.raises(RequestTimeoutError):
            channels.ask(PingRequest(), 0.05)
        Peer(listener).socket.close()
        peer = Peer(listener)
        assert [type(peer.next_request()) for _ in range(2)] == [ReleaseRequest, PingRequest]


def test_a_late_reply_and_half_a_reply_garble_nothing(
    listener: socket.socket, channels: RequestChannels
) -> None:
    with pytest.raises(RequestTimeoutError, match=r"no answer from .*daemon.sock within 0.05 s"):
        channels.ask(PingRequest(), 0.05)
    peer = Peer(listener)
    late = pack(encode(Reply(id=peer.next_request().id, result=None)))
    peer.socket.sendall(late[:11])
    with pytest.raises(RequestTimeoutError):
        channels.ask(PingRequest(), 0.05)
    second = peer.next_request()
    peer.socket.sendall(late[11:])
    peer.socket.sendall(pack(encode(ErrorReply(id=second.id, code="internal", message="too late"))))

    def answer_third() -> None:
        third = peer.next_request()
        peer.socket.sendall(pack(encode(ErrorReply(id=third.id, code="key", message="the third"))))

    answering = threading.Thread(target=answer_third)
    answering.start()
    with pytest.raises(KeyError, match="the third"):
        channels.ask(PingRequest(), TIMEOUT_S)
    answering.join()


def test_close_wakes_every_thread_that_waits(listener: socket.socket, channels: RequestChannels) -> None:
    asking = [Asking(channels) for _ in range(3)]
    peers = [Peer(listener) for _ in asking]
    assert [type(peer.next_request()) for peer in peers] == [PingRequest] * 3
    start_s = time.monotonic()
    channels.close()
    assert {type(thread.end()) for thread in asking} == {SessionEndedError}
    assert time.monotonic() - start_s < TIMEOUT_S / 2
    with pytest.raises(SessionEndedError):
        channels.ask(PingRequest(), TIMEOUT_S)


def test_a_connection_that_broke_is_opened_again(listener: socket.socket, channels: RequestChannels) -> None:
    asking = Asking(channels)
    peer = Peer(listener)
    peer.next_request()
    peer.socket.close()
    assert isinstance(asking.end(), SessionEndedError)
    again = Asking(channels)
    peer = Peer(listener)
    peer.answer(peer.next_request())
    assert again.end() is None
    # It breaks while nothing is under way: then nothing is lost.
    peer.socket.close()
    third = Asking(channels)
    peer = Peer(listener)
    peer.answer(peer.next_request())
    assert third.end() is None


def test_a_reply_that_cannot_be_read_is_an_error_and_the_next_one_is_right(
    listener: socket.socket, channels: RequestChannels
) -> None:
    asking = Asking(channels)
    peer = Peer(listener)
    peer.next_request()
    peer.socket.sendall(b"\xff" * 100)
    assert isinstance(asking.end(), ProtocolError)
    again = Asking(channels)
    peer = Peer(listener)
    peer.answer(peer.next_request())
    assert again.end() is None


def test_a_daemon_of_another_user_is_sent_nothing(
    listener: socket.socket, channels: RequestChannels, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("krul_backend.daemon.client.request_channel.peer_of", lambda peer: (1, 12345))
    with pytest.raises(DaemonError, match="belongs to user 12345"):
        channels.ask(PingRequest(), TIMEOUT_S)
    assert Peer(listener).socket.recv(1) == b""


def test_a_large_request_arrives_though_it_does_not_fit_into_the_socket(
    listener: socket.socket, channels: RequestChannels
) -> None:
    asked = threading.Thread(
        target=lambda: channels.ask(PingRequest(), TIMEOUT_S, np.arange(1_000_000, dtype=np.int64))
    )
    asked.start()
    peer = Peer(listener)
    request = peer.next_request()
    peer.answer(request)
    asked.join(TIMEOUT_S)
    assert not asked.is_alive()
