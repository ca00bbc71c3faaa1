"""Plays a workload against a real DRAM tier whose clock the replay sets."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from benchmarks.policy.policies import BeladyPolicy
from benchmarks.policy.workload import Cost, Future, Turn, Workload
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.interface import Clock, Lease
from krul_backend.tiers.common.record import no_checksums
from krul_backend.tiers.dram.host_store import HostStore

# A page counts as one token here: nothing in a store depends on how many tokens a page has.
MODEL = ModelIdentity("replayed", "", "bfloat16", 1, 1, 1, 1, page_size=1, tp_rank=0, tp_size=1)

SEGMENT_PAGES = 16
"""A longer turn is stored as several segments: 8192 tokens, as an engine cuts them for 8 KV heads of 128."""


@dataclass
class Outcome:
    """Sums over all turns of a replay. ``saved_s`` of ``recompute_s`` were not computed, for hits."""

    turns: int = 0
    prompt_pages: int = 0
    hit_pages: int = 0
    prompt_bytes: int = 0
    hit_bytes: int = 0
    recompute_s: float = 0.0
    saved_s: float = 0.0
    stored_pages: int = 0
    evicted_segments: int = 0
    refused_segments: int = 0

    @property
    def hit_rate(self) -> float:
        return self.hit_pages / self.prompt_pages if self.prompt_pages else 0.0


class VirtualClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Replay:
    """One replay: each turn looks its longest stored prefix up, and stores the rest when it ends.

    A lease is held until the turn starts: then its pages are copied to the device at once. The answer's pages
    have no names in traces, so they are stored with the prompt of the next turn.

    Args:
        make_policy: makes the policy of the store, given its clock.
        holds_waiting: lease when a turn arrives, not when it starts.
    """

    def __init__(
        self,
        workload: Workload,
        capacity_bytes: int,
        make_policy: Callable[[Clock], EvictionPolicy],
        cost: Cost,
        *,
        holds_waiting: bool = True,
    ) -> None:
        self._workload = workload
        self._clock = VirtualClock()
        self._policy = make_policy(self._clock)
        self._store = HostStore(capacity_bytes, self._policy, self._clock)
        self._cost = cost
        self._holds_waiting = holds_waiting
        self._future = Future(workload) if isinstance(self._policy, BeladyPolicy) else None
        self._outcome = Outcome()

    def run(self) -> Outcome:
        """Play all turns, once."""
        leases: dict[Turn, Lease] = {}
        for now_s, _, step, turn in self._events():
            self._clock.now_s = now_s
            if step == "look up":
                lease = self._look_up(turn)
                if lease is not None:
                    leases[turn] = lease
            elif step == "start" and turn in leases:
                self._store.release(leases.pop(turn))
            elif step == "end":
                self._store_turn(turn)
        stats = self._store.stats()
        self._outcome.evicted_segments = stats.evicted_segments
        self._outcome.refused_segments = stats.rejected_reservations
        self._store.close()
        return self._outcome

    def _events(self) -> list[tuple[float, int, str, Turn]]:
        """What happens, in order of time; at one time in the order of a turn's steps."""
        events = []
        for number, turn in enumerate(self._workload.turns):
            look_up_s = turn.arrival_s if self._holds_waiting else turn.start_s
            steps = ((look_up_s, "look up"), (turn.start_s, "start"), (turn.end_s, "end"))
            events += [(at_s, 3 * number + place, step, turn) for place, (at_s, step) in enumerate(steps)]
        return sorted(events, key=lambda event: event[:2])

    def _look_up(self, turn: Turn) -> Lease | None:
        lease = self._store.lease(MODEL, turn.page_keys, turn.token_ids)
        num_hit = lease.num_pages if lease is not None else 0
        outcome = self._outcome
        outcome.turns += 1
        outcome.prompt_pages += turn.num_pages
        outcome.hit_pages += num_hit
        outcome.prompt_bytes += turn.num_pages * turn.conversation.page_bytes
        outcome.hit_bytes += num_hit * turn.conversation.page_bytes
        outcome.recompute_s += self._cost.pages_s(0, turn.num_pages)
        outcome.saved_s += self._cost.pages_s(0, num_hit)
        return lease

    def _store_turn(self, turn: Turn) -> None:
        keys, tokens = turn.page_keys, turn.token_ids
        if self._future is not None:
            # Knowing the future, what is never used again is not stored.
            num_used_again = self._future.num_used_again(turn, self._clock())
            keys, tokens = keys[:num_used_again], tokens[:num_used_again]
        for run in self._store.find_missing(MODEL, keys):
            for first in range(run.start, run.stop, SEGMENT_PAGES):
                end = min(first + SEGMENT_PAGES, run.stop)
                if self._future is not None and isinstance(self._policy, BeladyPolicy):
                    self._policy.incoming_s = self._future.next_use_s(keys[first], self._clock())
                num_bytes = (end - first) * turn.conversation.page_bytes
                reservation = self._store.reserve((num_bytes,))
                if reservation is None:
                    # A turn that does not fit is stored as far as it does: later pages need these.
                    return
                manifest = SegmentManifest(
                    MODEL,
                    keys[first:end],
                    keys[first - 1] if first else None,
                    first,
                    tokens[first:end],
                    "replayed",
                    (num_bytes,),
                    recompute_s=self._cost.pages_s(first, end),
                )
                # The bytes are never read, so their checksums may be any.
                self._store.commit(reservation, manifest, no_checksums(manifest))
                self._outcome.stored_pages += end - first
