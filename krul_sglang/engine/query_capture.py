"""Keeps a few query vectors of every running request: what attention statistics are computed from.

Written by device operations only, into buffers of fixed size and address, so that a decode step captured into
a CUDA graph records as an eager one does, and nothing waits for the device.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.attention.placement import sample_positions
from krul_backend.attention.rows import QueryRows
from krul_backend.errors import ConfigError
from krul_backend.memory import format_bytes

logger = logging.getLogger(__name__)

DECODE_INTERVAL = 16
"""Of so many consecutive decoded tokens one query is kept."""

_MIN_ROWS = 8


@dataclass(frozen=True)
class QueryShape:
    """Attention of one rank: ``num_query_heads`` is a multiple of ``num_kv_heads``; ``scaling`` of scores."""

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float

    @property
    def row_bytes(self) -> int:
        """Bytes of one kept row: one head of each KV group, all layers, and how far it sees."""
        return self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize + 8


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


class QueryCapture:
    """Forward pre-hooks on the attention modules of one model runner.

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
        self._group = shape.num_query_heads // shape.num_kv_heads
        self._device = device
        self._lock = threading.Lock()
        self._free = list(range(plan.num_requests))
        self._holders: dict[int, _Holder] = {}
        self._decode_steps = 0
        self._is_suspended = False
        # Where this step's rows go, and which tokens of the batch they are (None: all). None: no rows.
        self._targets: torch.Tensor | None = None
        self._tokens: torch.Tensor | None = None

    def install(self, attention_modules: list[Any]) -> None:
        """Hook the attention modules, one per layer and in layer order."""
        for layer, module in enumerate(attention_modules):
            module.register_forward_pre_hook(_make_hook(self, layer))

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Forwards inside are not recorded: they compute again what was recorded before."""
        self._is_suspended = True
        try:
            yield
        finally:
            self._is_suspended = False

    def take(self, rid: str, slot: int) -> CapturedRows | None:
        """The rows of a request that has ended; None if it was not recorded. The caller releases them."""
        with self._lock:
            holder = self._holders.get(slot)
            if holder is None or holder.rid != rid:
                return None
            del self._holders[slot]
        return CapturedRows(self, holder.place)

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
        with self._lock:
            self._free.append(place)

    def begin_step(self, forward_batch: Any) -> None:
        """Called by the first layer of each forward: decide which rows of this step are kept, and where."""
        self._targets = self._tokens = None
        mode = forward_batch.forward_mode
        if self._is_suspended:
            return
        if mode.is_decode():
            self._begin_decode(forward_batch)
        elif mode.is_extend_without_speculative() and forward_batch.rids is not None:
            self._begin_extend(forward_batch)

    def record(self, layer: int, q: torch.Tensor) -> None:
        """``q``: ``[num_tokens, num_query_heads * head_dim]``, after RoPE."""
        if self._targets is None:
            return
        kept = q if self._tokens is None else q.index_select(0, self._tokens)
        kept = kept.view(-1, self.shape.num_query_heads, self.shape.head_dim)[:, :: self._group]
        self._queries[layer].index_copy_(0, self._targets, kept.to(self.shape.dtype))

    def _begin_decode(self, forward_batch: Any) -> None:
        self._decode_steps += 1
        is_captured = _is_graph_being_captured(self._device)
        # In a graph the same operations run at every step: the rows of one interval overwrite each other.
        if not is_captured and (self._decode_steps % DECODE_INTERVAL or not self._holders):
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
            holder = self._holder_of(rid, slot, start)
            if holder is not None and length:
                stride = holder.num_chunks + 1
                entries = range(holder.num_chunks, self.plan.num_prompt_rows, stride)
                positions = sample_positions(start, start + length, len(entries)).tolist()
                targets += [holder.place * self.plan.num_rows + entry for entry in entries[: len(positions)]]
                tokens += [first_token + position - start for position in positions]
                num_visible += [position + 1 for position in positions]
                holder.num_chunks += 1
                holder.end = start + length
            first_token += length
        if targets:
            self._targets = torch.tensor(targets).to(self._device, non_blocking=True)
            self._tokens = torch.tensor(tokens).to(self._device, non_blocking=True)
            self._num_visible.index_copy_(
                0, self._targets, torch.tensor(num_visible).to(self._device, non_blocking=True)
            )

    def _holder_of(self, rid: str, slot: int, start: int) -> _Holder | None:
        """The place of a request in ``slot``; a fresh one if it starts, or starts over, there."""
        with self._lock:
            holder = self._holders.get(slot)
            if holder is not None and holder.rid == rid and holder.end == start:
                return holder
            if holder is not None:
                self._free.append(self._holders.pop(slot).place)
            if not self._free:
                self._place_of_slot[slot] = self._unused_place
                return None
            holder = _Holder(rid, self._free.pop(0), end=start)
            self._holders[slot] = holder
        self._place_of_slot[slot] = holder.place
        rows = slice(holder.place * self.plan.num_rows, (holder.place + 1) * self.plan.num_rows)
        self._num_visible[rows] = 0
        return holder


@dataclass
class _Holder:
    """A request that is recorded in ``place``; ``end``: the tokens of it that have run."""

    rid: str
    place: int
    end: int
    num_chunks: int = 0


class CapturedRows:
    """What was recorded of one request, until it is released."""

    def __init__(self, capture: QueryCapture, place: int) -> None:
        self._capture = capture
        self._place = place

    def read(self) -> QueryRows:
        return self._capture.read(self._place)

    def release(self) -> None:
        self._capture.release(self._place)


def attach_query_capture(model_runner: Any, *, num_rows: int, max_bytes: int) -> QueryCapture:
    """Build a capture for a model runner whose pools exist, and hook its model.

    Raises:
        ConfigError: see ``CapturePlan.fit``.
    """
    from sglang.srt.layers.radix_attention import RadixAttention

    modules = sorted(
        (module for module in model_runner.model.modules() if isinstance(module, RadixAttention)),
        key=lambda module: module.layer_id,
    )
    first = modules[0]
    slots = model_runner.req_to_token_pool.req_to_token.shape[0]
    shape = QueryShape(
        num_layers=len(modules),
        num_query_heads=first.tp_q_head_num,
        num_kv_heads=first.tp_k_head_num,
        head_dim=first.qk_head_dim,
        dtype=model_runner.dtype,
        scaling=first.scaling,
    )
    plan = CapturePlan.fit(shape, max_requests=slots, num_rows=num_rows, max_bytes=max_bytes)
    capture = QueryCapture(shape, plan, num_slots=slots, device=torch.device(model_runner.device))
    capture.install(modules)
    logger.info(
        "krul: attention statistics of up to %d requests at a time, %d query rows of %d heads each: %s",
        plan.num_requests,
        plan.num_rows,
        shape.num_kv_heads,
        format_bytes(plan.num_bytes),
    )
    return capture


def _make_hook(capture: QueryCapture, layer: int) -> Any:
    def hook(module: Any, args: tuple[Any, ...]) -> None:
        if layer == 0:
            capture.begin_step(args[3])
        capture.record(layer, args[0])

    return hook


def _is_graph_being_captured(device: torch.device) -> bool:
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
