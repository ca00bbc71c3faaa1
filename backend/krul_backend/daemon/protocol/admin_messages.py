"""The messages of the operations that need no session: people and scripts ask them, over TCP too."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from krul_backend.daemon.protocol.messages import Done, Id, Reply, Request, Seconds
from krul_backend.tiers.common.interface import DamageReport, SegmentDetails, SegmentInfo, StoreStats

MAX_LISTED_SEGMENTS = 10_000


class DaemonStats(Struct, frozen=True):
    """What the daemon counts beside its store.

    ``failed_requests`` were answered with an error. ``bad_messages`` were no requests, counted by cause.
    """

    pid: int
    uptime_s: float
    num_sessions: int
    requests: int
    failed_requests: int
    bad_messages: dict[str, int]


class StatsReply(Reply, frozen=True, kw_only=True, tag="stats"):
    store: StoreStats
    daemon: DaemonStats


class StatsRequest(Request[StatsReply], frozen=True, kw_only=True, tag="stats"):
    pass


class ListReply(Reply, frozen=True, kw_only=True, tag="list"):
    """``num_segments``: how many segments the store has in all."""

    segments: tuple[SegmentInfo, ...]
    num_segments: int


class ListRequest(Request[ListReply], frozen=True, kw_only=True, tag="list"):
    """``limit`` segments from the ``offset``-th on, ordered by id."""

    offset: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_SEGMENTS)] = MAX_LISTED_SEGMENTS


class InspectReply(Reply, frozen=True, kw_only=True, tag="inspect"):
    segment: SegmentDetails | None


class InspectRequest(Request[InspectReply], frozen=True, kw_only=True, tag="inspect"):
    segment_id: Id


class VerifyReply(Reply, frozen=True, kw_only=True, tag="verify"):
    report: DamageReport


class VerifyRequest(Request[VerifyReply], frozen=True, kw_only=True, tag="verify"):
    pass


class FlushReply(Reply, frozen=True, kw_only=True, tag="flush"):
    is_durable: bool


class FlushRequest(Request[FlushReply], frozen=True, kw_only=True, tag="flush"):
    timeout_s: Seconds


class PingRequest(Request[Done], frozen=True, kw_only=True, tag="ping"):
    pass


class ShutdownRequest(Request[Done], frozen=True, kw_only=True, tag="shutdown"):
    pass


ADMIN_OPERATIONS: dict[type[Request[Any]], type[Reply]] = {
    StatsRequest: StatsReply,
    ListRequest: ListReply,
    InspectRequest: InspectReply,
    VerifyRequest: VerifyReply,
    FlushRequest: FlushReply,
    PingRequest: Done,
    ShutdownRequest: Done,
}
"""Every request of a client without a session, and its reply."""
