"""Space for segments that are being written: reserve, then commit or abort."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np
import orjson

from krul_backend.errors import ManifestError
from krul_backend.segment import SegmentManifest, check_codec_params_num_bytes
from krul_backend.tiers.common.hashing import checked_checksums
from krul_backend.tiers.common.interface import Reservation, Span
from krul_backend.tiers.dram.allocation import Allocator, Extents
from krul_backend.tiers.dram.dram_books import DramBooks, PendingReservation
from krul_backend.tiers.dram.locked_books import LockedBooks
from krul_backend.tiers.dram.stored_segment import StoredSegment, block_in


class Reservations:
    """``KVStore.reserve``, ``commit`` and ``abort``. Thread-safe."""

    def __init__(self, locked: LockedBooks, allocator: Allocator) -> None:
        self._locked = locked
        self._allocator = allocator

    def reserve(self, layer_num_bytes: Sequence[int], tenant: str) -> Reservation | None:
        sizes = tuple(layer_num_bytes)
        if not sizes or any(num_bytes < 0 for num_bytes in sizes):
            raise ValueError(f"a reservation needs blocks, of no fewer than 0 bytes each, got {sizes}")

        def use(books: DramBooks, extents: Extents) -> Reservation:
            blocks = tuple(block_in(books.arena, extent) for extent in extents)
            spans = (
                Span(0 if extent is None else extent.offset, num_bytes)
                for extent, num_bytes in zip(extents, sizes, strict=True)
            )
            reservation = Reservation(self._locked.next_id(), blocks, tuple(spans))
            pending = PendingReservation(reservation, extents, tenant, books.clears.now)
            books.pending[reservation.reservation_id] = pending
            return reservation

        return self._allocator.take(sizes, tenant, use)

    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[int]) -> int:
        with self._locked.open() as books:
            pending = _settle(books, reservation)
            try:
                manifest = _checked_manifest(pending.reservation, manifest)
                checksums = checked_checksums(checksums, len(pending.extents))
            except BaseException:
                books.give(pending.extents, pending.tenant)
                raise
            segment = StoredSegment(
                segment_id=self._locked.next_id(),
                manifest=manifest,
                extents=pending.extents,
                blocks=pending.reservation.blocks,
                checksums=checksums,
                last_used_s=books.clock(),
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
        with self._locked.open_unless_closed() as books:
            if books is not None:
                pending = _settle(books, reservation)
                books.give(pending.extents, pending.tenant)


def _settle(books: DramBooks, reservation: Reservation) -> PendingReservation:
    """Take a reservation off the books; its blocks become read-only for the holder."""
    pending = books.pending.pop(reservation.reservation_id, None)
    if pending is None:
        raise KeyError(f"reservation {reservation.reservation_id} is unknown, committed or aborted")
    for block in pending.reservation.blocks:
        block.flags.writeable = False
    return pending


def _checked_manifest(reservation: Reservation, manifest: SegmentManifest) -> SegmentManifest:
    """A copy of the manifest that the caller cannot change any more: its token ids confirm later hits."""
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
