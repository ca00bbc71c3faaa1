"""Which segments the SSD tier has, and in which order they leave."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.page_index import PageIndex, PageRun
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


class Catalog:
    """Index, order and sums over all segments that can be found. Called under the tier's lock.

    Args:
        policy: order of eviction, owned by the catalog from here on.
        clock: seconds, monotonic.
    """

    def __init__(self, policy: EvictionPolicy, clock: Callable[[], float]) -> None:
        self._policy = policy
        self._clock = clock
        self._index: PageIndex[SsdSegment] = PageIndex()
        self._segments: dict[int, SsdSegment] = {}
        self._ids = itertools.count(1)
        self.stored_bytes = 0

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def num_pages(self) -> int:
        return self._index.num_pages

    @property
    def segments(self) -> list[SsdSegment]:
        return list(self._segments.values())

    def next_id(self) -> int:
        return next(self._ids)

    def add(self, segment: SsdSegment) -> bool:
        """Make a durable segment findable; False if it brings no page that is not here already."""
        is_new = self._index.add(segment) > 0
        if is_new:
            segment.is_indexed = True
            segment.file.live_bytes += segment.taken_bytes
            self._segments[segment.segment_id] = segment
            self.stored_bytes += segment.manifest.num_bytes
        self._touch(self._index.path_to(segment))
        return is_new

    def remove(self, segment: SsdSegment) -> None:
        """Take an indexed segment out; its record is dead from now on."""
        self._index.remove(segment)
        self._policy.remove(segment.segment_id)
        del self._segments[segment.segment_id]
        segment.is_indexed = False
        segment.file.live_bytes -= segment.taken_bytes
        self.stored_bytes -= segment.manifest.num_bytes

    def segments_of(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[SsdSegment]:
        """The segments that the pages are found in, each once."""
        return self._index.segments_of(model, page_keys)

    def remove_superseded(self, newer: SsdSegment) -> None:
        """Take out the segments all of whose pages ``newer``, which was written later, has too.

        Pages are written again only after what had them was taken out, as damaged or not decodable.
        """
        manifest = newer.manifest
        for older in self.segments_of(manifest.model, manifest.page_keys):
            if set(older.manifest.page_keys) <= set(manifest.page_keys):
                self.remove(older)

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        return self._index.find_missing(model, page_keys)

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[SsdSegment], ...]:
        """The longest prefix that is here, for these tokens; counts as a use."""
        runs = self._index.match_prefix(model, tuple(page_keys), token_ids, next_token).runs
        if runs:
            before = self._index.path_to(runs[0].segment)[:-1]
            self._touch([*before, *(run.segment for run in runs)])
        return runs

    def victims(self) -> Iterator[SsdSegment]:
        """Segments that may be evicted, the first to leave first. Change nothing while iterating."""
        segments = (self._segments[segment_id] for segment_id in self._policy.victims())
        return (segment for segment in segments if segment.num_holds == 0)

    def _touch(self, path: Sequence[SsdSegment]) -> None:
        path = [segment for segment in path if segment.is_indexed]
        now_s = self._clock()
        for segment in path:
            segment.last_used_s = now_s
        self._policy.touch(path)
