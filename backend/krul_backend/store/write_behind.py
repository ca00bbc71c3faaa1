"""Puts committed segments to the tiers below DRAM, again and again until each has taken them."""

from __future__ import annotations

import dataclasses
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from queue import SimpleQueue

from krul_backend.errors import StoreClosedError
from krul_backend.segment import ModelIdentity
from krul_backend.tiers.common.interface import DRAM_TIER, TierStats
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.dram import HostStore, StoredSegment

logger = logging.getLogger(__name__)


class _Outcome(Enum):
    """What came of one offer to a tier."""

    TAKEN = auto()
    LATER = auto()
    """The tier is behind or suspended: what comes next would be refused, too."""

    BEFORE = auto()
    """The segment that this one continues has to be offered first."""

    ARRIVES = auto()
    """The segment that this one continues is on its way to DRAM, and offered when it is there."""

    NEVER = auto()


@dataclass(eq=False)
class _TierState:
    """The segments that one tier still has to take, and those that it is writing. Guarded by the lock.

    ``waiting``: fingerprints of models by segment id, in the order in which they are offered.
    ``being_written`` loses a segment without the lock, as soon as the tier is done with it. ``skipped``
    counts what left ``waiting`` without being taken, by cause; see ``TierStats``.
    """

    waiting: OrderedDict[int, str] = field(default_factory=OrderedDict)
    being_written: set[int] = field(default_factory=set)
    skipped: Counter[str] = field(default_factory=Counter)


class WriteBehind:
    """Puts committed segments to lower tiers, and holds them in DRAM until the tier has copied them.

    What a tier does not take, because its queue is full or it is suspended, waits in DRAM like any segment
    and is offered again: when the tier has written something, with the next segment, and before DRAM evicts
    for a new one. A segment is offered after those that it continues, also when a tier has evicted these: a
    tier that has a segment but not the one before it could never find it. Thread-safe.

    Args:
        host: where the segments lie.
        tiers: all that segments may be put to.
    """

    def __init__(self, host: HostStore, tiers: Sequence[LowerTier]) -> None:
        self._host = host
        self._tiers = {tier: _TierState() for tier in tiers}
        # Held from the look whether a segment is still indexed until the tiers have queued it.
        self._lock = threading.Lock()
        self._num_taken = 0
        # Segments that a tier is done with; None ends the thread.
        self._done: SimpleQueue[tuple[LowerTier, StoredSegment] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name="krul-write-behind", daemon=True)
        if tiers:
            self._thread.start()

    def submit(self, segment: StoredSegment, tiers: Sequence[LowerTier]) -> None:
        """Offer a segment that the caller holds to ``tiers``, unless it has left DRAM or is a fast copy.

        A tier that has it, or writes it, is not offered it again: what came from a lower tier may have been
        offered before, with a segment that continues it. Never waits for writes.
        """
        with self._lock:
            for tier in tiers:
                if segment.is_indexed and not segment.is_fast_copy and not self._has(tier, segment):
                    self._tiers[tier].waiting[segment.segment_id] = segment.manifest.model.fingerprint
                    self._offer_waiting(tier)

    def offer(self) -> None:
        """Offer what waits, if anything does."""
        for tier, state in self._tiers.items():
            if state.waiting:
                with self._lock:
                    self._offer_waiting(tier)

    def flush(self, flush_tiers: Callable[[], bool]) -> bool:
        """Call ``flush_tiers`` until all is written that the tiers take; False if one of the calls is."""
        while True:
            with self._lock:
                before = self._num_taken
            if not flush_tiers():
                return False
            # With the lock for all tiers: somebody else may be about to put what waited.
            with self._lock:
                for tier in self._tiers:
                    self._offer_waiting(tier)
                if self._num_taken == before:
                    return True

    def settle(self) -> None:
        """Wait for calls that may still queue a segment that has left the index."""
        with self._lock:
            pass

    def forget(self, model: ModelIdentity | None) -> None:
        """``settle``, and drop what waits (of one model): it was cleared."""
        with self._lock:
            for state in self._tiers.values():
                for segment_id, fingerprint in list(state.waiting.items()):
                    if model is None or fingerprint == model.fingerprint:
                        del state.waiting[segment_id]

    def stats(self, tier: LowerTier) -> TierStats:
        """The tier's statistics, with what waits for it and what was skipped here."""
        of_tier = tier.stats()
        with self._lock:
            state = self._tiers[tier]
            skipped = Counter(of_tier.skipped_segments) + state.skipped
            return dataclasses.replace(
                of_tier, waiting_segments=len(state.waiting), skipped_segments=dict(skipped)
            )

    def close(self) -> None:
        """End the thread; nothing is offered any more, unless it is submitted."""
        if self._tiers:
            self._done.put(None)
            self._thread.join()

    def _has(self, tier: LowerTier, segment: StoredSegment) -> bool:
        """Return True if the tier stores the whole segment already, or is writing it now. Needs the lock."""
        own = segment.manifest
        # In this order: what is written between the two looks is held by the tier.
        if segment.segment_id in self._tiers[tier].being_written:
            return True
        held = None if segment.origin == DRAM_TIER else tier.holder_of(own.model, own.page_keys[-1])
        return held is not None and (held.page_keys, held.num_bytes) == (own.page_keys, own.num_bytes)

    def _offer_waiting(self, tier: LowerTier) -> None:
        """Offer what waits for a tier, in order, until it takes no more. Called with the lock."""
        state = self._tiers[tier]
        kept: list[tuple[int, str]] = []
        # What was refused for good in this call, or moved before a segment that continues it.
        refused: set[int] = set()
        moved: set[int] = set()
        while state.waiting:
            segment_id, fingerprint = state.waiting.popitem(last=False)
            segment = self._host.hold(segment_id)
            if segment is None:
                state.skipped["behind"] += 1
                continue
            hold = _Hold(self._host, segment)
            outcome, before_id = _Outcome.NEVER, None
            try:
                outcome, before_id = self._look_before(tier, segment, refused, moved)
                if outcome is _Outcome.TAKEN:
                    outcome = self._put(tier, segment, hold)
            finally:
                if outcome is not _Outcome.TAKEN:
                    hold.end()
            if outcome is _Outcome.NEVER:
                refused.add(segment_id)
            elif before_id is not None:
                moved.add(before_id)
                for first_id in (segment_id, before_id):
                    state.waiting[first_id] = fingerprint
                    state.waiting.move_to_end(first_id, last=False)
            elif outcome is not _Outcome.TAKEN:
                kept.append((segment_id, fingerprint))
                if outcome is _Outcome.LATER:
                    break
        for segment_id, fingerprint in reversed(kept):
            state.waiting[segment_id] = fingerprint
            state.waiting.move_to_end(segment_id, last=False)

    def _look_before(
        self, tier: LowerTier, segment: StoredSegment, refused: set[int], moved: set[int]
    ) -> tuple[_Outcome, int | None]:
        """Whether a segment may be put to a tier (``TAKEN``), as far as what it continues decides that.

        With ``BEFORE`` comes the id of the segment to be offered first.
        """
        state, manifest = self._tiers[tier], segment.manifest
        if manifest.parent_key is None:
            return _Outcome.TAKEN, None
        holders = self._host.path_segments(manifest.model, (manifest.parent_key,))
        before_id = holders[0].segment_id if holders else None
        # In this order: what is written between the two looks is held by the tier.
        if before_id in state.being_written or tier.may_hold(manifest.model, manifest.parent_key):
            return _Outcome.TAKEN, None
        # Segments that share pages can name each other: what was moved once is not moved again.
        if before_id in moved and before_id not in refused:
            return _Outcome.TAKEN, None
        before = self._host.hold(before_id) if before_id is not None and before_id not in refused else None
        if before is None:
            state.skipped["orphan"] += 1
            return _Outcome.NEVER, None
        is_arriving = before.status is not None
        self._host.unhold(before)
        return (_Outcome.ARRIVES, None) if is_arriving else (_Outcome.BEFORE, before_id)

    def _put(self, tier: LowerTier, segment: StoredSegment, hold: _Hold) -> _Outcome:
        """Put a held segment, which stays held until the tier is done with it."""
        if not segment.is_indexed or segment.is_fast_copy:
            return _Outcome.NEVER
        state = self._tiers[tier]
        done = partial(hold.end, partial(self._note_done, tier, segment))
        state.being_written.add(segment.segment_id)
        is_taken = False
        try:
            is_taken = tier.put(segment.manifest, segment.blocks, segment.checksums, done)
        except Exception:
            logger.exception("the tier %s failed to queue segment %d", tier.name, segment.segment_id)
            state.skipped["failed"] += 1
            return _Outcome.NEVER
        finally:
            if not is_taken:
                state.being_written.discard(segment.segment_id)
        self._num_taken += is_taken
        if is_taken:
            return _Outcome.TAKEN
        return _Outcome.LATER if tier.can_hold(segment.manifest) else _Outcome.NEVER

    def _note_done(self, tier: LowerTier, segment: StoredSegment) -> None:
        """A tier is done with a segment. Called by it, maybe with its lock held: takes no lock."""
        self._tiers[tier].being_written.discard(segment.segment_id)
        self._done.put((tier, segment))

    def _serve(self) -> None:
        while (done := self._done.get()) is not None:
            tier, segment = done
            try:
                manifest = segment.manifest
                if not tier.find_missing(manifest.model, manifest.page_keys):
                    self._host.note_lower_load(segment, tier.load_s(manifest))
                with self._lock:
                    self._offer_waiting(tier)
            except StoreClosedError:
                logger.debug("closed: nothing more is offered to %s", tier.name)
            except Exception:
                logger.exception("offering segments to the tier %s failed", tier.name)


class _Hold:
    """Holds a segment in DRAM for one tier. It ends once, however often a tier says that it is done."""

    def __init__(self, host: HostStore, segment: StoredSegment) -> None:
        self._host = host
        self._segment = segment
        self._open = threading.Lock()

    def end(self, first: Callable[[], None] = lambda: None) -> None:
        """End the hold after calling ``first``; does nothing if it has ended."""
        if self._open.acquire(blocking=False):
            try:
                first()
            finally:
                self._host.unhold(self._segment)
