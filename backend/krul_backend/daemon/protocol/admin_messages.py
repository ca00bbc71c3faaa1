"""The messages of the operations that need no session: people and scripts ask them, over TCP too."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta, Struct

from krul_backend.daemon.protocol.messages import Id, Request, Seconds
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


class StatsRequest(Request[tuple[StoreStats, DaemonStats]], frozen=True, kw_only=True, tag="stats"):
    pass


class ListRequest(Request[tuple[tuple[SegmentInfo, ...], int]], frozen=True, kw_only=True, tag="list"):
    """Asks for ``limit`` segments from the ``offset``-th on, ordered by id, and how many there are in all."""

    offset: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_SEGMENTS)] = MAX_LISTED_SEGMENTS


class InspectRequest(Request[SegmentDetails | None], frozen=True, kw_only=True, tag="inspect"):
    segment_id: Id


class VerifyRequest(Request[DamageReport], frozen=True, kw_only=True, tag="verify"):
    pass


class FlushRequest(Request[bool], frozen=True, kw_only=True, tag="flush"):
    """The result says whether all is durable."""

    timeout_s: Seconds


class PingRequest(Request[None], frozen=True, kw_only=True, tag="ping"):
    pass


class ShutdownRequest(Request[None], frozen=True, kw_only=True, tag="shutdown"):
    pass


ADMIN_REQUESTS: tuple[type[Request[Any]], ...] = (
    StatsRequest,
    ListRequest,
    InspectRequest,
    VerifyRequest,
    FlushRequest,
    PingRequest,
    ShutdownRequest,
)
"""Every request of a client without a session."""
