"""What the store and the protocol call the same things: conversions that both sides of the socket use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from krul_backend.daemon.protocol.replies import WireHeader, WireSlice
from krul_backend.daemon.protocol.requests import WireManifest, WireModel
from krul_backend.errors import ManifestError
from krul_backend.segment import (
    ModelIdentity,
    SegmentHeader,
    SegmentManifest,
    TokenIds,
    check_codec_params_num_bytes,
)
from krul_backend.tiers.common.interface import SegmentSlice, Span


def model_to_wire(model: ModelIdentity) -> WireModel:
    return WireModel(
        name=model.name,
        config_digest=model.config_digest,
        dtype=model.dtype,
        num_layers=model.num_layers,
        num_kv_heads=model.num_kv_heads,
        k_head_dim=model.k_head_dim,
        v_head_dim=model.v_head_dim,
        page_size=model.page_size,
        tp_rank=model.tp_rank,
        tp_size=model.tp_size,
    )


def model_from_wire(wire: WireModel) -> ModelIdentity:
    return ModelIdentity(
        name=wire.name,
        config_digest=wire.config_digest,
        dtype=wire.dtype,
        num_layers=wire.num_layers,
        num_kv_heads=wire.num_kv_heads,
        k_head_dim=wire.k_head_dim,
        v_head_dim=wire.v_head_dim,
        page_size=wire.page_size,
        tp_rank=wire.tp_rank,
        tp_size=wire.tp_size,
    )


def manifest_to_wire(manifest: SegmentManifest) -> WireManifest:
    """The manifest's model goes by its fingerprint, its token ids by a frame of their own.

    Raises:
        ManifestError: the codec's parameters are too large, or nothing that JSON has words for.
    """
    try:
        codec_params = msgspec.json.encode(manifest.codec_params)
    except (TypeError, ValueError, RecursionError) as error:
        raise ManifestError(f"codec parameters that JSON has no words for: {error}") from error
    check_codec_params_num_bytes(len(codec_params))
    return WireManifest(
        page_keys=tuple(manifest.page_keys),
        parent_key=manifest.parent_key,
        start_token=manifest.start_token,
        codec=manifest.codec,
        codec_params=msgspec.Raw(codec_params),
        layer_num_bytes=tuple(manifest.layer_num_bytes),
        layer_first_token=tuple(manifest.layer_first_token),
        tenant=manifest.tenant,
        recompute_s=manifest.recompute_s,
    )


def manifest_from_wire(wire: WireManifest, model: ModelIdentity, token_ids: TokenIds) -> SegmentManifest:
    """The manifest that a client meant.

    Raises:
        ManifestError: its parts contradict each other, or the codec's parameters are too large or no object.
    """
    check_codec_params_num_bytes(len(memoryview(wire.codec_params)))
    try:
        codec_params = msgspec.json.decode(wire.codec_params, type=dict[str, Any])
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ManifestError(f"codec parameters are a JSON object, got {error}") from error
    return SegmentManifest(
        model=model,
        page_keys=wire.page_keys,
        parent_key=wire.parent_key,
        start_token=wire.start_token,
        token_ids=token_ids,
        codec=wire.codec,
        layer_num_bytes=wire.layer_num_bytes,
        codec_params=codec_params,
        layer_first_token=wire.layer_first_token,
        tenant=wire.tenant,
        recompute_s=wire.recompute_s,
    )


def header_to_wire(header: SegmentHeader) -> WireHeader:
    return WireHeader(
        page_size=header.page_size,
        start_token=header.start_token,
        num_tokens=header.num_tokens,
        codec=header.codec,
        codec_params=header.codec_params,
        layer_num_bytes=header.layer_num_bytes,
        layer_first_token=header.layer_first_token,
    )


def header_from_wire(wire: WireHeader) -> SegmentHeader:
    return SegmentHeader(
        page_size=wire.page_size,
        start_token=wire.start_token,
        num_tokens=wire.num_tokens,
        codec=wire.codec,
        codec_params=wire.codec_params,
        layer_num_bytes=wire.layer_num_bytes,
        layer_first_token=wire.layer_first_token,
    )


def slice_to_wire(part: SegmentSlice, status_span: Span | None) -> WireSlice:
    """``status_span``: where the flags of ``part.status`` lie in the arena."""
    return WireSlice(
        segment_id=part.segment_id,
        header=header_to_wire(part.header),
        tier=part.tier,
        spans=part.spans,
        checksums=part.checksums,
        first_page=part.first_page,
        end_page=part.end_page,
        status_span=status_span,
    )


def runs_to_wire(runs: Sequence[range]) -> tuple[tuple[int, int], ...]:
    return tuple((run.start, run.stop) for run in runs)


def runs_from_wire(runs: Sequence[tuple[int, int]]) -> list[range]:
    return [range(first, end) for first, end in runs]
