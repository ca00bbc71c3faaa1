"""The interface of a KV store: what the engine side may ask, whoever answers (in process, or a daemon)."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from krul_backend.planner.costs import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.interface import (
    DamageReason,
    DamageReport,
    Lease,
    PathSegment,
    Reservation,
    SegmentDetails,
    SegmentInfo,
    SegmentSlice,
    StoreStats,
)


class KVStore(Protocol):
    """Keeps encoded KV by page keys. Thread-safe: a scheduler thread and copy threads share one store.

    Keys of different models never meet: each call names the model, whose fingerprint is part of every key.
    """

    @abstractmethod
    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` (as index ranges, ascending) that no tier is known to hold."""

    @abstractmethod
    def reserve(self, layer_num_bytes: Sequence[int], tenant: str = "") -> Reservation | None:
        """Take space for a segment, evicting idle segments if needed.

        Returns None, and counts it, when the space cannot be had (larger than the arena or the tenant's
        quota, or everything else is leased, pinned or reserved). Never takes the arena past its capacity.
        When it returns None nothing was evicted in vain if that could be known beforehand. Blocks may have no
        bytes, all of them too: of a layer of which nothing is stored.

        Raises:
            ValueError: if there is no block, or one of fewer than no bytes.
        """

    @abstractmethod
    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[int]) -> int:
        """Publish a written reservation: its pages become visible at once.

        ``checksums[l]`` is the ``block_checksum`` of what the writer put into ``blocks[l]``, taken right
        after that: the store does not look at the blocks, so a stray write since then is found by the next
        reader.

        Pages that somebody else committed in the meantime keep their first copy; a segment that brings no
        new page at all is dropped and its space freed. The blocks must not be written from the call on: an
        implementation may make the reservation's arrays read-only. The token ids are copied.

        Returns the segment id (of a dropped segment, too: an id that nothing has).

        Raises:
            ManifestError: if the manifest's block sizes are not those reserved, or there is not one checksum
                for each layer, or the codec's parameters are too large (the reservation is aborted).
            KeyError: if the reservation is unknown or already settled.
        """

    @abstractmethod
    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's space back. Aborting twice, or after a commit, is an error (KeyError)."""

    @abstractmethod
    def lease(self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds) -> Lease | None:
        """Pin the longest stored prefix of ``page_keys``, over all tiers, whose token ids are right.

        ``token_ids`` are the ``len(page_keys) * page_size`` tokens that the keys stand for. The first key may
        be anywhere in its conversation; each further slice must start at the position where the one before
        it ended. The prefix ends before a page whose token ids or position contradict its key, which is
        counted in ``token_mismatches``. Returns None if not one page is usable. A lease counts as use: its
        segments become the most recently used ones. A page is found whether or not every layer holds its
        tokens: see the headers. **Bytes are not verified here**: see ``SegmentSlice.checksums``.

        Raises:
            ValueError: if ``token_ids`` does not have ``len(page_keys) * page_size`` elements.
        """

    @abstractmethod
    def fetch(self, lease: Lease) -> tuple[SegmentSlice, ...]:
        """The lease's slices, all with blocks: what lies in a lower tier starts to come into DRAM.

        Does not wait for bytes. Layers land in ascending order; ``SegmentSlice.status`` tells. What was
        fetched stays in DRAM as an ordinary segment, pinned by the lease until it is released.

        Raises:
            TierReadError: there is no room in DRAM, or the tier cannot be read.
            KeyError: the lease is unknown or was released.
        """

    @abstractmethod
    def prefetch(self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds) -> int:
        """Start to bring into DRAM what ``lease`` would find in lower tiers; pages that are on their way.

        Stops where DRAM has no room. Arguments as for ``lease``.
        """

    @abstractmethod
    def report_damage(self, segment_id: int, reason: DamageReason = "checksum") -> bool:
        """Tell that a segment of a held lease is of no use; returns whether it left the store for that.

        ``checksum``: a block had a wrong one. The store looks itself, and quarantines the segment if so.
        ``undecodable``: the engine lacks what its codec parameters name, such as a map that another engine
        learned. The store cannot know better. Every copy of the segment that is encoded alike leaves every
        tier, so that its pages count as missing and the next turn stores them again. The slice may lie in a
        lower tier.
        """

    @abstractmethod
    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        """The segments in DRAM that hold ``page_keys``, each once, ordered by first page.

        Keys that are not stored are passed over. No use of the segments: nothing is pinned or verified.
        """

    @abstractmethod
    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        """Drop the first tokens of a segment's blocks in DRAM; returns the bytes that went, not aligned.

        Layer ``l`` then holds the tokens from ``layer_first_token[l]`` (a position in the conversation) on,
        in the last ``layer_num_bytes[l]`` bytes of its block. The codec knows which these are
        (``SegmentDecoder.kept_num_bytes``); the store only cuts. A layer that holds no more than that already
        stays as it is, so a call that is repeated, or made with an older manifest in hand, does no harm.

        Nothing changes, and 0 is returned, when the segment is gone, pinned by a lease or another reader, or
        shared: another indexed segment holds one of its pages, more than one continues it, or one does so
        before its last page. A block that loses a part has its checksum verified first; if it is wrong, the
        segment leaves the index.

        Raises:
            ManifestError: there are no such layers, tokens or sizes in the segment.
        """

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """Unpin. Raises KeyError when the lease is unknown or released before."""

    @abstractmethod
    def pin(self, model: ModelIdentity, page_keys: Sequence[str], ttl_s: float) -> int:
        """Keep the stored segments of ``page_keys`` in DRAM for ``ttl_s`` seconds; returns their pages.

        A later pin replaces an earlier one, also by less time. Pinned bytes are bounded by a share of the
        arena; what is beyond it is not pinned.

        Raises:
            ValueError: ``ttl_s`` is not a positive, finite number.
        """

    @abstractmethod
    def unpin(self, model: ModelIdentity, page_keys: Sequence[str]) -> int:
        """End a pin at once; returns the pages whose segments were pinned."""

    @abstractmethod
    def tier_costs(self) -> Mapping[str, TierCost]:
        """What reading from each lower tier into DRAM costs, measured, by the tier's name."""

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def list_segments(self) -> list[SegmentInfo]: ...

    @abstractmethod
    def inspect(self, segment_id: int) -> SegmentDetails | None:
        """One segment in DRAM, whole; None if it is not there (any more)."""

    @abstractmethod
    def verify(self) -> DamageReport:
        """Check every committed block of every local tier; take bad segments out of their tier's index."""

    @abstractmethod
    def flush(self, timeout_s: float) -> bool:
        """Wait until everything committed before is as durable as the tiers make it; False if it is late."""

    @abstractmethod
    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget every segment (of one model) in every tier, durably; leased ones keep their bytes, and free
        their space when the last lease is released. Reservations made before, for that model, may still be
        written and committed by a copy thread: such a commit must not resurrect anything, so it drops the
        segment instead (it returns an id, and nothing becomes visible)."""

    @abstractmethod
    def close(self) -> None:
        """Free the arena. Later calls raise StoreClosedError, except ``release`` and ``abort``, which do
        nothing, so that a copy thread that ends late cannot fail."""
