"""The store as an engine sees it: a daemon keeps the blocks in its arena, and answers on its sockets."""

from __future__ import annotations

import dataclasses
import itertools
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from krul_backend.daemon.client.client_session import DaemonConnection, view_in, with_views
from krul_backend.daemon.client.daemon_link import HANG_TIMEOUT_S, UNANSWERED, DaemonLink, LinkCounters
from krul_backend.daemon.client.request_channel import SessionEndedError
from krul_backend.daemon.protocol.messages import (
    AbortRequest,
    AdviseRequest,
    CommitRequest,
    DropFastCopiesRequest,
    FetchRequest,
    FindMissingRequest,
    LeaseRequest,
    ManifestFields,
    PathSegmentsRequest,
    PingRequest,
    PrefetchRequest,
    R,
    ReleaseRequest,
    ReportDamageRequest,
    Request,
    ReserveRequest,
    StatsRequest,
    TailFields,
    TierCostsRequest,
    TrimRequest,
    op_of,
)
from krul_backend.daemon.protocol.runtime_dir import runtime_dir_of
from krul_backend.errors import ManifestError, ProtocolError, StoreClosedError, TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, checked_token_ids
from krul_backend.store.interface import KVStore
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
    checked_checksums,
)
from krul_backend.tiers.common.read_queue import ReadPriority

SLOW_TIMEOUT_S = 10.0
"""Of operations that read blocks or wait for a network; no scheduler waits for them."""

_COUNTS: dict[str, Any] = {field.name: 0 for field in dataclasses.fields(StoreStats)}
_NO_STATS = StoreStats(**{**_COUNTS, "tier_hit_pages": {}, "tiers": ()})


class DaemonStore(KVStore):
    """Keeps segments in a daemon's arena, which this process maps. Thread-safe.

    Each call is one round trip at most. A call that is not answered in time has no result: there is no lease,
    no reservation, and no page is missing, so that the engine neither restores nor stores. ``commit`` then
    raises StoreClosedError, ``fetch`` TierReadError. What the daemon may still grant after that is given
    back. While there is no daemon, or it hangs, calls end so at once.

    Leases and reservations end with the session that granted them, on both sides: releasing a lease of an
    earlier session does nothing, and its arrays stay readable as long as they are referenced. A ``clear``
    that was not answered is repeated before anything can be leased again.

    Args:
        endpoint: the daemon's runtime directory, or ``ipc://<directory>/daemon.sock``.
        model: introduced to the daemon at once; other models are when a call first names them.
        request_timeout_s: how long a call may wait for the daemon.
        hang_timeout_s: how long the daemon may leave a ping unanswered; it is pinged after a time-out.
        on_arena: called with each new mapping of the arena, uint8 ``[capacity_bytes]``, before a block of it
            is handed out: to register it with CUDA. Keep the array as long as it is registered.
        restart: starts the daemon again; called once each time that it died.

    Raises:
        DaemonError: the daemon that is there is another user's, or of another version (ProtocolError). That
            there is none yet is no error: it may come later.
    """

    def __init__(
        self,
        endpoint: str | Path,
        *,
        model: ModelIdentity,
        request_timeout_s: float = 1.0,
        hang_timeout_s: float = HANG_TIMEOUT_S,
        on_arena: Callable[[npt.NDArray[np.uint8]], None] = lambda arena: None,
        restart: Callable[[], None] | None = None,
    ) -> None:
        self._timeout_s = request_timeout_s
        self._ids = itertools.count(1)
        self._lock = threading.Lock()
        self._leases: dict[int, DaemonConnection] = {}
        self._reservations: dict[int, DaemonConnection] = {}
        self._is_closed = False
        self._link = DaemonLink(
            runtime_dir_of(endpoint),
            model=model,
            request_timeout_s=request_timeout_s,
            hang_timeout_s=hang_timeout_s,
            on_arena=on_arena,
            restart=restart,
        )

    @property
    def is_connected(self) -> bool:
        """Whether calls ask the daemon now."""
        return self._link.is_connected

    @property
    def counters(self) -> LinkCounters:
        return self._link.counters

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        request = FindMissingRequest(fingerprint=model.fingerprint, page_keys=tuple(page_keys))
        return [range(*run) for run in self._try(request, model) or ()]

    def may_have(self, model: ModelIdentity, page_key: str) -> bool:
        connection = self._link.current()
        page_filter = None if connection is None else connection.session.page_filter
        return page_filter is None or page_filter.may_have(model, page_key)

    def reserve(
        self, layer_num_bytes: Sequence[int], tenant: str = "", *, is_fast_copy: bool = False
    ) -> Reservation | None:
        sizes = tuple(int(num_bytes) for num_bytes in layer_num_bytes)
        if not sizes or any(num_bytes < 0 for num_bytes in sizes):
            raise ValueError(f"a reservation needs blocks, of no fewer than 0 bytes each, got {sizes}")
        self._check_open()
        connection = self._link.current()
        if connection is None:
            return None
        reservation_id = next(self._ids)
        try:
            request = ReserveRequest(
                reservation_id=reservation_id, layer_num_bytes=sizes, tenant=tenant, is_fast_copy=is_fast_copy
            )
            spans = self._ask(connection, request)
            if spans is None:
                return None
            if tuple(span.num_bytes for span in spans) != sizes:
                raise ProtocolError(f"asked for blocks of {sizes} bytes, got {spans}")
            arena = connection.arena
            blocks = tuple(view_in(arena, span) for span in spans)
        except UNANSWERED as error:
            self._link.note_failure(connection, "reserve", error)
            connection.post(AbortRequest(reservation_id=reservation_id))
            return None
        with self._lock:
            self._reservations[reservation_id] = connection
        return Reservation(reservation_id, blocks, spans)

    def commit(self, reservation: Reservation, manifest: SegmentManifest, checksums: Sequence[bytes]) -> int:
        reservation_id = reservation.reservation_id
        connection = self._settle(reservation)
        if connection is None:
            raise StoreClosedError("the KV store was closed")
        try:
            if connection is not self._link.current():
                raise SessionEndedError("the krul daemon that reserved the space is gone, or does not answer")
            request = CommitRequest(
                reservation_id=reservation_id,
                fingerprint=manifest.model.fingerprint,
                manifest=ManifestFields.of(manifest),
                checksums=checked_checksums(
                    checksums, [block.nbytes for block in reservation.blocks], manifest.range_bytes
                ),
            )
            return self._ask(
                connection, request, manifest.model, timeout_s=SLOW_TIMEOUT_S, token_ids=manifest.token_ids
            )
        except UNANSWERED as error:
            self._link.note_failure(connection, "commit", error)
            connection.post(AbortRequest(reservation_id=reservation_id))
            raise StoreClosedError(f"the segment was not stored: {error}") from error
        except ManifestError:
            # Raised by the daemon, which has then given the space back, or by this side, before it asked.
            connection.post(AbortRequest(reservation_id=reservation_id))
            raise

    def abort(self, reservation: Reservation) -> None:
        connection = self._settle(reservation)
        if connection is not None:
            connection.post(AbortRequest(reservation_id=reservation.reservation_id))

    def lease(
        self,
        model: ModelIdentity,
        page_keys: Sequence[str],
        token_ids: TokenIds,
        *,
        fast_copies: FastCopies = "prefer",
    ) -> Lease | None:
        keys = tuple(page_keys)
        token_ids = checked_token_ids(token_ids, len(keys), model.page_size)
        self._check_open()
        connection = self._link.current()
        if connection is None:
            return None
        lease_id = next(self._ids)
        try:
            request = LeaseRequest(
                fingerprint=model.fingerprint, page_keys=keys, lease_id=lease_id, fast_copies=fast_copies
            )
            leased = self._ask(connection, request, model, token_ids=token_ids)
            if not leased:
                return None
            slices = with_views(leased, connection.arena)
            num_pages = sum(part.end_page - part.first_page for part in slices)
            if num_pages > len(keys):
                raise ProtocolError(f"asked for {len(keys)} pages, got a lease of {num_pages}")
            # A clear may have failed meanwhile: what was found before it must not be used.
            if connection is not self._link.current():
                raise SessionEndedError("the krul daemon was lost while it answered")
        except UNANSWERED as error:
            self._link.note_failure(connection, "lease", error)
            connection.post(ReleaseRequest(lease_id=lease_id))
            return None
        with self._lock:
            self._leases[lease_id] = connection
        return Lease(lease_id, num_pages, slices)

    def fetch(self, lease: Lease, tails: Tails | None = None) -> tuple[SegmentSlice, ...]:
        with self._lock:
            self._check_open()
            connection = self._leases[lease.lease_id]
        of_slices = [None] * len(lease.slices) if tails is None else tails
        if all(piece.holds(tail) for piece, tail in zip(lease.slices, of_slices, strict=False)):
            return lease.slices[: len(of_slices)]
        try:
            if connection is not self._link.current():
                raise SessionEndedError("the krul daemon that gave the lease is gone, or does not answer")
            request = FetchRequest(lease_id=lease.lease_id, tails=_fields_of(tails))
            fetched = self._ask(connection, request, timeout_s=SLOW_TIMEOUT_S)
            slices = with_views(fetched, connection.arena)
            if any(len(part.blocks) != len(part.checksums) for part in slices):
                raise ProtocolError("a fetched lease has segments without blocks")
            return slices
        except UNANSWERED as error:
            self._link.note_failure(connection, "fetch", error)
            raise TierReadError(f"nothing was fetched: {error}") from error

    def prefetch(
        self, lease: Lease, tails: Tails | None = None, priority: ReadPriority = ReadPriority.PREFETCH
    ) -> Prefetched:
        with self._lock:
            self._check_open()
            connection = self._leases[lease.lease_id]
        if connection is not self._link.current():
            return Prefetched()
        request = PrefetchRequest(lease_id=lease.lease_id, tails=_fields_of(tails), priority=priority)
        return self._try(request) or Prefetched()

    def report_damage(self, segment_id: int, reason: DamageReason = "checksum") -> bool:
        request = ReportDamageRequest(segment_id=segment_id, reason=reason)
        return self._try(request, timeout_s=SLOW_TIMEOUT_S) or False

    def path_segments(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[PathSegment]:
        request = PathSegmentsRequest(fingerprint=model.fingerprint, page_keys=tuple(page_keys))
        found = self._try(request, model)
        return list(found) if found is not None else []

    def trim(self, segment_id: int, layer_first_token: Sequence[int], layer_num_bytes: Sequence[int]) -> int:
        request = TrimRequest(
            segment_id=segment_id,
            layer_first_token=tuple(int(token) for token in layer_first_token),
            layer_num_bytes=tuple(int(num_bytes) for num_bytes in layer_num_bytes),
        )
        return self._try(request, timeout_s=SLOW_TIMEOUT_S) or 0

    def drop_fast_copies(self, model: ModelIdentity, page_keys: Sequence[str]) -> None:
        self._try(DropFastCopiesRequest(fingerprint=model.fingerprint, page_keys=tuple(page_keys)), model)

    def is_held(self, lease: Lease) -> bool:
        with self._lock:
            connection = self._leases.get(lease.lease_id)
        return connection is not None and connection.session.is_alive

    def release(self, lease: Lease) -> None:
        """As the interface says, without waiting for the daemon."""
        with self._lock:
            # One lock for both: ``close`` forgets all leases, and a release after it is no error.
            connection = None if self._is_closed else self._leases.pop(lease.lease_id)
        if connection is not None:
            connection.post(ReleaseRequest(lease_id=lease.lease_id))

    def advise(
        self,
        hint: Hint,
        *,
        model: ModelIdentity | None = None,
        page_keys: Sequence[str] = (),
        session: SessionName | None = None,
    ) -> int:
        request = AdviseRequest(
            hint=hint,
            fingerprint=None if model is None else model.fingerprint,
            page_keys=tuple(page_keys),
            session=session,
        )
        # These look into every tier, and one of them waits for writes.
        timeout_s = SLOW_TIMEOUT_S if hint.drop or hint.prefetch else None
        return self._try(request, model, timeout_s=timeout_s) or 0

    def tier_costs(self) -> Mapping[str, TierCost]:
        return self._try(TierCostsRequest()) or {}

    def stats(self) -> StoreStats:
        stats = self._try(StatsRequest())
        return stats[0] if stats is not None else _NO_STATS

    def clear(self, model: ModelIdentity | None = None) -> None:
        """As the interface says. If the daemon does not answer now, it is repeated before the next lease."""
        self._check_open()
        self._link.clear(model)

    def close(self) -> None:
        """End the session: the daemon takes back what it granted. The arena stays mapped for old views."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            self._leases.clear()
            self._reservations.clear()
        self._link.close()

    def _check_open(self) -> None:
        if self._is_closed:
            raise StoreClosedError("the KV store was closed")

    def _try(
        self,
        request: Request[R],
        model: ModelIdentity | None = None,
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> R | None:
        """Ask for something that is not held afterwards (no lease, no reservation). None: there is no answer.

        A request that may take longer than usual is sent after a ping was answered, so that a daemon that
        hangs is noticed within the usual time.

        Raises:
            ManifestError, KeyError, ValueError, TierReadError: the answer is this error.
        """
        self._check_open()
        connection = self._link.current()
        if connection is None:
            return None
        try:
            if timeout_s is not None and timeout_s > self._timeout_s:
                self._ask(connection, PingRequest())
            return self._ask(connection, request, model, timeout_s=timeout_s, token_ids=token_ids)
        except UNANSWERED as error:
            self._link.note_failure(connection, op_of(request), error)
            return None

    def _ask(
        self,
        connection: DaemonConnection,
        request: Request[R],
        model: ModelIdentity | None = None,
        *,
        timeout_s: float | None = None,
        token_ids: TokenIds | None = None,
    ) -> R:
        """Send a request and wait for its result; ``model``, which it names, is introduced first if need be.

        Raises as ``RequestChannels.ask``; the caller tells the link of what is ``UNANSWERED``.
        """
        self._link.count_request()
        if model is not None:
            connection.say_hello(model, self._timeout_s)
        return connection.ask(request, timeout_s if timeout_s is not None else self._timeout_s, token_ids)

    def _settle(self, reservation: Reservation) -> DaemonConnection | None:
        """Forget a reservation, make its blocks read-only; its connection, or None after ``close``."""
        with self._lock:
            connection = None
            if not self._is_closed:
                connection = self._reservations.pop(reservation.reservation_id, None)
                if connection is None:
                    raise KeyError(
                        f"reservation {reservation.reservation_id} is unknown, committed or aborted"
                    )
        # The holder must not write any more: the bytes may soon belong to another segment.
        for block in reservation.blocks:
            block.flags.writeable = False
        return connection


def _fields_of(tails: Tails | None) -> tuple[TailFields | None, ...] | None:
    """Tails as they travel."""
    return None if tails is None else tuple(None if tail is None else TailFields(*tail) for tail in tails)
