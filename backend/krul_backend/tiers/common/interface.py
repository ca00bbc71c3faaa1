"""The types that stores and tiers hand out: blocks with checksums, leases, statistics, listings."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt

from krul_backend.errors import ManifestError, Refusal, TierReadError
from krul_backend.segment import (
    MIN_RANGE_BYTES,
    SegmentHeader,
    SegmentManifest,
    num_ranges,
    range_bytes_for,
    tail_num_bytes,
)
from krul_backend.tiers.common.range_hashes import CheckedTail, hash_ranges

PENDING, LANDED, FAILED = 0, 1, 2

_POLL_S = 0.0005

Block = npt.NDArray[np.uint8]
"""A writable or read-only view of ``[num_bytes]`` bytes inside the arena, or an array of no bytes."""

Clock = Callable[[], float]
"""Returns seconds that never go back, as ``time.monotonic`` does."""

Checksums = tuple[bytes, ...]
"""The checksums of all ranges of each layer's block: see ``block_checksum``."""

CHECKSUM_BYTES = 8
"""Of one range."""

DRAM_TIER = "dram"

FastCopies = Literal["prefer", "avoid", "skip", "only"]
"""What a lease does with fast copies; see ``KVStore.lease``."""

MAX_FAST_COPY_SHARE = 0.5
"""Share of the arena up to which fast copies may displace other segments, or wait to be encoded."""

DamageReason = Literal["checksum", "undecodable"]
"""Why a segment cannot be used; see ``KVStore.report_damage``."""


class Span(NamedTuple):
    """The bytes ``[offset, offset + num_bytes)`` of the arena, in which a block lies."""

    offset: int
    num_bytes: int


class SegmentTail(NamedTuple):
    """The end of a segment that a load reads: layer ``l`` from token ``layer_first_token[l]`` (a position in
    the conversation) on, which the last ``layer_num_bytes[l]`` bytes of its block hold."""

    layer_first_token: tuple[int, ...]
    layer_num_bytes: tuple[int, ...]

    def with_held(self, header: SegmentHeader) -> SegmentTail:
        """Extend the tail, so that it has no less of any layer than a segment with this header."""
        first_tokens = map(min, self.layer_first_token, header.layer_first_token)
        sizes = map(max, self.layer_num_bytes, header.layer_num_bytes)
        return SegmentTail(tuple(first_tokens), tuple(sizes))


Tails = Sequence[SegmentTail | None]
"""Says for each slice of a lease which end of it is read; None for all that there is."""


class LowerCopy(NamedTuple):
    """Says that a lower tier holds more of a segment than DRAM: of layer ``l`` the tokens from
    ``layer_first_token[l]`` on. Where DRAM holds a layer, both have the same bytes."""

    tier: str
    layer_first_token: tuple[int, ...]


class LayerStatus:
    """Says which layers of a segment have landed in DRAM. One process writes the flags, all may read them.

    ``flags``: uint8 ``[L]`` inside the arena. A flag changes once, from ``PENDING``, after the layer's block
    was written. Memory ordering is not relied on: a reader that sees a flag too early finds a wrong checksum.
    """

    def __init__(self, flags: npt.NDArray[np.uint8]) -> None:
        self.flags = flags

    def fail(self) -> None:
        """Say that layers that have not landed never will. For the process that writes the flags."""
        self.flags[self.flags == PENDING] = FAILED

    def has_landed(self, layer: int) -> bool:
        return bool(self.flags[layer] == LANDED)

    def wait(self, layer: int, timeout_s: float) -> None:
        """Block until a layer has landed. Errors as for ``wait_until``."""
        end_s = time.monotonic() + timeout_s
        self.wait_until(layer, lambda: end_s)

    def wait_until(self, layer: int, deadline_s: Callable[[], float]) -> None:
        """Block until a layer has landed. ``deadline_s()``, on ``time.monotonic``, may move meanwhile.

        Raises:
            TierReadError: it cannot be read, or did not land in time.
        """
        while (flag := self.flags[layer]) == PENDING:
            if time.monotonic() >= deadline_s():
                raise TierReadError(f"layer {layer} did not arrive from its tier in time")
            time.sleep(_POLL_S)
        if flag != LANDED:
            raise TierReadError(f"layer {layer} could not be read from its tier")


@dataclass(frozen=True, eq=False)
class Reservation:
    """Space for one segment that no reader can find yet: one block per layer, of exactly the bytes asked for.

    The holder writes the blocks, then commits or aborts. Until then the bytes belong to the holder.
    ``spans[l]`` is where ``blocks[l]`` lies.
    """

    reservation_id: int
    blocks: tuple[Block, ...]
    spans: tuple[Span, ...]


@dataclass(frozen=True, eq=False)
class SegmentSlice:
    """The pages ``[first_page, end_page)`` of one stored segment, pinned by a lease.

    ``blocks[l]`` is all that is stored of layer ``l``: the segment's tokens from
    ``header.layer_first_token[l]`` on, which may lack some of these pages. The codec knows where in the block
    a page lies. ``spans[l]`` is where the block lies. Neither changes while leased. ``checksums[l]`` are
    those of its ranges: **the reader compares them** before it uses a byte of a range (see ``is_right``),
    and reports a difference with ``report_damage``.

    ``tier`` is where the bytes come from. If it is not DRAM, there are no blocks and no spans before
    ``KVStore.fetch``; after it, ``status`` says which layers have landed (None: all have). If DRAM has the
    blocks in part, ``lower`` may say where the rest is, which ``fetch`` completes them with. See
    ``KVStore.reserve`` for ``is_fast_copy``.

    Between daemon and client, which share the arena, it travels without ``blocks`` and ``status``: the client
    makes them of ``spans`` and of ``status_span``, where the flags of the status lie.
    """

    segment_id: int
    header: SegmentHeader
    tier: str
    blocks: Sequence[Block]
    spans: tuple[Span, ...]
    checksums: Checksums
    first_page: int
    end_page: int
    status: LayerStatus | None = None
    status_span: Span | None = None
    lower: LowerCopy | None = None
    is_fast_copy: bool = False

    @property
    def loadable_from(self) -> tuple[int, ...]:
        """``[L]``: the token from which on each layer can be fetched."""
        return self.header.layer_first_token if self.lower is None else self.lower.layer_first_token

    def holds(self, tail: SegmentTail | None) -> bool:
        """Whether DRAM has all of ``tail``, so that a load need not fetch. None: as much as DRAM has."""
        sizes = zip(() if tail is None else tail.layer_num_bytes, self.header.layer_num_bytes, strict=False)
        return self.tier == DRAM_TIER and all(wanted <= held for wanted, held in sizes)

    def is_right(self, layer: int, num_bytes: int | None = None) -> bool:
        """Whether the last ``num_bytes`` of a layer's block, or all of it, are what was committed; with them
        the ranges that hold them are compared."""
        block, checksum = self.blocks[layer], self.checksums[layer]
        num_bytes = block.nbytes if num_bytes is None else num_bytes
        return tail_is_right(block, checksum, num_bytes, self.header.range_bytes)

    def without_views(self) -> SegmentSlice:
        """The slice as it travels to another process that maps the arena."""
        return self.with_views((), None)

    def with_views(self, blocks: Sequence[Block], status: LayerStatus | None) -> SegmentSlice:
        """The slice with these ``blocks`` and this ``status`` in the place of its own."""
        # As ``dataclasses.replace`` does, which takes a tenth of a long lookup.
        part = object.__new__(SegmentSlice)
        part.__dict__.update(self.__dict__, blocks=blocks, status=status)
        return part


@dataclass(frozen=True, eq=False)
class Lease:
    """A restorable prefix: ``num_pages`` consecutive pages, pinned until released.

    ``slices`` are in conversation order and cover exactly the leased pages.
    """

    lease_id: int
    num_pages: int
    slices: tuple[SegmentSlice, ...]

    @property
    def is_in_dram(self) -> bool:
        """Whether every slice has its blocks: nothing to fetch."""
        return all(part.tier == DRAM_TIER for part in self.slices)

    @property
    def is_all_in_dram(self) -> bool:
        """Whether every slice has its blocks, and no lower tier has more of its segment."""
        return self.is_in_dram and not any(part.lower for part in self.slices)


@dataclass(frozen=True)
class Prefetched:
    """The outcome of a prefetch: ``num_pages`` are on their way to DRAM. ``refusal`` says why not all are."""

    num_pages: int = 0
    refusal: Refusal | None = None

    @property
    def is_deferred(self) -> bool:
        """True if only room was missing, so that a later prefetch may succeed."""
        return self.refusal in ("no room", "too much at once")


@dataclass(frozen=True, eq=False)
class PathSegment:
    """A committed segment on the path of a conversation, as it was when asked for. Not pinned."""

    segment_id: int
    header: SegmentHeader


@dataclass(frozen=True)
class TierStats:
    """A snapshot of a tier below DRAM. ``used_bytes + free_bytes == capacity_bytes`` at any moment.

    ``used_bytes`` counts all that the tier takes, dead records and headers included; ``stored_bytes`` counts
    the blocks of the segments that can be found. ``queued_*`` wait to be written. Further
    ``waiting_segments`` were not taken yet, because the tier is behind or suspended: they are offered again.

    ``skipped_segments`` counts by cause what was not written. ``behind``: it left DRAM before it was taken.
    ``orphan``: what it continues is not here, so it could never be found. ``failed``, ``suspended``: the
    medium failed, just then or before. ``no room``: all is in use. ``too large``: for any room. ``dropped``:
    it was cleared, cannot be decoded, or the tier was closed.

    ``failed_reads`` and ``failed_writes`` count errors of the medium, ``slow_reads`` reads that were given up
    because they took too long, and ``corrupted_segments`` wrong checksums. While ``is_suspended``, after
    errors, the tier is not used. While ``is_opening``, after its start, what lies in the tier is being read:
    nothing of it is found yet.
    """

    name: str
    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    stored_bytes: int
    num_segments: int
    num_pages: int
    queued_segments: int
    queued_bytes: int
    written_segments: int
    written_bytes: int
    skipped_segments: Mapping[str, int]
    read_segments: int
    read_bytes: int
    evicted_segments: int
    evicted_bytes: int
    corrupted_segments: int
    failed_reads: int
    slow_reads: int
    failed_writes: int
    is_suspended: bool
    is_opening: bool
    waiting_segments: int = 0


@dataclass(frozen=True)
class StoreStats:
    """A snapshot. Byte counts obey ``used_bytes + free_bytes == capacity_bytes`` at any moment.

    ``used_bytes`` counts all bytes that are taken of the arena: committed blocks, reservations, segments that
    left the index but are still leased, and alignment. ``stored_bytes`` and ``stored_tokens`` count the
    committed segments in the index only, without alignment; ``num_pages`` counts a page once, however many
    segments hold it. ``trimmed_segments`` counts the calls of ``trim`` that dropped bytes, ``trimmed_bytes``
    those bytes, without alignment. ``lookups`` counts calls of ``lease``, ``hit_pages`` and ``missed_pages``
    the pages that they asked for; ``tier_hit_pages`` the hits by tier. ``fetched_segments`` came from a lower
    tier; ``failed_fetches`` were asked for, but did not come. ``undecodable_segments`` were dropped because
    an engine could not decode them. ``pinned_bytes`` are kept by pins. Of what came by ``prefetch``, lookups
    found ``prefetch_useful_bytes`` in DRAM, or loads took them while they came; ``prefetch_wasted_bytes``
    left it before. ``hints`` reached a stored conversation; ``comeback_pages`` were read into DRAM because of
    one; hints can name ``named_conversations``.

    Fast copies (see ``KVStore.reserve``) take ``fast_copy_bytes``, without alignment, which are part of
    ``used_bytes``. No other number counts them, except that pages found in one are hits.

    The free space lies in ``num_free_ranges`` pieces, the largest of which has ``largest_free_bytes``.
    """

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    largest_free_bytes: int
    num_free_ranges: int
    stored_bytes: int
    stored_tokens: int
    num_segments: int
    num_pages: int
    num_leases: int
    num_reservations: int
    pinned_bytes: int
    fast_copy_bytes: int
    committed_segments: int
    evicted_segments: int
    evicted_bytes: int
    trimmed_segments: int
    trimmed_bytes: int
    rejected_reservations: int
    corrupted_segments: int
    token_mismatches: int
    lookups: int
    hit_pages: int
    missed_pages: int
    prefetch_useful_bytes: int
    prefetch_wasted_bytes: int
    tier_hit_pages: Mapping[str, int]
    fetched_segments: int = 0
    failed_fetches: int = 0
    undecodable_segments: int = 0
    hints: int = 0
    named_conversations: int = 0
    comeback_pages: int = 0
    tiers: tuple[TierStats, ...] = ()


@dataclass(frozen=True)
class SegmentInfo:
    """One line of a listing for operators: a committed segment.

    ``codec_params`` are the manifest's: the strategy it was stored with, among others. Never change them.
    ``parent_key`` and ``last_page_key`` say what it continues, and what continues it. ``tiers`` are all that
    hold it; ``pinned_s`` is how long a pin will still keep it. ``is_fast_copy``: see ``KVStore.reserve``.
    """

    segment_id: int
    model: str
    fingerprint: str
    tenant: str
    parent_key: str | None
    last_page_key: str
    start_token: int
    num_tokens: int
    num_bytes: int
    codec: str
    codec_params: Mapping[str, Any]
    tiers: tuple[str, ...]
    num_leases: int
    idle_s: float
    pinned_s: float
    is_fast_copy: bool

    @classmethod
    def of(
        cls,
        segment_id: int,
        manifest: SegmentManifest,
        tier: str,
        *,
        num_leases: int = 0,
        idle_s: float = 0.0,
        pinned_s: float = 0.0,
        is_fast_copy: bool = False,
    ) -> SegmentInfo:
        """Describe a segment as one tier holds it."""
        return cls(
            segment_id=segment_id,
            model=manifest.model.name,
            fingerprint=manifest.model.fingerprint,
            tenant=manifest.tenant,
            parent_key=manifest.parent_key,
            last_page_key=manifest.page_keys[-1],
            start_token=manifest.start_token,
            num_tokens=manifest.num_tokens,
            num_bytes=manifest.num_bytes,
            codec=manifest.codec,
            codec_params=manifest.codec_params,
            tiers=(tier,),
            num_leases=num_leases,
            idle_s=idle_s,
            pinned_s=pinned_s,
            is_fast_copy=is_fast_copy,
        )


@dataclass(frozen=True)
class SegmentDetails:
    """One segment in DRAM in full: its line of the listing, and what is stored of each layer.

    ``checksums[l]``: of the ranges of layer ``l``'s block.
    """

    info: SegmentInfo
    page_size: int
    layer_first_token: tuple[int, ...]
    layer_num_bytes: tuple[int, ...]
    checksums: Checksums


@dataclass(frozen=True)
class DamageReport:
    """The result of ``verify``: blocks and bytes read, and ids of segments taken out for wrong checksums."""

    num_blocks: int
    num_bytes: int
    bad_segments: tuple[int, ...]


def block_checksum(block: Block, range_bytes: int = MIN_RANGE_BYTES) -> bytes:
    """XXH3 (64 bit, big endian) of each range of a block, one after another. Ranges are counted from the
    block's end: only the first one may be shorter than ``range_bytes``. Belongs outside every lock."""
    return hash_ranges(block, range_bytes).astype(">u8").tobytes()


def block_checksums(blocks: Sequence[Block], range_bytes: int | None = None) -> Checksums:
    """The checksums of the ranges of each layer's block; None: those that ``SegmentManifest`` chooses.

    A writer takes them right after it has written the last byte. A stray write after that is found by the
    block's readers, whether it comes before the commit or after it.
    """
    if range_bytes is None:
        range_bytes = range_bytes_for([block.nbytes for block in blocks])
    return tuple(block_checksum(block, range_bytes) for block in blocks)


def checksum_of_tail(checksum: bytes, num_bytes: int, range_bytes: int) -> bytes:
    """The checksums of the last ranges of a block, which have ``num_bytes`` together."""
    return checksum[len(checksum) - CHECKSUM_BYTES * num_ranges(num_bytes, range_bytes) :]


def checksums_of(trimmed: SegmentManifest, checksums: Checksums) -> Checksums:
    """The checksums of a segment of which ``trimmed`` is left, from those that it had before."""
    return tuple(
        checksum_of_tail(checksum, num_bytes, trimmed.range_bytes)
        for checksum, num_bytes in zip(checksums, trimmed.layer_num_bytes, strict=True)
    )


def checked_tail(block: Block, checksum: bytes, num_bytes: int, range_bytes: int) -> CheckedTail:
    """The last ranges of a block that have its last ``num_bytes``, and their checksums."""
    num_bytes = tail_num_bytes(block.nbytes, num_bytes, range_bytes)
    wanted = checksum_of_tail(checksum, num_bytes, range_bytes)
    return block[block.nbytes - num_bytes :], wanted, range_bytes


def tail_is_right(block: Block, checksum: bytes, num_bytes: int, range_bytes: int) -> bool:
    """Compare the last ``num_bytes`` of a block, and all of the ranges that hold them, with ``checksum``;
    returns whether they are what was committed."""
    tail, wanted, _ = checked_tail(block, checksum, num_bytes, range_bytes)
    return block_checksum(tail, range_bytes) == wanted


def checked_checksums(
    checksums: Sequence[bytes], layer_num_bytes: Sequence[int], range_bytes: int
) -> Checksums:
    """Check the checksums that came with a commit, and return them as a tuple.

    Raises:
        ManifestError: there is not one for each range of each layer's block.
    """
    if len(checksums) != len(layer_num_bytes):
        raise ManifestError(f"checksums of {len(checksums)} blocks for {len(layer_num_bytes)} layers")
    wanted = [CHECKSUM_BYTES * num_ranges(num_bytes, range_bytes) for num_bytes in layer_num_bytes]
    given = [len(checksum) for checksum in checksums]
    if given != wanted:
        raise ManifestError(
            f"{given} bytes of checksums by layer, but {wanted} for blocks of {tuple(layer_num_bytes)} bytes "
            f"in ranges of {range_bytes}"
        )
    return tuple(checksums)
