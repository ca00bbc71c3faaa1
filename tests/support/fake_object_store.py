"""A cluster in a dictionary, for the Mooncake tier's tests."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import numpy as np

from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.mooncake.mooncake_client import ObjectStoreError, StoreFullError


class FakeCluster:
    """What all its clients share. Faults: ``is_down``, ``capacity_bytes``; ``gate`` holds every call.
    ``num_bytes_read``: of blocks."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_down = False
        self.capacity_bytes = 1 << 40
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, str]] = []
        self.num_bytes_read = 0

    def names(self, part: str) -> list[str]:
        return sorted(name for name in self.objects if part in name)

    def metadata_names(self) -> list[str]:
        return [name for name in self.objects if name.endswith("/m")]

    def damage(self, name: str) -> None:
        """Flip a bit in the middle of an object."""
        value = bytearray(self.objects[name])
        value[len(value) // 2] ^= 0x10
        self.objects[name] = bytes(value)


class FakeObjectStore:
    """One client of a cluster; see ``MooncakeClient``, whose methods it has."""

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.is_closed = False
        self._objects("join", "")

    def put(self, key: str, value: Block | bytes, *, is_pinned: bool = False) -> None:
        objects = self._objects("put", key)
        if key not in objects:
            self._store(key, bytes(value))

    def replace(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        self._objects("replace", key)
        self._store(key, value)

    def get(self, key: str, max_num_bytes: int) -> bytes | None:
        value = self._objects("get", key).get(key)
        return value if value is not None and len(value) <= max_num_bytes else None

    def get_into(self, key: str, block: Block, num_bytes: int, num_after: int = 0) -> bool:
        value = self._objects("get_into", key).get(key)
        if value is None or len(value) != num_bytes:
            return False
        end = num_bytes - num_after
        block[:] = np.frombuffer(value, dtype=np.uint8)[end - block.nbytes : end]
        self._cluster.num_bytes_read += block.nbytes
        return True

    def have_all(self, keys: Sequence[str]) -> bool:
        objects = self._objects("have_all", keys[0])
        return all(key in objects for key in keys)

    def remove(self, keys: Sequence[str]) -> None:
        objects = self._objects("remove", keys[0])
        for key in keys:
            objects.pop(key, None)

    def remove_matching(self, pattern: str) -> None:
        objects = self._objects("remove_matching", pattern)
        for key in [key for key in objects if re.search(pattern, key)]:
            del objects[key]

    def close(self) -> None:
        self.is_closed = True

    def _store(self, key: str, value: bytes) -> None:
        assert value, "Mooncake takes no empty objects"
        if sum(map(len, self._cluster.objects.values())) + len(value) > self._cluster.capacity_bytes:
            raise StoreFullError("full")
        self._cluster.objects[key] = value

    def _objects(self, operation: str, key: str) -> dict[str, bytes]:
        self._cluster.calls.append((operation, key))
        assert self._cluster.gate.wait(10)
        if self._cluster.is_down:
            raise ObjectStoreError("down")
        return self._cluster.objects
