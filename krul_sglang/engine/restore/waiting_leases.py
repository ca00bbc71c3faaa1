"""Holds the leases of waiting requests, and promotes what they lease to DRAM while they wait."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property

from krul_backend.segment import TokenIds
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import DRAM_TIER, Lease, SegmentSlice
from krul_sglang.engine.common.moved_runs import RECOMPUTED_TOKENS, FindRun, MovedRun
from krul_sglang.engine.common.served_model import ServedModel

RENEW_INTERVAL_S = 0.05
"""Seconds until the store is asked whether a waiting request's prefetch has arrived. The time doubles with
each further question, since every one goes through all of the prefix."""
MAX_RENEW_INTERVAL_S = 1.0
RETRY_PREFETCH_S = 0.2
"""Seconds before anything is prefetched again after the store refused to."""
MAX_RENEWED_PAGES = 2048
"""Pages whose leases are renewed in one scheduling round, or one lease: running requests wait for it."""
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


SegmentBytes = Mapping[Hashable, int]
"""Bytes of segments, by the checksums of their blocks, which are the same in all tiers."""


@dataclass(frozen=True)
class HeldLease:
    """The lease of a waiting request, and the page keys and tokens that it was given for.

    ``token_ids``: as for ``KVStore.lease``. ``asked_s``: when the store was asked last. ``num_renewals``: how
    often a prefetch from lower tiers was asked for, and the lease renewed; ``is_refused``: the last one was
    refused, or a part of it. ``num_arriving``: pages that were on their way to DRAM then. ``moved``: the run
    that is leased, if it is stored at another place than where the request has it; then keys and tokens are
    those of the run.
    """

    run: KeyRun
    page_keys: Sequence[str]
    token_ids: Callable[[], TokenIds]
    lease: Lease
    asked_s: float
    num_renewals: int = 0
    is_refused: bool = False
    num_arriving: int = 0
    moved: MovedRun | None = None

    @property
    def first_key(self) -> str:
        return self.run.first_key

    @property
    def renew_at_s(self) -> float:
        """When the lease should be renewed; at once if nothing is on its way for it."""
        if not self.num_renewals or self.is_refused:
            return self.asked_s
        return self.asked_s + min(RENEW_INTERVAL_S * 2.0 ** (self.num_renewals - 1), MAX_RENEW_INTERVAL_S)

    @cached_property
    def segments(self) -> SegmentBytes:
        """All leased segments."""
        return _bytes_of(self.lease.slices)

    @cached_property
    def in_dram(self) -> SegmentBytes:
        """Those of ``segments`` that are in DRAM."""
        return _bytes_of(piece for piece in self.lease.slices if piece.tier == DRAM_TIER)

    @cached_property
    def pinned(self) -> SegmentBytes:
        """Those of ``segments`` that are in DRAM, or on their way there: they cannot be evicted."""
        pinned = []
        num_arriving = self.num_arriving
        for piece in self.lease.slices:
            if piece.tier != DRAM_TIER:
                # The first ones of a prefix are fetched first.
                if num_arriving <= 0:
                    continue
                num_arriving -= piece.end_page - piece.first_page
            pinned.append(piece)
        return _bytes_of(pinned)

    def num_pages(self, page_size: int) -> int:
        """How many of the request's pages can be restored."""
        if self.moved is None:
            return self.lease.num_pages
        return self.moved.num_pages(self.lease.num_pages, page_size)


def _bytes_of(slices: Iterable[SegmentSlice]) -> SegmentBytes:
    return {tuple(piece.checksums): sum(piece.header.layer_num_bytes) for piece in slices}


class _Room:
    """Adds up the bytes of segments, each counted once, up to a limit. What comes first may exceed it."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._num_bytes = 0
        self._segments: set[Hashable] = set()

    def fits(self, segments: SegmentBytes) -> bool:
        more = self._more(segments)
        return not more or not self._num_bytes or self._num_bytes + more <= self._max_bytes

    def add(self, segments: SegmentBytes) -> None:
        self._num_bytes += self._more(segments)
        self._segments.update(segments)

    def _more(self, segments: SegmentBytes) -> int:
        return sum(num_bytes for key, num_bytes in segments.items() if key not in self._segments)


class WaitingLeases:
    """Holds leases by request id, until they are taken for a load or released. For the scheduler's thread.

    SGLang looks a waiting request up in each scheduling round that tries to admit it; the store is asked in
    the first one. If the store had nothing, it is asked again after ``RETRY_MISS_S``. At the end of a round
    (``looking_ahead``), what those that still wait hold below DRAM is prefetched in the order of the queue,
    and their leases are renewed until all of it is in DRAM, so that the load is planned for DRAM.

    What is held in DRAM cannot be evicted. So requests that wait pin at most ``max_ahead_bytes`` there, or
    the first of them what it needs; a segment that several share counts once. Behind the first that does not
    fit nothing is prefetched: what lies below DRAM stays held there, what is in DRAM as far as it fits.

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
        self._store = store
        self._model = model
        self._clock = clock
        self._held: dict[str, HeldLease] = {}
        # Ids of requests that waited in the last round, the next one first.
        self._queue: tuple[str, ...] = ()
        # Whether leases came or went since the last round, and when there is something to do even if not.
        self._has_changed = False
        self._settle_at_s = math.inf
        self._prefetch_at_s = -math.inf
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
        """To be held around lookups of the requests that a scheduling round has not admitted.

        The caller appends the ids of those that wait, the next one first, to what this yields. At the end
        they get room in DRAM in this order.
        """
        queue: list[str] = []
        yield queue
        now_s = self._clock()
        if self._has_changed or self._queue != tuple(queue) or now_s >= self._settle_at_s:
            self._queue = tuple(queue)
            self._settle(now_s)

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
        if held is None or held.run != run:
            if missed is not None and missed[0] == run and self._clock() < missed[1] + RETRY_MISS_S:
                return 0
            held = self._lease_anew(rid, run, page_keys, token_ids, find_run)
        return 0 if held is None else held.num_pages(self._model.identity.page_size)

    def take(self, rid: str) -> HeldLease | None:
        """Hand the lease over to the caller, who releases it; None if there is none."""
        self._missed.pop(rid, None)
        held = self._pop(rid)
        if held is None or held.lease.is_in_dram:
            return held
        if not held.num_renewals and self._clock() < held.asked_s + RENEW_INTERVAL_S:
            return held
        # What has arrived since the store was asked is planned for as what is in DRAM.
        try:
            return self._leased_again(held)
        except BaseException:
            self._store.release(held.lease)
            raise

    def make_room(self, held: HeldLease) -> None:
        """Begin to read what a load will need from below DRAM. If there is no room for it, those that wait
        lose as much, the last ones first."""
        if held.lease.is_in_dram or not self._held:
            return
        prefetched = self._store.prefetch(self._model.identity, held.page_keys, held.token_ids())
        # If enough is being prefetched, DRAM may be full as well. A load does not wait for that.
        if not prefetched.is_deferred:
            return
        missing = sum(held.segments.values()) - sum(held.in_dram.values())
        pins = Counter(key for other in self._held.values() for key in other.pinned)
        for rid in reversed(self._in_order()):
            if missing <= 0:
                break
            of_last = self._held[rid]
            pins.subtract(of_last.pinned.keys())
            if of_last.num_arriving:
                # What is still on its way cannot be evicted for a while.
                of_last = self._held[rid] = self._leased_again(of_last)
            missing -= sum(num_bytes for key, num_bytes in of_last.in_dram.items() if not pins[key])
            if of_last.in_dram:
                self.give_back(rid)

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
        """Hold a lease in place of the one that is held, if any; None if nothing is found."""
        self._missed.pop(rid, None)
        before = self._pop(rid)
        try:
            held = self._lease(run, page_keys, token_ids, find_run)
        finally:
            if before is not None:
                self._store.release(before.lease)
        if held is None:
            self._note_miss(rid, run)
        else:
            self._held[rid] = held
            self._has_changed = True
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

    def _pop(self, rid: str) -> HeldLease | None:
        self._has_changed |= rid in self._held
        return self._held.pop(rid, None)

    def _in_order(self) -> list[str]:
        """Who holds leases, in the order of the queue; those that wait outside of it are the last."""
        return [rid for rid in dict.fromkeys((*self._queue, *self._held)) if rid in self._held]

    def _settle(self, now_s: float) -> None:
        """Prefetch for those that wait, in their order, and end leases that pin too much."""
        room = _Room(self._max_ahead_bytes)
        may_prefetch = now_s >= self._prefetch_at_s
        has_room = True
        num_pages, settle_at_s = 0, math.inf
        for rid in self._in_order():
            held = self._held[rid]
            # Those behind the first that does not fit do not take the room that it waits for.
            has_room = has_room and room.fits(held.segments)
            if has_room and not held.lease.is_in_dram:
                if may_prefetch and now_s >= held.renew_at_s:
                    held = self._held[rid] = self._renewed(held)
                    num_pages += len(held.page_keys)
                    may_prefetch = not held.is_refused and num_pages < MAX_RENEWED_PAGES
                    if held.is_refused:
                        self._prefetch_at_s = now_s + RETRY_PREFETCH_S
                settle_at_s = min(settle_at_s, max(held.renew_at_s, self._prefetch_at_s))
            # One that was refused is the next to get room.
            pinned = held.segments if held.is_refused and has_room else held.pinned
            if room.fits(pinned):
                room.add(pinned)
            else:
                self.give_back(rid)
        self._has_changed, self._settle_at_s = False, settle_at_s

    def _note_miss(self, rid: str, run: KeyRun) -> None:
        now_s = self._clock()
        self._missed[rid] = run, now_s
        # Nothing is reported of requests that were computed and ended: drop misses by their age.
        for other, (_, asked_s) in [*self._missed.items()]:
            if now_s < asked_s + RETRY_MISS_S:
                break
            del self._missed[other]

    def _renewed(self, held: HeldLease) -> HeldLease:
        """Have what lies below DRAM prefetched, and lease it where it is going to be."""
        # Also if it was asked for before: not all may have come. What is on its way stays so.
        prefetched = self._store.prefetch(self._model.identity, held.page_keys, held.token_ids())
        return replace(
            self._leased_again(held),
            num_renewals=held.num_renewals + 1,
            # More than a tenant may have stays below DRAM, and holds nobody else up.
            is_refused=prefetched.is_deferred,
            num_arriving=prefetched.num_pages,
        )

    def _leased_again(self, held: HeldLease) -> HeldLease:
        """A lease in place of an earlier one, which says what has arrived in DRAM since."""
        lease = self._store.lease(self._model.identity, held.page_keys, held.token_ids())
        # The earlier lease is still valid.
        if lease is None or lease.num_pages < held.lease.num_pages:
            lease, unused = held.lease, lease
        else:
            unused = held.lease
        if unused is not None:
            self._store.release(unused)
        return replace(held, lease=lease, asked_s=self._clock())
