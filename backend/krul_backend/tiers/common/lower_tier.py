"""The interface of a tier below DRAM: it keeps copies of committed segments, finds them, reads them back.

And what such tiers share: their counters, the cost that they measure, and the pause after an error.
"""

from __future__ import annotations

import logging
import threading
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from krul_backend.planner.costs import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.interface import Block, DamageReport, SegmentInfo, TierStats
from krul_backend.tiers.common.page_index import PageRun

logger = logging.getLogger(__name__)

FIRST_PAUSE_S, LONGEST_PAUSE_S = 30.0, 600.0

_LEARNING_RATE = 0.2

_COUNTED = (
    *("written_segments", "written_bytes", "skipped_segments", "read_segments", "read_bytes"),
    *("evicted_segments", "evicted_bytes", "corrupted_segments"),
    *("failed_reads", "slow_reads", "failed_writes"),
)


class TierCounters:
    """Counts events since a tier was opened, under the names of ``TierStats``. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts = dict.fromkeys(_COUNTED, 0)

    def add(self, **amounts: int) -> None:
        """``add(failed_reads=1)``; a name that is no counter is a KeyError."""
        with self._lock:
            for name, amount in amounts.items():
                self._counts[name] += amount

    def snapshot(self) -> dict[str, int]:
        with self._lock:
            return self._counts.copy()


class LowerTier(ABC):
    """Keeps copies of segments on a medium below DRAM. Thread-safe.

    Only ``fetch``, ``flush``, ``verify``, ``clear`` and ``close`` may take long. An error of the medium shows
    as a miss or a ``TierReadError``, never as another exception; it is counted, logged once per cause, and
    suspends the tier for a while.
    """

    name: str

    @abstractmethod
    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` that are not known to be here. Never asks a network."""

    @abstractmethod
    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[Any], ...]:
        """Hold the longest prefix of ``page_keys`` that this tier has, for these tokens; ``()`` if none.

        The segment of a run is the tier's own object; callers may read ``manifest`` and ``checksums`` of it
        (``checksums[l]``: XXH3, 64 bit, of layer ``l``'s block). The first page is at position ``next_token``
        of its conversation (None: not known). As ``KVStore.lease``: each run starts where the one before it
        ended, tokens are compared, bytes are not read.
        """

    @abstractmethod
    def release(self, run: PageRun[Any]) -> None:
        """End the hold of ``match``; once for each run."""

    @abstractmethod
    def fetch(self, run: PageRun[Any], blocks: Sequence[Block], landed: Callable[[int], None]) -> None:
        """Read all blocks of a held run's segment into ``blocks`` (writable, of the manifest's sizes).

        Calls ``landed(layer)`` for each layer, in ascending order, when its block is written and its checksum
        is right; layers of no bytes, too. Called in a worker thread; several fetches may run at once.

        Raises:
            TierReadError: an error, a wrong checksum (the record is quarantined), or too slow.
        """

    @abstractmethod
    def put(
        self,
        manifest: SegmentManifest,
        blocks: Sequence[Block],
        checksums: Sequence[int],
        done: Callable[[], None],
    ) -> bool:
        """Queue a committed segment for writing; False (and counted) if the tier is behind or suspended.

        If True, the caller keeps ``blocks`` unchanged until the tier calls ``done``: once, whether it was
        written or not. A segment whose pages are all here already is not written again.
        """

    @abstractmethod
    def discard(self, manifest: SegmentManifest) -> None:
        """Take out stored and queued segments that hold a page of this one and are encoded like it.

        Called when a reader cannot decode the segment. Does not wait for a network.
        """

    @abstractmethod
    def cost(self) -> TierCost:
        """Seconds to read a block into DRAM: measured at start, corrected by what reads took."""

    def load_s(self, manifest: SegmentManifest) -> float:
        """Seconds to read all blocks of a segment into DRAM."""
        cost = self.cost()
        return sum(cost.load_s(num_bytes) for num_bytes in manifest.layer_num_bytes)

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is durable or given up; False if that takes longer."""

    @abstractmethod
    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget all stored and queued segments (of one model), durably: not even a crash restores them."""

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
        clock: seconds, monotonic.
    """

    def __init__(self, name: str, clock: Callable[[], float]) -> None:
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
