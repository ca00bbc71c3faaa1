"""Reading the ends of segments' blocks from the log files, and what that costs."""

from __future__ import annotations

import os
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

import numpy as np

from krul_backend.errors import RecordError, StoreClosedError, TierReadError
from krul_backend.planner import TierCost
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.common.lower_tier import TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load
from krul_backend.tiers.common.record import (
    FIXED_NUM_BYTES,
    RECORD_ALIGN,
    aligned,
    decode_header,
    decode_size,
)
from krul_backend.tiers.common.tier_health import MeasuredCost
from krul_backend.tiers.ssd.catalog import SsdSegment
from krul_backend.tiers.ssd.disk import Disk, open_for_reading, write_all
from krul_backend.tiers.ssd.index import file_number_of, offset_of
from krul_backend.tiers.ssd.log_file import LogFile
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.reader import NUM_THREADS, FileRange, PieceReader
from krul_backend.tiers.ssd.tier_state import TierState

PROBE_NUM_BYTES = 32 << 20

_NUM_LATENCY_READS = 5

_LEAST_RATE_NUM_BYTES = 1 << 20
"""Smaller reads say nothing of the disk's rate."""
_RATE_NUM_BYTES = 8 << 20
"""After so many bytes it is known anew."""

_CHUNK_NUM_BYTES = 1 << 20
"""Layers of a segment that lie side by side are read together up to this size, so that none waits long for
those of another segment."""

_HEADER_NUM_BYTES = 16 << 10
"""So much is read of a record to know its header; of a longer one the rest is read then."""

_UNMEASURED = TierCost(latency_s=1e-3, byte_s=1e-8)
"""The cost of a slow disk."""

MAX_READS_AT_ONCE = 2
"""Enough to keep the disk busy while one of them copies; more would only make each of them look slow."""


class _TailOfSegment:
    """A read of a segment's blocks: where their ends lie in the log file, and how far they have come."""

    def __init__(self, read: TailRead, file: LogFile, record_offset: int) -> None:
        self.read = read
        self.file = file
        self.segment: SsdSegment = read.run.segment
        offsets = self.segment.record.block_offsets
        # [begin, end) of the file has what is read of each layer's block.
        self._ends = [record_offset + at + read.end_of(layer) for layer, at in enumerate(offsets)]
        self._begins = [end - block.nbytes for end, block in zip(self._ends, read.blocks, strict=True)]
        self._next_layer = 0

    def chunks(self) -> Iterator[_Chunk]:
        """The ranges of the file to be read, in the order of the layers: what lies side by side is one range,
        up to ``_CHUNK_NUM_BYTES``."""
        chunk: _Chunk | None = None
        for layer, (begin, end) in enumerate(zip(self._begins, self._ends, strict=True)):
            if begin == end:
                continue
            first, last = begin // RECORD_ALIGN * RECORD_ALIGN, aligned(end, RECORD_ALIGN)
            if chunk is not None and first <= chunk.end and chunk.num_bytes < _CHUNK_NUM_BYTES:
                chunk = chunk._replace(end=max(last, chunk.end))
                continue
            if chunk is not None:
                yield chunk
            chunk = _Chunk(layer, self, first, last)
        if chunk is not None:
            yield chunk

    def take(self, offset: int, piece: memoryview) -> None:
        """Copy what is wanted of the file's bytes from ``offset`` on, and check each block that is complete.

        Raises:
            RecordError: a block has a wrong checksum.
        """
        end = offset + len(piece)
        layer = self._next_layer
        while layer < len(self._ends):
            first, last = max(self._begins[layer], offset), min(self._ends[layer], end)
            if first < last:
                to = first - self._begins[layer]
                part = np.frombuffer(piece[first - offset : last - offset], np.uint8)
                self.read.blocks[layer][to : to + last - first] = part
            if end < self._ends[layer]:
                return
            self._finish(layer)
            layer = self._next_layer

    def finish_empty(self) -> None:
        """Let layers land that come next and of which nothing is read."""
        while self._next_layer < len(self._ends) and not self.read.blocks[self._next_layer].nbytes:
            self._finish(self._next_layer)

    def _finish(self, layer: int) -> None:
        if not self.read.is_right(layer):
            raise RecordError(f"the block of layer {layer} has a wrong checksum")
        # After a clear no further layer may be used: the model's weights may have changed.
        if not self.segment.is_indexed:
            raise TierReadError("the segment left the SSD tier while it was read")
        self._next_layer = layer + 1
        self.read.landed(layer)


class _Chunk(NamedTuple):
    """Bytes ``[begin, end)`` of a log file, which begin with those of a layer: multiples of 4096."""

    layer: int
    tail: _TailOfSegment
    begin: int
    end: int

    @property
    def num_bytes(self) -> int:
        return self.end - self.begin


class BusyRate:
    """Measures how long bytes take while any read runs, however many run at once: what a tier delivers.
    Thread-safe."""

    def __init__(self, cost: MeasuredCost, clock: Callable[[], float] = time.monotonic) -> None:
        self._cost = cost
        self._clock = clock
        self._lock = threading.Lock()
        self._num_reads = 0
        self._num_bytes = 0
        self._since_s = 0.0

    @contextmanager
    def reading(self) -> Iterator[None]:
        """To be held by each read."""
        with self._lock:
            if not self._num_reads:
                self._num_bytes, self._since_s = 0, self._clock()
            self._num_reads += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_reads -= 1
                if self._num_bytes >= _LEAST_RATE_NUM_BYTES:
                    self._settle()

    def came(self, num_bytes: int) -> None:
        """So many bytes more have come."""
        with self._lock:
            self._num_bytes += num_bytes
            if self._num_bytes >= _RATE_NUM_BYTES:
                self._settle()

    def _settle(self) -> None:
        now_s = self._clock()
        byte_s = (now_s - self._since_s) / self._num_bytes
        self._cost.correct(lambda cost: TierCost(cost.latency_s, byte_s))
        self._num_bytes, self._since_s = 0, now_s


class SegmentReads:
    """Reads the ends of blocks, checks their bytes, and measures what that costs. Thread-safe.

    What lies side by side in a record is one range, and several pieces of it are in flight, so a layer in it
    costs only its share of a request's latency.

    Args:
        reader: reads pieces; blocks are written by the calling thread alone, so never after ``read`` ended.
        queue: the threads in which ``read`` is called.
    """

    def __init__(self, state: TierState, writer: LogWriter, reader: PieceReader, queue: ReadQueue) -> None:
        self._state = state
        self._writer = writer
        self._reader = reader
        self._cost = MeasuredCost(_UNMEASURED)
        self._rate = BusyRate(self._cost)
        self._queue = queue

    @property
    def cost(self) -> TierCost:
        return self._cost.current

    def measure(self, disk: Disk, directories: Sequence[Path], num_bytes: int) -> None:
        """Write a file in each directory, read it, remove it; sets ``cost`` to that of the slowest.

        ``num_bytes`` is a multiple of 4096. Raises OSError if a disk failed.
        """
        costs = [self._measured(disk, directory, num_bytes) for directory in directories]
        self._cost.set(max(costs, key=lambda cost: cost.load_s(num_bytes)))

    def _measured(self, disk: Disk, directory: Path, num_bytes: int) -> TierCost:
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
        return TierCost(statistics.median(small_s) / NUM_THREADS, all_s / num_bytes)

    def read(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        """Read the ends of blocks; see ``LowerTier.fetch``.

        A read whose bytes are wrong fails with a TierReadError whose cause is a RecordError.

        Raises:
            TierReadError: its cause is an OSError if the medium fails.
        """
        tails = list(self._hold(reads))

        def release() -> None:
            with self._state.lock:
                for tail in tails:
                    tail.segment.num_reads -= 1
            for tail in tails:
                self._writer.release(tail.file)
            if not all(tail.segment.is_indexed for tail in tails):
                self._state.wake()

        chunks = sorted((chunk for tail in tails for chunk in tail.chunks()), key=lambda chunk: chunk.layer)
        asked: list[_Chunk] = []

        def ranges() -> Iterator[FileRange]:
            for chunk in chunks:
                if chunk.tail.read.error is None:
                    asked.append(chunk)
                    yield FileRange(chunk.tail.file.read_fd, chunk.begin, chunk.num_bytes)

        def take(index: int, offset: int, piece: memoryview) -> None:
            self._rate.came(len(piece))
            self._attempt(asked[index].tail, lambda tail: tail.take(offset, piece))

        state = self._state
        with self._medium_errors():
            for tail in tails:
                self._attempt(tail, _TailOfSegment.finish_empty)
            with self._rate.reading():
                self._reader.read(ranges(), take, release, priority)
            for tail in tails:
                self._attempt(tail, _TailOfSegment.finish_empty)
        state.suspension.succeeded()
        good = [tail.read for tail in tails if tail.read.error is None]
        read_bytes = sum(chunk.num_bytes for chunk in asked)
        state.counters.add(read_segments=len(good), read_bytes=read_bytes)

    def load(self, place: int, is_there: Callable[[], bool] | None = None) -> SsdSegment | None:
        """The segment at a place, held; its header is read if it is not in memory. None if it has left.

        ``is_there``: whether it is still stored, by what the caller has read of the index already.

        Raises:
            TierReadError: the medium fails, or (its cause is a RecordError) the header is not right: then the
                segment is quarantined.
        """
        state, number = self._state, file_number_of(place)
        with state.lock:
            catalog, file = state.catalog, self._writer.files.get(number)
            segment = catalog.kept(place)
            if segment is not None and segment.is_indexed:
                segment.num_holds += 1
                return segment
            is_there = is_there if is_there is not None else lambda: catalog.has(place)
            if file is None or not is_there() or not state.is_usable:
                return None
            file.num_holds += 1
        offset = offset_of(place)
        try:
            record = decode_header(self._header(file, offset), file.place(offset))
        except RecordError as error:
            state.quarantine(place, error)
            raise TierReadError(f"wrong bytes on the SSD: {error}") from error
        finally:
            self._writer.release(file)
        with state.lock:
            if not is_there():
                return None
            segment = catalog.keep(SsdSegment(record, file, offset))
            segment.num_holds += 1
            return segment

    def _header(self, file: LogFile, offset: int) -> bytes:
        """A record's header and some bytes after it. Raises RecordError, TierReadError."""
        header, left_bytes = bytearray(), file.num_synced_bytes - offset
        num_bytes = min(_HEADER_NUM_BYTES, left_bytes)
        while len(header) < num_bytes <= left_bytes:
            part = FileRange(
                file.read_fd, offset + len(header), aligned(num_bytes, RECORD_ALIGN) - len(header)
            )
            with self._state.lock:
                file.num_holds += 1
            with self._medium_errors():
                self._reader.read(
                    [part], lambda *at: header.extend(at[2]), lambda: self._writer.release(file)
                )
            num_bytes = decode_size(bytes(header[:FIXED_NUM_BYTES]))[0]
        return bytes(header)

    @contextmanager
    def _medium_errors(self) -> Iterator[None]:
        """Count errors of the medium, suspend the tier for them, and make TierReadErrors of them."""
        try:
            yield
        except TimeoutError as error:
            self._state.counters.add(slow_reads=1)
            self._state.suspension.failed("slow read", error)
            raise TierReadError(f"the SSD is too slow: {error}") from error
        except OSError as error:
            self._state.counters.add(failed_reads=1)
            self._state.suspension.failed("failed read", error)
            raise TierReadError(f"the SSD cannot be read: {error}") from error

    def _hold(self, reads: Sequence[TailRead]) -> Iterator[_TailOfSegment]:
        """The reads of what is still here. Their bytes and files stay until they end."""
        with self._state.lock:
            if not self._state.is_usable:
                raise TierReadError("the SSD tier is closed, or left alone after an error")
            for read in reads:
                segment: SsdSegment = read.run.segment
                if segment.is_indexed:
                    segment.num_reads += 1
                    segment.file.num_holds += 1
                    yield _TailOfSegment(read, segment.file, segment.offset)
                else:
                    read.fail(TierReadError("the segment has left the SSD tier"))

    def _attempt(self, tail: _TailOfSegment, work: Callable[[_TailOfSegment], None]) -> None:
        """Go on with a read, unless it has failed. A segment whose bytes are wrong is quarantined."""

        def checked() -> None:
            try:
                work(tail)
            except RecordError as error:
                self._state.quarantine(tail.segment.segment_id, error)
                raise TierReadError(f"wrong bytes on the SSD: {error}") from error

        tail.read.attempt(checked)

    def read_for_upkeep(self, segment: SsdSegment) -> list[Block]:
        """All blocks of a segment, read when no load and no prefetch waits. From any thread but those of the
        queue.

        Raises:
            TierReadError: as ``read``, or what a read fails with; the tier was closed.
        """
        blocks = [np.empty(num_bytes, np.uint8) for num_bytes in segment.manifest.layer_num_bytes]
        run = PageRun(segment, 0, len(segment.manifest.page_keys))
        read = TailRead(run, blocks, lambda layer: None, lambda error: None)
        try:
            priority = ReadPriority.UPKEEP
            self._queue.run(lambda: self.read([read], lambda: priority), priority)
        except StoreClosedError as error:
            raise TierReadError("the SSD tier is closed") from error
        if read.error is not None:
            raise read.error
        return blocks

    def _seconds_to_read(self, fd: int, offset: int, num_bytes: int) -> float:
        started_s = time.monotonic()
        self._reader.read([FileRange(fd, offset, num_bytes)], lambda *piece: None, lambda: None)
        return time.monotonic() - started_s
