"""An SSD tier on a small directory, and a disk that fails when told to."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from krul_backend.errors import TierReadError
from krul_backend.segment import ModelIdentity, SegmentManifest
from krul_backend.tiers.common.interface import block_checksums
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.ssd.disk import Disk
from krul_backend.tiers.ssd.ssd_tier import SsdTier
from tests.support.store_builders import make_manifest, make_model, page_keys, read_tail, tokens_of

FILE_BYTES = 64 << 10
CAPACITY_BYTES = 8 * FILE_BYTES
SIZES = (6000, 3000)


class FaultyDisk(Disk):
    """Each call of a method in ``errors`` raises that errno. The other faults are described by their names.

    ``num_good_writes``: so many more calls of ``pwritev`` succeed before the next raise ENOSPC.
    ``is_full``: no file can grow, as on a full disk; what it has can be overwritten.
    ``unreadable``: names of files that cannot be read. ``before_read`` is called before anything is read;
    ``num_bytes_read`` counts what was.
    Without ``gate`` reads stall, without ``writes_go_on`` writes do; ``is_writing`` says that one does.
    """

    def __init__(self) -> None:
        self.errors: dict[str, int] = {}
        self.max_step_bytes: int | None = None
        self.num_good_writes: int | None = None
        self.is_full = False
        self.unreadable: set[str] = set()
        self.before_read: Callable[[], None] = lambda: None
        self.num_bytes_read = 0
        self._counting = threading.Lock()
        self._names: dict[int, str] = {}
        self.num_free_bytes: int | None = None
        self.num_block_bytes: int | None = None
        self.flipped_read_offset: int | None = None
        self.gate = threading.Event()
        self.gate.set()
        self.num_stalled = 0
        self.writes_go_on = threading.Event()
        self.writes_go_on.set()
        self.is_writing = threading.Event()

    def _check(self, name: str) -> None:
        if name in self.errors:
            raise OSError(self.errors[name], f"injected in {name}")

    def open(self, path: Path, flags: int, mode: int = 0o600) -> int:
        fd = super().open(path, flags, mode)
        self._names[fd] = path.name
        return fd

    def preadv(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check("preadv")
        if self._names[fd] in self.unreadable:
            raise OSError(errno.EIO, "injected")
        self.before_read()
        if not self.gate.is_set():
            self.num_stalled += 1
            self.gate.wait(20)
        num_read = super().preadv(fd, buffers, offset)
        with self._counting:
            self.num_bytes_read += num_read
        if self.max_step_bytes is not None and num_read > self.max_step_bytes:
            # As if the rest had never come.
            buffers[0][self.max_step_bytes :] = bytes(len(buffers[0]) - self.max_step_bytes)
            num_read = self.max_step_bytes
        if self.flipped_read_offset is not None and num_read > self.flipped_read_offset:
            buffers[0][self.flipped_read_offset] ^= 1
        return num_read

    def pwritev(self, fd: int, buffers: Sequence[memoryview], offset: int) -> int:
        self._check("pwritev")
        if not self.writes_go_on.is_set():
            self.is_writing.set()
            assert self.writes_go_on.wait(20)
        if self.num_good_writes is not None:
            if self.num_good_writes == 0:
                raise OSError(errno.ENOSPC, "injected")
            self.num_good_writes -= 1
        if self.is_full and offset + sum(map(len, buffers)) > self.size(fd):
            raise OSError(errno.ENOSPC, "injected")
        if self.max_step_bytes is not None:
            buffers = [buffers[0][: self.max_step_bytes]]
        return super().pwritev(fd, buffers, offset)

    def free_bytes(self, path: Path) -> int:
        return super().free_bytes(path) if self.num_free_bytes is None else self.num_free_bytes

    def fdatasync(self, fd: int) -> None:
        self._check("fdatasync")
        super().fdatasync(fd)

    def truncate(self, fd: int, num_bytes: int) -> None:
        self._check("truncate")
        super().truncate(fd, num_bytes)

    def punch(self, fd: int, offset: int, num_bytes: int) -> None:
        self._check("punch")
        super().punch(fd, offset, num_bytes)

    def block_bytes(self, path: Path) -> int:
        return super().block_bytes(path) if self.num_block_bytes is None else self.num_block_bytes

    def rename(self, old: Path, new: Path) -> None:
        self._check("rename")
        super().rename(old, new)

    def unlink(self, path: Path) -> None:
        self._check("unlink")
        super().unlink(path)


def open_tier(directory: Path, disk: Disk | None = None, **options: Any) -> SsdTier:
    """A tier that has read what lies in the directory; waits as long as a busy disk may take."""
    tier = begin_to_open(directory, disk, **options)
    assert tier.wait_until_open(20)
    return tier


def begin_to_open(directory: Path, disk: Disk | None = None, **options: Any) -> SsdTier:
    options = {"capacity_bytes": CAPACITY_BYTES, "file_bytes": FILE_BYTES, "read_timeout_s": 20.0, **options}
    return SsdTier(directory, disk=disk, **options)


def begin_stalled_fetch(
    tier: SsdTier, disk: FaultyDisk, run: PageRun[Any]
) -> tuple[threading.Thread, list[TierReadError]]:
    """Fetch a held run in a thread, on a disk that stalls until ``disk.gate`` is set, and return the thread
    and the list that gets its error."""
    disk.gate.clear()
    errors: list[TierReadError] = []

    def read() -> None:
        try:
            fetch(tier, run)
        except TierReadError as error:
            errors.append(error)

    thread = threading.Thread(target=read)
    thread.start()
    return thread, errors


@contextmanager
def busy_writer(tier: SsdTier, disk: FaultyDisk) -> Iterator[None]:
    """Stall the writer in the middle of a segment of two bytes, until the end of the block."""
    disk.is_writing.clear()
    disk.writes_go_on.clear()
    try:
        assert put_manifest(tier, make_manifest("busy", 0, 2, (1, 1)))
        assert disk.is_writing.wait(20)
        yield
    finally:
        disk.writes_go_on.set()


def random_blocks(sizes: Sequence[int], seed: int) -> list[np.ndarray[Any, Any]]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, 256, size, dtype=np.uint8) for size in sizes]


def put_manifest(tier: SsdTier, manifest: SegmentManifest, seed: int = 0) -> bool:
    blocks = random_blocks(manifest.layer_num_bytes, seed)
    return tier.put(manifest, blocks, block_checksums(blocks, manifest.range_bytes), lambda: None)


def put(
    tier: SsdTier,
    conversation: str,
    first: int = 0,
    end: int = 2,
    sizes: tuple[int, ...] = SIZES,
    model: ModelIdentity | None = None,
    seed: int = 0,
) -> bool:
    """Put a segment and wait until it is settled; its bytes follow from ``seed``."""
    is_taken = put_manifest(tier, make_manifest(conversation, first, end, sizes, model), seed)
    assert tier.flush(20)
    return is_taken


def match(
    tier: SsdTier, conversation: str, first: int = 0, end: int = 2, model: ModelIdentity | None = None
) -> tuple[PageRun[Any], ...]:
    model = model if model is not None else make_model()
    keys = page_keys(conversation, first, end)
    return tier.match(model, keys, tokens_of(keys), None)


def fetch(tier: SsdTier, run: PageRun[Any]) -> list[np.ndarray[Any, Any]]:
    """The blocks of a held run, after checking that the layers land in order."""
    blocks = [np.zeros(size, dtype=np.uint8) for size in run.segment.manifest.layer_num_bytes]
    landed: list[int] = []
    read_tail(tier, run, blocks, landed.append)
    assert landed == list(range(len(blocks)))
    return blocks


def has(tier: SsdTier, conversation: str, seed: int = 0, model: ModelIdentity | None = None) -> bool:
    """Whether a segment of ``put`` is found; if so its bytes must be the right ones."""
    runs = match(tier, conversation, model=model)
    for run in runs:
        blocks = fetch(tier, run)
        for block, right in zip(
            blocks, random_blocks(run.segment.manifest.layer_num_bytes, seed), strict=True
        ):
            np.testing.assert_array_equal(block, right)
        tier.release(run)
    return bool(runs)


def disk_bytes(directory: Path) -> int:
    """What the log files really take: holes take nothing."""
    return sum(end - begin for path in directory.rglob("*.log") for begin, end in data_ranges(path))


def data_ranges(path: Path) -> list[tuple[int, int]]:
    """What of a file is not in holes, as its file system tells."""
    ranges, end = [], 0
    with path.open("rb") as file:
        num_bytes = os.fstat(file.fileno()).st_size
        while end < num_bytes:
            try:
                begin = os.lseek(file.fileno(), end, os.SEEK_DATA)
            except OSError:
                break
            end = os.lseek(file.fileno(), begin, os.SEEK_HOLE)
            ranges.append((begin, end))
    return ranges
