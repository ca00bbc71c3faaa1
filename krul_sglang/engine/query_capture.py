"""Keeps a few query vectors of every running request: what attention statistics are computed from.

Written by device operations only, into buffers of fixed size and address, so that a decode step captured into
a CUDA graph records as an eager one does, and nothing waits for the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.attention.placement import sample_positions
from krul_backend.attention.rows import QueryRows, ReadKeys, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.errors import ConfigError
from krul_backend.memory import format_bytes
from krul_sglang.engine.attention_observer import AttentionObserver, QueryShape
from krul_sglang.engine.request_places import Recording, RequestPlaces
from krul_sglang.engine.turn_capture import CapturedTurn

DECODE_INTERVAL = 16
"""Of so many consecutive decoded tokens one query is kept."""

_MIN_ROWS = 8


@dataclass(frozen=True)
class CapturePlan:
    """``num_requests`` requests at a time, ``num_rows`` rows each, half of them for the prompt."""

    num_requests: int
    num_rows: int
    num_bytes: int

    @property
    def num_prompt_rows(self) -> int:
        return self.num_rows // 2

    @property
    def num_decode_rows(self) -> int:
        return self.num_rows - self.num_prompt_rows

    @classmethod
    def fit(cls, shape: QueryShape, *, max_requests: int, num_rows: int, max_bytes: int) -> CapturePlan:
        """As many requests as ``max_bytes`` allow; fewer rows if not even one fits.

        One further request's rows are taken for what is not recorded: writes need a place to go.

        Raises:
            ConfigError: if ``max_bytes`` is too small for one request with the fewest rows.
        """
        while 2 * num_rows * shape.row_bytes > max_bytes and num_rows // 2 >= _MIN_ROWS:
            num_rows //= 2
        request_bytes = num_rows * shape.row_bytes
        num_requests = min(max_requests, max_bytes // request_bytes - 1)
        if num_requests < 1:
            raise ConfigError(
                f"query_memory = {format_bytes(max_bytes)} is too small: {num_rows} query rows of a request "
                f"need {format_bytes(2 * request_bytes)}"
            )
        return cls(num_requests, num_rows, (num_requests + 1) * request_bytes)


class QueryCapture(AttentionObserver):
    """A few rows of each turn, reduced when it ends: the estimator "sampled".

    A request gets a place of ``num_rows`` rows when its prompt starts to run, if one is free; without one
    it simply is not recorded. The place stays taken until ``release``, also after the request has ended, so
    that a worker thread can read it.

    Of each prompt chunk rows are kept by ``sample_positions``; chunk ``c`` (from 0) takes every ``c + 1``-th
    of the prompt's rows, so that each chunk of a long prompt ends with about an equal share. Decoded tokens
    go around the remaining rows, one of ``DECODE_INTERVAL``.

    Prompts that run inside a prefill graph are not recorded (their decoded tokens are).
    """

    def __init__(self, shape: QueryShape, plan: CapturePlan, *, num_slots: int, device: torch.device) -> None:
        self.shape = shape
        self.plan = plan
        self._unused_place = plan.num_requests
        num_places = plan.num_requests + 1
        rows = (shape.num_layers, num_places * plan.num_rows, shape.num_kv_heads, shape.head_dim)
        self._queries = torch.zeros(rows, dtype=shape.dtype, device=device)
        # How many tokens each row sees: its position + 1. Zero where nothing is recorded.
        self._num_visible = torch.zeros(num_places * plan.num_rows, dtype=torch.int64, device=device)
        self._place_of_slot = torch.full((num_slots,), self._unused_place, dtype=torch.int64, device=device)
        self._device = device
        self._places = RequestPlaces(plan.num_requests)
        self._decode_steps = 0
        # Where this step's rows go, and which tokens of the batch they are (None: all). None: no rows.
        self._targets: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None

    def take(self, rid: str, slot: int) -> CapturedRows | None:
        recording = self._places.take(rid, slot)
        return None if recording is None else CapturedRows(self, recording.place)

    def stats(self) -> dict[str, Any]:
        return {"name": "sampled"}

    def close(self) -> None:
        """Nothing runs beside the engine."""

    def read(self, place: int) -> QueryRows:
        """Copies of a place's rows, by position. Call it after the forwards that wrote them."""
        rows = slice(place * self.plan.num_rows, (place + 1) * self.plan.num_rows)
        num_visible, order = self._num_visible[rows].sort()
        order = order[num_visible > 0]
        return QueryRows(
            queries=self._queries[:, rows][:, order],
            positions=num_visible[num_visible > 0] - 1,
            kv_heads=torch.arange(self.shape.num_kv_heads, device=self._device),
            scaling=self.shape.scaling,
        )

    def release(self, place: int) -> None:
        self._places.release(place)

    def begin_step(self, forward_batch: Any) -> None:
        self._targets = self._tokens = None
        mode = forward_batch.forward_mode
        if self.is_suspended:
            return
        if mode.is_decode():
            self._begin_decode(forward_batch)
        elif mode.is_extend_without_speculative() and forward_batch.rids is not None:
            self._begin_extend(forward_batch)

    def record(self, layer: int, q: torch.Tensor) -> None:
        if self._targets is None:
            return
        kept = self.shape.one_head_per_group(q if self._tokens is None else q.index_select(0, self._tokens))
        self._queries[layer].index_copy_(0, self._targets, kept.to(self.shape.dtype))

    def _begin_decode(self, forward_batch: Any) -> None:
        self._decode_steps += 1
        is_captured = _is_graph_being_captured(self._device)
        # In a graph the same operations run at every step: the rows of one interval overwrite each other.
        if not is_captured and (self._decode_steps % DECODE_INTERVAL or self._places.is_empty()):
            return
        num_visible = forward_batch.seq_lens.to(torch.int64)
        # Rows that only fill a captured batch up see one token and name a slot that is not theirs.
        is_real = num_visible > 1
        place = self._place_of_slot[forward_batch.req_pool_indices.to(torch.int64)]
        place = torch.where(is_real, place, self._unused_place)
        turn = num_visible.div(DECODE_INTERVAL, rounding_mode="floor") % self.plan.num_decode_rows
        self._targets = place * self.plan.num_rows + self.plan.num_prompt_rows + turn
        self._num_visible.index_copy_(0, self._targets, num_visible)

    def _begin_extend(self, forward_batch: Any) -> None:
        targets: list[int] = []
        tokens: list[int] = []
        num_visible: list[int] = []
        first_token = 0
        for rid, slot, start, length in zip(
            forward_batch.rids,
            forward_batch.req_pool_indices_cpu.tolist(),
            forward_batch.extend_prefix_lens_cpu,
            forward_batch.extend_seq_lens_cpu,
            strict=True,
        ):
            recording = self._recording_of(rid, slot, start)
            if recording is not None and length:
                stride = recording.num_chunks + 1
                entries = range(recording.num_chunks, self.plan.num_prompt_rows, stride)
                positions = sample_positions(start, start + length, len(entries)).tolist()
                targets += [
                    recording.place * self.plan.num_rows + entry for entry in entries[: len(positions)]
                ]
                tokens += [first_token + position - start for position in positions]
                num_visible += [position + 1 for position in positions]
                recording.num_chunks += 1
                recording.end = start + length
            first_token += length
        if targets:
            self._targets = torch.tensor(targets).to(self._device, non_blocking=True)
            self._tokens = torch.tensor(tokens).to(self._device, non_blocking=True)
            self._num_visible.index_copy_(
                0, self._targets, torch.tensor(num_visible).to(self._device, non_blocking=True)
            )

    def _recording_of(self, rid: str, slot: int, start: int) -> Recording | None:
        recording, is_new = self._places.enter(rid, slot, start)
        if is_new:
            place = self._unused_place if recording is None else recording.place
            self._place_of_slot[slot] = place
            self._num_visible[place * self.plan.num_rows : (place + 1) * self.plan.num_rows] = 0
        return recording


class CapturedRows(CapturedTurn):
    """The rows in one place of a ``QueryCapture``."""

    def __init__(self, capture: QueryCapture, place: int) -> None:
        self._capture = capture
        self._place = place

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        rows = self.rows(num_tokens)
        return None if rows is None else accumulate(rows, read_keys)

    def rows(self, num_tokens: int) -> QueryRows | None:
        rows = self._capture.read(self._place)
        inside = rows.positions < num_tokens
        rows = QueryRows(rows.queries[:, inside], rows.positions[inside], rows.kv_heads, rows.scaling)
        return rows if rows.num_rows else None

    def release(self) -> None:
        self._capture.release(self._place)


def _is_graph_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
