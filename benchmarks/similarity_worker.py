"""Reduces the attention of whole prompts in a process of its own, while the device decodes."""

from __future__ import annotations

import logging
import math
import queue
import threading
from concurrent.futures import Future
from dataclasses import dataclass, replace
from typing import Any

import torch

from benchmarks.worker_process import WorkerGoneError, WorkerProcess
from krul_backend.attention.rows import Phase, QueryRows, ReadKeys, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.device import Device, Event

logger = logging.getLogger(__name__)

DEFAULT_CAPACITY_BYTES = 256 << 20


@dataclass
class WorkerStats:
    """Counters since the start.

    ``reduced_here``: jobs that the process could not do and the client's thread did. ``rejected``: jobs that
    found no room in the queue.
    """

    submitted: int = 0
    reduced_here: int = 0
    rejected: int = 0
    restarts: int = 0


@dataclass(frozen=True, eq=False)
class _Job:
    """A queued reduction: ``rows`` and ``keys [L, T, Hkv, D]`` in host memory, of ``num_bytes``.

    ``copied`` passes when the copies to there have ended; until then ``sources`` are kept.
    """

    rows: QueryRows
    keys: torch.Tensor
    num_bytes: int
    copied: Event
    sources: list[object]
    future: Future[AttentionStatistics]


class SimilarityWorker:
    """Reduces query rows in a process of its own, without holding this process's interpreter.

    One object serves many estimators; jobs are done in order. Queries and keys wait in host memory of at most
    ``capacity_bytes``. The process starts with the first job. If it dies it is started once more; after that
    jobs are reduced by this object's thread: a job that was accepted always ends with statistics.

    Args:
        capacity_bytes: of the queue.
        timeout_s: a job that takes longer counts as a death of the process.
    """

    def __init__(self, capacity_bytes: int = DEFAULT_CAPACITY_BYTES, timeout_s: float = 120.0) -> None:
        self._capacity_bytes = capacity_bytes
        self._queued_bytes = 0
        self._device: Device | None = None
        self._stream: Any | None = None
        self._timeout_s = timeout_s
        self._process: WorkerProcess | None = None
        self._has_given_up = False
        self._jobs: queue.SimpleQueue[_Job | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._stats = WorkerStats()
        self._is_closed = False
        self._thread = threading.Thread(target=self._run, name="krul-similarity", daemon=True)
        self._thread.start()

    def stats(self) -> WorkerStats:
        with self._lock:
            return replace(self._stats)

    @property
    def process_id(self) -> int | None:
        """Id of the running process; None before the first job and after its last death."""
        return self._process.process_id if self._process is not None else None

    def submit(self, rows: QueryRows, read_keys: ReadKeys) -> Future[AttentionStatistics] | None:
        """Queue a reduction; None if the queue has no room for it.

        Queries and keys are copied. From a GPU the copies run on a side stream after the work queued so far,
        and this returns without waiting for them: the keys of these tokens must not be overwritten before the
        future is done. ``read_keys`` is called on that stream, so that the keys of one layer at a time are on
        the device beside the pool. From the CPU the copies are complete when this returns.

        Raises:
            RuntimeError: if the worker was closed.
        """
        shape, dtype = _keys_shape(rows, read_keys(0))
        num_bytes = rows.queries.nbytes + math.prod(shape) * dtype.itemsize
        with self._lock:
            if self._is_closed:
                raise RuntimeError("the similarity worker was closed")
            if self._queued_bytes + num_bytes > self._capacity_bytes:
                self._stats.rejected += 1
                return None
            self._queued_bytes += num_bytes
            self._stats.submitted += 1
        try:
            device, stream = self._open_device(rows.queries)
            # The caller may overwrite its rows as soon as this returns.
            source = rows.queries if device.shares_cores else rows.queries.clone()
            positions, kv_heads = (x.to("cpu", copy=True) for x in (rows.positions, rows.kv_heads))
            queries, keys = device.host_empty(source.shape, source.dtype), device.host_empty(shape, dtype)
            device.wait_for(device.record(), stream)
            with device.on_stream(stream):
                device.download(queries, source)
                for layer in range(rows.num_layers):
                    device.download(keys[layer], read_keys(layer)[: keys.shape[1]])
                copied = device.record()
        except BaseException:
            if self._device is not None:
                # Copies that were queued before the error still read what this has made.
                self._device.synchronize(self._stream)
            self._give_back(num_bytes)
            raise
        on_host = QueryRows(queries, positions, kv_heads, rows.scaling)
        job = _Job(on_host, keys, num_bytes, copied, [source, read_keys], Future())
        self._jobs.put(job)
        return job.future

    def close(self) -> None:
        """End the process when the queued jobs are done. Idempotent; not while another thread submits."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        self._jobs.put(None)
        self._thread.join()

    def _open_device(self, queries: torch.Tensor) -> tuple[Device, Any]:
        """The device of the first queries, with a stream for copies. They are all on one."""
        if self._device is None:
            self._device = Device.of(queries)
            self._stream = self._device.new_stream()
        return self._device, self._stream

    def _give_back(self, num_bytes: int) -> None:
        with self._lock:
            self._queued_bytes -= num_bytes

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                result = self._work_off(job)
            except Exception as failure:
                job.future.set_exception(failure)
            else:
                job.future.set_result(result)
        if self._process is not None:
            self._process.close()

    def _work_off(self, job: _Job) -> AttentionStatistics:
        try:
            job.copied.synchronize()
            job.sources.clear()
            return self._reduce(job)
        finally:
            # Before the result is announced: whoever hears of it may submit a job that needs this room.
            self._give_back(job.num_bytes)

    def _reduce(self, job: _Job) -> AttentionStatistics:
        while not self._has_given_up:
            try:
                if self._process is None:
                    self._process = WorkerProcess()
                result = self._process.reduce(job.rows, job.keys, self._timeout_s)
            except WorkerGoneError as gone:
                self._on_death(gone)
                continue
            if isinstance(result, AttentionStatistics):
                return result
            logger.warning("the similarity worker could not reduce a job: %s", result)
            break
        with self._lock:
            self._stats.reduced_here += 1
        return accumulate(job.rows, lambda layer: job.keys[layer])

    def _on_death(self, gone: WorkerGoneError) -> None:
        if self._process is not None:
            self._process.kill()
            self._process = None
        with self._lock:
            self._has_given_up = self._stats.restarts > 0
            if not self._has_given_up:
                self._stats.restarts += 1
        outcome = (
            "its work is done in this process from now on" if self._has_given_up else "starting it again"
        )
        logger.warning("the similarity worker ended (%s): %s", gone, outcome)

    def __enter__(self) -> SimilarityWorker:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()


def _keys_shape(rows: QueryRows, layer_keys: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """``[L, T, Hkv, D]``: the keys of the tokens that the rows see."""
    num_visible = int(rows.positions.max()) + 1 if rows.num_rows else 0
    return (rows.num_layers, num_visible, *layer_keys.shape[1:]), layer_keys.dtype


class HeterogeneousEstimator:
    """Computes the statistics of one turn from all its rows, as Krul's token-wise partition (section 5).

    One object per turn: ``add`` as the turn runs, ``finish`` once when it ends. Rows of the prompt leave the
    device asynchronously and are reduced by the worker process on the CPU while the device decodes. The paper
    moves attention weights, ``[H, R, T]`` per layer; here queries and keys move, and the worker computes the
    weights again: that grows with the tokens, not with their square. A decoded row is reduced on its device
    at once and dropped. A prompt chunk that finds no room in the worker's queue is reduced on its device,
    too; the worker counts it.

    ``worker`` is shared with other estimators and stays the caller's.
    """

    def __init__(self, num_layers: int, num_heads: int, worker: SimilarityWorker) -> None:
        self._total = AttentionStatistics.zero(num_layers, num_heads)
        self._worker = worker
        self._outstanding: list[Future[AttentionStatistics]] = []

    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        """Take rows whose keys, up to each row's own, are already readable.

        ``read_keys`` reads the sequence's keys on the device of the queries. The tensors of ``rows`` belong
        to the caller again when this returns.
        """
        if rows.num_rows == 0:
            return
        future = self._worker.submit(rows, read_keys) if phase is Phase.PREFILL else None
        if future is not None:
            self._outstanding.append(future)
        else:
            self._total += accumulate(rows, read_keys)

    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        """The statistics of all rows of this turn. Waits for the worker. Call once, after every ``add``."""
        return sum((future.result() for future in self._outstanding), start=self._total)
