"""What a client can ask of the daemon, one type per operation.

Every string, list and number is bounded, and checked before anything is made of it. A frame of token ids
follows the requests in ``TOKEN_REQUESTS``.
"""

from __future__ import annotations

from typing import Annotated, TypeAlias, get_args

from msgspec import Meta, Raw, Struct

from krul_backend.daemon.protocol.limits import MAX_LAYERS, MAX_LISTED_SEGMENTS, MAX_PAGES, PROTOCOL_VERSION
from krul_backend.tiers.common.interface import DamageReason

_Token = Annotated[str, Meta(max_length=128)]
_Key = Annotated[str, Meta(min_length=1, max_length=128)]
_Name = Annotated[str, Meta(max_length=1024)]
_Word = Annotated[str, Meta(max_length=64)]
_Tenant = Annotated[str, Meta(max_length=256)]
_Id = Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]
_Version = Annotated[int, Meta(ge=0, le=1 << 31)]
_Small = Annotated[int, Meta(ge=1, le=1 << 20)]
_Position = Annotated[int, Meta(ge=0, le=1 << 40)]
_NumBytes = Annotated[int, Meta(ge=0, le=1 << 48)]
_Seconds = Annotated[float, Meta(ge=0, le=1e9)]
_PageKeys = Annotated[tuple[_Key, ...], Meta(max_length=MAX_PAGES)]
_LayerBytes = Annotated[tuple[_NumBytes, ...], Meta(max_length=MAX_LAYERS)]
_LayerChecksums = Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_LAYERS)]
_LayerTokens = Annotated[tuple[_Position, ...], Meta(max_length=MAX_LAYERS)]


class WireModel(Struct, frozen=True, forbid_unknown_fields=True):
    """A ``ModelIdentity``."""

    name: _Name
    config_digest: Annotated[str, Meta(max_length=128)]
    dtype: _Word
    num_layers: Annotated[int, Meta(ge=1, le=MAX_LAYERS)]
    num_kv_heads: _Small
    k_head_dim: _Small
    v_head_dim: _Small
    page_size: _Small
    tp_rank: Annotated[int, Meta(ge=0, le=1 << 20)]
    tp_size: _Small


class WireManifest(Struct, frozen=True, forbid_unknown_fields=True):
    """A ``SegmentManifest`` without its model, which the request names, and its tokens, which follow it.

    ``codec_params`` are JSON that is decoded after its size was checked.
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


class Request(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="op"):
    """``token`` names the session (the admin endpoint has none: empty); the reply repeats ``id``."""

    version: _Version = PROTOCOL_VERSION
    token: _Token
    id: _Id


class _ModelRequest(Request, frozen=True, kw_only=True):
    """About pages of a model that the session said hello with."""

    fingerprint: _Token
    page_keys: _PageKeys


class HelloRequest(Request, frozen=True, kw_only=True, tag="hello"):
    """``fingerprint`` must be what the daemon computes of the model; later requests name the model by it."""

    format: _Version
    model: WireModel
    fingerprint: _Token


class FindMissingRequest(_ModelRequest, frozen=True, kw_only=True, tag="find_missing"):
    pass


class LeaseRequest(_ModelRequest, frozen=True, kw_only=True, tag="lease"):
    """``lease_id`` is the client's choice, never used before in its session. Token ids follow."""

    lease_id: _Id


class FetchRequest(Request, frozen=True, kw_only=True, tag="fetch"):
    lease_id: _Id


class ReleaseRequest(Request, frozen=True, kw_only=True, tag="release"):
    """An unknown lease is no error: the client may release what a time-out left unknown."""

    lease_id: _Id


class ReserveRequest(Request, frozen=True, kw_only=True, tag="reserve"):
    """``reservation_id`` is the client's choice, never used before in its session."""

    reservation_id: _Id
    layer_num_bytes: _LayerBytes
    tenant: _Tenant


class CommitRequest(Request, frozen=True, kw_only=True, tag="commit"):
    """``checksums``: one per layer, of what the client wrote. Token ids of the manifest follow."""

    reservation_id: _Id
    fingerprint: _Token
    manifest: WireManifest
    checksums: _LayerChecksums


class AbortRequest(Request, frozen=True, kw_only=True, tag="abort"):
    """An unknown reservation is no error: as for ``release``."""

    reservation_id: _Id


class PathSegmentsRequest(_ModelRequest, frozen=True, kw_only=True, tag="path_segments"):
    pass


class TrimRequest(Request, frozen=True, kw_only=True, tag="trim"):
    segment_id: _Id
    layer_first_token: _LayerTokens
    layer_num_bytes: _LayerBytes


class PrefetchRequest(_ModelRequest, frozen=True, kw_only=True, tag="prefetch"):
    """Token ids follow."""


class PinRequest(_ModelRequest, frozen=True, kw_only=True, tag="pin"):
    ttl_s: _Seconds


class UnpinRequest(_ModelRequest, frozen=True, kw_only=True, tag="unpin"):
    pass


class ReportDamageRequest(Request, frozen=True, kw_only=True, tag="report_damage"):
    segment_id: _Id
    reason: DamageReason


class TierCostsRequest(Request, frozen=True, kw_only=True, tag="tier_costs"):
    pass


class StatsRequest(Request, frozen=True, kw_only=True, tag="stats"):
    pass


class ListRequest(Request, frozen=True, kw_only=True, tag="list"):
    """``limit`` segments from the ``offset``-th on, ordered by id."""

    offset: Annotated[int, Meta(ge=0, le=1 << 40)] = 0
    limit: Annotated[int, Meta(ge=1, le=MAX_LISTED_SEGMENTS)] = MAX_LISTED_SEGMENTS


class InspectRequest(Request, frozen=True, kw_only=True, tag="inspect"):
    segment_id: _Id


class VerifyRequest(Request, frozen=True, kw_only=True, tag="verify"):
    pass


class ClearRequest(Request, frozen=True, kw_only=True, tag="clear"):
    """``fingerprint`` None: every model's segments."""

    fingerprint: _Token | None


class FlushRequest(Request, frozen=True, kw_only=True, tag="flush"):
    timeout_s: _Seconds


class PingRequest(Request, frozen=True, kw_only=True, tag="ping"):
    pass


class ShutdownRequest(Request, frozen=True, kw_only=True, tag="shutdown"):
    pass


AnyRequest: TypeAlias = (
    HelloRequest
    | FindMissingRequest
    | LeaseRequest
    | FetchRequest
    | ReleaseRequest
    | ReserveRequest
    | CommitRequest
    | AbortRequest
    | PathSegmentsRequest
    | TrimRequest
    | PrefetchRequest
    | PinRequest
    | UnpinRequest
    | ReportDamageRequest
    | TierCostsRequest
    | StatsRequest
    | ListRequest
    | InspectRequest
    | VerifyRequest
    | ClearRequest
    | FlushRequest
    | PingRequest
    | ShutdownRequest
)

REQUESTS: tuple[type[Request], ...] = get_args(AnyRequest)
TOKEN_REQUESTS = (LeaseRequest, CommitRequest, PrefetchRequest)
"""Requests that a frame of token ids follows."""
