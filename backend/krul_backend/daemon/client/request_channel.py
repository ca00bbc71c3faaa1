"""Sends requests over ZeroMQ from many threads: each has a DEALER, since sockets are not thread-safe."""

from __future__ import annotations

import itertools
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import msgspec
import zmq

from krul_backend.daemon.protocol.frames import decode_reply, encode, encode_token_ids
from krul_backend.daemon.protocol.messages import EXCEPTIONS, MAX_FRAME_BYTES, ErrorReply, R, Reply, Request
from krul_backend.errors import DaemonUnreachableError, ProtocolError
from krul_backend.segment import TokenIds

_POLL_MS = 20
"""How soon a waiting thread notices that its session ended."""


class RequestTimeoutError(DaemonUnreachableError):
    """No reply came in time. The daemon may still do what was asked."""


class SessionEndedError(DaemonUnreachableError):
    """The session that the request belongs to is over."""


class _Channel:
    """A DEALER that one thread at a time uses. ``lock``: another thread may close it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], endpoint: str) -> None:
        self.lock = threading.Lock()
        self.socket = context.socket(zmq.DEALER)
        self.socket.setsockopt(zmq.LINGER, 0)
        # No high-water mark, or a release could be dropped. The queue stays short all the same: a thread
        # waits for all replies but those to releases, of which there are at most as many as grants.
        self.socket.setsockopt(zmq.SNDHWM, 0)
        self.socket.setsockopt(zmq.MAXMSGSIZE, MAX_FRAME_BYTES)
        self.socket.connect(endpoint)

    def send(self, request: Request[Any], token_ids: TokenIds | None) -> None:
        frames = [encode(request)]
        if token_ids is not None:
            frames.append(encode_token_ids(token_ids))
        self.socket.send_multipart(frames)

    def drop_replies(self) -> None:
        """Throw away replies that nobody waits for: late ones, and those to releases."""
        try:
            while True:
                self.socket.recv_multipart(zmq.NOBLOCK)
        except zmq.Again:
            return


class _Use:
    """A thread holds this while it lives; when it is collected, its channel is free for another thread."""

    def __init__(self, channel: _Channel) -> None:
        self.channel = channel


class RequestChannels:
    """Sends all requests of one session, or to one admin endpoint. Thread-safe.

    Each thread has a channel of its own. When it ends, the channel stays open for the next new thread:
    closing it would drop a release that was posted last and is not sent yet.

    Args:
        context: not owned.
        endpoint: as ZeroMQ writes it.
        token: the session's; empty for an admin endpoint.
        has_ended: returns whether no reply will come any more.
    """

    def __init__(
        self,
        context: zmq.Context[zmq.Socket[bytes]],
        endpoint: str,
        token: str = "",
        *,
        has_ended: Callable[[], bool] = lambda: False,
    ) -> None:
        self._context = context
        self._endpoint = endpoint
        self._token = token
        self._has_ended = has_ended
        self._ids = itertools.count(1)
        self._of_thread = threading.local()
        self._lock = threading.Lock()
        self._channels: list[_Channel] = []
        self._unused: deque[_Channel] = deque()
        self._is_closed = False

    def ask(self, request: Request[R], timeout_s: float, token_ids: TokenIds | None = None) -> R:
        """Send a request and wait for its result; replies to earlier requests are dropped by their ids.

        Raises:
            RequestTimeoutError: no reply within ``timeout_s``.
            SessionEndedError: the session is over, so nobody will reply.
            ProtocolError: the reply cannot be read, or is none to this request.
            ManifestError, KeyError, ValueError, StoreClosedError, TierReadError, DaemonError: the daemon's
                answer is this error.
        """
        deadline_s = time.monotonic() + timeout_s
        request = self._addressed(request)
        channel = self._channel()
        with channel.lock:
            self._check_open()
            channel.drop_replies()
            channel.send(request, token_ids)
            while True:
                remaining_ms = (deadline_s - time.monotonic()) * 1000
                if remaining_ms <= 0:
                    raise RequestTimeoutError(f"no answer from {self._endpoint} within {timeout_s:g} s")
                if channel.socket.poll(max(1, min(_POLL_MS, int(remaining_ms)))):
                    reply = _decode(channel.socket.recv_multipart(), request)
                    if reply is not None:
                        break
                self._check_open()
        if isinstance(reply, ErrorReply):
            raise EXCEPTIONS[reply.code](reply.message)
        return reply.result

    def post(self, request: Request[Any]) -> None:
        """Send a request whose reply does not matter, after all earlier ones of this thread. Never waits."""
        channel = self._channel()
        with channel.lock:
            if not self._is_closed:
                channel.drop_replies()
                channel.send(self._addressed(request), None)

    def close(self) -> None:
        """Close the sockets of all threads. Before ``has_ended`` is true this waits for their requests."""
        with self._lock:
            self._is_closed = True
            channels = list(self._channels)
        for channel in channels:
            with channel.lock:
                channel.socket.close(0)

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
        channel = _Channel(self._context, self._endpoint)
        self._channels.append(channel)
        return channel

    def _check_open(self) -> None:
        if self._is_closed or self._has_ended():
            raise SessionEndedError(f"the daemon at {self._endpoint} is gone")


def _decode(frames: list[bytes], request: Request[R]) -> Reply[R] | ErrorReply | None:
    if len(frames) != 1:
        raise ProtocolError(f"expected a reply of one frame, got {len(frames)}")
    return decode_reply(frames[0], request)
