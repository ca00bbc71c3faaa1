"""The interface of a tier below DRAM: it keeps copies of committed segments, finds them, reads them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

from krul_backend.errors import TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, num_ranges
from krul_backend.tiers.common.interface import (
    CHECKSUM_BYTES,
    Block,
    DamageReport,
    SegmentInfo,
    TierStats,
    tail_is_right,
)
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load


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
