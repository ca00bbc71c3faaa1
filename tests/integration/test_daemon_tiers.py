"""A daemon with an SSD tier: what was flushed is there after its end, and comes back layer by layer."""

from __future__ import annotations

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.daemon.client.launcher import EmbeddedDaemon
from krul_backend.daemon.protocol.messages import (
    FetchRequest,
    FlushRequest,
    PrefetchRequest,
    ReleaseRequest,
    StatsRequest,
    TierCostsRequest,
)
from krul_backend.segment import tail_num_bytes
from krul_backend.tiers.common.interface import LayerStatus, SegmentTail, block_checksum
from tests.support.daemon_client import (
    MODEL,
    SIZES,
    TIMEOUT_S,
    DaemonProcess,
    RawClient,
    lease,
    num_pages,
    store,
)
from tests.support.present import present
from tests.support.store_builders import lease_pages, make_model, page_keys, put, wait_until
from tests.support.tiered_builders import wait_for

DISK = ("--ssd-capacity", "256MiB")


def with_disk(path: Path, name: str) -> DaemonProcess:
    return DaemonProcess(path / name, "--ssd-dir", str(path / "disk"), *DISK)


@pytest.fixture
def stored(tmp_path: Path) -> Path:
    """A directory whose daemon stored two segments, flushed, and was killed."""
    with with_disk(tmp_path, "first") as daemon, RawClient(daemon.runtime_dir) as client:
        store(client, "disk", 0, 2, number=1, seed=1)
        store(client, "disk", 2, 3, number=2, seed=2)
        assert client.ask(FlushRequest, timeout_s=TIMEOUT_S)
        daemon.process.kill()
        daemon.end()
    return tmp_path


def test_what_was_flushed_is_restored_by_the_next_daemon(stored: Path) -> None:
    with with_disk(stored, "second") as daemon, RawClient(daemon.runtime_dir) as client:
        client.say_hello(MODEL)
        assert client.ask(TierCostsRequest)["ssd"].byte_s > 0
        granted = lease(client, "disk", 3)
        assert num_pages(granted) == 3
        assert [(part.tier, part.spans) for part in granted] == [("ssd", ())] * 2
        fetched = client.ask(FetchRequest, lease_id=1)
        for part in fetched:
            # None: all layers had landed before the answer was written.
            status = LayerStatus(client.blocks([part.status_span])[0]) if part.status_span else None
            for layer, block in enumerate(client.blocks(part.spans)):
                if status is not None:
                    status.wait(layer, TIMEOUT_S)
                assert block.nbytes == SIZES[layer]
                assert block_checksum(block) == part.checksums[layer]
        client.ask(ReleaseRequest, lease_id=1)
        again = lease(client, "disk", 3, number=2)
        assert {part.tier for part in again} == {"dram"}
        counted = client.ask(StatsRequest)[0]
        assert dict(counted.tier_hit_pages) == {"dram": 3, "ssd": 3}
        assert counted.tiers[0].num_segments == 2


def test_an_engine_knows_at_once_what_the_next_daemon_has(stored: Path) -> None:
    arguments = ("--host-memory", "64MiB", "--ssd-dir", str(stored / "disk"), *DISK)
    with closing(EmbeddedDaemon(arguments)) as daemon:
        engine = DaemonStore(daemon.runtime_dir, model=MODEL, restart=daemon.restart)

        def known() -> list[bool]:
            return [engine.may_have(MODEL, key) for key in page_keys("disk", 0, 5)]

        # The daemon may still read its disk.
        wait_until(lambda: known() == [True] * 3 + [False] * 2)
        put(engine, "disk", 3, 4, SIZES, MODEL)
        assert known() == [True] * 4 + [False]
        with AdminClient(daemon.runtime_dir) as admin:
            assert admin.flush(TIMEOUT_S)
        os.kill(daemon.pid, signal.SIGKILL)
        wait_until(lambda: engine.counters.reconnects == 1)
        wait_until(lambda: known() == [True] * 4 + [False])
        engine.close()


def test_ends_of_blocks_come_from_the_disk(tmp_path: Path) -> None:
    """Of two segments their last tokens: these bytes, and hardly others, are read."""
    model = make_model(num_layers=3)
    sizes = (700_000, 500_000, 500_000)
    with with_disk(tmp_path, "first") as daemon:
        client = DaemonStore(daemon.runtime_dir, model=model, request_timeout_s=20.0)
        written = [put(client, "c", first, first + 4, sizes, model, seed=first)[1] for first in (0, 4)]
        with AdminClient(daemon.runtime_dir) as admin:
            assert admin.flush(TIMEOUT_S)
        client.close()
    with with_disk(tmp_path, "second") as daemon:
        client = DaemonStore(daemon.runtime_dir, model=model, request_timeout_s=20.0)
        lease = present(lease_pages(client, "c", 0, 8, model))
        wanted = (100_000, 250_000, 0)
        tails = [SegmentTail(firsts, wanted) for firsts in ((15, 12, 16), (31, 28, 32))]
        pieces = client.fetch(lease, tails)
        range_bytes = pieces[0].header.range_bytes
        kept = tuple(tail_num_bytes(*each, range_bytes) for each in zip(sizes, wanted, strict=True))
        assert wait_for(pieces) == [
            tuple(block[len(block) - num_bytes :] for block, num_bytes in zip(content, kept, strict=True))
            for content in written
        ]
        assert [piece.header.layer_first_token for piece in pieces] == [tail[0] for tail in tails]
        wait_until(lambda: client.stats().fetched_segments == 2)
        stats = client.stats()
        num_read = stats.tiers[0].read_bytes
        assert 2 * sum(kept) <= num_read <= 1.02 * 2 * sum(kept) + 4 * (8 << 10)
        assert stats.stored_bytes == 2 * sum(kept)
        assert stats.used_bytes + stats.free_bytes == stats.capacity_bytes
        client.release(lease)
        again = present(lease_pages(client, "c", 0, 8, model))
        assert again.is_in_dram
        assert [piece.header.layer_num_bytes for piece in again.slices] == [kept] * 2
        client.close()


def test_a_fetch_of_nobodys_lease_is_an_error(stored: Path) -> None:
    with with_disk(stored, "second") as daemon, RawClient(daemon.runtime_dir) as client:
        client.say_hello(MODEL)
        lease(client, "disk", 3)
        client.ask(ReleaseRequest, lease_id=1)
        refused = client.refusal(FetchRequest, lease_id=1)
        assert (refused.code, refused.message) == ("key", "lease 1 is unknown or was released")


def test_a_prefetch_brings_what_a_lease_found_below(stored: Path) -> None:
    with with_disk(stored, "second") as daemon, RawClient(daemon.runtime_dir) as client:
        client.say_hello(MODEL)
        lease(client, "disk", 3)
        assert client.ask(PrefetchRequest, lease_id=1).num_pages == 3
        deadline_s = time.monotonic() + TIMEOUT_S
        while client.ask(StatsRequest)[0].fetched_segments < 2:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert {part.tier for part in lease(client, "disk", 3, number=2)} == {"dram"}


def test_an_end_by_a_signal_flushes(tmp_path: Path) -> None:
    with with_disk(tmp_path, "first") as daemon, RawClient(daemon.runtime_dir) as client:
        store(client, "disk", 0, 2)
        daemon.process.terminate()
        assert daemon.end()[0] == 0
    with with_disk(tmp_path, "second") as daemon, RawClient(daemon.runtime_dir) as client:
        client.say_hello(MODEL)
        assert num_pages(lease(client, "disk", 2)) == 2


SLOW_SCAN = """
import os, time
from krul_backend.tiers.ssd.log_file import LogFile
scan = LogFile.scan

def wait_and_scan(self, start):
    while not os.path.exists(os.environ["KRUL_TEST_SCAN_GATE"]):
        time.sleep(0.02)
    yield from scan(self, start)

LogFile.scan = wait_and_scan
"""


def test_a_daemon_is_ready_before_its_disk_has_been_read(
    stored: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (stored / "sitecustomize.py").write_text(SLOW_SCAN)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join((str(stored), os.environ.get("PYTHONPATH", ""))))
    monkeypatch.setenv("KRUL_TEST_SCAN_GATE", str(stored / "gate"))
    arguments = ("--host-memory", "64MiB", "--ssd-dir", str(stored / "disk"), *DISK)
    # Started as an engine starts it, which waits for the daemon to be ready.
    with closing(EmbeddedDaemon(arguments)) as daemon, RawClient(daemon.runtime_dir) as client:
        client.say_hello(MODEL)
        assert client.ask(StatsRequest)[0].tiers[0].is_opening
        assert not lease(client, "disk", 3)
        store(client, "meanwhile", 0, 1, number=4, seed=4)
        (stored / "gate").touch()
        deadline_s = time.monotonic() + TIMEOUT_S
        while client.ask(StatsRequest)[0].tiers[0].is_opening:
            assert time.monotonic() < deadline_s
            time.sleep(0.02)
        assert [part.tier for part in lease(client, "disk", 3, number=5)] == ["ssd", "ssd"]
        assert client.ask(FlushRequest, timeout_s=TIMEOUT_S)
        assert client.ask(StatsRequest)[0].tiers[0].num_segments == 3
        log = daemon.log_path.read_text()
        assert "serving before the tiers below DRAM have been read" in log
        assert "the SSD tier has 2 segments in 1 files" in log


def test_two_daemons_never_share_a_disk(stored: Path) -> None:
    with with_disk(stored, "second"):
        status, log = with_disk(stored, "third").end()
        assert status == 1
        assert len(log.splitlines()) == 1
        assert str(stored / "disk") in log
