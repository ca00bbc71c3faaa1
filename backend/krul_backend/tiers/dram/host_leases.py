"""Reading from the DRAM tier, and letting segments of lower tiers into it."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence

import numpy as np

from krul_backend.errors import TierReadError
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.arrival import FAILED, PENDING, LayerStatus
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.interface import DRAM_TIER, Lease, SegmentSlice
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.dram.admission import Arrival
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.host_base import Extents, HostBase
from krul_backend.tiers.dram.stored_segment import StoredSegment, block_in

logger = logging.getLogger(__name__)


class HostLeases(HostBase):
    """See ``HostStore``."""

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
        tenant_quota: float = 1.0,
    ) -> None:
        super().__init__(capacity_bytes, policy, clock, tenant_quota)
        self._leases: dict[int, tuple[PageRun[StoredSegment], ...]] = {}
        self._arriving: dict[int, LayerStatus] = {}

    def lease(
        self,
        model: ModelIdentity,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        next_token: int | None = None,
    ) -> Lease | None:
        """As ``KVStore.lease``; the first page must be at position ``next_token``, if that is given.

        A segment that is arriving is leased as one of the tier that it comes from, until all of it is there.
        """
        keys = tuple(page_keys)
        token_ids = np.asarray(token_ids)
        if token_ids.shape != (len(keys) * model.page_size,):
            raise ValueError(
                f"{len(keys)} pages of {model.page_size} tokens need token ids of shape "
                f"({len(keys) * model.page_size},), got {token_ids.shape}"
            )
        with self._lock:
            books = self._books
            match = books.index.match_prefix(model, keys, token_ids, next_token)
            num_pages = sum(run.end_page - run.first_page for run in match.runs)
            books.counters.lookups += 1
            books.counters.token_mismatches += match.is_contradicted
            books.counters.hit_pages += num_pages
            books.counters.missed_pages += len(keys) - num_pages
            lease_id = self.next_id()
            if match.runs:
                segments = self._grant(lease_id, match.runs)
                books.touch([*books.index.path_to(segments[0])[:-1], *segments])
        if match.is_contradicted:
            logger.warning(
                "a stored page has the key, but not the tokens or the position, of a request's page"
            )
        return _lease_of(lease_id, match.runs) if match.runs else None

    def lease_arrival(self, arrival: Arrival, first_page: int, end_page: int) -> Lease:
        """A lease on pages ``[first_page, end_page)`` of a segment that arrives, or did."""
        run = PageRun(arrival.segment, first_page, end_page)
        lease_id = self.next_id()
        with self._lock:
            books = self._books
            books.touch(books.index.path_to(*self._grant(lease_id, (run,))))
        return _lease_of(lease_id, (run,))

    def fetch(self, lease: Lease) -> tuple[SegmentSlice, ...]:
        """As ``KVStore.fetch``: nothing lies in a lower tier here, but segments may be arriving.

        Raises:
            TierReadError: the arrival of one has failed.
        """
        with self._lock:
            runs = self._leases.get(lease.lease_id) if self._books else None
        if runs is None:
            raise KeyError(f"lease {lease.lease_id} is unknown or was released")
        return tuple(_readable_slice(run) for run in runs)

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self._open_books is None:
                return
            segments = [run.segment for run in self._leases.pop(lease.lease_id)]
            for segment in segments:
                segment.num_leases -= 1
            self._open_books.unpin(segments)

    # Arrivals

    def clear_mark(self) -> int:
        """What ``admit`` is told, taken before a lower tier is asked."""
        with self._lock:
            return self._books.clears.now

    def was_cleared(self, model: ModelIdentity, began_at: int) -> bool:
        """Whether ``model`` was cleared since ``began_at``, a mark."""
        with self._lock:
            return self._books.clears.is_outdated(began_at, model)

    def admit(
        self,
        manifest: SegmentManifest,
        checksums: Sequence[int],
        origin: str,
        lower_load_s: float,
        began_at: int | None = None,
    ) -> Arrival | None:
        """Make room for a segment of the tier ``origin``, and index it; its layers land later.

        It is not indexed, and goes with its last lease, when DRAM holds all of its pages already or its model
        was cleared since ``began_at``. Reading it again from below would take ``lower_load_s`` seconds.
        Returns None, and counts it, when there is no room.
        """
        sizes = (*manifest.layer_num_bytes, manifest.model.num_layers)

        def use(books: DramBooks, extents: Extents) -> Arrival:
            *block_extents, flags_extent = extents
            flags = block_in(books.arena, flags_extent)
            flags[:] = PENDING
            status = LayerStatus(flags)
            blocks = tuple(block_in(books.arena, extent) for extent in block_extents)
            segment = StoredSegment(
                segment_id=self.next_id(),
                manifest=manifest,
                extents=tuple(block_extents),
                blocks=tuple(block.view() for block in blocks),
                checksums=tuple(checksums),
                last_used_s=self._clock(),
                origin=origin,
                status=status,
                flags_extent=flags_extent,
                lower_load_s=lower_load_s,
                num_pins=1,
            )
            for block in segment.blocks:
                block.flags.writeable = False
            self._arriving[segment.segment_id] = status
            is_outdated = began_at is not None and books.clears.is_outdated(began_at, manifest.model)
            if not is_outdated and books.publish(segment):
                books.touch(books.index.path_to(segment))
            return Arrival(segment, status, blocks, self._end_arrival)

        return self._take(sizes, manifest.tenant, use)

    def _end_arrival(self, segment: StoredSegment, is_whole: bool) -> None:
        with self._lock:
            self._arriving.pop(segment.segment_id, None)
            if is_whole:
                segment.status = None
            if self._open_books is None:
                return
            if not is_whole and segment.is_indexed:
                self._open_books.remove(segment)
            self._open_books.unpin((segment,))

    def _grant(self, lease_id: int, runs: tuple[PageRun[StoredSegment], ...]) -> list[StoredSegment]:
        """Pin runs under a lease. Called with the lock held."""
        segments = [run.segment for run in runs]
        for segment in segments:
            segment.num_leases += 1
        self._books.pin(segments)
        self._leases[lease_id] = runs
        return segments

    def _fail_arrivals(self) -> None:
        """Tell whoever waits that nothing more comes. Called with the lock held, when the store closes."""
        for status in self._arriving.values():
            status.flags[status.flags == PENDING] = FAILED
        self._arriving.clear()


def _lease_of(lease_id: int, runs: tuple[PageRun[StoredSegment], ...]) -> Lease:
    """The lease on runs that are pinned under its number."""
    num_pages = sum(run.end_page - run.first_page for run in runs)
    return Lease(lease_id, num_pages, tuple(_slice_of(run) for run in runs))


def _slice_of(run: PageRun[StoredSegment]) -> SegmentSlice:
    """What a lease tells of a run: where it lies, or which tier it comes from while it arrives."""
    segment = run.segment
    is_here = segment.status is None
    return SegmentSlice(
        segment_id=segment.segment_id,
        header=segment.manifest.header,
        tier=DRAM_TIER if is_here else segment.origin,
        blocks=segment.blocks if is_here else (),
        spans=segment.spans if is_here else (),
        checksums=segment.checksums,
        first_page=run.first_page,
        end_page=run.end_page,
    )


def _readable_slice(run: PageRun[StoredSegment]) -> SegmentSlice:
    """What ``fetch`` tells of a run: where it lies, and which layers of it are there."""
    segment, status = run.segment, run.segment.status
    if status is not None and (status.flags == FAILED).any():
        raise TierReadError(f"segment {segment.segment_id} could not be read from {segment.origin}")
    return SegmentSlice(
        segment_id=segment.segment_id,
        header=segment.manifest.header,
        tier=segment.origin if status is not None else DRAM_TIER,
        blocks=segment.blocks,
        spans=segment.spans,
        checksums=segment.checksums,
        first_page=run.first_page,
        end_page=run.end_page,
        status=status,
    )
