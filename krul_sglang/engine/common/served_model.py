"""Keeps the identity of the model whose KV this rank computes, and changes it when the weights change."""

from __future__ import annotations

import hashlib
from dataclasses import replace

from krul_backend.segment import ModelIdentity


class ServedModel:
    """Owns the identity under which a rank stores KV and looks it up.

    After an update of the weights the identity is a new one, made of the old one and 16 random bytes: no
    other server and no later start has it. So it is after an update from disk, because nothing in the engine
    says that exactly one known checkpoint was loaded.

    From the beginning of a change until the device pool was empty once, KV of several weights may lie there
    side by side, and one path may hold KV of two. Nothing is stored then: ``is_settled`` is False.

    Changed on the scheduler's thread, while no turn waits to be stored; so the thread that stores turns
    reads one identity per turn.

    Args:
        identity: of the KV that is computed from the start on.
        is_lasting: whether another server, or a later start, may compute KV of the same identity.
    """

    def __init__(self, identity: ModelIdentity, *, is_lasting: bool = True) -> None:
        self.identity = identity
        self.is_lasting = is_lasting
        self._is_changing = False
        self._is_mixed = False

    @property
    def is_settled(self) -> bool:
        """Whether all KV in the device pool is of ``identity``."""
        return not self._is_changing and not self._is_mixed

    def begin_change(self) -> None:
        """Weights will be written from here on. May be called again before ``end_change``."""
        self._is_changing = True
        self._is_mixed = True

    def rename(self, epoch: bytes) -> None:
        """Take a new identity. Every rank passes the same 16 random bytes."""
        digest = hashlib.sha256(self.identity.config_digest.encode() + epoch).hexdigest()
        self.identity = replace(self.identity, config_digest=digest)
        self.is_lasting = False

    def end_change(self, *, is_pool_empty: bool) -> None:
        """The weights are complete: what is computed from here on is of ``identity``."""
        self._is_changing = False
        if is_pool_empty:
            self._is_mixed = False

    def empty_pool(self) -> None:
        """The device pool holds no KV now."""
        if not self._is_changing:
            self._is_mixed = False
