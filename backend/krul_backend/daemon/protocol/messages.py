"""Messages between the daemon and its clients as frames of bytes.

On ``control.sock`` a request is one JSON frame (``requests.py``), for ``TOKEN_REQUESTS`` followed by one of
token ids (int32, little endian); a reply is one JSON frame (``replies.py``). ``op`` says which type it is.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
import numpy as np
from msgspec import Meta, Struct

from krul_backend.daemon.protocol.limits import MAX_FRAME_BYTES, PROTOCOL_VERSION
from krul_backend.daemon.protocol.replies import AnyReply, Reply
from krul_backend.daemon.protocol.requests import AnyRequest, Request
from krul_backend.errors import ProtocolError
from krul_backend.segment import TokenIds

SESSION_SOCKET = "session.sock"
CONTROL_SOCKET = "control.sock"

_MAX_TOKENS = MAX_FRAME_BYTES // 4


class SessionGreeting(Struct, frozen=True):
    """The line that the daemon sends on ``session.sock``, with the arena's file descriptor."""

    protocol: int
    format: int
    token: str
    capacity_bytes: int


class _Envelope(Struct, frozen=True):
    version: Annotated[int, Meta(ge=0, le=1 << 31)]
    id: Annotated[int, Meta(ge=0, le=(1 << 63) - 1)]


_encoder = msgspec.json.Encoder()
_request_decoder: msgspec.json.Decoder[Request] = msgspec.json.Decoder(AnyRequest)
_reply_decoder: msgspec.json.Decoder[Reply] = msgspec.json.Decoder(AnyReply)
_envelope_decoder = msgspec.json.Decoder(_Envelope)
_greeting_decoder = msgspec.json.Decoder(SessionGreeting)

_T = TypeVar("_T")


def op_of(message: type[Request] | type[Reply] | Request | Reply) -> str:
    """The operation that a message, or a type of messages, belongs to."""
    return str(message.__struct_config__.tag)


def encode(message: Request | Reply | SessionGreeting) -> bytes:
    return _encoder.encode(message)


def decode_request(frame: bytes) -> Request:
    """Raises ProtocolError if the frame is no request, or one beyond its bounds."""
    return _decode(_request_decoder, frame, "request")


def decode_reply(frame: bytes) -> Reply:
    """Raises ProtocolError if the frame is no reply."""
    return _decode(_reply_decoder, frame, "reply")


def decode_greeting(line: bytes) -> SessionGreeting:
    """Raises ProtocolError if the line is no greeting."""
    return _decode(_greeting_decoder, line, "greeting")


def decode_envelope(frame: bytes) -> tuple[int, int] | None:
    """Version and id of what may be another version's request; None if it has none."""
    try:
        envelope: _Envelope = _decode(_envelope_decoder, frame, "request")
    except ProtocolError:
        return None
    return envelope.version, envelope.id


def encode_token_ids(token_ids: TokenIds) -> bytes:
    return np.ascontiguousarray(token_ids, dtype="<i4").tobytes()


def decode_token_ids(frame: bytes) -> TokenIds:
    """int32 ``[n]``, a read-only view of the frame. Raises ProtocolError if they are not whole."""
    if len(frame) % 4 or len(frame) > 4 * _MAX_TOKENS:
        raise ProtocolError(f"expected at most {_MAX_TOKENS} token ids of 4 bytes, got {len(frame)} bytes")
    return np.frombuffer(frame, dtype="<i4")


def _decode(decoder: msgspec.json.Decoder[_T], frame: bytes, what: str) -> _T:
    if len(frame) > MAX_FRAME_BYTES:
        raise ProtocolError(f"a {what} of {len(frame)} bytes is beyond the {MAX_FRAME_BYTES} that are read")
    try:
        return decoder.decode(frame)
    # Not UTF-8, and nested too deeply, have exceptions of their own.
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"expected a {what} of protocol {PROTOCOL_VERSION}: {error}") from error
