"""A segment in the cluster: the names of its objects, and the encoding of its metadata object."""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field

import orjson
import xxhash

from krul_backend.errors import RecordError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.record import decode_header, encode_metadata, encode_segment

MAX_METADATA_BYTES = 64 << 20
MAX_POINTER_BYTES = 256
MAX_POINTERS = 8
"""The most segments that begin with the same page, such as a system prompt, and can be found."""

_MAX_BLOCK_BYTES = 1 << 40


@dataclass(eq=False)
class StoredObject:
    """A segment that the cluster held when it was last asked, at ``confirmed_at_s`` (the tier's clock).

    ``place`` is the common start of its objects' names.
    """

    prefix: str
    place: str
    manifest: SegmentManifest
    checksums: tuple[int, ...]
    confirmed_at_s: float
    segment_id: int = field(default_factory=itertools.count(1).__next__)

    @property
    def metadata_key(self) -> str:
        return f"{self.place}/m"

    def block_key(self, layer: int) -> str:
        return f"{self.place}/{layer}"

    @property
    def block_keys(self) -> list[str]:
        """The objects of all layers that have bytes."""
        return [self.block_key(layer) for layer, size in enumerate(self.manifest.layer_num_bytes) if size]


def pointer_key(prefix: str, first_page_key: str, n: int) -> str:
    """The name of the object that points to the ``n``-th segment that begins with a page."""
    return f"{prefix}/f/{first_page_key}/{n}"


def encode_object(manifest: SegmentManifest, checksums: tuple[int, ...]) -> tuple[str, bytes]:
    """The segment's digest, and its metadata object.

    The digest covers the metadata and, by the checksums, the blocks: objects of one name have one content,
    whoever stores them.

    Raises:
        ManifestError: the manifest cannot be written.
    """
    metadata = encode_segment(manifest, encode_metadata(manifest, checksums), sequence=0)
    return xxhash.xxh3_128_hexdigest(metadata), metadata


def decode_object(
    digest: str, metadata: bytes, model: ModelIdentity
) -> tuple[SegmentManifest, tuple[int, ...]] | None:
    """Decode a metadata object; None if it is damaged, of another model, or has fields of wrong types."""
    if xxhash.xxh3_128_hexdigest(metadata) != digest:
        return None
    try:
        record = decode_header(metadata)
    except RecordError:
        return None
    if record.manifest.model != model:
        return None
    return (record.manifest, record.checksums) if _has_right_types(record.manifest) else None


def encode_pointer(digest: str) -> bytes:
    return orjson.dumps({"segment": digest})


def decode_pointer(pointer: bytes) -> str | None:
    """The digest of the segment that a pointer names; None if the bytes are not a pointer."""
    try:
        digest = orjson.loads(pointer)["segment"]
    except (ValueError, TypeError, KeyError):
        return None
    is_digest = isinstance(digest, str) and len(digest) == 32 and set(digest) <= set("0123456789abcdef")
    return digest if is_digest else None


def _has_right_types(manifest: SegmentManifest) -> bool:
    """Check the types of decoded fields, which a manifest's own checks take for granted."""
    return (
        isinstance(manifest.codec, str)
        and isinstance(manifest.codec_params, dict)
        and isinstance(manifest.tenant, str)
        and isinstance(manifest.parent_key, str | None)
        and isinstance(manifest.recompute_s, float | int)
        and math.isfinite(manifest.recompute_s)
        and type(manifest.start_token) is int
        and all(type(first) is int for first in manifest.layer_first_token)
        and all(size < _MAX_BLOCK_BYTES for size in manifest.layer_num_bytes)
    )
