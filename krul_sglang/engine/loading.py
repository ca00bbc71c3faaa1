"""Restoring leased pages into device slots, layer by layer, off the scheduler thread."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.store.interface import KVStore, Lease
from krul_sglang.engine.copy_stream import CopyStream
from krul_sglang.engine.kv_pool import DevicePool
from krul_sglang.engine.segment_reader import SegmentReader, open_readers

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Load:
    """The first ``len(slots)`` tokens of a lease go to ``slots`` (int64, on the pool's device)."""

    lease: Lease
    slots: torch.Tensor


@dataclass
class LoadCounters:
    requests: int = 0
    tokens: int = 0
    num_bytes: int = 0
    failed_batches: int = 0


class LayerWiseLoader:
    """Fills the slots of queued loads; the forward waits for each layer through ``counter``.

    A load owns its lease: it is released when the load has ended, well or not, or is cancelled.
    """

    def __init__(self, store: KVStore, pool: DevicePool, codec: SegmentCodec) -> None:
        from sglang.srt.mem_cache.unified_cache.unified_cache_linker import LayerWiseLoadCounter

        self.counters = LoadCounters()
        self.counter = LayerWiseLoadCounter(pool.num_layers)
        self._store = store
        self._pool = pool
        self._codec = codec
        self._queued: dict[str, Load] = {}
        self._running: dict[int, Any] = {}
        self._stream = CopyStream(pool.device)
        self._worker = ThreadPoolExecutor(
            max_workers=1, thread_name_prefix="krul-load", initializer=self._stream.bind_thread
        )

    def queue(self, rid: str, load: Load) -> None:
        self._queued[rid] = load

    def cancel(self, rid: str) -> bool:
        """Take back a load that has not started; False if there is none."""
        load = self._queued.pop(rid, None)
        if load is None:
            return False
        self._store.release(load.lease)
        return True

    def start(self, ready: Sequence[Any] = ()) -> int:
        """Start everything queued as one batch. Returns its counter index, -1 if nothing was queued.

        ``ready``: events after which the slot indices are computed and their earlier owners' KV is not used.
        """
        if not self._queued:
            return -1
        loads = tuple(self._queued.values())
        self._queued.clear()
        index: int = self.counter.update_producer()
        self._running[index] = self._worker.submit(self._run, index, loads, ready)
        return index

    def finish(self, index: int) -> bool:
        """Wait until batch ``index`` has stopped writing; True when every layer landed."""
        landed: bool = self.counter.finish(index)
        running = self._running.pop(index, None)
        if running is not None:
            running.result()
        return landed

    def num_queued(self) -> int:
        return len(self._queued)

    def num_pending(self) -> int:
        return len(self._queued) + len(self._running)

    def discard_all(self) -> None:
        """Cancel what is queued and wait for what runs."""
        for rid in list(self._queued):
            self.cancel(rid)
        for index in list(self._running):
            self.finish(index)
        self.counter.reset()

    def close(self) -> None:
        self.discard_all()
        self._worker.shutdown(wait=True)

    def _run(self, index: int, loads: Sequence[Load], ready: Sequence[Any]) -> None:
        try:
            with self._stream.active(ready):
                readers = [open_readers(load.lease, self._codec, len(load.slots)) for load in loads]
                for layer in range(self._pool.num_layers):
                    for load, of_load in zip(loads, readers, strict=True):
                        first = 0
                        for reader in of_load:
                            slots = load.slots[first : first + reader.num_tokens]
                            reader.restore(layer, self._pool, slots)
                            first += reader.num_tokens
                    self._stream.synchronize()
                    self.counter.complete(index, layer)
            self._count(loads, readers)
        except BaseException as error:
            self.counters.failed_batches += 1
            logger.exception("krul: loading %d request(s) failed", len(loads))
            self.counter.fail(index, error)
        finally:
            for load in loads:
                self._store.release(load.lease)

    def _count(self, loads: Sequence[Load], readers: Sequence[Sequence[SegmentReader]]) -> None:
        self.counters.requests += len(loads)
        self.counters.tokens += sum(len(load.slots) for load in loads)
        self.counters.num_bytes += sum(reader.num_bytes for of_load in readers for reader in of_load)
