"""Messages as frames of bytes.

On ``control.sock`` a request is one frame of JSON, followed by a frame of token ids (int64, little endian) if
the request's type says so; a reply is one frame of JSON. The field ``op`` of a request says what it asks
for; that of a reply is ``reply`` or ``error``.
"""

from __future__ import annotations

import functools
import operator
from typing import Annotated, Any, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from krul_backend.daemon.protocol.messages import (
    ADMIN_REQUESTS,
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    SESSION_REQUESTS,
    ErrorReply,
    R,
    Reply,
    Request,
    SessionGreeting,
    op_of,
    result_type,
)
from krul_backend.errors import ProtocolError
from krul_backend.segment import TokenIds

REQUESTS = (*SESSION_REQUESTS, *ADMIN_REQUESTS)

_MAX_TOKENS = MAX_FRAME_BYTES // 8


class _ReplyId(Struct, frozen=True):
    id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


class _Envelope(_ReplyId, frozen=True):
    version: Annotated[int, Meta(ge=0, le=1 << 31)]


_encoder = msgspec.json.Encoder()
_request_decoder: msgspec.json.Decoder[Request[Any]] = msgspec.json.Decoder(
    functools.reduce(operator.or_, REQUESTS)
)
_reply_id_decoder = msgspec.json.Decoder(_ReplyId)
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_greeting_decoder = msgspec.json.Decoder(SessionGreeting)

_T = TypeVar("_T")


def encode(message: Request[Any] | Reply[Any] | ErrorReply | SessionGreeting) -> bytes:
    return _encoder.encode(message)


def checked_request(frames: list[bytes]) -> Request[Any]:
    """The request that a message of these frames is.

    Raises:
        ProtocolError: it is none, or of another version, or has a frame too many or too few.
    """
    if not 1 <= len(frames) <= 2:
        raise ProtocolError(f"expected a message of 1 or 2 frames, got {len(frames)}")
    try:
        request = decode_request(frames[0])
    except ProtocolError:
        envelope = decode_envelope(frames[0])
        _check_version(envelope[0] if envelope is not None else PROTOCOL_VERSION)
        raise
    _check_version(request.version)
    needed = 2 if request.has_token_ids else 1
    if len(frames) != needed:
        raise ProtocolError(f"{op_of(request)} has {needed} frames, got {len(frames)}")
    return request


def decode_request(frame: bytes) -> Request[Any]:
    """Raises ProtocolError if the frame is no request, or one beyond its bounds."""
    return _decode(_request_decoder, frame, "request")


def decode_reply(frame: bytes, request: Request[R]) -> Reply[R] | ErrorReply | None:
    """The reply to a request; None if the frame is a reply to another one.

    Raises:
        ProtocolError: it is no reply to any request, or has no result of the right type.
    """
    try:
        reply: Reply[R] | ErrorReply = _decode(_reply_decoder(type(request)), frame, "reply")
    except ProtocolError:
        # A late reply to another request has a result of another type.
        if _decode(_reply_id_decoder, frame, "reply").id != request.id:
            return None
        raise
    return reply if reply.id == request.id else None


def decode_greeting(line: bytes) -> SessionGreeting:
    """Raises ProtocolError if the line is no greeting."""
    return _decode(_greeting_decoder, line, "greeting")


def decode_envelope(frame: bytes) -> tuple[int, int] | None:
    """Version and id of a request that may be of another version; None if it has none."""
    try:
        envelope: _Envelope = _decode(_envelope_decoder, frame, "request")
    except ProtocolError:
        return None
    return envelope.version, envelope.id


def encode_token_ids(token_ids: TokenIds) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i8").tobytes()


def decode_token_ids(frame: bytes) -> TokenIds:
    """int64 ``[n]``, a read-only view of the frame. Raises ProtocolError if a token id is cut off."""
    if len(frame) % 8 or len(frame) > 8 * _MAX_TOKENS:
        raise ProtocolError(f"expected at most {_MAX_TOKENS} token ids of 8 bytes, got {len(frame)} bytes")
    return np.frombuffer(frame, dtype="<i8")


@functools.cache
def _reply_decoder(request: type[Request[R]]) -> msgspec.json.Decoder[Reply[R] | ErrorReply]:
    return msgspec.json.Decoder(Reply[result_type(request)] | ErrorReply)  # type: ignore[misc]


def _decode(decoder: msgspec.json.Decoder[_T], frame: bytes, what: str) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {what} of {len(frame)} bytes is beyond the {MAX_FRAME_BYTES} that are read")
    try:
        return decoder.decode(frame)
    # Not UTF-8, and nested too deeply, have exceptions of their own.
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"expected a {what} of protocol {PROTOCOL_VERSION}: {error}") from error


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(f"the daemon speaks protocol {PROTOCOL_VERSION}, the client {version}")
