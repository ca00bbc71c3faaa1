"""The sockets of the daemon: whoever connects sends requests, and gets replies."""

from __future__ import annotations

import contextlib
import logging
import os
import select
import socket
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from krul_backend.daemon.protocol.frames import Inbox
from krul_backend.daemon.protocol.runtime_dir import is_own_user, peer_of
from krul_backend.errors import DaemonError, ProtocolError
from krul_backend.tiers.common.interface import Clock

logger = logging.getLogger(__name__)

MAX_CONNECTIONS = 4096
SILENCE_S = 5.0
"""When there are too many connections, those that are older than this and never sent anything are closed."""

MAX_QUEUED_BYTES = 16 << 20
"""A peer that leaves more than this unread is cut off when there is one more reply for it."""

END_S = 0.5
"""Seconds to send the last replies when the daemon ends."""

_RECEIVED_BYTES = 1 << 16
_MAX_BATCH = 64
"""At most so many messages of one connection are handled before the next connection is served."""


class Connection:
    """One connected peer: what it sent and is not handled yet, and what it is still to be sent.

    Attributes:
        token: of the session that its last request was for; whoever receives its messages writes it.
        is_open: until either side has closed it.
        is_silent: nothing has come that looks like a message.
        has_messages: whole messages may have come that are not handled yet.
    """

    def __init__(self, peer: socket.socket, pid: int, now_s: float) -> None:
        self.socket = peer
        self.fileno = peer.fileno()
        self.pid = pid
        self.since_s = now_s
        self.token = ""
        self.is_open = True
        self.is_silent = True
        self.has_messages = False
        self.inbox = Inbox()
        self.outbox = bytearray()


class Connections:
    """Listens at a path, and moves messages from and to all who connect. Nothing here ever waits for a peer.

    Used by the server's thread alone.

    Args:
        path: where the socket is made; must not exist.
        waker: a descriptor that makes ``serve`` return when it is readable.
        on_message: called with each message, its JSON and its token ids, unchecked. It may send and close.
        on_garbage: called if what comes cannot be taken apart into messages, before its connection is closed.
        on_close: called when a connection was closed by either side. What it had sent was received, but not
            after garbage.

    Raises:
        DaemonError: the socket cannot be made.
    """

    def __init__(
        self,
        path: Path,
        waker: int,
        *,
        on_message: Callable[[Connection, bytes, bytes], None],
        on_garbage: Callable[[Connection, ProtocolError], None],
        on_close: Callable[[Connection], None],
        clock: Clock = time.monotonic,
    ) -> None:
        self._on_message = on_message
        self._on_garbage = on_garbage
        self._on_close = on_close
        self._waker = waker
        self._clock = clock
        self._by_fileno: dict[int, Connection] = {}
        self._with_more: dict[Connection, None] = {}
        self._said: set[str] = set()
        self._somebody_waits = False
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            self._listener.setblocking(False)
            self._listener.bind(os.fspath(path))
            os.chmod(path, 0o600)
            self._listener.listen(socket.SOMAXCONN)
        except OSError as error:
            self._listener.close()
            raise DaemonError(f"cannot serve at {path}: {error.strerror or error}") from error
        self._epoll = select.epoll()
        # Edge-triggered: while no file can be opened, clients wait, and are not heard of again and again.
        self._epoll.register(self._listener, select.EPOLLIN | select.EPOLLET)
        self._epoll.register(waker, select.EPOLLIN)

    def __len__(self) -> int:
        return len(self._by_fileno)

    def serve(self, wait_s: float) -> bool:
        """Accept, receive and send what can be now; if there is nothing, wait, for so long at most.

        Returns whether the waker is readable.
        """
        is_woken = False
        with_more, self._with_more = self._with_more, {}
        for fileno, events in self._epoll.poll(0 if with_more else wait_s):
            connection = self._by_fileno.get(fileno)
            if connection is not None:
                if events & select.EPOLLOUT:
                    self._send_queued(connection)
                if events & ~select.EPOLLOUT and connection.is_open:
                    with_more.pop(connection, None)
                    self._receive(connection)
            elif fileno == self._waker:
                is_woken = True
            else:
                self._accept_all()
        for connection in with_more:
            if connection.is_open:
                self._receive(connection)
        return is_woken

    def has_more(self, token: str) -> bool:
        """Return whether requests for this session have been received and are still to be handled."""
        return any(connection.token == token for connection in self._with_more)

    def send(self, connection: Connection, message: bytes, filenos: Sequence[int] = ()) -> None:
        """Send a message, now or when the peer takes it; drop it if the peer is gone.

        With descriptors it is sent now, or the connection is closed.
        """
        if not connection.is_open:
            return
        if connection.outbox:
            if filenos or len(connection.outbox) > MAX_QUEUED_BYTES:
                self._warn_once(
                    "cut off a client that does not read its replies", f"process {connection.pid}"
                )
                self.close_one(connection)
            else:
                connection.outbox += message
            return
        try:
            if filenos:
                num_sent = socket.send_fds(connection.socket, [message], list(filenos))
            else:
                num_sent = connection.socket.send(message)
        except BlockingIOError:
            num_sent = 0
        except OSError:
            return  # It is gone: its end is received next.
        if num_sent < len(message):
            if filenos and not num_sent:
                self.close_one(connection)
                return
            connection.outbox += message[num_sent:]
            self._epoll.modify(connection.fileno, select.EPOLLIN | select.EPOLLOUT)

    def close_one(self, connection: Connection) -> None:
        """Close a connection, with what is queued for it."""
        if not connection.is_open:
            return
        connection.is_open = False
        del self._by_fileno[connection.fileno]
        self._with_more.pop(connection, None)
        connection.socket.close()
        connection.outbox.clear()
        self._on_close(connection)
        if self._somebody_waits:
            self._accept_all()

    def close(self) -> None:
        """Disconnect everybody, after last replies. Nobody is told."""
        self._listener.close()
        end_s = self._clock() + END_S
        for connection in self._by_fileno.values():
            if connection.outbox:
                connection.socket.settimeout(max(0.001, end_s - self._clock()))
                with contextlib.suppress(OSError):
                    connection.socket.sendall(connection.outbox)
            connection.is_open = False
            connection.socket.close()
        self._by_fileno.clear()
        self._epoll.close()

    def _accept_all(self) -> None:
        self._somebody_waits = False
        while True:
            try:
                peer, _ = self._listener.accept()
            except BlockingIOError:
                return
            except OSError as error:
                # Too many open files, say. Those that wait are accepted when somebody else comes or goes.
                self._somebody_waits = True
                self._warn_once("no client can be accepted now", error)
                return
            self._welcome(peer)

    def _welcome(self, peer: socket.socket) -> None:
        try:
            pid, uid = peer_of(peer)
        except OSError:
            peer.close()
            return
        if not is_own_user(uid):
            logger.warning("refused a client of user %d (process %d)", uid, pid)
            peer.close()
            return
        if not self._make_room():
            self._warn_once("refused a client, too many connections are open", f"{len(self)}, process {pid}")
            peer.close()
            return
        peer.setblocking(False)
        connection = Connection(peer, pid, self._clock())
        self._by_fileno[connection.fileno] = connection
        self._epoll.register(connection.fileno, select.EPOLLIN)
        # What it sent at once may be all that it ever sends.
        self._receive(connection)

    def _make_room(self) -> bool:
        """Close silent connections if there are too many; return whether one more may be open."""
        if len(self) >= MAX_CONNECTIONS:
            before_s = self._clock() - SILENCE_S
            for connection in list(self._by_fileno.values()):
                if connection.is_silent and connection.since_s < before_s:
                    self.close_one(connection)
        return len(self) < MAX_CONNECTIONS

    def _receive(self, connection: Connection) -> None:
        received = b""
        if not connection.has_messages:
            try:
                received = connection.socket.recv(_RECEIVED_BYTES)
            except BlockingIOError:
                return
            except OSError:
                pass
            if not received:
                self.close_one(connection)
                return
            connection.inbox.add(received)
        connection.has_messages = self._hand_over(connection)
        # Without a short read in this turn there may be more in the socket.
        is_drained = 0 < len(received) < _RECEIVED_BYTES and not connection.has_messages
        if connection.is_open and not is_drained:
            self._with_more[connection] = None

    def _hand_over(self, connection: Connection) -> bool:
        """Have messages handled, so many at most; whether there may be more."""
        for _ in range(_MAX_BATCH):
            try:
                message = connection.inbox.next()
            except ProtocolError as error:
                self._on_garbage(connection, error)
                self.close_one(connection)
                return False
            if message is None:
                return False
            connection.is_silent = False
            self._on_message(connection, *message)
            if not connection.is_open:
                return False
        return True

    def _send_queued(self, connection: Connection) -> None:
        try:
            num_sent = connection.socket.send(connection.outbox)
        except BlockingIOError:
            return
        except OSError:
            # It is gone: what it sent last is still received.
            num_sent = len(connection.outbox)
        del connection.outbox[:num_sent]
        if not connection.outbox:
            self._epoll.modify(connection.fileno, select.EPOLLIN)

    def _warn_once(self, cause: str, details: object) -> None:
        if cause not in self._said:
            self._said.add(cause)
            logger.warning("%s (logged once per cause): %s", cause, details)
