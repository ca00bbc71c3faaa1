"""The interface of a KV store: what the engine side may ask, whoever answers (in process, or a daemon)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds

Block = npt.NDArray[np.uint8]
"""A writable or read-only view of ``[num_bytes]`` bytes inside the arena, or an array of no bytes."""


@dataclass(frozen=True, eq=False)
class Reservation:
    """Space for one segment that nobody can see yet: one block per layer, of exactly the bytes asked for.

    The holder writes the blocks, then commits or aborts. Until then the bytes belong to the holder.
    """

    reservation_id: int
    blocks: tuple[Block, ...]


@dataclass(frozen=True, eq=False)
class SegmentSlice:
    """The pages ``[first_page, end_page)`` of one stored segment, pinned by a lease.

    ``blocks[l]`` is all that is stored of layer ``l``, from token ``manifest.layer_first_token[l]`` on, which
    need not be all of these pages: the codec knows where in it a page lies. Neither changes while leased.
    """

    segment_id: int
    manifest: SegmentManifest
    blocks: tuple[Block, ...]
    first_page: int
    end_page: int


@dataclass(frozen=True, eq=False)
class Lease:
    """A restorable prefix: ``num_pages`` consecutive pages, verified and pinned until released.

    ``slices`` are in conversation order and cover exactly the leased pages.
    """

    lease_id: int
    num_pages: int
    slices: tuple[SegmentSlice, ...]


@dataclass(frozen=True, eq=False)
class PathSegment:
    """A committed segment on the path of a conversation, as it was when asked for. Not pinned."""

    segment_id: int
    manifest: SegmentManifest


@dataclass(frozen=True)
class StoreStats:
    """A snapshot. Byte counts obey ``used_bytes + free_bytes == capacity_bytes`` at any moment.

    ``used_bytes`` counts the arena's bytes as they are taken: committed blocks, reservations, segments that
    left the index but are still leased, and alignment. ``stored_bytes`` and ``stored_tokens`` count the
    committed segments in the index only, without alignment; ``num_pages`` counts a page once, however many
    segments hold it. ``trimmed_segments`` counts the calls of ``trim`` that dropped bytes, ``trimmed_bytes``
    those bytes, without alignment. ``lookups`` counts calls of ``lease``, ``hit_pages`` and ``missed_pages``
    the pages that they asked for.
    """

    capacity_bytes: int
    used_bytes: int
    free_bytes: int
    stored_bytes: int
    stored_tokens: int
    num_segments: int
    num_pages: int
    num_leases: int
    num_reservations: int
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


@dataclass(frozen=True)
class SegmentInfo:
    """One line of ``list``: a committed segment as an operator wants to see it.

    ``codec_params`` are the manifest's: the strategy it was stored with, among others. Never change them.
    """

    segment_id: int
    model: str
    fingerprint: str
    start_token: int
    num_tokens: int
    num_bytes: int
    codec: str
    codec_params: Mapping[str, Any]
    num_leases: int
    idle_s: float


class KVStore(ABC):
    """Keeps encoded KV by page keys. Thread-safe: a scheduler thread and copy threads share one store.

    Keys of different models never meet: each call names the model, whose fingerprint is part of every key.
    """

    @abstractmethod
    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` (as index ranges, ascending) that are not stored."""

    @abstractmethod
    def reserve(self, layer_num_bytes: Sequence[int]) -> Reservation | None:
        """Take space for a segment, evicting idle segments if needed.

        Returns None, and counts it, when the space cannot be had (larger than the arena, or everything
        else is leased or reserved). Never takes the arena past its capacity. When it returns None nothing
        was evicted in vain if that could be known beforehand. Blocks may have no bytes, all of them too: of a
        layer of which nothing is stored.

        Raises:
            ValueError: if there is no block, or one of fewer than no bytes.
        """

    @abstractmethod
    def commit(self, reservation: Reservation, manifest: SegmentManifest) -> int:
        """Publish a written reservation: checksums are taken now, then its pages become visible at once.

        Pages that somebody else committed in the meantime keep their first copy; a segment that brings no
        new page at all is dropped and its space freed. The blocks must not be written from the call on: an
        implementation may make the reservation's arrays read-only. The token ids are copied.

        Returns the segment id (of a dropped segment, too: an id that nothing has).

        Raises:
            ManifestError: if the manifest's block sizes are not those reserved (the reservation is aborted).
            KeyError: if the reservation is unknown or already settled.
        """

    @abstractmethod
    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's space back. Aborting twice, or after a commit, is an error (KeyError)."""

    @abstractmethod
    def lease(self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds) -> Lease | None:
        """Pin the longest stored prefix of ``page_keys`` whose token ids and checksums are right.

        ``token_ids`` are the ``len(page_keys) * page_size`` tokens that the keys stand for. The first key may
        be anywhere in its conversation; each further slice must start at the position where the one before
        it ended. The prefix ends before a page whose token ids or position contradict its key, which is
        counted in ``token_mismatches``. The bytes of every block are verified before the lease is given; a
        segment with a wrong checksum is taken out of the index, counted, and freed as soon as no lease needs
        it. Returns None if not one page is usable. A lease counts as use: its segments become the most
        recently used ones. A page is found whether or not every layer holds its tokens: see the manifests.

        Raises:
            ValueError: if ``token_ids`` does not have ``len(page_keys) * page_size`` elements.
        """

    @abstractmethod
    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        """The segments that hold ``page_keys``, each once, in the order of their first page among them.

        Keys that are not stored are passed over. No use of the segments: nothing is pinned or verified.
        """

    @abstractmethod
    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        """Drop the first tokens of a segment's blocks; returns how many bytes went, without alignment.

        Layer ``l`` then holds the tokens from ``layer_first_token[l]`` (a position in the conversation) on,
        in the last ``layer_num_bytes[l]`` bytes of its block. The codec knows which these are
        (``SegmentDecoder.kept_num_bytes``); the store only cuts. A layer that holds no more than that already
        stays as it is, so a call that is repeated, or made with an older manifest in hand, does no harm.

        Nothing changes, and 0 is returned, when the segment is gone, pinned by a lease or another reader, or
        shared: another indexed segment holds one of its pages, more than one continues it, or one does so
        before its last page. A block that loses a part has its checksum verified first; if it is wrong, the
        segment leaves the index as in ``lease``.

        Raises:
            ManifestError: there are no such layers, tokens or sizes in the segment.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Unpin. Raises KeyError when the lease is unknown or released before."""

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def list_segments(self) -> list[SegmentInfo]: ...

    @abstractmethod
    def verify(self) -> list[int]:
        """Check every committed block; take bad segments out as ``lease`` does; return their ids."""

    @abstractmethod
    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget every segment (of one model, or of all). Leased segments leave the index at once and their
        space when the last lease is released. Reservations made before, for that model, may still be
        written and committed by a copy thread: such a commit must not resurrect anything, so it drops the
        segment instead (it returns an id, and nothing becomes visible)."""

    @abstractmethod
    def close(self) -> None:
        """Free the arena. Later calls raise StoreClosedError, except ``release`` and ``abort``, which do
        nothing, so that a copy thread that ends late cannot fail."""
