"""Holds the leases of waiting requests, and promotes what they lease to DRAM while they wait."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace

from krul_backend.segment import TokenIds
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease, Prefetched
from krul_sglang.engine.common.asking import AskingThread, Question
from krul_sglang.engine.common.moved_runs import FindRun
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.held_lease import (
    RENEW_INTERVAL_S,
    HeldLease,
    KeyRun,
    LeaseFinder,
    SegmentBytes,
)

RETRY_PREFETCH_S = 0.2
"""Seconds before anything is prefetched again after the store refused to."""
MAX_RENEWED_PAGES = 2048
"""Pages whose leases are renewed in one scheduling round, or one lease: lookups wait for one of them."""
RETRY_MISS_S = 1.0
"""Seconds before the store is asked again for a request of which it had nothing."""
UNCLAIMED_S = 1.0
"""Seconds after which a lease goes back that was granted too late for its round, or not on every rank, unless
its request is looked up again or waits in the queue."""


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


@dataclass(frozen=True, eq=False)
class _Lookup:
    """Asks for a lease of ``run``. ``before``: the lease that it replaces, kept until there is one."""

    run: KeyRun
    question: Question[HeldLease | None]
    before: HeldLease | None


class _RenewalRound:
    """Says whether the prefetches of one scheduling round go on: not after one that was refused."""

    is_refused = False


@dataclass(frozen=True)
class _Renewed:
    """A lease in place of an earlier one (None: nothing was found), and what was prefetched before."""

    lease: Lease | None
    prefetched: Prefetched


class WaitingLeases:
    """Holds leases by request id, until they are taken for a load or released. For the scheduler's thread.

    SGLang looks a waiting request up in each scheduling round that tries to admit it; the store is asked in
    the first one, by ``asking``, whose patience says how long a round waits for the answer. A late answer is
    a miss for this round, and is used in a later one if the request still waits. If the store had nothing,
    it is asked again after ``RETRY_MISS_S``. At the end of a round (``looking_ahead``), what those that still
    wait hold below DRAM is prefetched in the order of the queue, and their leases are renewed until all of it
    is in DRAM, so that the load is planned for DRAM. No round waits for that.

    What is held in DRAM cannot be evicted. So requests that wait pin at most ``max_ahead_bytes`` there, or
    the first of them what it needs; a segment that several share counts once. Behind the first that does not
    fit nothing is prefetched: what lies below DRAM stays held there, what is in DRAM as far as it fits.

    Every lease that the store grants is taken or released, whenever its answer comes.

    ``max_head_tokens``: a moved run that needs a longer head cannot be restored, so that it is not leased.
    """

    max_head_tokens = sys.maxsize

    def __init__(
        self,
        store: KVStore,
        model: ServedModel,
        asking: AskingThread,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_ahead_bytes: int = sys.maxsize,
    ) -> None:
        self._max_ahead_bytes = max_ahead_bytes
        self._store = store
        self._model = model
        self._asking = asking
        self._clock = clock
        self._held: dict[str, HeldLease] = {}
        self._lookups: dict[str, _Lookup] = {}
        # Of those in ``_held``.
        self._renewals: dict[str, Question[_Renewed | None]] = {}
        # Loads that room may still have to be made for, when the answer comes.
        self._prefetches: list[tuple[HeldLease, Question[Prefetched]]] = []
        # Ids of those in ``_held`` that nobody may want, and when their leases go back.
        self._unclaimed: dict[str, float] = {}
        # Ids of requests that waited in the last round, the next one first.
        self._queue: tuple[str, ...] = ()
        # Whether leases came or went since the last round, and when there is something to do even if not.
        self._has_changed = False
        self._settle_at_s = math.inf
        self._prefetch_at_s = -math.inf
        # By request id, the oldest first: of which run the store had nothing, and when it was asked.
        self._missed: dict[str, tuple[KeyRun, float]] = {}

    def __len__(self) -> int:
        return len(self._held) + sum(lookup.before is not None for lookup in self._lookups.values())

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
        self._use_answers()
        yield queue
        now_s = self._clock()
        self._end_unclaimed(now_s, queue)
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

        0 also if the answer is late: a later call returns it. ``token_ids``: as for ``KVStore.lease``; called
        only if the store is asked. ``find_run``, if given, may find more of the prompt at other places; it is
        called in the thread that asks.
        """
        run = KeyRun.of(page_keys)
        held, lookup, missed = self._held.get(rid), self._lookups.get(rid), self._missed.get(rid)
        if held is None or held.run != run:
            if lookup is None or lookup.run != run:
                if missed is not None and missed[0] == run and self._clock() < missed[1] + RETRY_MISS_S:
                    return 0
                lookup = self._look_up(rid, run, page_keys, token_ids(), find_run)
            if not lookup.question.wait(self._asking.patience):
                return 0
            held = self._found(rid, lookup)
        self._unclaimed.pop(rid, None)
        return 0 if held is None else held.num_pages(self._model.identity.page_size)

    def take(self, rid: str) -> HeldLease | None:
        """Hand the lease over to the caller, who releases it; None if there is none."""
        self._missed.pop(rid, None)
        if rid in self._renewals and self._renewals[rid].is_answered:
            self._renew_with_answer(rid)
        renewal = self._renewals.pop(rid, None)
        held = self._pop(rid)
        if held is None or held.lease.is_in_dram:
            self._drop(renewal)
            return held
        # What has arrived since the store was asked is planned for as what is in DRAM.
        if renewal is None:
            if not held.num_renewals and self._clock() < held.asked_s + RENEW_INTERVAL_S:
                return held
            renewal = self._ask_again(held)
        if not renewal.wait(self._asking.patience):
            self._drop(renewal)
            return held
        return self._renewed(held, renewal.answer(None))

    def make_room(self, held: HeldLease) -> None:
        """Begin to read what a load will need from below DRAM. If there is no room for it, those that wait
        lose as much, the last ones first."""
        if held.lease.is_in_dram or not self._held:
            return
        identity, page_keys, token_ids = self._model.identity, held.page_keys, held.token_ids
        prefetch = self._asking.ask(lambda: self._store.prefetch(identity, page_keys, token_ids()))
        if prefetch.wait(self._asking.patience):
            self._give_room(held, prefetch)
        else:
            self._prefetches.append((held, prefetch))

    def set_aside(self, rid: str) -> None:
        """This round cannot use the lease of ``rid``, if it has one: it goes back soon, unless a later one
        can."""
        if rid in self._held:
            self._unclaimed[rid] = self._clock() + UNCLAIMED_S

    def release(self, rid: str) -> None:
        """Forget a request: end its lease, and ask the store again if it comes back."""
        self._missed.pop(rid, None)
        self._give_back(rid)
        lookup = self._lookups.pop(rid, None)
        if lookup is not None:
            self._drop(lookup.question)
            if lookup.before is not None:
                self._store.release(lookup.before.lease)

    def release_all(self) -> None:
        for rid in [*self._held, *self._lookups, *self._missed]:
            self.release(rid)
        self._prefetches.clear()

    def _look_up(
        self,
        rid: str,
        run: KeyRun,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        find_run: FindRun | None,
    ) -> _Lookup:
        """Ask for a lease in place of the one that is held, if any."""
        self._missed.pop(rid, None)
        before = self._pop(rid)
        earlier = self._lookups.pop(rid, None)
        if earlier is not None:
            # It was asked for another run, so that nothing is held meanwhile.
            self._drop(earlier.question)
            before = earlier.before
        finder = LeaseFinder(self._store, self._model.identity, self.max_head_tokens, self._clock)
        question = self._asking.ask(lambda: finder.find(page_keys, token_ids, find_run))
        lookup = self._lookups[rid] = _Lookup(run, question, before)
        return lookup

    def _found(self, rid: str, lookup: _Lookup) -> HeldLease | None:
        """Hold what a lookup that is answered has found; None if that is nothing."""
        del self._lookups[rid]
        held = lookup.question.answer(None)
        if lookup.before is not None:
            self._store.release(lookup.before.lease)
        if held is None:
            self._note_miss(rid, lookup.run)
        else:
            self._held[rid] = held
            self._has_changed = True
        return held

    def _use_answers(self) -> None:
        """Use answers that came after the round that asked for them."""
        for rid, lookup in [*self._lookups.items()]:
            if lookup.question.is_answered and self._found(rid, lookup) is not None:
                # Its request may have been computed meanwhile; nothing is reported of that.
                self._unclaimed[rid] = self._clock() + UNCLAIMED_S
        for rid, renewal in [*self._renewals.items()]:
            if renewal.is_answered:
                self._renew_with_answer(rid)
        prefetches, self._prefetches = self._prefetches, []
        for held, prefetch in prefetches:
            if prefetch.is_answered:
                self._give_room(held, prefetch)
            else:
                self._prefetches.append((held, prefetch))

    def _end_unclaimed(self, now_s: float, queue: Sequence[str]) -> None:
        """Give leases back that nobody has asked for since they were unclaimed. Who waits may ask yet."""
        for rid in [rid for rid, give_back_at_s in self._unclaimed.items() if now_s >= give_back_at_s]:
            if rid not in queue:
                self._give_back(rid)

    def _give_back(self, rid: str) -> None:
        """End the lease of a request that may still wait, if it has one."""
        held = self._pop(rid)
        if held is not None:
            self._store.release(held.lease)

    def _pop(self, rid: str) -> HeldLease | None:
        self._has_changed |= rid in self._held
        self._unclaimed.pop(rid, None)
        self._drop(self._renewals.pop(rid, None))
        return self._held.pop(rid, None)

    def _drop(self, question: Question[HeldLease | None] | Question[_Renewed | None] | None) -> None:
        """Nobody wants this answer any more: what it grants is released."""
        if question is not None:
            question.drop(self._release_answer)

    def _release_answer(self, answer: HeldLease | _Renewed | None) -> None:
        """In any thread."""
        if answer is not None and answer.lease is not None:
            self._store.release(answer.lease)

    def _in_order(self) -> list[str]:
        """Who holds leases, in the order of the queue; those that wait outside of it are the last."""
        return [rid for rid in dict.fromkeys((*self._queue, *self._held)) if rid in self._held]

    def _settle(self, now_s: float) -> None:
        """Prefetch for those that wait, in their order, and end leases that pin too much."""
        room = _Room(self._max_ahead_bytes)
        renewals = _RenewalRound()
        # What has not been asked yet is asked in the order of now.
        for rid in [rid for rid, renewal in self._renewals.items() if renewal.drop_unasked()]:
            del self._renewals[rid]
        may_prefetch = now_s >= self._prefetch_at_s
        has_room = True
        num_pages, settle_at_s = 0, math.inf
        for rid in self._in_order():
            # Those behind the first that does not fit do not take the room that it waits for.
            has_room = has_room and room.fits(self._held[rid].segments)
            if has_room and not self._held[rid].lease.is_in_dram:
                may_renew = may_prefetch and rid not in self._renewals
                if may_renew and now_s >= self._held[rid].renew_at_s:
                    self._renew(rid, renewals)
                    num_pages += len(self._held[rid].page_keys)
                    may_prefetch = not renewals.is_refused and num_pages < MAX_RENEWED_PAGES
                if rid not in self._renewals:
                    settle_at_s = min(settle_at_s, max(self._held[rid].renew_at_s, self._prefetch_at_s))
            held = self._held[rid]
            # One that was refused is the next to get room.
            is_next = (held.is_refused or rid in self._renewals) and has_room
            pinned = held.segments if is_next else held.pinned
            if room.fits(pinned):
                room.add(pinned)
            else:
                self._give_back(rid)
        self._has_changed, self._settle_at_s = False, settle_at_s

    def _note_miss(self, rid: str, run: KeyRun) -> None:
        now_s = self._clock()
        self._missed[rid] = run, now_s
        # Nothing is reported of requests that were computed and ended: drop misses by their age.
        for other, (_, asked_s) in [*self._missed.items()]:
            if now_s < asked_s + RETRY_MISS_S:
                break
            del self._missed[other]

    def _renew(self, rid: str, renewals: _RenewalRound) -> None:
        """Have what lies below DRAM prefetched, and ask for a lease of it where it is going to be."""
        held, identity = self._held[rid], self._model.identity

        def renew() -> _Renewed | None:
            """None: one before it was refused."""
            if renewals.is_refused:
                return None
            token_ids = held.token_ids()
            # Also if it was asked for before: not all may have come. What is on its way stays so.
            prefetched = self._store.prefetch(identity, held.page_keys, token_ids)
            renewals.is_refused = prefetched.is_deferred
            return _Renewed(self._store.lease(identity, held.page_keys, token_ids), prefetched)

        renewal = self._renewals[rid] = self._asking.ask(renew, is_urgent=False)
        if renewal.is_answered:
            self._renew_with_answer(rid)

    def _renew_with_answer(self, rid: str) -> None:
        renewed = self._renewals.pop(rid).answer(None)
        self._has_changed = True
        if renewed is None or renewed.prefetched.is_deferred:
            self._prefetch_at_s = self._clock() + RETRY_PREFETCH_S
        if renewed is None:
            return
        self._held[rid] = replace(
            self._renewed(self._held[rid], renewed),
            num_renewals=self._held[rid].num_renewals + 1,
            # More than a tenant may have stays below DRAM, and holds nobody else up.
            is_refused=renewed.prefetched.is_deferred,
            num_arriving=renewed.prefetched.num_pages,
        )

    def _ask_again(self, held: HeldLease) -> Question[_Renewed | None]:
        """Ask for a lease in place of an earlier one, which says what has arrived in DRAM since."""
        identity, page_keys, token_ids = self._model.identity, held.page_keys, held.token_ids
        return self._asking.ask(
            lambda: _Renewed(self._store.lease(identity, page_keys, token_ids()), Prefetched())
        )

    def _renewed(self, held: HeldLease, renewed: _Renewed | None) -> HeldLease:
        """With the new lease in place of the earlier one, unless that is better."""
        lease, unused = (None if renewed is None else renewed.lease), held.lease
        # The earlier lease is still valid.
        if lease is None or lease.num_pages < held.lease.num_pages:
            lease, unused = held.lease, lease
        if unused is not None:
            self._store.release(unused)
        return replace(held, lease=lease, asked_s=self._clock())

    def _give_room(self, held: HeldLease, prefetch: Question[Prefetched]) -> None:
        """End leases of those that wait, the last ones first, if a load was refused the room it needs."""
        # If enough is being prefetched, DRAM may be full as well. A load does not wait for that.
        if not prefetch.answer(Prefetched()).is_deferred:
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
                of_last = self._held[rid] = self._asked_again(of_last)
            missing -= sum(num_bytes for key, num_bytes in of_last.in_dram.items() if not pins[key])
            if of_last.in_dram:
                self._give_back(rid)

    def _asked_again(self, held: HeldLease) -> HeldLease:
        """With what has arrived in DRAM since, if the answer comes in time."""
        again = self._ask_again(held)
        if again.wait(self._asking.patience):
            return self._renewed(held, again.answer(None))
        self._drop(again)
        return held
