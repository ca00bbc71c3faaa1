"""Keeps track of connected clients: each has a stream socket, which closes when the client ends."""

from __future__ import annotations

import logging
import os
import secrets
import select
import socket
import time
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from krul_backend.daemon.protocol.frames import encode
from krul_backend.daemon.protocol.messages import PROTOCOL_VERSION, SessionGreeting
from krul_backend.daemon.protocol.runtime_dir import peer_of
from krul_backend.segment import FORMAT_VERSION, ModelIdentity
from krul_backend.tiers.common.interface import Clock, Lease, Reservation

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SESSIONS = 1024
SILENCE_S = 5.0
"""When there are too many sessions, those that are older than this and never sent a request are closed."""


@dataclass(eq=False)
class Held(Generic[T]):
    """Keeps one kind of grants of a client (leases, or reservations), by numbers that the client chose.

    ``pending`` was asked for and is not answered yet. A number is taken out before the answer if the client
    gives back what it asked for.
    """

    granted: dict[int, T] = field(default_factory=dict)
    pending: set[int] = field(default_factory=set)

    def take(self, number: int) -> T | None:
        """Take out what the client gives back; None if it was not granted (yet)."""
        self.pending.discard(number)
        return self.granted.pop(number, None)


@dataclass(eq=False)
class Session:
    """A connected client and what it holds. ``in_use``: how many calls in other threads use a lease.

    Used by the server's thread alone.
    """

    token: str
    connection: socket.socket
    pid: int
    connected_s: float
    has_spoken: bool = False
    models: dict[str, ModelIdentity] = field(default_factory=dict)
    leases: Held[Lease] = field(default_factory=Held)
    in_use: Counter[int] = field(default_factory=Counter)
    reservations: Held[Reservation] = field(default_factory=Held)


class SessionTable:
    """Accepts clients, greets them with the arena's descriptor, and notices their end.

    ``fileno`` can be polled: it is readable when ``serve`` has something to do. ``serve`` never waits.

    Args:
        path: where the socket is made; must not exist.
        arena_fileno: the descriptor that each client is sent; not owned.
        capacity_bytes: the arena's size.
        filter_fileno: the one of the store's ``PageFilter``, if it has one; sent after the arena's.
        on_end: called with each session that has ended, when it is no longer in the table.
    """

    def __init__(
        self,
        path: Path,
        arena_fileno: int,
        capacity_bytes: int,
        on_end: Callable[[Session], None],
        clock: Clock = time.monotonic,
        filter_fileno: int | None = None,
    ) -> None:
        self._filenos = [arena_fileno] if filter_fileno is None else [arena_fileno, filter_fileno]
        self._capacity_bytes = capacity_bytes
        self._on_end = on_end
        self._clock = clock
        self._by_token: dict[str, Session] = {}
        self._by_fileno: dict[int, Session] = {}
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        self._listener.setblocking(False)
        self._listener.bind(os.fspath(path))
        os.chmod(path, 0o600)
        self._listener.listen(128)
        self._epoll = select.epoll()
        # Edge-triggered: while no file can be opened, clients wait, and are not heard of again and again.
        self._epoll.register(self._listener, select.EPOLLIN | select.EPOLLET)

    def fileno(self) -> int:
        return self._epoll.fileno()

    def __len__(self) -> int:
        return len(self._by_token)

    def __iter__(self) -> Iterator[Session]:
        return iter(self._by_token.values())

    def find(self, token: str) -> Session | None:
        """The session with this token, or None. Notes that it has sent a request."""
        session = self._by_token.get(token)
        if session is not None:
            session.has_spoken = True
        return session

    def serve(self) -> None:
        """Greet clients that connect, end the sessions of those that are gone."""
        for fileno, _ in self._epoll.poll(0):
            session = self._by_fileno.get(fileno)
            if session is not None:
                self._hear(session)
            elif fileno == self._listener.fileno():
                self._accept_all()

    def close(self) -> None:
        """Disconnect everybody. What they hold is left as it is."""
        self._listener.close()
        self._epoll.close()
        for session in self:
            session.connection.close()
        self._by_token.clear()
        self._by_fileno.clear()

    def _accept_all(self) -> None:
        while True:
            try:
                connection, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Too many open files, say. The client is told nothing; when it, or another one, connects
                # again, those that wait are accepted, too.
                logger.warning("no client can be accepted now: %s", error)
                return
            self._welcome(connection)

    def _welcome(self, connection: socket.socket) -> None:
        try:
            pid, uid = peer_of(connection)
            if not is_own_user(uid):
                logger.warning("refused a client of user %d (process %d)", uid, pid)
                connection.close()
                return
            if not self._make_room():
                logger.warning("refused a client (process %d): %d sessions are open", pid, len(self))
                connection.close()
                return
            self._greet(connection, pid)
        except OSError as error:
            logger.debug("a client left before it was greeted: %s", error)
            connection.close()

    def _greet(self, connection: socket.socket, pid: int) -> None:
        # Non-blocking: a fresh connection has room for one line.
        connection.setblocking(False)
        token = secrets.token_hex(16)
        greeting = SessionGreeting(
            protocol=PROTOCOL_VERSION, format=FORMAT_VERSION, token=token, capacity_bytes=self._capacity_bytes
        )
        line = encode(greeting) + b"\n"
        if socket.send_fds(connection, [line], self._filenos) != len(line):
            raise BlockingIOError("the greeting was not taken at once")
        session = Session(token, connection, pid, self._clock())
        self._epoll.register(connection, select.EPOLLIN | select.EPOLLRDHUP)
        self._by_fileno[connection.fileno()] = session
        self._by_token[token] = session
        logger.info("session of process %d opened, %d open", pid, len(self))

    def _hear(self, session: Session) -> None:
        try:
            heard = session.connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            heard = b""
        if heard:
            logger.warning("ended the session of process %d: nothing may be said there", session.pid)
        self._end(session)

    def _end(self, session: Session) -> None:
        self._epoll.unregister(session.connection)
        del self._by_fileno[session.connection.fileno()]
        del self._by_token[session.token]
        session.connection.close()
        logger.info("session of process %d ended, %d open", session.pid, len(self))
        self._on_end(session)

    def _make_room(self) -> bool:
        """Whether there is room for one more session; closes those that were silent if need be."""
        if len(self) >= MAX_SESSIONS:
            now_s = self._clock()
            silent = [
                session
                for session in self
                if not session.has_spoken and now_s - session.connected_s > SILENCE_S
            ]
            for session in silent:
                self._end(session)
        return len(self) < MAX_SESSIONS


def is_own_user(uid: int) -> bool:
    """Whether a peer's user is the daemon's. Nobody else may map the arena, not even root."""
    return uid == os.geteuid()
