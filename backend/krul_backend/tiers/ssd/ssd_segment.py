"""A segment as the SSD tier keeps it: on disk, with what is needed to find it in memory."""

from __future__ import annotations

from dataclasses import dataclass

from krul_backend.segment import SegmentManifest
from krul_backend.tiers.ssd.log_file import LogFile


@dataclass(eq=False)
class SsdSegment:
    """A record in a log file. All changes under the tier's lock.

    ``file`` and ``offset`` are where the record is now: compaction moves it, held or not; who reads it holds
    the file. ``num_holds`` counts the runs that ``match`` gave out: a held segment is not evicted.
    ``is_indexed`` ends by eviction, a clear, or a wrong checksum, and never comes back.
    """

    segment_id: int
    manifest: SegmentManifest
    checksums: tuple[int, ...]
    sequence: int
    block_offsets: tuple[int, ...]
    taken_bytes: int
    file: LogFile
    offset: int
    last_used_s: float
    num_holds: int = 0
    is_indexed: bool = False

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def restore_s(self) -> float:
        """What computing it takes. Reading it is left out: per byte it costs all segments here the same."""
        return self.manifest.recompute_s
