"""Follows requests whose prefix may be stored, from their first lookup until their load starts."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import FastCopies, Lease, Prefetched, SegmentSlice, Tails
from krul_backend.tiers.common.read_queue import ReadPriority
from krul_sglang.engine.common.asking import AskingThread, Question
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.common.served_model import ServedModel
from krul_sglang.engine.restore.held_lease import (
    RENEW_INTERVAL_S,
    HeldLease,
    KeyRun,
    PlanAhead,
    Room,
    num_bytes_of,
    whole_segments,
)
from krul_sglang.engine.restore.lease_questions import LeaseFinder, RenewalRound, Renewed
from krul_sglang.engine.restore.load_batch import Load
from krul_sglang.engine.restore.returning_request import Prompt, ReturningRequest, State
from krul_sglang.reasons import Reasons

RETRY_PREFETCH_S = 0.2
"""Seconds before anything is prefetched again after the store refused to."""
WAITED_READS = 2
"""A request waits for what is read for it at most so many times as long as reading it should take."""
MAX_RENEWED_PAGES = 2048
"""Pages whose leases are renewed in one scheduling round, or one lease: lookups wait for one of them."""
RETRY_MISS_S = 1.0
"""Seconds before the store is asked again for a request of which it had nothing."""
UNCLAIMED_S = 1.0
"""Seconds after which a lease goes back that was granted too late for its round, or not on every rank, unless
its request is looked up again or waits in the queue."""


class ReturningRequests:
    """Holds the requests whose prefix may be stored, by their ids. For the scheduler's thread.

    SGLang looks a waiting request up in each scheduling round that tries to admit it; the store is asked in
    the first one, by ``asking``, whose patience says how long a round waits for the answer. A late answer is
    a miss for this round, and is used in a later one if the request still waits. If the store had nothing,
    it is asked again after ``RETRY_MISS_S``. A store that says at once that it has nothing is not asked:
    ``num_spared`` counts such lookups. At the end of a round (``looking_ahead``), what those that still
    wait will want from below DRAM is prefetched in the order of the queue, and their leases are renewed until
    all of it is in DRAM, so that the load is planned for DRAM. No round waits for that.

    What is held in DRAM cannot be evicted. So requests that wait pin at most ``max_ahead_bytes`` there, or
    the first of them what it needs; a segment that several share counts once. Behind the first that does not
    fit nothing is prefetched: what lies below DRAM stays held there, what is in DRAM as far as it fits.

    Every lease that the store grants goes to a load or is released, whenever its answer comes. A request is
    forgotten when its load starts, and by ``release``: when it ends, for whatever reason.

    ``max_head_tokens``: a moved run that needs a longer head cannot be restored, so that it is not leased.
    ``states``: see ``LeaseFinder``. ``reasons`` are told what was found, and find out why it was not more
    when nothing else is asked. ``plan_ahead(prompt)`` is called in the scheduler's thread; what it returns,
    in the one that asks.
    """

    def __init__(
        self,
        store: KVStore,
        model: ServedModel,
        asking: AskingThread,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_ahead_bytes: int = sys.maxsize,
        max_head_tokens: int = sys.maxsize,
        reasons: Reasons | None = None,
        plan_ahead: Callable[[Prompt], PlanAhead] = lambda prompt: whole_segments,
        states: BoundaryStates | None = None,
    ) -> None:
        self._states = states
        self._reasons = reasons
        self._plan_ahead = plan_ahead
        self._max_head_tokens = max_head_tokens
        self._max_ahead_bytes = max_ahead_bytes
        self._store = store
        self._model = model
        self._asking = asking
        self._clock = clock
        self._requests: dict[str, ReturningRequest] = {}
        self.num_spared = 0
        # Bytes that room may still have to be made for, when the answer comes.
        self._prefetches: list[tuple[int, Question[Prefetched]]] = []
        # Ids of requests that waited in the last round, the next one first.
        self._queue: tuple[str, ...] = ()
        # Whether leases came or went since the last round, and when there is something to do even if not.
        self._has_changed = False
        self._settle_at_s = math.inf
        self._prefetch_at_s = -math.inf

    def __len__(self) -> int:
        """How many requests are known."""
        return len(self._requests)

    @property
    def num_leases(self) -> int:
        """How many leases are held for requests whose load is not planned."""
        return sum(request.lease is not None for request in self._requests.values())

    @property
    def queue(self) -> tuple[str, ...]:
        """Ids of requests that waited in the last round, the next one first."""
        return self._queue

    def state(self, rid: str) -> State:
        """How far a request is; ``WAITS`` also for one that is not known."""
        request = self._requests.get(rid)
        return State.WAITS if request is None else request.state

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

    def expect(self, rid: str, prompt: Prompt) -> None:
        """Say what the pages of the next ``look_up`` of a request stand for."""
        request = self._requests.setdefault(rid, ReturningRequest(prompt))
        request.prompt = prompt

    def prompt(self, rid: str) -> Prompt:
        """What was said of a request that is known."""
        return self._requests[rid].prompt

    def look_up(self, rid: str, page_keys: Sequence[str]) -> int:
        """Hold a lease of the first of ``page_keys`` (at least one); returns how many can be restored.

        0 also if the answer is late: a later call returns it.
        """
        run = KeyRun.of(page_keys)
        request = self._requests[rid]
        if request.run != run or (request.question is None and request.lease is None):
            if request.run == run and self._clock() < request.missed_s + RETRY_MISS_S:
                return 0
            self._ask(request, run, page_keys)
        if request.question is not None:
            if not request.question.wait(self._asking.patience):
                if self._reasons is not None:
                    self._reasons.decline(rid, "late")
                return 0
            self._use_found(rid, request, request.question)
        request.give_back_at_s = math.inf
        return 0 if request.lease is None else request.lease.num_pages(self._model.identity.page_size)

    def is_worth_waiting(self, rid: str, num_others: int, *, in_turn: bool = False) -> bool:
        """Return True while a request should not be admitted: see ``HeldLease``."""
        request = self._requests.get(rid)
        held = None if request is None else request.held
        return held is not None and held.is_worth_waiting(self._clock(), num_others, in_turn=in_turn)

    def boundaries(self, rid: str) -> Sequence[int] | None:
        """After how many of the pages that were looked up a request can go on; None: after each that is
        leased."""
        request = self._requests.get(rid)
        return None if request is None or request.lease is None else request.lease.boundaries

    def take(self, rid: str) -> HeldLease | None:
        """Hand the lease over to the caller, who releases it; None if there is none."""
        request = self._requests.get(rid)
        if request is None:
            return None
        request.missed_s = -math.inf
        if request.renewal is not None and request.renewal.is_answered:
            self._use_renewal(request, request.renewal)
        renewal, request.renewal = request.renewal, None
        held = self._pop(request)
        if held is None or held.is_here:
            self._drop(renewal)
            return held
        # What has arrived since the store was asked is planned for as what is in DRAM.
        if renewal is None:
            if not held.num_renewals and self._clock() < held.asked_s + RENEW_INTERVAL_S:
                return held
            renewal = self._ask_again(held)
        return self._use_again(held, renewal)

    def make_room(self, lease: Lease, tails: Tails) -> bool:
        """Begin to read what a load wants from below DRAM. If there is no room for it, those that wait lose
        as much, the last ones first; False if that is not enough.

        True also if the answer is late.
        """
        wanted = [each for each in zip(lease.slices, tails, strict=False) if not SegmentSlice.holds(*each)]
        if not wanted:
            return True
        missing = sum(num_bytes_of(piece, tail) for piece, tail in wanted)
        begun = self._read_for_load(lease, tails)
        if not begun.wait(self._asking.patience):
            self._prefetches.append((missing, begun))
            return True
        if begun.answer(Prefetched()).refusal == "no room" and self._give_room(missing):
            begun = self._read_for_load(lease, tails)
            begun.wait(self._asking.patience)
        return not begun.is_answered or begun.answer(Prefetched()).refusal is None

    def give_copies_back(self) -> None:
        """Have those that wait hold what is encoded in place of its fast copies: somebody needs their room.

        The store is asked at most every ``RENEW_INTERVAL_S`` about one of them.
        """
        latest_s = self._clock() - RENEW_INTERVAL_S
        asked = [
            (request, held, self._ask_again(held, fast_copies="avoid"))
            for request in self._in_order()
            if (held := request.lease) is not None
            and request.renewal is None
            and held.asked_s <= latest_s
            and any(piece.is_fast_copy for piece in held.lease.slices)
        ]
        for request, held, again in asked:
            request.lease = self._use_again(held, again)

    def queue_load(self, rid: str, load: Load) -> None:
        """Have the load of a request start with the next batch. The load owns its lease."""
        self._requests[rid].load = load

    def queued_load(self, rid: str) -> Load | None:
        """The load of a request that has not started; None if there is none."""
        request = self._requests.get(rid)
        return None if request is None else request.load

    def cancel_load(self, rid: str) -> bool:
        """Take back a load that has not started; False if there is none."""
        request = self._requests.get(rid)
        if request is None or request.load is None:
            return False
        self._store.release(request.load.lease)
        request.load = None
        if request.state is State.WAITS:
            del self._requests[rid]
        return True

    def start_loads(self) -> dict[str, Load]:
        """The loads that start now, by request; these requests are forgotten."""
        loads = {rid: request.load for rid, request in self._requests.items() if request.load is not None}
        for rid in loads:
            self._requests[rid].load = None
            self.end_lease(rid)
        return loads

    def set_aside(self, rid: str) -> None:
        """This round cannot use the lease of ``rid``, if it has one: it goes back soon, unless a later one
        can."""
        request = self._requests.get(rid)
        if request is not None and request.held is not None:
            request.give_back_at_s = self._clock() + UNCLAIMED_S

    def end_lease(self, rid: str) -> None:
        """End the lease of a request, which is forgotten unless its load is planned."""
        request = self._requests.get(rid)
        if request is None:
            return
        question, request.question = request.question, None
        self._drop(question)
        self._give_back(request)
        request.missed_s = -math.inf
        if request.load is None:
            del self._requests[rid]

    def release(self, rid: str) -> None:
        """Forget a request: end its lease, cancel its load, and ask the store again if it comes back."""
        self.end_lease(rid)
        self.cancel_load(rid)

    def release_all(self) -> None:
        for rid in [*self._requests]:
            self.release(rid)
        self._prefetches.clear()
        self._queue = ()

    def _ask(self, request: ReturningRequest, run: KeyRun, page_keys: Sequence[str]) -> None:
        """Ask for a lease in place of the one that is held, if any.

        If the first page is stored nowhere, and no run is looked for, the answer is there at once: nothing.
        """
        self._has_changed |= request.held is not None
        request.give_back_at_s, request.missed_s = math.inf, -math.inf
        self._drop(request.question)
        self._drop(request.renewal)
        request.renewal = None
        request.run = run
        identity, find_run = self._model.identity, request.prompt.find_run
        if find_run is None and not self._store.may_have(identity, page_keys[0]):
            self.num_spared += 1
            request.question = Question(lambda: None)
            request.question.run()
            return
        token_ids = request.prompt.token_ids()
        finder = LeaseFinder(self._store, identity, self._max_head_tokens, self._clock, self._states)
        request.question = self._asking.ask(lambda: finder.find(page_keys, token_ids, find_run))

    def _use_found(
        self,
        rid: str,
        request: ReturningRequest,
        question: Question[HeldLease | None],
        *,
        is_late: bool = False,
    ) -> None:
        """Hold what a lookup that is answered has found, if anything. ``is_late``: after its round."""
        request.question = None
        before, request.lease = request.lease, question.answer(None)
        if before is not None:
            self._store.release(before.lease)
        num_found = 0
        if request.lease is None:
            request.missed_s = self._clock()
        else:
            self._has_changed = True
            page_size = self._model.identity.page_size
            num_found = request.lease.num_pages(page_size) * page_size
            if self._states is not None and not request.lease.is_here:
                self._bring_state(self._states, request.lease)
        reasons = self._reasons
        if reasons is not None and reasons.found(
            rid, request.prompt.device_tokens + num_found, is_late=is_late
        ):
            self._asking.ask(lambda: reasons.explain(rid), is_urgent=False)

    def _bring_state(self, states: BoundaryStates, held: HeldLease) -> None:
        """Have the state at the end of a lease read into DRAM. If it is late, its load reads it."""
        end_key = held.page_keys[held.num_pages(self._model.identity.page_size) - 1]
        hint = Hint(prefetch=True)
        self._asking.ask(
            lambda: self._store.advise(hint, model=states.identity, page_keys=(end_key,)), is_urgent=False
        )

    def _use_answers(self) -> None:
        """Use answers that came after the round that asked for them."""
        for rid, request in self._requests.items():
            if request.question is not None and request.question.is_answered:
                self._use_found(rid, request, request.question, is_late=True)
                if request.lease is not None:
                    # Its request may have been computed meanwhile.
                    request.give_back_at_s = self._clock() + UNCLAIMED_S
        for request in self._requests.values():
            if request.renewal is not None and request.renewal.is_answered:
                self._use_renewal(request, request.renewal)
        prefetches, self._prefetches = self._prefetches, []
        for missing, prefetch in prefetches:
            if not prefetch.is_answered:
                self._prefetches.append((missing, prefetch))
            elif prefetch.answer(Prefetched()).refusal == "no room":
                self._give_room(missing)

    def _end_unclaimed(self, now_s: float, queue: Sequence[str]) -> None:
        """Give leases back that nobody has asked for since they were unclaimed, and forget requests of which
        there is nothing. Who waits may ask yet."""
        for rid, request in [*self._requests.items()]:
            if rid in queue:
                continue
            if now_s >= request.give_back_at_s:
                self._give_back(request)
            if request.state in (State.WAITS, State.MISSED) and now_s >= request.missed_s + RETRY_MISS_S:
                del self._requests[rid]

    def _give_back(self, request: ReturningRequest) -> None:
        """End the lease of a request that may still wait, if it has one."""
        held = self._pop(request)
        if held is not None:
            self._store.release(held.lease)

    def _pop(self, request: ReturningRequest) -> HeldLease | None:
        """Take its lease from a request."""
        held = request.held
        if held is None:
            return None
        self._has_changed = True
        request.give_back_at_s = math.inf
        self._drop(request.renewal)
        request.lease = request.renewal = None
        return held

    def _drop(self, question: Question[HeldLease | None] | Question[Renewed | None] | None) -> None:
        """Nobody wants this answer any more: what it grants is released."""
        if question is not None:
            question.drop(self._release_answer)

    def _release_answer(self, answer: HeldLease | Renewed | None) -> None:
        """In any thread."""
        if answer is not None and answer.lease is not None:
            self._store.release(answer.lease)

    def _in_order(self) -> list[ReturningRequest]:
        """Who holds leases, in the order of the queue; those that wait outside of it are the last."""
        rids = dict.fromkeys((*self._queue, *self._requests))
        requests = (self._requests[rid] for rid in rids if rid in self._requests)
        return [request for request in requests if request.held is not None]

    def _settle(self, now_s: float) -> None:
        """Prefetch for those that wait, in their order, and end leases that pin too much."""
        room = Room(self._max_ahead_bytes)
        renewals = RenewalRound(self._store, self._model.identity)
        # What has not been asked yet is asked in the order of now.
        for request in self._requests.values():
            if request.renewal is not None and request.renewal.drop_unasked():
                request.renewal = None
        may_prefetch = now_s >= self._prefetch_at_s
        has_room = True
        num_pages, settle_at_s = 0, math.inf
        for request in self._in_order():
            held = request.held
            assert held is not None
            # Those behind the first that does not fit do not take the room that it waits for.
            has_room = has_room and room.fits(held.segments)
            if has_room and not held.is_here:
                if may_prefetch and request.renewal is None and now_s >= held.renew_at_s:
                    held = self._renew(request, held, renewals)
                    num_pages += len(held.page_keys)
                    may_prefetch = not renewals.is_refused and num_pages < MAX_RENEWED_PAGES
                if request.renewal is None:
                    settle_at_s = min(settle_at_s, max(held.renew_at_s, self._prefetch_at_s))
            # One that was refused is the next to get room.
            is_next = (held.is_refused or request.renewal is not None) and has_room
            pinned = held.segments if is_next else held.pinned
            if room.fits(pinned):
                room.add(pinned)
            else:
                self._give_back(request)
        self._has_changed, self._settle_at_s = False, settle_at_s

    def _renew(self, request: ReturningRequest, held: HeldLease, renewals: RenewalRound) -> HeldLease:
        """Have the lease of a request renewed, now or later. Returns the one that it has then."""
        plan_ahead = self._plan_ahead(request.prompt)
        renewal = request.renewal = self._asking.ask(
            lambda: renewals.renew(held, plan_ahead), is_urgent=False
        )
        if renewal.is_answered:
            self._use_renewal(request, renewal)
        assert request.lease is not None
        return request.lease

    def _use_renewal(self, request: ReturningRequest, renewal: Question[Renewed | None]) -> None:
        """Hold what a renewal that is answered has brought."""
        request.renewal = None
        renewed, held = renewal.answer(None), request.lease
        self._has_changed = True
        if renewed is None or renewed.prefetched.is_deferred:
            self._prefetch_at_s = self._clock() + RETRY_PREFETCH_S
        if renewed is None:
            return
        assert held is not None
        again, until_s, waiting = self._renewed(held, renewed), held.wait_until_s, renewed.waiting
        if held.waiting is not None and again.in_dram == held.in_dram:
            # Nothing new is known of the rest. Who has begun to wait goes on.
            waiting = held.waiting
        elif held.waiting is None and waiting is not None:
            read_s = WAITED_READS * waiting.read_s + RETRY_PREFETCH_S
            until_s = self._clock() + min(read_s, waiting.longest_s)
        request.lease = replace(
            again,
            waiting=waiting,
            wait_until_s=until_s,
            num_renewals=held.num_renewals + 1,
            # More than a tenant may have stays below DRAM, and holds nobody else up.
            is_refused=renewed.prefetched.is_deferred,
            num_arriving=renewed.prefetched.num_pages,
        )

    def _ask_again(self, held: HeldLease, *, fast_copies: FastCopies = "prefer") -> Question[Renewed | None]:
        """Ask for a lease in place of an earlier one, which says what has arrived in DRAM since."""
        identity, page_keys, token_ids = self._model.identity, held.page_keys, held.token_ids

        def lease() -> Renewed:
            return Renewed(
                self._store.lease(identity, page_keys, token_ids(), fast_copies=fast_copies), Prefetched()
            )

        return self._asking.ask(lease)

    def _renewed(self, held: HeldLease, renewed: Renewed | None) -> HeldLease:
        """With the new lease in place of the earlier one, unless that is better."""
        lease, unused = (None if renewed is None else renewed.lease), held.lease
        # The earlier lease is still valid.
        if lease is None or lease.num_pages < held.lease.num_pages:
            lease, unused = held.lease, lease
        if unused is not None:
            self._store.release(unused)
        tails = None if renewed is None else renewed.tails
        return replace(held, lease=lease, tails=tails, asked_s=self._clock())

    def _read_for_load(self, lease: Lease, tails: Tails) -> Question[Prefetched]:
        return self._asking.ask(lambda: self._store.prefetch(lease, tails, ReadPriority.LOAD))

    def _give_room(self, missing: int) -> bool:
        """End leases of those that wait, the last ones first, until they are of the ``missing`` bytes that a
        load needs; False if they have not as much."""
        waiting = self._in_order()
        pins = Counter(key for request in waiting if request.held for key in request.held.pinned)
        for request in reversed(waiting):
            of_last = request.held
            if missing <= 0 or of_last is None:
                break
            pins.subtract(of_last.pinned.keys())
            if of_last.num_arriving:
                # What is still on its way cannot be evicted for a while.
                of_last = request.lease = self._use_again(of_last, self._ask_again(of_last))
            missing -= sum(num_bytes for key, num_bytes in of_last.in_dram.items() if not pins[key])
            if of_last.in_dram:
                self._give_back(request)
        return missing <= 0

    def _use_again(self, held: HeldLease, again: Question[Renewed | None]) -> HeldLease:
        """With the lease that was asked for in its place, if the answer comes in time."""
        if again.wait(self._asking.patience):
            return self._renewed(held, again.answer(None))
        self._drop(again)
        return held
