"""Connects a rank to its store: a daemon that the first rank of the host starts, or one that runs already."""

from __future__ import annotations

import logging
import threading
import time
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from krul_backend.daemon.client import DaemonStore, EmbeddedDaemon
from krul_backend.device import Device
from krul_backend.errors import DaemonError, KrulError
from krul_backend.memory import format_bytes, lock_limit_bytes
from krul_backend.page_lock import PageLock
from krul_backend.segment import ModelIdentity
from krul_sglang.config import KrulConfig
from krul_sglang.engine.common.agreement import RankAgreement

logger = logging.getLogger(__name__)


class ArenaLocks:
    """From ``begin`` on, locks the daemon's arena in memory, for direct copies of the device.

    Nobody waits for that: see ``Device.lock_pages``. Locked memory is taken from the system, and cannot be
    swapped. Where locking is refused (a limit on locked memory, say), copies still work, only slower. When
    the daemon is gone and another mapping replaces this one, it stays locked until the last load or turn that
    uses it has ended.
    """

    def __init__(self, device: Device) -> None:
        self._device = device
        self._changing = threading.Lock()
        self._has_begun = False
        self._arena: npt.NDArray[np.uint8] | None = None
        self._lock: PageLock | None = None

    def add(self, arena: npt.NDArray[np.uint8]) -> None:
        """Take a new mapping of the arena, in the place of the one before."""
        with self._changing:
            self._arena = arena
            self._lock_if_begun()

    def begin(self) -> None:
        """Call it when costs are measured, which locking would disturb, and CUDA graphs captured."""
        with self._changing:
            self._has_begun = True
            self._lock_if_begun()

    def as_dict(self) -> dict[str, int] | None:
        """How much is locked, and the device's error; None if nothing is to be locked, or not yet."""
        lock = self._lock
        if lock is None:
            return None
        return {"bytes": lock.locked_bytes, "of_bytes": lock.num_bytes, "error": lock.error}

    def _lock_if_begun(self) -> None:
        if self._has_begun and self._arena is not None:
            # It is not kept here: it ends with the last array.
            arena, self._arena = self._arena, None
            self._lock = self._device.lock_pages(arena, _log_locked)


@dataclass(frozen=True, eq=False)
class StoreConnection:
    """One rank's store. ``daemon`` is None on ranks that did not start one."""

    store: DaemonStore
    device: Device
    locks: ArenaLocks
    daemon: EmbeddedDaemon | None
    endpoint: str

    def as_dict(self) -> dict[str, Any]:
        """Plain values for ``/server_info``."""
        return {
            "endpoint": self.endpoint,
            "is_connected": self.store.is_connected,
            **asdict(self.store.counters),
            "locked": self.locks.as_dict(),
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
    locks = ArenaLocks(device)
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
                endpoint, model=model, on_arena=locks.add, restart=None if daemon is None else daemon.restart
            )
            if not store.is_connected:
                connected = {"error": f"no krul-backend answers in {endpoint}: is it running, as this user?"}
        except KrulError as error:
            connected = {"error": str(error)}
        _gathered(agreement, connected)
        assert store is not None
    except BaseException:
        if store is not None:
            store.close()
        if daemon is not None:
            daemon.close()
        raise
    return StoreConnection(store, device, locks, daemon, endpoint)


def _log_locked(lock: PageLock) -> None:
    if lock.error == 0:
        logger.info("krul: pinned %s in %.1f s", format_bytes(lock.num_bytes), lock.seconds)
        return
    limit = lock_limit_bytes()
    logger.warning(
        "krul: host memory could not be pinned beyond %s of %s (error %d; the limit on locked memory is %s): "
        "copies of the rest will be slower",
        format_bytes(lock.locked_bytes),
        format_bytes(lock.num_bytes),
        lock.error,
        "none" if limit is None else format_bytes(limit),
    )


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
    for directory in config.ssd_dirs:
        arguments += ["--ssd-dir", str(directory)]
    if config.ssd_capacity is not None:
        # Without a directory, too: the daemon refuses that, and says why.
        arguments += ["--ssd-capacity", str(config.ssd_capacity)]
    for tier, settings in (("mooncake", config.mooncake), ("bucket", config.bucket)):
        for setting in settings.split(",") if settings else ():
            arguments += [f"--{tier}", setting]
    return arguments
