"""The messages of sessions: for each operation of the store one request, and its reply.

The dataclasses of the store travel as they are; a class of its own exists here only where the wire has less
than the store: the bytes of a slice stay in shared memory, and a manifest's tokens follow in a frame of their
own. Every string, list and number of a request has a bound, which is checked when the request is decoded.

To add an operation, write its messages and enter them in ``OPERATIONS``; then write the server's handler and
the client's method.
"""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta, Raw, Struct

from krul_backend.errors import DaemonError, ManifestError, ProtocolError, StoreClosedError, TierReadError
from krul_backend.planner.costs import TierCost
from krul_backend.segment import (
    ModelIdentity,
    SegmentHeader,
    SegmentManifest,
    TokenIds,
    check_codec_params_num_bytes,
)
from krul_backend.tiers.common.interface import (
    DamageReason,
    PathSegment,
    SegmentSlice,
    Span,
)

PROTOCOL_VERSION = 3
MAX_FRAME_BYTES = 64 << 20
MAX_PAGES = 1_000_000
MAX_LAYERS = 1024
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
Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[int, Meta(ge=0, le=1 << 31)]
_Position = Annotated[int, Meta(ge=0, le=1 << 40)]
_NumBytes = Annotated[int, Meta(ge=0, le=1 << 48)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_PageKeys = Annotated[tuple[_Key, ...], Meta(max_length=MAX_PAGES)]
_LayerBytes = Annotated[tuple[_NumBytes, ...], Meta(max_length=MAX_LAYERS)]
_LayerChecksums = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_LAYERS)]
_LayerTokens = Annotated[tuple[_Position, ...], Meta(max_length=MAX_LAYERS)]

R = TypeVar("R", bound="Reply")


class SessionGreeting(Struct, frozen=True):
    """The line that the daemon sends on ``session.sock``, with the arena's file descriptor."""

    protocol: int
    format: int
    token: str
    capacity_bytes: int


class Reply(Struct, frozen=True, kw_only=True, tag_field="op"):
    """``id`` is the request's."""

    id: int


class Request(Struct, Generic[R], frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    """A request that is answered with an ``R``, or with an ``ErrorReply``.

    ``token`` names the session; it is empty for a client without one. The reply repeats ``id``. A frame of
    token ids follows a request with ``has_token_ids``.
    """

    has_token_ids: ClassVar[bool] = False

    version: _Version = PROTOCOL_VERSION
    token: _Token
    id: Id


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


class Done(Reply, frozen=True, kw_only=True, tag="done"):
    """The reply to a request that asks for something to be done, and for no information."""


class ErrorReply(Reply, frozen=True, kw_only=True, tag="error"):
    code: ErrorCode
    message: str


# ---- operations of a session ----


class HelloRequest(Request[Done], frozen=True, kw_only=True, tag="hello"):
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


class FindMissingReply(Reply, frozen=True, kw_only=True, tag="find_missing"):
    """Runs ``[first, end)`` of indices into the request's keys."""

    missing: tuple[tuple[int, int], ...]


class FindMissingRequest(_PagesRequest[FindMissingReply], frozen=True, kw_only=True, tag="find_missing"):
    pass


class SliceSpans(Struct, frozen=True):
    """A ``SegmentSlice`` that says where its blocks lie instead of having them.

    ``spans`` are empty before a fetch if ``tier`` is not DRAM. ``status_span`` is where the flags of its
    layers lie, None when all have landed.
    """

    segment_id: int
    header: SegmentHeader
    tier: str
    spans: tuple[Span, ...]
    checksums: tuple[int, ...]
    first_page: int
    end_page: int
    status_span: Span | None

    @classmethod
    def of(cls, part: SegmentSlice, status_span: Span | None) -> SliceSpans:
        return cls(
            segment_id=part.segment_id,
            header=part.header,
            tier=part.tier,
            spans=part.spans,
            checksums=part.checksums,
            first_page=part.first_page,
            end_page=part.end_page,
            status_span=status_span,
        )


class LeaseReply(Reply, frozen=True, kw_only=True, tag="lease"):
    """``num_pages`` 0: nothing was found, and there is no lease."""

    num_pages: int
    slices: tuple[SliceSpans, ...]


class LeaseRequest(_PagesRequest[LeaseReply], frozen=True, kw_only=True, tag="lease"):
    """``lease_id`` is the client's choice, never used before in its session."""

    has_token_ids: ClassVar[bool] = True

    lease_id: Id


class FetchReply(Reply, frozen=True, kw_only=True, tag="fetch"):
    """The lease's slices, all with spans."""

    slices: tuple[SliceSpans, ...]


class FetchRequest(Request[FetchReply], frozen=True, kw_only=True, tag="fetch"):
    lease_id: Id


class ReleaseRequest(Request[Done], frozen=True, kw_only=True, tag="release"):
    """An unknown lease is no error: after a time-out the client releases what it may have been granted."""

    lease_id: Id


class ReserveReply(Reply, frozen=True, kw_only=True, tag="reserve"):
    """``spans`` None: no space, and there is no reservation."""

    spans: tuple[Span, ...] | None


class ReserveRequest(Request[ReserveReply], frozen=True, kw_only=True, tag="reserve"):
    """``reservation_id`` is the client's choice, never used before in its session."""

    reservation_id: Id
    layer_num_bytes: _LayerBytes
    tenant: _Tenant


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
    recompute_s: Seconds

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


class CommitReply(Reply, frozen=True, kw_only=True, tag="commit"):
    segment_id: int


class CommitRequest(Request[CommitReply], frozen=True, kw_only=True, tag="commit"):
    """``checksums``: one per layer, of what the client wrote. The token ids are the manifest's."""

    has_token_ids: ClassVar[bool] = True

    reservation_id: Id
    fingerprint: _Token
    manifest: ManifestFields
    checksums: _LayerChecksums


class AbortRequest(Request[Done], frozen=True, kw_only=True, tag="abort"):
    """An unknown reservation is no error: as for ``release``."""

    reservation_id: Id


class PathSegmentsReply(Reply, frozen=True, kw_only=True, tag="path_segments"):
    segments: tuple[PathSegment, ...]


class PathSegmentsRequest(_PagesRequest[PathSegmentsReply], frozen=True, kw_only=True, tag="path_segments"):
    pass


class TrimReply(Reply, frozen=True, kw_only=True, tag="trim"):
    num_bytes: int


class TrimRequest(Request[TrimReply], frozen=True, kw_only=True, tag="trim"):
    segment_id: Id
    layer_first_token: _LayerTokens
    layer_num_bytes: _LayerBytes


class PrefetchReply(Reply, frozen=True, kw_only=True, tag="prefetch"):
    num_pages: int


class PrefetchRequest(_PagesRequest[PrefetchReply], frozen=True, kw_only=True, tag="prefetch"):
    has_token_ids: ClassVar[bool] = True


class PinReply(Reply, frozen=True, kw_only=True, tag="pin"):
    num_pages: int


class PinRequest(_PagesRequest[PinReply], frozen=True, kw_only=True, tag="pin"):
    ttl_s: Seconds


class ReportDamageReply(Reply, frozen=True, kw_only=True, tag="report_damage"):
    is_damaged: bool


class ReportDamageRequest(Request[ReportDamageReply], frozen=True, kw_only=True, tag="report_damage"):
    segment_id: Id
    reason: DamageReason


class TierCostsReply(Reply, frozen=True, kw_only=True, tag="tier_costs"):
    tier_costs: dict[str, TierCost]


class TierCostsRequest(Request[TierCostsReply], frozen=True, kw_only=True, tag="tier_costs"):
    pass


class ClearRequest(Request[Done], frozen=True, kw_only=True, tag="clear"):
    """``fingerprint`` None: every model's segments."""

    fingerprint: _Token | None


OPERATIONS: dict[type[Request[Any]], type[Reply]] = {
    HelloRequest: Done,
    FindMissingRequest: FindMissingReply,
    LeaseRequest: LeaseReply,
    FetchRequest: FetchReply,
    ReleaseRequest: Done,
    ReserveRequest: ReserveReply,
    CommitRequest: CommitReply,
    AbortRequest: Done,
    PathSegmentsRequest: PathSegmentsReply,
    TrimRequest: TrimReply,
    PrefetchRequest: PrefetchReply,
    PinRequest: PinReply,
    ReportDamageRequest: ReportDamageReply,
    TierCostsRequest: TierCostsReply,
    ClearRequest: Done,
}
"""Every request of a session, and its reply."""


def op_of(message: type[Request[Any]] | type[Reply] | Request[Any] | Reply) -> str:
    """The name of a message, or of a type of messages, on the wire: for a request, its operation."""
    return str(message.__struct_config__.tag)
