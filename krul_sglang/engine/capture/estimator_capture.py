"""Computes attention statistics from the queries of every token, as the Krul paper does."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import torch

from krul_backend.attention.rows import Phase, QueryRows, ReadKeys
from krul_backend.attention.similarity_worker import HeterogeneousEstimator, SimilarityWorker
from krul_backend.attention.statistics import AttentionStatistics
from krul_sglang.engine.capture.turn_capture import (
    BatchPart,
    CapturedTurn,
    QueryShape,
    Recording,
    RequestPlaces,
    TurnCapture,
    parts_of,
)

logger = logging.getLogger(__name__)

ReadSequenceKeys = Callable[[int, torch.Tensor], torch.Tensor]
"""Reads one layer's keys ``[T, Hkv, D]`` at pool slots (int64 ``[T]``)."""


class EstimatorCapture(TurnCapture):
    """Hands the queries of all new tokens of a forward to their requests' estimators after its last layer.

    The estimators reduce rows while the turn runs, on the scheduler's thread, and wait for the device: this
    must not run inside a CUDA graph. During a forward the queries of all its tokens are held in all layers.

    Rows of a turn's last, incomplete page count as well, and count again when the next turn computes these
    tokens anew.

    Args:
        shape: of the model's attention.
        worker: reduces the prompts of all requests; it is this object's from now on, and closed with it.
        read_keys: reads the pool.
        req_to_token: SGLang's table, integers ``[num_slots, max_context]``: the pool slots of each request.
        max_requests: recorded at a time; those whose turn waits to be stored count as well.
    """

    def __init__(
        self,
        shape: QueryShape,
        worker: SimilarityWorker,
        read_keys: ReadSequenceKeys,
        req_to_token: torch.Tensor,
        *,
        max_requests: int,
    ) -> None:
        self._shape = shape
        self._worker = worker
        self._read_keys = read_keys
        self._req_to_token = req_to_token
        self._places = RequestPlaces(max_requests)
        self._estimators: dict[int, HeterogeneousEstimator] = {}
        self._parts: list[tuple[int, BatchPart]] = []
        self._queries = torch.empty(0)

    @property
    def num_heads(self) -> int:
        return self._shape.num_query_heads

    def take(self, rid: str, slot: int) -> CapturedTurn | None:
        recording = self._places.take(rid, slot)
        if recording is None:
            return None
        estimator = self._estimators.pop(recording.place)
        return _EstimatedTurn(estimator, partial(self._places.release, recording.place))

    def stats(self) -> dict[str, Any]:
        return {"name": "heterogeneous", **asdict(self._worker.stats())}

    def close(self) -> None:
        self._worker.close()

    def begin_forward(self, schedule_batch: Any) -> None:
        mode = schedule_batch.forward_mode
        is_decode = mode.is_decode() and not self._places.is_empty()
        if is_decode or mode.is_extend_without_speculative():
            self._parts = [
                (recording.place, part)
                for part in parts_of(schedule_batch)
                if (recording := self._advanced(part)) is not None
            ]

    def record(self, layer: int, q: torch.Tensor) -> None:
        if not self._parts:
            return
        queries = self._shape.split_heads(q)
        if layer == 0:
            self._queries = queries.new_empty(self._shape.num_layers, *queries.shape)
        self._queries[layer] = queries

    def end_layers(self) -> None:
        # Taken away first: whatever happens, no step finds what an earlier one has left.
        parts, self._parts = self._parts, []
        queries, self._queries = self._queries, torch.empty(0)
        for place, part in parts:
            try:
                self._add(place, part, queries)
            except Exception:
                logger.exception("krul: attention of request %s could not be reduced", part.rid)
                self.forget(part.rid, part.slot)

    def end_forward(self) -> None:
        self._parts, self._queries = [], torch.empty(0)

    def _add(self, place: int, part: BatchPart, queries: torch.Tensor) -> None:
        slots = self._req_to_token[part.slot, : part.end].to(torch.int64)
        rows = QueryRows(
            queries=queries[:, part.first_row : part.first_row + part.end - part.start],
            positions=torch.arange(part.start, part.end),
            kv_heads=self._shape.kv_heads(),
            scaling=self._shape.scaling,
        )
        self._estimators[place].add(rows, part.phase, lambda layer: self._read_keys(layer, slots))

    def _advanced(self, part: BatchPart) -> Recording | None:
        """The recording that these tokens belong to, None if there is none that they continue."""
        if part.phase is Phase.DECODE:
            recording = self._places.find(part.rid, part.slot)
            if recording is None or recording.end != part.start:
                return None
        else:
            recording, is_new = self._places.enter(part.rid, part.slot, part.start)
            if recording is None:
                return None
            if is_new:
                self._estimators[recording.place] = HeterogeneousEstimator(
                    self._shape.num_layers, self._shape.num_query_heads, self._worker
                )
        recording.end = part.end
        return recording


class _EstimatedTurn(CapturedTurn):
    def __init__(self, estimator: HeterogeneousEstimator, release: Callable[[], None]) -> None:
        super().__init__()
        self._estimator = estimator
        self._release = release

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        statistics = self._estimator.finish(read_keys)
        return statistics if statistics.num_rows else None

    def _give_place_back(self) -> None:
        self._release()
