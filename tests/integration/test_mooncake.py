"""The Mooncake tier on a real master: what one process stores, another one finds."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_bundled_model import host_tokens, run_example

from demo.server import find_free_port, start_servers, stop_servers
from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.errors import DaemonError
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.dram.arena import Arena
from krul_backend.tiers.objects.lookup import publish
from krul_backend.tiers.objects.mooncake_client import MooncakeClient, MooncakeOptions, require_mooncake
from krul_backend.tiers.objects.object_client import ObjectPart, StoreFullError
from krul_backend.tiers.objects.stored_object import EPOCH_AGE_S, EPOCHS, Epochs, encode_pointer, pointer_key
from krul_sglang.models.find import REFERENCE_MODEL
from tests.crash.conversations import model_of
from tests.crash.conversing import check, converse
from tests.support.daemon_process import running_daemon
from tests.support.forked_server import ForkedServer
from tests.support.scenario import KRUL, STRICT, assert_nothing_left_behind

ROOT = Path(__file__).parents[2]


def find_master() -> str:
    """The program that the client's package installs beside Python."""
    try:
        require_mooncake()
    except DaemonError as error:
        pytest.skip(f"`make mooncake` installs what is missing: {error}")
    master = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    assert master is not None, "mooncake.store is installed, but not mooncake_master"
    return master


class Master:
    """``mooncake_master`` with a metadata server, on ports of its own that it keeps when started again.

    If it crashes it is started again, as a service manager would.
    """

    def __init__(self, log: Path) -> None:
        self._program = find_master()
        self._log = log
        self.rpc_port, self.metadata_port, self._metrics_port = (find_free_port() for _ in range(3))
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        self._process = process = self._run()
        deadline_s = time.monotonic() + 30
        for port in (self.rpc_port, self.metadata_port):
            while not _listens(port):
                assert process.poll() is None, self._log.read_text()
                assert time.monotonic() < deadline_s, self._log.read_text()
                time.sleep(0.02)
        threading.Thread(target=self._keep_running, daemon=True).start()

    def kill(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            process.wait()

    def _run(self) -> subprocess.Popen[bytes]:
        command = [
            self._program,
            f"--rpc_port={self.rpc_port}",
            "--enable_http_metadata_server=true",
            "--http_metadata_server_host=127.0.0.1",
            f"--http_metadata_server_port={self.metadata_port}",
            "--metrics_host=127.0.0.1",
            f"--metrics_port={self._metrics_port}",
        ]
        with self._log.open("ab") as log:
            return subprocess.Popen(command, stdout=log, stderr=log)

    def _keep_running(self) -> None:
        while (process := self._process) is not None:
            code = process.wait()
            time.sleep(0.1)
            if self._process is process:
                log = self._log.read_text()[-2000:]
                warnings.warn(f"mooncake_master ended with {code}: {log}", stacklevel=1)
                self._process = self._run()


class HostProcess:
    """``tests/support/mooncake_host.py`` in a process of its own."""

    def __init__(self, master: Master, log: Path, **options: object) -> None:
        self._log = log
        given = {
            "master_address": f"127.0.0.1:{master.rpc_port}",
            "metadata_server": f"http://127.0.0.1:{master.metadata_port}/metadata",
            "segment_bytes": 64 << 20,
            "buffer_bytes": 16 << 20,
            # A machine under test may be busy; how fast an answer comes is no matter here.
            "lookup_timeout_s": 2.0,
            **options,
        }
        with log.open("wb") as errors:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.support.mooncake_host", json.dumps(given)],
                cwd=ROOT,
                env={**os.environ, "PYTHONPATH": f"{ROOT}:{ROOT / 'backend'}"},
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
            )
        assert self._read() == "ready"

    def call(self, operation: str, *arguments: object) -> Any:
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps([operation, *arguments]).encode() + b"\n")
        self._process.stdin.flush()
        return self._read()

    def close(self) -> None:
        """Ends the way a user would: end of input, tier closed."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        try:
            self._process.wait(60)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            raise

    def _read(self) -> Any:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the host ended: {self._log.read_text()}"
        return json.loads(line)


def _listens(port: int) -> bool:
    try:
        socket.create_connection(("127.0.0.1", port), timeout=1).close()
    except OSError:
        return False
    return True


@pytest.fixture
def master(tmp_path: Path) -> Iterator[Master]:
    master = Master(tmp_path / "master.log")
    master.start()
    yield master
    master.kill()


@contextmanager
def two_hosts(master: Master, tmp_path: Path, **options: object) -> Iterator[tuple[HostProcess, HostProcess]]:
    with (
        closing(HostProcess(master, tmp_path / "one.log", **options)) as one,
        closing(HostProcess(master, tmp_path / "other.log", **options)) as other,
    ):
        yield one, other


def client_of(master: Master, arena: Block | None = None, segment_bytes: int = 64 << 20) -> Any:
    """Use it as a context: the client, which is closed at its end."""
    options = MooncakeOptions(
        f"127.0.0.1:{master.rpc_port}",
        f"http://127.0.0.1:{master.metadata_port}/metadata",
        segment_bytes=segment_bytes,
        buffer_bytes=16 << 20,
    )
    return closing(MooncakeClient(options, arena))


def test_two_hosts_share_segments(master: Master, tmp_path: Path) -> None:
    with two_hosts(master, tmp_path) as (one, other):
        assert other.call("match", "c", 3)[0] == 0
        assert one.call("put", "c", 3, 7)
        time.sleep(1.0)  # The other one remembers for a second that there was nothing.
        assert other.call("match", "c", 5)[0] == 3
        assert other.call("fetch", "c", 3, 7) == "right"
        assert one.call("fetch", "c", 3, 7) == "right"
        stats = other.call("stats")
        assert (stats["read_bytes"], stats["corrupted_segments"]) == (4 << 20, 0)
        assert not stats["is_suspended"]

        # What does not have the bytes that its description says is an error once, then a miss for all.
        assert one.call("put", "damaged", 2, 8, 1)
        assert "wrong checksum" in other.call("fetch", "damaged", 2, 8)
        assert other.call("match", "damaged", 2)[0] == 0
        time.sleep(1.0)
        assert one.call("match", "damaged", 2)[0] == 0
        assert one.call("put", "damaged", 2, 8)
        time.sleep(1.0)
        assert other.call("fetch", "damaged", 2, 8) == "right"

        # New weights: gone here at once, there within a second; what is stored then is found.
        one.call("clear")
        assert one.call("match", "c", 3)[0] == 0
        time.sleep(EPOCH_AGE_S)
        assert other.call("fetch", "c", 3, 7) == "miss"
        assert other.call("put", "c", 3, 9)
        time.sleep(1.0)
        assert one.call("fetch", "c", 3, 9) == "right"


def test_the_ends_of_blocks_are_read_from_another_host(master: Master, tmp_path: Path) -> None:
    """Only they cross the network, in whole ranges; damage before them is nobody's concern."""
    first, second = (1 << 20) + (64 << 10), 128 << 10
    with two_hosts(master, tmp_path) as (one, other):
        assert one.call("put", "c", 3, 7)
        assert one.call("put", "damaged", 3, 8, 0)
        time.sleep(1.0)
        assert other.call("fetch", "c", 3, 7, [first, second]) == "right"
        assert other.call("stats")["read_bytes"] == first + second
        assert one.call("fetch", "c", 3, 7, [64 << 10, 1 << 20]) == "right"
        assert other.call("fetch", "damaged", 3, 8, [first, second]) == "right"
        stats = other.call("stats")
        assert (stats["read_bytes"], stats["corrupted_segments"]) == (2 * (first + second), 0)
        assert "layer 0 came from the Mooncake cluster with a wrong checksum" in other.call(
            "fetch", "damaged", 3, 8
        )


def test_a_client_reads_the_ends_of_objects_into_its_arena(master: Master) -> None:
    """Right bytes, none beside them; an object that is missing, or shorter, is no error."""
    arena = Arena(16 << 20).buffer
    with client_of(master, arena) as client:
        for size in (1, 100, 70_000, 3 << 20):
            value = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
            client.put_blocks([f"o{size}"], [value])
            for num_bytes in sorted({1, min(size, 99), -(-size // 2), size}):
                for block in (arena[64 : 64 + num_bytes], np.empty(num_bytes, np.uint8)):
                    arena[:] = 7
                    assert client.get_into([ObjectPart(f"o{size}", block, size, size - num_bytes)]) == [True]
                    assert np.array_equal(block, value[size - num_bytes :])
                    assert (arena[:64] == 7).all()
                    assert (arena[64 + num_bytes :] == 7).all()
        value = np.random.default_rng(70_000).integers(0, 256, 70_000, dtype=np.uint8)
        for block in (arena[64:30_064], np.empty(30_000, np.uint8)):
            assert client.get_into([ObjectPart("o70000", block, 70_000, start=15_000)]) == [True]
            assert np.array_equal(block, value[15_000:45_000])
        for num_bytes in (50, 100):
            for block in (arena[:num_bytes], np.empty(num_bytes, np.uint8)):
                assert client.get_into([ObjectPart("no such object", block, 100)]) == [False]
        for num_bytes in (50, 1000):
            assert client.get_into([ObjectPart("o100", arena[:num_bytes], 1000, 1000 - num_bytes)]) == [False]


def test_a_client_moves_many_blocks_in_one_call(master: Master) -> None:
    """Each block counts for itself: one that is missing, or half written, is no error of the others."""
    size = 10_000
    arena = Arena(16 << 20).buffer
    arena[:] = np.random.default_rng(0).integers(0, 256, arena.nbytes, dtype=np.uint8)
    blocks = [arena[i * size : (i + 1) * size] for i in range(300)]
    keys = [f"b/{i}" for i in range(300)]
    with client_of(master, arena) as client:
        client.put_blocks(keys, blocks)
        # What is there stays as it is.
        client.put_blocks([*keys[:3], "new"], blocks[3:7])
        assert client.have_all([*keys, "new"])
        into = list(np.split(arena[8 << 20 : (8 << 20) + 302 * size], 302))
        parts = [
            ObjectPart(key, block, size) if i % 3 else ObjectPart(key, block[:5000], size, i)
            for i, (key, block) in enumerate(zip(keys, into, strict=False))
        ]
        # A key that comes twice, one that is not there, memory of the caller's own.
        parts[4] = ObjectPart(keys[1], into[4], size)
        parts[5] = ObjectPart("no such object", into[5], size)
        parts[6] = ObjectPart(keys[6], np.empty(size, np.uint8), size)
        assert client.get_into(parts) == [i != 5 for i in range(300)]
        for i, part in enumerate(parts):
            right = blocks[1 if i == 4 else i]
            assert i == 5 or np.array_equal(part.block, right[part.start :][: part.block.nbytes]), i
        # Another client has begun with an object, and is not done.
        assert client._store.batch_put_session_start(["half"], [size], client._replication) == [0]
        client.put_blocks(["half", "whole"], blocks[:2])
        assert [client.have_all([key]) for key in ("half", "whole")] == [False, True]
        assert client.get("half", size) is None
        halves = [ObjectPart("half", into[0], size), ObjectPart("half", into[1][:50], size)]
        assert client.get_into([*halves, ObjectPart("whole", into[2], size)]) == [False, False, True]
        client.remove(["half", "whole"])
        with pytest.raises(StoreFullError):
            client.put_blocks([f"large/{i}" for i in range(8)], [arena[: 15 << 20]] * 8)


def test_the_epoch_outlives_the_host_that_stored_first(master: Master, tmp_path: Path) -> None:
    """Or all hosts' segments would be lost with that one."""
    with two_hosts(master, tmp_path) as (one, _):
        assert one.call("put", "c", 3, 7)
        with client_of(master, segment_bytes=0) as client:
            epoch = client.get(f"{EPOCHS}/all", 16)
            assert epoch is not None
            one.close()
            assert client.get(f"{EPOCHS}/all", 16) == epoch


def test_what_two_write_at_once_is_neither_lost_nor_refused(master: Master) -> None:
    """By two threads of one daemon, which share a client, and by two daemons: epochs, clears, pointers."""
    with client_of(master) as one, client_of(master) as other, ThreadPoolExecutor(2) as threads:
        for number in range(30):
            model, epochs = f"{number:064x}", [Epochs(time.monotonic) for _ in range(2)]
            clients = (one, other if number % 2 else one)
            first = set(threads.map(partial(Epochs.prefix, may_create=True), epochs, clients, [model] * 2))
            for epoch in epochs:
                epoch.clear(model)
            list(threads.map(Epochs.settle, epochs, clients))
            later = {Epochs(time.monotonic).prefix(client, model) for client in clients}
            assert len((first | later) - {None}) == len(first) + len(later) == 2
            digests = [f"{number:031x}{i}" for i in range(2)]
            for digest in digests:
                one.put(f"p/s/{digest}/m", b"metadata")
            assert all(threads.map(publish, clients, "pp", [model] * 2, digests))
            pointers = set(map(encode_pointer, digests))
            assert pointers == {one.get(pointer_key("p", model, n), 256) for n in range(2)}
            writes = (partial(clients[0].put, model, b"put"), partial(clients[1].replace, model, b"replaced"))
            list(threads.map(lambda write: write(), writes))
            assert one.get(model, 256) == b"replaced"


def test_a_replica_outlives_a_host(master: Master, tmp_path: Path) -> None:
    """Without a second one what lay on the host that ends is a miss."""
    with two_hosts(master, tmp_path) as (one, other):
        with closing(HostProcess(master, tmp_path / "third.log", segment_bytes=0, replicas=2)) as third:
            assert third.call("put", "twice", 3, 7)
        for number in range(6):
            assert one.call("put", f"once{number}", 2, number)
        one.close()
        time.sleep(1.0)
        assert other.call("fetch", "twice", 3, 7) == "right"
        once = {other.call("fetch", f"once{number}", 2, number) for number in range(6)}
        assert "miss" in once
        assert once <= {"right", "miss"}


def test_a_master_that_dies_costs_hits_only(master: Master, tmp_path: Path) -> None:
    with two_hosts(master, tmp_path, lookup_timeout_s=0.05) as (one, other):
        assert one.call("put", "c", 3, 7)
        deadline_s = time.monotonic() + 30
        while other.call("match", "c", 3)[0] == 0:
            assert time.monotonic() < deadline_s
        master.kill()
        time.sleep(1.1)
        before_ticks, started_s = other.call("ticks"), time.monotonic()
        slowest_ms = 0
        while not (stats := other.call("stats"))["is_suspended"]:
            pages, took_ms = other.call("match", f"c{time.monotonic()}", 3)
            assert pages == 0
            slowest_ms = max(slowest_ms, took_ms)
            assert time.monotonic() < deadline_s
        # Nobody waits for the client, which takes seconds to give up, and it stops no other thread.
        assert slowest_ms < 1000
        assert other.call("ticks") - before_ticks > 100 * (time.monotonic() - started_s)
        assert other.call("fetch", "c", 3, 7) == "miss"
        assert other.call("put", "d", 3, 7) is False
        assert stats["failed_reads"] >= 1
        assert (tmp_path / "other.log").read_text().count("left alone") == 1


def test_a_host_that_starts_before_its_master_works_alone(tmp_path: Path) -> None:
    master = Master(tmp_path / "master.log")
    host = HostProcess(master, tmp_path / "host.log")
    try:
        assert host.call("stats")["is_suspended"]
        assert host.call("match", "c", 3)[0] == 0
        assert host.call("put", "c", 3, 7) is False
    finally:
        host.close()
    assert "no Mooncake master" in (tmp_path / "host.log").read_text()


def test_two_daemons_share_conversations(master: Master) -> None:
    """What engines of one host stored is restored on another one, whose daemon never saw it."""
    settings = {
        "master_address": f"127.0.0.1:{master.rpc_port}",
        "metadata_server": f"http://127.0.0.1:{master.metadata_port}/metadata",
        "segment_bytes": "64MiB",
        "buffer_bytes": "16MiB",
        "lookup_timeout_s": "2",
    }
    given = [word for name, value in settings.items() for word in ("--mooncake", f"{name}={value}")]
    model = model_of(0)
    with (
        running_daemon("--host-memory", "32MiB", *given) as (here, _),
        running_daemon("--host-memory", "32MiB", *given) as (there, _),
    ):
        store = DaemonStore(here, model=model, request_timeout_s=20.0)
        turns = converse(store, model, "shared", num_turns=5)
        with AdminClient(here) as admin:
            assert admin.flush(60.0)
        store.close()
        store = DaemonStore(there, model=model, request_timeout_s=20.0)
        check(store, model, turns)
        stats = store.stats()
        store.close()
    assert stats.tier_hit_pages["mooncake"] == turns[-1].end_page
    assert (stats.fetched_segments, stats.failed_fetches, stats.num_leases) == (len(turns), 0, 0)


@pytest.mark.server
def test_a_conversation_of_the_example_goes_on_on_another_host(master: Master) -> None:
    settings = (
        f"master_address=127.0.0.1:{master.rpc_port}",
        f"metadata_server=http://127.0.0.1:{master.metadata_port}/metadata",
        "segment_bytes=64MiB,buffer_bytes=16MiB,lookup_timeout_s=2",
    )
    options = {"host_memory": "64MiB", "planner": "full-load", "mooncake": ",".join(settings)}
    args = (
        *("--page-size", "16", "--max-total-tokens", "2048", "--enable-cache-report"),
        *("--unified-cache-external-linker-config", json.dumps(options)),
        *KRUL,
    )
    servers = [ForkedServer(REFERENCE_MODEL, args=args, env=STRICT) for _ in range(2)]
    start_servers(servers)
    try:
        first, shared, second = run_example("two_hosts.py", *(server.url for server in servers))
        for server in servers:
            assert_nothing_left_behind(server)
    finally:
        stop_servers(servers)
    assert first.startswith("first host")
    assert host_tokens(first) == 0
    assert shared.startswith("in the cluster")
    assert second.startswith("second host")
    assert host_tokens(second) > 400
