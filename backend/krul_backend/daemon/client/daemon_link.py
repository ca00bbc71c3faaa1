"""Keeps a client connected to a daemon that may hang, die and come back."""

from __future__ import annotations

import enum
import logging
import threading
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from krul_backend.daemon.client.client_session import ArenaBytes, ClientSession, DaemonConnection
from krul_backend.daemon.client.request_channel import RequestTimeoutError, SessionEndedError
from krul_backend.daemon.protocol.messages import EXCEPTIONS, ClearRequest, PingRequest
from krul_backend.errors import DaemonError, DaemonUnreachableError, ProtocolError, StoreClosedError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity

logger = logging.getLogger(__name__)

HANDSHAKE_TIMEOUT_S = 5.0
HANG_TIMEOUT_S = 5.0
"""Seconds without an answer to a ping after which a daemon hangs; one that is busy answers it within them."""
CLEAR_TIMEOUT_S = 10.0
FIRST_DELAY_S, LONGEST_DELAY_S = 0.1, 5.0

UNANSWERED = (DaemonError, StoreClosedError)
"""Errors that mean that the daemon could not be asked, not that the request was wrong."""

_TO_REPEAT = (DaemonUnreachableError, ProtocolError, StoreClosedError)
"""Errors after which a clear is repeated: nobody knows whether the store has tried it."""


@dataclass
class LinkCounters:
    """Counts of a link. ``lost``: how often the daemon died or hung; ``reconnects``: how often it came back.

    ``failures`` are answers that were an error, or that could not be read.
    """

    requests: int = 0
    timeouts: int = 0
    failures: int = 0
    lost: int = 0
    reconnects: int = 0


class _State(enum.Enum):
    """Of a link. ``HUNG``: the daemon did not answer a ping. ``LOST``: there is no daemon."""

    CONNECTED = enum.auto()
    HUNG = enum.auto()
    LOST = enum.auto()


@dataclass(frozen=True, eq=False)
class _Clear:
    """A ``clear`` that the daemon has not answered, of one model or of all (None)."""

    model: ModelIdentity | None

    @property
    def fingerprint(self) -> str | None:
        return None if self.model is None else self.model.fingerprint


class DaemonLink:
    """Keeps one connection to the daemon of a runtime directory, and tells whether it is usable now.

    ::

        CONNECTED --(a ping is not answered)--> HUNG --(a later one is)-------------------> CONNECTED
            '-------(the session ends)--------> LOST --(new session, new mapping, hello)------^

    A request that times out fails alone: others go on. A thread of the link then pings the daemon, for
    ``hang_timeout_s``. It also reconnects, with growing delays. A ``clear`` that was not done is repeated
    then, before anybody sees the connection again; one that the store has tried, and failed, is not. A daemon
    that hangs is waited for, not restarted: its leases and what it keeps in DRAM may still be good.

    Args: see ``DaemonStore``.

    Raises:
        DaemonError: the daemon that is there belongs to another user.
        ProtocolError: it is of another version.
    """

    def __init__(
        self,
        runtime_dir: Path,
        *,
        model: ModelIdentity,
        request_timeout_s: float,
        on_arena: Callable[[ArenaBytes], None],
        restart: Callable[[], None] | None,
        hang_timeout_s: float = HANG_TIMEOUT_S,
    ) -> None:
        self._hang_timeout_s = hang_timeout_s
        self._runtime_dir = runtime_dir
        self._model = model
        self._request_timeout_s = request_timeout_s
        self._on_arena = on_arena
        self._restart = restart
        self._changed = threading.Condition()
        self._closing = threading.Event()
        self._state = _State.LOST
        self._is_doubted = False
        self._connection: DaemonConnection | None = None
        self._pending_clears: list[_Clear] = []
        self.counters = LinkCounters()
        self._said: set[str] = set()
        self._try_first()
        self._thread = threading.Thread(target=self._run, name="krul-daemon-link", daemon=True)
        self._thread.start()

    @property
    def is_connected(self) -> bool:
        return self._state is _State.CONNECTED

    def current(self) -> DaemonConnection | None:
        """The connection, or None if the daemon cannot be asked now. Never waits."""
        with self._changed:
            return self._connection if self._state is _State.CONNECTED else None

    def count_request(self) -> None:
        with self._changed:
            self.counters.requests += 1

    def note_failure(self, connection: DaemonConnection, op: str, error: Exception) -> None:
        """Count and log one of ``UNANSWERED``. After a time-out the daemon may hang, or only be busy."""
        is_new = False
        with self._changed:
            if isinstance(error, RequestTimeoutError):
                self.counters.timeouts += 1
                self._is_doubted |= self._connection is connection
                self._changed.notify_all()
            elif not isinstance(error, SessionEndedError):
                self.counters.failures += 1
                is_new = op not in self._said
                self._said.add(op)
        if is_new:
            logger.error("krul daemon cannot answer %r (said once): %s", op, error)

    def clear(self, model: ModelIdentity | None) -> None:
        """Have the daemon forget the segments of one model, or all: now, or else before the next lease."""
        with self._changed:
            self._pending_clears.append(_Clear(model))
        connection = self.current()
        if connection is None:
            return
        try:
            # A clear may take long. A ping shows sooner whether the daemon hangs.
            self._ping(connection)
            self._clear_pending(connection)
        except Exception as error:
            logger.warning(
                "the krul daemon did not forget what it was told to, it will be told again: %s", error
            )
            with self._changed:
                self.counters.timeouts += isinstance(error, RequestTimeoutError)
            self._lose_hung(connection)

    def close(self) -> None:
        """End the session. May be called again."""
        self._closing.set()
        with self._changed:
            self._changed.notify_all()
            connection = self._connection
        if connection is not None:
            connection.close()
        self._thread.join()
        with self._changed:
            self._state = _State.LOST
            connection, self._connection = self._connection, None
        if connection is not None:
            connection.close()

    # Reconnecting: in the link's own thread.

    def _run(self) -> None:
        while not self._closing.is_set():
            with self._changed:
                self._changed.wait_for(
                    lambda: self._closing.is_set() or self._is_doubted or self._state is not _State.CONNECTED
                )
                state = self._state
                self._is_doubted = False
            if self._closing.is_set():
                return
            if state is _State.CONNECTED:
                self._check()
            else:
                self._say_lost(state)
                self._recover()

    def _check(self) -> None:
        """Ping a daemon that may hang: requests go on meanwhile, and each fails alone."""
        # Held here alone: an earlier connection keeps its arena mapped.
        connection = self._connection
        if connection is None:
            return
        try:
            connection.ask(PingRequest(), self._hang_timeout_s)
        except Exception as error:
            # Also if the answer is an error: then it does not know the session, as ``_recover`` finds out.
            logger.debug("krul daemon at %s: %s", self._runtime_dir, error)
            self._lose_hung(connection)

    def _say_lost(self, state: _State) -> None:
        if state is _State.LOST and self._connection is None:
            return  # The daemon was never there, which the start has logged.
        what = "is gone" if state is _State.LOST else "does not answer"
        logger.warning(
            "krul daemon at %s %s: until it is back nothing is stored or restored", self._runtime_dir, what
        )

    def _recover(self) -> None:
        """Try until the state is ``CONNECTED`` again, or the link is closed."""
        delay_s = FIRST_DELAY_S
        last_trouble = ""
        while not self._closing.is_set():
            try:
                if self._finish(self._answering_connection()):
                    logger.info("krul daemon at %s is back", self._runtime_dir)
                    return
            except DaemonUnreachableError as error:
                logger.debug("%s", error)
            # Whatever went wrong, in a callback or with another's daemon: only this thread can reconnect.
            except Exception as error:
                if str(error) != last_trouble:
                    last_trouble = str(error)
                    logger.warning("cannot reconnect to the krul daemon: %s", last_trouble)
            self._closing.wait(delay_s)
            delay_s = min(2 * delay_s, LONGEST_DELAY_S)

    def _answering_connection(self) -> DaemonConnection:
        connection = self._living_connection()
        try:
            self._ping(connection)
        except DaemonUnreachableError:
            raise
        except Exception:
            # The answer is an error: the daemon does not know the session.
            self._drop_connection()
            raise
        return connection

    def _living_connection(self) -> DaemonConnection:
        """The connection if its session lasts, else a new one. Starts a daemon that is gone, if it can.

        Raises:
            DaemonUnreachableError: there is no daemon, and no ``restart``.
            DaemonError: the daemon does not start, or was started too often.
        """
        connection = self._connection
        if connection is not None and connection.session.is_alive:
            return connection
        self._drop_connection()
        try:
            session = self._open_session()
        except DaemonUnreachableError:
            if self._restart is None:
                raise
            self._restart()
            session = self._open_session()
        return self._connect(session)

    def _open_session(self) -> ClientSession:
        return ClientSession(self._runtime_dir, timeout_s=HANDSHAKE_TIMEOUT_S, on_end=self._session_ended)

    def _connect(self, session: ClientSession) -> DaemonConnection:
        connection = DaemonConnection(session)
        try:
            if session.greeting.format != FORMAT_VERSION:
                raise ProtocolError(
                    f"the krul daemon at {self._runtime_dir} has format {session.greeting.format}, this side "
                    f"{FORMAT_VERSION}: run both from one version of krul"
                )
            connection.say_hello(self._model, HANDSHAKE_TIMEOUT_S)
            self._on_arena(session.arena)
        except BaseException:
            connection.close()
            raise
        with self._changed:
            self._connection = connection
        return connection

    def _finish(self, connection: DaemonConnection) -> bool:
        """Repeat clears that failed, then let everybody use the connection. False if it ended meanwhile."""
        while True:
            self._clear_pending(connection)
            with self._changed:
                if not self._pending_clears:
                    # If the session ended before this, nobody is going to tell.
                    if not connection.session.is_alive or self._closing.is_set():
                        return False
                    self._state = _State.CONNECTED
                    self.counters.reconnects += 1
                    return True

    def _drop_connection(self) -> None:
        with self._changed:
            connection, self._connection = self._connection, None
            self._state = _State.LOST
        if connection is not None:
            connection.close()

    # Called from any thread.

    def _try_first(self) -> None:
        try:
            connection = self._connect(self._open_session())
        except DaemonUnreachableError as error:
            logger.warning("%s; nothing is stored or restored until it does", error)
            return
        if self._finish(connection):
            self.counters.reconnects = 0
            logger.info("connected to the krul daemon at %s", self._runtime_dir)

    def _session_ended(self, session: ClientSession) -> None:
        with self._changed:
            connection = self._connection
            if connection is not None and connection.session is session and self._state is _State.CONNECTED:
                self._lose(_State.LOST)

    def _ping(self, connection: DaemonConnection) -> None:
        """Raises as ``RequestChannels.ask``."""
        connection.ask(PingRequest(), self._request_timeout_s)

    def _lose_hung(self, connection: DaemonConnection) -> None:
        with self._changed:
            if self._connection is connection and self._state is _State.CONNECTED:
                self._lose(_State.HUNG)

    def _lose(self, state: _State) -> None:
        """Leave ``CONNECTED`` for ``state``. Called with the lock held."""
        self._state = state
        self.counters.lost += 1
        self._changed.notify_all()

    def _clear_pending(self, connection: DaemonConnection) -> None:
        """Ask for every pending clear. Raises one of ``_TO_REPEAT``; what was not answered stays pending."""
        with self._changed:
            pending = tuple(self._pending_clears)
        for fingerprint in {clear.fingerprint: None for clear in pending}:
            same = [clear for clear in pending if clear.fingerprint == fingerprint]
            model = same[0].model
            if model is not None:
                connection.say_hello(model, self._request_timeout_s)
            try:
                connection.ask(ClearRequest(fingerprint=fingerprint), CLEAR_TIMEOUT_S)
            except _TO_REPEAT:
                raise
            except tuple(EXCEPTIONS.values()) as error:
                # Asked again, it would fail again. What a tier cannot forget it does not find any more.
                self.note_failure(connection, "clear", error)
            with self._changed:
                # A clear that came in meanwhile stays: it is meant for segments stored meanwhile, too.
                self._pending_clears = [clear for clear in self._pending_clears if clear not in same]
