"""Answers the operations that need no session. They hand out no memory and remove only damaged segments."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from krul_backend.daemon.protocol.admin_messages import (
    DaemonStats,
    FlushReply,
    FlushRequest,
    InspectReply,
    InspectRequest,
    ListReply,
    ListRequest,
    PingRequest,
    StatsReply,
    StatsRequest,
    VerifyReply,
    VerifyRequest,
)
from krul_backend.daemon.protocol.messages import Done, Reply, Request
from krul_backend.daemon.server.lanes import Answer, Deferred, Lane
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import DamageReport, SegmentDetails, SegmentInfo

MAX_FLUSH_S = 600.0


class AdminHandlers:
    """Answers requests of ``ADMIN_OPERATIONS`` but ``shutdown``. Called by the server's thread alone.

    ``daemon_stats`` returns what the server counts, for the answer to ``stats``.
    """

    def __init__(self, store: KVStore, daemon_stats: Callable[[], DaemonStats]) -> None:
        self._store = store
        self._daemon_stats = daemon_stats
        self._of_request: dict[type[Request[Any]], Callable[[Any], Answer]] = {
            PingRequest: self._ping,
            StatsRequest: self._stats,
            ListRequest: self._list,
            InspectRequest: self._inspect,
            VerifyRequest: self._verify,
            FlushRequest: self._flush,
        }

    def knows(self, request: Request[Any]) -> bool:
        return type(request) in self._of_request

    def handle(self, request: Request[Any]) -> Answer:
        return self._of_request[type(request)](request)

    def _ping(self, request: PingRequest) -> Answer:
        return Done(id=request.id)

    def _stats(self, request: StatsRequest) -> Answer:
        return StatsReply(id=request.id, store=self._store.stats(), daemon=self._daemon_stats())

    def _list(self, request: ListRequest) -> Answer:
        def work() -> list[SegmentInfo]:
            return sorted(self._store.list_segments(), key=lambda info: info.segment_id)

        def finish(future: Future[list[SegmentInfo]]) -> Reply:
            infos = future.result()
            listed = infos[request.offset : request.offset + request.limit]
            return ListReply(id=request.id, segments=tuple(listed), num_segments=len(infos))

        return Deferred(work, finish)

    def _inspect(self, request: InspectRequest) -> Answer:
        def finish(future: Future[SegmentDetails | None]) -> Reply:
            return InspectReply(id=request.id, segment=future.result())

        return Deferred(lambda: self._store.inspect(request.segment_id), finish)

    def _verify(self, request: VerifyRequest) -> Answer:
        def finish(future: Future[DamageReport]) -> Reply:
            return VerifyReply(id=request.id, report=future.result())

        return Deferred(self._store.verify, finish, Lane.VERIFY)

    def _flush(self, request: FlushRequest) -> Answer:
        timeout_s = min(request.timeout_s, MAX_FLUSH_S)
        return Deferred(
            lambda: self._store.flush(timeout_s),
            lambda future: FlushReply(id=request.id, is_durable=future.result()),
            Lane.FLUSH,
        )
