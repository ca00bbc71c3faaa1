"""The options of a Mooncake tier."""

from __future__ import annotations

from dataclasses import dataclass

from krul_backend.errors import ConfigError


@dataclass(frozen=True)
class MooncakeOptions:
    """Says where the cluster is, how much memory this daemon gives to it, and how long to wait for it.

    ``master_address`` is ``host:port`` of ``mooncake_master``; ``metadata_server`` is what Mooncake's
    transfer engine takes (``http://host:port/metadata``, ``etcd://...``, or ``P2PHANDSHAKE`` for none).
    ``local_hostname`` is how other hosts reach this one. ``segment_bytes`` of this host's memory join the
    cluster (0: use it only); ``buffer_bytes`` are for copies of what lies outside the arena.

    A lookup that takes longer than ``lookup_timeout_s`` is a miss; a late answer is remembered for the next.
    Reading a segment may take ``read_timeout_s``. At most ``queue_bytes`` wait to be written.

    Raises:
        ConfigError: a value that cannot be used.
    """

    master_address: str
    metadata_server: str = "P2PHANDSHAKE"
    local_hostname: str = "127.0.0.1"
    protocol: str = "tcp"
    rdma_devices: str = ""
    segment_bytes: int = 4 << 30
    buffer_bytes: int = 128 << 20
    lookup_timeout_s: float = 0.05
    read_timeout_s: float = 30.0
    queue_bytes: int = 1 << 30

    def __post_init__(self) -> None:
        host, _, port = self.master_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"mooncake master_address must be host:port, got {self.master_address!r}")
        if not self.metadata_server or not self.local_hostname:
            raise ConfigError("mooncake metadata_server and local_hostname must not be empty")
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"mooncake protocol must be 'tcp' or 'rdma', got {self.protocol!r}")
        for name, least in (("segment_bytes", 0), ("buffer_bytes", 1 << 20), ("queue_bytes", 1)):
            if getattr(self, name) < least:
                raise ConfigError(f"mooncake {name} must be at least {least}, got {getattr(self, name)}")
        for name in ("lookup_timeout_s", "read_timeout_s"):
            if not 0 < getattr(self, name) < 3600:
                raise ConfigError(f"mooncake {name} must be between 0 and 3600 s, got {getattr(self, name)}")

    @property
    def master(self) -> tuple[str, int]:
        """Host (IPv6 without its brackets) and port of the master."""
        host, _, port = self.master_address.rpartition(":")
        return host.strip("[]"), int(port)
