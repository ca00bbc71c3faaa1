"""Answers requests: each asks the store, and some change what a session holds."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from msgspec.structs import astuple

from krul_backend.daemon.protocol.messages import (
    MAX_MODELS,
    AbortRequest,
    AdviseRequest,
    ClearRequest,
    CommitRequest,
    DaemonStats,
    DropFastCopiesRequest,
    FetchRequest,
    FindMissingRequest,
    FlushRequest,
    HelloRequest,
    InspectRequest,
    LeaseRequest,
    ListRequest,
    PathSegmentsRequest,
    PingRequest,
    PrefetchRequest,
    ReleaseRequest,
    ReportDamageRequest,
    Request,
    ReserveRequest,
    StatsRequest,
    TierCostsRequest,
    TrimRequest,
    VerifyRequest,
)
from krul_backend.daemon.server.lanes import Deferred, Lane
from krul_backend.daemon.server.sessions import Held, Session
from krul_backend.errors import ManifestError, ProtocolError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity, TokenIds
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import (
    Lease,
    PathSegment,
    Prefetched,
    Reservation,
    SegmentInfo,
    SegmentSlice,
    SegmentTail,
    Span,
)

MAX_FLUSH_S = 600.0
MAX_HELD = 65_536
"""How many leases, and how many reservations, a session may hold."""

T = TypeVar("T")


class SessionHandlers:
    """Answers the requests of sessions. Called by the server's thread alone.

    ``end_session`` releases all that a session holds but its reservations, which the caller aborts.
    ``may_lookup_wait``: a lookup may wait for a network, so it runs in another thread.
    """

    def __init__(self, store: TieredStore, may_lookup_wait: bool) -> None:
        self._store = store
        self._may_lookup_wait = may_lookup_wait
        self._of_request: dict[type[Request[Any]], Callable[..., Any]] = {
            HelloRequest: self._hello,
            FindMissingRequest: self._find_missing,
            LeaseRequest: self._lease,
            FetchRequest: self._fetch,
            ReleaseRequest: self._release,
            ReserveRequest: self._reserve,
            CommitRequest: self._commit,
            AbortRequest: self._abort,
            PathSegmentsRequest: self._path_segments,
            DropFastCopiesRequest: self._drop_fast_copies,
            TrimRequest: self._trim,
            PrefetchRequest: self._prefetch,
            AdviseRequest: self._advise,
            ReportDamageRequest: self._report_damage,
            TierCostsRequest: lambda session, request: self._store.tier_costs(),
            ClearRequest: self._clear,
        }

    def handle(self, session: Session, request: Request[Any], token_ids: TokenIds | None) -> Any:
        """Do what a request asks; returns its result, or ``Deferred``.

        ``token_ids`` is given exactly if the request's type ``has_token_ids``.

        Raises:
            ProtocolError: the request names a model that the session did not say hello with.
            Exception: whatever the store raises, as ``KVStore`` documents it.
        """
        handler = self._of_request[type(request)]
        return handler(session, request) if token_ids is None else handler(session, request, token_ids)

    def end_session(self, session: Session) -> None:
        """Release the leases of a client that is gone, also those that it asked for and that come later."""
        session.leases.pending.clear()
        session.reservations.pending.clear()
        while session.leases.granted:
            self._end_lease(session, *session.leases.granted.popitem())

    def _hello(self, session: Session, request: HelloRequest) -> None:
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

    def _find_missing(self, session: Session, request: FindMissingRequest) -> list[tuple[int, int]]:
        missing = self._store.find_missing(_model_of(session, request.fingerprint), request.page_keys)
        return [(run.start, run.stop) for run in missing]

    def _lease(self, session: Session, request: LeaseRequest, token_ids: TokenIds) -> Any:
        model = _model_of(session, request.fingerprint)
        settle = _ask_for(session.leases, request.lease_id, "lease", self._store.release)

        def finish(future: Future[Lease | None]) -> list[SegmentSlice]:
            lease = settle(future)
            return _without_views(lease.slices) if lease is not None else []

        def work() -> Lease | None:
            return self._store.lease(model, request.page_keys, token_ids, fast_copies=request.fast_copies)

        if self._may_lookup_wait:
            return Deferred(work, finish)
        return finish(_done(work))

    def _prefetch(self, session: Session, request: PrefetchRequest) -> Deferred[Prefetched]:
        tails, priority = _tails_of(request), request.priority
        return self._using(session, request, lambda lease: self._store.prefetch(lease, tails, priority))

    def _fetch(self, session: Session, request: FetchRequest) -> Deferred[list[SegmentSlice]]:
        tails = _tails_of(request)
        return self._using(
            session, request, lambda lease: _without_views(self._store.fetch(lease, tails)), Lane.ROOM
        )

    def _using(
        self,
        session: Session,
        request: FetchRequest | PrefetchRequest,
        call: Callable[[Lease], T],
        lane: Lane = Lane.SHORT,
    ) -> Deferred[T]:
        """Have another thread call something with a lease, which is not released before that has ended.

        Raises:
            KeyError: there is no such lease.
        """
        lease_id, in_use = request.lease_id, session.in_use
        lease = session.leases.granted.get(lease_id)
        if lease is None:
            raise KeyError(f"lease {lease_id} is unknown or was released")
        in_use[lease_id] += 1

        def finish(future: Future[T]) -> T:
            in_use[lease_id] -= 1
            if not in_use[lease_id]:
                del in_use[lease_id]
            if lease_id not in session.leases.granted:
                # A release would have waited for all calls, so it was left to the last one.
                if lease_id not in in_use:
                    self._store.release(lease)
                raise KeyError(f"lease {lease_id} was released")
            return future.result()

        return Deferred(lambda: call(lease), finish, lane)

    def _release(self, session: Session, request: ReleaseRequest) -> None:
        lease = session.leases.take(request.lease_id)
        if lease is not None:
            self._end_lease(session, request.lease_id, lease)

    def _end_lease(self, session: Session, lease_id: int, lease: Lease) -> None:
        if lease_id not in session.in_use:
            self._store.release(lease)

    def _reserve(self, session: Session, request: ReserveRequest) -> Any:
        settle = _ask_for(session.reservations, request.reservation_id, "reservation", self._store.abort)

        def finish(future: Future[Reservation | None]) -> tuple[Span, ...] | None:
            reservation = settle(future)
            return reservation.spans if reservation is not None else None

        def work(*, at_once: bool = False) -> Reservation | None:
            return self._store.reserve(
                request.layer_num_bytes, request.tenant, is_fast_copy=request.is_fast_copy, at_once=at_once
            )

        done = _done(partial(work, at_once=True))
        is_later = done.exception() is None and done.result() is None
        return Deferred(work, finish, Lane.ROOM) if is_later else finish(done)

    def _commit(self, session: Session, request: CommitRequest, token_ids: TokenIds) -> int:
        reservation = session.reservations.granted.pop(request.reservation_id, None)
        if reservation is None:
            raise KeyError(f"reservation {request.reservation_id} is unknown, committed or aborted")
        try:
            model = _model_of(session, request.fingerprint)
            manifest = request.manifest.manifest(model, token_ids)
        except (ManifestError, ProtocolError):
            self._store.abort(reservation)
            raise
        return self._store.commit(reservation, manifest, request.checksums)

    def _abort(self, session: Session, request: AbortRequest) -> None:
        reservation = session.reservations.take(request.reservation_id)
        if reservation is not None:
            self._store.abort(reservation)

    def _path_segments(self, session: Session, request: PathSegmentsRequest) -> list[PathSegment]:
        return self._store.path_segments(_model_of(session, request.fingerprint), request.page_keys)

    def _drop_fast_copies(self, session: Session, request: DropFastCopiesRequest) -> None:
        self._store.drop_fast_copies(_model_of(session, request.fingerprint), request.page_keys)

    def _advise(self, session: Session, request: AdviseRequest) -> Deferred[int]:
        fingerprint, hint = request.fingerprint, request.hint
        model = _model_of(session, fingerprint) if fingerprint is not None else None
        return Deferred(
            lambda: self._store.advise(
                hint, model=model, page_keys=request.page_keys, session=request.session
            ),
            lane=Lane.DROP if hint.drop else Lane.SHORT,
        )

    def _trim(self, session: Session, request: TrimRequest) -> Deferred[int]:
        first_tokens, num_bytes = request.layer_first_token, request.layer_num_bytes
        return Deferred(lambda: self._store.trim(request.segment_id, first_tokens, num_bytes))

    def _report_damage(self, session: Session, request: ReportDamageRequest) -> Deferred[bool]:
        return Deferred(lambda: self._store.report_damage(request.segment_id, request.reason))

    def _clear(self, session: Session, request: ClearRequest) -> Deferred[None]:
        fingerprint = request.fingerprint
        model = _model_of(session, fingerprint) if fingerprint is not None else None
        return Deferred(lambda: self._store.clear(model), lane=Lane.CLEAR, key=(ClearRequest, fingerprint))


def admin_handlers(
    store: TieredStore, daemon_stats: Callable[[], DaemonStats]
) -> dict[type[Request[Any]], Callable[[Any], Any]]:
    """What answers each of ``ADMIN_REQUESTS`` but ``shutdown``, with its result or ``Deferred``.

    They hand out no memory, and remove only damaged segments. To be called by the server's thread alone.
    ``daemon_stats`` returns what the server counts, for the answer to ``stats``.
    """

    # What was listed last, as long as somebody may ask for a later part of it.
    listed: list[SegmentInfo] = []

    def list_segments(request: ListRequest) -> Any:
        def work() -> list[SegmentInfo]:
            return sorted(store.list_segments(), key=lambda info: info.segment_id)

        def finish(future: Future[list[SegmentInfo]]) -> tuple[list[SegmentInfo], int]:
            listed[:] = future.result()
            return part()

        def part() -> tuple[list[SegmentInfo], int]:
            end, num_segments = request.offset + request.limit, len(listed)
            infos = listed[request.offset : end]
            if end >= num_segments:
                listed.clear()
            return infos, num_segments

        return part() if request.offset and listed else Deferred(work, finish)

    def flush(request: FlushRequest) -> Deferred[bool]:
        return Deferred(lambda: store.flush(min(request.timeout_s, MAX_FLUSH_S)), lane=Lane.FLUSH)

    return {
        PingRequest: lambda request: None,
        StatsRequest: lambda request: (store.stats(), daemon_stats()),
        ListRequest: list_segments,
        InspectRequest: lambda request: Deferred(lambda: store.inspect(request.segment_id)),
        VerifyRequest: lambda request: Deferred(store.verify, lane=Lane.VERIFY),
        FlushRequest: flush,
    }


def _ask_for(
    held: Held[T], number: int, kind: str, give_back: Callable[[T], None]
) -> Callable[[Future[T | None]], T | None]:
    """Note that a session asks for a lease or a reservation; returns what takes the store's answer.

    That gives back what was granted, and returns None, if the client or its session has ended it meanwhile:
    nobody would do so later.

    Raises:
        ValueError: the number was used before, or the session holds too many.
    """
    if number in held.granted or number in held.pending:
        raise ValueError(f"{kind} {number} was asked for before in this session")
    if len(held.granted) + len(held.pending) >= MAX_HELD:
        raise ValueError(f"a session can hold {MAX_HELD} {kind}s, not more")
    held.pending.add(number)

    def settle(future: Future[T | None]) -> T | None:
        is_wanted = number in held.pending
        held.pending.discard(number)
        granted = future.result()
        if granted is not None and not is_wanted:
            give_back(granted)
            return None
        if granted is not None:
            held.granted[number] = granted
        return granted

    return settle


def _done(work: Callable[[], T]) -> Future[T]:
    """Do work here and now; returns what comes of it as another thread would."""
    done: Future[T] = Future()
    try:
        done.set_result(work())
    except Exception as error:
        done.set_exception(error)
    return done


def _tails_of(request: FetchRequest | PrefetchRequest) -> list[SegmentTail | None] | None:
    if request.tails is None:
        return None
    return [None if tail is None else SegmentTail(*astuple(tail)) for tail in request.tails]


def _without_views(slices: Iterable[SegmentSlice]) -> list[SegmentSlice]:
    return [part.without_views() for part in slices]


def _model_of(session: Session, fingerprint: str) -> ModelIdentity:
    model = session.models.get(fingerprint)
    if model is None:
        raise ProtocolError(
            f"no model of fingerprint {fingerprint!r} was named in this session: say hello first"
        )
    return model
