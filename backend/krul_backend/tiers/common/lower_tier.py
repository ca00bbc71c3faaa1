"""What a tier below DRAM does: keep copies of committed segments, find them, read them back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from krul_backend.planner.costs import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.interface import DamageReport, SegmentInfo, TierStats

Block = npt.NDArray[np.uint8]


@dataclass(frozen=True, eq=False)
class TierRun:
    """Pages ``[first_page, end_page)`` of a segment in a lower tier, held until ``LowerTier.release``.

    ``checksums[l]`` is the XXH3 (64 bit) of layer ``l``'s block. ``place`` is the tier's own business.
    """

    tier: str
    manifest: SegmentManifest
    checksums: tuple[int, ...]
    first_page: int
    end_page: int
    place: Any


@dataclass
class TierCounters:
    """Events since a tier was opened, under the names that ``TierStats`` gives them. Not thread-safe."""

    written_segments: int = 0
    written_bytes: int = 0
    skipped_segments: int = 0
    read_segments: int = 0
    read_bytes: int = 0
    evicted_segments: int = 0
    evicted_bytes: int = 0
    corrupted_segments: int = 0
    failed_reads: int = 0
    slow_reads: int = 0
    failed_writes: int = 0


class LowerTier(ABC):
    """Thread-safe. Only ``fetch``, ``flush``, ``verify``, ``clear`` and ``close`` may take long.

    Errors of the medium never leave the tier but as a miss or a ``TierReadError``: they are counted, logged
    once per cause, and suspend the tier for a while.
    """

    name: str

    @abstractmethod
    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` that are not known to be here. Never asks a network."""

    @abstractmethod
    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[TierRun, ...]:
        """Hold the longest prefix of ``page_keys`` that this tier has, for these tokens; ``()`` if none.

        The first page is at position ``next_token`` of its conversation (None: not known). As
        ``KVStore.lease``: each run starts where the one before it ended, tokens are compared, bytes are not
        read.
        """

    @abstractmethod
    def release(self, run: TierRun) -> None:
        """End the hold of ``match``; once for each run."""

    @abstractmethod
    def fetch(self, run: TierRun, blocks: Sequence[Block], landed: Callable[[int], None]) -> None:
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

        If True, ``blocks`` stay as they are until the tier calls ``done``, once, whatever came of it. A
        segment whose pages are all here already is not written again.
        """

    @abstractmethod
    def discard(self, manifest: SegmentManifest) -> None:
        """Take out whatever holds pages of a segment and is encoded like it, also what is queued.

        Nobody who asked can decode it. Does not wait for a network.
        """

    @abstractmethod
    def cost(self) -> TierCost:
        """Seconds to read a block into DRAM: measured at start, corrected by what reads took."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is durable (or given up); False if it took longer."""

    @abstractmethod
    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget everything (of one model), durably: not even a crash brings it back. What is queued, too."""

    @abstractmethod
    def list_segments(self) -> list[SegmentInfo]:
        """Ids are of this tier. Empty for a tier that cannot enumerate its content."""

    @abstractmethod
    def verify(self) -> DamageReport:
        """Read every segment that this tier can enumerate; discard those with a wrong checksum."""

    @abstractmethod
    def stats(self) -> TierStats: ...

    @abstractmethod
    def close(self) -> None:
        """Stop. What is queued is written first, for a few seconds at most; what is running ends."""
