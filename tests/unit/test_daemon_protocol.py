from __future__ import annotations

import json
import struct
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.daemon.protocol.frames import (
    REQUESTS,
    Inbox,
    decode_envelope,
    decode_reply,
    decode_request,
    decode_token_ids,
    encode,
    encode_token_ids,
    pack,
)
from krul_backend.daemon.protocol.messages import (
    MAX_CHECKSUM_BYTES,
    MAX_FRAME_BYTES,
    MAX_LAYERS,
    PROTOCOL_VERSION,
    AdviseRequest,
    ClearRequest,
    CommitRequest,
    DropFastCopiesRequest,
    ErrorReply,
    FetchRequest,
    HelloRequest,
    LeaseRequest,
    ManifestFields,
    PathSegmentsRequest,
    PingRequest,
    Reply,
    Request,
    ReserveRequest,
    TailFields,
    op_of,
    result_type,
)
from krul_backend.errors import ManifestError, ProtocolError
from krul_backend.segment import MAX_CODEC_PARAMS_BYTES, ModelIdentity, SegmentManifest
from krul_backend.tiers.common.hint import Hint, SessionName
from krul_backend.tiers.common.interface import LayerStatus, PathSegment, SegmentSlice, Span

MODEL = ModelIdentity("tiny", "00ff", "bfloat16", 2, 2, 8, 8, 4, 0, 1)
MANIFEST = SegmentManifest(
    model=MODEL,
    page_keys=("b", "c"),
    parent_key="a",
    start_token=4,
    token_ids=np.arange(8, dtype=np.int64),
    codec="pair",
    layer_num_bytes=(100, 0),
    codec_params={"strategy": {"partners": [1, None]}, "scale": 0.5},
    layer_first_token=(8, 12),
    tenant="t",
    recompute_s=0.25,
    range_bytes=64,
)
HELLO = HelloRequest(token="s", id=1, format=3, model=MODEL, fingerprint=MODEL.fingerprint)
LEASE = LeaseRequest(token="s", id=2, fingerprint="f", page_keys=("a", "b"), lease_id=7)
COMMIT = CommitRequest(
    token="s",
    id=3,
    reservation_id=9,
    fingerprint="f",
    manifest=ManifestFields.of(MANIFEST),
    checksums=(bytes(range(248, 256)), b""),
)
RESERVE = ReserveRequest(token="s", id=4, reservation_id=9, layer_num_bytes=(1, 2), tenant="t")
FETCH = FetchRequest(token="s", id=9, lease_id=7, tails=(None, TailFields((8, 12), (60, 0))))
CLEAR = ClearRequest(token="s", id=5, fingerprint=None)
DROP_COPIES = DropFastCopiesRequest(token="s", id=8, fingerprint="f", page_keys=("a", "b"))
ADVISE = AdviseRequest(token="s", id=7, hint=Hint(ttl_s=1.0), session=SessionName("t", "agent"))
EXAMPLES: tuple[Request, ...] = (
    HELLO,
    LEASE,
    FETCH,
    COMMIT,
    RESERVE,
    CLEAR,
    ADVISE,
    DROP_COPIES,
    PingRequest(token="", id=6),
)


def decodes_or_refuses(frame: bytes) -> Request | None:
    try:
        request = decode_request(frame)
    except ProtocolError:
        return None
    assert type(request) in REQUESTS
    return request


def changed(request: Request, **fields: Any) -> bytes:
    return json.dumps({**json.loads(encode(request)), **fields}).encode()


def changed_model(**fields: Any) -> bytes:
    return changed(HELLO, model={**json.loads(encode(HELLO))["model"], **fields})


def test_every_operation_has_one_request_whose_result_has_a_type() -> None:
    ops = [op_of(request) for request in REQUESTS]
    assert len(set(ops)) == len(ops)
    for request in REQUESTS:
        msgspec.json.Decoder(result_type(request))


@pytest.mark.parametrize("request_", EXAMPLES, ids=op_of)
def test_a_request_comes_back_as_it_was(request_: Request) -> None:
    assert decode_request(encode(request_)) == request_
    assert decode_envelope(encode(request_)) == (PROTOCOL_VERSION, request_.id)


def test_an_operation_of_another_version_still_has_an_id() -> None:
    frame = b'{"op":"teleport","version":9,"id":5,"whatever":[{}]}'
    assert decodes_or_refuses(frame) is None
    assert decode_envelope(frame) == (9, 5)
    assert decode_envelope(b'{"op":"ping"}') is None
    assert decode_envelope(b"[]") is None


@pytest.mark.parametrize(
    "frame",
    [
        changed(LEASE, lease_id=-1),
        changed(LEASE, lease_id=1 << 63),
        changed(LEASE, lease_id=1.5),
        changed(LEASE, lease_id="7"),
        changed(LEASE, page_keys=["k" * 129]),
        changed(LEASE, page_keys=[""]),
        changed(LEASE, page_keys="abc"),
        changed(LEASE, surprise=1),
        changed(LEASE, fast_copies="some"),
        changed(LEASE, fast_copies=True),
        changed(DROP_COPIES, page_keys=["k" * 129]),
        changed(DROP_COPIES, page_keys=None),
        changed(LEASE, token="t" * 129),
        changed(FETCH, tails=[[[-1], [1]]]),
        changed(FETCH, tails=[[[0], [-1]]]),
        changed(FETCH, tails=[[[0], [1 << 60]]]),
        changed(FETCH, tails=[[[0] * (MAX_LAYERS + 1), [1]]]),
        changed(FETCH, tails=[[[0]]]),
        changed(FETCH, tails=[7]),
        changed(COMMIT, checksums=[0, 0]),
        changed(COMMIT, checksums=["no base64"]),
        changed(COMMIT, checksums=["A" * (2 * MAX_CHECKSUM_BYTES)]),
        changed(COMMIT, checksums=[""] * (MAX_LAYERS + 1)),
        changed(COMMIT, manifest={**json.loads(encode(COMMIT))["manifest"], "range_bytes": -1}),
        changed(RESERVE, layer_num_bytes=[1] * (MAX_LAYERS + 1)),
        changed(RESERVE, layer_num_bytes=[-1]),
        changed(RESERVE, layer_num_bytes=[1 << 60]),
        changed(RESERVE, tenant="t" * 257),
        changed(HELLO, model={}),
        changed_model(num_layers=0),
        changed_model(num_layers=MAX_LAYERS + 1),
        changed_model(num_kv_heads=0),
        changed_model(page_size=(1 << 20) + 1),
        changed_model(tp_rank=-1),
        changed_model(v_head_dim=1.5),
        changed_model(name="n" * 1025),
        changed_model(config_digest="d" * 129),
        changed_model(dtype="t" * 65),
        changed(ADVISE, hint={"ttl_s": -1}),
        changed(ADVISE, hint={"next_use_s": 86_401}),
        changed(ADVISE, hint={"priority": 100.5}),
        changed(ADVISE, hint={"demote": True, "prefetch": True}),
        changed(ADVISE, hint={"drop": True, "ttl_s": 1}),
        changed(ADVISE, hint={"demote": 1}),
        changed(ADVISE, session={"tenant": "", "name": ""}),
        changed(ADVISE, session={"tenant": "", "name": "n" * 257}),
        b'{"op":"advise","token":"s","id":1,"version":1,"hint":{"ttl_s":1e999}}',
        b'{"op":"advise","token":"s","id":1,"version":1,"hint":{"ttl_s":NaN}}',
        b'{"op":"ping","token":"\xff","id":1}',
        b'{"op":"ping","token":"\\ud800","id":1}',
        b"[" * 100_000,
        encode(COMMIT).replace(b'"scale":0.5', b'"scale":' + b"[" * 100_000 + b"]" * 100_000),
        b" " * (MAX_FRAME_BYTES + 1),
        b"",
    ],
    ids=lambda frame: frame[:60].decode(errors="replace"),
)
def test_what_is_out_of_bounds_is_refused(frame: bytes) -> None:
    assert decodes_or_refuses(frame) is None


@given(st.binary(max_size=200))
def test_random_bytes_are_refused(frame: bytes) -> None:
    assert decodes_or_refuses(frame) is None
    with pytest.raises(ProtocolError):
        decode_reply(frame, LEASE)


@given(st.lists(st.tuples(st.binary(max_size=50), st.binary(max_size=50)), max_size=5), st.data())
def test_messages_come_out_as_they_went_in_however_a_stream_is_cut(
    messages: list[tuple[bytes, bytes]], data: st.DataObject
) -> None:
    stream = b"".join(pack(*message) for message in messages)
    inbox = Inbox()
    received = []
    while stream:
        num_bytes = data.draw(st.integers(1, len(stream)))
        inbox.add(stream[:num_bytes])
        stream = stream[num_bytes:]
        while data.draw(st.booleans()) and (message := inbox.next()) is not None:
            received.append(message)
    while (message := inbox.next()) is not None:
        received.append(message)
    assert received == messages


@pytest.mark.parametrize("lengths", [(MAX_FRAME_BYTES + 1, 0), (2, MAX_FRAME_BYTES + 1)])
def test_a_message_beyond_the_bound_is_refused_before_it_has_come(lengths: tuple[int, int]) -> None:
    inbox = Inbox()
    inbox.add(struct.pack("<II", *lengths))
    with pytest.raises(ProtocolError, match=f"of {MAX_FRAME_BYTES + 1} bytes is beyond"):
        inbox.next()
    with pytest.raises(ProtocolError, match="is beyond"):
        pack(*(bytes(length) for length in lengths))


@settings(max_examples=400)
@given(st.sampled_from(EXAMPLES), st.data())
def test_a_mutated_request_is_a_request_or_refused(request_: Request, data: st.DataObject) -> None:
    frame = bytearray(encode(request_))
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, len(frame)))
        removed = data.draw(st.integers(0, 12))
        frame[at : at + removed] = data.draw(st.binary(max_size=6))
    decoded = decodes_or_refuses(bytes(frame))
    if decoded is not None:
        assert decode_request(encode(decoded)) == decoded


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-(1 << 70), 1 << 70) | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=400)
@given(st.sampled_from(EXAMPLES), JSON, st.data())
def test_a_field_of_another_kind_is_taken_or_refused(
    request_: Request, value: Any, data: st.DataObject
) -> None:
    fields = json.loads(encode(request_))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = value
    decoded = decodes_or_refuses(json.dumps(fields).encode())
    if decoded is not None:
        assert json.loads(encode(decoded))[name] == pytest.approx(value)


def test_replies_come_back_as_they_were() -> None:
    part = SegmentSlice(
        segment_id=3,
        header=MANIFEST.header,
        tier="ssd",
        blocks=(np.zeros(100, np.uint8), np.zeros(0, np.uint8)),
        spans=(Span(0, 100), Span(0, 0)),
        checksums=(bytes(range(248, 256)) * 2, b""),
        first_page=0,
        end_page=2,
        status=LayerStatus(np.zeros(2, np.uint8)),
        status_span=Span(4096, 2),
    )
    reply = Reply(id=LEASE.id, result=(part.without_views(),))
    decoded = decode_reply(encode(reply), LEASE)
    assert isinstance(decoded, Reply)
    (found,) = decoded.result
    assert (found.spans, found.status_span, found.checksums) == (part.spans, part.status_span, part.checksums)
    assert (found.status, len(found.blocks)) == (None, 0)
    assert vars(found.header) == vars(part.header)
    refused = ErrorReply(id=LEASE.id, code="tier-read", message="gone")
    assert decode_reply(encode(refused), LEASE) == refused


def test_a_reply_to_another_request_is_told_apart() -> None:
    late = encode(Reply(id=LEASE.id - 1, result=7))
    assert decode_reply(late, LEASE) is None
    assert decode_reply(encode(Reply(id=LEASE.id - 1, result=())), LEASE) is None
    with pytest.raises(ProtocolError):
        decode_reply(encode(Reply(id=LEASE.id, result=7)), LEASE)


def test_models_headers_and_manifests_come_back_as_they_were() -> None:
    hello = decode_request(encode(HELLO))
    assert isinstance(hello, HelloRequest)
    assert (hello.model, hello.model.fingerprint) == (MODEL, MODEL.fingerprint)
    asked = PathSegmentsRequest(id=1, fingerprint="f", page_keys=())
    found = decode_reply(encode(Reply(id=1, result=(PathSegment(7, MANIFEST.header),))), asked)
    assert isinstance(found, Reply)
    assert vars(found.result[0].header) == vars(MANIFEST.header)
    sent = decode_request(encode(COMMIT))
    assert isinstance(sent, CommitRequest)
    token_ids = decode_token_ids(encode_token_ids(MANIFEST.token_ids))
    got = sent.manifest.manifest(MODEL, token_ids)
    assert vars(got.header) == vars(MANIFEST.header)
    assert (got.page_keys, got.parent_key, got.tenant) == (("b", "c"), "a", "t")
    assert got.recompute_s == 0.25
    assert got.token_ids.tolist() == list(range(8))
    with pytest.raises(ManifestError, match="need 8 token ids, got 7"):
        sent.manifest.manifest(MODEL, token_ids[:-1])


@pytest.mark.parametrize("num_bytes", [4, 8])
@given(data=st.data())
def test_token_ids_come_back_as_they_were(num_bytes: int, data: st.DataObject) -> None:
    bits = 8 * num_bytes - 1
    token_ids = data.draw(st.lists(st.integers(-(1 << bits), (1 << bits) - 1), max_size=50))
    frame = encode_token_ids(np.array(token_ids, dtype=np.int64))
    is_small = all(-(1 << 31) <= each < 1 << 31 for each in token_ids)
    assert len(frame) == 1 + (4 if is_small else 8) * len(token_ids)
    found = decode_token_ids(frame)
    assert (found.tolist(), found.dtype) == (token_ids, np.int64)


@pytest.mark.parametrize("frame", [b"", b"\x04123", b"\x081234", b"\x061234567890ab", b"\x00"])
def test_a_part_of_a_token_id_is_refused(frame: bytes) -> None:
    with pytest.raises(ProtocolError, match=f"got {len(frame)} bytes"):
        decode_token_ids(frame)


@pytest.mark.parametrize(
    "params",
    [
        b'{"a":"' + b"x" * MAX_CODEC_PARAMS_BYTES + b'"}',
        b"[]",
        b'{"a":"\xff"}',
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
    ],
)
def test_codec_params_on_the_wire_are_bounded_before_they_are_decoded(params: bytes) -> None:
    frame = encode(COMMIT).replace(bytes(COMMIT.manifest.codec_params), params)
    try:
        sent = decode_request(frame)
    except ProtocolError:
        return
    assert isinstance(sent, CommitRequest)
    with pytest.raises(ManifestError, match="codec parameters"):
        sent.manifest.manifest(MODEL, MANIFEST.token_ids)


@pytest.mark.parametrize(
    ("tails", "sent"), [(None, None), ((None, TailFields((8, 12), (60, 0))), [None, [[8, 12], [60, 0]]])]
)
def test_a_fetch_names_its_lease_and_what_is_read_of_it(tails: Any, sent: Any) -> None:
    frame = encode(FetchRequest(token="s", id=1, lease_id=2, tails=tails))
    assert json.loads(frame) == {
        "op": "fetch",
        "version": PROTOCOL_VERSION,
        "token": "s",
        "id": 1,
        "lease_id": 2,
        "tails": sent,
    }
