"""The tier in a store of objects: segments that any daemon that uses the store has put there."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from krul_backend.errors import TierReadError
from krul_backend.planner import TierCost
from krul_backend.segment import ModelIdentity, SegmentManifest, TokenIds, checked_token_ids
from krul_backend.tiers.common.interface import Block, Clock, DamageReport, SegmentInfo, TierStats
from krul_backend.tiers.common.lower_tier import LowerTier, TailRead
from krul_backend.tiers.common.page_index import PageRun
from krul_backend.tiers.common.read_queue import ReadPriority, ReadQueue, of_a_load
from krul_backend.tiers.common.tier_health import MeasuredCost, Suspension, TierCounters
from krul_backend.tiers.common.write_queue import QueuedSegment
from krul_backend.tiers.objects.connection import UNMEASURED, ObjectStoreConnection, TimedCalls, seen_cost
from krul_backend.tiers.objects.lookup import KnownSegments, Lookup
from krul_backend.tiers.objects.object_client import (
    ObjectClient,
    ObjectPart,
    ObjectStoreError,
    ObjectStoreOptions,
)
from krul_backend.tiers.objects.stored_object import Epochs, StoredObject
from krul_backend.tiers.objects.writer import ObjectWriter

logger = logging.getLogger(__name__)

_NUM_LOOKUP_THREADS = 2
_NUM_READ_THREADS = 4
_CLEAR_TIMEOUT_S = 5.0
_BATCH_BYTES = 8 << 20
"""What one call asks for. Nothing of it lands, and no deadline is looked at, before all of it has come."""

_Batch = list[tuple[TailRead, int]]  # Reads, and a layer of each.


class ObjectTier(LowerTier):
    """Keeps segments as objects. If their store cannot be reached, the tier starts suspended.

    A suspended tier tries again by itself.

    Args:
        arena: the memory that blocks are views of, uint8; it may be registered for transfers without a copy.
            None: blocks are copied once.
        connect: makes the client in place of ``options``, in tests.

    Raises:
        ConfigError: there is no such store.
        DaemonError: its client is not installed.
    """

    def __init__(
        self,
        options: ObjectStoreOptions,
        arena: npt.NDArray[np.uint8] | None,
        *,
        connect: Callable[[], ObjectClient] | None = None,
        clock: Clock = time.monotonic,
    ) -> None:
        self.name = options.name
        self._options = options
        self._clock = clock
        self._counters = TierCounters()
        self._cost = MeasuredCost(UNMEASURED)
        self._suspension = Suspension(self.name, clock)
        self._connection = ObjectStoreConnection(
            options.place, connect or partial(options.connect, arena), self._suspension, self._cost
        )
        try:
            self._connection.store()
        except ObjectStoreError as error:
            self._suspension.failed(f"cannot join the {options.place}", error)
        self._epochs = Epochs(clock)
        self._known = KnownSegments(clock)
        self._lookup = Lookup(
            self._known, self._epochs, clock, lambda: self._counters.add(corrupted_segments=1)
        )
        self._calls = TimedCalls(f"krul-{self.name}-lookup", _NUM_LOOKUP_THREADS)
        self.reads = ReadQueue(_NUM_READ_THREADS, f"krul-read-{self.name}")
        # In a thread of their own: a drop of a long conversation must not hold up lookups.
        self._removals = TimedCalls(f"krul-{self.name}-remove", 1)
        self._writer = ObjectWriter(
            self._connection,
            self._suspension,
            self._counters,
            self._epochs,
            self._known,
            self._lookup,
            clock,
            options.queue_bytes,
        )

    def find_missing(self, model: ModelIdentity, page_keys: Sequence[str]) -> list[range]:
        with self._known.index() as index:
            return index.find_missing(model, page_keys)

    def match(
        self, model: ModelIdentity, page_keys: Sequence[str], token_ids: TokenIds, next_token: int | None
    ) -> tuple[PageRun[StoredObject], ...]:
        token_ids = checked_token_ids(token_ids, len(page_keys), model.page_size)
        # While an answer is late no further lookup waits: a scheduler asks again and again.
        if not page_keys or self._suspension.is_active:
            return ()
        keys = tuple(page_keys)
        runs, is_all = self._lookup.known_runs(model, keys, token_ids)
        if not is_all and not self._calls.is_late:
            # The call may outlive this method, and the caller's array with it.
            tokens = np.array(token_ids, dtype=np.int64)
            self._calls.run(lambda: self._ask(model, keys, tokens), self._options.lookup_timeout_s)
            runs, _ = self._lookup.known_runs(model, keys, token_ids)
        if runs and next_token is not None:
            first = runs[0]
            if first.segment.manifest.start_token + first.first_page * model.page_size != next_token:
                return ()
        return runs

    def release(self, run: PageRun[StoredObject]) -> None:
        """Does nothing: a hold cannot keep the object store from evicting."""

    def fetch(self, reads: Sequence[TailRead], priority: Callable[[], ReadPriority] = of_a_load) -> None:
        started_s = self._clock()
        asked: list[int] = []
        read_s = 0.0
        try:
            store = self._connection.store()
            for read in reads:
                read.attempt(partial(self._check_epoch, store, read.run.segment))
            for batch in _batches(reads):
                parts, took_s = self._read_batch(store, batch)
                asked += [part.block.nbytes for part in parts]
                read_s += took_s
                if self._clock() - started_s > self._options.read_timeout_s:
                    self._counters.add(slow_reads=1)
                    self._suspension.failed("slow reads", f"more than {self._options.read_timeout_s:g} s")
                    raise TierReadError(f"segments took too long to come from the {self._options.place}")
        except ObjectStoreError as error:
            self._counters.add(failed_reads=1)
            self._suspension.failed("reads fail", error)
            raise TierReadError(f"the {self._options.place} cannot be read: {error}") from error
        finally:
            if asked:
                self._cost.correct(lambda cost: seen_cost(cost, asked, read_s))
        self._suspension.succeeded()
        good = [read for read in reads if read.error is None]
        num_bytes = sum(block.nbytes for read in good for block in read.blocks)
        self._counters.add(read_segments=len(good), read_bytes=num_bytes)

    def put(
        self,
        manifest: SegmentManifest,
        blocks: Sequence[Block],
        checksums: Sequence[bytes],
        done: Callable[[], None],
    ) -> bool:
        if not self.find_missing(manifest.model, manifest.page_keys):
            done()
            return True
        return self._writer.put(QueuedSegment(manifest, tuple(blocks), tuple(checksums), b"", done))

    def may_hold(self, model: ModelIdentity, page_key: str) -> bool:
        """True: other daemons store segments that this one does not know of."""
        return True

    def discard(self, manifest: SegmentManifest) -> None:
        """Forget such segments at once, and remove them from the object store in the background."""
        self._writer.queue.give_up(lambda item: item.manifest.shares_encoded_pages(manifest))
        known = self._forget_like(manifest)
        # In the background, because it may take long when the master is gone.
        if not self._removals.begin(lambda: self._remove_like(manifest, known)):
            logger.info("many removals wait: %d tokens stay in the object store", manifest.num_tokens)

    def holder_of(self, model: ModelIdentity, page_key: str) -> SegmentManifest | None:
        with self._known.index() as index:
            return index.manifest_of(model, page_key)

    def is_needed(self, model: ModelIdentity, page_key: str) -> bool:
        """Answer ``LowerTier.is_needed`` by what this daemon knows of the object store."""
        with self._known.index() as index:
            return index.is_needed(model, page_key)

    def cost(self) -> TierCost:
        return self._cost.current

    def flush(self, timeout_s: float) -> bool:
        """Wait until everything that was put before is in the object store's memory, or given up."""
        return self._writer.queue.flush(timeout_s)

    def clear(self, model: ModelIdentity | None = None) -> None:
        """Forget a model, or all of them: in this daemon alone while the store does not answer.

        It then repeats the clear before it uses anything of the model again.
        """
        fingerprint = model.fingerprint if model is not None else None
        self._epochs.clear(fingerprint)
        self._known.clear(fingerprint)
        self._writer.queue.give_up(lambda item: fingerprint in (None, item.manifest.model.fingerprint))
        if not self._calls.run(self._settle, _CLEAR_TIMEOUT_S):
            self._suspension.failed("slow to clear", f"more than {_CLEAR_TIMEOUT_S:g} s")

    def list_segments(self) -> list[SegmentInfo]:
        """The segments of the object store that this daemon knows."""
        return [
            SegmentInfo.of(
                segment.segment_id,
                segment.manifest,
                self.name,
                idle_s=max(0.0, self._clock() - segment.confirmed_at_s),
            )
            for segment in self._known.segments()
        ]

    def verify(self) -> DamageReport:
        """Read all segments that this daemon knows; stops when the object store does not answer."""
        num_blocks = num_bytes = 0
        bad_segments: list[int] = []
        for segment in self._known.segments():
            try:
                store = self._connection.store()
                sizes = segment.manifest.layer_num_bytes
                blocks = [np.empty(size, dtype=np.uint8) for size in sizes]
                landed: list[int] = []
                read = TailRead(PageRun(segment, 0, 1), blocks, landed.append, lambda error: None)
                self._read_batch(store, [(read, layer) for layer in range(len(sizes))])
                num_blocks += sum(sizes[layer] > 0 for layer in landed)
                num_bytes += sum(sizes[layer] for layer in landed)
                if isinstance(read.error, _WrongBytesError):
                    bad_segments.append(segment.segment_id)
            except ObjectStoreError as error:
                self._suspension.failed("reads fail", error)
                break
        return DamageReport(num_blocks, num_bytes, tuple(bad_segments))

    def stats(self) -> TierStats:
        """As ``LowerTier.stats``, for this daemon.

        The capacity is the memory that it gave to the store, or what is stored if that has no limit.
        ``stored_bytes`` and the counts are of the segments that it knows, wherever they lie. ``used_bytes``
        is ``stored_bytes``, at most the capacity: the client does not tell what others stored in this memory.
        """
        num_segments, num_pages, stored_bytes = self._known.sizes()
        given_bytes = self._options.given_bytes
        capacity_bytes = stored_bytes if given_bytes is None else given_bytes
        used_bytes = min(stored_bytes, capacity_bytes)
        queued_segments, queued_bytes = self._writer.queue.sizes()
        return TierStats(
            name=self.name,
            capacity_bytes=capacity_bytes,
            used_bytes=used_bytes,
            free_bytes=capacity_bytes - used_bytes,
            stored_bytes=stored_bytes,
            num_segments=num_segments,
            num_pages=num_pages,
            queued_segments=queued_segments,
            queued_bytes=queued_bytes,
            is_suspended=self._suspension.is_active,
            is_opening=False,
            **self._counters.snapshot(),
        )

    def close(self) -> None:
        self._writer.close()
        self.reads.close()
        self._calls.close()
        self._removals.close()
        self._connection.close()

    def _ask(self, model: ModelIdentity, page_keys: tuple[str, ...], token_ids: TokenIds) -> None:
        try:
            self._lookup.ask(self._connection.store(), model, page_keys, token_ids)
        except ObjectStoreError as error:
            self._counters.add(failed_reads=1)
            self._suspension.failed("lookups fail", error)

    def _settle(self) -> None:
        try:
            self._epochs.settle(self._connection.store())
        except ObjectStoreError as error:
            self._suspension.failed("cannot clear", error)

    def _check_epoch(self, store: ObjectClient, segment: StoredObject) -> None:
        if self._epochs.prefix(store, segment.manifest.model.fingerprint) != segment.prefix:
            self._known.forget(segment)
            raise TierReadError("the segment was cleared")

    def _read_batch(self, store: ObjectClient, batch: _Batch) -> tuple[list[ObjectPart], float]:
        """Read blocks in one call; returns what was asked for, and the seconds that it took."""
        due = [(read, layer) for read, layer in batch if read.error is None]
        parts = [_part(read, layer) for read, layer in due if read.blocks[layer].nbytes]
        started_s = self._clock()
        is_read = iter(store.get_into(parts))
        took_s = self._clock() - started_s
        for read, layer in due:
            is_there = not read.blocks[layer].nbytes or next(is_read)
            read.attempt(partial(self._land, read, layer, is_there))
        return parts, took_s

    def _land(self, read: TailRead, layer: int, is_read: bool) -> None:
        segment: StoredObject = read.run.segment
        if not is_read:
            if self._known.forget(segment):
                self._counters.add(evicted_segments=1, evicted_bytes=segment.manifest.num_bytes)
            raise TierReadError(f"layer {layer} is not in the {self._options.place} any more")
        if not read.is_right(layer):
            self._counters.add(corrupted_segments=1)
            self._known.forget(segment)
            self._remove(segment)
            raise _WrongBytesError(f"layer {layer} came from the {self._options.place} with a wrong checksum")
        read.landed(layer)

    def _forget_like(self, manifest: SegmentManifest) -> list[StoredObject]:
        """Forget known segments that hold a page of this one and are encoded like it; returns them."""
        with self._known.index() as index:
            known = index.segments_of(manifest.model, manifest.page_keys)
        return [
            segment
            for segment in known
            if segment.manifest.shares_encoded_pages(manifest) and self._known.forget(segment)
        ]

    def _remove_like(self, manifest: SegmentManifest, known: list[StoredObject]) -> None:
        """Remove the known segments from the object store, and others of these pages that only it knows."""
        for segment in known:
            self._remove(segment)
        self._ask(manifest.model, manifest.page_keys, manifest.token_ids)
        for segment in self._forget_like(manifest):
            self._remove(segment)

    def _remove(self, segment: StoredObject) -> None:
        try:
            self._connection.store().remove([segment.metadata_key, *segment.block_keys])
        except ObjectStoreError as error:
            self._suspension.failed("cannot remove", error)


def _batches(reads: Sequence[TailRead]) -> Iterator[_Batch]:
    """What to read per call, layer by layer of all reads: ``_BATCH_BYTES``, or one block that has more.
    The first layer that has bytes comes alone, so that a forward can begin."""
    num_layers = max((len(read.blocks) for read in reads), default=0)
    due = [(read, layer) for layer in range(num_layers) for read in reads if layer < len(read.blocks)]
    first_layer = next((layer for read, layer in due if read.blocks[layer].nbytes), 0)
    batch: _Batch = []
    num_bytes = 0
    for read, layer in due:
        size = read.blocks[layer].nbytes
        if num_bytes and (num_bytes + size > _BATCH_BYTES or batch[0][1] <= first_layer < layer):
            yield batch
            batch, num_bytes = [], 0
        batch.append((read, layer))
        num_bytes += size
    yield batch


def _part(read: TailRead, layer: int) -> ObjectPart:
    segment: StoredObject = read.run.segment
    return segment.part(layer, read.blocks[layer], read.end_of(layer) - read.blocks[layer].nbytes)


class _WrongBytesError(TierReadError):
    """A block has a wrong checksum; its segment was removed."""
