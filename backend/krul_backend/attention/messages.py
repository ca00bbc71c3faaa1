"""Packs and reads the messages between the similarity worker and its client: a length, then JSON."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Mapping
from typing import Any

_LENGTH = struct.Struct("<I")
_MAX_BYTES = 64 << 10

Read = Callable[[int], bytes]
"""Reads at most that many bytes, at least one; ``b""`` when the other side is gone."""


def pack_message(values: Mapping[str, Any]) -> bytes:
    """The bytes of one message; ``values`` are plain JSON values."""
    body = json.dumps(values, separators=(",", ":")).encode()
    return _LENGTH.pack(len(body)) + body


def read_message(read: Read) -> dict[str, Any] | None:
    """The next message, or None when the other side has closed its end.

    Raises:
        ValueError: if the bytes are not a message.
    """
    header = _read_exactly(read, _LENGTH.size)
    if header is None:
        return None
    (num_bytes,) = _LENGTH.unpack(header)
    if num_bytes > _MAX_BYTES:
        raise ValueError(f"a message of {num_bytes} bytes; at most {_MAX_BYTES} are accepted")
    body = _read_exactly(read, num_bytes)
    if body is None:
        return None
    values = json.loads(body)
    if not isinstance(values, dict):
        raise ValueError(f"a message is an object, got {values!r}")
    return values


def _read_exactly(read: Read, num_bytes: int) -> bytes | None:
    parts = bytearray()
    while len(parts) < num_bytes:
        part = read(num_bytes - len(parts))
        if not part:
            return None
        parts += part
    return bytes(parts)
