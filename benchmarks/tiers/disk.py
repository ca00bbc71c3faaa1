"""The tiers below memory: SSD against the bare disk, the same bytes by O_DIRECT, in turns; and a cluster."""

from __future__ import annotations

import contextlib
import importlib.util
import mmap
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.tiers.configuration import MIB, Configuration, TiersBenchmarkError
from benchmarks.tiers.segments import Bytes, Operations, make_manifest, make_model, page_keys, token_ids
from benchmarks.tiers.timing import byte_row, interleaved, seconds_of
from krul_backend.errors import KrulError
from krul_backend.tiers.common.interface import Checksums, block_checksums
from krul_backend.tiers.common.lower_tier import LowerTier, TailRead
from krul_backend.tiers.ssd.ssd_tier import SsdTier

_DEVICE_BLOCK_BYTES = 4096
_RING_BYTES = 128 * MIB
_TIMEOUT_S = 60.0
_START_S = 15.0


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
        tier.wait_until_open(_TIMEOUT_S)
        bare = _BareFile(folder / f"bare-{block_bytes}", block_bytes, num_blocks)
        try:
            bench = TierOperations(tier, block_bytes, num_blocks, before_read=partial(evict, directory))
            rows += bench.rows("ssd-write", "ssd-read-cold", configuration.disk_repeats, bare)
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


class TierOperations(Operations):
    """Puts and fetches of a lower tier."""

    def __init__(
        self, tier: LowerTier, block_bytes: int, num_blocks: int, before_read: Callable[[], None]
    ) -> None:
        super().__init__(block_bytes, num_blocks, _RING_BYTES)
        self._tier = tier
        self._before_read = before_read
        self._num_read = 0

    def rows(
        self, write: str, read: str, repeats: int, bare: _BareFile | None = None
    ) -> list[dict[str, Any]]:
        """Rows of these names: operations in turns with memcpy, and with the bare disk if there is one."""
        rows = []
        for op, name in ((write, "write"), (read, "read")):
            beside = {} if bare is None else {"disk": getattr(bare, name)}
            taken = interleaved({"tier": getattr(self, name), **beside, "memcpy": self.memcpy}, repeats)
            rows.append(
                byte_row(
                    op,
                    taken["tier"],
                    block_bytes=self.block_bytes,
                    num_blocks=self.num_blocks,
                    memcpy_s=taken["memcpy"],
                    disk_s=taken.get("disk"),
                )
            )
        return rows

    def write(self) -> float:
        """Until it is durable."""
        _, manifest = self.next_segment()
        checksums = block_checksums(self.source.blocks)
        return seconds_of(lambda: _put(self._tier, manifest, self.source.blocks, checksums))

    def read(self) -> float:
        """Each segment once, into memory, its checksums compared by the tier."""
        number = self._num_read
        self._num_read += 1
        self._before_read()
        target = self.ring.take()
        landed: list[int] = []

        def load() -> None:
            runs = self._tier.match(self.model, page_keys(number, 0, 1), token_ids(0, 1), 0)
            if not runs:
                raise TiersBenchmarkError(f"{self._tier.name}: segment {number} was not found")
            try:
                read = TailRead(runs[0], target, landed.append, lambda error: None)
                self._tier.fetch([read])
                if read.error is not None:
                    raise read.error
            finally:
                self._tier.release(runs[0])

        seconds = seconds_of(load)
        if landed != list(range(self.num_blocks)):
            raise TiersBenchmarkError(f"{self._tier.name}: layers landed as {landed}")
        self.source.check(number, target, self._tier.name)
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


def _put(tier: LowerTier, manifest: Any, blocks: list[Bytes], checksums: Checksums) -> None:
    is_done = threading.Event()
    if not tier.put(manifest, blocks, checksums, is_done.set):
        raise TiersBenchmarkError(f"{tier.name} refused a segment")
    if not (is_done.wait(_TIMEOUT_S) and tier.flush(_TIMEOUT_S)):
        raise TiersBenchmarkError(f"{tier.name} did not write a segment within {_TIMEOUT_S:g} s")


def mooncake_rows(configuration: Configuration, folder: Path) -> list[dict[str, Any]]:
    """Puts and gets of whole segments; or the reason why there are none."""
    master = shutil.which("mooncake_master", path=str(Path(sys.executable).parent))
    if master is None or importlib.util.find_spec("mooncake") is None:
        return [_left_out("the extra krul-sglang[mooncake] is not installed")]
    rows: list[dict[str, Any]] = []
    for block_bytes in configuration.block_bytes:
        num_blocks = configuration.num_blocks(block_bytes)
        try:
            with _master(master, folder) as address:
                rows += _of_cluster(configuration, address, block_bytes, num_blocks)
        except (KrulError, OSError) as error:
            return [*rows, _left_out(str(error))]
    return rows


def _of_cluster(
    configuration: Configuration, address: str, block_bytes: int, num_blocks: int
) -> list[dict[str, Any]]:
    from krul_backend.tiers.objects.mooncake_client import MooncakeOptions
    from krul_backend.tiers.objects.tier import ObjectTier

    segment_bytes = block_bytes * num_blocks * (configuration.disk_repeats + 3) + (256 << 20)
    options = MooncakeOptions(address, segment_bytes=segment_bytes, lookup_timeout_s=5.0)
    tier = ObjectTier(options, None)
    try:
        bench = TierOperations(tier, block_bytes, num_blocks, before_read=lambda: None)
        return bench.rows("mooncake-put", "mooncake-get", configuration.disk_repeats)
    finally:
        tier.close()


def _left_out(reason: str) -> dict[str, Any]:
    return {"op": "mooncake", "left_out": reason}


@contextlib.contextmanager
def _master(program: str, folder: Path) -> Iterator[str]:
    """A ``mooncake_master`` on ports of its own; its address."""
    listeners = [socket.create_server(("127.0.0.1", 0)) for _ in range(2)]
    ports = [listener.getsockname()[1] for listener in listeners]
    for listener in listeners:
        listener.close()
    with open(folder / "mooncake.log", "ab") as log:
        process = subprocess.Popen(
            [program, f"--rpc_port={ports[0]}", f"--metrics_port={ports[1]}"], stdout=log, stderr=log
        )
    try:
        _wait_for(ports[0])
        yield f"127.0.0.1:{ports[0]}"
    finally:
        process.terminate()
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


def _wait_for(port: int) -> None:
    deadline_s = time.monotonic() + _START_S
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), timeout=1.0).close()
        except OSError:
            if time.monotonic() >= deadline_s:
                raise
            time.sleep(0.05)
        else:
            return
