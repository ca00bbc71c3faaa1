"""What a client has while it is connected to a daemon."""

from __future__ import annotations

import threading

import zmq

from krul_backend.daemon.client.client_session import ClientSession
from krul_backend.daemon.client.request_channel import RequestChannels
from krul_backend.daemon.client.views import ArenaBytes
from krul_backend.daemon.protocol.messages import MAX_MODELS, HelloRequest
from krul_backend.segment import FORMAT_VERSION, ModelIdentity


class DaemonConnection:
    """One session with a daemon, its request channels, and the models that it said hello with."""

    def __init__(self, session: ClientSession, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.session = session
        self.channels = RequestChannels(
            context, session.control_endpoint, session.token, has_ended=lambda: not session.is_alive
        )
        self._lock = threading.Lock()
        self._known: dict[str, None] = {}

    @property
    def arena(self) -> ArenaBytes:
        return self.session.arena

    def say_hello(self, model: ModelIdentity, timeout_s: float) -> None:
        """Introduce a model to the daemon, unless it knows it. Raises as ``RequestChannels.ask``."""
        if model.fingerprint in self._known:
            return
        request = HelloRequest(
            **self.channels.head(),
            format=FORMAT_VERSION,
            model=model,
            fingerprint=model.fingerprint,
        )
        self.channels.ask(request, timeout_s)
        with self._lock:
            self._known[model.fingerprint] = None
            if len(self._known) > MAX_MODELS // 2:
                del self._known[next(iter(self._known))]

    def close(self) -> None:
        self.session.close()
        self.channels.close()
