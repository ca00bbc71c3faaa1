"""``python -m benchmarks.serving`` from end to end: two real servers of the bundled model."""

from __future__ import annotations

import json
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import pytest

from benchmarks.serving.slow_ssd import SlowSsdDaemon
from krul_backend.daemon.client.daemon_store import DaemonStore
from krul_backend.errors import DaemonError
from tests.crash.conversations import model_of
from tests.support.forked_server import with_forked_servers

pytestmark = pytest.mark.server


def run_benchmark(name: str, summary: Path, *arguments: str) -> tuple[Any, str]:
    """The summary that a benchmark writes, measured on the bundled model, and what it prints."""
    command = with_forked_servers(name, "--model", "bundled", "--json", str(summary), *arguments)
    ran = subprocess.run(command, capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr
    return json.loads(summary.read_text()), ran.stdout


def test_krul_restores_the_turns_that_sglang_alone_recomputes(tmp_path: Path) -> None:
    summary, raw = tmp_path / "out.json", tmp_path / "raw.json"
    options = ("--configurations", "recompute,full-load", "--users", "3", "--rounds", "2", "--history", "300")
    more = ("--max-tokens", "8", "--raw", str(raw))
    result, printed = run_benchmark("benchmarks.serving", summary, *options, *more)
    assert [line.split()[1] for line in printed.splitlines() if "MiB" in line] == ["full-load"]
    recompute, restored = result["rows"]
    assert [recompute["configuration"], restored["configuration"]] == ["recompute", "full-load"]
    # Every conversation was evicted: only the beginning that all prompts share stays on the device.
    assert recompute["hit_rate_by_tier"]["device"] < 0.2
    assert recompute["bytes_stored"] is None
    assert restored["hit_rate_by_tier"]["dram"] > 0.6
    assert restored["bytes_stored"] > 0
    found = sum(restored["hit_rate_by_tier"].values())
    assert 0.6 < found <= restored["theoretical_hit_rate"] + 0.01
    assert restored["answers_equal"] == recompute["answers_equal"] == 1.0
    assert restored["returning_turns"] == 3
    of_recompute, of_full_load = (each["restores"] for each in result["servers"])
    assert of_recompute is None
    # First turns may load the beginning that all prompts share.
    assert of_full_load["loaded"] >= 3
    assert (of_full_load["refused"], of_full_load["turns_not_stored"]) == (0, 0)
    assert "turns" not in result
    turns = json.loads(raw.read_text())["turns"]
    assert {name: len(of_server) for name, of_server in turns.items()} == {"recompute": 6, "full-load": 6}
    assert [turn["prompt_tokens"] for turn in turns["full-load"]] == [
        turn["prompt_tokens"] for turn in turns["recompute"]
    ]


def test_krul_predicts_on_restored_turns_what_a_server_that_never_evicts_predicts(tmp_path: Path) -> None:
    options = ("--configurations", "device,full-load", "--users", "3", "--rounds", "3", "--history", "300")
    more = ("--client", "divergence", "--turn-tokens", "60", "--max-tokens", "8")
    result, _ = run_benchmark("benchmarks.serving", tmp_path / "out.json", *options, *more)
    assert [(row["configuration"], row["turn"]) for row in result["rows"]] == [
        ("full-load", 2),
        ("full-load", 3),
    ]
    for row in result["rows"]:
        assert row["conversations"] == 3
        assert row["new_tokens"] > 50
        # Asking what it predicts takes nothing away from what is restored.
        assert row["not_restored"] == 0
        assert row["history_tokens"] * (1 - row["restored"] - row["on_device"]) < 16
        assert 0 <= row["kl_p95"] < 1e-6
        assert row["top1"] == 1
    assert result["error_budgets"] == {"full-load": None}
    assert "turns" not in result


def test_many_conversations_on_servers_in_groups_that_hold_a_part_of_them(tmp_path: Path) -> None:
    summary = tmp_path / "out.json"
    options = (
        *("--configurations", "recompute,native+lru", "--at-once", "1", "--users", "4"),
        *("--rounds", "2", "--history", "300", "--rate", "50", "--max-tokens", "8"),
        *("--device-tokens", "800", "--host-share", "0.5", "--ssd-share", "2"),
        *("--krul-options", '{"planner": "full-load", "ssd_timeout": 10}'),
    )
    result, _ = run_benchmark("benchmarks.multiturn", summary, *options)
    assert summary.stat().st_size < 8000
    names = [row["configuration"] for row in result["rows"]]
    assert names == ["recompute", "native+lru"]
    recompute, *restored = result["rows"]
    # Two of four conversations fit the device.
    assert recompute["hit_rate"] < 0.5
    assert "conversations_held" not in recompute
    for row in restored:
        assert 0.6 < row["hit_rate"] <= row["theoretical_hit_rate"] + 0.01
        assert row["answers_equal"] == 1.0
        held = row["conversations_held"]
        assert 0 < held["dram"] <= 2.1
        assert held["dram"] < held["ssd"] <= 4.1
        assert row["bytes_by_tier"]["ssd"] > row["bytes_by_tier"]["dram"] > 0
        assert 0 <= row["in_dram_when_admitted"] <= 1


def test_a_daemon_of_a_slow_disk_serves_and_knows_how_slow_it_is(tmp_path: Path) -> None:
    options = ("--host-memory", "16MiB", "--ssd-dir", str(tmp_path / "ssd"), "--ssd-capacity", "64MiB")
    with tempfile.TemporaryDirectory(prefix="krul-test-", dir="/tmp") as short:
        runtime_dir = Path(short) / "run"
        with SlowSsdDaemon(runtime_dir, options, read_mbs=40.0):
            store = DaemonStore(runtime_dir, model=model_of(0))
            assert store.is_connected
            assert store.tier_costs()["ssd"].byte_s >= 1 / 40e6
            store.close()
        # When the block is left, nobody holds the directory.
        with SlowSsdDaemon(runtime_dir, options, read_mbs=40.0):
            pass
        with pytest.raises(DaemonError, match="--no-such-option"):
            SlowSsdDaemon(runtime_dir, ("--no-such-option",), read_mbs=40.0).__enter__()


def test_what_returns_from_a_slow_disk_waits_while_others_are_being_answered(tmp_path: Path) -> None:
    options = ("--servers", "waits", "--others", "3", "--returns", "2", "--tokens", "1500")
    more = ("--dtype", "float32", "--ssd-read-mbs", "40")
    result, _ = run_benchmark("benchmarks.stalls", tmp_path / "out.json", *options, *more)
    (row,) = result["rows"]
    assert (row["server"], row["others"], row["waited"]) == ("waits", 3, 2)
    assert row["found"] > 0.95
    assert row["ttft_s"]["median"] > 0 < row["steady_s"] <= row["gap_s"]["max"]
