"""Brings the older bases that stored segments name: from files beside the current one, or from the store."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from pathlib import Path

from krul_backend.codec.subspace.bases import ModelBases
from krul_backend.errors import CodecError
from krul_sglang.engine.attach.shared_bases import SharedBases
from krul_sglang.learning.older_files import older_path, write_older

logger = logging.getLogger(__name__)


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
