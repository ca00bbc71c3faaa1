"""Serving from an SSD that reads slowly: its rate, how a server joins its daemon, what the page shows."""

from __future__ import annotations

import os
import threading
import time
from dataclasses import replace
from pathlib import Path

import orjson
import pytest

from benchmarks.serving.configuration import Configuration, ServingBenchmarkError
from benchmarks.serving.servers import make_server
from benchmarks.serving.slow_ssd import Link, SlowDisk
from demo.sizing import PoolSizes
from krul_backend.tiers.ssd.ssd_tier import SsdTier

MIB = 1 << 20
POOLS = PoolSizes(device_tokens=512, reference_tokens=4096, longest_tokens=400, total_tokens=2000)
SLOW = Configuration(
    model_path="model", servers=("recompute", "native", "full-load"), ssd="1GiB", ssd_read_mbs=120.0
)


@pytest.mark.parametrize(("passed_s", "slept"), [(0.0, [2.0]), (0.75, [1.25]), (2.0, []), (3.0, [])])
def test_a_link_holds_back_what_cannot_have_arrived(
    monkeypatch: pytest.MonkeyPatch, passed_s: float, slept: list[float]
) -> None:
    waits: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: 100.0 + passed_s)
    monkeypatch.setattr(time, "sleep", waits.append)
    Link(read_mbs=500.0).hold(started_s=100.0, num_bytes=1_000_000_000)
    assert waits == pytest.approx(slept)


def test_threads_share_the_rate_of_the_disk(tmp_path: Path) -> None:
    path = tmp_path / "data"
    path.write_bytes(os.urandom(MIB))
    disk = SlowDisk(read_mbs=20.0)
    fd = disk.open(path, os.O_RDONLY)
    buffers = [memoryview(bytearray(MIB)) for _ in range(3)]
    threads = [threading.Thread(target=disk.preadv, args=(fd, [buffer], 0)) for buffer in buffers]
    started_s = time.perf_counter()
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert time.perf_counter() - started_s >= 3 * MIB / 20e6
    disk.close(fd)
    assert all(bytes(buffer) == path.read_bytes() for buffer in buffers)


def test_the_tier_measures_the_slow_disk_by_itself(tmp_path: Path) -> None:
    tier = SsdTier(tmp_path, 16 * MIB, disk=SlowDisk(read_mbs=40.0))
    try:
        assert tier.cost().byte_s >= 1 / 40e6
    finally:
        tier.close()


def test_a_server_joins_a_daemon_that_has_its_options(tmp_path: Path) -> None:
    options = {"eviction": "lru", "load_timeout": 7.0}
    configuration = replace(SLOW, host_memory="64MiB", dtype="float32", krul_options=options)
    server = make_server("full-load", configuration, POOLS, tmp_path)
    given = orjson.loads(server.process.command[-1])
    assert server.daemon is not None
    assert given == {
        "cache_dir": str(tmp_path / "full-load"),
        "endpoint": str(server.daemon.runtime_dir),
        "load_timeout": 7.0,
        "planner": "full-load",
    }
    command = " ".join(server.daemon.command)
    assert f"benchmarks.serving.slow_ssd 120.0 serve --runtime-dir {server.daemon.runtime_dir} " in command
    for part in (f"--host-memory {64 * MIB} ", "--eviction lru ", f"--ssd-dir {tmp_path}/full-load-ssd "):
        assert part in command
    assert make_server("recompute", configuration, POOLS, tmp_path).daemon is None
    unlimited = make_server("native", replace(configuration, ssd_read_mbs=None), POOLS, tmp_path)
    assert unlimited.daemon is None
    assert orjson.loads(unlimited.process.command[-1])["ssd_capacity"] == "1GiB"


@pytest.mark.parametrize("changes", [{"ssd": None}, {"ssd_read_mbs": 0.0}, {"ssd_read_mbs": -1.0}])
def test_a_rate_without_a_tier_or_below_zero_is_refused(changes: dict[str, float | None]) -> None:
    with pytest.raises(ServingBenchmarkError, match="--ssd-read-mbs"):
        replace(SLOW, **changes)  # type: ignore[arg-type]
