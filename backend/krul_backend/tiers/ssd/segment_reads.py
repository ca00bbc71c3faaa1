"""Reading whole segments from the log files, and what that costs."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import numpy as np
import xxhash

from krul_backend.errors import RecordError, StoreClosedError, TierReadError
from krul_backend.planner.interface import TierCost
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.common.lower_tier import MeasuredCost
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue
from krul_backend.tiers.common.record import RECORD_ALIGN
from krul_backend.tiers.ssd.catalog import SsdSegment, TierState
from krul_backend.tiers.ssd.disk import Disk, open_for_reading, write_all
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.reader import NUM_THREADS, PieceReader

PROBE_NUM_BYTES = 32 << 20

_NUM_LATENCY_READS = 5

_LEAST_RATE_NUM_BYTES = 1 << 20
"""Smaller reads say nothing of the disk's rate."""

_UNMEASURED = TierCost(latency_s=1e-3, byte_s=1e-8)
"""The cost of a slow disk."""

MAX_READS_AT_ONCE = 2
"""Enough to keep the disk busy while one of them copies; more would only make each of them look slow."""


class BlockSink:
    """Copies consecutive pieces of a record into blocks, and checks each block as its last byte comes.

    Args:
        at: where in the record the first piece starts, in bytes.
        block_offsets, block_sizes, checksums: of each layer's block; offsets from the record's start.
        blocks: where to copy to, writable; None to check only.
        landed: called for each layer, in ascending order, when its block is written and its checksum right.
    """

    def __init__(
        self,
        at: int,
        block_offsets: Sequence[int],
        block_sizes: Sequence[int],
        checksums: Sequence[int],
        blocks: Sequence[Block] | None,
        landed: Callable[[int], None],
    ) -> None:
        self._at = at
        self._offsets = block_offsets
        self._sizes = block_sizes
        self._checksums = checksums
        self._blocks = blocks
        self._landed = landed
        self._layer = 0
        self._hash = xxhash.xxh3_64()

    def take(self, piece: memoryview) -> None:
        """Process the next bytes of the record. ``piece`` is not kept.

        Raises:
            RecordError: a block has a wrong checksum.
        """
        # piece: [at, end) of the record; block: [start, block_end)
        end = self._at + len(piece)
        while self._layer < len(self._offsets):
            start = self._offsets[self._layer]
            block_end = start + self._sizes[self._layer]
            first, last = max(start, self._at), min(block_end, end)
            if first < last:
                self._copy(piece[first - self._at : last - self._at], first - start)
            if end < block_end:
                break
            self._finish_block()
        self._at = end

    def _copy(self, part: memoryview, offset: int) -> None:
        # Hashing and copying release the GIL, so that other reads go on meanwhile.
        self._hash.update(part)
        if self._blocks is not None:
            block = self._blocks[self._layer]
            block[offset : offset + len(part)] = np.frombuffer(part, np.uint8)

    def _finish_block(self) -> None:
        layer = self._layer
        if self._hash.intdigest() != self._checksums[layer]:
            raise RecordError(f"the block of layer {layer} has a wrong checksum")
        self._hash.reset()
        self._layer += 1
        self._landed(layer)


class SegmentReads:
    """Reads whole segments, checks their bytes, and measures what that costs. Thread-safe.

    A record is read as one sequential range with several pieces in flight, so a layer in it costs only its
    share of a request's latency.

    Args:
        reader: reads pieces; blocks are written by the calling thread alone, so never after ``read`` ended.
        queue: the threads in which ``read`` is called.
    """

    def __init__(self, state: TierState, writer: LogWriter, reader: PieceReader, queue: ReadQueue) -> None:
        self._state = state
        self._writer = writer
        self._reader = reader
        self._cost = MeasuredCost(_UNMEASURED)
        self._queue = queue

    @property
    def cost(self) -> TierCost:
        return self._cost.current

    def measure(self, disk: Disk, directory: Path, num_bytes: int) -> None:
        """Write a file, read it, remove it; sets ``cost``. ``num_bytes`` is a multiple of 4096.

        Raises:
            OSError: the disk failed.
        """
        path = directory / "probe.tmp"
        fd = disk.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        try:
            write_all(disk, fd, [os.urandom(num_bytes)], 0)
            disk.fdatasync(fd)
            disk.drop_cache(fd, 0, 0)
            read_fd = open_for_reading(disk, path)
            try:
                small_s = [
                    self._seconds_to_read(read_fd, at * RECORD_ALIGN, RECORD_ALIGN)
                    for at in range(min(_NUM_LATENCY_READS, num_bytes // RECORD_ALIGN))
                ]
                all_s = self._seconds_to_read(read_fd, 0, num_bytes)
            finally:
                disk.close(read_fd)
        finally:
            disk.close(fd)
            disk.unlink(path)
        self._cost.set(TierCost(statistics.median(small_s) / NUM_THREADS, all_s / num_bytes))

    def read(
        self, segment: SsdSegment, blocks: Sequence[Block] | None, landed: Callable[[int], None]
    ) -> None:
        """Read a segment into ``blocks`` (None: only check it); see ``LowerTier.fetch``.

        Raises:
            TierReadError: its cause is a RecordError if bytes are wrong, an OSError if they cannot be read.
        """
        state = self._state
        with state.lock:
            if not state.is_usable:
                raise TierReadError("the SSD tier is closed, or left alone after an error")
            if not segment.is_indexed:
                raise TierReadError("the segment has left the SSD tier")
            file, offset = segment.file, segment.offset
            file.num_holds += 1

        def land(layer: int) -> None:
            # After a clear no further layer may be used: the model's weights may have changed.
            if not segment.is_indexed:
                raise TierReadError("the segment left the SSD tier while it was read")
            landed(layer)

        # [first, taken_bytes) of the record: from the sector in which layer 0's block starts.
        first = segment.record.block_offsets[0] // RECORD_ALIGN * RECORD_ALIGN
        num_bytes = segment.taken_bytes - first
        sizes = segment.manifest.layer_num_bytes
        sink = BlockSink(first, segment.record.block_offsets, sizes, segment.checksums, blocks, land)
        started_s = time.monotonic()
        try:
            self._reader.read(
                file.read_fd, offset + first, num_bytes, sink.take, partial(self._writer.release, file)
            )
            # If the last blocks have no bytes, no piece was read for them.
            sink.take(memoryview(b""))
        except RecordError as error:
            state.quarantine(segment, error)
            raise TierReadError(f"wrong bytes on the SSD: {error}") from error
        except TimeoutError as error:
            state.counters.add(slow_reads=1)
            state.suspension.failed("slow read", error)
            raise TierReadError(f"the SSD is too slow: {error}") from error
        except OSError as error:
            state.counters.add(failed_reads=1)
            state.suspension.failed("failed read", error)
            raise TierReadError(f"the SSD cannot be read: {error}") from error
        state.suspension.succeeded()
        took_s = time.monotonic() - started_s
        if num_bytes >= _LEAST_RATE_NUM_BYTES:
            self._cost.correct(lambda cost: TierCost(cost.latency_s, took_s / num_bytes))
        state.counters.add(read_segments=1, read_bytes=segment.manifest.num_bytes)

    def read_for_upkeep(self, segment: SsdSegment, blocks: Sequence[Block] | None) -> None:
        """``read``, when no load and no prefetch waits. From any thread but those of the queue.

        Raises:
            TierReadError: as ``read``; the tier was closed.
        """
        try:
            self._queue.run(lambda: self.read(segment, blocks, lambda layer: None), ReadPriority.UPKEEP)
        except StoreClosedError as error:
            raise TierReadError("the SSD tier is closed") from error

    def _seconds_to_read(self, fd: int, offset: int, num_bytes: int) -> float:
        started_s = time.monotonic()
        self._reader.read(fd, offset, num_bytes, lambda piece: None, lambda: None)
        return time.monotonic() - started_s
