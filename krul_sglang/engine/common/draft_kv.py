"""Names the KV of a draft model in the store, and knows which of it must not be stored."""

from __future__ import annotations

import hashlib
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch

from krul_backend.codec.registry import ModelCodecs
from krul_backend.segment import ModelIdentity
from krul_backend.strategy import Precision, Strategy
from krul_sglang.engine.common.kv_pool import DevicePool
from krul_sglang.engine.common.served_model import ServedModel

LOSSY_PRECISION = Precision.INT8
"""Of draft KV on servers that may change the target's: as many drafts are accepted as with native KV."""


@dataclass
class Acceptance:
    """``accepted`` drafted tokens of ``turns`` turns, in ``forwards`` that verified."""

    turns: int = 0
    forwards: int = 0
    accepted: int = 0

    @property
    def accept_length(self) -> float:
        """Tokens that a forward brought: the drafted ones, and one of its own; 0 before the first."""
        return 1 + self.accepted / self.forwards if self.forwards else 0.0


@dataclass
class DraftCounters:
    """``restored_tokens`` came back with their draft KV, ``missing_tokens`` without it. Of ``dropped_turns``
    it was not stored, or not all. ``after_restores``: of turns whose history came from the store; ``others``:
    of those whose history, if any, had never left the device."""

    stored_tokens: int = 0
    num_bytes: int = 0
    dropped_turns: int = 0
    restored_tokens: int = 0
    missing_tokens: int = 0
    failed_loads: int = 0
    after_restores: Acceptance = field(default_factory=Acceptance)
    others: Acceptance = field(default_factory=Acceptance)


class DraftKV:
    """Holds what a rank needs to store and load the KV of its draft model.

    It lies in a pool of its own, in the same slots as the target's, and is stored beside the target's, under
    an ``identity`` of its own: servers with other drafts, or without one, share the target's alone. What is
    missing of it, or wrong, changes no answer, since the target verifies: fewer drafts are accepted.

    A slot is stale if the target's KV in it is right, and the draft's is not: of a prefix that was loaded
    without it, or recomputed by the target alone. What is stale is not stored.

    Args:
        pool: the draft's layers.
        identity: of the draft model by itself.
        target: whose drafts it makes.
        algorithm: the name of the speculation.
        stores: False if another rank stores KV that is the same on all.
        precision: in which all layers are stored. What was stored in another one is loaded, too.
    """

    def __init__(
        self,
        pool: DevicePool,
        identity: ModelIdentity,
        target: ServedModel,
        algorithm: str,
        *,
        stores: bool = True,
        precision: Precision = Precision.NATIVE,
    ) -> None:
        self.pool = pool
        self.codec = ModelCodecs(pool.shape, pool.num_layers, None)
        self.strategy = Strategy.from_pairs(pool.num_layers, precision=precision)
        self.precision = precision
        self.counters = DraftCounters()
        self.algorithm = algorithm
        self.stores = stores
        self._own = identity
        self._target = target
        keys, _ = pool.buffers(0)
        self._is_stale = torch.zeros(len(keys), dtype=torch.bool, device=pool.device)
        self._is_none_stale = True

    @property
    def identity(self) -> ModelIdentity:
        """Of draft KV that is computed now."""
        return self.identity_for(self._target.identity)

    def identity_for(self, target: ModelIdentity) -> ModelIdentity:
        """Of draft KV that was computed with ``target``: it depends on both models."""
        names = (self.algorithm, self._own.config_digest, target.config_digest)
        digest = hashlib.sha256(" ".join(names).encode()).hexdigest()
        return replace(self._own, config_digest=digest, target=target.fingerprint)

    def note_restored(self, slots: torch.Tensor, num_restored: int) -> None:
        """The target's KV of ``slots`` (int64 ``[T]``) was restored, the draft's of the first of them.

        Called after the forward that it was restored for, on its stream.
        """
        self.counters.restored_tokens += num_restored
        self.counters.missing_tokens += len(slots) - num_restored
        self.note_computed(slots[:num_restored])
        if num_restored < len(slots):
            self._is_none_stale = False
            self._is_stale.index_fill_(0, slots[num_restored:], True)

    def note_computed(self, slots: torch.Tensor) -> None:
        """Both models compute the tokens in ``slots``. Called on the forward's stream."""
        if not self._is_none_stale:
            self._is_stale.index_fill_(0, slots.long(), False)

    def num_fresh(self, slots: torch.Tensor) -> int:
        """How many tokens of a conversation in ``slots`` (int64 ``[T]``) lie before the first stale one.
        Waits for the device."""
        if self._is_none_stale:
            return len(slots)
        is_stale = self._is_stale[slots].cpu()
        return int(is_stale.int().argmax()) if is_stale.any() else len(slots)

    def note_ended(self, *, is_restored: bool, num_forwards: int, num_accepted: int) -> None:
        """A turn has ended, whose tokens were verified in so many forwards."""
        acceptance = self.counters.after_restores if is_restored else self.counters.others
        acceptance.turns += 1
        acceptance.forwards += num_forwards
        acceptance.accepted += num_accepted

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {"algorithm": self.algorithm, "precision": self.precision.value, **asdict(self.counters)}

    def gauges(self) -> dict[str, tuple[str, float]]:
        """What the server's metrics page shows: by name its meaning, and its value."""
        counters, length = self.counters, "Tokens per verifying forward, in turns "
        return {
            "restored_tokens": ("Restored tokens that came back with draft KV.", counters.restored_tokens),
            "missing_tokens": ("Restored tokens that came back without it.", counters.missing_tokens),
            "accept_length_restored": (f"{length}after restores.", counters.after_restores.accept_length),
            "accept_length_others": (f"{length}that needed none.", counters.others.accept_length),
        }
