"""A daemon in a thread that does what a test says: it stores nothing, and can be wrong or silent."""

from __future__ import annotations

import contextlib
import mmap
import os
import selectors
import socket
import threading
from collections.abc import Callable
from pathlib import Path

from krul_backend.daemon.protocol.frames import Inbox, decode_request, encode, pack
from krul_backend.daemon.protocol.messages import (
    AbortRequest,
    ClearRequest,
    ErrorReply,
    FindMissingRequest,
    HelloRequest,
    LeaseRequest,
    OpenRequest,
    PingRequest,
    ReleaseRequest,
    Reply,
    Request,
    ReserveRequest,
    SessionGreeting,
    op_of,
)
from krul_backend.daemon.protocol.runtime_dir import SOCKET_NAME
from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.common.interface import Span

CAPACITY_BYTES = 4096
Answer = Callable[[Request], object]

NO_REPLY = object()


class FakeDaemon:
    """Serves ``runtime_dir`` until ``stop``.

    ``answers`` replaces the result of an operation; it may also be ``NO_REPLY`` or an ``ErrorReply``.
    ``requests`` are all that came but those that opened sessions, in order. While ``is_hung`` is set, nothing
    is read.
    """

    def __init__(self, runtime_dir: Path) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.is_hung = threading.Event()
        self._path = runtime_dir / SOCKET_NAME
        self._memory = os.memfd_create("fake-arena")
        os.ftruncate(self._memory, CAPACITY_BYTES)
        self.arena = mmap.mmap(self._memory, CAPACITY_BYTES)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._path))
        self._listener.listen()
        self._selector = selectors.DefaultSelector()
        self._selector.register(self._listener, selectors.EVENT_READ)
        self._sessions: list[socket.socket] = []
        self._is_over = threading.Event()
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def ops(self) -> list[str]:
        return [op_of(request) for request in self.requests]

    def end_sessions(self) -> None:
        """What clients see when the process is killed: only the connection's end."""
        # A client is back at once, with a session that lives on.
        sessions, self._sessions = self._sessions, []
        for session in sessions:
            session.shutdown(socket.SHUT_RDWR)

    def end_connections(self) -> None:
        """Close every connection on which requests come; sessions last."""
        for key in list(self._selector.get_map().values()):
            peer = key.fileobj
            if peer is not self._listener and peer not in self._sessions:
                assert isinstance(peer, socket.socket)
                peer.shutdown(socket.SHUT_RDWR)

    def stop(self) -> None:
        """May be called again."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            assert isinstance(key.fileobj, socket.socket)
            key.fileobj.close()
        self._selector.close()
        os.close(self._memory)
        self._path.unlink(missing_ok=True)

    def _serve(self) -> None:
        while not self._is_over.is_set():
            ready = self._selector.select(0.005)
            # Asked after the wait: what comes from now on is not answered.
            if self.is_hung.is_set():
                self._is_over.wait(0.005)
                continue
            for key, _ in ready:
                if key.fileobj is self._listener:
                    peer, _ = self._listener.accept()
                    self._selector.register(peer, selectors.EVENT_READ, Inbox())
                else:
                    assert isinstance(key.fileobj, socket.socket)
                    self._receive(key.fileobj, key.data)

    def _receive(self, peer: socket.socket, inbox: Inbox) -> None:
        # A client that waited too long has gone.
        with contextlib.suppress(ConnectionError):
            received = peer.recv(1 << 16)
            inbox.add(received)
            while (message := inbox.next()) is not None:
                self._answer(peer, decode_request(message[0]))
            if received:
                return
        self._selector.unregister(peer)
        with contextlib.suppress(ValueError):
            self._sessions.remove(peer)
        peer.close()

    def _answer(self, peer: socket.socket, request: Request) -> None:
        descriptors = []
        if isinstance(request, OpenRequest):
            self._sessions.append(peer)
            descriptors = [self._memory]
        else:
            self.requests.append(request)
        result = self.answers.get(op_of(request), _usual_result)(request)
        if result is not NO_REPLY:
            reply = result if isinstance(result, ErrorReply) else Reply(id=request.id, result=result)
            socket.send_fds(peer, [pack(encode(reply))], descriptors)


def _usual_result(request: Request) -> object:
    """Everything is missing, nothing is leased; reservations are the arena's first bytes."""
    match request:
        case OpenRequest():
            return SessionGreeting(FORMAT_VERSION, "token", CAPACITY_BYTES)
        case HelloRequest() | PingRequest() | ReleaseRequest() | AbortRequest() | ClearRequest():
            return None
        case FindMissingRequest():
            return ((0, len(request.page_keys)),)
        case LeaseRequest():
            return ()
        case ReserveRequest():
            offsets = [sum(request.layer_num_bytes[:i]) for i in range(len(request.layer_num_bytes))]
            spans = zip(offsets, request.layer_num_bytes, strict=True)
            return tuple(Span(*span) for span in spans)
    raise AssertionError(f"no test asks a fake daemon for {request}")
