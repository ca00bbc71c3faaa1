"""A segment in the store: the names of its objects, and the encoding of its metadata object.

In the names are epochs: numbers that a clear replaces, so that no old name is found.
"""

from __future__ import annotations

import itertools
import math
import re
import secrets
import threading
from dataclasses import dataclass, field

import orjson
import xxhash

from krul_backend.errors import RecordError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, SegmentManifest
from krul_backend.tiers.common.interface import Block, Checksums, Clock
from krul_backend.tiers.common.record import decode_header, encode_metadata, encode_segment
from krul_backend.tiers.objects.object_client import ObjectClient, ObjectPart, get_written

ROOT = f"krul/{FORMAT_VERSION}"
EPOCHS = f"krul-epochs/{FORMAT_VERSION}"
"""Apart from what they stand for, so that a rule by which old objects leave a bucket can spare them."""
EPOCH_AGE_S = 1.0
"""For how long a daemon uses an epoch that it has read."""

_EPOCH = re.compile(rb"[0-9a-f]{16}")


@dataclass(frozen=True)
class KnownPrefix:
    """The prefix that was current at ``read_at_s``; None if nothing of the model was stored."""

    prefix: str | None
    read_at_s: float


class Epochs:
    """Gives the prefix of a model's objects: ``krul/<format>/<fingerprint>/<epoch of all><epoch of model>``.

    A store cannot enumerate its objects, so a clear replaces an epoch instead of removing all of them. An
    epoch is a random 64-bit number in an object that is never evicted. It is random, not counted, so that
    when two daemons clear at once, nothing was ever stored under either number. If an epoch's object is lost
    (the master was restarted), nothing is found, and the next daemon that stores draws another number: what
    was cleared stays cleared.
    """

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._lock = threading.Lock()
        self._known: dict[str, KnownPrefix] = {}
        self._pending: set[str | None] = set()
        self._num_clears = 0

    def known(self, fingerprint: str) -> KnownPrefix | None:
        """The prefix if it was read at most ``EPOCH_AGE_S`` ago, else None. Does not ask the object store."""
        with self._lock:
            known = self._known.get(fingerprint)
            if known is None or self._pending or self._clock() - known.read_at_s >= EPOCH_AGE_S:
                return None
            return known

    def prefix(self, store: ObjectClient, fingerprint: str, *, may_create: bool = False) -> str | None:
        """The model's prefix, read from the object store if not known; None if nothing was ever stored.

        Raises:
            ObjectStoreError: the object store does not answer, perhaps to an earlier clear.
        """
        self.settle(store)
        known = self.known(fingerprint)
        if known is not None and (known.prefix is not None or not may_create):
            return known.prefix
        with self._lock:
            num_clears = self._num_clears
        read_at_s = self._clock()
        numbers = [_read(store, name, may_create=may_create) for name in _names(fingerprint)]
        found = [number for number in numbers if number is not None]
        prefix = f"{ROOT}/{fingerprint}/{''.join(found)}" if len(found) == len(numbers) else None
        with self._lock:
            if num_clears == self._num_clears:
                self._known[fingerprint] = KnownPrefix(prefix, read_at_s)
        return prefix

    def clear(self, fingerprint: str | None) -> None:
        """Forget all prefixes until ``settle`` has replaced this model's epoch (None: that of all models)."""
        with self._lock:
            self._pending.add(fingerprint)
            self._known.clear()
            self._num_clears += 1

    def settle(self, store: ObjectClient) -> None:
        """Replace the epochs of pending clears, and remove cleared objects that nobody is reading.

        Raises:
            ObjectStoreError: the object store does not answer; the clears stay pending.
        """
        with self._lock:
            pending = set(self._pending)
        for fingerprint in pending:
            name = _names(fingerprint)[-1] if fingerprint is not None else _names("")[0]
            store.replace(name, secrets.token_hex(8).encode(), is_pinned=True)
            with self._lock:
                self._pending.discard(fingerprint)
                self._known.clear()
                self._num_clears += 1
            model = re.escape(fingerprint) if fingerprint is not None else "[0-9a-f]+"
            current = self.prefix(store, fingerprint, may_create=True) if fingerprint is not None else None
            kept = f"(?!{current.rpartition('/')[2]}/)" if current is not None else ""
            store.remove_matching(f"^{ROOT}/{model}/{kept}[0-9a-f]{{32}}/.*")


def _names(fingerprint: str) -> tuple[str, str]:
    """The objects that hold the epoch of all models, and of one."""
    return f"{EPOCHS}/all", f"{EPOCHS}/{fingerprint}"


def _read(store: ObjectClient, name: str, *, may_create: bool) -> str | None:
    number = _number(store.get(name, 16))
    if number is None and may_create:
        store.put(name, secrets.token_hex(8).encode(), is_pinned=True)
        # Another thread or daemon may have been first.
        number = _number(get_written(store, name, 16))
        if number is None:  # The object is not an epoch.
            store.replace(name, secrets.token_hex(8).encode(), is_pinned=True)
            number = _number(get_written(store, name, 16))
    return number


def _number(value: bytes | None) -> str | None:
    return value.decode() if value is not None and _EPOCH.fullmatch(value) else None


MAX_METADATA_BYTES = 64 << 20
MAX_POINTER_BYTES = 256
MAX_POINTERS = 8
"""The most segments that begin with the same page, such as a system prompt, and can be found."""

_MAX_BLOCK_BYTES = 1 << 40


@dataclass(eq=False)
class StoredObject:
    """A segment that the object store held when it was last asked, at ``confirmed_at_s`` (the tier's clock).

    ``place`` is the common start of its objects' names.
    """

    prefix: str
    place: str
    manifest: SegmentManifest
    checksums: Checksums
    confirmed_at_s: float
    joins_blocks: bool
    segment_id: int = field(default_factory=itertools.count(1).__next__)

    @property
    def metadata_key(self) -> str:
        return f"{self.place}/m"

    @property
    def block_keys(self) -> list[str]:
        """The objects of all layers that have bytes, or the one of all."""
        if self.joins_blocks:
            return [f"{self.place}/b"]
        return [f"{self.place}/{layer}" for layer, size in enumerate(self.manifest.layer_num_bytes) if size]

    def part(self, layer: int, block: Block, start: int) -> ObjectPart:
        """What is read into ``block``: the bytes of a layer from its byte ``start`` on."""
        sizes = self.manifest.layer_num_bytes
        if self.joins_blocks:
            return ObjectPart(f"{self.place}/b", block, sum(sizes), sum(sizes[:layer]) + start)
        return ObjectPart(f"{self.place}/{layer}", block, sizes[layer], start)


def pointer_key(prefix: str, first_page_key: str, n: int) -> str:
    """The name of the object that points to the ``n``-th segment that begins with a page."""
    return f"{prefix}/f/{first_page_key}/{n}"


def encode_object(manifest: SegmentManifest, checksums: Checksums) -> tuple[str, bytes]:
    """The segment's digest, and its metadata object.

    The digest covers the metadata and, by the checksums, the blocks: objects of one name have one content,
    whoever stores them.

    Raises:
        ManifestError: the manifest cannot be written.
    """
    metadata = encode_segment(manifest, encode_metadata(manifest, checksums))
    return xxhash.xxh3_128_hexdigest(metadata), metadata


def decode_object(
    digest: str, metadata: bytes, model: ModelIdentity
) -> tuple[SegmentManifest, Checksums] | None:
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
        and type(manifest.range_bytes) is int
        and all(type(first) is int for first in manifest.layer_first_token)
        and all(size < _MAX_BLOCK_BYTES for size in manifest.layer_num_bytes)
    )
