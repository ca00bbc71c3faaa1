"""The DRAM tier: a KV store in this process's memory."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import orjson

from krul_backend.errors import ManifestError
from krul_backend.planner.costs import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, check_codec_params_num_bytes
from krul_backend.tiers.common.arena import Extent
from krul_backend.tiers.common.eviction import EvictionPolicy
from krul_backend.tiers.common.hashing import checked_checksums
from krul_backend.tiers.common.interface import (
    DRAM_TIER,
    Reservation,
    SegmentDetails,
    SegmentInfo,
    Span,
    StoreStats,
)
from krul_backend.tiers.dram.dram_books import DramBooks
from krul_backend.tiers.dram.host_base import Extents
from krul_backend.tiers.dram.host_leases import HostLeases
from krul_backend.tiers.dram.host_upkeep import HostUpkeep
from krul_backend.tiers.dram.stored_segment import StoredSegment, block_in


@dataclass(frozen=True)
class _Pending:
    """A reservation that is neither committed nor aborted. ``began_at`` dates it against ``clear``."""

    reservation: Reservation
    extents: tuple[Extent | None, ...]
    tenant: str
    began_at: int


class HostStore(HostLeases, HostUpkeep):
    """Segments in one DRAM arena: an extent per layer block, an index by page keys, whole segments evicted.

    One lock guards all bookkeeping (``DramBooks``) and is held for bookkeeping only: trims and verifications
    read blocks outside it. A pinned segment is neither evicted nor, unless the pin is the trim's own,
    trimmed.

    It has no lower tier itself, but what a ``TieredStore`` over it needs: segments of lower tiers are let in
    (``admit``), and segments are held while they are copied to lower tiers (``hold``).

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
        clock: Callable[[], float] = time.monotonic,
        tenant_quota: float = 1.0,
    ) -> None:
        super().__init__(capacity_bytes, policy, clock, tenant_quota)
        self._pending: dict[int, _Pending] = {}

    @property
    def buffer(self) -> npt.NDArray[np.uint8]:
        """The arena, uint8 ``[capacity_bytes]``, for registering it with CUDA. Never write through it."""
        with self._lock:
            return self._books.arena.buffer

    def fileno(self) -> int:
        """Descriptor of the arena's memory file; the store keeps it open until it is closed."""
        with self._lock:
            return self._books.arena.fileno()

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._lock:
            return self._books.index.find_missing(model, page_keys)

    def reserve(self, layer_num_bytes: Sequence[int], tenant: str = "") -> Reservation | None:
        sizes = tuple(layer_num_bytes)
        if not sizes or any(num_bytes < 0 for num_bytes in sizes):
            raise ValueError(f"a reservation needs blocks, of no fewer than 0 bytes each, got {sizes}")

        def use(books: DramBooks, extents: Extents) -> Reservation:
            blocks = tuple(block_in(books.arena, extent) for extent in extents)
            spans = (
                Span(0 if extent is None else extent.offset, num_bytes)
                for extent, num_bytes in zip(extents, sizes, strict=True)
            )
            reservation = Reservation(self.next_id(), blocks, tuple(spans))
            pending = _Pending(reservation, extents, tenant, books.clears.now)
            self._pending[reservation.reservation_id] = pending
            return reservation

        return self._take(sizes, tenant, use)

    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[int]) -> int:
        with self._lock:
            books = self._books
            pending = self._settle(reservation)
            try:
                manifest = _checked_manifest(pending.reservation, manifest)
                checksums = checked_checksums(checksums, len(pending.extents))
            except BaseException:
                books.give(pending.extents, pending.tenant)
                raise
            segment = StoredSegment(
                segment_id=self.next_id(),
                manifest=manifest,
                extents=pending.extents,
                blocks=pending.reservation.blocks,
                checksums=checksums,
                last_used_s=self._clock(),
            )
            books.move_charge(segment.taken_bytes, pending.tenant, manifest.tenant)
            is_outdated = books.clears.is_outdated(pending.began_at, manifest.model)
            if not is_outdated and books.publish(segment):
                books.counters.committed_segments += 1
            else:
                books.give(segment.all_extents, manifest.tenant)
            # A segment that was dropped was still a use of the copies that were there before.
            books.touch(books.index.path_to(segment))
            return segment.segment_id

    def abort(self, reservation: Reservation) -> None:
        with self._lock:
            if self._open_books is not None:
                pending = self._settle(reservation)
                self._open_books.give(pending.extents, pending.tenant)

    def prefetch(self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds) -> int:
        """0: there is nothing below."""
        return 0

    def tier_costs(self) -> Mapping[str, TierCost]:
        return {}

    def flush(self, timeout_s: float) -> bool:
        """True: memory is as durable as it gets."""
        return True

    def stats(self) -> StoreStats:
        with self._lock:
            books = self._books
            return StoreStats(
                capacity_bytes=books.arena.capacity_bytes,
                used_bytes=books.arena.used_bytes,
                free_bytes=books.arena.free_bytes,
                largest_free_bytes=books.arena.largest_free,
                num_free_ranges=books.arena.num_free_ranges,
                stored_bytes=books.stored_bytes,
                stored_tokens=books.stored_tokens,
                num_segments=len(books.segments),
                num_pages=books.index.num_pages,
                num_leases=len(self._leases),
                num_reservations=len(self._pending),
                pinned_bytes=books.pins.pinned_bytes,
                tier_hit_pages={DRAM_TIER: books.counters.hit_pages},
                fetched_segments=0,
                failed_fetches=0,
                tiers=(),
                **vars(books.counters),
            )

    def list_segments(self) -> list[SegmentInfo]:
        with self._lock:
            books = self._books
            return [self._info_of(segment) for segment in books.segments.values()]

    def inspect(self, segment_id: int) -> SegmentDetails | None:
        with self._lock:
            segment = self._books.segments.get(segment_id)
            if segment is None:
                return None
            manifest = segment.manifest
            return SegmentDetails(
                info=self._info_of(segment),
                page_size=manifest.model.page_size,
                parent_key=manifest.parent_key,
                last_page_key=manifest.page_keys[-1],
                layer_first_token=manifest.layer_first_token,
                layer_num_bytes=manifest.layer_num_bytes,
                checksums=segment.checksums,
            )

    def manifests(self) -> dict[int, SegmentManifest]:
        """Those of all indexed segments, by segment id."""
        with self._lock:
            return {segment_id: held.manifest for segment_id, held in self._books.segments.items()}

    def clear(self, model: ModelIdentity | None = None) -> None:
        with self._lock:
            books = self._books
            books.clears.clear(model)
            for segment in list(books.segments.values()):
                if model is None or segment.manifest.model.fingerprint == model.fingerprint:
                    books.remove(segment)

    def close(self) -> None:
        with self._lock:
            if self._open_books is None:
                return
            for segment in self._open_books.segments.values():
                segment.is_indexed = False
            self._fail_arrivals()
            # Dropped, not unmapped: a copy thread may still hold views, and they keep the mapping alive.
            self._open_books = None
            self._pending.clear()
            self._leases.clear()

    def _info_of(self, segment: StoredSegment) -> SegmentInfo:
        """With the lock held."""
        manifest = segment.manifest
        return SegmentInfo.of(
            segment.segment_id,
            manifest,
            DRAM_TIER,
            num_leases=segment.num_leases,
            idle_s=self._clock() - segment.last_used_s,
            pinned_s=self._books.pins.remaining_s(segment.segment_id),
        )

    def _settle(self, reservation: Reservation) -> _Pending:
        """Take a reservation off the books; its holder loses the right to write."""
        pending = self._pending.pop(reservation.reservation_id, None)
        if pending is None:
            raise KeyError(f"reservation {reservation.reservation_id} is unknown, committed or aborted")
        for block in pending.reservation.blocks:
            block.flags.writeable = False
        return pending


def _checked_manifest(reservation: Reservation, manifest: SegmentManifest) -> SegmentManifest:
    """The manifest with token ids that nobody else can change: hits are confirmed by them for long."""
    given = tuple(manifest.layer_num_bytes)
    reserved = tuple(block.nbytes for block in reservation.blocks)
    if given != reserved:
        raise ManifestError(f"the manifest's layer blocks {given} differ from the reserved {reserved}")
    try:
        check_codec_params_num_bytes(len(orjson.dumps(manifest.codec_params)))
    except orjson.JSONEncodeError as error:
        raise ManifestError(f"codec parameters that JSON has no words for: {error}") from error
    token_ids = np.array(manifest.token_ids, dtype=np.int32)
    token_ids.flags.writeable = False
    return dataclasses.replace(
        manifest,
        page_keys=tuple(manifest.page_keys),
        token_ids=token_ids,
        layer_num_bytes=given,
        layer_first_token=tuple(manifest.layer_first_token),
    )
