"""Bases from elsewhere than the current file: those that engines share in the store, and older ones."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from krul_backend.codec.subspace.bases import ModelBases, older_path, write_older
from krul_backend.errors import CodecError, KrulError, TierReadError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import block_checksums

logger = logging.getLogger(__name__)

NEWEST = "krul-bases"
"""The key of the segment that names the newest bases. No page of a conversation has it: those are hashes."""

CODEC = "bases"
_READ_TIMEOUT_S = 60.0
_LARGEST_SHARE = 1 / 16
"""Of host memory: larger bases would push out the conversations that they are for."""

_LEARNING_S = 60.0
"""What they save whoever finds them, for the eviction: learning takes a minute at least."""

_AGAIN_AFTER_S = 30.0
"""Bases that could not be read are looked for again after this time: room in memory, a daemon or a disk may
have come back by then."""


class SharedBases:
    """One rank's bases in the store: a segment of one page for each digest, whose first layer has the bytes
    of the file, and one that names the newest.

    So they move between tiers, and are evicted, like any segment.
    """

    def __init__(self, store: KVStore, model: ModelIdentity) -> None:
        self._store = store
        self._model = model
        self._token_ids = np.zeros(model.page_size, dtype=np.int64)

    def get(self, digest: str | None = None) -> bytes | None:
        """The bytes of the file of bases with this digest, or of the newest; None if the store has none.

        Raises:
            KrulError: they cannot be read now, or it cannot be told whether they are there.
        """
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
            if self._is_missing(key):
                return None
            raise TierReadError("the store does not say whether it has the bases")
        try:
            (source,) = lease.slices if lease.is_in_dram else self._store.fetch(lease)
            if source.status is not None:
                source.status.wait(0, _READ_TIMEOUT_S)
            if not source.is_right(0):
                # This copy goes. A lower tier may have a sound one.
                self._store.report_damage(source.segment_id)
                raise TierReadError("the store's bases have a wrong checksum")
            return source.blocks[0].tobytes()
        finally:
            self._store.release(lease)

    def _is_missing(self, key: str) -> bool:
        """Whether no tier has this key. False without an answer, and while one is out of use or opens."""
        # No page is missing in a store that does not answer.
        is_missing = bool(self._store.find_missing(self._model, (key,)))
        tiers = self._store.stats().tiers
        return is_missing and not any(tier.is_suspended or tier.is_opening for tier in tiers)

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

    Bases are absent only if nobody has them. If they could not be read, or used, for another reason, such as
    a lack of memory, they may still come, and are looked for again after a while.

    ``path``: the file of the current bases. ``add`` is called with older ones, once they are read.
    """

    def __init__(
        self,
        path: Path,
        shared: SharedBases | None,
        add: Callable[[ModelBases], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._path = path
        self._shared = shared
        self._add = add
        self._clock = clock
        self._lock = threading.Lock()
        self._sought: set[str] = set()
        self._absent: set[str] = set()
        # When to look again for those that could not be read.
        self._again_at_s: dict[str, float] = {}

    def may_come(self, digest: str) -> bool:
        """Whether bases with this digest may still come; False once nobody has them. Does not wait."""
        with self._lock:
            if digest in self._absent:
                return False
            if digest not in self._sought and self._clock() >= self._again_at_s.get(digest, -math.inf):
                self._sought.add(digest)
                threading.Thread(
                    target=self._seek, args=(digest,), name="krul-older-bases", daemon=True
                ).start()
        return True

    def _seek(self, digest: str) -> None:
        is_absent, has_failed = False, False
        try:
            bases = self._find(digest)
            if bases is None:
                is_absent = True
            else:
                self._add(bases)
        except CodecError as error:
            # They are for other layers than the model's. What is stored in them is stored again.
            logger.warning("krul: older bases %s cannot be used: %s", digest[:16], error)
            is_absent = True
        except Exception as error:
            has_failed = True
            logger.log(
                # Not every time.
                logging.DEBUG if digest in self._again_at_s else logging.WARNING,
                "krul: older bases %s cannot be read now, what is stored in them waits: %s",
                digest[:16],
                error,
            )
        with self._lock:
            self._again_at_s.pop(digest, None)
            if is_absent:
                self._absent.add(digest)
            if has_failed:
                self._again_at_s[digest] = self._clock() + _AGAIN_AFTER_S
            # Found ones are sought again if they had to make room for others meanwhile.
            self._sought.discard(digest)

    def _find(self, digest: str) -> ModelBases | None:
        """The bases with this digest; None if nobody has them.

        Raises:
            KrulError, OSError: they may be somewhere, but cannot be read now.
        """
        unread: OSError | None = None
        # Another process may have written them to the current file a moment ago.
        for path in (older_path(self._path, digest), self._path):
            try:
                bases = _load(path, digest)
            except OSError as error:
                bases, unread = None, error
            if bases is not None:
                return bases
        content = None if self._shared is None else self._shared.get(digest)
        if content is not None:
            return _load(write_older(self._path, digest, content), digest)
        if unread is not None:
            raise unread
        return None


def _load(path: Path, digest: str) -> ModelBases | None:
    """The bases in a file if they have this digest; None otherwise, and without a sound file.

    Raises:
        OSError: there is a file, which cannot be read.
    """
    try:
        bases = ModelBases.load(path)
    except CodecError as error:
        cause = error.__cause__
        if isinstance(cause, OSError) and not isinstance(cause, FileNotFoundError):
            raise cause from error
        return None
    return bases if bases.digest == digest else None
