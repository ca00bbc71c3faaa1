"""What a session holds, whatever comes between a request and its answer."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import pytest

from krul_backend.daemon.replies import LeaseReply, Reply
from krul_backend.daemon.requests import HelloRequest, LeaseRequest, ReleaseRequest
from krul_backend.daemon.session_handlers import MAX_MODELS, Deferred, SessionHandlers
from krul_backend.daemon.sessions import Session
from krul_backend.daemon.wire import model_to_wire
from krul_backend.errors import ProtocolError, TierReadError
from krul_backend.segment import FORMAT_VERSION, ModelIdentity
from krul_backend.store.host_store import HostStore
from tests.unit.store_builders import make_model, page_keys, put, tokens_of

MODEL = make_model()
KEYS = page_keys("c", 0, 2)
LEASE = LeaseRequest(token="t", id=1, fingerprint=MODEL.fingerprint, page_keys=KEYS, lease_id=5)
RELEASE = ReleaseRequest(token="t", id=2, lease_id=5)


@pytest.fixture
def store() -> Iterator[HostStore]:
    store = HostStore(1 << 20)
    put(store, "c", 0, 2)
    yield store
    store.close()


@pytest.fixture
def session() -> Iterator[Session]:
    mine, its = socket.socketpair()
    with mine, its:
        session = Session("t", its, 1, 0.0)
        session.models[MODEL.fingerprint] = MODEL
        yield session


def defer(handlers: SessionHandlers, session: Session) -> Deferred[Any]:
    answer = handlers.handle(session, LEASE, tokens_of(KEYS))
    assert isinstance(answer, Deferred)
    return answer


def finish(deferred: Deferred[Any], future: Future[Any] | None = None) -> LeaseReply:
    if future is None:
        future = Future()
        future.set_result(deferred.work())
    reply = deferred.finish(future)
    assert isinstance(reply, LeaseReply)
    return reply


def test_a_lookup_that_may_ask_a_network_is_left_to_another_thread(
    store: HostStore, session: Session
) -> None:
    handlers = SessionHandlers(store, store.buffer, may_lookup_wait=True)
    deferred = defer(handlers, session)
    assert store.stats().lookups == 0
    assert finish(deferred).num_pages == 2
    assert list(session.leases) == [5]
    assert isinstance(handlers.handle(session, RELEASE, None), Reply)
    assert store.stats().num_leases == 0


def test_a_lookup_of_local_tiers_is_answered_at_once(store: HostStore, session: Session) -> None:
    reply = SessionHandlers(store, store.buffer, False).handle(session, LEASE, tokens_of(KEYS))
    assert isinstance(reply, LeaseReply)
    assert store.stats().num_leases == 1


@pytest.mark.parametrize("when", ["before the lookup", "after the lookup"])
def test_a_lease_released_before_it_was_granted_is_not_kept(
    store: HostStore, session: Session, when: str
) -> None:
    handlers = SessionHandlers(store, store.buffer, may_lookup_wait=True)
    deferred = defer(handlers, session)
    future: Future[Any] = Future()
    if when == "after the lookup":
        future.set_result(deferred.work())
    handlers.handle(session, RELEASE, None)
    if when == "before the lookup":
        future.set_result(deferred.work())
    assert finish(deferred, future).num_pages == 0
    assert (session.leases, store.stats().num_leases) == ({}, 0)


def test_a_lease_granted_to_a_session_that_ended_is_not_kept(store: HostStore, session: Session) -> None:
    handlers = SessionHandlers(store, store.buffer, may_lookup_wait=True)
    deferred = defer(handlers, session)
    handlers.end_session(session)
    assert finish(deferred).num_pages == 0
    assert (session.leases, store.stats().num_leases) == ({}, 0)


def test_a_lookup_that_failed_leaves_nothing_behind(store: HostStore, session: Session) -> None:
    handlers = SessionHandlers(store, store.buffer, may_lookup_wait=True)
    deferred = defer(handlers, session)
    failed: Future[Any] = Future()
    failed.set_exception(TierReadError("gone"))
    with pytest.raises(TierReadError, match="gone"):
        deferred.finish(failed)
    assert finish(defer(handlers, session)).num_pages == 2, "the number is free again"


def test_one_number_cannot_be_asked_for_twice_at_a_time(store: HostStore, session: Session) -> None:
    handlers = SessionHandlers(store, store.buffer, may_lookup_wait=True)
    deferred = defer(handlers, session)
    with pytest.raises(ValueError, match="lease 5 was taken before"):
        handlers.handle(session, LEASE, tokens_of(KEYS))
    assert finish(deferred).num_pages == 2
    with pytest.raises(ValueError, match="lease 5 was taken before"):
        handlers.handle(session, LEASE, tokens_of(KEYS))


def test_the_models_of_a_session_are_bounded(store: HostStore, session: Session) -> None:
    handlers = SessionHandlers(store, store.buffer, False)

    def say_hello(model: ModelIdentity) -> None:
        wire, fingerprint = model_to_wire(model), model.fingerprint
        hello = HelloRequest(token="t", id=1, format=FORMAT_VERSION, model=wire, fingerprint=fingerprint)
        handlers.handle(session, hello, None)

    for i in range(MAX_MODELS - 1):
        say_hello(make_model(f"model-{i}"))
    say_hello(MODEL)
    with pytest.raises(ProtocolError, match=f"{MAX_MODELS} models"):
        say_hello(make_model("one more"))
    assert len(session.models) == MAX_MODELS
