"""A session of a client, and its requests."""

from __future__ import annotations

import zmq

from krul_backend.daemon.client_session import ClientSession
from krul_backend.daemon.replies import HelloReply
from krul_backend.daemon.request_channel import RequestChannels
from krul_backend.daemon.requests import HelloRequest
from krul_backend.daemon.views import Arena
from krul_backend.daemon.wire import model_to_wire
from krul_backend.segment import FORMAT_VERSION, ModelIdentity


class Connection:
    """One session, its requests, and the models that it said hello with."""

    def __init__(self, session: ClientSession, context: zmq.Context[zmq.Socket[bytes]]) -> None:
        self.session = session
        self.channels = RequestChannels(
            context, session.control_endpoint, session.token, has_ended=lambda: not session.is_alive
        )
        self._known: set[str] = set()

    @property
    def arena(self) -> Arena:
        return self.session.arena

    def say_hello(self, model: ModelIdentity, timeout_s: float) -> None:
        """Register a model, once. Raises as ``RequestChannels.ask``."""
        if model.fingerprint in self._known:
            return
        request = HelloRequest(
            **self.channels.head(),
            format=FORMAT_VERSION,
            model=model_to_wire(model),
            fingerprint=model.fingerprint,
        )
        self.channels.ask(request, HelloReply, timeout_s)
        self._known.add(model.fingerprint)

    def close(self) -> None:
        self.session.close()
        self.channels.close()
