"""A KV store in this process's memory."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from krul_backend.errors import ManifestError, StoreClosedError
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.store.eviction import EvictionPolicy, LruPolicy
from krul_backend.store.eviction_plan import plan_eviction
from krul_backend.store.interface import (
    Block,
    KVStore,
    Lease,
    PathSegment,
    Reservation,
    SegmentInfo,
    SegmentSlice,
    StoreStats,
)
from krul_backend.store.page_index import PageIndex, PageRun
from krul_backend.store.stored_segment import StoredSegment, block_checksum
from krul_backend.store.trimming import plan_trim
from krul_backend.tiers.arena import DramArena, Extent

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class _Pending:
    """A reservation that is neither committed nor aborted. ``clear_count`` dates it against ``clear``."""

    reservation: Reservation
    extents: tuple[Extent | None, ...]
    clear_count: int


@dataclass
class _Counters:
    """Events since the store was made, under the names that ``StoreStats`` gives them."""

    committed_segments: int = 0
    evicted_segments: int = 0
    evicted_bytes: int = 0
    trimmed_segments: int = 0
    trimmed_bytes: int = 0
    rejected_reservations: int = 0
    corrupted_segments: int = 0
    token_mismatches: int = 0
    lookups: int = 0
    hit_pages: int = 0
    missed_pages: int = 0


class HostStore(KVStore):
    """Segments in one DRAM arena: an extent per layer block, an index by page keys, whole segments evicted.

    One lock guards all bookkeeping and is held for bookkeeping only. Checksums are computed outside it, on
    bytes that cannot be reused meanwhile: those of a reservation taken off the books by its commit, or those
    of a pinned segment. A pinned segment is neither evicted nor, unless the pin is the trim's own, trimmed.

    The life of a segment's extents (a trim frees the front of them while they are indexed)::

        reserve -> commit -> indexed --(evict)--------------------------------> free
                |                     \\-(quarantine, clear)-> pinned ? zombie -> free at the last unpin
                \\-> abort, or a commit that is dropped -----------------------> free

    Views handed out stay mapped as long as they are referenced, even after ``close``; what they show after
    their release, abort or eviction is undefined.

    Args:
        capacity_bytes: size of the arena in bytes.
        policy: order of eviction, owned by the store from here on; least recently used first if not given.
        clock: seconds, monotonic; for ``SegmentInfo.idle_s``.
    """

    def __init__(
        self,
        capacity_bytes: int,
        policy: EvictionPolicy | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._lock = threading.Lock()
        self._arena: DramArena | None = DramArena(capacity_bytes)
        self._policy = policy if policy is not None else LruPolicy()
        self._clock = clock
        self._index: PageIndex[StoredSegment] = PageIndex()
        self._segments: dict[int, StoredSegment] = {}
        self._pending: dict[int, _Pending] = {}
        self._leases: dict[int, tuple[StoredSegment, ...]] = {}
        self._ids = itertools.count(1)
        self._counters = _Counters()
        self._clear_count = 0
        self._cleared_all_at = 0
        self._cleared_model_at: dict[str, int] = {}

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The arena, uint8 ``[capacity_bytes]``, for registering it with CUDA. Never write through it."""
        with self._lock:
            return self._open_arena().buffer

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._lock:
            self._open_arena()
            return self._index.find_missing(model, page_keys)

    def reserve(self, layer_num_bytes: Sequence[int]) -> Reservation | None:
        sizes = tuple(layer_num_bytes)
        if not sizes or any(num_bytes < 0 for num_bytes in sizes):
            raise ValueError(f"a reservation needs blocks, of no fewer than 0 bytes each, got {sizes}")
        wanted = [num_bytes for num_bytes in sizes if num_bytes]
        with self._lock:
            arena = self._open_arena()
            taken = arena.allocate_all(wanted)
            if taken is None:
                victims = plan_eviction(arena, wanted, self._idle_segments())
                if victims is None:
                    self._counters.rejected_reservations += 1
                    return None
                for victim in victims:
                    self._remove(victim)
                    self._counters.evicted_segments += 1
                    self._counters.evicted_bytes += victim.manifest.num_bytes
                taken = arena.allocate_all(wanted)
                assert taken is not None, f"{sizes} fitted in the trial but not in {arena.free_bytes} bytes"
            of_layers = iter(taken)
            extents = tuple(next(of_layers) if num_bytes else None for num_bytes in sizes)
            reservation = Reservation(next(self._ids), tuple(_block_in(arena, extent) for extent in extents))
            self._pending[reservation.reservation_id] = _Pending(reservation, extents, self._clear_count)
            return reservation

    def commit(self, reservation: Reservation, manifest: SegmentManifest) -> int:
        with self._lock:
            self._open_arena()
            pending = self._settle(reservation)
        # [settled, published) the bytes belong to this call alone: neither abort, nor eviction, nor clear
        # knows them any more, so they can be hashed without the lock.
        try:
            manifest = _checked_manifest(pending, manifest)
            checksums = tuple(block_checksum(block) for block in pending.reservation.blocks)
        except BaseException:
            with self._lock:
                self._free(pending.extents)
            raise
        with self._lock:
            self._open_arena()
            segment = StoredSegment(
                segment_id=next(self._ids),
                manifest=manifest,
                extents=pending.extents,
                blocks=pending.reservation.blocks,
                checksums=checksums,
                last_used_s=self._clock(),
            )
            if self._was_cleared_since(pending, manifest.model):
                self._free(segment.extents)
            else:
                self._publish(segment)
            return segment.segment_id

    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            if self._arena is not None:
                self._free(self._settle(reservation).extents)

    def lease(self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds) -> Lease | None:
        keys = tuple(page_keys)
        token_ids = np.asarray(token_ids)
        if token_ids.shape != (len(keys) * model.page_size,):
            raise ValueError(
                f"{len(keys)} pages of {model.page_size} tokens need token ids of shape "
                f"({len(keys) * model.page_size},), got {token_ids.shape}"
            )
        with self._lock:
            self._open_arena()
            match = self._index.match_prefix(model, keys, token_ids)
            self._counters.lookups += 1
            self._counters.token_mismatches += match.is_contradicted
            self._pin(run.segment for run in match.runs)
        if match.is_contradicted:
            logger.warning(
                "a stored page has the key, but not the tokens or the position, of a request's page"
            )
        try:
            num_intact = _num_leading_intact(match.runs)
        except BaseException:
            with self._lock:
                self._unpin(run.segment for run in match.runs)
            raise
        intact, rest = match.runs[:num_intact], match.runs[num_intact:]
        with self._lock:
            self._open_arena()
            if rest:
                self._quarantine(rest[0].segment)
            self._unpin(run.segment for run in rest)
            num_pages = sum(run.end_page - run.first_page for run in intact)
            self._counters.hit_pages += num_pages
            self._counters.missed_pages += len(keys) - num_pages
            return self._grant(intact, num_pages) if intact else None

    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        with self._lock:
            self._open_arena()
            segments = self._index.segments_of(model, page_keys)
            return [PathSegment(segment.segment_id, segment.manifest) for segment in segments]

    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        with self._lock:
            self._open_arena()
            segment = self._segments.get(segment_id)
            if segment is None:
                return 0
            trim = plan_trim(segment.manifest, layer_first_token, layer_num_bytes)
            if trim is None or segment.num_pins or self._index.is_shared(segment):
                return 0
            self._pin((segment,))
        # [pinned, applied) the blocks are only read. Whoever pins the segment meanwhile is handed the old
        # blocks, so these stay: the trim gives up. Whoever comes after it finds the new ones.
        try:
            checksums = trim.checksums(segment)
        except BaseException:
            with self._lock:
                self._unpin((segment,))
            raise
        with self._lock:
            arena = self._open_arena()
            has_other_pins = segment.num_pins > 1
            num_bytes = 0
            if checksums is None:
                self._quarantine(segment)
            elif segment.is_indexed and not has_other_pins and not self._index.is_shared(segment):
                trim.apply(segment, arena, checksums)
                num_bytes = trim.num_bytes
                self._counters.trimmed_segments += 1
                self._counters.trimmed_bytes += num_bytes
            self._unpin((segment,))
            return num_bytes

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self._arena is None:
                return
            segments = self._leases.pop(lease.lease_id)
            for segment in segments:
                segment.num_leases -= 1
            self._unpin(segments)

    def stats(self) -> StoreStats:
        with self._lock:
            arena = self._open_arena()
            return StoreStats(
                capacity_bytes=arena.capacity_bytes,
                used_bytes=arena.used_bytes,
                free_bytes=arena.free_bytes,
                stored_bytes=sum(segment.manifest.num_bytes for segment in self._segments.values()),
                stored_tokens=sum(segment.manifest.num_tokens for segment in self._segments.values()),
                num_segments=len(self._segments),
                num_pages=self._index.num_pages,
                num_leases=len(self._leases),
                num_reservations=len(self._pending),
                **vars(self._counters),
            )

    def list_segments(self) -> list[SegmentInfo]:
        with self._lock:
            self._open_arena()
            now_s = self._clock()
            return [
                SegmentInfo(
                    segment_id=segment.segment_id,
                    model=segment.manifest.model.name,
                    fingerprint=segment.manifest.model.fingerprint,
                    start_token=segment.manifest.start_token,
                    num_tokens=segment.manifest.num_tokens,
                    num_bytes=segment.manifest.num_bytes,
                    codec=segment.manifest.codec,
                    codec_params=segment.manifest.codec_params,
                    num_leases=segment.num_leases,
                    idle_s=now_s - segment.last_used_s,
                )
                for segment in self._segments.values()
            ]

    def verify(self) -> list[int]:
        with self._lock:
            self._open_arena()
            segments = list(self._segments.values())
        bad_ids: list[int] = []
        for segment in segments:
            # One at a time: a pinned segment cannot be evicted, and a whole store takes seconds to read.
            with self._lock:
                self._open_arena()
                if not segment.is_indexed:
                    continue
                self._pin((segment,))
            is_intact = True
            try:
                is_intact = segment.is_intact()
            finally:
                with self._lock:
                    if not is_intact and self._quarantine(segment):
                        bad_ids.append(segment.segment_id)
                    self._unpin((segment,))
        return bad_ids

    def clear(self, model: ModelIdentity | None = None) -> None:
        with self._lock:
            self._open_arena()
            self._clear_count += 1
            if model is None:
                self._cleared_all_at = self._clear_count
            else:
                self._cleared_model_at[model.fingerprint] = self._clear_count
            for segment in list(self._segments.values()):
                if model is None or segment.manifest.model.fingerprint == model.fingerprint:
                    self._remove(segment)

    def close(self) -> None:
        with self._lock:
            # Dropped, not unmapped: a copy thread may still hold views, and they keep the mapping alive.
            self._arena = None
            self._index = PageIndex()
            for segment in self._segments.values():
                segment.is_indexed = False
            self._segments.clear()
            self._pending.clear()
            self._leases.clear()

    # Everything below is called with the lock held.

    def _open_arena(self) -> DramArena:
        if self._arena is None:
            raise StoreClosedError("the KV store was closed")
        return self._arena

    def _idle_segments(self) -> Iterator[StoredSegment]:
        """Segments that may be evicted, the first to leave first."""
        segments = (self._segments[segment_id] for segment_id in self._policy.victims())
        return (segment for segment in segments if segment.num_pins == 0)

    def _settle(self, reservation: Reservation) -> _Pending:
        """Take a reservation off the books; its holder loses the right to write."""
        pending = self._pending.pop(reservation.reservation_id, None)
        if pending is None:
            raise KeyError(f"reservation {reservation.reservation_id} is unknown, committed or aborted")
        for block in pending.reservation.blocks:
            block.flags.writeable = False
        return pending

    def _publish(self, segment: StoredSegment) -> None:
        """Index a segment, or drop it when every page of it is indexed already."""
        if self._index.add(segment):
            segment.is_indexed = True
            self._segments[segment.segment_id] = segment
            self._counters.committed_segments += 1
        else:
            self._free(segment.extents)
        # A dropped segment was still a use of the copies that were there before.
        self._touch(self._index.path_to(segment))

    def _grant(self, runs: Sequence[PageRun[StoredSegment]], num_pages: int) -> Lease:
        """Turn pinned and verified runs into a lease; the pins become the lease's."""
        segments = tuple(run.segment for run in runs)
        for segment in segments:
            segment.num_leases += 1
        self._touch([*self._index.path_to(segments[0])[:-1], *segments])
        slices = tuple(
            SegmentSlice(
                segment_id=run.segment.segment_id,
                manifest=run.segment.manifest,
                blocks=run.segment.blocks,
                first_page=run.first_page,
                end_page=run.end_page,
            )
            for run in runs
        )
        lease = Lease(next(self._ids), num_pages, slices)
        self._leases[lease.lease_id] = segments
        return lease

    def _touch(self, path: Sequence[StoredSegment]) -> None:
        # A segment can leave the index while a lease verifies it: the policy must not get it back.
        indexed = [segment for segment in path if segment.is_indexed]
        now_s = self._clock()
        for segment in indexed:
            segment.last_used_s = now_s
        self._policy.touch([segment.segment_id for segment in indexed])

    def _quarantine(self, segment: StoredSegment) -> bool:
        """Take a damaged segment out, unless that happened before. Returns whether it was this call."""
        if not segment.is_indexed:
            return False
        self._remove(segment)
        self._counters.corrupted_segments += 1
        logger.error("segment %d has a wrong checksum: taken out of the index", segment.segment_id)
        return True

    def _remove(self, segment: StoredSegment) -> None:
        """Take a segment out of the index; free it now, or at its last unpin."""
        self._index.remove(segment)
        self._policy.remove(segment.segment_id)
        del self._segments[segment.segment_id]
        segment.is_indexed = False
        if segment.num_pins == 0:
            self._free(segment.extents)

    def _pin(self, segments: Iterable[StoredSegment]) -> None:
        for segment in segments:
            segment.num_pins += 1

    def _unpin(self, segments: Iterable[StoredSegment]) -> None:
        for segment in segments:
            segment.num_pins -= 1
            if segment.num_pins == 0 and not segment.is_indexed:
                self._free(segment.extents)

    def _free(self, extents: Iterable[Extent | None]) -> None:
        if self._arena is not None:
            for extent in extents:
                if extent is not None:
                    self._arena.free(extent)

    def _was_cleared_since(self, pending: _Pending, model: ModelIdentity) -> bool:
        cleared_at = max(self._cleared_all_at, self._cleared_model_at.get(model.fingerprint, 0))
        return pending.clear_count < cleared_at


def _block_in(arena: DramArena, extent: Extent | None) -> Block:
    return np.empty(0, dtype=np.uint8) if extent is None else arena.view(extent)


def _checked_manifest(pending: _Pending, manifest: SegmentManifest) -> SegmentManifest:
    """The manifest with token ids that nobody else can change: hits are confirmed by them for long."""
    given = tuple(manifest.layer_num_bytes)
    reserved = tuple(block.nbytes for block in pending.reservation.blocks)
    if given != reserved:
        raise ManifestError(f"the manifest's layer blocks {given} differ from the reserved {reserved}")
    token_ids = np.array(manifest.token_ids, dtype=np.int32)
    token_ids.flags.writeable = False
    return dataclasses.replace(
        manifest,
        page_keys=tuple(manifest.page_keys),
        token_ids=token_ids,
        layer_num_bytes=given,
        layer_first_token=tuple(manifest.layer_first_token),
    )


def _num_leading_intact(runs: Sequence[PageRun[StoredSegment]]) -> int:
    """How many runs come before the first one whose segment is damaged."""
    for i, run in enumerate(runs):
        if not run.segment.is_intact():
            return i
    return len(runs)
