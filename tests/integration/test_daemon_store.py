"""A store that a real daemon process keeps, from several threads and processes, and through its failures."""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import numpy.typing as npt
import psutil
import pytest
import torch

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.client.launcher import MAX_RESTARTS, EmbeddedDaemon
from krul_backend.errors import DaemonError, DaemonUnreachableError, ManifestError, TierReadError
from krul_backend.tiers.common.hint import Hint
from krul_backend.tiers.common.interface import block_checksum
from krul_sglang.engine.common.store_connection import ArenaLocks
from tests.support.daemon_builders import WatchedStore
from tests.support.present import present
from tests.support.store_builders import (
    commit_to,
    fill,
    lease_pages,
    make_manifest,
    make_model,
    page_keys,
    put,
    stored_ids,
    tokens_of,
    wait_until,
)
from tests.support.strict_device import StrictDevice

CAPACITY_BYTES = 4 << 20
MODEL = make_model()
ARGUMENTS = ("--host-memory", str(CAPACITY_BYTES), "--eviction", "lru")
ALL_LOCKED = {"bytes": CAPACITY_BYTES, "of_bytes": CAPACITY_BYTES, "error": 0}
REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def shared_daemon() -> Iterator[EmbeddedDaemon]:
    daemon = EmbeddedDaemon(ARGUMENTS)
    # A session that lasts: the daemon ends when it is unused.
    keeper = DaemonStore(daemon.runtime_dir, model=make_model("keeper"))
    yield daemon
    keeper.close()
    daemon.close()


@pytest.fixture
def store(shared_daemon: EmbeddedDaemon) -> Iterator[WatchedStore]:
    store = WatchedStore(shared_daemon.runtime_dir, model=MODEL)
    store.clear()
    yield store
    stats = store.stats()
    assert store.counters.failures == 0
    store.close()
    assert (stats.num_leases, stats.num_reservations) == (0, 0)


@pytest.fixture
def own_daemon() -> Iterator[EmbeddedDaemon]:
    """For tests that hurt it."""
    daemon = EmbeddedDaemon(ARGUMENTS)
    yield daemon
    daemon.close()


def num_held(store: WatchedStore) -> tuple[int, int]:
    stats = store.stats()
    return stats.num_leases, stats.num_reservations


def start_client(daemon: EmbeddedDaemon, body: str) -> subprocess.Popen[str]:
    """Another process with a ``store`` of its own, which has done ``body`` and waits for a line."""
    script = f"""
import sys
from krul_backend.daemon.client.daemon_store import DaemonStore
from tests.support.store_builders import *
store = DaemonStore({str(daemon.runtime_dir)!r}, model=make_model(), request_timeout_s=10.0)
{body}
print("done", flush=True)
sys.stdin.readline()
"""
    path = os.pathsep.join((str(REPOSITORY), str(REPOSITORY / "backend")))
    client = subprocess.Popen(
        [sys.executable, "-c", script],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert client.stdout is not None
    assert client.stdout.readline() == "done\n"
    return client


def test_what_was_written_comes_back(store: WatchedStore) -> None:
    segment_id, written = put(store, "c", 0, 3)
    lease = present(lease_pages(store, "c", 0, 3))
    (part,) = lease.slices
    assert (part.segment_id, part.first_page, part.end_page, lease.num_pages) == (segment_id, 0, 3, 3)
    assert (part.header.start_token, part.header.num_tokens, part.header.codec) == (0, 12, "raw")
    assert (part.header.layer_num_bytes, part.header.layer_first_token) == ((100, 60), (0, 0))
    assert tuple(block.tobytes() for block in part.blocks) == written
    assert tuple(block_checksum(block) for block in part.blocks) == part.checksums
    assert not any(block.flags.writeable for block in part.blocks)
    assert store.fetch(lease) == lease.slices
    assert num_held(store) == (1, 0)
    store.release(lease)
    with pytest.raises(KeyError):
        store.release(lease)
    with pytest.raises(KeyError):
        store.fetch(lease)


def test_nobody_sees_a_segment_before_its_commit(store: WatchedStore) -> None:
    reservation = present(store.reserve((100, 60), tenant="t"))
    assert [span.num_bytes for span in reservation.spans] == [100, 60]
    fill(reservation, 1)
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
    assert lease_pages(store, "c", 0, 2) is None
    commit_to(store, reservation, make_manifest("c", 0, 2, (100, 60)))
    assert not any(block.flags.writeable for block in reservation.blocks)
    assert store.find_missing(MODEL, page_keys("c", 0, 4)) == [range(2, 4)]
    for settle in (store.abort, lambda r: commit_to(store, r, make_manifest("c", 0, 2, (100, 60)))):
        with pytest.raises(KeyError):
            settle(reservation)


def test_an_aborted_reservation_gives_its_space_back(store: WatchedStore) -> None:
    reservation = present(store.reserve((1000, 0)))
    assert [block.nbytes for block in reservation.blocks] == [1000, 0]
    assert num_held(store) == (0, 1)
    store.abort(reservation)
    assert num_held(store) == (0, 0)
    assert store.stats().used_bytes == 0


def test_other_sizes_than_reserved_are_refused_and_freed(store: WatchedStore) -> None:
    reservation = present(store.reserve((100, 60)))
    with pytest.raises(ManifestError):
        commit_to(store, reservation, make_manifest("c", 0, 2, (100, 61)))
    assert num_held(store) == (0, 0)


def test_what_does_not_fit_is_none(store: WatchedStore) -> None:
    assert store.reserve((CAPACITY_BYTES + 1,)) is None
    assert store.is_connected
    first = present(store.reserve((CAPACITY_BYTES,)))
    assert store.reserve((64,)) is None
    store.abort(first)


def test_a_lease_crosses_segments_and_ends_at_the_first_gap(store: WatchedStore) -> None:
    ids = [put(store, "c", first, end, seed=first)[0] for first, end in ((0, 2), (2, 5), (6, 8))]
    lease = present(lease_pages(store, "c", 1, 8))
    found = [(part.segment_id, part.first_page, part.end_page) for part in lease.slices]
    assert found == [(ids[0], 1, 2), (ids[1], 0, 3)]
    store.release(lease)


def test_a_wrong_token_ends_the_prefix_before_its_page(store: WatchedStore) -> None:
    put(store, "c", 0, 4)
    keys = page_keys("c", 0, 4)
    tokens = tokens_of(keys)
    tokens[9] += 1
    lease = present(store.lease(MODEL, keys, tokens))
    assert lease.num_pages == 2
    store.release(lease)
    assert store.stats().token_mismatches >= 1


def test_models_never_meet(store: WatchedStore) -> None:
    other = make_model("other")
    put(store, "c", 0, 2)
    put(store, "c", 0, 3, model=other)
    assert lease_pages(store, "c", 0, 3, make_model("third")) is None
    lease = present(lease_pages(store, "c", 0, 3, other))
    assert lease.num_pages == 3
    store.release(lease)
    store.clear(other)
    assert store.find_missing(other, page_keys("c", 0, 3)) == [range(3)]
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == []


def test_codec_parameters_and_partial_blocks_come_back(store: WatchedStore) -> None:
    params = {"pairs": [[0, 1]], "t": 0.6, "name": "krül"}
    reservation = present(store.reserve((100, 0)))
    whole = make_manifest("c", 0, 3, (100, 60))
    manifest = dataclasses.replace(
        whole,
        layer_num_bytes=(100, 0),
        layer_first_token=(4, 12),
        codec_params=params,
        tenant="t",
        recompute_s=0.25,
    )
    segment_id = commit_to(store, reservation, manifest)
    lease = present(lease_pages(store, "c", 0, 3))
    header = lease.slices[0].header
    assert (header.codec_params, header.layer_first_token) == (params, (4, 12))
    assert [block.nbytes for block in lease.slices[0].blocks] == [100, 0]
    store.release(lease)
    (info,) = store.list_segments()
    assert (info.segment_id, info.tenant, info.codec_params) == (segment_id, "t", params)


def test_trimming_drops_the_front(store: WatchedStore) -> None:
    segment_id, written = put(store, "c", 0, 3, sizes=(1000, 600), range_bytes=50)
    (path,) = store.path_segments(MODEL, page_keys("c", 0, 3))
    assert (path.segment_id, path.header.layer_first_token) == (segment_id, (0, 0))
    assert store.trim(segment_id, (8, 0), (400, 600)) == 600
    assert store.trim(segment_id, (8, 0), (400, 600)) == 0
    lease = present(lease_pages(store, "c", 0, 3))
    assert lease.slices[0].header.layer_first_token == (8, 0)
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == (written[0][600:], written[1])
    store.release(lease)
    with pytest.raises(ManifestError):
        store.trim(segment_id, (0,), (1,))


def test_damage_is_found_by_who_reads_and_by_verify(
    store: WatchedStore, shared_daemon: EmbeddedDaemon
) -> None:
    bad, _ = put(store, "bad", 0, 2)
    good, _ = put(store, "good", 0, 2)
    worse, _ = put(store, "worse", 0, 2)
    mapped: list[npt.NDArray[np.uint8]] = []
    intruder = DaemonStore(shared_daemon.runtime_dir, model=MODEL, on_arena=mapped.append)
    for conversation in ("bad", "worse"):
        lease = present(lease_pages(store, conversation, 0, 2))
        mapped[0][lease.slices[0].spans[1].offset] ^= 1
        assert block_checksum(lease.slices[0].blocks[1]) != lease.slices[0].checksums[1]
        store.release(lease)
    intruder.close()
    assert store.report_damage(good) is False
    assert store.report_damage(bad) is True
    assert sorted(stored_ids(store)) == [good, worse]
    report = store.admin.verify()
    assert (report.bad_segments, report.num_blocks) == ((worse,), 4)
    assert stored_ids(store) == [good]


def test_pins_costs_prefetch_and_flush(store: WatchedStore) -> None:
    put(store, "c", 0, 2)
    keys = page_keys("c", 0, 2)
    assert store.advise(Hint(ttl_s=60.0), model=MODEL, page_keys=keys) == 2
    assert store.stats().pinned_bytes > 0
    lease = present(lease_pages(store, "c", 0, 2))
    assert store.prefetch(lease).num_pages == 0, "it is in DRAM already"
    store.release(lease)
    assert store.tier_costs() == {}, "there is no tier below"
    assert store.admin.flush(5.0) is True


def test_clear_drops_what_was_reserved_before_it(store: WatchedStore) -> None:
    put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 2))
    reservation = present(store.reserve((100, 60)))
    before = lease.slices[0].blocks[0].tobytes()
    store.clear(MODEL)
    commit_to(store, reservation, make_manifest("c", 0, 2, (100, 60)))
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)]
    assert lease.slices[0].blocks[0].tobytes() == before
    store.release(lease)
    assert store.stats().used_bytes == 0


def test_many_threads_and_another_process_see_the_same_bytes(
    store: WatchedStore, shared_daemon: EmbeddedDaemon
) -> None:
    def work(thread: int) -> None:
        for turn in range(20):
            _, written = put(store, f"c{thread}", turn, turn + 1, seed=100 * thread + turn)
            lease = present(lease_pages(store, f"c{thread}", 0, turn + 1))
            assert lease.num_pages == turn + 1
            assert tuple(block.tobytes() for block in lease.slices[-1].blocks) == written
            store.release(lease)

    with ThreadPoolExecutor(4) as threads:
        worked = threads.map(work, range(4))
        other = start_client(shared_daemon, 'put(store, "elsewhere", 0, 3, sizes=(500, 300), seed=77)')
        list(worked)
    lease = present(lease_pages(store, "elsewhere", 0, 3))
    expected = np.random.default_rng(77).integers(0, 256, 500, dtype=np.uint8)
    assert lease.slices[0].blocks[0].tobytes() == expected.tobytes()
    store.release(lease)
    other.communicate("\n", timeout=30)
    assert other.returncode == 0


def test_a_client_that_is_killed_loses_its_leases_and_reservations(
    store: WatchedStore, shared_daemon: EmbeddedDaemon
) -> None:
    put(store, "c", 0, 2)
    body = 'r = store.reserve((1000, 1000)); r.blocks[0][:500] = 1; lease = lease_pages(store, "c", 0, 2)'
    client = start_client(shared_daemon, body)
    assert num_held(store) == (1, 1)
    client.kill()
    client.communicate()
    wait_until(lambda: num_held(store) == (0, 0))
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == []


def test_a_daemon_that_hangs_is_waited_for_until_a_ping_is_unanswered(own_daemon: EmbeddedDaemon) -> None:
    store = DaemonStore(own_daemon.runtime_dir, model=MODEL, request_timeout_s=0.5, hang_timeout_s=0.5)
    put(store, "c", 0, 2)
    kept = present(lease_pages(store, "c", 0, 2))
    reservation = present(store.reserve((100, 60)))
    os.kill(own_daemon.pid, signal.SIGSTOP)
    assert lease_pages(store, "c", 0, 2) is None
    assert store.counters.timeouts == 1
    wait_until(lambda: not store.is_connected)
    requests_before = store.counters.requests
    assert store.reserve((10, 10)) is None
    assert lease_pages(store, "c", 0, 2) is None
    store.release(kept)
    store.abort(reservation)
    assert store.counters.requests == requests_before, "nothing was waited for"
    os.kill(own_daemon.pid, signal.SIGCONT)
    wait_until(lambda: store.is_connected)
    wait_until(lambda: num_held(store) == (0, 0))
    lease = present(lease_pages(store, "c", 0, 2))
    store.release(lease)
    assert (store.counters.lost, store.counters.reconnects) == (1, 1)
    store.close()


def test_a_daemon_that_is_killed_is_started_again(own_daemon: EmbeddedDaemon) -> None:
    store = DaemonStore(own_daemon.runtime_dir, model=MODEL, restart=own_daemon.restart)
    bystander = DaemonStore(own_daemon.runtime_dir, model=MODEL)
    _, written = put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 2))
    reservation = present(store.reserve((10, 10)))
    os.kill(own_daemon.pid, signal.SIGKILL)
    wait_until(lambda: store.counters.reconnects == 1 and bystander.counters.reconnects == 1)
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == written
    reservation.blocks[0][:] = 3
    store.release(lease)
    store.abort(reservation)
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == [range(2)], "DRAM went with the daemon"
    _, again = put(bystander, "c", 0, 2, seed=5)
    lease = present(lease_pages(store, "c", 0, 2))
    assert tuple(block.tobytes() for block in lease.slices[0].blocks) == again
    store.release(lease)
    assert num_held(store) == (0, 0)
    assert store.counters.lost == 1
    store.close()
    bystander.close()


def test_the_arena_of_a_daemon_that_died_stays_locked_while_it_is_copied_from(
    own_daemon: EmbeddedDaemon,
) -> None:
    device = StrictDevice()
    locks = ArenaLocks(device)
    store = DaemonStore(own_daemon.runtime_dir, model=MODEL, on_arena=locks.add, restart=own_daemon.restart)
    locks.begin()
    wait_until(lambda: locks.as_dict() == ALL_LOCKED)
    _, written = put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 2))
    (old_pages,) = device.module.locked
    assert store.is_held(lease)
    os.kill(own_daemon.pid, signal.SIGKILL)
    wait_until(lambda: store.counters.reconnects == 1)
    assert not store.is_held(lease)
    block = lease.slices[0].blocks[0]
    loading = device.new_stream()
    with device.on_stream(loading):
        arrived = device.upload(torch.from_numpy(block))
    assert device.module.pageable_copies == 0
    # The new one beside it.
    wait_until(lambda: locks.as_dict() == ALL_LOCKED)
    assert len(device.module.locked) == 2
    device.synchronize(loading)
    assert arrived.numpy().tobytes() == written[0]
    store.release(lease)
    del block, lease
    assert device.module.unlocked.acquire(timeout=30)
    (new_pages,) = device.module.locked
    assert new_pages != old_pages
    store.close()
    device.check()


def test_clear_while_the_daemon_hangs_is_done_before_the_next_lease(own_daemon: EmbeddedDaemon) -> None:
    store = DaemonStore(own_daemon.runtime_dir, model=MODEL, request_timeout_s=0.3)
    put(store, "c", 0, 2)
    os.kill(own_daemon.pid, signal.SIGSTOP)
    assert store.find_missing(MODEL, page_keys("c", 0, 2)) == []
    store.clear(MODEL)
    os.kill(own_daemon.pid, signal.SIGCONT)
    wait_until(lambda: store.is_connected)
    assert lease_pages(store, "c", 0, 2) is None
    assert store.stats().num_segments == 0
    store.close()


def test_the_command_lines_client(store: WatchedStore, shared_daemon: EmbeddedDaemon) -> None:
    segment_id, _ = put(store, "c", 0, 2)
    with AdminClient(shared_daemon.runtime_dir) as admin:
        admin.ping()
        stats, daemon = admin.stats()
        assert (stats.num_segments, stats.capacity_bytes) == (1, CAPACITY_BYTES)
        assert daemon.pid == shared_daemon.pid
        assert [info.segment_id for info in admin.list_segments()] == [segment_id]
        info = present(admin.inspect(segment_id))
        assert info.info.num_bytes == sum(info.layer_num_bytes) == 160
        assert admin.inspect(segment_id + 1000) is None
        assert admin.verify().num_blocks == 2


def test_the_command_lines_client_can_end_a_daemon(own_daemon: EmbeddedDaemon) -> None:
    with AdminClient(f"ipc://{own_daemon.runtime_dir}/daemon.sock", timeout_s=2.0) as admin:
        admin.shutdown()
        wait_until(lambda: not psutil.pid_exists(own_daemon.pid))
    with pytest.raises(DaemonUnreachableError, match="no krul daemon"):
        AdminClient(own_daemon.runtime_dir)


def test_the_command_lines_client_takes_no_address_of_a_network() -> None:
    with pytest.raises(DaemonError, match="tcp://127"):
        AdminClient("tcp://127.0.0.1:1")


def test_an_embedded_daemon_lives_in_a_private_directory_and_leaves_none() -> None:
    daemon = EmbeddedDaemon(ARGUMENTS)
    assert daemon.runtime_dir.stat().st_mode & 0o777 == 0o700
    assert os.getpgid(daemon.pid) != os.getpgrp(), "Ctrl-C would reach it"
    pid = daemon.pid
    daemon.close()
    daemon.close()
    assert not daemon.runtime_dir.exists()
    # Nobody's child: who adopted it may not have buried it yet.
    with contextlib.suppress(psutil.NoSuchProcess):
        assert psutil.Process(pid).status() == psutil.STATUS_ZOMBIE


def shut_down(runtime_dir: Path, pid: int) -> None:
    """Ask a daemon to end, and wait until its process is gone."""
    end = os.pidfd_open(pid)
    try:
        with AdminClient(runtime_dir) as admin:
            admin.shutdown()
        assert select.select([end], [], [], 20)[0], "it did not end"
    finally:
        os.close(end)


def test_an_embedded_daemon_leaves_a_users_own_directory_as_it_is() -> None:
    with tempfile.TemporaryDirectory(prefix="krul-test-", dir="/tmp") as own:
        (Path(own) / "notes").write_text("precious")
        (Path(own) / "daemon.log").write_text("not this daemon's")
        command = [sys.executable, "-m", "krul_backend.daemon", "serve", "--embedded", "--runtime-dir", own]
        with subprocess.Popen([*command, *ARGUMENTS], stdout=subprocess.PIPE) as starter:
            assert starter.stdout is not None
            shut_down(Path(own), json.loads(starter.stdout.readline())["pid"])
        assert (Path(own) / "notes").read_text() == "precious"
        assert (Path(own) / "daemon.log").read_text() == "not this daemon's"


def test_what_somebody_put_beside_an_embedded_daemon_stays() -> None:
    daemon = EmbeddedDaemon(ARGUMENTS)
    foreign = daemon.runtime_dir / "notes"
    foreign.write_text("precious")
    shut_down(daemon.runtime_dir, daemon.pid)
    assert [entry.name for entry in daemon.runtime_dir.iterdir()] == ["notes"]
    assert foreign.read_text() == "precious"
    foreign.unlink()
    daemon.close()


@pytest.mark.parametrize(("name", "is_used"), [("x", True), ("x" * 100, False)])
def test_the_users_runtime_directory_is_used_if_a_socket_fits(
    monkeypatch: pytest.MonkeyPatch, name: str, is_used: bool
) -> None:
    with tempfile.TemporaryDirectory(dir="/tmp") as root:
        parent = Path(root) / name
        parent.mkdir()
        monkeypatch.setenv("XDG_RUNTIME_DIR", str(parent))
        daemon = EmbeddedDaemon(ARGUMENTS)
        assert (daemon.runtime_dir.parent == parent) is is_used
        daemon.close()
        assert list(parent.iterdir()) == []


def test_a_daemon_that_cannot_start_says_why() -> None:
    with pytest.raises(DaemonError, match="nonsense"):
        EmbeddedDaemon(("--host-memory", "nonsense"))


def test_a_daemon_is_not_restarted_for_ever(own_daemon: EmbeddedDaemon) -> None:
    for _ in range(MAX_RESTARTS):
        own_daemon.restart()
    with pytest.raises(DaemonError, match="is not started again"):
        own_daemon.restart()


def test_fetching_from_a_daemon_that_is_gone_is_a_read_error(own_daemon: EmbeddedDaemon) -> None:
    store = DaemonStore(own_daemon.runtime_dir, model=MODEL)
    put(store, "c", 0, 2)
    lease = present(lease_pages(store, "c", 0, 2))
    (part,) = lease.slices
    far_part = dataclasses.replace(part, tier="ssd", blocks=(), spans=())
    far = dataclasses.replace(lease, slices=(far_part,))
    assert store.fetch(far)[0].spans == part.spans
    os.kill(own_daemon.pid, signal.SIGKILL)
    wait_until(lambda: not store.is_connected)
    with pytest.raises(TierReadError):
        store.fetch(far)
    assert store.fetch(lease) == lease.slices, "in DRAM it needs nobody"
    store.close()
