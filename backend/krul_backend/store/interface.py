"""The interface of a KV store, in this process or behind a daemon, as engines use it."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Protocol

from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.hint import Hint, SessionName
from krul_backend.tiers.common.interface import (
    DamageReason,
    FastCopies,
    Lease,
    PathSegment,
    Prefetched,
    Reservation,
    SegmentSlice,
    StoreStats,
    Tails,
)
from krul_backend.tiers.common.read_queue import ReadPriority


class KVStore(Protocol):
    """Keeps encoded KV by page keys. Thread-safe: a scheduler thread and copy threads share one store.

    Keys of different models never meet: each call names the model, whose fingerprint is part of every key.
    """

    @abstractmethod
    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        """The maximal runs of ``page_keys`` (as index ranges, ascending) that no tier is known to hold."""

    def may_have(self, model: ModelIdentity, page_key: str) -> bool:
        """False if no tier has the page, True if one may have it. Never waits."""
        return True

    @abstractmethod
    def reserve(
        self, layer_num_bytes: Sequence[int], tenant: str = "", *, is_fast_copy: bool = False
    ) -> Reservation | None:
        """Take space for a segment, evicting idle segments if needed.

        A *fast copy* holds pages as they are that another segment holds, or will hold, in fewer bytes. Leases
        prefer it, because it is exact and loads faster. It is kept only while nothing else needs its space:
        it is evicted before any other segment, displaces others only up to ``MAX_FAST_COPY_SHARE`` of the
        arena, and is never written to a lower tier. Its pages still count as missing.

        Returns None, and counts it unless it is a fast copy, when there is no space: the segment is larger
        than the arena or the tenant's quota, or everything else is leased, pinned or reserved. Then nothing
        was evicted, as far as the failure could be foreseen. A block may have no bytes, for a layer of which
        nothing is stored.

        Raises:
            ValueError: if there is no block, or one of fewer than no bytes.
        """

    @abstractmethod
    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[bytes]) -> int:
        """Publish a written reservation: its pages become visible at once.

        ``checksums[l]`` is the ``block_checksum`` of ``blocks[l]`` in the manifest's ranges, taken by the
        writer right after it has written the block. The store does not read the blocks; the next reader finds
        a stray write.

        Pages that somebody else committed in the meantime keep their first copy; a segment that brings no
        new page at all is dropped and its space freed. The blocks must not be written from the call on: an
        implementation may make the reservation's arrays read-only. The token ids are copied.

        Returns the segment id; that of a dropped segment belongs to nothing.

        Raises:
            ManifestError: if the manifest's block sizes are not those reserved, or there is not one checksum
                for each layer, or the codec's parameters are too large (the reservation is aborted).
            KeyError: if the reservation is unknown or already settled.
            StoreClosedError: if the store was closed, or its daemon is gone or does not answer.
        """

    @abstractmethod
    def abort(self, reservation: Reservation) -> None:
        """Give a reservation's space back. Aborting twice, or after a commit, is an error (KeyError)."""

    @abstractmethod
    def lease(
        self,
        model: ModelIdentity,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        *,
        fast_copies: FastCopies = "prefer",
    ) -> Lease | None:
        """Pin the longest stored prefix of ``page_keys``, over all tiers, whose token ids are right.

        ``token_ids`` are the ``len(page_keys) * page_size`` tokens that the keys stand for. The first key may
        be anywhere in its conversation; each further slice must start at the position where the one before
        it ended. The prefix ends before a page whose token ids or position contradict its key, which is
        counted in ``token_mismatches``. Returns None if not one page is usable. A lease counts as use: its
        segments become the most recently used ones. A page is found whether or not every layer holds its
        tokens: see the headers. What lies in a lower tier is left out if next to nothing of its segment would
        be used. **Bytes are not verified here**: see ``SegmentSlice.checksums``.

        ``fast_copies``: "prefer" them where there are some; "avoid" them where there is anything else; "skip"
        them; or find "only" them. Only a lease that prefers them counts as a lookup and a use.

        Raises:
            ValueError: if ``token_ids`` does not have ``len(page_keys) * page_size`` elements.
        """

    @abstractmethod
    def fetch(self, lease: Lease, tails: Tails | None = None) -> tuple[SegmentSlice, ...]:
        """The lease's slices, with blocks: what lies in a lower tier starts to come into DRAM.

        ``tails[i]`` says what of slice ``i`` is read if it lies there; None is all of it. If DRAM has less
        of it than ``tails[i]``, and a copy has more (``SegmentSlice.lower``), the rest is read, and completes
        it. Slices after the last of ``tails`` are left where they are, and not returned; without ``tails``
        all come whole, as far as DRAM does not have them.

        Does not wait for bytes. Layers land in ascending order, layer 0 of all slices before layer 1 of any,
        about; ``SegmentSlice.status`` tells. What was fetched stays in DRAM as an ordinary segment, pinned by
        the lease until it is released; one of which only a part was read is like one that was trimmed.

        Raises:
            TierReadError: there is no room in DRAM, or the tier cannot be read.
            KeyError: the lease is unknown or was released.
        """

    @abstractmethod
    def prefetch(
        self, lease: Lease, tails: Tails | None = None, priority: ReadPriority = ReadPriority.PREFETCH
    ) -> Prefetched:
        """Start to read into DRAM what ``fetch`` would, for a load that will come, or may.

        Stops where DRAM has no room, or, unless ``priority`` is that of a load, where enough is on its way.

        Raises:
            KeyError: the lease is unknown or was released.
        """

    @abstractmethod
    def report_damage(self, segment_id: int, reason: DamageReason = "checksum") -> bool:
        """Report that a segment of a held lease, or one in DRAM, cannot be used; returns whether it left the
        store for that.

        ``checksum``: a block had a wrong one. The store checks this itself before it drops the segment.
        ``undecodable``: the engine lacks something that the codec parameters name, such as bases that another
        engine learned. The store cannot check this: it drops every copy that is encoded alike from every
        tier, so that the pages count as missing and the next turn stores them again. The slice may lie in a
        lower tier.
        """

    @abstractmethod
    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        """The segments in DRAM that hold ``page_keys``, each once, ordered by first page; no fast copies.

        Keys that are not stored are skipped. Does not count as a use; nothing is pinned or verified.
        """

    @abstractmethod
    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        """Drop the first tokens of a segment's blocks in DRAM; returns the dropped bytes, without alignment.

        Layer ``l`` then holds the tokens from ``layer_first_token[l]`` (a position in the conversation) on,
        in the last ``layer_num_bytes[l]`` bytes of its block. The codec knows which these are
        (``SegmentDecoder.kept_num_bytes``); the store only cuts. A layer that holds no more than that already
        stays as it is, so a call that is repeated, or based on an older manifest, does no harm.

        Nothing changes, and 0 is returned, when the segment is gone, pinned by a lease or another reader, or
        shared: another indexed segment holds one of its pages, more than one continues it, or one does so
        before its last page. A block keeps whole ranges (``SegmentManifest.range_bytes``).

        Raises:
            ManifestError: there are no such layers, tokens or sizes in the segment.
        """

    @abstractmethod
    def drop_fast_copies(self, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        """Drop the fast copies that hold a page of ``page_keys``; leased bytes stay until released."""

    def is_held(self, lease: Lease) -> bool:
        """Whether the store still has what a lease pins. After a daemon has died, its successor does not."""
        return True

    @abstractmethod
    def release(self, lease: Lease) -> None:
        """End a lease. Raises KeyError when it is unknown or was released before."""

    @abstractmethod
    def advise(
        self,
        hint: Hint,
        *,
        model: ModelIdentity | None = None,
        page_keys: Sequence[str] = (),
        session: SessionName | None = None,
    ) -> int:
        """Note a hint about a stored conversation; returns for how many of its pages in DRAM it holds.

        The conversation is that of ``model`` with ``page_keys`` from its first page on, which ``session``
        stands for from then on, if it is given. Without a model it is the one that ``session`` stands for,
        of all models; the result is that of the model of which most is there.

        A later hint replaces what an earlier one said of the same. Segments that other conversations go
        through, and those before them, are pinned and prefetched, but not demoted, dropped or weighed.
        At most a share of the arena can be pinned; segments beyond that are not, nor are their pages counted.

        Raises:
            KeyError: the session is not known, or nothing is stored of its conversation any more.
            ValueError: neither a model nor a session is given.
        """

    @abstractmethod
    def tier_costs(self) -> Mapping[str, TierCost]:
        """The measured cost of reading from each lower tier into DRAM, by the tier's name."""

    @abstractmethod
    def stats(self) -> StoreStats: ...

    @abstractmethod
    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget every segment (of one model) in every tier, durably.

        Leased segments keep their bytes until the last lease is released. A copy thread may still write and
        commit a reservation that was made before: such a commit returns an id, but drops the segment.
        """

    @abstractmethod
    def close(self) -> None:
        """Free the arena. Later calls raise StoreClosedError, except ``release`` and ``abort``, which do
        nothing, so that a copy thread that ends late cannot fail."""
