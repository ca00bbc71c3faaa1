"""Sends requests to the daemon from many threads: each has a connection of its own."""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import socket
import threading
import time
import weakref
from collections import deque
from pathlib import Path
from typing import Any

import msgspec

from krul_backend.daemon.protocol.frames import Inbox, decode_reply, encode, encode_token_ids, pack
from krul_backend.daemon.protocol.messages import EXCEPTIONS, ErrorReply, R, Reply, Request
from krul_backend.daemon.protocol.runtime_dir import is_own_user, peer_of
from krul_backend.errors import DaemonError, DaemonUnreachableError, ProtocolError
from krul_backend.segment import TokenIds

_RECEIVED_BYTES = 1 << 16
_RETRY_S = 0.02
"""Seconds until bytes that a hanging daemon did not take are sent again."""


class RequestTimeoutError(DaemonUnreachableError):
    """No reply came in time. The daemon may still do what was asked."""


class SessionEndedError(DaemonUnreachableError):
    """The session that the request belongs to is over, or the connection that it was sent on."""


def connect_to_daemon(path: Path, timeout_s: float) -> socket.socket:
    """A connection to the daemon that listens at ``path``, with this time-out.

    Raises:
        OSError: nobody listens there; BlockingIOError: so many wait there that this one would have to wait.
        DaemonError: a process of another user listens. It would be handed prompts.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
    try:
        connection.settimeout(timeout_s)
        connection.connect(os.fspath(path))
        _, uid = peer_of(connection)
        if not is_own_user(uid):
            raise DaemonError(
                f"the process that serves {path} belongs to user {uid}, not to user {os.geteuid()}"
            )
    except BaseException:
        connection.close()
        raise
    return connection


def _wait_until_writable(connection: socket.socket, timeout_s: float) -> None:
    """Wait until something can be sent. Not ``select.select``, which knows the first 1024 files alone."""
    poll = select.poll()
    poll.register(connection, select.POLLOUT)
    poll.poll(1000 * timeout_s)


class _Channel:
    """A connection that one thread at a time uses: made for its first request, and again when it has broken.

    Whoever calls anything but ``interrupt`` holds ``lock``.
    """

    def __init__(self, path: Path) -> None:
        self.lock = threading.Lock()
        self._path = path
        self._socket: socket.socket | None = None
        # Nobody may close a socket while another thread shuts it down: its number may soon be another file's.
        self._closing = threading.Lock()
        self._readable = select.poll()
        self._inbox = Inbox()
        self._unsent = bytearray()

    def send(self, message: bytes) -> bool:
        """Send a message after all earlier ones, without waiting. False: not all of it was taken yet.

        What a broken connection had not taken before is lost. Raises OSError if there is no daemon.
        """
        self._unsent += message
        try:
            return self.send_rest()
        except OSError:
            self.drop()
        self._unsent += message
        return self.send_rest()

    def send_rest(self) -> bool:
        """Send what was not taken yet, without waiting; whether all of it is now. Raises OSError."""
        try:
            connection = self._socket or self._connect()
            while self._unsent:
                del self._unsent[: connection.send(self._unsent)]
        except BlockingIOError:
            return False
        return True

    def receive(self, until_s: float) -> bytes:
        """The JSON of the next reply. What has come of a reply that is late is kept.

        Raises:
            TimeoutError: no reply has come in time, or the request before it was not taken.
            OSError: the connection has ended.
            ProtocolError: what comes cannot be taken apart into replies.
        """
        while not self.send_rest():
            remaining_s = until_s - time.monotonic()
            if remaining_s <= 0:
                raise TimeoutError
            if self._socket is None:
                time.sleep(min(_RETRY_S, remaining_s))
            else:
                _wait_until_writable(self._socket, remaining_s)
        while (message := self._inbox.next()) is None:
            self._readable.poll(max(0.0, 1000 * (until_s - time.monotonic())))
            if not self._take_received() and time.monotonic() >= until_s:
                raise TimeoutError
        return message[0]

    def drop_replies(self) -> None:
        """Throw away replies that nobody waits for: late ones, and those to releases."""
        with contextlib.suppress(OSError):
            while self._socket is not None and self._take_received():
                while self._inbox.next() is not None:
                    pass

    def drop(self) -> None:
        """Close the connection, and forget what was not sent on it."""
        with self._closing:
            if self._socket is not None:
                self._readable.unregister(self._socket)
                self._socket.close()
            self._socket = None
        self._inbox = Inbox()
        self._unsent.clear()

    def interrupt(self) -> None:
        """Make whoever waits here fail at once. For any thread."""
        with self._closing, contextlib.suppress(OSError):
            if self._socket is not None:
                self._socket.shutdown(socket.SHUT_RDWR)

    def _connect(self) -> socket.socket:
        self._socket = connect_to_daemon(self._path, 0)
        self._readable.register(self._socket, select.POLLIN)
        return self._socket

    def _take_received(self) -> bool:
        """Read what has arrived; return whether anything has. Raises OSError if the connection has ended."""
        if self._socket is None:
            raise ConnectionResetError("the connection was closed")
        try:
            received = self._socket.recv(_RECEIVED_BYTES)
        except BlockingIOError:
            return False
        if not received:
            raise ConnectionResetError("the daemon closed the connection")
        self._inbox.add(received)
        return True


class _Use:
    """A thread holds this while it lives; when it is collected, its channel is free for another thread."""

    def __init__(self, channel: _Channel) -> None:
        self.channel = channel


class RequestChannels:
    """Sends all requests of one session, or of a client without one. Thread-safe.

    Each thread has a channel of its own. When it ends, the channel stays open for the next new thread.

    Args:
        path: the daemon's socket.
        token: the session's; empty without one.
    """

    def __init__(self, path: Path, token: str = "") -> None:
        self._path = path
        self._token = token
        self._ids = itertools.count(1)
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._channels: list[_Channel] = []
        self._unused: deque[_Channel] = deque()
        self._late: set[_Channel] = set()
        self._is_closed = threading.Event()

    def ask(self, request: Request[R], timeout_s: float, token_ids: TokenIds | None = None) -> R:
        """Send a request and wait for its result; replies to earlier requests are dropped by their ids.

        Raises:
            RequestTimeoutError: no reply within ``timeout_s``.
            SessionEndedError: the session is over, so nobody will reply.
            ProtocolError: the reply cannot be read, or is none to this request; or the request is too large.
            ManifestError, KeyError, ValueError, StoreClosedError, TierReadError, DaemonError: the daemon's
                answer is this error.
        """
        until_s = time.monotonic() + timeout_s
        request = self._addressed(request)
        message = pack(encode(request), b"" if token_ids is None else encode_token_ids(token_ids))
        channel = self._channel()
        with channel.lock:
            try:
                reply = self._round_trip(channel, request, message, until_s)
            except TimeoutError:
                self._send_late(channel)
                raise RequestTimeoutError(f"no answer from {self._path} within {timeout_s:g} s") from None
            except OSError as error:
                channel.drop()
                raise SessionEndedError(f"the daemon at {self._path} is gone: {error}") from error
        if isinstance(reply, ErrorReply):
            raise EXCEPTIONS[reply.code](reply.message)
        return reply.result

    def post(self, request: Request[Any]) -> None:
        """Send a request whose reply does not matter, after all earlier ones of this thread. Never waits."""
        message = pack(encode(self._addressed(request)))
        channel = self._channel()
        with channel.lock:
            if self._is_closed.is_set():
                return
            channel.drop_replies()
            try:
                if not channel.send(message):
                    self._send_late(channel)
            except OSError:
                channel.drop()

    def close(self) -> None:
        """Close all connections: requests under way fail at once. May be called again."""
        with self._lock:
            self._is_closed.set()
            channels = list(self._channels)
        for channel in channels:
            channel.interrupt()
        for channel in channels:
            with channel.lock:
                channel.drop()

    def _round_trip(
        self, channel: _Channel, request: Request[R], message: bytes, until_s: float
    ) -> Reply[R] | ErrorReply:
        self._check_open()
        channel.send(message)
        # Once more: from here on ``close`` interrupts the connection, which may be a new one.
        self._check_open()
        while True:
            try:
                frame = channel.receive(until_s)
            except ProtocolError:
                channel.drop()
                raise
            reply = decode_reply(frame, request)
            if reply is not None:
                return reply

    def _addressed(self, request: Request[R]) -> Request[R]:
        return msgspec.structs.replace(request, token=self._token, id=next(self._ids))

    def _channel(self) -> _Channel:
        use: _Use | None = getattr(self._of_thread, "use", None)
        if use is None:
            with self._lock:
                self._check_open()
                use = _Use(self._unused.popleft() if self._unused else self._new_channel())
            # Called when the thread has ended, by whichever thread then collects garbage: it must not lock.
            weakref.finalize(use, self._unused.append, use.channel).atexit = False
            self._of_thread.use = use
        return use.channel

    def _new_channel(self) -> _Channel:
        channel = _Channel(self._path)
        self._channels.append(channel)
        return channel

    def _check_open(self) -> None:
        if self._is_closed.is_set():
            raise SessionEndedError(f"the daemon at {self._path} is gone")

    def _send_late(self, channel: _Channel) -> None:
        """Have a thread send what the daemon did not take: this thread may never send anything again."""
        with self._lock:
            is_first = not self._late
            self._late.add(channel)
        if is_first:
            threading.Thread(target=self._send_all_late, name="krul-late-requests", daemon=True).start()

    def _send_all_late(self) -> None:
        while not self._is_closed.wait(_RETRY_S):
            with self._lock:
                late = list(self._late)
            for channel in late:
                with channel.lock:
                    try:
                        is_sent = channel.send_rest()
                    except OSError:
                        channel.drop()
                        is_sent = True
                    if is_sent:
                        with self._lock:
                            self._late.discard(channel)
            with self._lock:
                if not self._late:
                    return
