"""Keeps the sessions of the daemon's clients, each until the connection that opened it is closed."""

from __future__ import annotations

import logging
import secrets
from collections import Counter
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from krul_backend.daemon.server.connections import Connection
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.interface import Lease, Reservation

logger = logging.getLogger(__name__)

T = TypeVar("T")

MAX_SESSIONS = 1024


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
    connection: Connection
    models: dict[str, ModelIdentity] = field(default_factory=dict)
    leases: Held[Lease] = field(default_factory=Held)
    in_use: Counter[int] = field(default_factory=Counter)
    reservations: Held[Reservation] = field(default_factory=Held)


class SessionTable:
    """Finds sessions by their tokens, and by the connections that opened them."""

    def __init__(self) -> None:
        self._by_token: dict[str, Session] = {}
        self._by_connection: dict[Connection, Session] = {}

    def __len__(self) -> int:
        return len(self._by_token)

    def find(self, token: str) -> Session | None:
        return self._by_token.get(token)

    def opened_by(self, connection: Connection) -> Session | None:
        return self._by_connection.get(connection)

    def open(self, connection: Connection) -> Session | None:
        """A new session of a connection that has none; None if there are too many."""
        if len(self) >= MAX_SESSIONS:
            logger.warning("refused a client (process %d): %d sessions are open", connection.pid, len(self))
            return None
        session = Session(secrets.token_hex(16), connection)
        self._by_token[session.token] = session
        self._by_connection[connection] = session
        logger.info("session of process %d opened, %d open", connection.pid, len(self))
        return session

    def end(self, session: Session) -> None:
        del self._by_token[session.token]
        del self._by_connection[session.connection]
        logger.info("session of process %d ended, %d open", session.connection.pid, len(self))
