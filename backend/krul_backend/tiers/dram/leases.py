"""Leases on stored prefixes: find the pages, pin their segments, hand out their blocks."""

from __future__ import annotations

import logging
from collections.abc import Sequence

import numpy as np

from krul_backend.errors import TierReadError
from krul_backend.segment import ModelIdentity, TokenIds
from krul_backend.tiers.common.interface import DRAM_TIER, FAILED, LayerStatus, Lease, SegmentSlice
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.dram.arrivals import Arrival
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.locked_books import LockedBooks
from krul_backend.tiers.dram.stored_segment import StoredSegment

logger = logging.getLogger(__name__)


class Leases:
    """``KVStore.lease``, ``fetch`` and ``release``. Thread-safe."""

    def __init__(self, locked: LockedBooks) -> None:
        self._locked = locked

    def lease(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
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
        lease_id = self._locked.next_id()
        with self._locked.open() as books:
            match = books.index.match_prefix(model, keys, token_ids, next_token)
            num_pages = sum(run.num_pages for run in match.runs)
            books.counters.lookups += 1
            books.counters.token_mismatches += match.is_contradicted
            books.counters.hit_pages += num_pages
            books.counters.missed_pages += len(keys) - num_pages
            if match.runs:
                _grant(books, lease_id, match.runs)
                first, *others = (run.segment for run in match.runs)
                books.touch([*books.index.path_to(first), *others])
        if match.is_contradicted:
            logger.warning(
                "a stored page has the key, but not the tokens or the position, of a request's page"
            )
        return _lease_of(lease_id, match.runs) if match.runs else None

    def lease_arrival(self, arrival: Arrival, first_page: int, end_page: int) -> Lease:
        """A lease on pages ``[first_page, end_page)`` of a segment that is arriving, or has arrived."""
        run = PageRun(arrival.segment, first_page, end_page)
        lease_id = self._locked.next_id()
        with self._locked.open() as books:
            _grant(books, lease_id, (run,))
            books.touch(books.index.path_to(run.segment))
        return _lease_of(lease_id, (run,))

    def fetch(self, lease: Lease) -> tuple[SegmentSlice, ...]:
        """As ``KVStore.fetch``. DRAM has all of these segments, but some may still be arriving.

        Raises:
            TierReadError: the arrival of one has failed.
        """
        with self._locked.open() as books:
            runs = books.leases.get(lease.lease_id)
        if runs is None:
            raise KeyError(f"lease {lease.lease_id} is unknown or was released")
        return tuple(_fetched_slice(run) for run in runs)

    def release(self, lease: Lease) -> None:
        """As ``KVStore.release``. Does nothing after the store was closed."""
        with self._locked.open_unless_closed() as books:
            if books is None:
                return
            segments = [run.segment for run in books.leases.pop(lease.lease_id)]
            for segment in segments:
                segment.num_leases -= 1
            books.unpin(segments)


def _grant(books: DramBooks, lease_id: int, runs: tuple[PageRun[StoredSegment], ...]) -> None:
    """Pin runs under a lease."""
    for run in runs:
        run.segment.num_leases += 1
    books.pin(run.segment for run in runs)
    books.leases[lease_id] = runs


def _lease_of(lease_id: int, runs: tuple[PageRun[StoredSegment], ...]) -> Lease:
    """The lease on runs that are pinned under its number. Segments that are arriving show no blocks yet."""
    slices = []
    for run in runs:
        # Read once: an arrival may end at any moment.
        status = run.segment.status
        slices.append(_slice_of(run, status, has_blocks=status is None))
    return Lease(lease_id, sum(run.num_pages for run in runs), tuple(slices))


def _fetched_slice(run: PageRun[StoredSegment]) -> SegmentSlice:
    """A leased run with its blocks. Raises TierReadError if its arrival has failed."""
    segment, status = run.segment, run.segment.status
    if status is not None and (status.flags == FAILED).any():
        raise TierReadError(f"segment {segment.segment_id} could not be read from {segment.origin}")
    return _slice_of(run, status, has_blocks=True)


def _slice_of(run: PageRun[StoredSegment], status: LayerStatus | None, *, has_blocks: bool) -> SegmentSlice:
    segment = run.segment
    return SegmentSlice(
        segment_id=segment.segment_id,
        header=segment.manifest.header,
        tier=DRAM_TIER if status is None else segment.origin,
        blocks=segment.blocks if has_blocks else (),
        spans=segment.spans if has_blocks else (),
        checksums=segment.checksums,
        first_page=run.first_page,
        end_page=run.end_page,
        status=status if has_blocks else None,
        status_span=segment.status_span if has_blocks and status is not None else None,
    )
