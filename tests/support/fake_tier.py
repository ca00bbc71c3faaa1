"""A lower tier in memory, whose reads and writes a test can hold up and make fail."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from krul_backend.errors import TierReadError
from krul_backend.planner.interface import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds
from krul_backend.tiers.common.interface import Block, DamageReport, SegmentInfo, TierStats
from krul_backend.tiers.common.lower_tier import LowerTier, TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load

NUM_READ_THREADS = 4


@dataclass(eq=False)
class Record:
    manifest: SegmentManifest
    content: tuple[bytes, ...]
    checksums: tuple[bytes, ...]


class FakeTier(LowerTier):
    """Keeps copies by page key. ``num_holds`` counts runs that were matched and not released. ``puts`` was
    taken to be written, in its order; each is written in a thread of its own. ``num_reads`` counts the
    segments that were asked for, ``num_fetches`` the calls, ``num_bytes_read`` what was read.

    ``reads_go_on`` holds reads up after ``num_free_layers`` layers; ``fail_after`` makes a read fail after so
    many; without ``checks_bytes`` wrong bytes land, too. ``writes_go_on`` holds up the calls of ``done``,
    which come from a thread. ``refuses`` makes ``put`` answer False, ``put_error`` makes it raise.
    """

    def __init__(self, name: str = "ssd", cost: TierCost | None = None) -> None:
        self.name = name
        self.reads_go_on = threading.Event()
        self.reads_go_on.set()
        self.num_free_layers = 0
        self.fail_after: int | None = None
        self.read_error: Exception | None = None
        self.checks_bytes = True
        self.refuses = False
        self.put_error: Exception | None = None
        self.writes_go_on = threading.Event()
        self.writes_go_on.set()
        self.reads = ReadQueue(NUM_READ_THREADS, f"krul-read-{name}")
        self.num_holds = 0
        self.num_reads = 0
        self.num_fetches = 0
        self.num_bytes_read = 0
        self.puts: list[SegmentManifest] = []
        self.is_closed = False
        self.records: dict[int, Record] = {}
        self._cost = cost if cost is not None else TierCost(0.0, 1e-9)
        self._lock = threading.Lock()
        self._ids = itertools.count(1)
        self._writers: list[threading.Thread] = []

    def add(self, manifest: SegmentManifest, content: Sequence[bytes], checksums: Sequence[bytes]) -> None:
        """Another daemon, or an earlier life of this one, wrote a segment."""
        with self._lock:
            self.records[next(self._ids)] = Record(manifest, tuple(content), tuple(checksums))

    @property
    def num_puts(self) -> int:
        return len(self.puts)

    def _find(self, model: ModelIdentity, key: str) -> tuple[Record, int] | None:
        for record in self.records.values():
            if record.manifest.model == model and key in record.manifest.page_keys:
                return record, record.manifest.page_keys.index(key)
        return None

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._lock:
            is_missing = [self._find(model, key) is None for key in page_keys]
        runs, at = [], 0
        for missing, group in itertools.groupby(is_missing):
            end = at + len(list(group))
            if missing:
                runs.append(range(at, end))
            at = end
        return runs

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[Any], ...]:
        assert len(token_ids) == len(page_keys) * model.page_size
        runs: list[PageRun[Any]] = []
        at = 0
        with self._lock:
            while at < len(page_keys):
                found = self._find(model, page_keys[at])
                if found is None:
                    break
                record, first = found
                manifest = record.manifest
                start = manifest.start_token + first * model.page_size
                if next_token is not None and start != next_token:
                    break
                end = first
                while end < len(manifest.page_keys) and at < len(page_keys):
                    size = model.page_size
                    own = manifest.token_ids[end * size : (end + 1) * size]
                    asked = token_ids[at * size : (at + 1) * size]
                    if manifest.page_keys[end] != page_keys[at] or not np.array_equal(own, asked):
                        break
                    end, at = end + 1, at + 1
                if end == first:
                    break
                runs.append(PageRun(record, first, end))
                next_token = manifest.start_token + end * model.page_size
            self.num_holds += len(runs)
        return tuple(runs)

    def hold(self, run: PageRun[Any]) -> None:
        with self._lock:
            assert self.num_holds > 0, "held by nobody"
            self.num_holds += 1

    def release(self, run: PageRun[Any]) -> None:
        with self._lock:
            assert self.num_holds > 0, "released more often than matched"
            self.num_holds -= 1

    def fetch(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        with self._lock:
            self.num_fetches += 1
            self.num_reads += len(reads)
        for layer in range(max(len(read.blocks) for read in reads)):
            if layer >= self.num_free_layers:
                assert self.reads_go_on.wait(20)
            if layer == self.fail_after:
                raise self.read_error if self.read_error is not None else TierReadError("a broken disk")
            for read in reads:
                if read.error is None:
                    self._read_layer(read, layer)

    def _read_layer(self, read: TailRead, layer: int) -> None:
        record: Record = read.run.segment
        block, content = read.blocks[layer], record.content[layer]
        end = read.end_of(layer)
        block[:] = np.frombuffer(content, dtype=np.uint8)[end - block.nbytes : end]
        if self.checks_bytes and not read.is_right(layer):
            read.fail(TierReadError("wrong bytes"))
            return
        with self._lock:
            self.num_bytes_read += block.nbytes
        read.landed(layer)

    def put(
        self,
        manifest: SegmentManifest,
        blocks: Sequence[Block],
        checksums: Sequence[bytes],
        done: Callable[[], None],
    ) -> bool:
        if self.put_error is not None:
            raise self.put_error
        if self.refuses:
            return False
        with self._lock:
            self.puts.append(manifest)

        def write() -> None:
            assert self.writes_go_on.wait(20)
            if self.find_missing(manifest.model, manifest.page_keys):
                self.add(manifest, [block.tobytes() for block in blocks], checksums)
            with self._lock:
                # As a tier may: whoever is told must not call back.
                done()

        thread = threading.Thread(target=write)
        with self._lock:
            thread.start()
            self._writers.append(thread)
        return True

    def discard(self, manifest: SegmentManifest) -> None:
        with self._lock:
            self.records = {
                n: record
                for n, record in self.records.items()
                if not record.manifest.shares_encoded_pages(manifest)
            }

    def holder_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        with self._lock:
            found = self._find(model, page_key)
        return None if found is None else found[0].manifest

    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        with self._lock:
            found = self._find(model, page_key)
            last_key = None if found is None else found[0].manifest.page_keys[-1]
            return last_key is not None and any(
                record.manifest.parent_key == last_key for record in self.records.values()
            )

    def cost(self) -> TierCost:
        return self._cost

    def flush(self, timeout_s: float) -> bool:
        with self._lock:
            writers = list(self._writers)
        for thread in writers:
            thread.join(timeout_s)
        return not any(thread.is_alive() for thread in writers)

    def clear(self, model: ModelIdentity | None = None) -> None:
        self.flush(20)
        with self._lock:
            kept = {n: r for n, r in self.records.items() if model is not None and r.manifest.model != model}
            self.records = kept

    def list_segments(self) -> list[SegmentInfo]:
        with self._lock:
            return [SegmentInfo.of(n, record.manifest, self.name) for n, record in self.records.items()]

    def verify(self) -> DamageReport:
        with self._lock:
            sizes = [len(block) for record in self.records.values() for block in record.content]
        return DamageReport(len(sizes), sum(sizes), ())

    def stats(self) -> TierStats:
        with self._lock:
            num_bytes = sum(record.manifest.num_bytes for record in self.records.values())
            return TierStats(
                name=self.name,
                capacity_bytes=10**9,
                used_bytes=num_bytes,
                free_bytes=10**9 - num_bytes,
                stored_bytes=num_bytes,
                num_segments=len(self.records),
                num_pages=sum(len(record.manifest.page_keys) for record in self.records.values()),
                queued_segments=0,
                queued_bytes=0,
                written_segments=self.num_puts,
                written_bytes=num_bytes,
                skipped_segments={},
                read_segments=self.num_reads,
                read_bytes=self.num_bytes_read,
                evicted_segments=0,
                evicted_bytes=0,
                corrupted_segments=0,
                failed_reads=0,
                slow_reads=0,
                failed_writes=0,
                is_suspended=False,
                is_opening=False,
            )

    def close(self) -> None:
        self.flush(20)
        self.reads.close()
        self.is_closed = True
