"""What operators are told: by tables, by JSON, by one line on stderr and by the exit status."""

from __future__ import annotations

import base64
import json
import os
import socket
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from krul_backend.daemon.cli import commands as cli
from krul_backend.daemon.cli.reports import bits_per_value, format_seconds
from krul_backend.daemon.client.admin import find_runtime_dirs, resolve_endpoint
from krul_backend.daemon.protocol.messages import DaemonStats
from krul_backend.errors import DaemonError
from krul_backend.memory import format_bytes
from krul_backend.strategy.strategy import Precision, Strategy
from krul_backend.tiers.common.interface import DamageReport, SegmentDetails, SegmentInfo, StoreStats
from tests.support.stats_builders import (
    make_daemon_stats,
    make_segment_info,
    make_store_stats,
    make_tier_stats,
)

STRATEGY = Strategy.from_pairs(
    4, [(0, 3)], [Precision.INT4, Precision.INT8, Precision.NATIVE, Precision.INT4]
)
SEGMENTS = [
    make_segment_info(1, tenant="blue", num_bytes=300, idle_s=9.0, tiers=("dram", "ssd")),
    make_segment_info(2, model="other", fingerprint="e" * 32, num_bytes=100, idle_s=7.0, pinned_s=90.0),
    make_segment_info(3, num_bytes=200, idle_s=8.0, codec="segment"),
]
DETAILS = SegmentDetails(
    info=make_segment_info(
        7,
        codec="segment",
        codec_params={"layers": STRATEGY.to_json()},
        parent_key="aa03",
        last_page_key="aa07",
        start_token=64,
        num_tokens=64,
    ),
    page_size=16,
    layer_first_token=(64, 64, 96, 128),
    layer_num_bytes=(2048, 1024, 512, 0),
    checksums=(bytes(15) + b"\1", bytes(7) + b"\2", bytes(6) + b"\xab\xcd", b""),
)


class FakeDaemon:
    """Answers as an ``AdminClient`` does; remembers how it was reached."""

    def __init__(self) -> None:
        self.endpoints: list[str] = []
        self.store = make_store_stats()
        self.damage = DamageReport(num_blocks=12, num_bytes=3 << 20, bad_segments=())
        self.is_durable = True
        self.error: DaemonError | None = None

    def __call__(self, endpoint: str, *, timeout_s: float) -> FakeDaemon:
        if self.error is not None:
            raise self.error
        self.endpoints.append(endpoint)
        return self

    def __enter__(self) -> FakeDaemon:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def stats(self) -> tuple[StoreStats, DaemonStats]:
        return self.store, make_daemon_stats()

    def list_segments(self) -> list[SegmentInfo]:
        return list(SEGMENTS)

    def inspect(self, segment_id: int) -> SegmentDetails | None:
        return DETAILS if segment_id == DETAILS.info.segment_id else None

    def verify(self, timeout_s: float) -> DamageReport:
        return self.damage

    def flush(self, timeout_s: float) -> bool:
        return self.is_durable


@pytest.fixture
def daemon(monkeypatch: pytest.MonkeyPatch) -> FakeDaemon:
    fake = FakeDaemon()
    monkeypatch.setattr(cli, "AdminClient", fake)
    return fake


def run(*args: object) -> Result:
    app = typer.Typer()
    cli.add_commands(app)
    return CliRunner().invoke(app, [str(arg) for arg in args], env={"COLUMNS": "200"})


def run_json(*args: object) -> Any:
    result = run(*args, "--endpoint", "/run/krul", "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def lines_of(*args: object) -> list[list[str]]:
    """The words of each line of a table."""
    result = run(*args, "--endpoint", "/run/krul")
    assert result.exit_code == 0, result.output
    return [line.split() for line in result.stdout.splitlines()]


@pytest.fixture
def listening(tmp_path: Path) -> Iterator[Path]:
    """A runtime directory with a socket that somebody listens on."""
    directory = tmp_path / "krul-live"
    with closing(serve_in(directory)):
        yield directory


def serve_in(directory: Path) -> socket.socket:
    directory.mkdir(mode=0o700)
    server = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    server.bind(str(directory / "daemon.sock"))
    server.listen()
    return server


def test_stats_has_a_column_for_each_tier(daemon: FakeDaemon) -> None:
    ssd = make_tier_stats(
        corrupted_segments=0, failed_reads=3, slow_reads=0, failed_writes=1, is_suspended=True
    )
    daemon.store = make_store_stats(tiers=(ssd,), capacity_bytes=1 << 30, corrupted_segments=2)
    lines = lines_of("stats")
    assert lines[0] == ["tier", "dram", "ssd", "(suspended)"]
    assert ["capacity", "1.0", "GiB", *format_bytes(ssd.capacity_bytes).split()] in lines
    assert ["hit", "pages", "60", "40"] in lines
    assert ["errors", "2", "checksum", "3", "read,", "1", "write"] in lines
    assert ["skipped", "segments", "-", "77", "orphan"] in lines
    assert ["waiting", "segments", "-", str(ssd.waiting_segments)] in lines
    assert ["written", "-", *format_bytes(ssd.written_bytes).split()] in lines
    text = "\n".join(" ".join(line) for line in lines)
    assert "hit rate 80.0%: 100 of 125 pages" in text
    assert f"leases {daemon.store.num_leases}, reservations {daemon.store.num_reservations}" in text
    assert "sessions 3, process 4242, up 12.5s, 77 requests (2 failed), bad messages: 4 frames" in text
    assert daemon.endpoints == ["/run/krul"]
    daemon.store = make_store_stats(tiers=(make_tier_stats(is_opening=True),))
    assert lines_of("stats")[0] == ["tier", "dram", "ssd", "(opening)"]


def test_stats_of_a_store_that_nobody_asked(daemon: FakeDaemon) -> None:
    daemon.store = make_store_stats(hit_pages=0, missed_pages=0, tier_hit_pages={}, tiers=())
    lines = lines_of("stats")
    assert lines[0] == ["tier", "dram"]
    assert any(line[:3] == ["hit", "rate", "-:"] for line in lines)
    assert ["hit", "pages", "0"] in lines


def test_json_has_every_field(daemon: FakeDaemon) -> None:
    answer = run_json("stats")
    assert set(answer["store"]) == set(vars(daemon.store))
    assert answer["store"]["tiers"][0]["name"] == "ssd"
    assert answer["store"]["tier_hit_pages"] == {"dram": 60, "ssd": 40}
    assert answer["daemon"]["bad_messages"] == {"frames": 4}
    details = run_json("inspect", 7)
    assert details["layer_num_bytes"] == [2048, 1024, 512, 0]
    checksums = [base64.b64decode(checksum) for checksum in details["checksums"]]
    assert tuple(checksums) == DETAILS.checksums
    assert run_json("verify") == {"num_blocks": 12, "num_bytes": 3 << 20, "bad_segments": []}
    assert run_json("flush") == {"is_durable": True}


@pytest.mark.parametrize(
    ("options", "ids", "num_in_all"),
    [
        ((), [1, 2, 3], 3),
        (("--sort", "bytes"), [1, 3, 2], 3),
        (("--sort", "idle", "--limit", 2), [1, 3], 3),
        (("--sort", "model"), [2, 1, 3], 3),
        (("--model", "tiny"), [1, 3], 2),
        (("--model", "eeee"), [2], 1),
        (("--tenant", "blue"), [1], 1),
        (("--tenant", ""), [2, 3], 2),
        (("--tenant", "red"), [], 0),
    ],
)
def test_list_filters_sorts_and_limits(
    daemon: FakeDaemon, options: tuple[object, ...], ids: list[int], num_in_all: int
) -> None:
    answer = run_json("list", *options)
    assert [info["segment_id"] for info in answer["segments"]] == ids
    assert answer["num_segments"] == num_in_all
    lines = lines_of("list", *options)
    assert [int(line[0]) for line in lines[1:-1]] == ids
    assert lines[-1] == [str(len(ids)), "of", str(num_in_all), "segments"]


def test_list_shows_who_holds_a_segment(daemon: FakeDaemon) -> None:
    lines = lines_of("list")
    assert lines[1] == ["1", "tiny", "blue", "0", "64", "300", "B", "-", "dram+ssd", "0", "9.0s", "-"]
    assert lines[2][-2:] == ["7.0s", "1m30s"]


def test_inspect_shows_each_layer(daemon: FakeDaemon) -> None:
    """With the checksum of its last range, which no trim cuts off."""
    lines = lines_of("inspect", 7)
    layers = [line for line in lines if line and line[0].isdigit()]
    assert layers == [
        ["0", "0+3", "int4", "64", "64", "2.0", "KiB", "0000000000000001"],
        ["1", "-", "int8", "64", "64", "1.0", "KiB", "0000000000000002"],
        ["2", "-", "native", "96", "32", "512", "B", "000000000000abcd"],
        ["3", "0+3", "int4", "128", "0", "0", "B", "-"],
    ]
    assert ["tokens", "[64,", "128),", "pages", "of", "16"] in lines
    assert ["after", "aa03"] in lines


def test_inspect_of_no_segment(daemon: FakeDaemon) -> None:
    result = run("inspect", 8, "--endpoint", "/run/krul")
    assert result.exit_code == 1
    assert "segment 8 is not in DRAM" in result.stderr
    assert result.stdout == ""


def test_verify_fails_if_a_segment_was_bad(daemon: FakeDaemon) -> None:
    assert lines_of("verify") == [["12", "blocks,", "3.0", "MiB:", "all", "are", "right"]]
    daemon.damage = DamageReport(num_blocks=12, num_bytes=3 << 20, bad_segments=(4, 9))
    result = run("verify", "--endpoint", "/run/krul")
    assert result.exit_code == 1
    assert "2 bad segments, taken out: 4, 9" in result.stdout
    as_json = run("verify", "--endpoint", "/run/krul", "--json")
    assert (as_json.exit_code, json.loads(as_json.stdout)["bad_segments"]) == (1, [4, 9])


def test_flush_fails_if_it_took_too_long(daemon: FakeDaemon) -> None:
    daemon.is_durable = False
    result = run("flush", "--endpoint", "/run/krul", "--timeout", 2)
    assert result.exit_code == 1
    assert result.stdout == "not durable after 2 s\n"


def test_names_from_outside_are_no_markup(daemon: FakeDaemon, monkeypatch: pytest.MonkeyPatch) -> None:
    hostile = make_segment_info(1, model="[red]x[/red]", tenant="\x1b[31m")
    monkeypatch.setattr(daemon, "list_segments", lambda: [hostile])
    line = run("list", "--endpoint", "/run/krul").stdout.splitlines()[1]
    assert "[red]x[/red]" in line
    assert "\x1b" not in line


@pytest.mark.parametrize("command", [("stats",), ("list",), ("inspect", 1), ("verify",), ("flush",)])
def test_a_daemon_that_cannot_be_asked_is_one_line(daemon: FakeDaemon, command: tuple[object, ...]) -> None:
    daemon.error = DaemonError("nobody answers at /run/krul")
    result = run(*command, "--endpoint", "/run/krul")
    assert result.exit_code == 2
    assert result.stderr == "krul-backend: error: nobody answers at /run/krul\n"


def test_a_timeout_that_is_none(daemon: FakeDaemon) -> None:
    result = run("stats", "--endpoint", "/run/krul", "--timeout", 0)
    assert result.exit_code == 2
    assert "--timeout 0 is not possible" in result.stderr
    assert daemon.endpoints == []


def test_the_only_daemon_is_found(listening: Path, tmp_path: Path) -> None:
    (tmp_path / "krul-empty").mkdir()
    (tmp_path / "krul-link").symlink_to(listening)
    (tmp_path / "other").mkdir()
    (tmp_path / "krul-file").touch()
    serve_in(tmp_path / "krul-left-behind").close()
    assert find_runtime_dirs([tmp_path]) == [listening]
    assert find_runtime_dirs([tmp_path, tmp_path, tmp_path / "missing"]) == [listening]
    assert resolve_endpoint(None, [tmp_path]) == str(listening)


def test_a_directory_of_somebody_else_is_not_asked(
    listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: listening.stat().st_uid + 1)
    assert find_runtime_dirs([tmp_path]) == []


def test_no_daemon_and_several_are_errors_that_say_so(
    listening: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(DaemonError, match=f"{empty}/krul-.*--endpoint"):
        resolve_endpoint(None, [empty])
    with closing(serve_in(tmp_path / "krul-second")) as second:
        with pytest.raises(DaemonError, match=f"2 krul daemons.*{listening}, .*krul-second"):
            resolve_endpoint(None, [tmp_path])
        assert second.fileno() >= 0
    assert resolve_endpoint("ipc:///d/daemon.sock", [tmp_path]) == "ipc:///d/daemon.sock"


def test_the_daemon_is_looked_for_where_the_user_keeps_sockets(
    daemon: FakeDaemon, listening: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(listening.parent))
    found = find_runtime_dirs()
    assert listening in found
    monkeypatch.setattr("krul_backend.daemon.client.admin.default_parents", lambda: (listening.parent,))
    assert run("stats").exit_code == 0
    assert daemon.endpoints == [str(listening)]


@pytest.mark.parametrize(
    ("pairs", "precision", "bits"),
    [
        ((), Precision.INT4, 4.0),
        (((0, 1), (2, 3)), Precision.INT4, 2.0),
        (((0, 1),), Precision.INT8, 6.0),
        ((), Precision.NATIVE, None),
    ],
)
def test_bits_per_value(pairs: tuple[tuple[int, int], ...], precision: Precision, bits: float | None) -> None:
    strategy = Strategy.from_pairs(4, pairs, precision)
    assert bits_per_value({"layers": strategy.to_json()}) == bits


@pytest.mark.parametrize("params", [{}, {"layers": None}, {"layers": [{"precision": "int3"}]}])
def test_a_codec_that_is_not_known_says_no_bits(params: dict[str, Any]) -> None:
    assert bits_per_value(params) is None


def test_seconds_for_people() -> None:
    assert [format_seconds(seconds) for seconds in (0.25, 61, 3900)] == ["0.2s", "1m01s", "1h05m"]
