"""Answers the operations of a session: each asks the store, and some change what the session holds."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from krul_backend.daemon.protocol.messages import (
    MAX_MODELS,
    AbortRequest,
    ClearRequest,
    CommitReply,
    CommitRequest,
    Done,
    FetchReply,
    FetchRequest,
    FindMissingReply,
    FindMissingRequest,
    HelloRequest,
    LeaseReply,
    LeaseRequest,
    PathSegmentsReply,
    PathSegmentsRequest,
    PinReply,
    PinRequest,
    PrefetchReply,
    PrefetchRequest,
    ReleaseRequest,
    Reply,
    ReportDamageReply,
    ReportDamageRequest,
    Request,
    ReserveReply,
    ReserveRequest,
    SliceSpans,
    TierCostsReply,
    TierCostsRequest,
    TrimReply,
    TrimRequest,
)
from krul_backend.daemon.server.lanes import Answer, Deferred, Lane
from krul_backend.daemon.server.sessions import Session
from krul_backend.errors import ManifestError, ProtocolError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, TokenIds
from krul_backend.store.interface import KVStore
from krul_backend.tiers.common.interface import Lease, Reservation, SegmentSlice, Span

MAX_HELD = 65_536
"""How many leases, and how many reservations, a session may hold."""

T = TypeVar("T")


class SessionHandlers:
    """Answers the requests of sessions. Called by the server's thread alone.

    ``end_session`` releases all that a session holds but its reservations, which the caller aborts.

    Args:
        arena: uint8 ``[capacity_bytes]``; spans are offsets in it.
        may_lookup_wait: whether a lookup may wait for a network; it then runs in another thread.
    """

    def __init__(
        self,
        store: KVStore,
        arena: npt.NDArray[np.uint8],
        may_lookup_wait: bool,
    ) -> None:
        self._store = store
        self._arena_address = arena.ctypes.data
        self._may_lookup_wait = may_lookup_wait
        self._of_request: dict[type[Request[Any]], Callable[..., Answer]] = {
            HelloRequest: self._hello,
            FindMissingRequest: self._find_missing,
            LeaseRequest: self._lease,
            FetchRequest: self._fetch,
            ReleaseRequest: self._release,
            ReserveRequest: self._reserve,
            CommitRequest: self._commit,
            AbortRequest: self._abort,
            PathSegmentsRequest: self._path_segments,
            TrimRequest: self._trim,
            PrefetchRequest: self._prefetch,
            PinRequest: self._pin,
            ReportDamageRequest: self._report_damage,
            TierCostsRequest: self._tier_costs,
            ClearRequest: self._clear,
        }

    def handle(self, session: Session, request: Request[Any], token_ids: TokenIds | None) -> Answer:
        """Do what a request asks. ``token_ids`` is given exactly if the request's type ``has_token_ids``.

        Raises:
            ProtocolError: the request names a model that the session did not say hello with.
            Exception: whatever the store raises, as ``KVStore`` documents it.
        """
        handler = self._of_request[type(request)]
        return handler(session, request) if token_ids is None else handler(session, request, token_ids)

    def end_session(self, session: Session) -> None:
        """Release the leases of a client that is gone, also those that it asked for and that come later."""
        session.pending_leases.clear()
        session.pending_reservations.clear()
        while session.leases:
            self._end_lease(session, *session.leases.popitem())

    def _hello(self, session: Session, request: HelloRequest) -> Answer:
        if request.format != FORMAT_VERSION:
            raise ProtocolError(
                f"the client stores format {request.format}, the daemon keeps format {FORMAT_VERSION}: "
                "run both from one version of krul"
            )
        model = request.model
        if model.fingerprint != request.fingerprint:
            raise ProtocolError(
                f"the model has fingerprint {model.fingerprint} here and {request.fingerprint!r} in the "
                "client: run both from one version of krul"
            )
        session.models.pop(model.fingerprint, None)
        session.models[model.fingerprint] = model
        if len(session.models) > MAX_MODELS:
            # A server whose weights change often names many. A client introduces a forgotten one again.
            del session.models[next(iter(session.models))]
        return Done(id=request.id)

    def _find_missing(self, session: Session, request: FindMissingRequest) -> Answer:
        missing = self._store.find_missing(_model_of(session, request.fingerprint), request.page_keys)
        return FindMissingReply(id=request.id, missing=tuple((run.start, run.stop) for run in missing))

    def _lease(self, session: Session, request: LeaseRequest, token_ids: TokenIds) -> Answer:
        model = _model_of(session, request.fingerprint)
        lease_id, pending = request.lease_id, session.pending_leases
        if lease_id in session.leases or lease_id in pending:
            raise ValueError(f"lease {lease_id} was taken before in this session")
        if len(session.leases) + len(pending) >= MAX_HELD:
            raise ValueError(f"a session can hold {MAX_HELD} leases, not more")
        pending.add(lease_id)

        def finish(future: Future[Lease | None]) -> Reply:
            # Released, or the session ended, before the lease was granted: then nobody will release it again.
            is_wanted = lease_id in pending
            pending.discard(lease_id)
            lease = future.result()
            if lease is None:
                return LeaseReply(id=request.id, num_pages=0, slices=())
            if not is_wanted:
                self._store.release(lease)
                return LeaseReply(id=request.id, num_pages=0, slices=())
            session.leases[lease_id] = lease
            return LeaseReply(id=request.id, num_pages=lease.num_pages, slices=self._slices(lease.slices))

        return self._lookup(lambda: self._store.lease(model, request.page_keys, token_ids), finish)

    def _prefetch(self, session: Session, request: PrefetchRequest, token_ids: TokenIds) -> Answer:
        model = _model_of(session, request.fingerprint)
        return Deferred(
            lambda: self._store.prefetch(model, request.page_keys, token_ids),
            lambda future: PrefetchReply(id=request.id, num_pages=future.result()),
        )

    def _lookup(self, work: Callable[[], T], finish: Callable[[Future[T]], Reply]) -> Answer:
        if self._may_lookup_wait:
            return Deferred(work, finish)
        done: Future[T] = Future()
        try:
            done.set_result(work())
        except Exception as error:
            done.set_exception(error)
        return finish(done)

    def _fetch(self, session: Session, request: FetchRequest) -> Answer:
        lease_id, fetching = request.lease_id, session.fetching
        lease = session.leases.get(lease_id)
        if lease is None:
            raise KeyError(f"lease {lease_id} is unknown or was released")
        if lease_id in fetching:
            raise ValueError(f"lease {lease_id} is being fetched")
        fetching.add(lease_id)

        def finish(future: Future[tuple[SegmentSlice, ...]]) -> Reply:
            fetching.discard(lease_id)
            if lease_id not in session.leases:
                # It was released during the fetch. A release waits for the fetch, so it was left to this.
                self._store.release(lease)
                raise KeyError(f"lease {lease_id} was released")
            return FetchReply(id=request.id, slices=self._slices(future.result()))

        return Deferred(lambda: self._store.fetch(lease), finish, Lane.ROOM)

    def _release(self, session: Session, request: ReleaseRequest) -> Reply:
        session.pending_leases.discard(request.lease_id)
        lease = session.leases.pop(request.lease_id, None)
        if lease is not None:
            self._end_lease(session, request.lease_id, lease)
        return Done(id=request.id)

    def _end_lease(self, session: Session, lease_id: int, lease: Lease) -> None:
        if lease_id not in session.fetching:
            self._store.release(lease)

    def _reserve(self, session: Session, request: ReserveRequest) -> Answer:
        number, pending = request.reservation_id, session.pending_reservations
        if number in session.reservations or number in pending:
            raise ValueError(f"reservation {number} was made before in this session")
        if len(session.reservations) + len(pending) >= MAX_HELD:
            raise ValueError(f"a session can hold {MAX_HELD} reservations, not more")
        pending.add(number)

        def finish(future: Future[Reservation | None]) -> Reply:
            # Not wanted: it was aborted, or the session ended, before it was made.
            is_wanted = number in pending
            pending.discard(number)
            reservation = future.result()
            if reservation is not None and not is_wanted:
                self._store.abort(reservation)
                reservation = None
            if reservation is None:
                return ReserveReply(id=request.id, spans=None)
            session.reservations[number] = reservation
            return ReserveReply(id=request.id, spans=reservation.spans)

        return Deferred(
            lambda: self._store.reserve(request.layer_num_bytes, request.tenant), finish, Lane.ROOM
        )

    def _commit(self, session: Session, request: CommitRequest, token_ids: TokenIds) -> Reply:
        reservation = session.reservations.pop(request.reservation_id, None)
        if reservation is None:
            raise KeyError(f"reservation {request.reservation_id} is unknown, committed or aborted")
        try:
            model = _model_of(session, request.fingerprint)
            manifest = request.manifest.manifest(model, token_ids)
        except (ManifestError, ProtocolError):
            self._store.abort(reservation)
            raise
        segment_id = self._store.commit(reservation, manifest, request.checksums)
        return CommitReply(id=request.id, segment_id=segment_id)

    def _abort(self, session: Session, request: AbortRequest) -> Reply:
        session.pending_reservations.discard(request.reservation_id)
        reservation = session.reservations.pop(request.reservation_id, None)
        if reservation is not None:
            self._store.abort(reservation)
        return Done(id=request.id)

    def _path_segments(self, session: Session, request: PathSegmentsRequest) -> Reply:
        found = self._store.path_segments(_model_of(session, request.fingerprint), request.page_keys)
        return PathSegmentsReply(id=request.id, segments=tuple(found))

    def _pin(self, session: Session, request: PinRequest) -> Answer:
        model = _model_of(session, request.fingerprint)
        return PinReply(id=request.id, num_pages=self._store.pin(model, request.page_keys, request.ttl_s))

    def _tier_costs(self, session: Session, request: TierCostsRequest) -> Answer:
        return TierCostsReply(id=request.id, tier_costs=dict(self._store.tier_costs()))

    def _trim(self, session: Session, request: TrimRequest) -> Answer:
        return Deferred(
            lambda: self._store.trim(request.segment_id, request.layer_first_token, request.layer_num_bytes),
            lambda future: TrimReply(id=request.id, num_bytes=future.result()),
        )

    def _report_damage(self, session: Session, request: ReportDamageRequest) -> Answer:
        return Deferred(
            lambda: self._store.report_damage(request.segment_id, request.reason),
            lambda future: ReportDamageReply(id=request.id, is_damaged=future.result()),
        )

    def _clear(self, session: Session, request: ClearRequest) -> Answer:
        fingerprint = request.fingerprint
        model = _model_of(session, fingerprint) if fingerprint is not None else None

        def finish(future: Future[None]) -> Reply:
            future.result()
            return Done(id=request.id)

        return Deferred(lambda: self._store.clear(model), finish)

    def _slices(self, slices: tuple[SegmentSlice, ...]) -> tuple[SliceSpans, ...]:
        return tuple(SliceSpans.of(part, self._status_span(part)) for part in slices)

    def _status_span(self, part: SegmentSlice) -> Span | None:
        if part.status is None:
            return None
        flags = part.status.flags
        return Span(flags.ctypes.data - self._arena_address, flags.nbytes)


def _model_of(session: Session, fingerprint: str) -> ModelIdentity:
    model = session.models.get(fingerprint)
    if model is None:
        raise ProtocolError(
            f"no model of fingerprint {fingerprint!r} was named in this session: say hello first"
        )
    return model
