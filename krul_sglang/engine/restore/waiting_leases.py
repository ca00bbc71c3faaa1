"""Holds the leases of waiting requests, and promotes what they lease to DRAM while they wait."""

from __future__ import annotations

import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from krul_backend.segment import TokenIds
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import DRAM_TIER, Lease
from krul_sglang.engine.common.moved_runs import RECOMPUTED_TOKENS, FindRun, MovedRun
from krul_sglang.engine.common.served_model import ServedModel

RENEW_INTERVAL_S = 0.05
"""Seconds until the store is asked whether a waiting request's prefetch has arrived. The time doubles with
each further question, since every one goes through all of the prefix."""
MAX_RENEW_INTERVAL_S = 1.0
RETRY_ROOM_S = 0.2
"""Seconds before room in DRAM is asked for again."""
RETRY_MISS_S = 1.0
"""Seconds before the store is asked again for a request of which it had nothing."""


@dataclass(frozen=True)
class KeyRun:
    """Names a run of page keys. A key is a hash over all pages up to its own: the last one covers all."""

    first_key: str
    last_key: str
    num_keys: int

    @classmethod
    def of(cls, page_keys: Sequence[str]) -> KeyRun:
        return cls(page_keys[0], page_keys[-1], len(page_keys))


@dataclass(frozen=True)
class HeldLease:
    """The lease of a waiting request, and the page keys and tokens that it was given for.

    ``token_ids``: as for ``KVStore.lease``. ``asked_s``: when the store was asked last. ``num_renewals``: how
    often a prefetch from lower tiers was asked for, and the lease renewed; ``found_room``: whether DRAM had
    room for it then. ``moved``: the run that is leased, if it is stored at another place than where
    the request has it; then keys and tokens are those of the run.
    """

    run: KeyRun
    page_keys: Sequence[str]
    token_ids: Callable[[], TokenIds]
    lease: Lease
    asked_s: float
    num_renewals: int = 0
    found_room: bool = True
    moved: MovedRun | None = None

    @property
    def first_key(self) -> str:
        return self.run.first_key

    @property
    def renew_at_s(self) -> float:
        """When the lease should be renewed, once something is being fetched for it."""
        if not self.found_room:
            return self.asked_s + RETRY_ROOM_S
        return self.asked_s + min(RENEW_INTERVAL_S * 2.0 ** (self.num_renewals - 1), MAX_RENEW_INTERVAL_S)

    @cached_property
    def segments(self) -> dict[tuple[str, int], int]:
        """Bytes of each leased segment, by its tier and id."""
        return {
            (piece.tier, piece.segment_id): sum(piece.header.layer_num_bytes) for piece in self.lease.slices
        }

    @cached_property
    def pinned(self) -> dict[tuple[str, int], int]:
        """Those of ``segments`` that are in DRAM, or on their way there: they cannot be evicted."""
        if self.num_renewals:
            return self.segments
        return {key: num_bytes for key, num_bytes in self.segments.items() if key[0] == DRAM_TIER}

    def num_pages(self, page_size: int) -> int:
        """How many of the request's pages can be restored."""
        if self.moved is None:
            return self.lease.num_pages
        return self.moved.num_pages(self.lease.num_pages, page_size)


class WaitingLeases:
    """Holds leases by request id, until they are taken for a load or released. For the scheduler's thread.

    SGLang looks a waiting request up in each scheduling round that tries to admit it; the store is asked in
    the first one. If the request still waits in a later round, or if it is looked up ahead of its turn, what
    lies below DRAM is prefetched, and the lease is renewed until all of it is in DRAM, so that the load is
    planned for DRAM. If the store had nothing, it is asked again after ``RETRY_MISS_S``.

    What is held in DRAM cannot be evicted. So lookups ahead pin at most ``max_ahead_bytes`` there, or one
    lease that is larger, a segment that requests share counted once. What would be too much stays held on its
    tier, and is prefetched as soon as there is room. The last in the queue lose what they pin when one before
    them needs the room, or one that is admitted.

    ``max_head_tokens``: a moved run that needs a longer head cannot be restored, so that it is not leased.
    """

    max_head_tokens = sys.maxsize

    def __init__(
        self,
        store: KVStore,
        model: ServedModel,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_ahead_bytes: int = sys.maxsize,
    ) -> None:
        self._max_ahead_bytes = max_ahead_bytes
        self._is_ahead = False
        # Ids of requests that waited in the last round, the next one first.
        self._queue: tuple[str, ...] = ()
        self._store = store
        self._model = model
        self._clock = clock
        self._held: dict[str, HeldLease] = {}
        # How many leases pin each segment in DRAM, and the bytes of all these segments.
        self._pins: Counter[tuple[str, int]] = Counter()
        self._pinned_bytes = 0
        # By request id, the oldest first: of which run the store had nothing, and when it was asked.
        self._missed: dict[str, tuple[KeyRun, float]] = {}

    def __len__(self) -> int:
        return len(self._held)

    @property
    def num_misses(self) -> int:
        """Requests of which the store had nothing lately."""
        return len(self._missed)

    @contextmanager
    def looking_ahead(self) -> Iterator[list[str]]:
        """Calls of ``hold`` within are for requests that this scheduling round has not admitted.

        The caller appends the ids of those that wait, the next one first, to what this yields. At the end,
        what they hold below DRAM is prefetched in this order, as far as it may be pinned.
        """
        self._is_ahead = True
        queue: list[str] = []
        try:
            yield queue
        finally:
            self._is_ahead = False
        self._queue = tuple(queue)
        self._prefetch()

    def hold(
        self,
        rid: str,
        page_keys: Sequence[str],
        token_ids: Callable[[], TokenIds],
        find_run: FindRun | None = None,
    ) -> int:
        """Hold a lease of the first of ``page_keys`` (at least one); returns how many can be restored.

        ``token_ids``: as for ``KVStore.lease``; called only if the store is asked. ``find_run``, if given,
        may find more of the prompt at other places.
        """
        run = KeyRun.of(page_keys)
        held, missed = self._held.get(rid), self._missed.get(rid)
        if held is not None and held.run == run:
            held = held if self._is_ahead else self._promote_to_dram(held)
        elif missed is not None and missed[0] == run and self._clock() < missed[1] + RETRY_MISS_S:
            return 0
        else:
            held = self._lease_anew(rid, run, page_keys, token_ids, find_run)
            if held is None:
                return 0
        self._keep(rid, held)
        return held.num_pages(self._model.identity.page_size)

    def take(self, rid: str) -> HeldLease | None:
        """Hand the lease over to the caller, who releases it; None if there is none."""
        self._missed.pop(rid, None)
        held = self._pop(rid)
        # What has arrived since it was asked last is planned for as what is in DRAM. The rest needs room.
        while held is not None and not held.lease.is_in_dram and (held.num_renewals or self._held):
            held = self._renew(held)
            if held.found_room or not self._give_back_last(self._queue):
                break
        return held

    def give_back(self, rid: str) -> None:
        """End the lease of a request that still waits, if it has one."""
        held = self._pop(rid)
        if held is not None:
            self._store.release(held.lease)

    def release(self, rid: str) -> None:
        """Forget a request: end its lease, and ask the store again if it comes back."""
        self._missed.pop(rid, None)
        self.give_back(rid)

    def release_all(self) -> None:
        for rid in [*self._held, *self._missed]:
            self.release(rid)

    def _lease_anew(
        self,
        rid: str,
        run: KeyRun,
        page_keys: Sequence[str],
        token_ids: Callable[[], TokenIds],
        find_run: FindRun | None,
    ) -> HeldLease | None:
        """A lease in place of the one that is held, if any; None if nothing is found, or too much for now."""
        self._missed.pop(rid, None)
        before = self._pop(rid)
        try:
            held = self._lease(run, page_keys, token_ids, find_run)
        finally:
            if before is not None:
                self._store.release(before.lease)
        if held is None:
            self._note_miss(rid, run)
        elif before is not None and before.pinned:
            # The prompt's prefix on the device has changed. It keeps its place in DRAM.
            held = self._promote_to_dram(held)
        elif self._is_ahead and not self._has_room(rid, held.pinned):
            self._store.release(held.lease)
            return None
        return held

    def _lease(
        self,
        run: KeyRun,
        page_keys: Sequence[str],
        token_ids: Callable[[], TokenIds],
        find_run: FindRun | None,
    ) -> HeldLease | None:
        lease = self._store.lease(self._model.identity, page_keys, token_ids())
        num_pages = 0 if lease is None else lease.num_pages
        moved = None if find_run is None or num_pages == len(page_keys) else find_run(num_pages)
        if moved is not None and moved.num_head_tokens <= self.max_head_tokens:
            of_run = self._store.lease(self._model.identity, moved.page_keys, moved.token_ids)
            # What is found in its place is computed again then, as all that is before the run.
            num_more = 0 if of_run is None else of_run.num_pages - num_pages
            if of_run is not None and num_more * self._model.identity.page_size > RECOMPUTED_TOKENS:
                if lease is not None:
                    self._store.release(lease)
                tokens_of_run = moved.token_ids
                return HeldLease(
                    run, moved.page_keys, lambda: tokens_of_run, of_run, self._clock(), moved=moved
                )
            if of_run is not None:
                self._store.release(of_run)
        return None if lease is None else HeldLease(run, page_keys, token_ids, lease, self._clock())

    def _keep(self, rid: str, held: HeldLease) -> None:
        before = self._held.get(rid)
        self._held[rid] = held
        self._count_pins(held, 1)
        if before is not None:
            self._count_pins(before, -1)

    def _pop(self, rid: str) -> HeldLease | None:
        held = self._held.pop(rid, None)
        if held is not None:
            self._count_pins(held, -1)
        return held

    def _count_pins(self, held: HeldLease, step: int) -> None:
        for key, num_bytes in held.pinned.items():
            was_pinned = key in self._pins
            self._pins[key] += step
            if not self._pins[key]:
                del self._pins[key]
            self._pinned_bytes += num_bytes * ((key in self._pins) - was_pinned)

    def _has_room(self, rid: str, segments: Mapping[tuple[str, int], int]) -> bool:
        """Whether a request that waits may pin these segments, too; it may if no other one pins any."""
        more = sum(num_bytes for key, num_bytes in segments.items() if key not in self._pins)
        before = self._held.get(rid)
        of_others = self._pinned_bytes - (0 if before is None else sum(before.pinned.values()))
        return of_others <= 0 or self._pinned_bytes + more <= self._max_ahead_bytes

    def _prefetch(self) -> None:
        """Prefetch for the requests of the queue, up to the first that finds no room: it gets that of those
        behind it."""
        for number, rid in enumerate(self._queue):
            held = self._held.get(rid)
            if held is None or held.lease.is_in_dram:
                continue
            while not held.num_renewals and not self._has_room(rid, held.segments):
                if not self._give_back_last(self._queue[number + 1 :]):
                    return
            promoted = self._promote_to_dram(held)
            if promoted is not held:
                self._keep(rid, promoted)

    def _give_back_last(self, rids: Sequence[str]) -> bool:
        """End the last lease of these requests that pins anything; False if none does."""
        for rid in reversed(rids):
            if rid in self._held and self._held[rid].pinned:
                self.give_back(rid)
                return True
        return False

    def _note_miss(self, rid: str, run: KeyRun) -> None:
        now_s = self._clock()
        self._missed[rid] = run, now_s
        # Nothing is reported of requests that were computed and ended: drop misses by their age.
        for other, (_, asked_s) in [*self._missed.items()]:
            if now_s < asked_s + RETRY_MISS_S:
                break
            del self._missed[other]

    def _promote_to_dram(self, held: HeldLease) -> HeldLease:
        if held.lease.is_in_dram or (held.num_renewals and self._clock() < held.renew_at_s):
            return held
        return self._renew(held)

    def _renew(self, held: HeldLease) -> HeldLease:
        page_keys, tokens = held.page_keys, held.token_ids()
        # Again if it was asked for before: there may have been no room then. What is on its way stays so.
        prefetched = self._store.prefetch(self._model.identity, page_keys, tokens)
        lease = self._store.lease(self._model.identity, page_keys, tokens)
        # The earlier lease is still valid.
        if lease is None or lease.num_pages < held.lease.num_pages:
            lease, unused = held.lease, lease
        else:
            unused = held.lease
        if unused is not None:
            self._store.release(unused)
        return replace(
            held,
            lease=lease,
            asked_s=self._clock(),
            num_renewals=held.num_renewals + 1,
            found_room=prefetched.found_room,
        )
