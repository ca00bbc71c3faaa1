"""Bases in the store: an engine without a file of its own finds those of engines with the same identity."""

from __future__ import annotations

import logging
from pathlib import Path

import numpy as np

from krul_backend.errors import KrulError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.hashing import block_checksum, block_checksums

logger = logging.getLogger(__name__)

NEWEST = "krul-bases"
"""The key of the segment that names the newest bases. No page of a conversation has it: those are hashes."""

CODEC = "bases"
_READ_TIMEOUT_S = 60.0
_LARGEST_SHARE = 1 / 16
"""Of host memory: larger bases would push out the conversations that they are for."""

_LEARNING_S = 60.0
"""What they save whoever finds them, for the eviction: learning takes a minute at least."""


class SharedBases:
    """One rank's bases in the store: a segment of one page for each digest, whose first layer has the bytes
    of the file, and one that names the newest.

    So they move between tiers, and are evicted, like any segment.
    """

    def __init__(self, store: KVStore, model: ModelIdentity) -> None:
        self._store = store
        self._model = model
        self._token_ids = np.zeros(model.page_size, dtype=np.int32)

    def get(self, digest: str | None = None) -> bytes | None:
        """The bytes of the file of bases with this digest, or of the newest; None if the store has none, or
        cannot read them."""
        if digest is None:
            named = self._read(NEWEST)
            if named is None:
                return None
            digest = named.decode(errors="replace")
        return self._read(_key(digest))

    def put(self, path: Path, digest: str) -> None:
        """Store a file of bases with this digest as the newest; not if it is too large."""
        try:
            if path.stat().st_size > _LARGEST_SHARE * self._store.stats().capacity_bytes:
                logger.info("krul: the bases are too large to share them in host memory")
                return
            for key, read in ((_key(digest), path.read_bytes), (NEWEST, digest.encode)):
                if not self._has(key, digest):
                    self._write(key, digest, read())
        except (KrulError, OSError) as error:
            logger.warning("krul: the bases cannot be shared: %s", error)

    def _read(self, key: str) -> bytes | None:
        lease = self._store.lease(self._model, (key,), self._token_ids)
        if lease is None:
            return None
        try:
            (source,) = lease.slices if lease.is_in_dram else self._store.fetch(lease)
            if source.status is not None:
                source.status.wait(0, _READ_TIMEOUT_S)
            if block_checksum(source.blocks[0]) != source.checksums[0]:
                self._store.report_damage(source.segment_id)
                return None
            return source.blocks[0].tobytes()
        except KrulError as error:
            logger.warning("krul: the store's bases cannot be read: %s", error)
            return None
        finally:
            self._store.release(lease)

    def _has(self, key: str, digest: str) -> bool:
        """Whether this key's segment is that of this digest. One of another digest is dropped."""
        lease = self._store.lease(self._model, (key,), self._token_ids)
        if lease is None:
            return False
        is_known = lease.slices[0].header.codec_params == _params(digest)
        if not is_known:
            self._store.report_damage(lease.slices[0].segment_id, "undecodable")
        self._store.release(lease)
        return is_known

    def _write(self, key: str, digest: str, content: bytes) -> None:
        num_layers, page_size = self._model.num_layers, self._model.page_size
        layer_num_bytes = (len(content), *(0,) * (num_layers - 1))
        reservation = self._store.reserve(layer_num_bytes)
        if reservation is None:
            return
        reservation.blocks[0][:] = np.frombuffer(content, np.uint8)
        manifest = SegmentManifest(
            model=self._model,
            page_keys=(key,),
            parent_key=None,
            start_token=0,
            token_ids=self._token_ids,
            codec=CODEC,
            layer_num_bytes=layer_num_bytes,
            codec_params=_params(digest),
            layer_first_token=(0, *(page_size,) * (num_layers - 1)),
            recompute_s=_LEARNING_S,
        )
        self._store.commit(reservation, manifest, block_checksums(reservation.blocks))


def _key(digest: str) -> str:
    return f"{NEWEST}-{digest}"


def _params(digest: str) -> dict[str, str]:
    return {"codec": CODEC, "bases": digest}
