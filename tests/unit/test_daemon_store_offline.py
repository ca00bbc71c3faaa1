from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.client_session import DaemonConnection
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.protocol.messages import ErrorReply, ListRequest, Request
from krul_backend.errors import (
    DaemonError,
    DaemonUnreachableError,
    ProtocolError,
    StoreClosedError,
    TierReadError,
)
from krul_backend.segment import SegmentHeader
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import Checksums, Lease, SegmentSlice, Span
from tests.support.fake_daemon import CAPACITY_BYTES, NO_REPLY, FakeDaemon
from tests.support.present import present
from tests.support.stats_builders import make_segment_info
from tests.support.store_builders import (
    commit_to,
    make_manifest,
    make_model,
    page_keys,
    tokens_of,
    wait_until,
)

MODEL = make_model()
KEYS = page_keys("c", 0, 3)
TOKENS = tokens_of(KEYS)
HEADER = SegmentHeader(4, 0, 12, "raw", {}, (100, 60), (0, 0))
SPANS = (Span(0, 100), Span(128, 60))
TIMEOUT_S = 0.3
HANG_TIMEOUT_S = 0.4


def slice_of(
    tier: str,
    spans: tuple[Span, ...],
    *,
    checksums: Checksums = (b"11111111", b"22222222"),
    end_page: int = 3,
    status_span: Span | None = None,
) -> SegmentSlice:
    """A slice as a daemon sends it."""
    return SegmentSlice(7, HEADER, tier, (), spans, checksums, 0, end_page, status_span=status_span)


SLICE = slice_of("dram", SPANS)

Make = Callable[..., DaemonStore]


@pytest.fixture
def runtime_dir() -> Iterator[Path]:
    # Not tmp_path: a socket's path holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="krul-") as path:
        yield Path(path)


@pytest.fixture
def daemon(runtime_dir: Path) -> Iterator[FakeDaemon]:
    daemon = FakeDaemon(runtime_dir)
    yield daemon
    daemon.stop()


@pytest.fixture
def make_store(runtime_dir: Path) -> Iterator[Make]:
    stores = []

    def make(**options: object) -> DaemonStore:
        options.setdefault("request_timeout_s", TIMEOUT_S)
        options.setdefault("hang_timeout_s", HANG_TIMEOUT_S)
        stores.append(DaemonStore(runtime_dir, model=MODEL, **options))  # type: ignore[arg-type]
        return stores[-1]

    yield make
    for store in stores:
        store.close()


def assert_engine_does_without(store: DaemonStore) -> None:
    assert store.lease(MODEL, KEYS, TOKENS) is None
    assert store.reserve((100, 60)) is None
    assert store.find_missing(MODEL, KEYS) == []
    assert store.path_segments(MODEL, KEYS) == []
    assert store.trim(1, (0, 0), (10, 10)) == 0
    assert store.advise(Hint(ttl_s=1.0), model=MODEL, page_keys=KEYS) == 0
    assert store.tier_costs() == {}
    assert store.report_damage(1) is False
    assert store.stats().capacity_bytes == 0


def test_without_a_daemon_the_engine_does_without(make_store: Make) -> None:
    store = make_store()
    assert not store.is_connected
    assert_engine_does_without(store)
    assert store.counters.requests == 0


def test_wrong_arguments_are_errors_without_a_daemon_too(make_store: Make) -> None:
    store = make_store()
    with pytest.raises(ValueError, match="12"):
        store.lease(MODEL, KEYS, TOKENS[:-1])
    with pytest.raises(ValueError, match="-1"):
        store.reserve((-1,))
    with pytest.raises(KeyError):
        store.release(Lease(1, 3, ()))


def test_a_daemon_that_comes_later_is_found(make_store: Make, runtime_dir: Path) -> None:
    mapped: list[int] = []
    store = make_store(on_arena=lambda arena: mapped.append(arena.nbytes))
    daemon = FakeDaemon(runtime_dir)
    try:
        wait_until(lambda: store.is_connected)
        assert mapped == [CAPACITY_BYTES]
        assert store.find_missing(MODEL, KEYS) == [range(3)]
    finally:
        daemon.stop()


def test_a_daemon_of_another_protocol_is_refused_loudly(daemon: FakeDaemon, make_store: Make) -> None:
    daemon.answers["open"] = lambda request: ErrorReply(
        id=request.id, code="protocol", message="it speaks 99"
    )
    with pytest.raises(ProtocolError, match="99"):
        make_store()


def test_an_endpoint_that_shares_no_memory_is_refused(runtime_dir: Path) -> None:
    with pytest.raises(DaemonError, match="tcp://host:1"):
        DaemonStore("tcp://host:1", model=MODEL)


def test_a_directory_too_deep_for_sockets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DaemonError, match="shorter"):
        DaemonStore(tmp_path / ("d" * 100), model=MODEL)


def test_a_reservation_is_a_window_into_the_daemons_memory(daemon: FakeDaemon, make_store: Make) -> None:
    reservation = present(make_store().reserve((3, 0, 2)))
    for i, block in enumerate(reservation.blocks):
        block[:] = i + 1
    assert daemon.arena[:5] == b"\1\1\1\3\3"


def test_one_late_answer_fails_its_own_request_only(
    daemon: FakeDaemon, make_store: Make, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.answers["lease"] = lambda request: (SLICE,)
    store = make_store()
    reservation = present(store.reserve((4, 4)))
    daemon.answers["find_missing"] = lambda request: NO_REPLY
    daemon.answers["commit"] = lambda request: 7
    assert store.find_missing(MODEL, KEYS) == []
    # What another thread has begun goes on, as does what comes next.
    assert commit_to(store, reservation, make_manifest("c", 0, 3, (4, 4))) == 7
    assert store.lease(MODEL, KEYS, TOKENS) is not None
    wait_until(lambda: "ping" in daemon.ops())
    assert store.find_missing(MODEL, KEYS) == []
    del daemon.answers["find_missing"]
    assert store.find_missing(MODEL, KEYS) == [range(3)]
    assert store.is_connected
    assert (store.counters.timeouts, store.counters.lost) == (2, 0)
    assert caplog.records == []


def test_a_daemon_that_hangs_is_not_asked_once_a_ping_is_unanswered(
    daemon: FakeDaemon, make_store: Make
) -> None:
    store = make_store()
    daemon.is_hung.set()
    assert store.find_missing(MODEL, KEYS) == []
    wait_until(lambda: not store.is_connected)
    requests_before = store.counters.requests
    assert_engine_does_without(store)
    assert store.counters.requests == requests_before, "nothing was asked, so nothing was waited for"
    assert (store.counters.timeouts, store.counters.lost) == (1, 1)
    daemon.is_hung.clear()
    wait_until(lambda: store.is_connected)
    # The reply to the first call comes late, and must not be taken for the second call's.
    daemon.answers["find_missing"] = lambda request: ((1, 2),)
    assert store.find_missing(MODEL, KEYS) == [range(1, 2)]
    assert store.counters.reconnects == 1


@pytest.mark.parametrize(
    ("op", "call"),
    [
        ("trim", lambda store: store.trim(1, (0, 0), (1, 1))),
        ("report_damage", lambda store: store.report_damage(1)),
        ("clear", lambda store: store.clear()),
    ],
)
def test_what_may_take_long_is_not_asked_of_a_daemon_that_hangs(
    daemon: FakeDaemon, make_store: Make, op: str, call: Callable[[DaemonStore], object]
) -> None:
    store = make_store()
    daemon.is_hung.set()
    call(store)
    assert store.counters.timeouts == 1
    wait_until(lambda: not store.is_connected)
    daemon.is_hung.clear()
    wait_until(lambda: daemon.ops().count("ping") > 1)
    # A clear is asked for after the next ping that was answered, never before one.
    assert op not in daemon.ops()[: daemon.ops().index("ping") + 2]


def test_what_is_granted_too_late_is_given_back(daemon: FakeDaemon, make_store: Make) -> None:
    store = make_store()
    daemon.is_hung.set()
    assert store.reserve((10,)) is None
    daemon.is_hung.clear()
    wait_until(lambda: store.is_connected)
    daemon.answers["lease"] = lambda request: NO_REPLY
    assert store.lease(MODEL, KEYS, TOKENS) is None
    wait_until(lambda: "release" in daemon.ops())
    ops = [op for op in daemon.ops() if op not in ("hello", "ping")]
    assert ops == ["reserve", "abort", "lease", "release"]
    by_op = dict(zip(daemon.ops(), daemon.requests, strict=True))
    assert by_op["reserve"].reservation_id == by_op["abort"].reservation_id  # type: ignore[attr-defined]
    assert by_op["lease"].lease_id == by_op["release"].lease_id  # type: ignore[attr-defined]


def test_a_lease_is_released_even_while_the_daemon_hangs(daemon: FakeDaemon, make_store: Make) -> None:
    daemon.answers["lease"] = lambda request: (SLICE,)
    store = make_store()
    lease = present(store.lease(MODEL, KEYS, TOKENS))
    daemon.is_hung.set()
    store.find_missing(MODEL, KEYS)
    store.release(lease)
    with pytest.raises(KeyError):
        store.release(lease)
    daemon.is_hung.clear()
    wait_until(lambda: "release" in daemon.ops())


def test_leased_blocks_are_read_only_views(daemon: FakeDaemon, make_store: Make) -> None:
    daemon.arena[128:131] = b"abc"
    fetched = slice_of("ssd", SPANS, status_span=Span(256, 2))
    daemon.answers["lease"] = lambda request: (fetched,)
    lease = present(make_store().lease(MODEL, KEYS, TOKENS))
    (part,) = lease.slices
    assert part.blocks[1][:3].tobytes() == b"abc"
    assert [block.nbytes for block in part.blocks] == [100, 60]
    assert [block.nbytes for block in part.blocks[1:]] == [60]
    assert part.blocks[-1].nbytes == 60
    with pytest.raises(IndexError):
        part.blocks[2]
    with pytest.raises(ValueError, match="read-only"):
        part.blocks[0][0] = 1
    assert part.status is not None
    assert not part.status.has_landed(1)
    daemon.arena[257] = 1
    assert part.status.has_landed(1)


@pytest.mark.parametrize(
    "slices",
    [
        (slice_of("dram", (Span(0, 100), Span(CAPACITY_BYTES - 59, 60))),),
        (slice_of("dram", (Span(-1, 100), Span(128, 60))),),
        (slice_of("dram", (Span(0, 100), Span(128, 61))),),
        (slice_of("dram", ()),),
        (slice_of("dram", SPANS, checksums=(b"11111111",)),),
        (slice_of("dram", SPANS, end_page=4),),
        (slice_of("ssd", SPANS, status_span=Span(0, 1)),),
    ],
)
def test_a_lease_that_makes_no_sense_is_a_miss(
    daemon: FakeDaemon, make_store: Make, slices: tuple[SegmentSlice, ...]
) -> None:
    daemon.answers["lease"] = lambda request: slices
    store = make_store()
    assert store.lease(MODEL, KEYS, TOKENS) is None
    assert store.counters.failures == 1
    wait_until(lambda: daemon.ops()[-1] == "release")


def test_a_reservation_of_other_sizes_is_none(daemon: FakeDaemon, make_store: Make) -> None:
    daemon.answers["reserve"] = lambda request: (Span(0, 9),)
    store = make_store()
    assert store.reserve((10,)) is None
    wait_until(lambda: daemon.ops()[-1] == "abort")


def test_threads_that_end_leave_no_descriptors(daemon: FakeDaemon, make_store: Make) -> None:
    store = make_store()

    def ask_in_a_thread() -> None:
        thread = threading.Thread(target=lambda: store.find_missing(MODEL, KEYS))
        thread.start()
        thread.join()

    def num_descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    ask_in_a_thread()
    before = num_descriptors()
    for _ in range(30):
        ask_in_a_thread()
    assert daemon.ops().count("find_missing") == 31
    assert num_descriptors() == before


def test_long_lists_come_in_parts(daemon: FakeDaemon, runtime_dir: Path) -> None:
    infos = [make_segment_info(i) for i in range(5)]

    def two_of_five(request: Request) -> object:
        assert isinstance(request, ListRequest)
        return infos[request.offset : request.offset + 2], 5

    daemon.answers["list"] = two_of_five
    with AdminClient(runtime_dir) as client:
        assert client.list_segments() == infos
    assert daemon.ops().count("list") == 3


@pytest.mark.parametrize(
    ("op", "call"), [("verify", lambda client: client.verify()), ("flush", lambda client: client.flush(30.0))]
)
def test_what_takes_minutes_is_not_asked_of_a_daemon_that_hangs(
    daemon: FakeDaemon, runtime_dir: Path, op: str, call: Callable[[AdminClient], object]
) -> None:
    daemon.is_hung.set()
    with AdminClient(runtime_dir, timeout_s=TIMEOUT_S) as client, pytest.raises(DaemonUnreachableError):
        call(client)
    daemon.is_hung.clear()
    wait_until(lambda: "ping" in daemon.ops())
    assert op not in daemon.ops()


@pytest.mark.parametrize(
    ("code", "expected"), [("value", ValueError), ("key", KeyError), ("tier-read", TierReadError)]
)
def test_errors_of_the_request_are_the_interfaces(
    daemon: FakeDaemon, make_store: Make, code: str, expected: type[Exception]
) -> None:
    daemon.answers["find_missing"] = lambda request: ErrorReply(id=request.id, code=code, message="so")  # type: ignore[arg-type]
    with pytest.raises(expected, match="so"):
        make_store().find_missing(MODEL, KEYS)


@pytest.mark.parametrize("code", ["internal", "protocol", "closed"])
def test_errors_of_the_daemon_are_said_once_and_done_without(
    daemon: FakeDaemon, make_store: Make, code: str, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.answers["find_missing"] = lambda request: ErrorReply(id=request.id, code=code, message="boom")  # type: ignore[arg-type]
    store = make_store()
    assert [store.find_missing(MODEL, KEYS) for _ in range(3)] == [[], [], []]
    assert store.counters.failures == 3
    assert [record.message for record in caplog.records if "boom" in record.message] == [
        "krul daemon cannot answer 'find_missing' (said once): boom"
    ]
    assert store.is_connected


def test_a_clear_that_was_not_heard_comes_before_the_next_lease(daemon: FakeDaemon, make_store: Make) -> None:
    store = make_store()
    daemon.is_hung.set()
    assert store.find_missing(MODEL, KEYS) == []
    store.clear(MODEL)
    store.clear(MODEL)
    store.clear()
    assert store.lease(MODEL, KEYS, TOKENS) is None
    daemon.is_hung.clear()
    wait_until(lambda: store.is_connected)
    store.lease(MODEL, KEYS, TOKENS)
    ops = [op for op in daemon.ops() if op not in ("hello", "ping")]
    assert ops == ["find_missing", "clear", "clear", "lease"]


def test_a_clear_that_fails_is_not_repeated(
    daemon: FakeDaemon, make_store: Make, caplog: pytest.LogCaptureFixture
) -> None:
    daemon.answers["clear"] = lambda request: ErrorReply(id=request.id, code="internal", message="disk")
    store = make_store()
    store.clear(MODEL)
    assert store.is_connected
    store.find_missing(MODEL, KEYS)
    assert daemon.ops()[-2:] == ["clear", "find_missing"]
    daemon.is_hung.set()
    store.clear()
    assert not store.is_connected
    daemon.is_hung.clear()
    wait_until(lambda: store.is_connected)
    assert daemon.ops().count("clear") == 2
    assert store.counters.failures == 2
    assert [record.message for record in caplog.records if "disk" in record.message] == [
        "krul daemon cannot answer 'clear' (said once): disk"
    ]


@pytest.mark.parametrize("code", ["protocol", "closed"])
def test_a_clear_that_was_not_begun_is_repeated_before_anything_is_leased(
    daemon: FakeDaemon, make_store: Make, code: str
) -> None:
    daemon.answers["clear"] = lambda request: ErrorReply(id=request.id, code=code, message="not now")  # type: ignore[arg-type]
    store = make_store()
    store.clear(MODEL)
    assert store.lease(MODEL, KEYS, TOKENS) is None
    wait_until(lambda: daemon.ops().count("clear") >= 3)
    assert not store.is_connected
    del daemon.answers["clear"]
    wait_until(lambda: store.is_connected)
    assert "lease" not in daemon.ops()


def test_a_clear_outlives_the_daemon(daemon: FakeDaemon, make_store: Make, runtime_dir: Path) -> None:
    store = make_store()
    daemon.stop()
    wait_until(lambda: not store.is_connected)
    store.clear(MODEL)
    other = FakeDaemon(runtime_dir)
    try:
        wait_until(lambda: store.is_connected)
        assert "clear" in other.ops()
    finally:
        other.stop()


def test_a_session_that_ends_is_replaced_and_its_arrays_stay(daemon: FakeDaemon, make_store: Make) -> None:
    arenas: list[np.ndarray] = []
    restarts: list[None] = []
    store = make_store(on_arena=arenas.append, restart=lambda: restarts.append(None))
    first = present(store.reserve((4, 4)))
    second = present(store.reserve((4, 4)))
    first.blocks[0][:] = 5
    daemon.end_sessions()
    wait_until(lambda: store.counters.reconnects == 1)
    assert restarts == [], "the daemon itself was there"
    assert len(arenas) == 2
    ops_before = len(daemon.ops())
    store.abort(first)
    with pytest.raises(StoreClosedError):
        commit_to(store, second, make_manifest("c", 0, 3, (4, 4)))
    with pytest.raises(KeyError):
        store.abort(second)
    assert first.blocks[0].tobytes() == b"\5\5\5\5"
    store.find_missing(MODEL, KEYS)
    assert daemon.ops()[ops_before:] == ["find_missing"], "nothing of the old session was sent"


def test_a_restart_that_fails_does_not_end_the_search(
    daemon: FakeDaemon, make_store: Make, runtime_dir: Path, caplog: pytest.LogCaptureFixture
) -> None:
    def fail() -> None:
        raise DaemonError("five times is enough")

    store = make_store(restart=fail)
    daemon.stop()
    wait_until(lambda: any("five times is enough" in record.message for record in caplog.records))
    other = FakeDaemon(runtime_dir)
    try:
        wait_until(lambda: store.is_connected)
    finally:
        other.stop()


def test_a_daemon_that_dies_again_at_once_is_started_again(
    daemon: FakeDaemon, make_store: Make, runtime_dir: Path
) -> None:
    others: list[FakeDaemon | None] = []

    def restart() -> None:
        # The first one does not live until somebody connects.
        others.append(FakeDaemon(runtime_dir) if others else None)

    store = make_store(restart=restart)
    daemon.stop()
    try:
        # Not at once: that the first one is gone must have been noticed before.
        wait_until(lambda: len(others) == 2 and store.is_connected)
    finally:
        for other in others:
            if other is not None:
                other.stop()


class GatedLock:
    """A lock that stops the first thread that asks for it until the test lets it go on."""

    def __init__(self) -> None:
        self.asked, self.go_on = threading.Event(), threading.Event()
        self._lock = threading.Lock()

    def __enter__(self) -> None:
        if not self.asked.is_set():
            self.asked.set()
            assert self.go_on.wait(10)
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


@pytest.mark.parametrize("call", ["release", "abort", "commit", "fetch"])
def test_a_call_that_meets_the_close_fails_as_after_it(
    daemon: FakeDaemon, make_store: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    daemon.answers["lease"] = lambda request: (SLICE,)
    store = make_store()
    lease, reservation = present(store.lease(MODEL, KEYS, TOKENS)), present(store.reserve((10, 10)))
    calls: dict[str, Callable[[], object]] = {
        "release": lambda: store.release(lease),
        "abort": lambda: store.abort(reservation),
        "commit": lambda: commit_to(store, reservation, make_manifest("c", 0, 3, (10, 10))),
        "fetch": lambda: store.fetch(lease),
    }
    results: list[object] = []

    def record() -> None:
        try:
            results.append(calls[call]())
        except Exception as error:
            results.append(type(error))

    gate = GatedLock()
    monkeypatch.setattr(store, "_lock", gate)
    thread = threading.Thread(target=record)
    thread.start()
    assert gate.asked.wait(10)
    store.close()
    gate.go_on.set()
    thread.join(10)
    assert results == [StoreClosedError if call in ("commit", "fetch") else None]
    # The mapping outlives the store as long as somebody has a view of it.
    assert lease.slices[0].blocks[0].nbytes == 100
    assert reservation.blocks[0].sum() == 0


@pytest.mark.parametrize("call", ["release", "abort"])
def test_what_is_given_back_while_the_session_closes_goes_unsaid(
    daemon: FakeDaemon, make_store: Make, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    """The thread has its connection already when the store and its sockets close."""
    daemon.answers["lease"] = lambda request: (SLICE,)
    store = make_store()
    lease, reservation = present(store.lease(MODEL, KEYS, TOKENS)), present(store.reserve((10, 10)))
    asked, go_on = threading.Event(), threading.Event()
    post = DaemonConnection.post

    def slow_post(connection: DaemonConnection, request: Request) -> None:
        asked.set()
        assert go_on.wait(10)
        post(connection, request)

    monkeypatch.setattr(DaemonConnection, "post", slow_post)
    errors: list[Exception] = []

    def give_back() -> None:
        try:
            store.release(lease) if call == "release" else store.abort(reservation)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=give_back)
    thread.start()
    assert asked.wait(10)
    store.close()
    go_on.set()
    thread.join(10)
    assert errors == []


def test_after_close_only_release_and_abort_are_silent(daemon: FakeDaemon, make_store: Make) -> None:
    daemon.answers["lease"] = lambda request: (SLICE,)
    store = make_store()
    lease, reservation = present(store.lease(MODEL, KEYS, TOKENS)), present(store.reserve((10, 10)))
    store.close()
    store.close()
    store.release(lease)
    store.abort(reservation)
    for call in (
        lambda: store.lease(MODEL, KEYS, TOKENS),
        lambda: commit_to(store, reservation, make_manifest("c", 0, 3, (10, 10))),
        lambda: store.fetch(lease),
        store.stats,
        store.clear,
    ):
        with pytest.raises(StoreClosedError):
            call()
    assert lease.slices[0].blocks[0].nbytes == 100
