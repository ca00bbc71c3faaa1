"""The records in which segments are stored: a header with its own checksum, then the layers' blocks.

All numbers are little endian. A record starts at a multiple of 4096 bytes and takes a multiple of 4096::

    offset  size
    0       8     magic: b"KRULSEG1"
    8       8     XXH3-64 of bytes [16, header_num_bytes), its seed being the place of the record
    16      8     header_num_bytes, without the padding that follows it
    24      8     record_num_bytes, all padding included
    32      8     zeros
    40      4     L, number of layers
    44      4     P, number of pages
    48      4     T, number of token ids
    52      4     J, bytes of JSON
    56      4     K, bytes of page keys
    60      4     FORMAT_VERSION of the manifest
    64      8 L   size of each layer's block in bytes
    ..      8 T   token ids (int64)
    ..      2 P   bytes of each page key
    ..      K     page keys, UTF-8, one after the other
    ..      J     the manifest's other fields as JSON
    ..      ..    checksums of the ranges of each layer's block (XXH3-64, see ``block_checksum``)
    then zeros to the next multiple of 64: layer 0's block; each block starts at a multiple of 64.

No field of a header is used before its checksum was found right. In a log file the place is the file's
random id plus the record's offset (``LogFile.place``), so that no bytes elsewhere pass for a header: neither
what an earlier file left on the disk, nor KV that happens to look like one. For records that are not found by
a search through a file the place is 0.
"""

from __future__ import annotations

import dataclasses
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

import numpy as np
import orjson
import xxhash

from krul_backend.errors import ManifestError, RecordError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, SegmentManifest, num_ranges
from krul_backend.tiers.common.interface import CHECKSUM_BYTES, Block, Checksums, checked_checksums

RECORD_ALIGN = 4096
"""Records begin and end at multiples of this: O_DIRECT needs that, and pages of the cache are not shared."""

BLOCK_ALIGN = 64
MAGIC = b"KRULSEG1"
_FIXED = struct.Struct("<8sQQQQIIIIII")
FIXED_NUM_BYTES = _FIXED.size
MAX_HEADER_NUM_BYTES = 1 << 30
_MAX_RECORD_NUM_BYTES = 1 << 46
_CHECKED_FROM = 16
_SCALARS = (
    "parent_key",
    "start_token",
    "codec",
    "codec_params",
    "layer_first_token",
    "tenant",
    "recompute_s",
    "range_bytes",
)


def aligned(num_bytes: int, align: int) -> int:
    """The next multiple of ``align``."""
    return -(-num_bytes // align) * align


@dataclass(frozen=True, eq=False)
class SegmentRecord:
    """A stored segment. ``block_offsets[l]`` is where layer ``l``'s block starts, from the record's start.

    ``num_bytes``: of the whole record, padding included.
    """

    num_bytes: int
    manifest: SegmentManifest
    checksums: Checksums
    block_offsets: tuple[int, ...]

    @classmethod
    def of(cls, manifest: SegmentManifest, checksums: Checksums, metadata: bytes) -> SegmentRecord:
        """Describe the record that a segment is written as; ``metadata`` is from ``encode_metadata``."""
        offsets, num_bytes = _layout(FIXED_NUM_BYTES + len(metadata), manifest.layer_num_bytes)
        return cls(num_bytes, manifest, checksums, offsets)


def segment_num_bytes(manifest: SegmentManifest, metadata: bytes) -> int:
    """Bytes of a whole record, padding included; ``metadata`` is ``encode_metadata``'s."""
    return _layout(FIXED_NUM_BYTES + len(metadata), manifest.layer_num_bytes)[1]


def encode_metadata(manifest: SegmentManifest, checksums: Checksums) -> bytes:
    """Encode a header's part after the first 64 bytes, which does not depend on where it is written.

    Raises:
        ManifestError: there is something in the manifest that JSON, or a field of this size, cannot hold, or
            there is not one checksum for each range.
    """
    checked_checksums(checksums, manifest.layer_num_bytes, manifest.range_bytes)
    keys = [key.encode() for key in manifest.page_keys]
    if max(map(len, keys)) >= 1 << 16:
        raise ManifestError("a page key of 64 KiB or more cannot be written")
    model = {field.name: getattr(manifest.model, field.name) for field in dataclasses.fields(ModelIdentity)}
    scalars = {"model": model} | {name: getattr(manifest, name) for name in _SCALARS}
    try:
        json = orjson.dumps(scalars)
    except (TypeError, ValueError) as error:
        raise ManifestError(f"the manifest cannot be written as JSON: {error}") from error
    return b"".join(
        [
            np.array(manifest.layer_num_bytes, "<u8").tobytes(),
            manifest.token_ids.astype("<i8").tobytes(),
            np.array([len(key) for key in keys], "<u2").tobytes(),
            *keys,
            json,
            *checksums,
        ]
    )


def no_checksums(manifest: SegmentManifest) -> Checksums:
    """Zeros in place of a segment's checksums: its record is as long with them."""
    return tuple(map(bytes, _checksum_sizes(manifest)))


def encode_segment(manifest: SegmentManifest, metadata: bytes, place: int = 0) -> bytes:
    """Encode a whole header with its padding, up to layer 0's block."""
    header_num_bytes = FIXED_NUM_BYTES + len(metadata)
    offsets, record_num_bytes = _layout(header_num_bytes, manifest.layer_num_bytes)
    num_keys_bytes = sum(len(key.encode()) for key in manifest.page_keys)
    num_layers, num_pages, num_tokens = (
        len(manifest.layer_num_bytes),
        len(manifest.page_keys),
        manifest.num_tokens,
    )
    num_json_bytes = len(metadata) - sum(_checksum_sizes(manifest))
    num_json_bytes -= 8 * num_layers + 8 * num_tokens + 2 * num_pages + num_keys_bytes
    counts = (num_layers, num_pages, num_tokens, num_json_bytes, num_keys_bytes)
    fields = (header_num_bytes, record_num_bytes, 0, *counts, FORMAT_VERSION)
    unsealed = _FIXED.pack(MAGIC, 0, *fields) + metadata
    checksum = xxhash.xxh3_64_intdigest(memoryview(unsealed)[_CHECKED_FROM:], place)
    return (_FIXED.pack(MAGIC, checksum, *fields) + metadata).ljust(offsets[0], b"\0")


def record_buffers(
    manifest: SegmentManifest, metadata: bytes, blocks: Sequence[Block], place: int
) -> list[bytes | memoryview]:
    """All buffers of a record in the order of writing, padding included: ``segment_num_bytes`` in all."""
    header = encode_segment(manifest, metadata, place)
    buffers: list[bytes | memoryview] = [header]
    num_bytes = len(header)
    for block in blocks:
        padding = bytes(aligned(block.nbytes, BLOCK_ALIGN) - block.nbytes)
        buffers += [block.data, padding]
        num_bytes += block.nbytes + len(padding)
    padding = bytes(aligned(num_bytes, RECORD_ALIGN) - num_bytes)
    return [*buffers, padding]


def decode_size(fixed: bytes) -> tuple[int, int]:
    """The bytes of a header and of its record, from the header's first 64 bytes.

    They are in bounds, but not proven to be right yet: the checksum was not compared.

    Raises:
        RecordError: there is no header here.
    """
    if len(fixed) < FIXED_NUM_BYTES:
        raise RecordError(f"a record needs {FIXED_NUM_BYTES} bytes, got {len(fixed)}")
    magic, _, header_num_bytes, record_num_bytes, *_ = _FIXED.unpack_from(fixed)
    if magic != MAGIC:
        raise RecordError("no record starts here")
    is_header_possible = FIXED_NUM_BYTES <= header_num_bytes <= min(MAX_HEADER_NUM_BYTES, record_num_bytes)
    if not is_header_possible or record_num_bytes > _MAX_RECORD_NUM_BYTES or record_num_bytes % RECORD_ALIGN:
        raise RecordError(f"a header of {header_num_bytes} in a record of {record_num_bytes} bytes cannot be")
    return header_num_bytes, record_num_bytes


def decode_header(header: bytes, place: int = 0) -> SegmentRecord:
    """What a header says; bytes after ``header_num_bytes`` are ignored.

    Raises:
        RecordError: damaged, cut off, of another place or format version, or contradicting itself.
    """
    header_num_bytes, record_num_bytes = decode_size(header)
    if len(header) < header_num_bytes:
        raise RecordError(f"a header of {header_num_bytes} bytes, cut off after {len(header)}")
    _, checksum, _, _, _, *counts, version = _FIXED.unpack_from(header)
    checked = memoryview(header)[_CHECKED_FROM:header_num_bytes]
    if xxhash.xxh3_64_intdigest(checked, place) != checksum:
        raise RecordError("the header's checksum is wrong")
    if version != FORMAT_VERSION:
        raise RecordError(f"a record of format {version}, this is format {FORMAT_VERSION}")
    metadata = memoryview(header)[FIXED_NUM_BYTES:header_num_bytes]
    try:
        manifest, checksums = _decode_metadata(metadata, counts)
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, ManifestError) as error:
        raise RecordError(f"a header that contradicts itself: {error}") from error
    offsets, num_bytes = _layout(header_num_bytes, manifest.layer_num_bytes)
    if num_bytes != record_num_bytes:
        raise RecordError(f"blocks of {num_bytes} bytes in a record of {record_num_bytes}")
    return SegmentRecord(record_num_bytes, manifest, checksums, offsets)


def _checksum_sizes(manifest: SegmentManifest) -> list[int]:
    """Bytes of the checksums of each layer's block."""
    return [CHECKSUM_BYTES * num_ranges(size, manifest.range_bytes) for size in manifest.layer_num_bytes]


def _layout(header_num_bytes: int, layer_num_bytes: tuple[int, ...]) -> tuple[tuple[int, ...], int]:
    """Where each block starts in its record, and the record's bytes."""
    taken = (aligned(num_bytes, BLOCK_ALIGN) for num_bytes in layer_num_bytes)
    *offsets, end = accumulate(taken, initial=aligned(header_num_bytes, BLOCK_ALIGN))
    return tuple(offsets), aligned(end, RECORD_ALIGN)


def _decode_metadata(metadata: memoryview, counts: list[int]) -> tuple[SegmentManifest, Checksums]:
    num_layers, num_pages, num_tokens, num_json_bytes, num_keys_bytes = counts
    parts: list[memoryview] = []
    at = 0
    for num_bytes in (8 * num_layers, 8 * num_tokens, 2 * num_pages, num_keys_bytes, num_json_bytes):
        parts.append(metadata[at : at + num_bytes])
        at += num_bytes
    sizes, token_ids, key_sizes, keys, json = parts
    ends = list(accumulate(np.frombuffer(key_sizes, "<u2").tolist(), initial=0))
    if ends[-1] != num_keys_bytes:
        raise ValueError(f"page keys of {ends[-1]} bytes in {num_keys_bytes}")
    scalars: dict[str, Any] = orjson.loads(json)
    tokens = np.frombuffer(token_ids, "<i8").astype(np.int64)
    tokens.flags.writeable = False
    manifest = SegmentManifest(
        model=ModelIdentity(**scalars.pop("model")),
        page_keys=tuple(bytes(keys[start:end]).decode() for start, end in pairwise(ends)),
        token_ids=tokens,
        layer_num_bytes=tuple(np.frombuffer(sizes, "<u8").tolist()),
        layer_first_token=tuple(scalars.pop("layer_first_token")),
        **scalars,
    )
    checksums = []
    for num_bytes in _checksum_sizes(manifest):
        checksums.append(bytes(metadata[at : at + num_bytes]))
        at += num_bytes
    if at != len(metadata):
        raise ValueError(f"parts of {at} bytes in {len(metadata)}")
    return manifest, tuple(checksums)
