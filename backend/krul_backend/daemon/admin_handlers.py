"""The operations for people: they need no session, hand out no memory and change nothing that is sound."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from krul_backend.daemon.replies import (
    DaemonStats,
    InspectReply,
    ListReply,
    PingReply,
    Reply,
    StatsReply,
    VerifyReply,
)
from krul_backend.daemon.requests import (
    InspectRequest,
    ListRequest,
    PingRequest,
    Request,
    StatsRequest,
    VerifyRequest,
)
from krul_backend.daemon.session_handlers import Answer, Deferred, Lane
from krul_backend.store.interface import DamageReport, KVStore, SegmentInfo


class AdminHandlers:
    """Called by the server's thread alone. ``daemon_stats`` is asked by ``stats``."""

    def __init__(self, store: KVStore, daemon_stats: Callable[[], DaemonStats]) -> None:
        self._store = store
        self._daemon_stats = daemon_stats
        self._of_request: dict[type[Request], Callable[[Any], Answer]] = {
            PingRequest: self._ping,
            StatsRequest: self._stats,
            ListRequest: self._list,
            InspectRequest: self._inspect,
            VerifyRequest: self._verify,
        }

    def knows(self, request: Request) -> bool:
        return type(request) in self._of_request

    def handle(self, request: Request) -> Answer:
        return self._of_request[type(request)](request)

    def _ping(self, request: PingRequest) -> Answer:
        return PingReply(id=request.id)

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
        # A lower tier has ids of its own; DRAM's segments are listed before them.
        def work() -> SegmentInfo | None:
            infos = self._store.list_segments()
            return next((info for info in infos if info.segment_id == request.segment_id), None)

        return Deferred(work, lambda future: InspectReply(id=request.id, segment=future.result()))

    def _verify(self, request: VerifyRequest) -> Answer:
        def finish(future: Future[DamageReport]) -> Reply:
            return VerifyReply(id=request.id, report=future.result())

        return Deferred(self._store.verify, finish, Lane.VERIFY)
