"""The daemon as a process: its sockets, what it holds for whom, and its end."""

from __future__ import annotations

import json
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import msgspec
import numpy as np
import pytest

from krul_backend.daemon.protocol.frames import encode, pack
from krul_backend.daemon.protocol.messages import (
    MAX_FRAME_BYTES,
    PROTOCOL_VERSION,
    AbortRequest,
    AdviseRequest,
    ClearRequest,
    CommitRequest,
    ErrorReply,
    FetchRequest,
    FindMissingRequest,
    FlushRequest,
    HelloRequest,
    InspectRequest,
    LeaseRequest,
    ListRequest,
    ManifestFields,
    PathSegmentsRequest,
    PingRequest,
    PrefetchRequest,
    ReleaseRequest,
    ReportDamageRequest,
    ReserveRequest,
    ShutdownRequest,
    StatsRequest,
    TierCostsRequest,
    TrimRequest,
    VerifyRequest,
)
from krul_backend.daemon.server.server import NEVER_USED_S, UNUSED_S
from krul_backend.segment import FORMAT_VERSION
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import StoreStats, block_checksum
from krul_backend.tiers.common.record import no_checksums
from tests.support.daemon_client import (
    MODEL,
    SIZES,
    TIMEOUT_S,
    DaemonProcess,
    RawClient,
    connect_raw,
    lease,
    num_pages,
    store,
)
from tests.support.store_builders import make_manifest, page_keys, tokens_of


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DaemonProcess]:
    with DaemonProcess(tmp_path_factory.mktemp("d") / "run") as process:
        yield process


@pytest.fixture
def client(daemon: DaemonProcess) -> Iterator[RawClient]:
    with RawClient(daemon.runtime_dir) as client:
        yield client
        client.say_hello(MODEL)
        client.ask(ClearRequest, fingerprint=None)


def stats(client: RawClient) -> StoreStats:
    return client.ask(StatsRequest)[0]


def eventually(condition: Callable[[], bool]) -> None:
    deadline_s = time.monotonic() + TIMEOUT_S
    while not condition():
        assert time.monotonic() < deadline_s, "this never became true"
        time.sleep(0.02)


def is_refused(talker: RawClient) -> bool:
    """Whether its session has ended: what arrives together with the end is still served."""
    talker.send(PingRequest)
    answer = talker.receive()
    return isinstance(answer, ErrorReply) and answer.code == "protocol"


def test_the_socket_is_private(daemon: DaemonProcess) -> None:
    assert stat.S_IMODE(daemon.runtime_dir.stat().st_mode) == 0o700
    for name in ("daemon.sock", "daemon.lock"):
        assert stat.S_IMODE((daemon.runtime_dir / name).stat().st_mode) == 0o600


def test_a_client_is_greeted_with_the_arena(daemon: DaemonProcess, client: RawClient) -> None:
    assert client.greeting.format == FORMAT_VERSION
    assert client.greeting.capacity_bytes == client.arena.nbytes == 4 << 20
    with RawClient(daemon.runtime_dir) as other:
        assert other.greeting.token != client.greeting.token
        client.arena[4_000_000] = 77
        assert other.arena[4_000_000] == 77


def test_what_one_client_stores_another_restores(daemon: DaemonProcess, client: RawClient) -> None:
    with RawClient(daemon.runtime_dir) as writer:
        first = store(writer, "shared", 0, 2)
        second = store(writer, "shared", 2, 3, number=2, seed=1)
    client.say_hello(MODEL)
    granted = lease(client, "shared", 5)
    assert num_pages(granted) == 3
    assert [part.segment_id for part in granted] == [first, second]
    for part, seed in zip(granted, (0, 1), strict=True):
        rng = np.random.default_rng(seed)
        assert part.status_span is None
        assert part.header.layer_num_bytes == SIZES
        for block, checksum in zip(client.blocks(part.spans), part.checksums, strict=True):
            assert block_checksum(block) == checksum
            assert block.tolist() == rng.integers(0, 256, block.nbytes, dtype=np.uint8).tolist()
    fetched = client.ask(FetchRequest, lease_id=1)
    assert msgspec.json.encode(fetched) == msgspec.json.encode(granted)
    assert stats(client).num_leases == 1
    client.ask(ReleaseRequest, lease_id=1)
    assert stats(client).num_leases == 0


def test_every_other_operation_reaches_the_store(client: RawClient) -> None:
    segment_id = store(client, "ops", 0, 2)
    model = {"fingerprint": MODEL.fingerprint, "page_keys": page_keys("ops", 0, 4)}
    assert client.ask(FindMissingRequest, **model) == ((2, 4),)
    (found,) = client.ask(PathSegmentsRequest, **model)
    assert (found.segment_id, found.header.num_tokens) == (segment_id, 8)
    lease(client, "ops", 2, number=9)
    assert client.ask(PrefetchRequest, lease_id=9).num_pages == 0
    client.ask(ReleaseRequest, lease_id=9)
    assert client.ask(AdviseRequest, hint=Hint(ttl_s=60.0), **model) == 2
    ((listed,), _) = client.ask(ListRequest)
    assert (listed.segment_id, listed.num_bytes, listed.tiers) == (segment_id, 160, ("dram",))
    assert 0 < listed.pinned_s <= 60
    assert client.ask(InspectRequest, segment_id=segment_id) is not None
    assert client.ask(InspectRequest, segment_id=1 << 40) is None
    assert client.ask(TierCostsRequest) == {}
    assert client.ask(FlushRequest, timeout_s=5.0)
    assert client.ask(VerifyRequest).bad_segments == ()
    trim = client.ask(TrimRequest, segment_id=segment_id, layer_first_token=(8, 0), layer_num_bytes=(0, 60))
    assert trim == 100
    granted = lease(client, "ops", 2)
    client.blocks(granted[0].spans)[1][0] ^= 1
    report = {"segment_id": segment_id, "reason": "checksum"}
    assert client.ask(ReportDamageRequest, **report)
    client.ask(ReleaseRequest, lease_id=1)
    assert lease(client, "ops", 2, number=2) == ()
    assert stats(client).corrupted_segments >= 1


def test_the_list_comes_in_parts(client: RawClient) -> None:
    ids = [store(client, f"list-{i}", 0, 1, number=i) for i in range(5)]
    page, num_segments = client.ask(ListRequest, offset=1, limit=3)
    assert [info.segment_id for info in page] == ids[1:4]
    assert num_segments == 5


def test_errors_have_types(client: RawClient) -> None:
    keys = page_keys("errors", 0, 2)
    asked = {"fingerprint": MODEL.fingerprint, "page_keys": keys}
    assert client.ask_wrongly(LeaseRequest, tokens_of(keys), lease_id=1, **asked) == "protocol", "no hello"
    client.say_hello(MODEL)
    assert client.ask_wrongly(LeaseRequest, tokens_of(keys)[1:], lease_id=1, **asked) == "value"
    assert client.ask_wrongly(FetchRequest, lease_id=5) == "key"
    assert client.ask_wrongly(ReserveRequest, reservation_id=1, layer_num_bytes=(), tenant="") == "value"
    assert client.ask_wrongly(AdviseRequest, hint=Hint(demote=True)) == "value"
    hello = {"model": MODEL, "fingerprint": MODEL.fingerprint}
    assert client.ask_wrongly(HelloRequest, format=FORMAT_VERSION + 1, **hello) == "protocol"
    hello["fingerprint"] = "0" * 32
    assert client.ask_wrongly(HelloRequest, format=FORMAT_VERSION, **hello) == "protocol"


def test_a_commit_that_is_refused_gives_its_space_back(client: RawClient) -> None:
    client.say_hello(MODEL)
    used_bytes = stats(client).used_bytes
    manifest = make_manifest("refused", 0, 2, SIZES, MODEL)
    fields = ManifestFields.of(manifest)
    wire = {"fingerprint": MODEL.fingerprint, "manifest": fields, "checksums": no_checksums(manifest)}
    for number, sizes, token_ids in ((1, SIZES, manifest.token_ids[1:]), (2, (100, 61), manifest.token_ids)):
        reserve = {"reservation_id": number, "layer_num_bytes": sizes, "tenant": ""}
        client.ask(ReserveRequest, **reserve)
        assert client.ask_wrongly(CommitRequest, token_ids, reservation_id=number, **wire) == "manifest"
        assert client.ask_wrongly(CommitRequest, token_ids, reservation_id=number, **wire) == "key"
    assert (stats(client).used_bytes, stats(client).num_reservations) == (used_bytes, 0)


def test_what_is_unknown_may_be_released_and_aborted(client: RawClient) -> None:
    client.ask(ReleaseRequest, lease_id=99)
    client.ask(AbortRequest, reservation_id=99)


def test_a_number_in_use_is_refused(client: RawClient) -> None:
    store(client, "twice", 0, 1)
    lease(client, "twice", 1)
    keys = page_keys("twice", 0, 1)
    asked = {"lease_id": 1, "fingerprint": MODEL.fingerprint, "page_keys": keys}
    assert client.ask_wrongly(LeaseRequest, tokens_of(keys), **asked) == "value"
    assert stats(client).num_leases == 1
    reserve = {"reservation_id": 7, "layer_num_bytes": (64,), "tenant": ""}
    client.ask(ReserveRequest, **reserve)
    assert client.ask_wrongly(ReserveRequest, **reserve) == "value"
    client.ask(AbortRequest, reservation_id=7)


def test_a_reservation_that_does_not_fit_is_none(client: RawClient) -> None:
    too_much = {"reservation_id": 1, "layer_num_bytes": (5 << 20,), "tenant": ""}
    assert client.ask(ReserveRequest, **too_much) is None


CLIENT_THAT_DIES = """
import sys, time
from pathlib import Path
from krul_backend.daemon.protocol.messages import ReserveRequest
from tests.support.daemon_client import MODEL, RawClient, lease, num_pages
client = RawClient(Path(sys.argv[1]))
client.say_hello(MODEL)
assert num_pages(lease(client, "mortal", 2)) == 2
client.ask(ReserveRequest, reservation_id=1, layer_num_bytes=(1000, 1000), tenant="")
print("ready", flush=True)
time.sleep(600)
"""


def test_the_death_of_a_client_frees_what_it_held(daemon: DaemonProcess, client: RawClient) -> None:
    store(client, "mortal", 0, 2)
    used_bytes = stats(client).used_bytes
    mortal = subprocess.Popen(
        [sys.executable, "-c", CLIENT_THAT_DIES, str(daemon.runtime_dir)],
        stdout=subprocess.PIPE,
        text=True,
        cwd=Path(__file__).parents[2],
    )
    assert mortal.stdout is not None
    assert mortal.stdout.readline() == "ready\n"
    before = stats(client)
    assert (before.num_leases, before.num_reservations) == (1, 1)
    mortal.kill()
    mortal.communicate()
    eventually(lambda: stats(client).num_leases == 0)
    # A copy of the dead client may still be under way.
    assert stats(client).num_reservations == 1
    eventually(lambda: stats(client).num_reservations == 0)
    assert stats(client).used_bytes == used_bytes
    assert num_pages(lease(client, "mortal", 2)) == 2, "what was committed stays"


def test_an_ended_session_cannot_ask(daemon: DaemonProcess, client: RawClient) -> None:
    with RawClient(daemon.runtime_dir) as ended:
        ended.session.shutdown(socket.SHUT_WR)
        assert ended.session.recv(1) == b""
        eventually(lambda: is_refused(ended))
        assert ended.ask_wrongly(FetchRequest, lease_id=1) == "protocol"
    assert client.ask_wrongly(PingRequest, token="made-up") == "protocol"


def test_garbage_on_its_connection_ends_a_session(daemon: DaemonProcess) -> None:
    with RawClient(daemon.runtime_dir) as talker:
        talker.session.sendall(b"GET / HTTP/1.1\r\n")
        assert talker.session.recv(1) == b""
        eventually(lambda: is_refused(talker))


def test_people_need_no_session(client: RawClient) -> None:
    client.ask(PingRequest, token="")
    assert client.ask(StatsRequest, token="")[1].num_sessions >= 1
    client.ask(ListRequest, token="")
    assert client.ask(FlushRequest, token="", timeout_s=1.0)
    assert client.ask_wrongly(ClearRequest, token="", fingerprint=None) == "protocol"
    assert client.ask_wrongly(TierCostsRequest, token="") == "protocol"


def test_garbage_is_counted_and_harms_nobody(daemon: DaemonProcess, client: RawClient) -> None:
    bad = client.ask(StatsRequest)[1].bad_messages.get("undecodable", 0)
    rng = np.random.default_rng(0)
    garbage = [
        pack(b""),
        pack(b"{}"),
        pack(b"[" * 200_000),
        pack(rng.bytes(1000)),
        pack(rng.bytes(1 << 20)),
        pack(b"{}", b"1234"),
        pack(encode(PingRequest(token="", id=1))[:-1]),
        b"\xff" + rng.bytes(10_000),
    ]
    for sent in garbage:
        with connect_raw(daemon.runtime_dir) as raw:
            raw.sendall(sent)
            assert raw.recv(1) == b"", "there is no number to answer to"
    answered = client.ask(StatsRequest)[1]
    assert answered.bad_messages["undecodable"] == bad + len(garbage)


def test_what_is_no_request_but_has_an_id_is_answered(client: RawClient) -> None:
    ping = json.loads(encode(PingRequest(token=client.greeting.token, id=41)))
    other_version = {**ping, "version": PROTOCOL_VERSION + 1}
    for fields, said in (
        ({**ping, "op": "teleport"}, "teleport"),
        (other_version, f"the client {PROTOCOL_VERSION + 1}"),
        ({**other_version, "op": "teleport"}, f"the client {PROTOCOL_VERSION + 1}"),
        ({**ping, "extra": 1}, "extra"),
    ):
        client.requests.sendall(pack(json.dumps(fields).encode()))
        answer = client.receive()
        assert isinstance(answer, ErrorReply)
        assert (answer.id, answer.code) == (41, "protocol")
        assert said in answer.message
    client.requests.sendall(pack(json.dumps(ping).encode(), b"1234"))
    answer = client.receive()
    assert isinstance(answer, ErrorReply)
    assert "ping has no token ids, got 4 bytes" in answer.message


def test_a_message_beyond_the_bound_ends_its_connection_alone(
    daemon: DaemonProcess, client: RawClient
) -> None:
    for lengths in ((MAX_FRAME_BYTES + 1, 0), (2, MAX_FRAME_BYTES + 1)):
        with connect_raw(daemon.runtime_dir) as big:
            big.sendall(struct.pack("<II", *lengths))
            assert big.recv(1) == b""
    client.ask(PingRequest)


def test_random_bytes_harm_nobody(daemon: DaemonProcess, client: RawClient) -> None:
    rng = np.random.default_rng(1)
    for num_bytes in (1, 7, 8, 9, 10_000):
        with connect_raw(daemon.runtime_dir) as raw:
            raw.sendall(rng.bytes(num_bytes))
    client.ask(PingRequest)


def test_who_reads_no_replies_is_cut_off_and_holds_nobody_up(
    daemon: DaemonProcess, client: RawClient
) -> None:
    with connect_raw(daemon.runtime_dir) as deaf:
        ping = pack(encode(PingRequest(token="x" * 128, id=1)))
        with pytest.raises(ConnectionError):
            deaf.sendall(ping * 500_000)
    client.ask(PingRequest)


def test_what_is_given_back_while_it_is_asked_for_is_not_kept(client: RawClient) -> None:
    """Abort follows reserve: what a client gives up after a time-out is free, whenever it was granted."""
    reserved = client.send(ReserveRequest, reservation_id=3, layer_num_bytes=(1000,), tenant="")
    aborted = client.send(AbortRequest, reservation_id=3)
    assert {client.receive().id, client.receive().id} == {reserved, aborted}
    assert stats(client).num_reservations == 0


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_ends_it_well(tmp_path: Path, number: signal.Signals) -> None:
    with DaemonProcess(tmp_path / "run") as daemon, RawClient(daemon.runtime_dir) as client:
        store(client, "end", 0, 2)
        lease(client, "end", 2)
        daemon.process.send_signal(number)
        assert client.session.recv(1) == b"", "clients know at once"
        status, log = daemon.end()
        assert status == 0, log
        assert "Traceback" not in log
        assert not (tmp_path / "run" / "daemon.sock").exists()
        assert client.arena.nbytes == 4 << 20
        client.arena[:] = 1


def test_a_signal_ends_it_although_a_clear_hangs(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import threading
        from krul_backend.daemon.server import build_store, lanes
        build_store.TieredStore.clear = lambda store, model: threading.Event().wait()
        lanes._END_TIMEOUT_S = 0.5
        from krul_backend.daemon.cli.app import main
        main()
    """)
    daemon = DaemonProcess(tmp_path / "run", program=("-c", code))
    with daemon, RawClient(daemon.runtime_dir) as client:
        client.send(ClearRequest, fingerprint=None)
        client.ask(PingRequest)
        daemon.process.terminate()
        status, log = daemon.end()
        assert status == 0, log
        assert "Traceback" not in log


def test_it_ends_when_asked(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "run") as daemon, RawClient(daemon.runtime_dir) as client:
        client.ask(ShutdownRequest, token="")
        status, log = daemon.end()
        assert status == 0, log


def test_it_ends_when_nobody_uses_it(tmp_path: Path) -> None:
    with DaemonProcess(tmp_path / "run", "--exit-when-unused") as daemon:
        with RawClient(daemon.runtime_dir) as first, RawClient(daemon.runtime_dir) as second:
            first.close()
            time.sleep(0.2)
            second.ask(PingRequest)
        start_s = time.monotonic()
        status, log = daemon.end()
        assert status == 0, log
        assert UNUSED_S - 1 < time.monotonic() - start_s < NEVER_USED_S


def test_it_says_where_it_serves_and_who_it_is(tmp_path: Path) -> None:
    daemon = DaemonProcess(tmp_path / "run")
    assert daemon.wait_ready() == {
        "ready": True,
        "runtime_dir": str(tmp_path / "run"),
        "pid": daemon.process.pid,
    }
    daemon.process.terminate()
    assert daemon.end()[0] == 0


def test_a_second_one_refuses_the_directory_with_one_line(daemon: DaemonProcess) -> None:
    second = DaemonProcess(daemon.runtime_dir)
    status, log = second.end()
    assert status == 1
    assert log.splitlines() == [
        f"krul-backend: error: {daemon.runtime_dir} is in use by another daemon "
        f"(process {daemon.process.pid})"
    ]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--eviction", "random"), "eviction: got 'random'"),
        (("--mooncake", "master"), "<name>=<value>"),
        (("--ssd-capacity", "1GiB"), "ssd_capacity_bytes"),
        (("--ssd-capacity", "many"), "not a size"),
    ],
)
def test_a_wrong_flag_is_one_line(tmp_path: Path, arguments: tuple[str, ...], said: str) -> None:
    status, log = DaemonProcess(tmp_path / "run", *arguments).end()
    assert status == 2
    assert log.startswith("krul-backend: error: ")
    assert said in log
    assert "Traceback" not in log


def test_it_does_without_torch(tmp_path: Path) -> None:
    code = textwrap.dedent("""
        import sys, krul_backend.daemon.cli.app, krul_backend.daemon.server.serve
        print(*{"torch", "sglang", "scipy"} & set(sys.modules))
    """)
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.split() == []


def test_what_a_library_prints_is_no_message(tmp_path: Path) -> None:
    """Native libraries write to descriptor 1; a parent reads one line there and nothing else."""
    code = textwrap.dedent("""
        import os, sys
        from krul_backend.daemon.server import serve
        build_store = serve.build_store
        def noisy(config):
            os.write(1, b"hello from a library")
            return build_store(config)
        serve.build_store = noisy
        from krul_backend.daemon.cli.app import main
        main()
    """)
    daemon = DaemonProcess(tmp_path / "run", program=("-c", code))
    assert daemon.wait_ready()["ready"]
    daemon.process.terminate()
    status, log = daemon.end()
    assert status == 0
    assert "hello from a library" in log
