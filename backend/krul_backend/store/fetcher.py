"""Reads segments of the tiers below into DRAM."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from functools import partial
from typing import Any

from krul_backend.errors import NotAdmittedError, Refusal, StoreClosedError, TierReadError
from krul_backend.store.tiered_lease import LowerPart
from krul_backend.tiers.common.interface import Lease
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import QueuedRead, ReadPriority
from krul_backend.tiers.dram.host_store import HostStore
from krul_backend.tiers.dram.reservations import Arrival

logger = logging.getLogger(__name__)

MAX_PREFETCHED_SHARE = 1 / 4
"""Share of the arena that prefetched segments may take while they arrive: until then they are not evicted."""


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
        # Of segments that are on their way because of a prefetch.
        self._prefetched_bytes = 0
        self.num_fetched = 0
        self.num_failed = 0

    def bring(self, part: LowerPart, began_at: int, *, is_prefetch: bool = False) -> Lease:
        """Start to read a part into DRAM, and turn the tier's hold of it into a lease on the segment there.

        Does not wait for bytes. ``began_at`` is the tiered lease's. ``is_prefetch``: no load has asked yet.

        Raises:
            NotAdmittedError: there is no room in DRAM, or too much on its way. The tier still holds the part.
            StoreClosedError: the fetcher was closed. The tier still holds the part.
        """
        # One at a time: of two that miss the same segment in DRAM, the second finds the first one's.
        with self._admission:
            copy = self._lease_copy(part, began_at)
            if copy is None:
                prefetched_bytes = part.run.segment.manifest.num_bytes if is_prefetch else 0
                self._check_prefetched(prefetched_bytes)
                arrival, lease = self._admit(part, began_at)
                arrival.segment.is_prefetched = is_prefetch
                self._count_prefetched(prefetched_bytes)
        if copy is not None:
            part.tier.release(part.run)
            if not is_prefetch:
                self.hurry(copy)
            return copy
        read = partial(self._read, part.tier, part.run, arrival, prefetched_bytes)
        priority = ReadPriority.PREFETCH if is_prefetch else ReadPriority.LOAD
        try:
            with self._counting:
                if self._is_closing.is_set():
                    raise StoreClosedError("the KV store was closed")
                self._reads[arrival.segment.segment_id] = part.tier.reads.submit(read, priority)
        except BaseException:
            arrival.fail()
            self._count_prefetched(-prefetched_bytes)
            self._host.release(lease)
            raise
        return lease

    def hurry(self, lease: Lease) -> None:
        """Read what of a lease is still on its way before all that only was prefetched."""
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

    def _lease_copy(self, part: LowerPart, began_at: int) -> Lease | None:
        """A lease on a segment in DRAM with the same pages, of which no layer holds less; None if none is.

        Somebody else may have fetched or stored it since the part was matched.
        """
        run, manifest = part.run, part.run.segment.manifest
        size = manifest.model.page_size
        if self._host.was_cleared(manifest.model, began_at):
            return None
        start_token = manifest.start_token + run.first_page * size
        lease = self._host.lease(
            manifest.model,
            manifest.page_keys[run.first_page : run.end_page],
            manifest.token_ids[run.first_page * size : run.end_page * size],
            start_token,
        )
        if lease is None:
            return None
        pairs = zip(lease.slices[0].header.layer_first_token, manifest.layer_first_token, strict=True)
        if (
            len(lease.slices) == 1
            and lease.num_pages == part.num_pages
            and all(first <= max(wanted, start_token) for first, wanted in pairs)
        ):
            return lease
        self._host.release(lease)
        return None

    def _admit(self, part: LowerPart, began_at: int) -> tuple[Arrival, Lease]:
        """Make room for a part's segment, and lease its pages."""
        tier, run = part.tier, part.run
        manifest, checksums = run.segment.manifest, run.segment.checksums
        arrival = self._host.admit(manifest, checksums, tier.name, tier.load_s(manifest), began_at)
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

    def _read(self, tier: LowerTier, run: PageRun[Any], arrival: Arrival, prefetched_bytes: int) -> None:
        has_arrived = False
        try:
            has_arrived = self._fill(tier, run, arrival)
        finally:
            self._count_prefetched(-prefetched_bytes)
            self._count(has_arrived=has_arrived)
            with self._counting:
                del self._reads[arrival.segment.segment_id]
                self._counting.notify_all()

    def _fill(self, tier: LowerTier, run: PageRun[Any], arrival: Arrival) -> bool:
        """Read, then end the arrival and the hold whatever happened; returns whether the segment arrived."""
        num_tokens = run.segment.manifest.num_tokens
        try:
            if self._is_closing.is_set():
                return False
            tier.fetch(run, arrival.blocks, arrival.landed)
            arrival.finish()
        except TierReadError as error:
            logger.info("a segment of %d tokens did not come from %s: %s", num_tokens, tier.name, error)
            return False
        except Exception:
            logger.exception("reading a segment of %d tokens from %s failed", num_tokens, tier.name)
            return False
        finally:
            try:
                arrival.fail()
            finally:
                tier.release(run)
        self._arrived(arrival, tier)
        return True

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
