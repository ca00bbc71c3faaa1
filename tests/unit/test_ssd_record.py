"""The record format: what was written is read, and nothing else is ever believed."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
import xxhash
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import ManifestError, RecordError
from krul_backend.segment import FORMAT_VERSION, SegmentManifest
from krul_backend.tiers.common.interface import CHECKSUM_BYTES, Checksums
from krul_backend.tiers.common.record import (
    BLOCK_ALIGN,
    RECORD_ALIGN,
    decode_header,
    encode_metadata,
    encode_segment,
    no_checksums,
    record_buffers,
    segment_num_bytes,
)
from tests.support.store_builders import make_manifest, make_model

CHECKSUMS = (b"55555555", b"66666666")
"""Of two blocks of one range each."""


def encode(manifest: SegmentManifest, checksums: Checksums) -> bytes:
    return encode_segment(manifest, encode_metadata(manifest, checksums))


def assert_same(left: SegmentManifest, right: SegmentManifest) -> None:
    np.testing.assert_array_equal(left.token_ids, right.token_ids)
    for field in dataclasses.fields(SegmentManifest):
        if field.name != "token_ids":
            assert getattr(left, field.name) == getattr(right, field.name), field.name


def with_media(manifest: SegmentManifest, token_id: int, **changes: Any) -> SegmentManifest:
    """The manifest with these changes, and ``token_id`` in the place of its last token."""
    token_ids = manifest.token_ids.copy()
    token_ids[-1] = token_id
    return dataclasses.replace(manifest, token_ids=token_ids, **changes)


manifests = st.builds(
    lambda conversation, first, pages, sizes, ranges, tenant, recompute_s, params, media: with_media(
        make_manifest(
            conversation,
            first,
            first + pages,
            tuple(sizes),
            range_bytes=0 if ranges is None else max(sizes) // ranges + 1,
        ),
        media,
        tenant=tenant,
        recompute_s=recompute_s,
        codec_params=params,
    ),
    conversation=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    first=st.integers(0, 1000),
    pages=st.integers(1, 9),
    sizes=st.lists(st.integers(1, 1 << 40), min_size=1, max_size=9),
    ranges=st.none() | st.integers(1, 20),
    tenant=st.text(st.characters(exclude_categories=["Cs"]), max_size=9),
    recompute_s=st.floats(0, 1e6),
    params=st.dictionaries(
        st.text("abc"), st.integers(0, 9) | st.lists(st.booleans(), max_size=3), max_size=3
    ),
    # Those of images and sounds are made of hashes.
    media=st.integers(0, (1 << 63) - 1),
)


@given(manifest=manifests, seed=st.integers(0, 2**32))
def test_a_header_says_what_was_written(manifest: SegmentManifest, seed: int) -> None:
    rng = np.random.default_rng(seed)
    num_ranges = [-(-size // manifest.range_bytes) for size in manifest.layer_num_bytes]
    checksums = tuple(rng.bytes(CHECKSUM_BYTES * number) for number in num_ranges)
    record = decode_header(encode(manifest, checksums))
    assert_same(record.manifest, manifest)
    assert record.checksums == checksums
    assert not record.manifest.token_ids.flags.writeable
    assert all(offset % BLOCK_ALIGN == 0 for offset in record.block_offsets)
    assert record.num_bytes % RECORD_ALIGN == 0


@settings(max_examples=300)
@given(data=st.data())
def test_a_changed_or_cut_header_is_refused(data: st.DataObject) -> None:
    manifest = make_manifest("a", 2, 5, (100, 60))
    header = encode(manifest, CHECKSUMS)
    num_bytes = int.from_bytes(header[16:24], "little")
    if data.draw(st.booleans()):
        damaged = header[: data.draw(st.integers(0, num_bytes - 1))]
    else:
        changed = bytearray(header)
        for bit in data.draw(st.sets(st.integers(0, 8 * num_bytes - 1), min_size=1, max_size=4)):
            changed[bit // 8] ^= 1 << bit % 8
        damaged = bytes(changed)
    with pytest.raises(RecordError):
        decode_header(damaged)


@settings(max_examples=300)
@given(data=st.data())
def test_a_forged_header_is_refused_or_makes_a_manifest(data: st.DataObject) -> None:
    header = encode(make_manifest("a", 2, 5, (100, 60)), CHECKSUMS)
    num_bytes = int.from_bytes(header[16:24], "little")
    forged = bytearray(header)
    for offset in data.draw(st.lists(st.integers(32, num_bytes - 1), min_size=1, max_size=4)):
        forged[offset] = data.draw(st.integers(0, 255) | st.sampled_from(list(b'0019"{[,')))
    forged[8:16] = xxhash.xxh3_64_intdigest(bytes(forged[16:num_bytes])).to_bytes(8, "little")
    try:
        record = decode_header(bytes(forged))
    except RecordError:
        return
    assert len(record.checksums) == len(record.manifest.layer_num_bytes) == len(record.block_offsets)
    assert record.block_offsets[0] >= num_bytes


def test_a_record_of_the_format_before_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    manifest = make_manifest("a", 2, 5, (100, 60))
    with monkeypatch.context() as older:
        older.setattr("krul_backend.tiers.common.record.FORMAT_VERSION", FORMAT_VERSION - 1)
        header = encode(manifest, CHECKSUMS)
    with pytest.raises(RecordError, match=f"a record of format {FORMAT_VERSION - 1}"):
        decode_header(header)


def test_a_header_in_another_place_is_refused() -> None:
    manifest = make_manifest("a", 2, 5, (100, 60))
    header = encode_segment(manifest, encode_metadata(manifest, CHECKSUMS), place=1 << 63)
    assert decode_header(header, place=1 << 63).checksums == CHECKSUMS
    for other in (0, (1 << 63) + RECORD_ALIGN, (1 << 63) - RECORD_ALIGN):
        with pytest.raises(RecordError, match="checksum"):
            decode_header(header, place=other)


@given(st.binary(max_size=400))
def test_random_bytes_are_no_record(data: bytes) -> None:
    for candidate in (data, b"KRULSEG1" + data):
        with pytest.raises(RecordError):
            decode_header(candidate)


def test_empty_blocks_of_a_trimmed_segment_survive() -> None:
    whole = make_manifest("a", 1, 4, (100, 60))
    manifest = dataclasses.replace(
        whole, layer_num_bytes=(0, 60), layer_first_token=(whole.end_token, whole.start_token)
    )
    record = decode_header(encode(manifest, (b"", CHECKSUMS[1])))
    assert_same(record.manifest, manifest)
    assert record.checksums == (b"", CHECKSUMS[1])


@pytest.mark.parametrize("checksums", [(), (b"5" * 8,), (b"5" * 8, b"6" * 7), (b"5" * 8, b"6" * 16)])
def test_other_checksums_than_one_for_each_range_are_refused(checksums: Checksums) -> None:
    with pytest.raises(ManifestError, match="checksums"):
        encode_metadata(make_manifest("a", 0, 1, (100, 60)), checksums)


@given(manifest=manifests)
def test_zeros_stand_for_checksums_of_the_same_length(manifest: SegmentManifest) -> None:
    zeros = no_checksums(manifest)
    assert set(b"".join(zeros)) == {0}
    assert decode_header(encode(manifest, zeros)).checksums == zeros


@pytest.mark.parametrize("sizes", [(1,), (64, 65), (4096, 1, 8191)])
def test_a_record_takes_what_it_says_and_its_blocks_lie_where_it_says(sizes: tuple[int, ...]) -> None:
    manifest = make_manifest("a", 0, 3, sizes)
    blocks = [np.full(size, 7 + layer, dtype=np.uint8) for layer, size in enumerate(sizes)]
    metadata = encode_metadata(manifest, no_checksums(manifest))
    data = b"".join(record_buffers(manifest, metadata, blocks, place=7))
    record = decode_header(data, place=7)
    assert len(data) == record.num_bytes == segment_num_bytes(manifest, metadata)
    for offset, block in zip(record.block_offsets, blocks, strict=True):
        assert data[offset : offset + len(block)] == block.tobytes()


def test_metadata_stays_below_a_hundredth_of_the_blocks() -> None:
    # 1000 tokens of 2 KiB per layer (8 heads of 64, bf16), 32 layers, keys as SGLang's: 64 hex digits.
    model = make_model(num_layers=32)
    manifest = dataclasses.replace(
        make_manifest("a", 0, 250, (1000 * 2048,) * 32, model),
        page_keys=tuple(f"{page:064x}" for page in range(250)),
    )
    num_bytes = segment_num_bytes(manifest, encode_metadata(manifest, no_checksums(manifest)))
    assert num_bytes - manifest.num_bytes < manifest.num_bytes / 100


def test_what_json_cannot_hold_is_refused() -> None:
    manifest = dataclasses.replace(make_manifest("a", 0, 1, (9,)), codec_params={"layers": {1, 2}})
    with pytest.raises(ManifestError, match="JSON"):
        encode_metadata(manifest, no_checksums(manifest))
