"""Two engines with 64 conversations at once share one daemon: nothing is lost, and the bytes add up."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import orjson
import pytest

from krul_backend.daemon.client.admin import AdminClient
from krul_backend.daemon.client.daemon_store import DaemonStore
from tests.crash.conversations import model_of
from tests.support.daemon_process import running_daemon

NUM_ENGINES, NUM_CONVERSATIONS, NUM_TURNS = 2, 32, 6


def run_engines(runtime_dir: Path, num_at_once: int) -> int:
    """Turns that both engines stored and found again."""
    module = (sys.executable, "-m", "tests.crash.conversing", str(runtime_dir))
    counts = (str(NUM_CONVERSATIONS), str(NUM_TURNS), str(num_at_once))
    engines = [
        subprocess.Popen([*module, str(engine), *counts], stdout=subprocess.PIPE)
        for engine in range(NUM_ENGINES)
    ]
    try:
        outputs = [engine.communicate(timeout=240)[0] for engine in engines]
    finally:
        for engine in engines:
            engine.kill()
            engine.wait()
    assert [engine.returncode for engine in engines] == [0] * NUM_ENGINES
    return sum(orjson.loads(output)["turns"] for output in outputs)


@pytest.mark.parametrize(
    ("arena", "num_at_once"), [("256MiB", NUM_CONVERSATIONS), ("16MiB", 3)], ids=["in DRAM", "mostly on disk"]
)
def test_nothing_is_lost_and_everything_adds_up(arena: str, num_at_once: int, tmp_path: Path) -> None:
    ssd = ("--ssd-dir", str(tmp_path / "ssd"), "--ssd-capacity", "2GiB", "--ssd-timeout", "20")
    with running_daemon("--host-memory", arena, *ssd) as (runtime_dir, _):
        num_turns = run_engines(runtime_dir, num_at_once)
        assert num_turns == NUM_ENGINES * NUM_CONVERSATIONS * NUM_TURNS
        store = DaemonStore(runtime_dir, model=model_of(0), request_timeout_s=10.0)
        with AdminClient(runtime_dir) as admin:
            assert admin.flush(30.0)
        stats = store.stats()
        store.close()
    (disk,) = stats.tiers
    assert stats.committed_segments == num_turns
    assert disk.num_segments == num_turns
    assert (stats.num_leases, stats.num_reservations) == (0, 0)
    assert (stats.corrupted_segments, stats.token_mismatches, stats.failed_fetches) == (0, 0, 0)
    for tier in (stats, disk):
        assert tier.used_bytes + tier.free_bytes == tier.capacity_bytes
        assert tier.stored_bytes <= tier.used_bytes
    assert disk.queued_segments == disk.queued_bytes == 0
    assert stats.hit_pages > 0
    if arena == "8MiB":
        assert stats.evicted_segments > 0
        assert stats.fetched_segments > 0
