"""The messages: a request for each operation of the store, and the reply with its result.

The dataclasses of the store travel as they are. Only a manifest has a class of its own here: its model was
named before, and its tokens follow the JSON. Every string, list and number of a request has a
bound, which is checked when the request is decoded.

To add an operation, write its request and enter it in ``SESSION_REQUESTS``, or, if people and scripts ask it
without a session, in ``ADMIN_REQUESTS``; then write the server's handler and the client's method.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar, get_args

import msgspec
from msgspec import Meta, Raw, Struct

from krul_backend.errors import DaemonError, ManifestError, ProtocolError, StoreClosedError, TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, check_codec_params_num_bytes
from krul_backend.tiers.common.hint import Hint, SessionName
from krul_backend.tiers.common.interface import (
    DamageReason,
    DamageReport,
    FastCopies,
    PathSegment,
    Prefetched,
    SegmentDetails,
    SegmentInfo,
    SegmentSlice,
    Span,
    StoreStats,
)
from krul_backend.tiers.common.read_queue import ReadPriority

PROTOCOL_VERSION = 16
MAX_FRAME_BYTES = 64 << 20
"""Of the JSON of a message, and of its token ids."""
MAX_PAGES = 1_000_000
MAX_LAYERS = 1024
MAX_CHECKSUM_BYTES = 1 << 16
"""Of the checksums of one block."""
MAX_LISTED_SEGMENTS = 10_000
MAX_MODELS = 64
"""Of one session the daemon knows this many models, the latest; a client relies on half of them."""

_MAX_NAME_LENGTH = 1024
_MAX_DIGEST_LENGTH = 128
_MAX_WORD_LENGTH = 64
_MAX_SMALL = 1 << 20

_Token = Annotated[str, Meta(max_length=128)]
_Key = Annotated[str, Meta(min_length=1, max_length=128)]
_Word = Annotated[str, Meta(max_length=_MAX_WORD_LENGTH)]
_Tenant = Annotated[str, Meta(max_length=256)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[int, Meta(ge=0, le=1 << 31)]
_Position = Annotated[int, Meta(ge=0, le=1 << 40)]
_NumBytes = Annotated[int, Meta(ge=0, le=1 << 48)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_PageKeys = Annotated[tuple[_Key, ...], Meta(max_length=MAX_PAGES)]
_LayerBytes = Annotated[tuple[_NumBytes, ...], Meta(max_length=MAX_LAYERS)]
_LayerChecksums = Annotated[
    tuple[Annotated[bytes, Meta(max_length=MAX_CHECKSUM_BYTES)], ...], Meta(max_length=MAX_LAYERS)
]
_LayerTokens = Annotated[tuple[_Position, ...], Meta(max_length=MAX_LAYERS)]

R = TypeVar("R")


class Request(Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    """A request whose result is an ``R``. Whoever sends it sets ``token`` and ``id``.

    ``token`` names the session; it is empty for a client without one. The reply repeats ``id``. Token ids
    follow a request with ``has_token_ids``.
    """

    has_token_ids: ClassVar[bool] = False

    version: _Version = PROTOCOL_VERSION
    token: _Token = ""
    id: _Id = 0


class Reply(Struct, Generic[R], frozen=True, kw_only=True, tag_field="op", tag="reply"):
    """The answer to request ``id``: what was asked for, None if only something was to be done."""

    id: int
    result: R


class _PagesRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A request about pages of a model; the session must have said hello with that model."""

    fingerprint: _Token
    page_keys: _PageKeys


# ---- errors ----

ErrorCode = Literal["manifest", "closed", "tier-read", "protocol", "key", "value", "internal"]

EXCEPTIONS: dict[ErrorCode, type[Exception]] = {
    "manifest": ManifestError,
    "closed": StoreClosedError,
    "tier-read": TierReadError,
    "protocol": ProtocolError,
    "key": KeyError,
    "value": ValueError,
    "internal": DaemonError,
}
"""The exception that a client raises for each code. ``protocol`` and ``internal`` are errors of the daemon;
the others are exceptions that the methods of ``KVStore`` document."""


def error_code(error: Exception) -> ErrorCode:
    """The code that a client is told for an exception; ``internal`` if it is none of the expected ones."""
    return next((code for code, kind in EXCEPTIONS.items() if isinstance(error, kind)), "internal")


class ErrorReply(Struct, frozen=True, kw_only=True, tag_field="op", tag="error"):
    """The answer to request ``id`` if it failed."""

    id: int
    code: ErrorCode
    message: str


# ---- operations of a session ----


class SessionGreeting(Struct, frozen=True):
    """Comes with the file descriptors of the arena and, unless others store in its tiers, too, of the
    daemon's ``PageFilter``."""

    format: int
    token: str
    capacity_bytes: int


class OpenRequest(Request[SessionGreeting], frozen=True, kw_only=True, tag="open"):
    """Opens a session, which lasts as long as the connection. It needs none, and no token."""


class HelloRequest(Request[None], frozen=True, kw_only=True, tag="hello"):
    """Introduces a model. Later requests name it by ``fingerprint``, which the daemon computes and compares.

    Raises:
        ProtocolError: the model has a text or a number beyond the bounds.
    """

    format: _Version
    model: ModelIdentity
    fingerprint: _Token

    def __post_init__(self) -> None:
        model = self.model
        sizes = (model.num_kv_heads, model.k_head_dim, model.v_head_dim, model.page_size, model.tp_size)
        if not (
            len(model.name) <= _MAX_NAME_LENGTH
            and len(model.config_digest) <= _MAX_DIGEST_LENGTH
            and len(model.dtype) <= _MAX_WORD_LENGTH
            and 1 <= model.num_layers <= MAX_LAYERS
            and min(sizes) >= 1
            and max(sizes) <= _MAX_SMALL
            and 0 <= model.tp_rank <= _MAX_SMALL
        ):
            raise ProtocolError(f"a model beyond the bounds of the protocol: {str(model)[:1000]}")


class FindMissingRequest(
    _PagesRequest[tuple[tuple[int, int], ...]], frozen=True, kw_only=True, tag="find_missing"
):
    """Asks for runs ``[first, end)`` of indices into ``page_keys``."""


class LeaseRequest(_PagesRequest[tuple[SegmentSlice, ...]], frozen=True, kw_only=True, tag="lease"):
    """``lease_id`` is the client's choice, never used before in its session.

    The slices are those of the lease; there is none if nothing was found.
    """

    has_token_ids: ClassVar[bool] = True

    lease_id: _Id
    fast_copies: FastCopies = "prefer"


class TailFields(Struct, frozen=True, array_like=True):
    """A ``SegmentTail``, within bounds."""

    layer_first_token: _LayerTokens
    layer_num_bytes: _LayerBytes


class _TailsRequest(Request[R], Generic[R], frozen=True, kw_only=True):
    """A request about slices of a lease: one for each of ``tails``, None for all of a segment.

    Without ``tails`` it is about all slices, whole.
    """

    lease_id: _Id
    tails: Annotated[tuple[TailFields | None, ...], Meta(max_length=MAX_PAGES)] | None = None


class FetchRequest(_TailsRequest[tuple[SegmentSlice, ...]], frozen=True, kw_only=True, tag="fetch"):
    """Asks for slices, with spans."""


class PrefetchRequest(_TailsRequest[Prefetched], frozen=True, kw_only=True, tag="prefetch"):
    priority: ReadPriority = ReadPriority.PREFETCH


class ReleaseRequest(Request[None], frozen=True, kw_only=True, tag="release"):
    """An unknown lease is no error: after a time-out the client releases what it may have been granted."""

    lease_id: _Id


class ReserveRequest(Request[tuple[Span, ...] | None], frozen=True, kw_only=True, tag="reserve"):
    """``reservation_id`` is the client's choice, never used before in its session.

    Without spans there is no space, and no reservation.
    """

    reservation_id: _Id
    layer_num_bytes: _LayerBytes
    tenant: _Tenant
    is_fast_copy: bool = False


class ManifestFields(Struct, frozen=True, forbid_unknown_fields=True):
    """A ``SegmentManifest`` without its model, which the request names, and its tokens, which follow it.

    The other fields are those of the manifest, by the same names, within bounds. ``codec_params`` are JSON
    that is decoded after its size was checked.
    """

    page_keys: _PageKeys
    parent_key: _Key | None
    start_token: _Position
    codec: _Word
    codec_params: Raw
    layer_num_bytes: _LayerBytes
    layer_first_token: _LayerTokens
    tenant: _Tenant
    recompute_s: _Seconds
    range_bytes: _NumBytes

    @classmethod
    def of(cls, manifest: SegmentManifest) -> ManifestFields:
        """Raises ManifestError if the codec's parameters are too large, or cannot be written as JSON."""
        try:
            codec_params = msgspec.json.encode(manifest.codec_params)
        except (TypeError, ValueError, RecursionError) as error:
            raise ManifestError(f"codec parameters that JSON has no words for: {error}") from error
        check_codec_params_num_bytes(len(codec_params))
        fields = {name: getattr(manifest, name) for name in cls.__struct_fields__}
        return cls(**{**fields, "codec_params": Raw(codec_params)})

    def manifest(self, model: ModelIdentity, token_ids: TokenIds) -> SegmentManifest:
        """The manifest that the client sent.

        Raises:
            ManifestError: its parts contradict each other, or the codec's parameters are too large or no
                JSON object.
        """
        check_codec_params_num_bytes(len(memoryview(self.codec_params)))
        try:
            codec_params = msgspec.json.decode(self.codec_params, type=dict[str, Any])
        except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
            raise ManifestError(f"codec parameters are a JSON object, got {error}") from error
        fields = {**msgspec.structs.asdict(self), "codec_params": codec_params}
        return SegmentManifest(model=model, token_ids=token_ids, **fields)


class CommitRequest(Request[int], frozen=True, kw_only=True, tag="commit"):
    """``checksums``: of what the client wrote, by layer. The token ids are the manifest's.

    The result is the segment's id.
    """

    has_token_ids: ClassVar[bool] = True

    reservation_id: _Id
    fingerprint: _Token
    manifest: ManifestFields
    checksums: _LayerChecksums


class AbortRequest(Request[None], frozen=True, kw_only=True, tag="abort"):
    """An unknown reservation is no error: as for ``release``."""

    reservation_id: _Id


class PathSegmentsRequest(
    _PagesRequest[tuple[PathSegment, ...]], frozen=True, kw_only=True, tag="path_segments"
):
    pass


class DropFastCopiesRequest(_PagesRequest[None], frozen=True, kw_only=True, tag="drop_fast_copies"):
    pass


class TrimRequest(Request[int], frozen=True, kw_only=True, tag="trim"):
    segment_id: _Id
    layer_first_token: _LayerTokens
    layer_num_bytes: _LayerBytes


class AdviseRequest(Request[int], frozen=True, kw_only=True, tag="advise"):
    """``fingerprint`` None: the conversation is the one that ``session`` stands for."""

    hint: Hint
    fingerprint: _Token | None = None
    page_keys: _PageKeys = ()
    session: SessionName | None = None


class ReportDamageRequest(Request[bool], frozen=True, kw_only=True, tag="report_damage"):
    segment_id: _Id
    reason: DamageReason


class TierCostsRequest(Request[dict[str, TierCost]], frozen=True, kw_only=True, tag="tier_costs"):
    pass


class ClearRequest(Request[None], frozen=True, kw_only=True, tag="clear"):
    """``fingerprint`` None: every model's segments."""

    fingerprint: _Token | None


# ---- operations that need no session ----


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
    """Asks for ``limit`` segments from the ``offset``-th on, ordered by id, and how many there are in all.

    With an offset, the list is the one that anybody began last, unless its end was asked for.
    """

    offset: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_SEGMENTS)] = MAX_LISTED_SEGMENTS


class InspectRequest(Request[SegmentDetails | None], frozen=True, kw_only=True, tag="inspect"):
    segment_id: _Id


class VerifyRequest(Request[DamageReport], frozen=True, kw_only=True, tag="verify"):
    pass


class FlushRequest(Request[bool], frozen=True, kw_only=True, tag="flush"):
    """The result says whether all is durable."""

    timeout_s: _Seconds


class PingRequest(Request[None], frozen=True, kw_only=True, tag="ping"):
    pass


class ShutdownRequest(Request[None], frozen=True, kw_only=True, tag="shutdown"):
    pass


SESSION_REQUESTS: tuple[type[Request[Any]], ...] = (
    HelloRequest,
    FindMissingRequest,
    LeaseRequest,
    FetchRequest,
    ReleaseRequest,
    ReserveRequest,
    CommitRequest,
    AbortRequest,
    PathSegmentsRequest,
    DropFastCopiesRequest,
    TrimRequest,
    PrefetchRequest,
    AdviseRequest,
    ReportDamageRequest,
    TierCostsRequest,
    ClearRequest,
)

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


def result_type(request: type[Request[Any]]) -> Any:
    """The type of a request's result: the ``R`` that its class states."""
    return get_args(request.__orig_bases__[0])[0]  # type: ignore[attr-defined]


def op_of(request: type[Request[Any]] | Request[Any]) -> str:
    """The operation that a request, or a type of requests, asks for, as the wire names it."""
    return str(request.__struct_config__.tag)
