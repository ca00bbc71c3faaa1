"""The segments of the SSD tier, how they are found and evicted, and the state that reads and writes share."""

from __future__ import annotations

import errno
import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.interface import Checksums, Clock
from krul_backend.tiers.common.lower_tier import Suspension, TierCounters
from krul_backend.tiers.common.page_index import PageIndex, PageRun
from krul_backend.tiers.common.record import SegmentRecord
from krul_backend.tiers.ssd.log_file import LogFile

logger = logging.getLogger(__name__)


@dataclass(eq=False)
class SsdSegment:
    """A segment in a log file. It is changed under the tier's lock only.

    ``file`` and ``offset`` are where its record is. ``num_holds`` counts the runs that ``match`` gave out: a
    held segment is not evicted. ``is_indexed`` becomes False by eviction, a clear or a wrong checksum, and
    never True again. While ``num_reads`` is not 0 its bytes stay where they are all the same.
    """

    record: SegmentRecord
    file: LogFile
    offset: int
    last_used_s: float = 0.0
    num_holds: int = 0
    num_reads: int = 0
    is_indexed: bool = False
    segment_id: int = field(default_factory=itertools.count(1).__next__)

    @property
    def manifest(self) -> SegmentManifest:
        return self.record.manifest

    @property
    def checksums(self) -> Checksums:
        return self.record.checksums

    @property
    def taken_bytes(self) -> int:
        return self.record.num_bytes

    @property
    def start_token(self) -> int:
        return self.manifest.start_token

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def restore_s(self) -> float:
        """Seconds to compute it. Reading is left out: per byte it costs the same for all segments here."""
        return self.manifest.recompute_s


class Catalog:
    """Keeps index, eviction order and sums of the segments that can be found. Called under the tier's lock.

    ``index`` is for looking things up; only the catalog changes it. ``dead`` are segments that left, or never
    came in, and whose records still take space.

    Args:
        policy: order of eviction, owned by the catalog from here on.
    """

    def __init__(self, policy: EvictionPolicy, clock: Clock) -> None:
        self._policy = policy
        self._clock = clock
        self.index: PageIndex[SsdSegment] = PageIndex()
        self._segments: dict[int, SsdSegment] = {}
        self.stored_bytes = 0
        self.dead: list[SsdSegment] = []

    @property
    def num_segments(self) -> int:
        return len(self._segments)

    @property
    def segments(self) -> list[SsdSegment]:
        return list(self._segments.values())

    def add(self, segment: SsdSegment) -> bool:
        """Make a durable segment findable; False if all of its pages can be found already: it is dead."""
        is_new = self.index.add(segment) > 0
        if is_new:
            segment.is_indexed = True
            segment.file.live_bytes += segment.taken_bytes
            self._segments[segment.segment_id] = segment
            self.stored_bytes += segment.manifest.num_bytes
        else:
            self.dead.append(segment)
        self._touch(self.index.path_to(segment))
        return is_new

    def remove(self, segment: SsdSegment) -> None:
        """Take an indexed segment out; it is dead then."""
        self.index.remove(segment)
        self._policy.remove(segment.segment_id)
        del self._segments[segment.segment_id]
        segment.is_indexed = False
        segment.file.live_bytes -= segment.taken_bytes
        self.stored_bytes -= segment.manifest.num_bytes
        self.dead.append(segment)

    def take_dead(self) -> list[SsdSegment]:
        """The dead segments that nobody reads; they are not ``dead`` any more."""
        taken = [segment for segment in self.dead if not segment.num_reads]
        self.dead = [segment for segment in self.dead if segment.num_reads]
        return taken

    def remove_superseded(self, newer: SsdSegment) -> None:
        """Take out segments all of whose pages ``newer`` has too, which was written later.

        Pages are written again only after the segment that held them was found damaged or not decodable.
        """
        manifest = newer.manifest
        for older in self.index.segments_of(manifest.model, manifest.page_keys):
            if set(older.manifest.page_keys) <= set(manifest.page_keys):
                self.remove(older)

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[SsdSegment], ...]:
        """The longest prefix of the pages that is stored here with these tokens; counts as a use."""
        runs = self.index.match_prefix(model, tuple(page_keys), token_ids, next_token).runs
        if runs:
            before = self.index.path_to(runs[0].segment)[:-1]
            self._touch([*before, *(run.segment for run in runs)])
        return runs

    def touch_page(self, model: ModelIdentity, page_key: str | None) -> None:
        """Note a use of the segment of a page, if there is one, and of what that continues."""
        for holder in self.index.holders_of(model, (page_key,) if page_key is not None else ()):
            self._touch(self.index.path_to(holder))

    def victims(self) -> Iterator[SsdSegment]:
        """Segments that may be evicted, the first to evict first. Change nothing while iterating."""
        segments = (self._segments[segment_id] for segment_id in self._policy.victims())
        return (segment for segment in segments if segment.num_holds == 0)

    def _touch(self, path: Sequence[SsdSegment]) -> None:
        path = [segment for segment in path if segment.is_indexed]
        now_s = self._clock()
        for segment in path:
            segment.last_used_s = now_s
        self._policy.touch(path)


@dataclass(eq=False)
class TierState:
    """The tier's lock and what it guards: ``catalog`` and the bookkeeping of files; and its counters.

    The lock is never held during I/O.

    While ``suspension`` is active nothing is read or written; while ``fullness`` is, nothing is written.

    ``pending_clears``: an event for each clear that is not noted on the disk yet, by the model's fingerprint
    (None: of all models); set when the writer has tried. ``is_given_up``: it could not be noted, so nothing
    is read or written any more.

    ``wake`` tells the writer that a segment has died; ``given_back`` is notified when it has seen to that.

    ``is_opening``: what lies on the disk is being read. Until then ``catalog`` has some of it, and nothing of
    it may be found.
    """

    catalog: Catalog
    suspension: Suspension
    fullness: Suspension
    clock: Clock
    lock: threading.Lock = field(default_factory=threading.Lock)
    given_back: threading.Condition = field(init=False)
    counters: TierCounters = field(default_factory=TierCounters)
    pending_clears: dict[str | None, threading.Event] = field(default_factory=dict)
    is_given_up: bool = False
    wake: Callable[[], None] = lambda: None
    is_opening: bool = True
    is_closed: bool = False

    def __post_init__(self) -> None:
        self.given_back = threading.Condition(self.lock)

    @property
    def is_suspended(self) -> bool:
        return self.is_given_up or self.suspension.is_active

    @property
    def is_usable(self) -> bool:
        return not self.is_closed and not self.is_suspended

    @property
    def is_findable(self) -> bool:
        """Whether lookups are answered from the catalog."""
        return self.is_usable and not self.is_opening

    @property
    def is_writable(self) -> bool:
        return self.is_usable and not self.fullness.is_active

    def is_being_cleared(self, model: ModelIdentity) -> bool:
        return None in self.pending_clears or model.fingerprint in self.pending_clears

    def failed(self, cause: str, error: OSError) -> None:
        """Note a failure of something other than a read. A full file system only stops writing."""
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            self.fullness.failed("file system full", error)
        else:
            self.suspension.failed(cause, error)

    def quarantine(self, segment: SsdSegment, reason: object) -> None:
        """Take a segment with wrong bytes out of the catalog, unless it has left already."""
        with self.lock:
            if not segment.is_indexed:
                return
            self.catalog.remove(segment)
            self.counters.add(corrupted_segments=1)
        self.wake()
        logger.error("segment %d on the SSD is damaged and was taken out: %s", segment.segment_id, reason)
