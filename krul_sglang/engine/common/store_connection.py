"""Connects a rank to its store: a daemon that the first rank of the host starts, or one that runs already."""

from __future__ import annotations

import logging
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from krul_backend.daemon.client import DaemonStore, EmbeddedDaemon
from krul_backend.device import Device
from krul_backend.errors import DaemonError, KrulError
from krul_backend.memory import format_bytes
from krul_backend.segment import ModelIdentity
from krul_sglang.config import KrulConfig
from krul_sglang.engine.common.agreement import RankAgreement

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class StoreConnection:
    """One rank's store. ``daemon`` is None on ranks that did not start one."""

    store: DaemonStore
    device: Device
    daemon: EmbeddedDaemon | None
    endpoint: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {
            "endpoint": self.endpoint,
            "is_connected": self.store.is_connected,
            **asdict(self.store.counters),
        }

    def close(self) -> None:
        """Call it when no copy is under way. The daemon ends with its last client."""
        self.device.unlock_pages()
        self.store.close()
        if self.daemon is not None:
            self.daemon.close()


def connect_store(
    config: KrulConfig,
    model: ModelIdentity,
    device: Device,
    agreement: RankAgreement,
    *,
    rank_bytes: int,
    ranks_per_host: int,
) -> StoreConnection:
    """Start or find the daemon of this host. Every rank calls it at the same point.

    ``rank_bytes`` of host memory for each rank. Ranks are on hosts in order, ``ranks_per_host`` on each.

    Raises:
        DaemonError: on every rank, if one cannot have its daemon.
    """
    leader = agreement.rank // ranks_per_host * ranks_per_host
    daemon: EmbeddedDaemon | None = None
    store: DaemonStore | None = None
    found = {"endpoint": config.endpoint}
    if not config.endpoint and agreement.rank == leader:
        try:
            daemon = _start_daemon(config, rank_bytes * min(ranks_per_host, agreement.num_ranks))
            found = {"endpoint": str(daemon.runtime_dir)}
        except KrulError as error:
            found = {"error": str(error)}
    try:
        endpoint = _gathered(agreement, found)[leader]["endpoint"]
        connected: dict[str, str] = {}
        try:
            store = DaemonStore(
                endpoint,
                model=model,
                on_arena=partial(lock_arena, device),
                restart=None if daemon is None else daemon.restart,
            )
            if not store.is_connected:
                connected = {"error": f"no krul-backend answers in {endpoint}: is it running, as this user?"}
        except KrulError as error:
            connected = {"error": str(error)}
        _gathered(agreement, connected)
        assert store is not None
    except BaseException:
        device.unlock_pages()
        if store is not None:
            store.close()
        if daemon is not None:
            daemon.close()
        raise
    return StoreConnection(store, device, daemon, endpoint)


def lock_arena(device: Device, arena: npt.NDArray[np.uint8]) -> None:
    """Lock a mapping of the daemon's arena in memory, so that the device can copy from and to it directly.

    The whole arena takes memory from then on, and cannot be swapped. Where locking is refused (a limit on
    locked memory, say), copies still work, only slower. When the daemon is gone and another mapping replaces
    this one, it stays locked until the last load or turn that uses it has ended.
    """
    start_s = time.perf_counter()
    error = device.lock_pages(arena)
    if error != 0:
        logger.warning("krul: host memory could not be pinned (error %d): copies will be slower", error)
    elif not device.shares_cores:
        logger.info("krul: pinned %s in %.1f s", format_bytes(arena.nbytes), time.perf_counter() - start_s)


def _gathered(agreement: RankAgreement, found: dict[str, str]) -> list[dict[str, str]]:
    """Exchange what every rank found; returned by rank.

    Raises:
        DaemonError: on every rank, if one of them found an error.
    """
    of_ranks = [orjson.loads(content) for content in agreement.gather_bytes(orjson.dumps(found))]
    for rank, of_rank in enumerate(of_ranks):
        if "error" in of_rank:
            raise DaemonError(f"rank {rank} has no KV store: {of_rank['error']}")
    return of_ranks


def _start_daemon(config: KrulConfig, arena_bytes: int) -> EmbeddedDaemon:
    start_s = time.perf_counter()
    daemon = EmbeddedDaemon(daemon_arguments(config, arena_bytes))
    logger.info(
        "krul: daemon %d keeps stored KV; started in %.1f s, its log is %s",
        daemon.pid,
        time.perf_counter() - start_s,
        daemon.log_path,
    )
    return daemon


def daemon_arguments(config: KrulConfig, arena_bytes: int) -> list[str]:
    """Arguments of ``krul-backend serve`` for what this configuration says about its daemon."""
    arguments = ["--host-memory", str(arena_bytes), "--eviction", config.eviction]
    arguments += ["--tenant-quota", str(config.tenant_quota), "--ssd-timeout", str(config.ssd_timeout)]
    arguments += ["--ssd-queue", str(config.ssd_queue)]
    if config.metrics_port:
        arguments += ["--metrics-port", str(config.metrics_port)]
    if config.hints_port:
        arguments += ["--hints-port", str(config.hints_port)]
    if config.ssd_dir:
        arguments += ["--ssd-dir", str(Path(config.ssd_dir).expanduser())]
    if config.ssd_capacity is not None:
        # Without a directory, too: the daemon refuses that, and says why.
        arguments += ["--ssd-capacity", str(config.ssd_capacity)]
    for tier, settings in (("mooncake", config.mooncake), ("bucket", config.bucket)):
        for setting in settings.split(",") if settings else ():
            arguments += [f"--{tier}", setting]
    return arguments
