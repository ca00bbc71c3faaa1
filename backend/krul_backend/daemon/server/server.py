"""The daemon's loop: one thread answers requests, and others do what takes long."""

from __future__ import annotations

import logging
import os
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, NamedTuple

from krul_backend.daemon.protocol.frames import (
    checked_request,
    decode_envelope,
    decode_token_ids,
    encode,
    pack,
)
from krul_backend.daemon.protocol.messages import (
    DaemonStats,
    ErrorReply,
    OpenRequest,
    Reply,
    Request,
    SessionGreeting,
    ShutdownRequest,
    error_code,
    op_of,
)
from krul_backend.daemon.protocol.runtime_dir import RuntimeDir
from krul_backend.daemon.server.connections import Connection, Connections
from krul_backend.daemon.server.handlers import SessionHandlers, admin_handlers
from krul_backend.daemon.server.lanes import Deferred, Lanes
from krul_backend.daemon.server.sessions import Session, SessionTable
from krul_backend.errors import ProtocolError
from krul_backend.segment import FORMAT_VERSION
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import Reservation

logger = logging.getLogger(__name__)

ORPHAN_S = 1.0
"""How long a reservation outlives its client: a device copy into it that was under way has ended by then."""

UNUSED_S = 2.0
NEVER_USED_S = 60.0
"""An unused daemon ends so long after its last session, or after its start if there was no session."""

Observer = Callable[[str, float, bool], None]
"""Called for every answered request, in the server's thread: its operation, the seconds from its receipt to
its reply, and whether the reply was no error. It must return at once and never raise."""

_MAX_WAIT_S = 1.0


class _Caller(NamedTuple):
    """The peer that gets the reply to a request, and what is noted about the request."""

    connection: Connection
    op: str
    request_id: int
    start_s: float


class DaemonServer:
    """Answers on a runtime directory's socket until ``stop``.

    Operations that may take long run in other threads. The loop's own thread sends all replies, and is the
    only one that uses connections and sessions. A request that fails is answered with a typed error. A
    message that is no request is answered with an error if it has an id, else its connection is closed. Both
    are counted.

    Args:
        store: not owned; clients map the memory of its DRAM tier.
        may_lookup_wait: whether lookups in this store may ask a network.
        observer: called for each answer.
        exit_when_unused: ``run`` returns some seconds after the last session ended.
    """

    def __init__(
        self,
        runtime_dir: RuntimeDir,
        store: TieredStore,
        *,
        may_lookup_wait: bool = False,
        observer: Observer | None = None,
        exit_when_unused: bool = False,
    ) -> None:
        self._observer = observer
        self._exit_when_unused = exit_when_unused
        self._store = store
        self._session_handlers = SessionHandlers(store, may_lookup_wait)
        self._admin_handlers = admin_handlers(store, self.daemon_stats)
        self._admin_handlers[ShutdownRequest] = self._shut_down
        self._start_s = time.monotonic()
        self._num_requests = 0
        self._num_failed = 0
        self._bad_messages: Counter[str] = Counter()
        self._logged: set[str] = set()
        self._orphans: deque[tuple[float, Reservation]] = deque()
        self._is_stopping = False
        self._lanes: Lanes[_Caller] = Lanes()
        self._sessions = SessionTable()
        self._ending: list[Session] = []
        self._last_session_s: float | None = None
        page_filter = store.page_filter
        self._filenos = [store.host.fileno()] + ([] if page_filter is None else [page_filter.fileno()])
        self._connections = Connections(
            runtime_dir.socket_path,
            self._lanes.fileno(),
            on_message=self._handle,
            on_garbage=lambda connection, error: self._count_bad("undecodable", error),
            on_close=self._note_end,
        )

    def run(self) -> None:
        """Serve until ``stop``, a shutdown request, or nobody uses the daemon any more."""
        while not self._is_stopping:
            if self._connections.serve(self._wait_s()):
                for caller, deferred, future in self._lanes.take_done():
                    self._finish(caller, deferred, future)
            self._end_sessions()
            self._free_orphans()
            if self._exit_when_unused and self._is_unused():
                logger.info("nobody uses this daemon any more")
                self._is_stopping = True

    def stop(self) -> None:
        """Make ``run`` return; from any thread, or a signal handler."""
        self._is_stopping = True
        self._lanes.wake()

    def disconnect(self) -> None:
        """Close all connections, after ``run``: clients notice at once. What they held is left as it is."""
        self._connections.close()

    def close(self) -> None:
        """End the threads. Call it after ``disconnect`` and the store's ``close``, which ends their work."""
        self._lanes.close()

    def _wait_s(self) -> float:
        due_s = self._orphans[0][0] - time.monotonic() if self._orphans else _MAX_WAIT_S
        return min(_MAX_WAIT_S, max(0.0, due_s))

    def _handle(self, connection: Connection, frame: bytes, token_ids: bytes) -> None:
        start_s = time.monotonic()
        try:
            request = checked_request(frame, token_ids)
        except ProtocolError as error:
            self._count_bad("undecodable", error)
            envelope = decode_envelope(frame)
            if envelope is None:
                self._connections.close_one(connection)
            else:
                self._refuse(_Caller(connection, "invalid", envelope[1], start_s), error)
            return
        connection.token = request.token
        caller = _Caller(connection, op_of(request), request.id, start_s)
        self._num_requests += 1
        try:
            if isinstance(request, OpenRequest):
                self._open_session(caller)
                return
            result = self._dispatch(request, token_ids)
            if isinstance(result, Deferred):
                self._lanes.submit(caller, result)
                return
        except Exception as error:
            self._refuse(caller, error)
            return
        self._reply(caller, result)

    def _open_session(self, caller: _Caller) -> None:
        if self._sessions.opened_by(caller.connection) is not None:
            raise ProtocolError("this connection has opened a session before")
        session = self._sessions.open(caller.connection)
        if session is None:
            self._connections.close_one(caller.connection)
            return
        greeting = SessionGreeting(FORMAT_VERSION, session.token, self._store.host.buffer.nbytes)
        self._reply(caller, greeting, self._filenos)

    def _dispatch(self, request: Request[Any], token_ids: bytes) -> Any:
        """The result of a request, or ``Deferred``."""
        session = self._sessions.find(request.token)
        answer = self._admin_handlers.get(type(request))
        if answer is not None and (session is not None or not request.token):
            return answer(request)
        if session is None:
            error = ProtocolError(f"there is no session that could ask for {op_of(request)}: connect again")
            self._count_bad("no session", error)
            raise error
        return self._session_handlers.handle(
            session, request, decode_token_ids(token_ids) if request.has_token_ids else None
        )

    def _shut_down(self, request: ShutdownRequest) -> None:
        logger.info("asked to shut down")
        self._is_stopping = True

    def _finish(self, caller: _Caller, deferred: Deferred[Any], future: Future[Any]) -> None:
        try:
            result = deferred.finish(future)
        except Exception as error:
            self._refuse(caller, error)
            return
        self._reply(caller, result)

    def _reply(self, caller: _Caller, result: Any, filenos: Sequence[int] = ()) -> None:
        try:
            message = pack(encode(Reply(id=caller.request_id, result=result)))
        except (TypeError, ValueError, ProtocolError) as error:
            # A manifest has a value that cannot be written as JSON, or there is more than anybody reads.
            self._refuse(caller, error)
            return
        self._send(caller, message, filenos, is_right=True)

    def _refuse(self, caller: _Caller, error: Exception) -> None:
        self._send(caller, pack(encode(self._error_reply(caller, error))), is_right=False)

    def _send(self, caller: _Caller, message: bytes, filenos: Sequence[int] = (), *, is_right: bool) -> None:
        self._connections.send(caller.connection, message, filenos)
        if self._observer is not None:
            self._observer(caller.op, time.monotonic() - caller.start_s, is_right)

    def _error_reply(self, caller: _Caller, error: Exception) -> ErrorReply:
        self._num_failed += 1
        code = error_code(error)
        if code == "internal":
            cause = f"{caller.op}: {type(error).__name__}"
            if cause not in self._logged:
                self._logged.add(cause)
                logger.error("%s failed (logged once per cause)", caller.op, exc_info=error)
        message = error.args[0] if isinstance(error, KeyError) and error.args else error
        return ErrorReply(id=caller.request_id, code=code, message=str(message)[:1000] or repr(error))

    def _count_bad(self, cause: str, error: Exception) -> None:
        self._bad_messages[cause] += 1
        if cause not in self._logged:
            self._logged.add(cause)
            logger.warning("bad message (%s, logged once per cause): %s", cause, str(error)[:200])

    def _note_end(self, connection: Connection) -> None:
        session = self._sessions.opened_by(connection)
        if session is not None:
            self._ending.append(session)

    def _end_sessions(self) -> None:
        """End sessions whose clients are gone, once all that these had sent before is done."""
        ending, self._ending = self._ending, []
        for session in ending:
            if self._connections.has_more(session.token):
                self._ending.append(session)
            else:
                self._end_session(session)

    def _end_session(self, session: Session) -> None:
        self._sessions.end(session)
        now_s = time.monotonic()
        self._last_session_s = now_s
        self._orphans.extend((now_s + ORPHAN_S, held) for held in session.reservations.granted.values())
        session.reservations.granted.clear()
        try:
            self._session_handlers.end_session(session)
        except Exception:
            logger.exception("not all that a client held when it ended could be released")

    def _free_orphans(self) -> None:
        now_s = time.monotonic()
        while self._orphans and self._orphans[0][0] <= now_s:
            _, reservation = self._orphans.popleft()
            try:
                self._store.abort(reservation)
            except Exception:
                logger.exception("a reservation of a client that is gone could not be freed")

    def _is_unused(self) -> bool:
        if len(self._sessions) or self._orphans:
            return False
        now_s = time.monotonic()
        if self._last_session_s is None:
            return now_s - self._start_s > NEVER_USED_S
        return now_s - self._last_session_s > UNUSED_S

    def daemon_stats(self) -> DaemonStats:
        """What the daemon counts beside its store. May be called from any thread."""
        return DaemonStats(
            pid=os.getpid(),
            uptime_s=time.monotonic() - self._start_s,
            num_sessions=len(self._sessions),
            requests=self._num_requests,
            failed_requests=self._num_failed,
            bad_messages=dict(self._bad_messages),
        )
