"""Answers the operations that need no session. They hand out no memory and remove only damaged segments."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from krul_backend.daemon.protocol.admin_messages import (
    DaemonStats,
    FlushRequest,
    InspectRequest,
    ListRequest,
    PingRequest,
    StatsRequest,
    VerifyRequest,
)
from krul_backend.daemon.protocol.messages import Request
from krul_backend.daemon.server.lanes import Deferred, Lane
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import SegmentInfo

MAX_FLUSH_S = 600.0


class AdminHandlers:
    """Answers requests of ``ADMIN_REQUESTS`` but ``shutdown``. Called by the server's thread alone.

    ``daemon_stats`` returns what the server counts, for the answer to ``stats``.
    """

    def __init__(self, store: TieredStore, daemon_stats: Callable[[], DaemonStats]) -> None:
        self._store = store
        self._of_request: dict[type[Request[Any]], Callable[[Any], Any]] = {
            PingRequest: lambda request: None,
            StatsRequest: lambda request: (store.stats(), daemon_stats()),
            ListRequest: self._list,
            InspectRequest: lambda request: Deferred(lambda: store.inspect(request.segment_id)),
            VerifyRequest: lambda request: Deferred(store.verify, lane=Lane.VERIFY),
            FlushRequest: self._flush,
        }

    def knows(self, request: Request[Any]) -> bool:
        return type(request) in self._of_request

    def handle(self, request: Request[Any]) -> Any:
        """The result of a request, or ``Deferred``."""
        return self._of_request[type(request)](request)

    def _list(self, request: ListRequest) -> Deferred[list[SegmentInfo]]:
        def work() -> list[SegmentInfo]:
            return sorted(self._store.list_segments(), key=lambda info: info.segment_id)

        def finish(future: Future[list[SegmentInfo]]) -> tuple[list[SegmentInfo], int]:
            infos = future.result()
            return infos[request.offset : request.offset + request.limit], len(infos)

        return Deferred(work, finish)

    def _flush(self, request: FlushRequest) -> Deferred[bool]:
        return Deferred(lambda: self._store.flush(min(request.timeout_s, MAX_FLUSH_S)), lane=Lane.FLUSH)
