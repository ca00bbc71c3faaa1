"""Mooncake's own client, as the tier uses it, and the options of the tier."""

from __future__ import annotations

import importlib
import os
import random
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from krul_backend.errors import ConfigError, DaemonError
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.objects.object_client import (
    ObjectClient,
    ObjectPart,
    ObjectStoreError,
    StoreFullError,
    check_limits,
    without_keys,
)

# mooncake-store/include/types.h, ErrorCode.
_NO_AVAILABLE_HANDLE = -200
_INVALID_PARAMS = -600
_ILLEGAL_CLIENT = -601
_REPLICA_IS_NOT_READY = -703
_OBJECT_NOT_FOUND = -704
_OBJECT_ALREADY_EXISTS = -705

# An object that somebody is still writing cannot be read yet.
_NOT_THERE = (_OBJECT_NOT_FOUND, _REPLICA_IS_NOT_READY)

_PROBE_TIMEOUT_S = 0.5
_PAUSES_OF_REPLACE_S = (0.01, 0.02, 0.04, 0.08, 0.16, 0.32)
# When a host leaves, its part of the cluster is lost. With fewer hosts, Mooncake makes fewer copies.
_NUM_PINNED_REPLICAS = 3


@dataclass(frozen=True)
class MooncakeOptions:
    """Says where the cluster is, how much memory this daemon gives to it, and how long to wait for it.

    ``master_address`` is ``host:port`` of ``mooncake_master``; ``metadata_server`` is what Mooncake's
    transfer engine takes (``http://host:port/metadata``, ``etcd://...``, or ``P2PHANDSHAKE`` for none).
    ``local_hostname`` is how other hosts reach this one. ``segment_bytes`` of this host's memory join the
    cluster (0: use it only); ``buffer_bytes`` are for copies of what lies outside the arena.

    A lookup that takes longer than ``lookup_timeout_s`` is a miss; a late answer is remembered for the next.
    Reading a segment may take ``read_timeout_s``. At most ``queue_bytes`` wait to be written. What is written
    is copied to ``replicas`` hosts, or to all if there are fewer.

    Raises:
        ConfigError: a value that cannot be used.
    """

    name: ClassVar[str] = "mooncake"
    place: ClassVar[str] = "Mooncake cluster"

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
    replicas: int = 1

    def __post_init__(self) -> None:
        host, _, port = self.master_address.rpartition(":")
        if not host or not port.isdecimal() or not 0 < int(port) < 1 << 16:
            raise ConfigError(f"mooncake master_address must be host:port, got {self.master_address!r}")
        if not self.metadata_server or not self.local_hostname:
            raise ConfigError("mooncake metadata_server and local_hostname must not be empty")
        if self.protocol not in ("tcp", "rdma"):
            raise ConfigError(f"mooncake protocol must be 'tcp' or 'rdma', got {self.protocol!r}")
        at_least = {"segment_bytes": 0, "buffer_bytes": 1 << 20, "replicas": 1}
        for name, least in at_least.items():
            if getattr(self, name) < least:
                raise ConfigError(f"mooncake {name} must be at least {least}, got {getattr(self, name)}")
        check_limits(self)

    @property
    def given_bytes(self) -> int:
        return self.segment_bytes

    def connect(self, arena: Block | None) -> MooncakeClient:
        return MooncakeClient(self, arena)

    @property
    def master(self) -> tuple[str, int]:
        """Host (IPv6 without its brackets) and port of the master."""
        host, _, port = self.master_address.rpartition(":")
        return host.strip("[]"), int(port)


def require_mooncake() -> Any:
    """Import the module ``mooncake.store``.

    Raises:
        DaemonError: it is not installed, or a library that it needs is not.
    """
    # Otherwise the client logs every call to stderr. Its errors are logged in any case.
    os.environ.setdefault("MC_LOG_LEVEL", "ERROR")
    try:
        return importlib.import_module("mooncake.store")
    except ImportError as error:
        raise DaemonError(
            f"the Mooncake tier cannot load its client ({error}): pip install 'krul-sglang[mooncake]', "
            "and the system libraries libibverbs1 librdmacm1 libnuma1 ibverbs-providers"
        ) from error


class MooncakeClient(ObjectClient):
    """Keeps objects in a cluster, with ``mooncake.store.MooncakeDistributedStore``.

    Blocks inside ``arena`` are sent and received in place (it is registered with the transfer engine); others
    are copied once. Calls release the GIL, and take about 4 s to fail when the master is gone.

    Raises:
        DaemonError: the client is not installed.
        ObjectStoreError: the cluster does not answer, or does not let us in.
    """

    joins_blocks = False

    def __init__(self, options: MooncakeOptions, arena: Block | None) -> None:
        module = require_mooncake()
        # The client itself would try for minutes to reach a master that is not there.
        try:
            socket.create_connection(options.master, timeout=_PROBE_TIMEOUT_S).close()
        except OSError as error:
            raise ObjectStoreError(f"no Mooncake master at {options.master_address}: {error}") from error
        self._replication = module.ReplicateConfig()
        self._replication.replica_num = options.replicas
        self._pinned = module.ReplicateConfig()
        self._pinned.with_hard_pin = True
        self._pinned.replica_num = max(_NUM_PINNED_REPLICAS, options.replicas)
        self._store = module.MooncakeDistributedStore()
        code = self._store.setup(
            options.local_hostname,
            options.metadata_server,
            options.segment_bytes,
            options.buffer_bytes,
            options.protocol,
            options.rdma_devices,
            options.master_address,
        )
        if code != 0:
            raise ObjectStoreError(f"the Mooncake client cannot join the cluster: error {code}")
        self._arena = arena
        self._arena_range = range(0)
        if arena is not None and self._store.register_buffer(arena.ctypes.data, arena.nbytes) == 0:
            self._arena_range = range(arena.ctypes.data, arena.ctypes.data + arena.nbytes)

    def put(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        code = self._store.put(key, value, self._pinned if is_pinned else self._replication)
        # ILLEGAL_CLIENT: another client replaces it.
        if code not in (_OBJECT_ALREADY_EXISTS, _ILLEGAL_CLIENT):
            _check(code, f"put {key}")

    def put_blocks(self, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        if all(map(self._is_registered, blocks)):
            codes = self._store.batch_put_from(list(keys), *_places(blocks), self._replication)
        else:
            # Each by a call of its own: ``put_batch`` does not say which of them it has stored.
            codes = [self._store.put(*item, self._replication) for item in zip(keys, blocks, strict=True)]
        for key, code in zip(keys, codes, strict=True):
            if code != _OBJECT_ALREADY_EXISTS:
                _check(code, f"put {key}")

    def replace(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        replication = self._pinned if is_pinned else self._replication
        for longest_pause_s in _PAUSES_OF_REPLACE_S:
            code = self._store.upsert(key, value, replication)
            if code != _ILLEGAL_CLIENT:
                break
            # Of clients that replace an object at once, only the last succeeds.
            time.sleep(random.uniform(0, longest_pause_s))
        _check(code, f"replace {key}")

    def get(self, key: str, max_num_bytes: int) -> bytes | None:
        num_bytes = self._store.get_size(key)
        if num_bytes in _NOT_THERE:
            return None
        _check(num_bytes, f"size of {key}")
        if num_bytes > max_num_bytes:
            return None
        # The client returns no bytes both for a lost object and for an error.
        value: bytes = self._store.get(key)
        return value or None

    def get_into(self, parts: Sequence[ObjectPart]) -> list[bool]:
        codes = {i: self._copy_into(p) for i, p in enumerate(parts) if not self._is_registered(p.block)}
        registered = [i for i in range(len(parts)) if i not in codes]
        # By key: of a key that comes twice, ``batch_get_into`` fills one block only.
        whole = {parts[i].key: i for i in registered if parts[i].block.nbytes == parts[i].num_bytes}
        ranges = [i for i in registered if whole.get(parts[i].key) != i]
        read = self._store.batch_get_into(list(whole), *_places([parts[i].block for i in whole.values()]))
        codes |= zip(whole.values(), read, strict=True)
        addresses, sizes = _places([parts[i].block for i in ranges])
        starts = [[[parts[i].start]] for i in ranges]
        keys, zeros = [[parts[i].key] for i in ranges], [[[0]]] * len(ranges)
        read = self._store.get_into_ranges(addresses, keys, zeros, starts, [[[size]] for size in sizes])
        codes |= zip(ranges, (of_keys[0][0] for of_keys in read), strict=True)
        for i, code in codes.items():
            # INVALID_PARAMS: the object is larger than the block, or ends before the range.
            if code != _INVALID_PARAMS and code not in _NOT_THERE:
                _check(code, f"get {parts[i].key}")
        return [codes[i] == part.block.nbytes for i, part in enumerate(parts)]

    def have_all(self, keys: Sequence[str]) -> bool:
        codes = self._store.batch_is_exist(list(keys))
        for code in codes:
            _check(code, "existence of objects")
        return len(codes) == len(keys) and all(code == 1 for code in codes)

    def remove(self, keys: Sequence[str]) -> None:
        for code in self._store.batch_remove(list(keys), True):
            if code not in _NOT_THERE:
                _check(code, "removal of objects")

    def remove_matching(self, pattern: str) -> None:
        _check(self._store.remove_by_regex(pattern, False), f"remove {pattern}")

    def close(self) -> None:
        """Leave the cluster; what lies in this process's memory goes with it."""
        if self._arena is not None and self._arena_range:
            self._store.unregister_buffer(self._arena.ctypes.data)
        self._store.close()

    def _copy_into(self, part: ObjectPart) -> int:
        """Fill a block that is not registered; returns what ``get_into`` of Mooncake's client would."""
        value = self.get(part.key, part.num_bytes)
        if value is None or len(value) != part.num_bytes:
            return _OBJECT_NOT_FOUND
        part.block[:] = np.frombuffer(value, np.uint8, part.block.nbytes, part.start)
        return part.block.nbytes

    def _is_registered(self, block: Block) -> bool:
        start = block.ctypes.data
        return start in self._arena_range and start + block.nbytes <= self._arena_range.stop


def _places(blocks: Sequence[Block]) -> tuple[list[int], list[int]]:
    """The addresses and the sizes of blocks."""
    return [block.ctypes.data for block in blocks], [block.nbytes for block in blocks]


def _check(code: int, what: str) -> None:
    if code >= 0:
        return
    what = without_keys(what)
    if code == _NO_AVAILABLE_HANDLE:
        raise StoreFullError(f"{what}: no room in the cluster's memory")
    raise ObjectStoreError(f"{what}: Mooncake answered error {code}")
