"""What waiting requests were promised, and how it comes nearer while they wait."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.store.interface import KVStore, Lease

RENEW_S = 0.05
"""No more often is it asked whether what was fetched for a waiting request has arrived."""


@dataclass(frozen=True)
class HeldLease:
    """What a waiting request was promised: the lease, and the page keys it was given for.

    ``asked_s``: when the store was asked last. ``is_fetching``: what lies in lower tiers is on its way.
    """

    first_key: str
    num_keys: int
    lease: Lease
    asked_s: float
    is_fetching: bool = False


class WaitingLeases:
    """Leases by request id, each held until it is taken for a load or released. For the scheduler's thread.

    SGLang asks for a waiting request in every scheduling round; the store is asked in the first one. A
    request that is still there in a later round waits for its turn: then what lies below DRAM starts to come
    up, and the lease is renewed until it is all there, so that the load is planned for DRAM.
    """

    def __init__(
        self, store: KVStore, model: ModelIdentity, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._store = store
        self._model = model
        self._clock = clock
        self._held: dict[str, HeldLease] = {}

    def __len__(self) -> int:
        return len(self._held)

    def promise(self, rid: str, page_keys: Sequence[str], token_ids: Callable[[], TokenIds]) -> int:
        """How many of ``page_keys`` (not none) can be restored; they are held from here on.

        ``token_ids``: as for ``KVStore.lease``, called for only if the store is asked.
        """
        held = self._held.get(rid)
        if held is not None and (held.first_key, held.num_keys) == (page_keys[0], len(page_keys)):
            held = self._come_nearer(held, page_keys, token_ids)
        else:
            self.release(rid)
            lease = self._store.lease(self._model, page_keys, token_ids())
            if lease is None:
                return 0
            held = HeldLease(page_keys[0], len(page_keys), lease, self._clock())
        self._held[rid] = held
        return held.lease.num_pages

    def take(self, rid: str) -> HeldLease | None:
        """The caller holds the lease from here on."""
        return self._held.pop(rid, None)

    def release(self, rid: str) -> None:
        """Give up what was promised, if anything."""
        held = self._held.pop(rid, None)
        if held is not None:
            self._store.release(held.lease)

    def release_all(self) -> None:
        for rid in list(self._held):
            self.release(rid)

    def _come_nearer(
        self, held: HeldLease, page_keys: Sequence[str], token_ids: Callable[[], TokenIds]
    ) -> HeldLease:
        now_s = self._clock()
        if held.lease.is_in_dram or (held.is_fetching and now_s < held.asked_s + RENEW_S):
            return held
        tokens = token_ids()
        if not held.is_fetching:
            self._store.prefetch(self._model, page_keys, tokens)
        lease = self._store.lease(self._model, page_keys, tokens)
        if lease is None:
            # What was promised is still held.
            lease = held.lease
        else:
            self._store.release(held.lease)
        return HeldLease(held.first_key, held.num_keys, lease, now_s, is_fetching=True)
