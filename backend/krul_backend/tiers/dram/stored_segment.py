"""A segment as the DRAM tier keeps it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from krul_backend.errors import TierReadError
from krul_backend.segment import SegmentManifest
from krul_backend.tiers.common.eviction import value_of
from krul_backend.tiers.common.interface import (
    DRAM_TIER,
    FAILED,
    Block,
    Checksums,
    LayerStatus,
    SegmentSlice,
    Span,
    block_checksum,
    checksums_of,
)
from krul_backend.tiers.dram.arena import Allocation, Arena


@dataclass(eq=False)
class StoredSegment:
    """A segment's blocks, and where they lie. That is freed when it is neither indexed nor pinned.

    The ``allocation`` has a block per layer, and after them, of a segment that came from a lower tier, one
    for the flags of its ``status``. ``num_pins`` counts who reads or writes the blocks:
    leases, arrivals, copies to lower tiers and running verifications; ``num_leases`` counts the leases among
    them. ``last_used_s`` is on the store's clock.

    ``checksums[l]`` are those of what was written into block ``l``; damage shows as a difference.

    Only a trim changes ``manifest``, ``allocation``, ``blocks`` and ``checksums``: all at once, under the
    store's lock, and only if no pin is on the segment. So whoever has pinned a segment can read these fields
    without the lock.

    ``is_fast_copy``: see ``KVStore.reserve``. ``is_prefetched``: it was read ahead of a load, and no
    lookup has found it here since, and no load has taken it.

    ``status`` is set while layers arrive from ``origin``, a lower tier. ``lower_load_s``: seconds to read
    the segment from the fastest lower tier that is known to hold it, None if there is none.
    """

    segment_id: int
    manifest: SegmentManifest
    allocation: Allocation
    blocks: tuple[Block, ...]
    checksums: Checksums
    last_used_s: float
    is_fast_copy: bool = False
    is_prefetched: bool = False
    origin: str = DRAM_TIER
    status: LayerStatus | None = None
    lower_load_s: float | None = None
    is_indexed: bool = False
    num_pins: int = 0
    num_leases: int = 0

    @property
    def taken_bytes(self) -> int:
        """Bytes in the arena, alignment included."""
        return self.allocation.taken_bytes

    @property
    def spans(self) -> tuple[Span, ...]:
        """The bytes of the arena in which each layer's block lies."""
        return self.allocation.spans[: len(self.blocks)]

    @property
    def status_span(self) -> Span | None:
        """The bytes of the arena that hold the flags of ``status``, one per layer."""
        spans = self.allocation.spans
        return spans[-1] if len(spans) > len(self.blocks) else None

    @property
    def start_token(self) -> int:
        return self.manifest.start_token

    @property
    def num_tokens(self) -> int:
        return self.manifest.num_tokens

    @property
    def restore_s(self) -> float:
        """Seconds that a restore saves by finding it in DRAM; 0 if not known.

        Otherwise it would be computed, or read from a lower tier: the faster of the two counts.
        """
        known = [seconds for seconds in (self.manifest.recompute_s, self.lower_load_s) if seconds]
        return min(known, default=0.0)

    @cached_property
    def value(self) -> float:
        """See ``value_of``; kept until something that it depends on changes."""
        return value_of(self.restore_s, self.num_tokens, self.taken_bytes)

    def note_lower_load(self, seconds: float) -> None:
        """Note that a lower tier holds it, too, and reads it in ``seconds``. Call it with the lock held."""
        self.lower_load_s = seconds if self.lower_load_s is None else min(self.lower_load_s, seconds)
        self.__dict__.pop("value", None)

    def pages(self, first_page: int, end_page: int, *, is_fetched: bool) -> SegmentSlice:
        """Pages ``[first_page, end_page)`` as a lease on them shows them.

        While the segment arrives, they belong to the tier that it comes from, and have blocks only if the
        lease ``is_fetched``. Call it with the segment pinned.

        Raises:
            TierReadError: fetched pages of a segment whose arrival has failed.
        """
        # Read once: an arrival may end at any moment.
        status = self.status
        if is_fetched and status is not None and (status.flags == FAILED).any():
            raise TierReadError(f"segment {self.segment_id} could not be read from {self.origin}")
        has_blocks = is_fetched or status is None
        return SegmentSlice(
            segment_id=self.segment_id,
            header=self.manifest.header,
            tier=DRAM_TIER if status is None else self.origin,
            blocks=self.blocks if has_blocks else (),
            spans=self.spans if has_blocks else (),
            checksums=self.checksums,
            first_page=first_page,
            end_page=end_page,
            status=status if has_blocks else None,
            status_span=self.status_span if has_blocks and status is not None else None,
            is_fast_copy=self.is_fast_copy,
        )

    def trim(self, manifest: SegmentManifest, arena: Arena) -> None:
        """Keep of each block what ``manifest`` says, a trimmed one, and free the bytes before.

        Call it with the lock held, and with no pin on the segment.
        """
        sizes = manifest.layer_num_bytes
        flags = (span.num_bytes for span in self.allocation.spans[len(sizes) :])
        self.allocation = arena.keep_ends(self.allocation, (*sizes, *flags))
        self.blocks = tuple(
            block[block.nbytes - size :] for block, size in zip(self.blocks, sizes, strict=True)
        )
        self.checksums = checksums_of(manifest, self.checksums)
        self.manifest = manifest
        self.__dict__.pop("value", None)

    def num_damaged(self) -> int:
        """Count the landed blocks whose checksums differ from the committed ones.

        Call it with the segment pinned, and outside the lock.
        """
        status = self.status
        return sum(
            block_checksum(block, self.manifest.range_bytes) != checksum
            for layer, (block, checksum) in enumerate(zip(self.blocks, self.checksums, strict=True))
            if status is None or status.has_landed(layer)
        )
