"""Attention statistics from the queries of every token, as the Krul paper has them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from krul_backend.attention.interface import AttentionEstimator, Phase
from krul_backend.attention.rows import QueryRows, ReadKeys
from krul_backend.attention.statistics import AttentionStatistics
from krul_sglang.engine.attention_observer import AttentionObserver, QueryShape
from krul_sglang.engine.estimator_source import EstimatorSource
from krul_sglang.engine.request_places import RequestPlaces
from krul_sglang.engine.turn_capture import CapturedTurn

logger = logging.getLogger(__name__)

ReadSequenceKeys = Callable[[int, torch.Tensor], torch.Tensor]
"""Reads one layer's keys ``[T, Hkv, D]`` at pool slots (int64 ``[T]``)."""


class EstimatorCapture(AttentionObserver):
    """Hands the queries of all new tokens of a forward to their requests' estimators after its last layer.

    For estimators that reduce rows while the turn runs, on the scheduler's thread; they wait for the device,
    so this must not run inside a CUDA graph. During a forward the queries of all its tokens, one head of
    each KV group, are held in all layers: as much memory as their keys.

    Rows of a turn's last, incomplete page count as well, and count again when the next turn computes these
    tokens anew.

    Args:
        shape: of the model's attention.
        source: makes an estimator for each request; closed with this object.
        read_keys: reads the pool.
        req_to_token: SGLang's table, integers ``[num_slots, max_context]``: the pool slots of each request.
        max_requests: recorded at a time; those whose turn waits to be stored count as well.
    """

    def __init__(
        self,
        shape: QueryShape,
        source: EstimatorSource,
        read_keys: ReadSequenceKeys,
        req_to_token: torch.Tensor,
        *,
        max_requests: int,
    ) -> None:
        self._shape = shape
        self._source = source
        self._read_keys = read_keys
        self._req_to_token = req_to_token
        self._places = RequestPlaces(max_requests)
        self._estimators: dict[int, AttentionEstimator] = {}
        self._parts: list[_Part] = []
        self._queries = torch.empty(0)

    def take(self, rid: str, slot: int) -> CapturedTurn | None:
        recording = self._places.take(rid, slot)
        if recording is None:
            return None
        estimator = self._estimators.pop(recording.place)
        return _EstimatedTurn(estimator, partial(self._places.release, recording.place))

    def stats(self) -> dict[str, Any]:
        return self._source.stats()

    def close(self) -> None:
        self._source.close()

    def begin_step(self, forward_batch: Any) -> None:
        self._parts = []
        mode = forward_batch.forward_mode
        if self.is_suspended or forward_batch.rids is None:
            return
        if mode.is_decode():
            self._parts = list(self._decoded(forward_batch))
        elif mode.is_extend_without_speculative():
            self._parts = list(self._extended(forward_batch))

    def record(self, layer: int, q: torch.Tensor) -> None:
        if not self._parts:
            return
        queries = self._shape.one_head_per_group(q)
        if layer == 0:
            self._queries = queries.new_empty(self._shape.num_layers, *queries.shape)
        self._queries[layer] = queries

    def end_step(self) -> None:
        # Taken away first: whatever happens, no step finds what an earlier one has left.
        parts, self._parts = self._parts, []
        queries, self._queries = self._queries, torch.empty(0)
        for part in parts:
            try:
                self._add(part, queries)
            except Exception:
                logger.exception("krul: attention of request %s could not be reduced", part.rid)
                turn = self.take(part.rid, part.slot)
                if turn is not None:
                    turn.release()

    def _add(self, part: _Part, queries: torch.Tensor) -> None:
        slots = self._req_to_token[part.slot, : part.end].to(torch.int64)
        rows = QueryRows(
            queries=queries[:, part.first_row : part.first_row + part.end - part.start],
            positions=torch.arange(part.start, part.end),
            kv_heads=torch.arange(self._shape.num_kv_heads),
            scaling=self._shape.scaling,
        )
        self._estimators[part.place].add(rows, part.phase, lambda layer: self._read_keys(layer, slots))

    def _decoded(self, forward_batch: Any) -> Iterator[_Part]:
        if self._places.is_empty():
            return
        # A decode batch has its slots on the device only: this waits for it.
        slots = forward_batch.req_pool_indices.tolist()
        ends = forward_batch.seq_lens_cpu.tolist()
        # Lengths and slots may be padded at the end, request ids are not.
        for row, (rid, slot, end) in enumerate(zip(forward_batch.rids, slots, ends, strict=False)):
            recording = self._places.find(rid, slot)
            if recording is not None and recording.end == end - 1:
                recording.end = end
                yield _Part(rid, slot, recording.place, end - 1, end, row, Phase.DECODE)

    def _extended(self, forward_batch: Any) -> Iterator[_Part]:
        first_row = 0
        for rid, slot, start, length in zip(
            forward_batch.rids,
            forward_batch.req_pool_indices_cpu.tolist(),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        ):
            recording, is_new = self._places.enter(rid, slot, start)
            if recording is not None:
                if is_new:
                    self._estimators[recording.place] = self._source.make()
                recording.end = start + length
                yield _Part(rid, slot, recording.place, start, start + length, first_row, Phase.PREFILL)
            first_row += length


@dataclass(frozen=True)
class _Part:
    """Tokens ``[start, end)`` of one request in this forward; their queries begin at ``first_row``."""

    rid: str
    slot: int
    place: int
    start: int
    end: int
    first_row: int
    phase: Phase


class _EstimatedTurn(CapturedTurn):
    def __init__(self, estimator: AttentionEstimator, release: Callable[[], None]) -> None:
        self._estimator = estimator
        self._release = release

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        statistics = self._estimator.finish(read_keys)
        return statistics if statistics.num_rows else None

    def rows(self, num_tokens: int) -> QueryRows | None:
        return None

    def release(self) -> None:
        self._release()
