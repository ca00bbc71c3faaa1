"""What waiting requests were promised, and how it comes nearer while they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krul_backend.segment import TokenIds
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease
from krul_sglang.engine.common.served_model import ServedModel

RENEW_INTERVAL_S = 0.05
"""No more often is it asked whether what was fetched for a waiting request has arrived."""
RETRY_MISS_S = 1.0
"""For so long a request of which nothing was found is not asked for again."""


@dataclass(frozen=True)
class KeyRun:
    """Names a run of page keys: each is a hash over all pages before it, so the last one covers them all."""

    first_key: str
    last_key: str
    num_keys: int

    @classmethod
    def of(cls, page_keys: Sequence[str]) -> KeyRun:
        return cls(page_keys[0], page_keys[-1], len(page_keys))


@dataclass(frozen=True)
class HeldLease:
    """What a waiting request was promised: the lease, and the page keys it was given for.

    ``asked_s``: when the store was asked last. ``is_fetching``: what lies in lower tiers is on its way.
    """

    run: KeyRun
    lease: Lease
    asked_s: float
    is_fetching: bool = False

    @property
    def first_key(self) -> str:
        return self.run.first_key


@dataclass(frozen=True)
class _Miss:
    """Nothing of a run was found at ``asked_s``."""

    run: KeyRun
    asked_s: float


class WaitingLeases:
    """Leases by request id, each held until it is taken for a load or released. For the scheduler's thread.

    SGLang asks for a waiting request in every scheduling round; the store is asked in the first one. A
    request that is still there in a later round waits for its turn: then what lies below DRAM starts to come
    up, and the lease is renewed until it is all there, so that the load is planned for DRAM. If nothing was
    found, the store is asked again after ``RETRY_MISS_S``.
    """

    def __init__(
        self, store: KVStore, model: ServedModel, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._model = model
        self._clock = clock
        self._held: dict[str, HeldLease] = {}
        # By request id, the oldest first.
        self._missed: dict[str, _Miss] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_misses(self) -> int:
        """Requests of which nothing was found lately."""
        return len(self._missed)

    def hold(self, rid: str, page_keys: Sequence[str], token_ids: Callable[[], TokenIds]) -> int:
        """How many of ``page_keys`` (not none) can be restored; they are held from here on.

        ``token_ids``: as for ``KVStore.lease``, called for only if the store is asked.
        """
        run = KeyRun.of(page_keys)
        held, missed = self._held.get(rid), self._missed.get(rid)
        if held is not None and held.run == run:
            held = self._promote_to_dram(held, page_keys, token_ids)
        elif missed is not None and missed.run == run and self._clock() < missed.asked_s + RETRY_MISS_S:
            return 0
        else:
            self.release(rid)
            lease = self._store.lease(self._model.identity, page_keys, token_ids())
            if lease is None:
                self._note_miss(rid, run)
                return 0
            held = HeldLease(run, lease, self._clock())
        self._held[rid] = held
        return held.lease.num_pages

    def take(self, rid: str) -> HeldLease | None:
        """The caller holds the lease from here on."""
        self._missed.pop(rid, None)
        return self._held.pop(rid, None)

    def give_back(self, rid: str) -> None:
        """End the lease of a request that still waits, if it has one."""
        held = self._held.pop(rid, None)
        if held is not None:
            self._store.release(held.lease)

    def release(self, rid: str) -> None:
        """Forget a request: what it was promised, and that nothing was found of it."""
        self._missed.pop(rid, None)
        self.give_back(rid)

    def release_all(self) -> None:
        for rid in [*self._held, *self._missed]:
            self.release(rid)

    def _note_miss(self, rid: str, run: KeyRun) -> None:
        now_s = self._clock()
        self._missed[rid] = _Miss(run, now_s)
        # Nobody tells of a request that is computed and ends well.
        for other in [*self._missed]:
            if now_s < self._missed[other].asked_s + RETRY_MISS_S:
                break
            del self._missed[other]

    def _promote_to_dram(
        self, held: HeldLease, page_keys: Sequence[str], token_ids: Callable[[], TokenIds]
    ) -> HeldLease:
        now_s = self._clock()
        if held.lease.is_in_dram or (held.is_fetching and now_s < held.asked_s + RENEW_INTERVAL_S):
            return held
        tokens = token_ids()
        if not held.is_fetching:
            self._store.prefetch(self._model.identity, page_keys, tokens)
        lease = self._store.lease(self._model.identity, page_keys, tokens)
        if lease is None:
            # What was promised is still held.
            lease = held.lease
        else:
            self._store.release(held.lease)
        return HeldLease(held.run, lease, now_s, is_fetching=True)
