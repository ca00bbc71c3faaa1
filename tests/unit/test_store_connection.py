"""How ranks come to their daemon: who starts it, who joins it, and that all of them fail together."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from pathlib import Path
from threading import Barrier
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from krul_backend.daemon.cli.app import app
from krul_backend.daemon.server import serve
from krul_backend.daemon.server.config import DaemonConfig
from krul_backend.device import Device
from krul_backend.errors import DaemonError
from krul_sglang.config import KrulConfig
from krul_sglang.engine.common import store_connection
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.store_connection import StoreConnection, connect_store, daemon_arguments
from tests.support.engine_builders import PATIENCE_S, Meeting, in_threads
from tests.support.segment_builders import MODEL

GIB = 1 << 30
ALONE = RankAgreement(None, 1)
EVERY_OPTION = KrulConfig(
    ssd_dir="/mnt/kv store",
    ssd_capacity=5 * GIB,
    ssd_timeout=0.25,
    ssd_queue=GIB,
    mooncake="master_address=10.0.0.1:50051,metadata_server=http://10.0.0.1:8080/metadata?a=b",
    eviction="lru",
    tenant_quota=0.5,
    metrics_port=9400,
)


# ---- what the daemon is told ----


def options(arguments: Sequence[str]) -> list[tuple[str, str]]:
    return list(zip(arguments[::2], arguments[1::2], strict=True))


def test_a_daemon_is_told_its_memory_and_the_defaults() -> None:
    assert options(daemon_arguments(KrulConfig(), 3 * GIB)) == [
        ("--host-memory", str(3 * GIB)),
        ("--eviction", "value"),
        ("--tenant-quota", "1.0"),
        ("--ssd-timeout", "1.0"),
        ("--ssd-queue", str(256 << 20)),
    ]


def test_a_daemon_is_told_every_option_that_is_its_own() -> None:
    assert options(daemon_arguments(EVERY_OPTION, GIB)) == [
        ("--host-memory", str(GIB)),
        ("--eviction", "lru"),
        ("--tenant-quota", "0.5"),
        ("--ssd-timeout", "0.25"),
        ("--ssd-queue", str(GIB)),
        ("--metrics-port", "9400"),
        ("--ssd-dir", "/mnt/kv store"),
        ("--ssd-capacity", str(5 * GIB)),
        # One option for each setting.
        ("--mooncake", "master_address=10.0.0.1:50051"),
        ("--mooncake", "metadata_server=http://10.0.0.1:8080/metadata?a=b"),
    ]


@pytest.mark.parametrize("config", [KrulConfig(), EVERY_OPTION])
def test_the_daemon_understands_what_it_is_told(config: KrulConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    served: list[DaemonConfig] = []
    monkeypatch.setattr(serve, "serve", served.append)
    result = CliRunner().invoke(app, ["serve", "--runtime-dir", "/run/krul", *daemon_arguments(config, GIB)])
    assert result.exit_code == 0, result.output
    mooncake = dict(setting.split("=", 1) for setting in config.mooncake.split(",") if setting)
    assert served == [
        DaemonConfig(
            arena_bytes=GIB,
            runtime_dir=Path("/run/krul"),
            ssd_dirs=tuple(config.ssd_dirs),
            ssd_capacity_bytes=config.ssd_capacity,
            ssd_timeout_s=config.ssd_timeout,
            ssd_queue_bytes=config.ssd_queue,
            mooncake=mooncake or None,
            eviction=config.eviction,
            tenant_quota=config.tenant_quota,
            metrics_port=config.metrics_port,
        )
    ]


def test_a_directory_in_the_users_home_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/somebody")
    arguments = options(daemon_arguments(KrulConfig(ssd_dir="~/kv, /mnt/kv"), GIB))
    assert [value for name, value in arguments if name == "--ssd-dir"] == ["/home/somebody/kv", "/mnt/kv"]


def test_a_capacity_without_a_directory_is_the_daemons_to_refuse() -> None:
    arguments = options(daemon_arguments(KrulConfig(ssd_capacity=GIB), GIB))
    assert ("--ssd-capacity", str(GIB)) in arguments
    assert "--ssd-dir" not in dict(arguments)


# ---- who connects to what ----


class FakeDaemon:
    def __init__(self, arguments: Sequence[str], number: int) -> None:
        self.arguments = list(arguments)
        self.runtime_dir = Path(f"/run/krul-{number}")
        self.log_path = self.runtime_dir / "daemon.log"
        self.pid = 4000 + number
        self.is_closed = False

    def restart(self) -> None:
        raise AssertionError("nothing died")

    def close(self) -> None:
        self.is_closed = True


@dataclasses.dataclass
class FakeCounters:
    num_lost: int = 0


class FakeStore:
    counters = FakeCounters()

    def __init__(self, endpoint: str, restart: Callable[[], None] | None, *, is_connected: bool) -> None:
        self.endpoint = endpoint
        self.restart = restart
        self.is_connected = is_connected
        self.is_closed = False

    def close(self) -> None:
        self.is_closed = True


class Host:
    """Stands for the daemons and stores of all ranks, and fails where a test says so."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.daemons: list[FakeDaemon] = []
        self.stores: dict[int, FakeStore] = {}
        self.unreachable_rank: int | None = None
        self.refusing_rank: int | None = None
        self.start_error: Exception | None = None
        monkeypatch.setattr(store_connection, "EmbeddedDaemon", self.start)
        monkeypatch.setattr(store_connection, "DaemonStore", self.connect)

    def start(self, arguments: Sequence[str]) -> FakeDaemon:
        if self.start_error is not None:
            raise self.start_error
        self.daemons.append(FakeDaemon(arguments, len(self.daemons)))
        return self.daemons[-1]

    def connect(
        self, endpoint: str, *, model: Any, on_arena: Any, restart: Callable[[], None] | None
    ) -> FakeStore:
        rank = model.tp_rank
        if rank == self.refusing_rank:
            raise DaemonError("the daemon is another user's")
        self.stores[rank] = FakeStore(endpoint, restart, is_connected=rank != self.unreachable_rank)
        return self.stores[rank]


@pytest.fixture
def host(monkeypatch: pytest.MonkeyPatch) -> Host:
    return Host(monkeypatch)


def connect(config: KrulConfig, rank: int, num_ranks: int, agreement: RankAgreement, per_host: int) -> Any:
    model = dataclasses.replace(MODEL, tp_rank=rank, tp_size=num_ranks)
    return connect_store(
        config, model, Device(torch.device("cpu")), agreement, rank_bytes=GIB, ranks_per_host=per_host
    )


def connect_all(config: KrulConfig, num_ranks: int, per_host: int) -> list[Future[StoreConnection]]:
    contents: dict[int, bytes] = {}
    barrier = Barrier(num_ranks, timeout=PATIENCE_S)
    with in_threads() as start:
        return [
            start(
                lambda rank=rank: connect(  # type: ignore[misc]
                    config, rank, num_ranks, Meeting(rank, contents, barrier), per_host
                )
            )
            for rank in range(num_ranks)
        ]


def test_a_single_rank_starts_its_daemon(host: Host) -> None:
    connection = connect(KrulConfig(), 0, 1, ALONE, 1)
    (daemon,) = host.daemons
    assert connection.daemon is daemon
    assert daemon.arguments == daemon_arguments(KrulConfig(), GIB)
    assert host.stores[0].endpoint == "/run/krul-0"
    assert host.stores[0].restart == daemon.restart
    assert connection.as_dict() == {
        "endpoint": "/run/krul-0",
        "is_connected": True,
        "num_lost": 0,
        "locked": None,
    }
    connection.close()
    assert host.stores[0].is_closed
    assert daemon.is_closed


def test_the_first_rank_of_each_host_starts_a_daemon_for_its_ranks(host: Host) -> None:
    connections = [connected.result() for connected in connect_all(KrulConfig(), 4, per_host=2)]
    endpoints = [connection.endpoint for connection in connections]
    assert endpoints[0] == endpoints[1] != endpoints[2] == endpoints[3]
    assert [connection.daemon is not None for connection in connections] == [True, False, True, False]
    assert [host.stores[rank].restart is not None for rank in range(4)] == [True, False, True, False]
    # The memory of both of its ranks.
    for daemon in host.daemons:
        assert daemon.arguments[:2] == ["--host-memory", str(2 * GIB)]
    assert len(host.daemons) == 2


def test_a_daemon_that_is_running_is_joined_and_left_alone(host: Host) -> None:
    config = KrulConfig(endpoint="/run/other")
    connections = [connected.result() for connected in connect_all(config, 2, per_host=2)]
    assert host.daemons == []
    for connection in connections:
        assert (connection.endpoint, connection.daemon) == ("/run/other", None)
        connection.close()
    assert [store.is_closed for store in host.stores.values()] == [True, True]


def test_no_rank_goes_on_without_the_daemon_of_another(host: Host) -> None:
    host.start_error = DaemonError("no memory")
    for connected in connect_all(KrulConfig(), 3, per_host=3):
        with pytest.raises(DaemonError, match="rank 0 has no KV store: no memory"):
            connected.result()
    assert host.stores == {}


@pytest.mark.parametrize(
    ("kind", "said"),
    [("unreachable", "no krul-backend answers in /run/krul-0"), ("refusing", "another user")],
)
def test_no_rank_goes_on_if_one_is_not_connected(host: Host, kind: str, said: str) -> None:
    setattr(host, f"{kind}_rank", 1)
    for connected in connect_all(KrulConfig(), 3, per_host=3):
        with pytest.raises(DaemonError, match=f"rank 1 has no KV store: .*{said}"):
            connected.result()
    # Nothing is left behind.
    assert [daemon.is_closed for daemon in host.daemons] == [True]
    assert all(store.is_closed for store in host.stores.values())
    assert len(host.stores) == (3 if kind == "unreachable" else 2)
