"""Messages as bytes of a stream.

A message is two lengths (unsigned, 32 bits, little endian), JSON of the first length, and token ids of the
second one, in bytes: a byte that says how many bytes each has, 4 or 8, then they (signed, little endian).
Only requests whose type says so have token ids. The field ``op`` of a request says what it asks for; that of
a reply is ``reply`` or ``error``.
"""

from __future__ import annotations

import functools
import operator
import struct
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
    OpenRequest,
    R,
    Reply,
    Request,
    op_of,
    result_type,
)
from krul_backend.errors import ProtocolError
from krul_backend.segment import TokenIds

REQUESTS: tuple[type[Request[Any]], ...] = (OpenRequest, *SESSION_REQUESTS, *ADMIN_REQUESTS)

_LENGTHS = struct.Struct("<II")


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

_T = TypeVar("_T")


def encode(message: Request[Any] | Reply[Any] | ErrorReply) -> bytes:
    """The JSON of a message. Raises TypeError or ValueError if JSON has no words for a value in it."""
    return _encoder.encode(message)


def encode_token_ids(token_ids: TokenIds) -> bytes:
    narrow = token_ids.astype("<i4")
    # Those of images and sounds are hashes, which may be larger.
    ids = narrow if np.array_equal(narrow, token_ids) else token_ids.astype("<i8")
    return bytes((ids.itemsize,)) + ids.tobytes()


def pack(frame: bytes, token_ids: bytes = b"") -> bytes:
    """A message of JSON and token ids as it is sent. Raises ProtocolError if nobody would read so much."""
    _check_lengths(len(frame), len(token_ids))
    return b"".join((_LENGTHS.pack(len(frame), len(token_ids)), frame, token_ids))


class Inbox:
    """Collects the bytes of a stream, and takes them apart into messages."""

    def __init__(self) -> None:
        self._received: bytes | bytearray = b""
        self._start = 0

    def add(self, received: bytes) -> None:
        if self._start == len(self._received):
            self._received, self._start = received, 0
            return
        if not isinstance(self._received, bytearray):
            self._received = bytearray(self._received)
        del self._received[: self._start]
        self._start = 0
        self._received += received

    def next(self) -> tuple[bytes, bytes] | None:
        """JSON and token ids of the next message; None if it has not come as a whole.

        Raises:
            ProtocolError: it would be larger than what is read. Nothing that follows can be read, either.
        """
        received, start = self._received, self._start + _LENGTHS.size
        if len(received) < start:
            return None
        frame_len, ids_len = _LENGTHS.unpack_from(received, self._start)
        _check_lengths(frame_len, ids_len)
        ids_start = start + frame_len
        end = ids_start + ids_len
        if len(received) < end:
            return None
        self._start = end
        with memoryview(received) as view:  # A slice of a bytearray would be one more copy.
            return bytes(view[start:ids_start]), bytes(view[ids_start:end])


def checked_request(frame: bytes, token_ids: bytes) -> Request[Any]:
    """The request that a message is.

    Raises:
        ProtocolError: it is none, or of another version, or has token ids that it should not have.
    """
    try:
        request = decode_request(frame)
    except ProtocolError:
        envelope = decode_envelope(frame)
        _check_version(envelope[0] if envelope is not None else PROTOCOL_VERSION)
        raise
    if request.version != PROTOCOL_VERSION:
        _check_version(request.version)
    if token_ids and not request.has_token_ids:
        raise ProtocolError(f"{op_of(request)} has no token ids, got {len(token_ids)} bytes of them")
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


def decode_envelope(frame: bytes) -> tuple[int, int] | None:
    """Version and id of a request that may be of another version; None if it has none."""
    try:
        envelope: _Envelope = _decode(_envelope_decoder, frame, "request")
    except ProtocolError:
        return None
    return envelope.version, envelope.id


def decode_token_ids(frame: bytes) -> TokenIds:
    """int64 ``[n]``. Raises ProtocolError if a token id is cut off, or has neither 4 nor 8 bytes."""
    num_bytes = frame[0] if frame else 0
    if num_bytes not in (4, 8) or (len(frame) - 1) % num_bytes:
        raise ProtocolError(f"expected token ids of 4 or 8 bytes, got {len(frame)} bytes of them")
    return np.frombuffer(frame, f"<i{num_bytes}", offset=1).astype(np.int64)


@functools.cache
def _reply_decoder(request: type[Request[R]]) -> msgspec.json.Decoder[Reply[R] | ErrorReply]:
    return msgspec.json.Decoder(Reply[result_type(request)] | ErrorReply)  # type: ignore[misc]


def _decode(decoder: msgspec.json.Decoder[_T], frame: bytes, what: str) -> _T:
    try:
        return decoder.decode(frame)
    # Not UTF-8, and nested too deeply, have exceptions of their own.
    except (msgspec.MsgspecError, UnicodeError, RecursionError) as error:
        raise ProtocolError(f"expected a {what} of protocol {PROTOCOL_VERSION}: {error}") from error


def _check_lengths(*lengths: int) -> None:
    if max(lengths) > MAX_FRAME_BYTES:
        raise ProtocolError(
            f"a message of {max(lengths)} bytes is beyond the {MAX_FRAME_BYTES} that are read"
        )


def _check_version(version: int) -> None:
    if version != PROTOCOL_VERSION:
        raise ProtocolError(
            f"the daemon speaks protocol {PROTOCOL_VERSION}, the client {version}: "
            "run both from one version of krul"
        )
