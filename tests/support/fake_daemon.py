"""A daemon in a thread that does what a test says: it stores nothing, and can be wrong or silent."""

from __future__ import annotations

import contextlib
import mmap
import os
import socket
import threading
from collections.abc import Callable
from pathlib import Path

import zmq

from krul_backend.daemon.protocol.frames import decode_request, encode
from krul_backend.daemon.protocol.messages import (
    PROTOCOL_VERSION,
    AbortRequest,
    ClearRequest,
    ErrorReply,
    FindMissingRequest,
    HelloRequest,
    LeaseRequest,
    PingRequest,
    ReleaseRequest,
    Reply,
    Request,
    ReserveRequest,
    SessionGreeting,
    op_of,
)
from krul_backend.daemon.protocol.runtime_dir import CONTROL_SOCKET, SESSION_SOCKET
from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.common.interface import Span

CAPACITY_BYTES = 4096
Answer = Callable[[Request], object]

NO_REPLY = object()


class FakeDaemon:
    """Serves ``runtime_dir`` until ``stop``.

    ``answers`` replaces the result of an operation; it may also be ``NO_REPLY`` or an ``ErrorReply``.
    ``requests`` are all that came, in order. While ``is_hung`` is set, requests wait.
    """

    def __init__(self, runtime_dir: Path, *, protocol: int = PROTOCOL_VERSION) -> None:
        self.answers: dict[str, Answer] = {}
        self.requests: list[Request] = []
        self.is_hung = threading.Event()
        self._protocol = protocol
        self._paths = (runtime_dir / SESSION_SOCKET, runtime_dir / CONTROL_SOCKET)
        self._memory = os.memfd_create("fake-arena")
        os.ftruncate(self._memory, CAPACITY_BYTES)
        self.arena = mmap.mmap(self._memory, CAPACITY_BYTES)
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(str(self._paths[0]))
        self._listener.listen()
        self._sessions: list[socket.socket] = []
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._router = self._context.socket(zmq.ROUTER)
        self._router.bind(f"ipc://{self._paths[1]}")
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
            session.close()

    def stop(self) -> None:
        """May be called again."""
        if self._is_over.is_set():
            return
        self._is_over.set()
        self._thread.join()
        self.end_sessions()
        self._listener.close()
        self._context.destroy(linger=0)
        os.close(self._memory)
        for path in self._paths:
            path.unlink(missing_ok=True)

    def _serve(self) -> None:
        poller = zmq.Poller()
        poller.register(self._listener, zmq.POLLIN)
        poller.register(self._router, zmq.POLLIN)
        while not self._is_over.is_set():
            ready = [source for source, _ in poller.poll(5)]
            # Asked after the poll: what comes from now on is not answered.
            if self.is_hung.is_set():
                self._is_over.wait(0.005)
            elif self._router in ready:
                identity, *frames = self._router.recv_multipart()
                request = decode_request(frames[0])
                self.requests.append(request)
                result = self.answers.get(op_of(request), _usual_result)(request)
                if result is not NO_REPLY:
                    is_error = isinstance(result, ErrorReply)
                    reply = result if is_error else Reply(id=request.id, result=result)
                    self._router.send_multipart([identity, encode(reply)])
            elif ready:
                session, _ = self._listener.accept()
                greeting = SessionGreeting(self._protocol, FORMAT_VERSION, "token", CAPACITY_BYTES)
                # A client that waited too long has gone.
                with contextlib.suppress(BrokenPipeError):
                    socket.send_fds(session, [encode(greeting) + b"\n"], [self._memory])
                self._sessions.append(session)


def _usual_result(request: Request) -> object:
    """Everything is missing, nothing is leased; reservations are the arena's first bytes."""
    match request:
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
