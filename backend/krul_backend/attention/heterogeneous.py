"""The paper's division of the work: prompts on the CPU, decoded tokens on the GPU."""

from __future__ import annotations

from concurrent.futures import Future

from krul_backend.attention.interface import AttentionEstimator, Phase
from krul_backend.attention.rows import QueryRows, ReadKeys, accumulate
from krul_backend.attention.similarity_worker import SimilarityWorker
from krul_backend.attention.statistics import AttentionStatistics


class HeterogeneousEstimator(AttentionEstimator):
    """Krul's token-wise partition (section 5): all rows count, as with ``ExactEstimator``.

    Rows of the prompt leave the device asynchronously and are reduced by a worker process on the CPU while
    the device decodes. The paper moves attention weights, ``[H, R, T]`` per layer; here queries and keys
    move, and the worker computes the weights again: that grows with the tokens, not with their square. Each
    decoded row is reduced on its device at once and dropped. A prompt chunk that finds no room in the
    worker's queue is reduced on its device, too; the worker counts it.

    The worker is shared with other estimators and belongs to the caller.
    """

    def __init__(self, num_layers: int, num_heads: int, worker: SimilarityWorker) -> None:
        self._total = AttentionStatistics.zero(num_layers, num_heads)
        self._worker = worker
        self._outstanding: list[Future[AttentionStatistics]] = []

    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        if rows.num_rows == 0:
            return
        future = self._worker.submit(rows, read_keys) if phase is Phase.PREFILL else None
        if future is not None:
            self._outstanding.append(future)
        else:
            self._total += accumulate(rows, read_keys)

    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        """Waits for the worker."""
        return sum((future.result() for future in self._outstanding), start=self._total)
