"""Bases from elsewhere than the current file: those that engines share in the store, and older ones."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np

from krul_backend.codec.subspace.bases import ModelBases, older_path, write_older
from krul_backend.errors import CodecError, KrulError
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


class OlderBases:
    """Looks for bases by their digest, each on a thread of its own; whoever asks does not wait.

    ``path``: the file of the current bases. ``add`` is called with older ones, once they are read.
    """

    def __init__(self, path: Path, shared: SharedBases | None, add: Callable[[ModelBases], None]) -> None:
        self._path = path
        self._shared = shared
        self._add = add
        self._lock = threading.Lock()
        self._sought: set[str] = set()
        self._absent: set[str] = set()

    def may_come(self, digest: str) -> bool:
        """Whether bases with this digest may still come; False once nobody has them. Does not wait."""
        with self._lock:
            if digest in self._absent:
                return False
            if digest not in self._sought:
                self._sought.add(digest)
                threading.Thread(
                    target=self._seek, args=(digest,), name="krul-older-bases", daemon=True
                ).start()
        return True

    def _seek(self, digest: str) -> None:
        is_found = False
        try:
            bases = self._find(digest)
            if bases is not None:
                self._add(bases)
                is_found = True
        except Exception as error:
            # Whatever it is, what is stored in them is stored again.
            logger.warning("krul: older bases %s cannot be used: %s", digest[:16], error)
        finally:
            with self._lock:
                if not is_found:
                    self._absent.add(digest)
                # Found ones are sought again if they had to make room for others meanwhile.
                self._sought.discard(digest)

    def _find(self, digest: str) -> ModelBases | None:
        # Another process may have written them to the current file a moment ago.
        for path in (older_path(self._path, digest), self._path):
            bases = _load(path, digest)
            if bases is not None:
                return bases
        content = None if self._shared is None else self._shared.get(digest)
        return None if content is None else _load(write_older(self._path, digest, content), digest)


def _load(path: Path, digest: str) -> ModelBases | None:
    """The bases in a file if they have this digest; None otherwise, and without a sound file."""
    try:
        bases = ModelBases.load(path)
    except CodecError:
        return None
    return bases if bases.digest == digest else None
