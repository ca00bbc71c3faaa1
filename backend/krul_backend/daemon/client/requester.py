"""Asks a daemon that may be absent, and counts, logs and reports it when no answer comes."""

from __future__ import annotations

import logging
import threading

from krul_backend.daemon.client.client_session import DaemonConnection
from krul_backend.daemon.client.daemon_link import DaemonLink
from krul_backend.daemon.client.request_channel import RequestTimeoutError, SessionEndedError
from krul_backend.daemon.protocol.admin_messages import PingRequest
from krul_backend.daemon.protocol.messages import R, Request, op_of
from krul_backend.errors import DaemonError, StoreClosedError
from krul_backend.segment import ModelIdentity, TokenIds

logger = logging.getLogger(__name__)

UNANSWERED = (DaemonError, StoreClosedError)
"""Errors that mean that the daemon could not be asked, not that the request was wrong."""


class Requester:
    """Sends requests over a link's connection. Thread-safe.

    Args:
        link: not owned.
        timeout_s: how long to wait for a reply, where a call does not say otherwise.
    """

    def __init__(self, link: DaemonLink, timeout_s: float) -> None:
        self._link = link
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._said: set[str] = set()

    def attempt(
        self,
        request: Request[R],
        model: ModelIdentity | None = None,
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> R | None:
        """Ask for something that is not held afterwards (no lease, no reservation). None: there is no answer.

        A request that may take longer than usual is sent after a ping was answered, so that a daemon that
        hangs is noticed within the usual time.

        Raises:
            ManifestError, KeyError, ValueError, TierReadError: the answer is this error.
        """
        connection = self._link.current()
        if connection is None:
            return None
        try:
            if timeout_s is not None and timeout_s > self._timeout_s:
                self.ask(connection, PingRequest())
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
        """Send a request over a connection and wait for its reply.

        ``model`` is the one that the request names; it is introduced to the daemon if it never was. Raises as
        ``RequestChannels.ask``; the caller has to tell ``note`` of those that are ``UNANSWERED``.
        """
        self._link.count(requests=1)
        if model is not None:
            connection.say_hello(model, self._timeout_s)
        timeout_s = timeout_s if timeout_s is not None else self._timeout_s
        return connection.ask(request, timeout_s, token_ids)

    def note(self, connection: DaemonConnection, op: str, error: Exception) -> None:
        """Count and log one of ``UNANSWERED``; after a time-out, suspect the daemon."""
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
