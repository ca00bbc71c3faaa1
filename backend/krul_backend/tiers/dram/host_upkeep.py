"""Changing and checking what the DRAM tier holds: trims, damage, pins."""

from __future__ import annotations

import math
from collections.abc import Sequence

from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.interface import DamageReason, DamageReport, PathSegment
from krul_backend.tiers.dram.host_base import HostBase
from krul_backend.tiers.dram.trimming import plan_trim


class HostUpkeep(HostBase):
    """See ``HostStore``."""

    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        with self._lock:
            segments = self._books.index.segments_of(model, page_keys)
            return [PathSegment(segment.segment_id, segment.manifest.header) for segment in segments]

    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        with self._lock:
            books = self._books
            segment = books.segments.get(segment_id)
            if segment is None:
                return 0
            trim = plan_trim(segment.manifest, layer_first_token, layer_num_bytes)
            if trim is None or segment.num_pins or books.index.is_shared(segment):
                return 0
            segment.num_pins += 1
        # [pinned, applied) the blocks are only read. Whoever pins the segment meanwhile is handed the old
        # blocks, so these stay: the trim gives up. Whoever comes after it finds the new ones.
        try:
            checksums = trim.checksums(segment)
            with self._lock:
                books = self._books
                if checksums is None:
                    books.quarantine(segment)
                    return 0
                if not segment.is_indexed or segment.num_pins > 1 or books.index.is_shared(segment):
                    return 0
                taken_before = segment.taken_bytes
                trim.apply(segment, books.arena, checksums)
                books.note_trim(segment, taken_before, trim.num_bytes)
                return trim.num_bytes
        finally:
            self.unhold(segment)

    # Damage

    def report_damage(self, segment_id: int, reason: DamageReason = "checksum") -> bool:
        if reason == "undecodable":
            manifest = self.manifest_of(segment_id)
            if manifest is not None:
                self.discard(manifest)
            return manifest is not None
        with self._held(segment_id) as segment:
            if segment is None or not segment.num_damaged():
                return False
            with self._lock:
                return self._books.quarantine(segment)

    def manifest_of(self, segment_id: int) -> SegmentManifest | None:
        """The manifest of an indexed segment; None if it has gone."""
        with self._lock:
            segment = self._books.segments.get(segment_id)
            return segment.manifest if segment is not None else None

    def discard(self, manifest: SegmentManifest) -> None:
        """Take out of the index what holds a page of a segment and is encoded like it."""
        with self._lock:
            for segment in self._books.index.segments_of(manifest.model, manifest.page_keys):
                if segment.manifest.shares_encoded_pages(manifest):
                    self._books.remove(segment)

    def verify(self) -> DamageReport:
        with self._lock:
            segment_ids = list(self._books.segments)
        num_blocks = num_bytes = 0
        bad_ids: list[int] = []
        for segment_id in segment_ids:
            # One at a time: a held segment cannot be evicted, and a whole store takes seconds to read.
            with self._held(segment_id) as segment:
                if segment is None or segment.status is not None:
                    continue
                num_blocks += len(segment.blocks)
                num_bytes += segment.manifest.num_bytes
                if segment.num_damaged():
                    with self._lock:
                        if self._books.quarantine(segment):
                            bad_ids.append(segment_id)
        return DamageReport(num_blocks, num_bytes, tuple(bad_ids))

    # Pins

    def pin(self, model: ModelIdentity, page_keys: Sequence[str], ttl_s: float) -> int:
        if not 0 < ttl_s < math.inf:
            raise ValueError(f"a pin lasts a positive number of seconds, not {ttl_s}")
        with self._lock:
            books = self._books
            for segment in books.index.segments_of(model, page_keys):
                if not books.pins.pin(segment, ttl_s):
                    # What follows is of no use without it.
                    break
            return self._num_pinned(model, page_keys)

    def unpin(self, model: ModelIdentity, page_keys: Sequence[str]) -> int:
        with self._lock:
            num_pages = self._num_pinned(model, page_keys)
            for segment in self._books.index.segments_of(model, page_keys):
                self._books.pins.end(segment.segment_id)
            return num_pages

    def _num_pinned(self, model: ModelIdentity, page_keys: Sequence[str]) -> int:
        """How many of the pages lie in pinned segments. Called with the lock held."""
        books = self._books
        holders = books.index.holders_of(model, page_keys)
        return sum(books.pins.remaining_s(segment.segment_id) > 0 for segment in holders)
