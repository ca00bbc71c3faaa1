"""What a session holds, whatever comes between a request and its answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import msgspec
import pytest

from krul_backend.daemon.protocol.messages import (
    MAX_MODELS,
    AbortRequest,
    FetchRequest,
    HelloRequest,
    LeaseRequest,
    PrefetchRequest,
    ReleaseRequest,
    ReserveRequest,
)
from krul_backend.daemon.server.connections import Connection
from krul_backend.daemon.server.handlers import SessionHandlers
from krul_backend.daemon.server.lanes import Deferred
from krul_backend.daemon.server.sessions import Session
from krul_backend.errors import ProtocolError, TierReadError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity
from krul_backend.store.tiered_store import TieredStore
from krul_backend.tiers.common.interface import Prefetched, SegmentSlice
from krul_backend.tiers.dram.host_store import HostStore
from tests.support.daemon_client import num_pages
from tests.support.store_builders import make_model, page_keys, put, tokens_of

MODEL = make_model()
KEYS = page_keys("c", 0, 2)
LEASE = LeaseRequest(token="t", id=1, fingerprint=MODEL.fingerprint, page_keys=KEYS, lease_id=5)
RELEASE = ReleaseRequest(token="t", id=2, lease_id=5)


@pytest.fixture
def store() -> Iterator[TieredStore]:
    store = TieredStore(HostStore(1 << 20))
    put(store, "c", 0, 2)
    yield store
    store.close()


@pytest.fixture
def session() -> Iterator[Session]:
    mine, its = socket.socketpair()
    with mine, its:
        session = Session("t", Connection(its, 1, 0.0))
        session.models[MODEL.fingerprint] = MODEL
        yield session


def defer(handlers: SessionHandlers, session: Session) -> Deferred[Any]:
    answer = handlers.handle(session, LEASE, tokens_of(KEYS))
    assert isinstance(answer, Deferred)
    return answer


def finish(deferred: Deferred[Any], future: Future[Any] | None = None) -> list[SegmentSlice]:
    if future is None:
        future = Future()
        future.set_result(deferred.work())
    slices: list[SegmentSlice] = deferred.finish(future)
    return slices


def test_a_lookup_that_may_ask_a_network_is_left_to_another_thread(
    store: TieredStore, session: Session
) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=True)
    deferred = defer(handlers, session)
    assert store.stats().lookups == 0
    assert num_pages(finish(deferred)) == 2
    assert list(session.leases.granted) == [5]
    assert handlers.handle(session, RELEASE, None) is None
    assert store.stats().num_leases == 0


def test_a_lookup_of_local_tiers_is_answered_at_once(store: TieredStore, session: Session) -> None:
    (part,) = SessionHandlers(store, False).handle(session, LEASE, tokens_of(KEYS))
    assert (part.blocks, len(part.spans)) == ((), 2), "blocks lie in the arena, and do not travel"
    assert store.stats().num_leases == 1


@pytest.mark.parametrize("when", ["before the lookup", "after the lookup"])
def test_a_lease_released_before_it_was_granted_is_not_kept(
    store: TieredStore, session: Session, when: str
) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=True)
    deferred = defer(handlers, session)
    future: Future[Any] = Future()
    if when == "after the lookup":
        future.set_result(deferred.work())
    handlers.handle(session, RELEASE, None)
    if when == "before the lookup":
        future.set_result(deferred.work())
    assert finish(deferred, future) == []
    assert (session.leases.granted, store.stats().num_leases) == ({}, 0)


def test_a_lease_granted_to_a_session_that_ended_is_not_kept(store: TieredStore, session: Session) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=True)
    deferred = defer(handlers, session)
    handlers.end_session(session)
    assert finish(deferred) == []
    assert (session.leases.granted, store.stats().num_leases) == ({}, 0)


def test_a_lookup_that_failed_leaves_nothing_behind(store: TieredStore, session: Session) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=True)
    deferred = defer(handlers, session)
    failed: Future[Any] = Future()
    failed.set_exception(TierReadError("gone"))
    with pytest.raises(TierReadError, match="gone"):
        deferred.finish(failed)
    assert num_pages(finish(defer(handlers, session))) == 2, "the number is free again"


def test_one_number_cannot_be_asked_for_twice_at_a_time(store: TieredStore, session: Session) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=True)
    deferred = defer(handlers, session)
    with pytest.raises(ValueError, match="lease 5 was asked for before"):
        handlers.handle(session, LEASE, tokens_of(KEYS))
    assert num_pages(finish(deferred)) == 2
    with pytest.raises(ValueError, match="lease 5 was asked for before"):
        handlers.handle(session, LEASE, tokens_of(KEYS))


@pytest.fixture
def crowded(store: TieredStore, monkeypatch: pytest.MonkeyPatch) -> TieredStore:
    """A store in which more segments than one look takes have to be evicted for ``ALL``."""
    put(store, "d", 0, 2)
    monkeypatch.setattr("krul_backend.tiers.dram.reservations.MAX_VISITED", 1)
    return store


ALL = (1 << 19, 1 << 19)


def reserve(handlers: SessionHandlers, session: Session) -> Deferred[Any]:
    request = ReserveRequest(token="t", id=3, reservation_id=7, layer_num_bytes=ALL, tenant="")
    answer = handlers.handle(session, request, None)
    assert isinstance(answer, Deferred)
    return answer


def done(deferred: Deferred[Any]) -> Future[Any]:
    future: Future[Any] = Future()
    try:
        future.set_result(deferred.work())
    except Exception as error:
        future.set_exception(error)
    return future


def test_space_that_needs_a_long_look_is_looked_for_in_another_thread(
    crowded: TieredStore, session: Session
) -> None:
    handlers = SessionHandlers(crowded, may_lookup_wait=False)
    deferred = reserve(handlers, session)
    stats = crowded.stats()
    assert (stats.num_reservations, stats.evicted_segments, stats.rejected_reservations) == (0, 0, 0)
    with pytest.raises(ValueError, match="reservation 7 was asked for before"):
        reserve(handlers, session)
    assert tuple(span.num_bytes for span in deferred.finish(done(deferred))) == ALL
    assert list(session.reservations.granted) == [7]
    assert crowded.stats().evicted_segments == 2


def test_space_is_reserved_at_once_where_one_look_is_enough(store: TieredStore, session: Session) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=False)
    for number, sizes in ((7, (100, 60)), (8, (192, (1 << 20) - 384))):
        request = ReserveRequest(token="t", id=3, reservation_id=number, layer_num_bytes=sizes, tenant="")
        spans = handlers.handle(session, request, None)
        assert tuple(span.num_bytes for span in spans) == sizes
        assert number in session.reservations.granted
    assert store.stats().evicted_segments == 1
    request = ReserveRequest(token="t", id=3, reservation_id=9, layer_num_bytes=(), tenant="")
    with pytest.raises(ValueError, match="needs blocks"):
        handlers.handle(session, request, None)
    assert not session.reservations.pending


@pytest.mark.parametrize("ends", ["abort", "session"])
def test_a_reservation_given_back_before_it_was_made_is_not_kept(
    crowded: TieredStore, session: Session, ends: str
) -> None:
    handlers = SessionHandlers(crowded, may_lookup_wait=False)
    deferred = reserve(handlers, session)
    future = done(deferred)
    if ends == "abort":
        handlers.handle(session, AbortRequest(token="t", id=4, reservation_id=7), None)
    else:
        handlers.end_session(session)
    assert deferred.finish(future) is None
    assert (session.reservations.granted, crowded.stats().num_reservations) == ({}, 0)


@pytest.mark.parametrize("ends", ["release", "session", None])
def test_a_lease_released_while_it_is_fetched_ends_after_that(
    store: TieredStore, session: Session, ends: str | None
) -> None:
    handlers = SessionHandlers(store, may_lookup_wait=False)
    handlers.handle(session, LEASE, tokens_of(KEYS))
    fetch = FetchRequest(token="t", id=3, lease_id=5)
    deferred = handlers.handle(session, fetch, None)
    assert isinstance(deferred, Deferred)
    ahead = handlers.handle(session, PrefetchRequest(token="t", id=4, lease_id=5), None)
    if ends == "release":
        handlers.handle(session, RELEASE, None)
    elif ends == "session":
        handlers.end_session(session)
    assert store.stats().num_leases == 1, "the other thread has it"
    of_prefetch, future = done(ahead), done(deferred)
    if ends is None:
        assert ahead.finish(of_prefetch) == Prefetched()
        assert store.stats().num_leases == 1
        assert num_pages(deferred.finish(future)) == 2
        handlers.handle(session, RELEASE, None)
    else:
        with pytest.raises(KeyError, match="lease 5 was released"):
            ahead.finish(of_prefetch)
        assert store.stats().num_leases == 1
        with pytest.raises(KeyError, match="lease 5 was released"):
            deferred.finish(future)
    assert (session.leases.granted, session.in_use, store.stats().num_leases) == ({}, {}, 0)


def test_a_session_knows_the_models_that_said_hello_last(store: TieredStore, session: Session) -> None:
    handlers = SessionHandlers(store, False)

    def say_hello(model: ModelIdentity) -> None:
        fingerprint = model.fingerprint
        hello = HelloRequest(token="t", id=1, format=FORMAT_VERSION, model=model, fingerprint=fingerprint)
        handlers.handle(session, hello, None)

    others = [make_model(f"model-{i}") for i in range(MAX_MODELS)]
    for other in others[:-1]:
        say_hello(other)
    say_hello(MODEL)
    say_hello(others[-1])
    assert list(session.models.values()) == [*others[1:-1], MODEL, others[-1]]
    assert num_pages(handlers.handle(session, LEASE, tokens_of(KEYS))) == 2
    forgotten = msgspec.structs.replace(LEASE, fingerprint=others[0].fingerprint, lease_id=6)
    with pytest.raises(ProtocolError, match="say hello first"):
        handlers.handle(session, forgotten, tokens_of(KEYS))
