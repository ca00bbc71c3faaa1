"""What the daemon answers: one type per operation, and one for errors."""

from __future__ import annotations

from typing import Any, Literal, TypeAlias, get_args

from msgspec import Struct

from krul_backend.planner.costs import TierCost
from krul_backend.tiers.common.interface import DamageReport, SegmentDetails, SegmentInfo, Span, StoreStats

ErrorCode = Literal["manifest", "key", "value", "closed", "tier-read", "protocol", "internal"]
"""``manifest``, ``key``, ``value``, ``closed`` and ``tier-read`` are exceptions of ``KVStore``."""


class WireHeader(Struct, frozen=True):
    """A ``SegmentHeader``."""

    page_size: int
    start_token: int
    num_tokens: int
    codec: str
    codec_params: dict[str, Any]
    layer_num_bytes: tuple[int, ...]
    layer_first_token: tuple[int, ...]


class WireSlice(Struct, frozen=True):
    """A ``SegmentSlice``: where its blocks lie instead of the blocks.

    ``spans`` are empty before a fetch if ``tier`` is not DRAM. ``status_span`` is where the flags of its
    layers lie, None when all have landed.
    """

    segment_id: int
    header: WireHeader
    tier: str
    spans: tuple[Span, ...]
    checksums: tuple[int, ...]
    first_page: int
    end_page: int
    status_span: Span | None


class WirePathSegment(Struct, frozen=True):
    """A ``PathSegment``."""

    segment_id: int
    header: WireHeader


class DaemonStats(Struct, frozen=True):
    """The daemon beside its store. ``bad_messages`` by cause; ``failed_requests`` had an error as answer."""

    pid: int
    uptime_s: float
    num_sessions: int
    requests: int
    failed_requests: int
    bad_messages: dict[str, int]


class Reply(Struct, frozen=True, kw_only=True, tag_field="op"):
    """``id`` is the request's."""

    id: int


class ErrorReply(Reply, frozen=True, kw_only=True, tag="error"):
    code: ErrorCode
    message: str


class HelloReply(Reply, frozen=True, kw_only=True, tag="hello"):
    """``tier_costs``: what reading from each lower tier into DRAM costs, by name."""

    protocol: int
    format: int
    tier_costs: dict[str, TierCost]


class FindMissingReply(Reply, frozen=True, kw_only=True, tag="find_missing"):
    """Runs ``[first, end)`` of indices into the request's keys."""

    missing: tuple[tuple[int, int], ...]


class LeaseReply(Reply, frozen=True, kw_only=True, tag="lease"):
    """``num_pages`` 0: nothing was found, and there is no lease."""

    num_pages: int
    slices: tuple[WireSlice, ...]


class FetchReply(Reply, frozen=True, kw_only=True, tag="fetch"):
    """The lease's slices, all with spans."""

    slices: tuple[WireSlice, ...]


class ReleaseReply(Reply, frozen=True, kw_only=True, tag="release"):
    pass


class ReserveReply(Reply, frozen=True, kw_only=True, tag="reserve"):
    """``spans`` None: no space, and there is no reservation."""

    spans: tuple[Span, ...] | None


class CommitReply(Reply, frozen=True, kw_only=True, tag="commit"):
    segment_id: int


class AbortReply(Reply, frozen=True, kw_only=True, tag="abort"):
    pass


class PathSegmentsReply(Reply, frozen=True, kw_only=True, tag="path_segments"):
    segments: tuple[WirePathSegment, ...]


class TrimReply(Reply, frozen=True, kw_only=True, tag="trim"):
    num_bytes: int


class PrefetchReply(Reply, frozen=True, kw_only=True, tag="prefetch"):
    num_pages: int


class PinReply(Reply, frozen=True, kw_only=True, tag="pin"):
    num_pages: int


class UnpinReply(Reply, frozen=True, kw_only=True, tag="unpin"):
    num_pages: int


class ReportDamageReply(Reply, frozen=True, kw_only=True, tag="report_damage"):
    is_damaged: bool


class TierCostsReply(Reply, frozen=True, kw_only=True, tag="tier_costs"):
    tier_costs: dict[str, TierCost]


class StatsReply(Reply, frozen=True, kw_only=True, tag="stats"):
    store: StoreStats
    daemon: DaemonStats


class ListReply(Reply, frozen=True, kw_only=True, tag="list"):
    """``num_segments``: how many there are in all."""

    segments: tuple[SegmentInfo, ...]
    num_segments: int


class InspectReply(Reply, frozen=True, kw_only=True, tag="inspect"):
    segment: SegmentDetails | None


class VerifyReply(Reply, frozen=True, kw_only=True, tag="verify"):
    report: DamageReport


class ClearReply(Reply, frozen=True, kw_only=True, tag="clear"):
    pass


class FlushReply(Reply, frozen=True, kw_only=True, tag="flush"):
    is_durable: bool


class PingReply(Reply, frozen=True, kw_only=True, tag="ping"):
    pass


class ShutdownReply(Reply, frozen=True, kw_only=True, tag="shutdown"):
    """The daemon flushes and ends after this."""


AnyReply: TypeAlias = (
    ErrorReply
    | HelloReply
    | FindMissingReply
    | LeaseReply
    | FetchReply
    | ReleaseReply
    | ReserveReply
    | CommitReply
    | AbortReply
    | PathSegmentsReply
    | TrimReply
    | PrefetchReply
    | PinReply
    | UnpinReply
    | ReportDamageReply
    | TierCostsReply
    | StatsReply
    | ListReply
    | InspectReply
    | VerifyReply
    | ClearReply
    | FlushReply
    | PingReply
    | ShutdownReply
)

REPLIES: tuple[type[Reply], ...] = get_args(AnyReply)
