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

PAGE_KEYS = ("krul-bases",)
"""No page of a conversation has this key: those are hashes."""

CODEC = "bases"
_READ_TIMEOUT_S = 60.0
_LARGEST_SHARE = 1 / 16
"""Of host memory: larger bases would push out the conversations that they are for."""

_LEARNING_S = 60.0
"""What they save whoever finds them, for the eviction: learning takes a minute at least."""


class SharedBases:
    """One rank's bases in the store, as a segment of one page whose first layer has the bytes of their file.

    So they move between tiers, and are evicted, like any segment.
    """

    def __init__(self, store: KVStore, model: ModelIdentity) -> None:
        self._store = store
        self._model = model
        self._token_ids = np.zeros(model.page_size, dtype=np.int32)

    def get(self) -> bytes | None:
        """The bytes of the file; None if the store has none, or cannot read them."""
        lease = self._store.lease(self._model, PAGE_KEYS, self._token_ids)
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

    def put(self, path: Path, digest: str) -> None:
        """Store a file of bases with this digest, in place of others; not if it is too large."""
        try:
            self._put(path, digest)
        except (KrulError, OSError) as error:
            logger.warning("krul: the bases cannot be shared: %s", error)

    def _put(self, path: Path, digest: str) -> None:
        if path.stat().st_size > _LARGEST_SHARE * self._store.stats().capacity_bytes:
            logger.info("krul: the bases are too large to share them in host memory")
            return
        params = {"codec": CODEC, "bases": digest}
        lease = self._store.lease(self._model, PAGE_KEYS, self._token_ids)
        if lease is not None:
            is_known = lease.slices[0].header.codec_params == params
            if not is_known:
                self._store.report_damage(lease.slices[0].segment_id, "undecodable")
            self._store.release(lease)
            if is_known:
                return
        content = path.read_bytes()
        num_layers, page_size = self._model.num_layers, self._model.page_size
        layer_num_bytes = (len(content), *(0,) * (num_layers - 1))
        reservation = self._store.reserve(layer_num_bytes)
        if reservation is None:
            return
        reservation.blocks[0][:] = np.frombuffer(content, np.uint8)
        manifest = SegmentManifest(
            model=self._model,
            page_keys=PAGE_KEYS,
            parent_key=None,
            start_token=0,
            token_ids=self._token_ids,
            codec=CODEC,
            layer_num_bytes=layer_num_bytes,
            codec_params=params,
            layer_first_token=(0, *(page_size,) * (num_layers - 1)),
            recompute_s=_LEARNING_S,
        )
        self._store.commit(reservation, manifest, block_checksums(reservation.blocks))
