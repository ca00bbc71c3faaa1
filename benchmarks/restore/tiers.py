"""Where stored blocks lie, and how a part of one reaches the device."""

from __future__ import annotations

import os
import time
from abc import ABC, abstractmethod
from pathlib import Path
from typing import ClassVar

import torch

from benchmarks.link import Link
from krul_backend.device import Device
from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import block_checksum

_DISK_BLOCK = 4096
"""Direct reads start, end and land at multiples of this, which every disk accepts."""


class DamagedPartError(KrulError):
    """Bytes in host memory are not what they were."""


class Tier(ABC):
    """Holds blocks by key. Used by one loading thread at a time; keeps staging memory for each block.

    What lies in memory is checked ahead of the copies, by other threads (``check``); what does not, by
    ``read``, when it has come.
    """

    name: ClassVar[str]
    lies_in_memory: ClassVar[bool]

    def __init__(self, device: Device, bandwidth_gbs: float | None) -> None:
        self.bandwidth_gbs = bandwidth_gbs
        self._device = device
        self._link = Link(bandwidth_gbs)
        self._checksums: dict[tuple[tuple[object, ...], int], bytes] = {}

    @abstractmethod
    def add(self, key: tuple[object, ...], block: torch.Tensor) -> None:
        """Keep a copy of ``block``, uint8 ``[num_bytes]`` on any device."""

    @abstractmethod
    def _read(self, key: tuple[object, ...], first_byte: int) -> torch.Tensor: ...

    @abstractmethod
    def _host_bytes(self, key: tuple[object, ...]) -> torch.Tensor:
        """A block in host memory, uint8 ``[num_bytes]``."""

    @abstractmethod
    def close(self) -> None:
        """Give the memory and files back."""

    def check(self, key: tuple[object, ...], first_byte: int) -> None:
        """Hash bytes ``[first_byte, end)`` of a block: an engine that stores no more than that checks them
        before it uses one.

        They are compared with what they were at the first call for this part, which warms up.

        Raises:
            DamagedPartError: they have changed.
        """
        checksum = block_checksum(self._host_bytes(key)[first_byte:].numpy())
        if self._checksums.setdefault((key, first_byte), checksum) != checksum:
            raise DamagedPartError(f"block {key} has changed from byte {first_byte} on in {self.name}")

    def read(self, key: tuple[object, ...], first_byte: int) -> torch.Tensor:
        """Bytes ``[first_byte, end)`` of a block by one copy: uint8 on the device.

        On a GPU the copy is queued on the current stream. The tensor is staging memory of the block: it is
        overwritten when the same block is read again.
        """
        started_s = time.perf_counter()
        block = self._read(key, first_byte)
        self._link.hold(started_s, block.numel())
        return block


class DramTier(Tier):
    """Host memory, pinned if the device is a GPU."""

    name = "dram"
    lies_in_memory = True

    def __init__(self, device: Device, bandwidth_gbs: float | None = None) -> None:
        super().__init__(device, bandwidth_gbs)
        self._blocks: dict[tuple[object, ...], tuple[torch.Tensor, torch.Tensor]] = {}

    def add(self, key: tuple[object, ...], block: torch.Tensor) -> None:
        host = self._device.host_empty((block.numel(),), torch.uint8)
        host.copy_(block)
        staging = torch.zeros(block.numel(), dtype=torch.uint8, device=self._device.torch_device)
        self._blocks[key] = host, staging

    def close(self) -> None:
        self._blocks.clear()

    def _host_bytes(self, key: tuple[object, ...]) -> torch.Tensor:
        return self._blocks[key][0]

    def _read(self, key: tuple[object, ...], first_byte: int) -> torch.Tensor:
        host, staging = self._blocks[key]
        return self._device.upload(host[first_byte:], staging[first_byte:])


class SsdTier(Tier):
    """One file, read past the page cache where the file system can; where not, the cache is dropped first.

    Raises:
        OSError: the folder cannot be written.
    """

    name = "ssd"
    lies_in_memory = False

    def __init__(self, device: Device, folder: Path, bandwidth_gbs: float | None = None) -> None:
        super().__init__(device, bandwidth_gbs)
        self._path = folder / "blocks"
        self._writer = os.open(self._path, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600)
        try:
            self._reader = os.open(self._path, os.O_RDONLY | os.O_DIRECT)
            self.is_direct = True
        except OSError:
            self._reader = os.open(self._path, os.O_RDONLY)
            self.is_direct = False
        self._end = 0
        # offset in the file, size, host memory that is read into, device memory (the same on a CPU)
        self._blocks: dict[tuple[object, ...], tuple[int, int, torch.Tensor, torch.Tensor]] = {}

    def add(self, key: tuple[object, ...], block: torch.Tensor) -> None:
        num_bytes = block.numel()
        padded = -(-num_bytes // _DISK_BLOCK) * _DISK_BLOCK
        host = _aligned(self._device.host_empty((padded + _DISK_BLOCK,), torch.uint8), padded)
        host[:num_bytes].copy_(block)
        host[num_bytes:] = 0
        _write_fully(self._writer, host, self._end)
        os.fsync(self._writer)
        staging = self._device.upload(host)
        self._blocks[key] = self._end, num_bytes, host, staging
        self._end += padded

    def close(self) -> None:
        self._blocks.clear()
        os.close(self._reader)
        os.close(self._writer)
        self._path.unlink()

    def _host_bytes(self, key: tuple[object, ...]) -> torch.Tensor:
        _, num_bytes, host, _ = self._blocks[key]
        return host[:num_bytes]

    def _read(self, key: tuple[object, ...], first_byte: int) -> torch.Tensor:
        offset, num_bytes, host, staging = self._blocks[key]
        first_read = first_byte // _DISK_BLOCK * _DISK_BLOCK
        if not self.is_direct:
            os.posix_fadvise(self._reader, offset, host.numel(), os.POSIX_FADV_DONTNEED)
        _read_fully(self._reader, host[first_read:], offset + first_read)
        self.check(key, first_byte)
        if staging is not host:
            self._device.upload(host[first_byte:num_bytes], staging[first_byte:num_bytes])
        return staging[first_byte:num_bytes]


def _aligned(buffer: torch.Tensor, num_bytes: int) -> torch.Tensor:
    first = -buffer.data_ptr() % _DISK_BLOCK
    return buffer[first : first + num_bytes]


def _write_fully(file: int, data: torch.Tensor, offset: int) -> None:
    view = data.numpy().data
    while view:
        written = os.pwrite(file, view, offset)
        view, offset = view[written:], offset + written


def _read_fully(file: int, data: torch.Tensor, offset: int) -> None:
    view = data.numpy().data
    while view:
        num_read = os.preadv(file, [view], offset)
        if num_read == 0:
            raise OSError(f"file of blocks ends at {offset}, {len(view)} bytes are missing")
        view, offset = view[num_read:], offset + num_read
