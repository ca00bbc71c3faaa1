"""Reading whole segments from the log files."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from functools import partial

from krul_backend.errors import RecordError, TierReadError
from krul_backend.planner.costs import TierCost
from krul_backend.tiers.common.interface import Block
from krul_backend.tiers.common.record import RECORD_ALIGN
from krul_backend.tiers.ssd.block_sink import BlockSink
from krul_backend.tiers.ssd.log_writer import LogWriter
from krul_backend.tiers.ssd.read_cost import ReadCost
from krul_backend.tiers.ssd.reader import PieceReader
from krul_backend.tiers.ssd.ssd_segment import SsdSegment
from krul_backend.tiers.ssd.tier_state import TierState

_MAX_READS_AT_ONCE = 2
"""Enough to keep the disk busy while one of them copies. A read's time still says what the disk can do."""


class SegmentReads:
    """Reads, checks, counts and judges.

    Args:
        reader: reads pieces; blocks are written by the calling thread alone, so never after ``read`` ended.
    """

    def __init__(self, state: TierState, writer: LogWriter, reader: PieceReader, cost: ReadCost) -> None:
        self._state = state
        self._writer = writer
        self._reader = reader
        self._cost = cost
        self._turns = threading.Semaphore(_MAX_READS_AT_ONCE)

    @property
    def cost(self) -> TierCost:
        return self._cost.current

    def read(
        self, segment: SsdSegment, blocks: Sequence[Block] | None, landed: Callable[[int], None]
    ) -> None:
        """Read a segment into ``blocks`` (None: only check it); see ``LowerTier.fetch``.

        Raises:
            TierReadError: from a RecordError if the bytes are wrong, from an OSError if they cannot be had.
        """
        with self._turns:
            self._read(segment, blocks, landed)

    def _read(
        self, segment: SsdSegment, blocks: Sequence[Block] | None, landed: Callable[[int], None]
    ) -> None:
        state = self._state
        with state.lock:
            if not state.is_usable:
                raise TierReadError("the SSD tier is closed, or left alone after an error")
            if not segment.is_indexed:
                raise TierReadError("the segment has left the SSD tier")
            file, offset = segment.file, segment.offset
            file.num_holds += 1

        def land(layer: int) -> None:
            # A clear must stop what it overtakes: these bytes may be of weights that are gone.
            if not segment.is_indexed:
                raise TierReadError("the segment left the SSD tier while it was read")
            landed(layer)

        # [first, taken_bytes) of the record: from the sector in which layer 0's block starts.
        first = segment.block_offsets[0] // RECORD_ALIGN * RECORD_ALIGN
        num_bytes = segment.taken_bytes - first
        sizes = segment.manifest.layer_num_bytes
        sink = BlockSink(first, segment.block_offsets, sizes, segment.checksums, blocks, land)
        started_s = time.monotonic()
        try:
            self._reader.read(
                file.read_fd, offset + first, num_bytes, sink.take, partial(self._writer.release, file)
            )
            # Of blocks without bytes there may be nothing to read.
            sink.take(memoryview(b""))
        except RecordError as error:
            state.quarantine(segment, error)
            raise TierReadError(f"wrong bytes on the SSD: {error}") from error
        except TimeoutError as error:
            with state.lock:
                state.counters.slow_reads += 1
            state.suspension.failed("slow read", error)
            raise TierReadError(f"the SSD is too slow: {error}") from error
        except OSError as error:
            with state.lock:
                state.counters.failed_reads += 1
            state.suspension.failed("failed read", error)
            raise TierReadError(f"the SSD cannot be read: {error}") from error
        state.suspension.succeeded()
        self._cost.learn(num_bytes, time.monotonic() - started_s)
        with state.lock:
            state.counters.read_segments += 1
            state.counters.read_bytes += segment.manifest.num_bytes
