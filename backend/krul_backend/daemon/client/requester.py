"""Asking a daemon that may be absent, and what follows from it when no answer comes."""

from __future__ import annotations

import contextlib
import logging
import threading
from collections.abc import Callable
from typing import Any, TypeVar

from krul_backend.daemon.client.daemon_connection import DaemonConnection
from krul_backend.daemon.client.daemon_link import DaemonLink
from krul_backend.daemon.client.request_channel import RequestHead, RequestTimeoutError, SessionEndedError
from krul_backend.daemon.protocol.admin_messages import PingRequest
from krul_backend.daemon.protocol.messages import Reply, Request, op_of
from krul_backend.errors import DaemonError, StoreClosedError
from krul_backend.segment import ModelIdentity, TokenIds

logger = logging.getLogger(__name__)

UNANSWERED = (DaemonError, StoreClosedError)
"""Errors of asking, not of what was asked: the engine does without."""

R = TypeVar("R", bound=Reply)


class Requester:
    """Requests over a link's connection. Thread-safe.

    Args:
        link: the caller's.
        timeout_s: for replies, where a call does not say otherwise.
    """

    def __init__(self, link: DaemonLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def attempt(
        self,
        make: Callable[[RequestHead], Request[R]],
        model: ModelIdentity | None = None,
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> R | None:
        """Ask for what grants nothing. None: there is no answer.

        What may take longer than usual is asked of a daemon that answers a ping: one that hangs is found out
        within the usual time.

        Raises:
            ManifestError, KeyError, ValueError, TierReadError: the answer is this error.
        """
        connection = self._link.current()
        if connection is None:
            return None
        request = make(connection.channels.head())
        try:
            if timeout_s is not None and timeout_s > self._timeout_s:
                self.ask(connection, PingRequest(**connection.channels.head()))
            return self.ask(connection, request, model, timeout_s=timeout_s, token_ids=token_ids)
        except UNANSWERED as error:
            self.note(connection, op_of(request), error)
            return None

    def ask(
        self,
        connection: DaemonConnection,
        request: Request[R],
        model: ModelIdentity | None = None,
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> R:
        """Raises as ``RequestChannels.ask``; of ``UNANSWERED``, ``note`` has to be told.

        ``model`` is the one that the request names; it is introduced if it never was.
        """
        self._link.count(requests=1)
        if model is not None:
            connection.say_hello(model, self._timeout_s)
        timeout_s = timeout_s if timeout_s is not None else self._timeout_s
        return connection.channels.ask(request, timeout_s, token_ids)

    def note(self, connection: DaemonConnection, op: str, error: Exception) -> None:
        """Draw the conclusions from one of ``UNANSWERED``."""
        if isinstance(error, RequestTimeoutError):
            self._link.count(timeouts=1)
            self._link.suspect(connection)
        elif not isinstance(error, SessionEndedError):
            self._link.count(failures=1)
            with self._lock:
                is_new = op not in self._said
                self._said.add(op)
            if is_new:
                logger.error("krul daemon cannot answer %r (said once): %s", op, error)

    def post(self, connection: DaemonConnection, request: Request[Any]) -> None:
        """Send what gives something back, after all that this thread sent before, without waiting."""
        # Of a session that is over, everything was given back.
        with contextlib.suppress(SessionEndedError):
            connection.channels.post(request)
