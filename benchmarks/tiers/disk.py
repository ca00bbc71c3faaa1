"""The SSD tier against the bare disk: the same bytes by O_DIRECT, in turns."""

from __future__ import annotations

import mmap
import os
import threading
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tiers.configuration import MIB, Configuration, TiersBenchmarkError
from benchmarks.tiers.segments import (
    Bytes,
    Ring,
    Source,
    copy_blocks,
    make_manifest,
    make_model,
    page_keys,
    token_ids,
)
from benchmarks.tiers.timing import byte_row, interleaved, seconds_of
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.common.lower_tier import LowerTier
from krul_backend.tiers.ssd.ssd_tier import SsdTier

_DEVICE_BLOCK_BYTES = 4096
_RING_BYTES = 128 * MIB
_TIMEOUT_S = 60.0


def disk_rows(configuration: Configuration, folder: Path) -> list[dict[str, Any]]:
    """Whole segments, written until they are durable and read when no page of them is cached."""
    rows: list[dict[str, Any]] = []
    for block_bytes in configuration.block_bytes:
        num_blocks = configuration.num_blocks(block_bytes)
        capacity_bytes = 8 * max(configuration.segment_bytes, block_bytes) + 4 * (
            (configuration.disk_repeats + 1) * block_bytes * num_blocks
        )
        directory = folder / f"ssd-{block_bytes}"
        tier = SsdTier(directory, capacity_bytes, read_timeout_s=_TIMEOUT_S)
        bare = _BareFile(folder / f"bare-{block_bytes}", block_bytes, num_blocks)
        try:
            bench = TierOperations(tier, block_bytes, num_blocks, before_read=partial(evict, directory))
            rows += _rows(bench, bare, configuration.disk_repeats)
        finally:
            tier.close()
            bare.close()
        for path in sorted(directory.rglob("*")):
            if path.is_file():
                path.unlink()
    return rows


def overhead_rows(configuration: Configuration, folder: Path) -> list[dict[str, Any]]:
    """Bytes on disk beside the blocks, of a turn of 1,024 tokens of a model of 32 layers, by compression."""
    del configuration
    rows = []
    native_bytes = 1024 * 8 * (128 + 128) * 2
    for ratio in (1, 4, 8):
        model, num_pages = make_model(32), 64
        sizes = (native_bytes // ratio,) * 32
        manifest = make_manifest(model, 0, 0, num_pages, sizes)
        tier = SsdTier(folder / f"overhead-{ratio}", 16 * sum(sizes))
        try:
            empty_bytes = tier.stats().used_bytes
            blocks = [np.zeros(size, dtype=np.uint8) for size in sizes]
            _put(tier, manifest, blocks, block_checksums(blocks))
            stats = tier.stats()
        finally:
            tier.close()
        metadata_bytes = stats.used_bytes - empty_bytes - stats.stored_bytes
        rows.append(
            {
                "op": "ssd-metadata",
                "ratio_to_bf16": ratio,
                "num_pages": num_pages,
                "stored_bytes": stats.stored_bytes,
                "metadata_bytes": metadata_bytes,
                "share": metadata_bytes / stats.stored_bytes,
            }
        )
    return rows


def evict(directory: Path) -> None:
    """Make the kernel forget the pages of all files below a directory."""
    for path in directory.rglob("*"):
        if path.is_file():
            descriptor = os.open(path, os.O_RDONLY)
            try:
                os.fsync(descriptor)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(descriptor)


class TierOperations:
    """Puts and fetches of a lower tier, timed. Sources are filled and bytes compared outside."""

    def __init__(
        self, tier: LowerTier, block_bytes: int, num_blocks: int, before_read: Callable[[], None]
    ) -> None:
        self._tier = tier
        self._model = make_model(num_blocks)
        self.block_bytes, self.num_blocks = block_bytes, num_blocks
        self._source = Source(block_bytes, num_blocks)
        self._ring = Ring(block_bytes, num_blocks, _RING_BYTES)
        self._before_read = before_read
        self._num_written = self._num_read = 0

    def memcpy(self) -> float:
        target = self._ring.take()
        return seconds_of(lambda: copy_blocks(self._source.blocks, target))

    def write(self) -> float:
        """Until it is durable."""
        number = self._num_written
        self._num_written += 1
        self._source.stamp(number)
        sizes = (self.block_bytes,) * self.num_blocks
        manifest = make_manifest(self._model, number, 0, 1, sizes)
        checksums = block_checksums(self._source.blocks)
        return seconds_of(lambda: _put(self._tier, manifest, self._source.blocks, checksums))

    def read(self) -> float:
        """Each segment once, into memory, its checksums compared by the tier."""
        number = self._num_read
        self._num_read += 1
        self._before_read()
        target = self._ring.take()
        landed: list[int] = []

        def load() -> None:
            runs = self._tier.match(self._model, page_keys(number, 0, 1), token_ids(0, 1), 0)
            if not runs:
                raise TiersBenchmarkError(f"{self._tier.name}: segment {number} was not found")
            try:
                self._tier.fetch(runs[0], target, landed.append)
            finally:
                self._tier.release(runs[0])

        seconds = seconds_of(load)
        if landed != list(range(self.num_blocks)):
            raise TiersBenchmarkError(f"{self._tier.name}: layers landed as {landed}")
        self._source.check(number, target, self._tier.name)
        return seconds


class _BareFile:
    """A file of segments' bytes that is written and read past the page cache, a block at a time."""

    def __init__(self, path: Path, block_bytes: int, num_blocks: int) -> None:
        self._block_bytes = -(-block_bytes // _DEVICE_BLOCK_BYTES) * _DEVICE_BLOCK_BYTES
        self._num_blocks = num_blocks
        self._buffer = mmap.mmap(-1, self._block_bytes)
        # Not zeros: a disk could save itself these.
        np.frombuffer(self._buffer, dtype=np.uint8)[:] = np.random.default_rng(0).integers(
            0, 256, self._block_bytes, dtype=np.uint8
        )
        self._path = path
        self._descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        self._num_written = self._num_read = 0

    def write(self) -> float:
        """As ``dd oflag=direct conv=fdatasync``."""
        start = self._num_written * self._num_blocks
        self._num_written += 1

        def store() -> None:
            for i in range(self._num_blocks):
                self._check(os.pwritev(self._descriptor, [self._buffer], (start + i) * self._block_bytes))
            os.fdatasync(self._descriptor)

        return seconds_of(store)

    def read(self) -> float:
        """As ``dd iflag=direct``."""
        start = self._num_read * self._num_blocks
        self._num_read += 1

        def load() -> None:
            for i in range(self._num_blocks):
                self._check(os.preadv(self._descriptor, [self._buffer], (start + i) * self._block_bytes))

        return seconds_of(load)

    def close(self) -> None:
        os.close(self._descriptor)
        self._path.unlink()

    def _check(self, num_bytes: int) -> None:
        if num_bytes != self._block_bytes:
            raise TiersBenchmarkError(f"the bare disk moved {num_bytes} of {self._block_bytes} bytes")


def _rows(bench: TierOperations, bare: _BareFile, repeats: int) -> list[dict[str, Any]]:
    writes = interleaved({"tier": bench.write, "disk": bare.write, "memcpy": bench.memcpy}, repeats)
    reads = interleaved({"tier": bench.read, "disk": bare.read, "memcpy": bench.memcpy}, repeats)
    return [
        byte_row(
            op,
            taken["tier"],
            block_bytes=bench.block_bytes,
            num_blocks=bench.num_blocks,
            memcpy_s=taken["memcpy"],
            disk_s=taken["disk"],
        )
        for op, taken in (("ssd-write", writes), ("ssd-read-cold", reads))
    ]


def _put(tier: LowerTier, manifest: Any, blocks: list[Bytes], checksums: tuple[int, ...]) -> None:
    is_done = threading.Event()
    if not tier.put(manifest, blocks, checksums, is_done.set):
        raise TiersBenchmarkError(f"{tier.name} refused a segment")
    if not (is_done.wait(_TIMEOUT_S) and tier.flush(_TIMEOUT_S)):
        raise TiersBenchmarkError(f"{tier.name} did not write a segment within {_TIMEOUT_S:g} s")
