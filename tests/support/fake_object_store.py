"""A cluster in a dictionary, for the Mooncake tier's tests."""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence

import numpy as np

from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.objects.object_client import ObjectPart, ObjectStoreError, StoreFullError


class FakeCluster:
    """What all its clients share. Faults: ``is_down``, ``capacity_bytes``; ``gate`` holds every call.
    ``failing``: ends of names that cannot be put; ``half_written``: ends of names that another client is
    writing. ``batches``: the names of each call for many blocks. ``num_bytes_read``: of blocks."""

    def __init__(self) -> None:
        self.objects: dict[str, bytes] = {}
        self.is_down = False
        self.capacity_bytes = 1 << 40
        self.gate = threading.Event()
        self.gate.set()
        self.calls: list[tuple[str, str]] = []
        self.failing: tuple[str, ...] = ()
        self.half_written: tuple[str, ...] = ()
        self.batches: list[list[str]] = []
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
    """One client of a cluster; see ``ObjectClient``, whose methods it has."""

    joins_blocks = False

    def __init__(self, cluster: FakeCluster) -> None:
        self._cluster = cluster
        self.is_closed = False
        self._objects("join", "")

    def put(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        self._put_all([key], [value])

    def put_blocks(self, keys: Sequence[str], blocks: Sequence[Block]) -> None:
        self._cluster.batches.append(list(keys))
        self._put_all(keys, [block.tobytes() for block in blocks])

    def replace(self, key: str, value: bytes, *, is_pinned: bool = False) -> None:
        self._objects("replace", key)
        self._store(key, value)

    def get(self, key: str, max_num_bytes: int) -> bytes | None:
        value = self._objects("get", key).get(key)
        return value if value is not None and len(value) <= max_num_bytes else None

    def get_into(self, parts: Sequence[ObjectPart]) -> list[bool]:
        if parts:
            self._cluster.batches.append([part.key for part in parts])
        return [self._get_part(part) for part in parts]

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

    def _get_part(self, part: ObjectPart) -> bool:
        value = self._objects("get_into", part.key).get(part.key)
        if value is None or len(value) != part.num_bytes:
            return False
        part.block[:] = np.frombuffer(value, np.uint8, part.block.nbytes, part.start)
        self._cluster.num_bytes_read += part.block.nbytes
        return True

    def _put_all(self, keys: Sequence[str], values: Sequence[bytes]) -> None:
        """As Mooncake, go on after an object that cannot be stored."""
        errors: list[ObjectStoreError] = []
        for key, value in zip(keys, values, strict=True):
            objects = self._objects("put", key)
            if key.endswith(self._cluster.failing):
                errors.append(ObjectStoreError("failing"))
            elif key not in objects and not key.endswith(self._cluster.half_written):
                try:
                    self._store(key, value)
                except StoreFullError as error:
                    errors.append(error)
        if errors:
            raise errors[0]

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
