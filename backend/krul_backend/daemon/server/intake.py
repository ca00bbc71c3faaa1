"""From frames to a request, and from an exception to what it is called on the wire."""

from __future__ import annotations

from krul_backend.daemon.protocol.limits import PROTOCOL_VERSION
from krul_backend.daemon.protocol.messages import decode_envelope, decode_request, op_of
from krul_backend.daemon.protocol.replies import ErrorCode
from krul_backend.daemon.protocol.requests import TOKEN_REQUESTS, Request
from krul_backend.errors import ManifestError, ProtocolError, StoreClosedError, TierReadError


def checked_request(frames: list[bytes]) -> Request:
    """Raises ProtocolError if the frames are not one request of this version, with the frames it needs."""
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"expected a message of 1 or 2 frames, got {len(frames)}")
    try:
        request = decode_request(frames[0])
    except ProtocolError:
        envelope = decode_envelope(frames[0])
        _check_version(envelope[0] if envelope is not None else PROTOCOL_VERSION)
        raise
    _check_version(request.version)
    needed = 2 if isinstance(request, TOKEN_REQUESTS) else 1
    if len(frames) != needed:
        raise ProtocolError(f"{op_of(request)} has {needed} frames, got {len(frames)}")
    return request


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the daemon speaks protocol {PROTOCOL_VERSION}, the client {version}")


def error_code(error: Exception) -> ErrorCode:
    """What an exception is called on the wire."""
    codes: tuple[tuple[type[Exception], ErrorCode], ...] = (
        (ManifestError, "manifest"),
        (StoreClosedError, "closed"),
        (TierReadError, "tier-read"),
        (ProtocolError, "protocol"),
        (KeyError, "key"),
        (ValueError, "value"),
    )
    return next((code for kind, code in codes if isinstance(error, kind)), "internal")
