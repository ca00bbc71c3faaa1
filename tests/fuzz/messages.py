"""Hypothesis strategies: messages that are random, and requests that are right but for something."""

from __future__ import annotations

from typing import Any

import msgspec
import orjson
from hypothesis import strategies as st

from krul_backend.daemon.protocol.frames import REQUESTS
from krul_backend.daemon.protocol.messages import PROTOCOL_VERSION, op_of
from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.common.record import no_checksums
from tests.crash.conversations import PAGE_SIZE, Turn, model_of

Message = tuple[bytes, bytes]
"""JSON and token ids."""

MODEL = model_of(0)
_TURN = Turn("fuzz", 0, 2)
_OPS = tuple(op for op in (op_of(request) for request in REQUESTS) if op != "shutdown")

_odd_values = st.recursive(
    st.one_of(
        st.none(),
        st.booleans(),
        st.integers(-(1 << 63), (1 << 64) - 1),
        st.floats(allow_nan=False, allow_infinity=False),
        st.text(max_size=200),
        st.just("x" * 100_000),
        st.just([[]] * 5000),
    ),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4), st.dictionaries(st.text(max_size=8), inner, max_size=4)
    ),
    max_leaves=8,
)


def right_fields(op: str) -> dict[str, Any]:
    """Everything that any operation takes; what this one does not take makes it wrong, too."""
    manifest = _TURN.manifest(MODEL)
    about_pages = {"fingerprint": MODEL.fingerprint, "page_keys": list(_TURN.keys)}
    fields: dict[str, dict[str, Any]] = {
        "hello": {
            "format": FORMAT_VERSION,
            "model": msgspec.to_builtins(MODEL),
            "fingerprint": MODEL.fingerprint,
        },
        "lease": {**about_pages, "lease_id": 1},
        "fetch": {"lease_id": 1, "tails": [[list(manifest.layer_first_token), [1, 1, 1]], None]},
        "release": {"lease_id": 1},
        "reserve": {"reservation_id": 1, "layer_num_bytes": list(_TURN.layer_num_bytes), "tenant": ""},
        "commit": {
            "reservation_id": 1,
            "fingerprint": MODEL.fingerprint,
            "manifest": {
                "page_keys": list(manifest.page_keys),
                "parent_key": None,
                "start_token": 0,
                "codec": "raw",
                "codec_params": {},
                "layer_num_bytes": list(manifest.layer_num_bytes),
                "layer_first_token": list(manifest.layer_first_token),
                "tenant": "",
                "recompute_s": 0.0,
                "range_bytes": manifest.range_bytes,
            },
            "checksums": msgspec.to_builtins(no_checksums(manifest)),
        },
        "abort": {"reservation_id": 1},
        "trim": {"segment_id": 1, "layer_first_token": [0, 0, 0], "layer_num_bytes": [1, 1, 1]},
        "pin": {**about_pages, "ttl_s": 1.0},
        "report_damage": {"segment_id": 1, "reason": "undecodable"},
        "inspect": {"segment_id": 1},
        "clear": {"fingerprint": MODEL.fingerprint},
        "flush": {"timeout_s": 0.01},
        "list": {"offset": 0, "limit": 5},
    }
    return fields.get(op, about_pages if op in ("find_missing", "path_segments", "prefetch") else {})


@st.composite
def requests(draw: st.DrawFn, token: str) -> Message:
    """A request of a real session, with fields replaced or left out, then maybe cut or bent."""
    op = draw(st.sampled_from(_OPS))
    message: dict[str, Any] = {
        "op": op,
        "version": PROTOCOL_VERSION,
        "token": token,
        "id": draw(st.integers(0, 1 << 40)),
        **right_fields(op),
    }
    for name in draw(st.lists(st.sampled_from(sorted(message)), max_size=2, unique=True)):
        if draw(st.booleans()):
            message[name] = draw(_odd_values)
        else:
            del message[name]
    if message.get("op") == "shutdown":
        message["op"] = op
    frame = orjson.dumps(message, default=str, option=orjson.OPT_NON_STR_KEYS)
    bend = draw(st.sampled_from(("none", "none", "cut", "flip", "repeat")))
    if bend == "cut":
        frame = frame[: draw(st.integers(0, len(frame)))]
    elif bend == "flip":
        position = draw(st.integers(0, len(frame) - 1))
        frame = frame[:position] + bytes([draw(st.integers(0, 255))]) + frame[position + 1 :]
    elif bend == "repeat":
        frame += frame
    num_tokens = len(_TURN.keys) * PAGE_SIZE
    return frame, draw(st.sampled_from((b"", bytes(8 * num_tokens), bytes(8 * num_tokens - 1), b"\0")))


def messages(token: str) -> st.SearchStrategy[Message]:
    noise = st.tuples(st.binary(max_size=2000), st.binary(max_size=2000))
    return st.one_of(requests(token), requests(token), noise)
