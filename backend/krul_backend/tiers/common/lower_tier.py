"""The interface of a tier below DRAM: it keeps copies of committed segments, finds them, reads them back.

And what such tiers share: their counters, the cost that they measure, the pause after an error, and the queue
of segments to be written.
"""

from __future__ import annotations

import logging
import threading
import time
from abc import ABC, abstractmethod
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from krul_backend.errors import TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, num_ranges
from krul_backend.tiers.common.interface import (
    CHECKSUM_BYTES,
    Block,
    Checksums,
    Clock,
    DamageReport,
    SegmentInfo,
    TierStats,
    tail_is_right,
)
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0

_LEARNING_RATE = 0.2

_COUNTED = (
    *("written_segments", "written_bytes", "read_segments", "read_bytes"),
    *("evicted_segments", "evicted_bytes", "corrupted_segments"),
    *("failed_reads", "slow_reads", "failed_writes"),
)

SkipCause = Literal["dropped", "failed", "no room", "orphan", "suspended", "too large"]
"""Why a tier has not written a segment; see ``TierStats``."""


class TierCounters:
    """Counts events since a tier was opened, under the names of ``TierStats``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)
        self._skipped: Counter[SkipCause] = Counter()

    def add(self, **amounts: int) -> None:
        """``add(failed_reads=1)``; a name that is no counter is a KeyError."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def skip(self, cause: SkipCause, num_segments: int = 1) -> None:
        """Note that segments were not written, and will not be."""
        with self._lock:
            self._skipped[cause] += num_segments

    def snapshot(self) -> dict[str, Any]:
        with self._lock:
            return {**self._counts, "skipped_segments": dict(+self._skipped)}


class TailRead:
    """Asks a tier for the end of each block of a held run's segment: the last ``blocks[l].nbytes`` bytes of
    layer ``l``'s, whole ranges, are read into ``blocks[l]``; with ``num_after``, those before the last
    ``num_after[l]`` bytes, which are whole ranges, too.

    The tier calls ``landed(layer)`` for each layer, in ascending order, when its bytes are written and their
    checksums are right, for layers of no bytes, too; or once ``fail(error)``, after which nothing lands.
    """

    def __init__(
        self,
        run: PageRun[Any],
        blocks: Sequence[Block],
        landed: Callable[[int], None],
        failed: Callable[[TierReadError], None],
        num_after: Sequence[int] | None = None,
    ) -> None:
        self.run = run
        self.num_after = (0,) * len(blocks) if num_after is None else tuple(num_after)
        self.blocks = blocks
        self.landed = landed
        self.error: TierReadError | None = None
        self._failed = failed

    def end_of(self, layer: int) -> int:
        """Where in a layer's stored block ends what is read."""
        num_bytes: int = self.run.segment.manifest.layer_num_bytes[layer]
        return num_bytes - self.num_after[layer]

    def is_right(self, layer: int) -> bool:
        """Whether the bytes that were read of a layer are what was committed."""
        segment, block = self.run.segment, self.blocks[layer]
        range_bytes, checksum = segment.manifest.range_bytes, segment.checksums[layer]
        num_read = len(checksum) - CHECKSUM_BYTES * num_ranges(self.num_after[layer], range_bytes)
        return tail_is_right(block, checksum[:num_read], block.nbytes, range_bytes)

    def attempt(self, work: Callable[[], None]) -> None:
        """Go on with the read, unless it has failed. A TierReadError of ``work`` fails it."""
        if self.error is None:
            try:
                work()
            except TierReadError as error:
                self.fail(error)

    def fail(self, error: TierReadError) -> None:
        if self.error is None:
            self.error = error
            self._failed(error)


class LowerTier(ABC):
    """Keeps copies of segments on a medium below DRAM. Thread-safe.

    Only ``fetch``, ``flush``, ``verify``, ``clear`` and ``close`` may take long. An error of the medium shows
    as a miss or a ``TierReadError``, never as another exception; it is counted, logged once per cause, and
    suspends the tier for a while.

    ``reads``: the threads in which ``fetch`` is called. The tier ends them when it is closed.
    ``notes_pages``: whether each page that can be found here came from this store's DRAM, or is in its
    ``PageFilter`` when that is complete: nobody else stores anything here.
    """

    name: str
    reads: ReadQueue
    notes_pages: bool = False

    @abstractmethod
    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` that are not known to be here. Never asks a network."""

    @abstractmethod
    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[Any], ...]:
        """Hold the longest prefix of ``page_keys`` that this tier has, for these tokens; ``()`` if none.

        The segment of a run is the tier's own object; callers may read ``manifest`` and ``checksums`` of it
        (``checksums[l]``: of the ranges of layer ``l``'s block). The first page is at position ``next_token``
        of its conversation (None: not known). As ``KVStore.lease``: each run starts where the one before it
        ended, tokens are compared, bytes are not read.
        """

    def hold(self, run: PageRun[Any]) -> None:  # noqa: B027
        """Hold a run once more. A tier whose ``release`` does nothing leaves it at this."""

    @abstractmethod
    def release(self, run: PageRun[Any]) -> None:
        """End a hold; once for each run of ``match``, and for each ``hold``."""

    @abstractmethod
    def fetch(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        """Read what is asked for of held runs: layer 0 of all, about, then layer 1 of all.

        Says of each read what has landed, or that it has failed: wrong bytes of one do not fail the others.
        ``priority()`` may become more urgent meanwhile.
        Called in a thread of ``reads``; several fetches may run at once.

        Raises:
            TierReadError: the medium fails, or is too slow: what has not landed does not come.
        """

    @abstractmethod
    def put(
        self,
        manifest: SegmentManifest,
        blocks: Sequence[Block],
        checksums: Sequence[bytes],
        done: Callable[[], None],
    ) -> bool:
        """Queue a committed segment for writing; False if the tier is behind or suspended, or cannot hold it.

        If True, the caller keeps ``blocks`` unchanged until the tier calls ``done``: once, whether it was
        written or not; the manifest never changes. A segment whose pages are all here already is not written
        again.
        """

    def can_hold(self, manifest: SegmentManifest) -> bool:
        """Whether a segment that ``put`` refused may be taken later. If not, it is counted as skipped."""
        return True

    def may_hold(self, model: ModelIdentity, page_key: str) -> bool:
        """False if it is certain that no segment here holds a page. Never asks a network."""
        return self.holder_of(model, page_key) is not None

    @abstractmethod
    def discard(self, manifest: SegmentManifest) -> None:
        """Take out stored and queued segments that hold a page of this one and are encoded like it.

        Called when a reader cannot decode the segment. Does not wait for a network.
        """

    @abstractmethod
    def holder_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        """The manifest of the segment that is known to hold a page. Never asks a network."""

    @abstractmethod
    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        """Whether the segment that is known to hold a page is part of another conversation, or continued."""

    @abstractmethod
    def cost(self) -> TierCost:
        """Seconds to read a block into DRAM: measured at start, corrected by what reads took."""

    def load_s(self, manifest: SegmentManifest) -> float:
        """Seconds to read all blocks of a segment into DRAM."""
        cost = self.cost()
        return sum(cost.load_s(num_bytes) for num_bytes in manifest.layer_num_bytes)

    def wait_until_open(self, timeout_s: float) -> bool:
        """Wait until it is known what lies in the tier; False if that takes longer.

        A tier that needs time for that finds nothing until then. What is put waits in its queue, and what is
        cleared or discarded is never found.
        """
        return True

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is durable or given up; False if that takes longer."""

    @abstractmethod
    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget all stored and queued segments (of one model), durably: not even a crash restores them.

        If the medium does not answer within some seconds, the tier finds nothing of them any more, and makes
        that durable when it can.
        """

    @abstractmethod
    def list_segments(self) -> list[SegmentInfo]:
        """Segments with ids of this tier; empty for a tier that cannot enumerate its content."""

    @abstractmethod
    def verify(self) -> DamageReport:
        """Read every segment that this tier can enumerate; discard those with a wrong checksum."""

    @abstractmethod
    def stats(self) -> TierStats: ...

    @abstractmethod
    def close(self) -> None:
        """Stop. Queued segments are still written, for a few seconds at most; running reads end."""


class MeasuredCost:
    """The ``TierCost`` of one tier: measured once, then corrected by what reads took. Thread-safe.

    Args:
        unmeasured: the cost that counts until something was measured.
    """

    def __init__(self, unmeasured: TierCost) -> None:
        self._lock = threading.Lock()
        self._cost = unmeasured

    @property
    def current(self) -> TierCost:
        with self._lock:
            return self._cost

    def set(self, cost: TierCost) -> None:
        """Replace the cost by a measured one."""
        with self._lock:
            self._cost = cost

    def correct(self, seen: Callable[[TierCost], TierCost]) -> None:
        """Move the cost by a fifth of the way to what one read says.

        ``seen`` is given the current cost and returns that of the read; what a read says nothing of, it
        returns as it is.
        """
        with self._lock:
            old, new = self._cost, seen(self._cost)
            self._cost = TierCost(
                old.latency_s + _LEARNING_RATE * (new.latency_s - old.latency_s),
                old.byte_s + _LEARNING_RATE * (new.byte_s - old.byte_s),
            )


class Suspension:
    """Pauses a tier for 30 s after an error, twice as long after the next one, up to 600 s.

    A success makes the next pause short again. Errors during a pause, of work that had begun before, do not
    lengthen it. One log line per cause.

    Args:
        name: the tier, for the log.
    """

    def __init__(self, name: str, clock: Clock) -> None:
        self._name = name
        self._clock = clock
        self._lock = threading.Lock()
        self._pause_s = FIRST_PAUSE_S
        self._ends_at_s = -1.0
        self._logged: set[str] = set()

    @property
    def is_active(self) -> bool:
        return self._clock() < self._ends_at_s

    def failed(self, cause: str, detail: object) -> None:
        """Note an error. ``cause`` is one of a few kinds of errors; ``detail`` is only logged."""
        with self._lock:
            if not self.is_active:
                self._ends_at_s = self._clock() + self._pause_s
                pause_s, self._pause_s = self._pause_s, min(2 * self._pause_s, LONGEST_PAUSE_S)
                if cause not in self._logged:
                    self._logged.add(cause)
                    logger.warning(
                        "tier %s: %s (%s); left alone for %g s, longer each time it happens again; "
                        "logged once, see the counters",
                        self._name,
                        cause,
                        detail,
                        pause_s,
                    )

    def succeeded(self) -> None:
        """Note that the medium works. Does not end a pause, but the next one will be short."""
        with self._lock:
            if not self.is_active:
                self._pause_s = FIRST_PAUSE_S


@dataclass(frozen=True, eq=False)
class QueuedSegment:
    """The arguments of ``LowerTier.put``. ``metadata`` is ``encode_metadata``'s, if the tier needs it."""

    manifest: SegmentManifest
    blocks: tuple[Block, ...]
    checksums: Checksums
    metadata: bytes
    done: Callable[[], None]

    @property
    def num_bytes(self) -> int:
        """Bytes of the blocks and of the metadata: a segment may have no others."""
        return self.manifest.num_bytes + len(self.metadata)


class WriteQueue:
    """A first-in-first-out queue that also knows what was taken but not settled (written, or given up).

    Args:
        counters: of the tier; what is given up counts as skipped.
        max_num_bytes: of all segments that are not settled; a larger segment is accepted only into an empty
            queue.
    """

    def __init__(self, max_num_bytes: int, counters: TierCounters) -> None:
        self._counters = counters
        self._max_num_bytes = max_num_bytes
        self._changed = threading.Condition()
        self._waiting: deque[QueuedSegment] = deque()
        self._is_closed = False
        self._is_woken = False
        self._num_put = 0
        self._num_bytes = 0
        self._num_flushing = 0
        # Numbered in the order in which they were put; also those that are being written.
        self._unsettled: dict[QueuedSegment, int] = {}

    def sizes(self) -> tuple[int, int]:
        """Number of segments, and their bytes, that are not settled."""
        with self._changed:
            return len(self._unsettled), self._num_bytes

    @property
    def is_closed(self) -> bool:
        return self._is_closed

    def has_room(self, num_bytes: int) -> bool:
        """Whether a segment of this size would be taken now."""
        is_full = self._num_bytes > 0 and self._num_bytes + num_bytes > self._max_num_bytes
        return not is_full and not self._is_closed

    def put(self, item: QueuedSegment) -> bool:
        """Add a segment; False when the queue is full or closed."""
        with self._changed:
            if not self.has_room(item.num_bytes):
                return False
            self._waiting.append(item)
            self._unsettled[item] = self._num_put
            self._num_put += 1
            self._num_bytes += item.num_bytes
            self._changed.notify_all()
            return True

    def wait(self, num_bytes: int = 0, patience_s: float = 0.0) -> bool:
        """Wait for a segment to take or a ``wake`` (True), or for the close of an empty queue (False).

        A segment waits ``patience_s`` for others at most, until there are ``num_bytes`` or the queue is half
        full, and not while anybody waits for a ``flush``.
        """
        num_bytes = min(num_bytes, self._max_num_bytes // 2)
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._is_woken or self._is_closed)
            self._changed.wait_for(
                lambda: (
                    self._num_bytes >= num_bytes or self._is_woken or self._is_closed or self._num_flushing
                ),
                patience_s,
            )
            was_woken, self._is_woken = self._is_woken, False
            return bool(self._waiting) or was_woken

    def wake(self) -> None:
        """End a ``wait``, the current one or the next, although there may be no segment to take."""
        with self._changed:
            self._is_woken = True
            self._changed.notify_all()

    def take(self, max_num_bytes: int) -> list[QueuedSegment]:
        """Take the first few segments: at least one if any waits, further ones up to ``max_num_bytes``."""
        with self._changed:
            taken: list[QueuedSegment] = []
            num_bytes = 0
            while self._waiting:
                num_bytes += self._waiting[0].num_bytes
                if taken and num_bytes > max_num_bytes:
                    break
                taken.append(self._waiting.popleft())
            return taken

    def drop(self, is_dropped: Callable[[QueuedSegment], bool]) -> list[QueuedSegment]:
        """Take out all waiting segments for which the predicate is true. They still have to be settled."""
        with self._changed:
            dropped = [item for item in self._waiting if is_dropped(item)]
            self._waiting = deque(item for item in self._waiting if not is_dropped(item))
            return dropped

    def give_up(self, is_dropped: Callable[[QueuedSegment], bool]) -> None:
        """Take out and settle all waiting segments for which the predicate is true."""
        dropped = self.drop(is_dropped)
        self._counters.skip("dropped", len(dropped))
        self.settle(dropped)

    def settle(self, items: Sequence[QueuedSegment]) -> None:
        """Tell the owners of segments, written or given up, that their blocks are not read any more."""
        with self._changed:
            # First, so that an owner who is told finds room for what waits elsewhere.
            self._num_bytes -= sum(item.num_bytes for item in items)
        for item in items:
            try:
                item.done()
            except Exception:
                # A bug of one owner must not stop the writing of other segments.
                logger.exception("the owner of a segment failed when told that it is written")
        with self._changed:
            for item in items:
                del self._unsettled[item]
            self._changed.notify_all()

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is settled; False if that took longer."""
        deadline_s = time.monotonic() + timeout_s
        with self._changed:
            end = self._num_put
            self._num_flushing += 1
            self._changed.notify_all()
            try:
                return self._changed.wait_for(
                    lambda: next(iter(self._unsettled.values()), end) >= end,
                    max(deadline_s - time.monotonic(), 0.0),
                )
            finally:
                self._num_flushing -= 1

    def close(self) -> None:
        """Accept no more segments; those that wait can still be taken."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
