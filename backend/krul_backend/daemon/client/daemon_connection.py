"""What a client has while it is connected to a daemon."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import zmq

from krul_backend.daemon.client.client_session import ClientSession
from krul_backend.daemon.client.request_channel import RequestChannels, RequestHead, SessionEndedError
from krul_backend.daemon.client.views import ArenaBytes
from krul_backend.daemon.protocol.messages import MAX_MODELS, HelloRequest, R, Request
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, TokenIds


class DaemonConnection:
    """One session with a daemon: its arena, its requests, and the models that it said hello with."""

    def __init__(self, session: ClientSession, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.session = session
        self._channels = RequestChannels(
            context, session.control_endpoint, session.token, has_ended=lambda: not session.is_alive
        )
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}

    @property
    def arena(self) -> ArenaBytes:
        return self.session.arena

    def head(self) -> RequestHead:
        """The fields that a new request begins with."""
        return self._channels.head()

    def ask(self, request: Request[R], timeout_s: float, token_ids: TokenIds | None = None) -> R:
        """Send a request and wait for its reply. Raises as ``RequestChannels.ask``."""
        return self._channels.ask(request, timeout_s, token_ids)

    def post(self, request: Request[Any]) -> None:
        """Send a request that gives something back, after all that this thread sent before. Never waits."""
        # When a session ends, the daemon takes back all that it granted.
        with contextlib.suppress(SessionEndedError):
            self._channels.post(request)

    def say_hello(self, model: ModelIdentity, timeout_s: float) -> None:
        """Introduce a model to the daemon, unless it knows it. Raises as ``RequestChannels.ask``."""
        if model.fingerprint in self._known:
            return
        request = HelloRequest(
            **self.head(),
            format=FORMAT_VERSION,
            model=model,
            fingerprint=model.fingerprint,
        )
        self._channels.ask(request, timeout_s)
        with self._lock:
            self._known[model.fingerprint] = None
            if len(self._known) > MAX_MODELS // 2:
                del self._known[next(iter(self._known))]

    def close(self) -> None:
        self.session.close()
        self._channels.close()
