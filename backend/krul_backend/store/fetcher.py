"""Reads segments of the tiers below into DRAM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from operator import gt
from typing import Any

from krul_backend.errors import NotAdmittedError, Refusal, StoreClosedError, TierReadError
from krul_backend.segment import SegmentManifest
from krul_backend.store.tiered_lease import LowerPart, has_more
from krul_backend.tiers.common.interface import Lease, SegmentSlice, SegmentTail, block_checksum, checksums_of
from krul_backend.tiers.common.lower_tier import LowerTier, TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import QueuedRead, ReadPriority
from krul_backend.tiers.dram import Arrival, HostStore, StoredSegment

logger = logging.getLogger(__name__)

MAX_PREFETCHED_SHARE = 1 / 4
"""Share of the arena that prefetched segments may take while they arrive: until then they are not evicted."""


@dataclass(frozen=True, eq=False)
class Coming:
    """A segment of a lower tier, or a part of one, for which there is room in DRAM, to be read."""

    tier: LowerTier
    run: PageRun[Any]
    arrival: Arrival
    priority: ReadPriority
    part: StoredSegment | None = None
    """The segment in DRAM that it completes, which is held until the read ends; None if DRAM has none."""

    def read(self, failed: Callable[[TierReadError], None]) -> TailRead:
        """Copy the ends of blocks that DRAM has, if they are right, and make the read of the rest."""
        blocks, part = self.arrival.blocks, self.part
        num_held = [0] * len(blocks)
        if part is not None:
            for layer, (end, checksum) in enumerate(zip(part.blocks, part.checksums, strict=True)):
                copy = blocks[layer][blocks[layer].nbytes - end.nbytes :]
                copy[:] = end
                if block_checksum(copy, part.manifest.range_bytes) == checksum:
                    num_held[layer] = end.nbytes
        fronts = [block[: block.nbytes - num] for block, num in zip(blocks, num_held, strict=True)]
        return TailRead(self.run, fronts, self.arrival.landed, failed, num_held)


class Fetcher:
    """Reads segments of lower tiers into DRAM, in the threads of each tier. Thread-safe.

    No tier waits for another one's reads: a cluster that does not answer blocks its own threads alone. What a
    load waits for is read before what was prefetched, also if the same segment was prefetched before.
    ``num_fetched`` counts the segments that have arrived whole, ``num_failed`` those that have not, or for
    which there was no room.

    Args:
        host: the DRAM tier.
        arrived: called for each segment that has arrived whole, in the thread that read it.
    """

    def __init__(self, host: HostStore, arrived: Callable[[Arrival, LowerTier], None]) -> None:
        self._host = host
        self._arrived = arrived
        self._is_closing = threading.Event()
        self._admission = threading.Lock()
        self._max_prefetched_bytes = int(MAX_PREFETCHED_SHARE * host.buffer.nbytes)
        # Guards all that follows.
        self._counting = threading.Condition()
        # Those that have not ended, by the id of the segment that arrives.
        self._reads: dict[int, QueuedRead] = {}
        # By the id of the segment whose place they take: until they are whole, that one is found.
        self._completing: dict[int, Arrival] = {}
        # Of segments that are on their way because of a prefetch.
        self._prefetched_bytes = 0
        self.num_fetched = 0
        self.num_failed = 0

    def admit(
        self,
        part: LowerPart,
        clear_mark: int,
        tail: SegmentTail | None = None,
        *,
        priority: ReadPriority = ReadPriority.LOAD,
    ) -> tuple[Lease, Coming | None]:
        """Make room for a part in DRAM, and turn the tier's hold of it into a lease on the segment there.

        It comes when the caller gives what this returns to ``start``; None if it is there, or on its way.
        ``clear_mark`` is the tiered lease's. ``tail``: what of the segment is read, None for all of it.
        If DRAM has less of the segment, that is copied, and when the rest has come the new one takes its
        place.

        Raises:
            NotAdmittedError: there is no room in DRAM, or too much on its way. The tier still holds the part.
        """
        whole, is_prefetch = part.run.segment.manifest, priority != ReadPriority.LOAD
        manifest = whole if tail is None else whole.trimmed(*tail)
        # One at a time: of two that miss the same segment in DRAM, the second finds the first one's.
        with self._admission:
            copy, less = self._lease_copy(part, manifest, clear_mark)
            if less is not None:
                manifest = whole if tail is None else whole.trimmed(*tail.with_held(less.header))
                copy = self._join(less.segment_id, manifest, part.run)
            if copy is None:
                prefetched_bytes = manifest.num_bytes if is_prefetch else 0
                self._check_prefetched(prefetched_bytes)
                arrival, lease = self._admit(part, manifest, clear_mark)
                arrival.segment.is_prefetched = is_prefetch
                self._count_prefetched(prefetched_bytes)
                # If it has left the index meanwhile, all of it is read.
                held = None if less is None else self._host.hold(less.segment_id)
                if held is not None:
                    with self._counting:
                        self._completing[held.segment_id] = arrival
                return lease, Coming(part.tier, part.run, arrival, priority, held)
        part.tier.release(part.run)
        if not is_prefetch:
            self.hurry(copy)
        return copy, None

    def start(self, coming: Sequence[Coming]) -> None:
        """Read what was admitted with one priority: of each tier in one go, layer 0 of all segments before
        layer 1 of any."""
        for tier in dict.fromkeys(each.tier for each in coming):
            self._submit(tier, [each for each in coming if each.tier is tier])

    def _submit(self, tier: LowerTier, together: Sequence[Coming]) -> None:
        """Let a tier read some of its segments in one call; they fail if the store was closed."""
        try:
            with self._counting:
                if self._is_closing.is_set():
                    raise StoreClosedError("the KV store was closed")
                read = tier.reads.submit(partial(self._read, tier, together), together[0].priority)
                self._reads.update((each.arrival.segment.segment_id, read) for each in together)
        except StoreClosedError:
            for each in together:
                self._end(each)

    def hurry(self, lease: Lease) -> None:
        """Read what of a load's lease is still on its way before all that only was prefetched."""
        self._host.note_load(lease)
        with self._counting:
            reads = [self._reads.get(piece.segment_id) for piece in lease.slices]
        for read in reads:
            if read is not None:
                read.hurry()

    def close(self) -> None:
        """Wait for the reads that run, and fail those that have not begun."""
        self._is_closing.set()
        with self._counting:
            self._counting.wait_for(lambda: not self._reads)

    def _lease_copy(
        self, part: LowerPart, manifest: SegmentManifest, clear_mark: int
    ) -> tuple[Lease | None, SegmentSlice | None]:
        """A lease on a segment in DRAM with a part's pages, of which no layer holds less than ``manifest``
        says. None if none is, and then one that has the same bytes, but less of them, if there is one.

        Somebody else may have fetched or stored it since the part was matched.
        """
        run, size = part.run, manifest.model.page_size
        if self._host.was_cleared(manifest.model, clear_mark):
            return None, None
        start_token = manifest.start_token + run.first_page * size
        lease = self._host.lease(
            manifest.model,
            manifest.page_keys[run.first_page : run.end_page],
            manifest.token_ids[run.first_page * size : run.end_page * size],
            start_token,
        )
        if lease is None:
            return None, None
        found = lease.slices[0]
        pairs = zip(found.header.layer_first_token, manifest.layer_first_token, strict=True)
        is_alike = len(lease.slices) == 1 and lease.num_pages == part.num_pages
        if is_alike and all(first <= max(wanted, start_token) for first, wanted in pairs):
            return lease, None
        self._host.release(lease)
        return None, found if is_alike and has_more(part.slices[0], found) else None

    def _join(self, part_id: int, manifest: SegmentManifest, run: PageRun[Any]) -> Lease | None:
        """A lease on what comes to complete a segment, if no layer of it has less than ``manifest`` says."""
        with self._counting:
            coming, wanted = self._completing.get(part_id), manifest.layer_first_token
            if coming is None or any(map(gt, coming.segment.manifest.layer_first_token, wanted)):
                return None
            return self._host.lease_arrival(coming, run.first_page, run.end_page)

    def _leave(self, coming: Coming) -> None:
        """From here on nobody joins it: it may end."""
        with self._counting:
            if coming.part is not None and self._completing.get(coming.part.segment_id) is coming.arrival:
                del self._completing[coming.part.segment_id]

    def _admit(self, part: LowerPart, manifest: SegmentManifest, clear_mark: int) -> tuple[Arrival, Lease]:
        """Make room for what ``manifest`` says of a part's segment, and lease the part's pages."""
        tier, run = part.tier, part.run
        checksums = checksums_of(manifest, run.segment.checksums)
        arrival = self._host.admit(manifest, checksums, tier.name, tier.load_s(manifest), clear_mark)
        if arrival is None:
            self._count(has_arrived=False)
            refusal: Refusal = "over quota" if self._host.is_over_quota(manifest) else "no room"
            raise NotAdmittedError(
                refusal, f"no room in DRAM for {manifest.num_bytes} bytes from {tier.name}"
            )
        try:
            return arrival, self._host.lease_arrival(arrival, run.first_page, run.end_page)
        except BaseException:
            arrival.fail()
            raise

    def _read(self, tier: LowerTier, together: Sequence[Coming]) -> None:
        """Read, then end the arrivals and the holds whatever happened."""
        try:
            with self._counting:
                queued = self._reads[together[0].arrival.segment.segment_id]
            if not self._is_closing.is_set():
                reads = [each.read(partial(self._fail, each)) for each in together]
                tier.fetch(reads, lambda: queued.priority)
        except TierReadError as error:
            logger.info("%d segments did not come from %s: %s", len(together), tier.name, error)
        except Exception:
            logger.exception("reading %d segments from %s failed", len(together), tier.name)
        finally:
            for each in together:
                self._end(each)

    def _fail(self, coming: Coming, error: TierReadError) -> None:
        """The tier cannot read it."""
        num_tokens, tier = coming.run.segment.manifest.num_tokens, coming.tier.name
        logger.info("a segment of %d tokens did not come from %s: %s", num_tokens, tier, error)
        self._leave(coming)
        coming.arrival.fail()

    def _end(self, coming: Coming) -> None:
        """End an arrival, and the tier's hold of its segment."""
        arrival, has_arrived = coming.arrival, False
        self._leave(coming)
        try:
            has_arrived = arrival.end(coming.part)
        finally:
            coming.tier.release(coming.run)
            if coming.part is not None:
                self._host.unhold(coming.part)
            # Together: whoever sees the count also sees that the read has ended.
            with self._counting:
                if coming.priority != ReadPriority.LOAD:
                    self._count_prefetched(-arrival.segment.manifest.num_bytes)
                self._count(has_arrived=has_arrived)
                self._reads.pop(arrival.segment.segment_id, None)
                self._counting.notify_all()
        # What has come in part would be a part there, too.
        if has_arrived and arrival.segment.manifest.num_bytes == coming.run.segment.manifest.num_bytes:
            self._arrived(arrival, coming.tier)

    def _check_prefetched(self, num_bytes: int) -> None:
        """Refuse a prefetch of ``num_bytes`` if too much is on its way; a single one may be of any size."""
        with self._counting:
            on_its_way = self._prefetched_bytes
        if num_bytes and on_its_way and on_its_way + num_bytes > self._max_prefetched_bytes:
            self._count(has_arrived=False)
            raise NotAdmittedError("too much at once", f"{on_its_way} bytes are being prefetched")

    def _count_prefetched(self, num_bytes: int) -> None:
        with self._counting:
            self._prefetched_bytes += num_bytes

    def _count(self, *, has_arrived: bool) -> None:
        with self._counting:
            self.num_fetched += has_arrived
            self.num_failed += not has_arrived
