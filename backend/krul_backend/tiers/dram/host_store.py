"""The DRAM tier: segments in this process's memory."""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from krul_backend.errors import ConfigError
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, checked_token_ids
from krul_backend.tiers.common.eviction import EvictionPolicy, make_policy
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import (
    DRAM_TIER,
    Clock,
    DamageReport,
    FastCopies,
    Lease,
    PathSegment,
    Reservation,
    SegmentDetails,
    SegmentInfo,
    SegmentSlice,
    StoreStats,
)
from krul_backend.tiers.common.page_filter import PageFilter
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.dram.dram_books import LOCK_PAUSE_S, DramBooks, LockedBooks
from krul_backend.tiers.dram.eviction_plan import MAX_VISITED
from krul_backend.tiers.dram.reservations import Arrival, Reservations, arrival_sizes
from krul_backend.tiers.dram.stored_segment import StoredSegment

logger = logging.getLogger(__name__)


class HostStore:
    """Keeps segments in one arena: a block per layer, an index by page keys, whole segments evicted.

    Thread-safe; ``LockedBooks`` states the rules of the lock. A pinned segment is neither evicted nor
    trimmed.

    It does what ``KVStore`` says for this one tier, under the same names, and what a ``TieredStore`` over it
    needs: segments of lower tiers are let in (``admit``), and segments are held while they are copied to
    lower tiers (``hold``).

    Views handed out stay mapped as long as they are referenced, even after ``close``; what they show after
    their release, abort or eviction is undefined.

    Args:
        capacity_bytes: size of the arena in bytes.
        policy: order of eviction, owned by the store from here on; ``value`` if not given.
        clock: seconds, monotonic; for pins, idle times and the default policy.
        tenant_quota: share of the arena that segments and reservations of one tenant may take.

    Raises:
        ConfigError: the quota is not in (0, 1].
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy | None = None,
        clock: Clock = time.monotonic,
        tenant_quota: float = 1.0,
    ) -> None:
        if not 0 < tenant_quota <= 1:
            raise ConfigError(f"tenant_quota is a share of the arena above 0, up to 1, not {tenant_quota}")
        policy = policy if policy is not None else make_policy("value", clock)
        self._locked = LockedBooks(DramBooks(capacity_bytes, policy, clock, tenant_quota))
        self._reservations = Reservations(self._locked)

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The arena, uint8 ``[capacity_bytes]``, for registering it with CUDA. Never write through it."""
        with self._locked.open() as books:
            return books.arena.buffer

    def fileno(self) -> int:
        """Descriptor of the arena's memory file; the store keeps it open until it is closed."""
        with self._locked.open() as books:
            return books.arena.fileno()

    @property
    def page_filter(self) -> PageFilter:
        """Has every page that was ever found here."""
        with self._locked.open() as books:
            return books.page_filter

    def next_id(self) -> int:
        """A number that no segment, lease or reservation of this store has."""
        return self._locked.next_id()

    # Storing

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._locked.open() as books:
            return books.index.find_missing(model, page_keys)

    def reserve(
        self,
        layer_num_bytes: Sequence[int],
        tenant: str = "",
        *,
        is_fast_copy: bool = False,
        at_once: bool = False,
    ) -> Reservation | None:
        """Take space as ``KVStore`` says. ``at_once``: None, uncounted, if that takes a long search."""
        return self._reservations.reserve(layer_num_bytes, tenant, is_fast_copy=is_fast_copy, at_once=at_once)

    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[bytes]) -> int:
        segment = self.commit_held(reservation, manifest, checksums)
        self.unhold(segment)
        return segment.segment_id

    def commit_held(
        self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[bytes]
    ) -> StoredSegment:
        """As ``commit``; the segment is held until ``unhold``, also if it was dropped."""
        return self._reservations.commit(reservation, manifest, checksums)

    def abort(self, reservation: Reservation) -> None:
        self._reservations.abort(reservation)

    def hold(self, segment_id: int) -> StoredSegment | None:
        """Pin an indexed segment until ``unhold``; None if it has gone."""
        return self._locked.hold(segment_id)

    def unhold(self, segment: StoredSegment) -> None:
        """End a hold; also after ``close``."""
        self._locked.unhold(segment)

    # Reading

    def lease(
        self,
        model: ModelIdentity,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        next_token: int | None = None,
        *,
        fast_copies: FastCopies = "prefer",
    ) -> Lease | None:
        """As ``KVStore.lease``; the first page must be at position ``next_token``, if that is given.

        A segment that is arriving is leased as one of the tier that it comes from, until all of it is there.
        """
        keys = tuple(page_keys)
        token_ids = checked_token_ids(token_ids, len(keys), model.page_size)
        lease_id = self.next_id()
        with self._locked.open() as books:
            index, preferred = {
                "prefer": (books.index, books.fast_copies),
                "avoid": (books.fast_copies, books.index),
                "skip": (books.index, None),
                "only": (books.fast_copies, None),
            }[fast_copies]
            match = index.match_prefix(model, keys, token_ids, next_token, preferred)
            num_pages = sum(run.num_pages for run in match.runs)
            books.counters.token_mismatches += match.is_contradicted
            if match.runs:
                _grant(books, lease_id, match.runs)
            if fast_copies == "prefer":
                books.counters.lookups += 1
                books.counters.hit_pages += num_pages
                books.counters.missed_pages += len(keys) - num_pages
                found = [run.segment for run in match.runs]
                books.note_found(found)
                books.touch_pages(model, keys[:num_pages], found)
        if match.is_contradicted:
            logger.warning(
                "a stored page has the key, but not the tokens or the position, of a request's page"
            )
        return Lease(lease_id, num_pages, _slices(match.runs)) if match.runs else None

    def lease_arrival(self, arrival: Arrival, first_page: int, end_page: int) -> Lease:
        """A lease on pages ``[first_page, end_page)`` of a segment that is arriving, or has arrived."""
        run = PageRun(arrival.segment, first_page, end_page)
        lease_id = self.next_id()
        with self._locked.open() as books:
            _grant(books, lease_id, (run,))
            books.touch(books.index.path_to(run.segment))
        return Lease(lease_id, run.num_pages, _slices((run,)))

    def note_load(self, lease: Lease) -> None:
        """Note that a load takes what is leased."""
        with self._locked.open() as books:
            books.note_found((run.segment for run in books.leases[lease.lease_id]), is_load=True)

    def fetch(self, lease: Lease) -> tuple[SegmentSlice, ...]:
        """As ``KVStore.fetch``. DRAM has all of these segments, but some may still be arriving.

        Raises:
            TierReadError: the arrival of one has failed.
        """
        with self._locked.open() as books:
            runs = books.leases.get(lease.lease_id)
        if runs is None:
            raise KeyError(f"lease {lease.lease_id} is unknown or was released")
        return _slices(runs, is_fetched=True)

    def release(self, lease: Lease) -> None:
        with self._locked.open_unless_closed() as books:
            if books is None:
                return
            segments = [run.segment for run in books.leases.pop(lease.lease_id)]
            for segment in segments:
                segment.num_leases -= 1
            books.unpin(segments)

    def admit(
        self,
        manifest: SegmentManifest,
        checksums: Sequence[bytes],
        origin: str,
        lower_load_s: float,
        clear_mark: int | None = None,
    ) -> Arrival | None:
        """Begin the arrival of a segment of a lower tier; see ``Reservations.admit``."""
        return self._reservations.admit(manifest, checksums, origin, lower_load_s, clear_mark)

    def is_over_quota(self, manifest: SegmentManifest) -> bool:
        """True if a segment does not fit into the arena, or into what its tenant has left of its quota."""
        with self._locked.open() as books:
            return books.is_over_quota(arrival_sizes(manifest), manifest.tenant)

    # Checking and changing what is stored

    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        with self._locked.open() as books:
            segments = books.index.segments_of(model, page_keys)
            return [PathSegment(segment.segment_id, segment.manifest.header) for segment in segments]

    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        with self._locked.open() as books:
            segment = books.segments.get(segment_id)
            if segment is None:
                return 0
            manifest = segment.manifest.trimmed(layer_first_token, layer_num_bytes)
            num_bytes = segment.manifest.num_bytes - manifest.num_bytes
            if not num_bytes or segment.num_pins or books.is_shared(segment):
                return 0
            taken_before = segment.taken_bytes
            segment.trim(manifest, books.arena)
            books.note_trim(segment, taken_before, num_bytes)
            return num_bytes

    def note_lower_load(self, segment: StoredSegment, seconds: float) -> None:
        """Note that a lower tier holds a segment, too: then having it in DRAM saves less time."""
        with self._locked.open():
            segment.note_lower_load(seconds)

    def report_damage(self, segment_id: int) -> bool:
        """Take a segment out of use if a check here finds it damaged, too; see ``KVStore.report_damage``."""
        with self._locked.held(segment_id) as segment:
            return segment is not None and segment.num_damaged() > 0 and self._quarantine(segment)

    def discard(self, manifest: SegmentManifest, *, however_encoded: bool = False) -> None:
        """Take segments out of the index that hold a page of this one, and are encoded like it or anyhow."""
        with self._locked.open() as books:
            for index in (books.index, books.fast_copies):
                for segment in index.segments_of(manifest.model, manifest.page_keys):
                    if however_encoded or segment.manifest.shares_encoded_pages(manifest):
                        books.remove(segment)

    def drop_fast_copies(self, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        with self._locked.open() as books:
            for segment in books.fast_copies.segments_of(model, page_keys):
                books.remove(segment)

    def verify(self) -> DamageReport:
        with self._locked.open() as books:
            segment_ids = list(books.segments)
        num_blocks = num_bytes = 0
        bad_ids: list[int] = []
        for segment_id in segment_ids:
            # One at a time: a held segment cannot be evicted, and a whole store takes seconds to read.
            with self._locked.held(segment_id) as segment:
                if segment is None or segment.status is not None:
                    continue
                num_blocks += len(segment.blocks)
                num_bytes += segment.manifest.num_bytes
                if segment.num_damaged() and self._quarantine(segment):
                    bad_ids.append(segment_id)
        return DamageReport(num_blocks, num_bytes, tuple(bad_ids))

    def advise(self, model: ModelIdentity, page_keys: Sequence[str], hint: Hint) -> int:
        """Note a hint about what of a conversation lies here; returns how many of its pages that is.

        With a ``ttl_s``: how many are pinned now. What ``drop`` and ``prefetch`` say is left to the caller.
        """
        with self._locked.open() as books:
            path = books.index.segments_of(model, page_keys)
            books.advise(path, hint)
            if hint.ttl_s is not None:
                return _num_pinned(books, model, page_keys)
            return len(books.index.holders_of(model, page_keys))

    def holder_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        """The manifest of the segment that holds a page; None if none does."""
        with self._locked.open() as books:
            return books.index.manifest_of(model, page_key)

    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        """Whether the segment that holds a page is part of another conversation, or continued by one."""
        with self._locked.open() as books:
            return books.index.is_needed(model, page_key)

    def clear_mark(self) -> int:
        """A mark for ``admit`` and ``was_cleared``, to be taken before a lower tier is asked."""
        with self._locked.open() as books:
            return books.clears.now

    def was_cleared(self, model: ModelIdentity, clear_mark: int) -> bool:
        """Whether ``model`` was cleared since ``clear_mark``, a mark."""
        with self._locked.open() as books:
            return books.clears.is_outdated(clear_mark, model)

    def clear(self, model: ModelIdentity | None = None) -> None:
        with self._locked.open() as books:
            books.clears.clear(model)
            cleared = [
                segment_id
                for segment_id, segment in books.segments.items()
                if model is None or segment.manifest.model.fingerprint == model.fingerprint
            ]
            books.leaving.update(cleared)
        for first in range(0, len(cleared), MAX_VISITED):
            time.sleep(LOCK_PAUSE_S)
            with self._locked.open() as books:
                for segment_id in cleared[first : first + MAX_VISITED]:
                    segment = books.segments.get(segment_id)
                    if segment is not None:
                        books.remove(segment)

    def close(self) -> None:
        self._locked.close()

    # Views

    def stats(self) -> StoreStats:
        with self._locked.open() as books:
            return StoreStats(
                capacity_bytes=books.arena.capacity_bytes,
                used_bytes=books.arena.used_bytes,
                free_bytes=books.arena.free_bytes,
                largest_free_bytes=books.arena.space.largest,
                num_free_ranges=books.arena.space.num_ranges,
                stored_bytes=books.stored_bytes,
                stored_tokens=books.stored_tokens,
                num_segments=len(books.segments) - books.num_fast_copies,
                num_pages=books.index.num_pages,
                num_leases=len(books.leases),
                num_reservations=len(books.pending),
                pinned_bytes=books.pins.pinned_bytes,
                fast_copy_bytes=books.fast_copy_bytes,
                tier_hit_pages={DRAM_TIER: books.counters.hit_pages},
                **vars(books.counters),
            )

    def list_segments(self) -> list[SegmentInfo]:
        with self._locked.open() as books:
            return [_info_of(books, segment) for segment in books.segments.values()]

    def inspect(self, segment_id: int) -> SegmentDetails | None:
        with self._locked.open() as books:
            segment = books.segments.get(segment_id)
            if segment is None:
                return None
            manifest = segment.manifest
            return SegmentDetails(
                info=_info_of(books, segment),
                page_size=manifest.model.page_size,
                layer_first_token=manifest.layer_first_token,
                layer_num_bytes=manifest.layer_num_bytes,
                checksums=segment.checksums,
            )

    def manifest_of(self, segment_id: int) -> SegmentManifest | None:
        """The manifest of an indexed segment; None if it has gone."""
        with self._locked.open() as books:
            segment = books.segments.get(segment_id)
            return segment.manifest if segment is not None else None

    def _quarantine(self, segment: StoredSegment) -> bool:
        with self._locked.open() as books:
            return books.quarantine(segment)


def _grant(books: DramBooks, lease_id: int, runs: Sequence[PageRun[StoredSegment]]) -> None:
    """Pin runs under a lease."""
    for run in runs:
        run.segment.num_leases += 1
    books.pin(run.segment for run in runs)
    books.leases[lease_id] = tuple(runs)


def _slices(runs: Sequence[PageRun[StoredSegment]], *, is_fetched: bool = False) -> tuple[SegmentSlice, ...]:
    return tuple(run.segment.pages(run.first_page, run.end_page, is_fetched=is_fetched) for run in runs)


def _num_pinned(books: DramBooks, model: ModelIdentity, page_keys: Sequence[str]) -> int:
    """How many of the pages lie in pinned segments."""
    holders = books.index.holders_of(model, page_keys)
    return sum(books.pins.remaining_s(segment.segment_id) > 0 for segment in holders)


def _info_of(books: DramBooks, segment: StoredSegment) -> SegmentInfo:
    return SegmentInfo.of(
        segment.segment_id,
        segment.manifest,
        DRAM_TIER,
        num_leases=segment.num_leases,
        idle_s=books.clock() - segment.last_used_s,
        pinned_s=books.pins.remaining_s(segment.segment_id),
        is_fast_copy=segment.is_fast_copy,
    )
