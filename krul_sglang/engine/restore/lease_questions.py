"""Questions to the store about leases of requests, for the thread that asks them."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import chain

from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease, Prefetched, SegmentSlice, Tails
from krul_backend.tiers.common.read_queue import ReadPriority
from krul_sglang.engine.common.boundary_states import BoundaryStates
from krul_sglang.engine.common.moved_runs import RECOMPUTED_TOKENS, FindRun
from krul_sglang.engine.restore.held_lease import HeldLease, KeyRun, PlanAhead, Waiting


def find_boundaries(store: KVStore, identity: ModelIdentity, page_keys: Sequence[str]) -> list[int]:
    """After how many of these pages there is a state in the store, ascending. ``identity``: of the states."""
    missing = set(chain.from_iterable(store.find_missing(identity, page_keys)))
    return [index + 1 for index in range(len(page_keys)) if index not in missing]


@dataclass(frozen=True)
class LeaseFinder:
    """Asks ``store`` for the lease that brings a request most. Used by the thread that asks.

    ``max_head_tokens``: a moved run that needs a longer head cannot be restored, so that it is not leased.
    ``states``: of the model's recurrent layers, if it has any. Then nothing is found behind the last boundary
    whose state is stored.
    """

    store: KVStore
    identity: ModelIdentity
    max_head_tokens: int
    clock: Callable[[], float] = time.monotonic
    states: BoundaryStates | None = None

    def find(
        self, page_keys: Sequence[str], token_ids: TokenIds, find_run: FindRun | None
    ) -> HeldLease | None:
        """A lease of the first of ``page_keys``, or of a run that is stored at another place and brings more;
        None if nothing is found. See ``Prompt``."""
        if self.states is not None:
            return self._find_boundary(self.states, page_keys, token_ids)
        run = KeyRun.of(page_keys)
        lease = self.store.lease(self.identity, page_keys, token_ids)
        try:
            of_moved = self._find_moved(run, 0 if lease is None else lease.num_pages, find_run)
        except BaseException:
            if lease is not None:
                self.store.release(lease)
            raise
        if of_moved is None:
            return (
                None if lease is None else HeldLease(run, page_keys, lambda: token_ids, lease, self.clock())
            )
        if lease is not None:
            self.store.release(lease)
        return of_moved

    def _find_boundary(
        self, states: BoundaryStates, page_keys: Sequence[str], token_ids: TokenIds
    ) -> HeldLease | None:
        """A lease of the pages before the last boundary whose state is stored. The state is leased when it is
        loaded; if it has left the store by then, all is computed."""
        boundaries = find_boundaries(self.store, states.identity, page_keys)
        if not boundaries:
            return None
        wanted = page_keys[: boundaries[-1]]
        token_ids = token_ids[: len(wanted) * self.identity.page_size]
        lease = self.store.lease(self.identity, wanted, token_ids)
        if lease is None:
            return None
        boundaries = [end for end in boundaries if end <= lease.num_pages]
        if not boundaries:
            self.store.release(lease)
            return None
        return HeldLease(
            KeyRun.of(page_keys), wanted, lambda: token_ids, lease, self.clock(), boundaries=boundaries
        )

    def _find_moved(self, run: KeyRun, num_pages: int, find_run: FindRun | None) -> HeldLease | None:
        """A lease that brings more than the ``num_pages`` that were found in their place."""
        moved = None if find_run is None or num_pages == run.num_keys else find_run(num_pages)
        if moved is None or moved.num_head_tokens > self.max_head_tokens:
            return None
        lease = self.store.lease(self.identity, moved.page_keys, moved.token_ids)
        if lease is None:
            return None
        # What is found in its place is computed again then, as all that is before the run.
        if (lease.num_pages - num_pages) * self.identity.page_size <= RECOMPUTED_TOKENS:
            self.store.release(lease)
            return None
        return HeldLease(run, moved.page_keys, lambda: moved.token_ids, lease, self.clock(), moved=moved)


@dataclass(frozen=True)
class Renewed:
    """A lease in place of an earlier one (None: nothing was found), and what was prefetched.

    ``tails``: what a load is expected to want of the better one; None if nobody has asked. ``waiting``: what
    it changes if the request waits for that.
    """

    lease: Lease | None
    prefetched: Prefetched
    tails: Tails | None = None
    waiting: Waiting | None = None


@dataclass
class RenewalRound:
    """Renews leases of requests that wait, and has what they want prefetched, in one scheduling round: until
    a prefetch ``is_refused``. Used by the thread that asks."""

    store: KVStore
    identity: ModelIdentity
    is_refused: bool = False

    def renew(self, held: HeldLease, plan_ahead: PlanAhead) -> Renewed | None:
        """A lease of what lies where it is now; None: the prefetch of one before it was refused."""
        if self.is_refused:
            return None
        lease = self.store.lease(self.identity, held.page_keys, held.token_ids())
        try:
            is_less = lease is None or lease.num_pages < held.lease.num_pages
            best = held if lease is None or is_less else replace(held, lease=lease)
            first, goal, waiting = plan_ahead(best)
            is_rest = all(map(SegmentSlice.holds, best.lease.slices, first))
            # Also if it was asked for before: not all may have come. What is on its way stays so.
            priority = ReadPriority.REST if is_rest else ReadPriority.PREFETCH
            prefetched = self.store.prefetch(best.lease, goal if is_rest else first, priority)
            if is_rest and prefetched.refusal is not None:
                # Its load does without, and holds nobody up.
                goal, prefetched = first, replace(prefetched, refusal=None)
        except BaseException:
            if lease is not None:
                self.store.release(lease)
            raise
        self.is_refused = prefetched.is_deferred
        return Renewed(lease, prefetched, goal, waiting)
