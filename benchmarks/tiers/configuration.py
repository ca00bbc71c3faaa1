"""What a run measures."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from krul_backend.errors import KrulError

KIB, MIB = 1 << 10, 1 << 20


class TiersBenchmarkError(KrulError):
    """Options that measure nothing, or bytes that came back wrong."""


@dataclass(frozen=True)
class Configuration:
    """Sizes are in bytes. ``segment_bytes`` bounds the blocks of one segment, ``max_blocks`` their number.

    ``folder`` holds the files of the disk's rows; a temporary one if None. ``index_segments``: the sizes of
    the index that lookups are compared at. ``churn`` segments of random sizes go through an arena of
    ``churn_arena_bytes``.
    """

    block_bytes: tuple[int, ...] = (64 * KIB, MIB, 2 * MIB, 4 * MIB, 8 * MIB, 64 * MIB)
    segment_bytes: int = 64 * MIB
    max_blocks: int = 32
    repeats: int = 15
    disk_repeats: int = 6
    lookup_pages: tuple[int, ...] = (1, 100, 1_000, 10_000)
    lookup_repeats: int = 200
    index_segments: tuple[int, ...] = (1_000, 100_000)
    index_repeats: int = 2_000
    arena_bytes: int = 1 << 30
    churn: int = 3_000
    churn_arena_bytes: int = 256 * MIB
    folder: Path | None = None

    def __post_init__(self) -> None:
        if not self.block_bytes or min(self.block_bytes) < 64:
            raise TiersBenchmarkError(f"blocks of {self.block_bytes} bytes: at least one size, of 64 or more")
        if min(self.repeats, self.disk_repeats, self.lookup_repeats, self.index_repeats) < 1:
            raise TiersBenchmarkError("every operation is repeated at least once")
        if self.arena_bytes < 4 * max(self.segment_bytes, *self.block_bytes):
            raise TiersBenchmarkError(f"an arena of {self.arena_bytes} bytes holds less than four segments")

    def num_blocks(self, block_bytes: int) -> int:
        """Blocks of a whole segment."""
        return max(1, min(self.max_blocks, self.segment_bytes // block_bytes))

    def to_json(self) -> dict[str, Any]:
        return {**asdict(self), "folder": None if self.folder is None else "given"}
