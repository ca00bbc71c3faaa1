"""The configuration of a daemon, with every default."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from krul_backend.errors import ConfigError
from krul_backend.tiers.common.eviction import POLICIES


@dataclass(frozen=True)
class DaemonConfig:
    """The configuration of one daemon. Sizes are in bytes, times in seconds.

    ``runtime_dir`` holds the sockets. ``ssd_dirs``: on a disk each; empty: no SSD tier.
    ``ssd_capacity_bytes``: in all of them; None: half of what is free there at start. ``ssd_queue_bytes``:
    how much may wait in DRAM to be written there; the rest is offered again. ``ssd_patience_s``: how long to
    wait for another daemon to leave them.
    ``mooncake``, ``bucket`` None: no such tier; otherwise its options by name.
    ``tenant_quota`` is the share of the arena that one tenant may take. ``metrics_port`` 0: no metrics.
    ``hints_port`` 0: no hints over HTTP.

    Raises:
        ConfigError: a value cannot be used; the message names the key, what was given, what is accepted.
    """

    arena_bytes: int
    runtime_dir: Path
    ssd_dirs: tuple[Path, ...] = ()
    ssd_capacity_bytes: int | None = None
    ssd_timeout_s: float = 1.0
    ssd_queue_bytes: int = 256 << 20
    ssd_patience_s: float = 0.0
    mooncake: Mapping[str, str] | None = None
    bucket: Mapping[str, str] | None = None
    eviction: str = "value"
    tenant_quota: float = 1.0
    metrics_port: int = 0
    hints_port: int = 0
    exit_when_unused: bool = False

    def __post_init__(self) -> None:
        if self.arena_bytes < 1 << 20:
            raise _error("arena_bytes", self.arena_bytes, "at least 1 MiB (1048576)")
        if len({directory.absolute() for directory in self.ssd_dirs}) < len(self.ssd_dirs):
            raise _error("ssd_dir", ",".join(map(str, self.ssd_dirs)), "each directory once")
        if self.ssd_capacity_bytes is not None:
            if not self.ssd_dirs:
                raise _error("ssd_capacity_bytes", self.ssd_capacity_bytes, "a size together with ssd_dir")
            if self.ssd_capacity_bytes < 1 << 20:
                raise _error("ssd_capacity_bytes", self.ssd_capacity_bytes, "at least 1 MiB (1048576)")
        if not 0.0 < self.ssd_timeout_s < math.inf:
            raise _error("ssd_timeout_s", self.ssd_timeout_s, "a positive, finite number of seconds")
        if self.ssd_queue_bytes <= 0:
            raise _error("ssd_queue_bytes", self.ssd_queue_bytes, "a positive size")
        if self.eviction not in POLICIES:
            raise _error("eviction", self.eviction, "one of " + ", ".join(POLICIES))
        if not 0.0 < self.tenant_quota <= 1.0:
            raise _error("tenant_quota", self.tenant_quota, "a share of the arena in (0, 1]")
        if not 0 <= self.metrics_port <= 65535:
            raise _error("metrics_port", self.metrics_port, "a port, or 0 for no metrics")
        if not 0 <= self.hints_port <= 65535:
            raise _error("hints_port", self.hints_port, "a port, or 0 for no hints over HTTP")


def _error(key: str, got: object, accepted: str) -> ConfigError:
    return ConfigError(f"{key}: got {got!r}, accepted is {accepted}")
