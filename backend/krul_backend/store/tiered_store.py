"""The KV store over all tiers: DRAM, and the tiers below it."""

from __future__ import annotations

import dataclasses
import logging
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager

import numpy as np

from krul_backend.errors import NotAdmittedError, Refusal, StoreClosedError, TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.store.advice import Advisor
from krul_backend.store.fetcher import Coming, Fetcher
from krul_backend.store.interface import KVStore
from krul_backend.store.tiered_lease import (
    LowerPart,
    Part,
    PrefixWalk,
    TieredLease,
    fuller_copies,
    release_parts,
)
from krul_backend.store.write_behind import WriteBehind
from krul_backend.tiers.common.hint import Hint, SessionName
from krul_backend.tiers.common.interface import (
    DRAM_TIER,
    DamageReason,
    DamageReport,
    FastCopies,
    Lease,
    LowerCopy,
    PathSegment,
    Prefetched,
    Reservation,
    SegmentDetails,
    SegmentInfo,
    SegmentSlice,
    StoreStats,
    Tails,
)
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.common.page_filter import PageFilter
from krul_backend.tiers.common.read_queue import ReadPriority
from krul_backend.tiers.dram import Arrival, HostStore

logger = logging.getLogger(__name__)


class TieredStore(KVStore):
    """Commits segments to DRAM, copies them to every lower tier later, and fetches them from there.

    A lease may have parts of several tiers: DRAM is asked first, then the lower tiers in turn, then DRAM
    again from the page that they reached. ``fetch`` reads parts of lower tiers into DRAM, where each becomes
    an ordinary segment whose layers land one by one; it is also written to the tiers above its own.

    Locks are taken in this order: a lease's, the fetcher's admission lock, those of tiers and DRAM. No tier
    is called with the table of leases locked.

    Args:
        host: the DRAM tier; owned by the store from here on.
        tiers: those below it, the fastest first; owned by the store.
    """

    def __init__(self, host: HostStore, tiers: Sequence[LowerTier] = ()) -> None:
        self._host = host
        self._tiers = tuple(tiers)
        self._fetcher = Fetcher(host, self._write_up)
        self._write_behind = WriteBehind(host, self._tiers)
        self._advisor = Advisor(
            host, self._tiers, self.prefetch_pages, self._write_behind.settle, time.monotonic
        )
        self._lock = threading.Lock()
        self._leases: dict[int, TieredLease] = {}
        self._is_closed = False
        self._lookups = 0
        self._missed_pages = 0
        self._undecodable_segments = 0
        self._tier_hit_pages = Counter(dict.fromkeys((DRAM_TIER, *(tier.name for tier in tiers)), 0))

    @property
    def host(self) -> HostStore:
        """The DRAM tier, whose ``buffer`` engines map."""
        return self._host

    @property
    def page_filter(self) -> PageFilter | None:
        """Has every page that can be found here; None if others store in one of the tiers, too."""
        return self._host.page_filter if all(tier.notes_pages for tier in self._tiers) else None

    # Storing

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        missing = self._host.find_missing(model, page_keys)
        for tier in self._tiers:
            missing = [
                range(run.start + part.start, run.start + part.stop)
                for run in missing
                for part in tier.find_missing(model, page_keys[run.start : run.stop])
            ]
        return missing

    def reserve(
        self,
        layer_num_bytes: Sequence[int],
        tenant: str = "",
        *,
        is_fast_copy: bool = False,
        at_once: bool = False,
    ) -> Reservation | None:
        """Take space as ``KVStore`` says; ``at_once`` is passed on to ``HostStore.reserve``."""
        # It may evict: what no lower tier has taken yet is offered before, and stays if it is taken.
        self._write_behind.offer()
        return self._host.reserve(layer_num_bytes, tenant, is_fast_copy=is_fast_copy, at_once=at_once)

    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[bytes]) -> int:
        # Held until the tiers hold it: else it might be evicted before they are offered it.
        segment = self._host.commit_held(reservation, manifest, checksums)
        try:
            self._write_behind.submit(segment, self._tiers)
        finally:
            self._host.unhold(segment)
        return segment.segment_id

    def abort(self, reservation: Reservation) -> None:
        self._host.abort(reservation)

    # Reading

    def lease(
        self,
        model: ModelIdentity,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        *,
        fast_copies: FastCopies = "prefer",
    ) -> Lease | None:
        clear_mark, parts = self._match(model, page_keys, token_ids, fast_copies=fast_copies)
        slices = [piece for part in parts for piece in part.slices]
        num_pages = sum(part.num_pages for part in parts)
        completions: dict[int, Part] = {}
        if fast_copies in ("prefer", "avoid"):
            keys, tokens = tuple(page_keys), np.asarray(token_ids)
            try:
                completions |= fuller_copies(self._host, self._tiers, model, keys, tokens, slices)
            except BaseException:
                release_parts(self._host, parts)
                raise
        for number, copy in completions.items():
            (piece,) = copy.slices
            lower = LowerCopy(piece.tier, piece.header.layer_first_token)
            slices[number] = dataclasses.replace(slices[number], lower=lower)
        lease = Lease(self._host.next_id(), num_pages, tuple(slices))
        with self._lock:
            is_closed = self._is_closed
            if not is_closed:
                if fast_copies == "prefer":
                    self._lookups += 1
                    self._missed_pages += len(page_keys) - num_pages
                    for piece in slices:
                        self._tier_hit_pages[piece.tier] += piece.end_page - piece.first_page
                if parts:
                    self._leases[lease.lease_id] = TieredLease(parts, clear_mark, completions)
        if is_closed:
            release_parts(self._host, [*parts, *completions.values()])
            raise StoreClosedError("the KV store was closed")
        return lease if parts else None

    def fetch(self, lease: Lease, tails: Tails | None = None) -> tuple[SegmentSlice, ...]:
        slices: list[SegmentSlice] = []
        with self._locked(lease) as held:
            self._bring(held, tails, ReadPriority.LOAD, slices)
        return tuple(slices)

    def prefetch(
        self, lease: Lease, tails: Tails | None = None, priority: ReadPriority = ReadPriority.PREFETCH
    ) -> Prefetched:
        with self._locked(lease) as held:
            return self._bring_ahead(held, tails, priority)

    def prefetch_pages(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds
    ) -> Prefetched:
        """Start to read into DRAM what ``lease`` would find in lower tiers, whole; arguments as for that."""
        clear_mark, parts = self._match(model, page_keys, token_ids)
        held = TieredLease(parts, clear_mark)
        try:
            return self._bring_ahead(held, None, ReadPriority.PREFETCH)
        finally:
            self._end_lease(held)

    def _bring_ahead(self, held: TieredLease, tails: Tails | None, priority: ReadPriority) -> Prefetched:
        slices: list[SegmentSlice] = []
        refusal: Refusal | None = None
        try:
            self._bring(held, tails, priority, slices)
        except TierReadError as error:
            logger.debug("a prefetch ends: %s", error)
            refusal = error.refusal if isinstance(error, NotAdmittedError) else None
        arriving = (piece for piece in slices if piece.tier != DRAM_TIER)
        return Prefetched(sum(piece.end_page - piece.first_page for piece in arriving), refusal)

    def _bring(
        self, held: TieredLease, tails: Tails | None, priority: ReadPriority, slices: list[SegmentSlice]
    ) -> None:
        """Start to read what is wanted of a lease, and add its slices, with blocks. What a load does not wait
        for stays held in its tier, too."""
        coming: list[Coming] = []
        is_load = priority == ReadPriority.LOAD
        wanted = [None] * sum(len(part.slices) for part in held.parts) if tails is None else tails
        self._write_behind.offer()
        try:
            for i, part in enumerate(held.parts):
                if len(slices) >= len(wanted):
                    break
                if is_load and isinstance(part, Lease):
                    self._fetcher.hurry(part)
                for piece in part.slices if isinstance(part, LowerPart) else self._host.fetch(part):
                    number = len(slices)
                    if number >= len(wanted):
                        break
                    tail = wanted[number]
                    copy = part if isinstance(part, LowerPart) else held.completions.get(number)
                    if isinstance(copy, LowerPart) and not piece.holds(tail):
                        if tail is not None and piece.tier == DRAM_TIER:
                            tail = tail.with_held(piece.header)
                        if not is_load:
                            copy.tier.hold(copy.run)
                            held.ahead.append(copy)
                        # If a later part finds no room, those before it come to DRAM all the same.
                        copy, read = self._fetcher.admit(copy, held.clear_mark, tail, priority=priority)
                        coming += [] if read is None else [read]
                        if not is_load:
                            held.ahead[-1] = copy
                        elif isinstance(part, LowerPart):
                            held.parts[i] = copy
                        else:
                            held.completions[number] = copy
                    slices += self._host.fetch(copy) if isinstance(copy, Lease) else (piece,)
        finally:
            self._fetcher.start(coming)

    @contextmanager
    def _locked(self, lease: Lease) -> Iterator[TieredLease]:
        """Hold the lock of a lease. Raises KeyError if it is unknown or was released."""
        with self._lock:
            held = self._leases.get(lease.lease_id)
        if held is None:
            raise KeyError(f"lease {lease.lease_id} is unknown or was released")
        with held.lock:
            if held.is_released:
                raise KeyError(f"lease {lease.lease_id} was released")
            yield held

    def release(self, lease: Lease) -> None:
        with self._lock:
            if self._is_closed:
                return
            held = self._leases.pop(lease.lease_id)
        self._end_lease(held)

    def _end_lease(self, held: TieredLease) -> None:
        with held.lock:
            held.is_released = True
            release_parts(self._host, [*held.parts, *held.completions.values(), *held.ahead])

    def _match(
        self,
        model: ModelIdentity,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        *,
        fast_copies: FastCopies = "prefer",
    ) -> tuple[int, list[Part]]:
        """Hold the longest prefix over all tiers; returns a clear mark from before that, and the parts."""
        clear_mark = self._host.clear_mark()
        walk = PrefixWalk(
            self._host,
            () if fast_copies == "only" else self._tiers,
            model,
            tuple(page_keys),
            np.asarray(token_ids),
            fast_copies=fast_copies,
        )
        return clear_mark, walk.run()

    def _write_up(self, arrival: Arrival, tier: LowerTier) -> None:
        """Write a segment that has come from a tier to the tiers above that one, too."""
        above = self._tiers[: self._tiers.index(tier)]
        segment = self._host.hold(arrival.segment.segment_id) if above else None
        if segment is not None:
            try:
                self._write_behind.submit(segment, above)
            finally:
                self._host.unhold(segment)

    # Upkeep

    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        return self._host.path_segments(model, page_keys)

    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        return self._host.trim(segment_id, layer_first_token, layer_num_bytes)

    def drop_fast_copies(self, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        self._host.drop_fast_copies(model, page_keys)

    def report_damage(self, segment_id: int, reason: DamageReason = "checksum") -> bool:
        if reason == "checksum":
            return self._host.report_damage(segment_id)
        manifest = self._manifest_of(segment_id)
        if manifest is None:
            return False
        with self._lock:
            self._undecodable_segments += 1
        self._host.discard(manifest)
        # After this no tier is given a segment that has left DRAM's index; earlier ones the tiers drop.
        self._write_behind.settle()
        for tier in self._tiers:
            tier.discard(manifest)
        logger.info("a segment of %d tokens cannot be decoded where it is used: dropped", manifest.num_tokens)
        return True

    def _manifest_of(self, segment_id: int) -> SegmentManifest | None:
        """The manifest of a segment in DRAM, or of a leased part of a lower tier; None if there is none."""
        manifest = self._host.manifest_of(segment_id)
        if manifest is not None:
            return manifest
        with self._lock:
            leases = list(self._leases.values())
        lower_parts = (part for held in leases for part in tuple(held.parts) if isinstance(part, LowerPart))
        return next(
            (part.run.segment.manifest for part in lower_parts if part.segment_id == segment_id), None
        )

    def advise(
        self,
        hint: Hint,
        *,
        model: ModelIdentity | None = None,
        page_keys: Sequence[str] = (),
        session: SessionName | None = None,
    ) -> int:
        if model is not None:
            if session is not None and page_keys:
                self._advisor.name(session, model, page_keys)
            return self._advisor.advise(model, page_keys, hint)
        if session is None:
            raise ValueError("a hint is about a model's pages, or about a session: neither was given")
        return self._advisor.advise_named(session, hint)

    def tier_costs(self) -> Mapping[str, TierCost]:
        return {tier.name: tier.cost() for tier in self._tiers}

    def stats(self) -> StoreStats:
        of_dram = self._host.stats()
        of_tiers = tuple(self._write_behind.stats(tier) for tier in self._tiers)
        with self._lock:
            return dataclasses.replace(
                of_dram,
                num_leases=len(self._leases),
                lookups=self._lookups,
                hit_pages=self._tier_hit_pages.total(),
                missed_pages=self._missed_pages,
                tier_hit_pages=dict(self._tier_hit_pages),
                fetched_segments=self._fetcher.num_fetched,
                failed_fetches=self._fetcher.num_failed,
                undecodable_segments=self._undecodable_segments,
                hints=self._advisor.num_hints,
                named_conversations=len(self._advisor.names),
                comeback_pages=self._advisor.num_comeback_pages,
                tiers=of_tiers,
            )

    def clear(self, model: ModelIdentity | None = None) -> None:
        # DRAM first and last: until the tiers have forgotten a segment, somebody may fetch it from there.
        with ExitStack() as stack:
            stack.callback(self._host.clear, model)
            for tier in self._tiers:
                stack.callback(tier.clear, model)
            # After this no tier is given a segment that has left DRAM's index; earlier ones the tiers drop.
            stack.callback(self._write_behind.forget, model)
            self._host.clear(model)

    def close(self) -> None:
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            leases = list(self._leases.values())
            self._leases.clear()
        with ExitStack() as stack:
            stack.callback(self._host.close)
            for tier in self._tiers:
                stack.callback(tier.close)
            stack.callback(self._write_behind.close)
            stack.callback(self._fetcher.close)
            stack.callback(self._advisor.close)
            for held in leases:
                stack.callback(self._end_lease, held)

    # For operators

    def list_segments(self) -> list[SegmentInfo]:
        """Every segment once, those in DRAM first; ids of the others are those of their tier."""
        lines = [self._with_lower_tiers(info) for info in self._host.list_segments()]
        for tier in self._tiers:
            # A line does not name its pages: a line of the tier is matched with any equal line of DRAM.
            listed = Counter(_line_key(info) for info in lines if tier.name in info.tiers)
            for info in tier.list_segments():
                key = _line_key(info)
                if listed[key]:
                    listed[key] -= 1
                else:
                    lines.append(info)
        return lines

    def inspect(self, segment_id: int) -> SegmentDetails | None:
        """One segment in DRAM, in full; None if it is not there (any more)."""
        details = self._host.inspect(segment_id)
        if details is None:
            return None
        return dataclasses.replace(details, info=self._with_lower_tiers(details.info))

    def _with_lower_tiers(self, info: SegmentInfo) -> SegmentInfo:
        """The line of a segment in DRAM, with the lower tiers that hold all of its pages, too."""
        manifest = self._host.manifest_of(info.segment_id)
        if manifest is None or info.is_fast_copy:
            # It has left DRAM meanwhile, or no other tier has it.
            return info
        model, page_keys = manifest.model, manifest.page_keys
        holders = (tier.name for tier in self._tiers if not tier.find_missing(model, page_keys))
        return dataclasses.replace(info, tiers=(*info.tiers, *holders))

    def verify(self) -> DamageReport:
        """Check every block of every local tier; take bad segments out of their tier's index.

        Ids of segments in lower tiers are those of their tier.
        """
        reports = [self._host.verify(), *(tier.verify() for tier in self._tiers)]
        return DamageReport(
            num_blocks=sum(report.num_blocks for report in reports),
            num_bytes=sum(report.num_bytes for report in reports),
            bad_segments=tuple(bad_id for report in reports for bad_id in report.bad_segments),
        )

    def wait_until_open(self, timeout_s: float) -> bool:
        """Wait until every tier knows what lies in it; False if that takes longer."""
        deadline_s = time.monotonic() + timeout_s
        return all(tier.wait_until_open(max(0.0, deadline_s - time.monotonic())) for tier in self._tiers)

    def flush(self, timeout_s: float) -> bool:
        """Wait until earlier commits are as durable as the tiers make them; False if that takes longer."""
        deadline_s = time.monotonic() + timeout_s

        def flush_tiers() -> bool:
            # All of them, although one may be late.
            flushed = [tier.flush(max(0.0, deadline_s - time.monotonic())) for tier in self._tiers]
            return all(flushed)

        return self._write_behind.flush(flush_tiers)


def _line_key(info: SegmentInfo) -> tuple[str, str, int, int]:
    """The fields that are equal in all tiers: a trim in DRAM changes the number of bytes."""
    return info.fingerprint, info.tenant, info.start_token, info.num_tokens
