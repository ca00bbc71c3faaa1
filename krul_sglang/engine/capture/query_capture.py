"""Keeps a few query vectors of every running request; attention statistics are computed from them.

Before each forward the host decides which rows are kept and where, and writes that into buffers of fixed
size and address. The modules only copy as these buffers say. So a replayed graph records as an eager forward
does, and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from krul_backend.attention.rows import Phase, QueryRows, ReadKeys, accumulate, sample_positions
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.device import Device
from krul_backend.errors import ConfigError
from krul_backend.memory import format_bytes
from krul_sglang.engine.capture.turn_capture import (
    BatchPart,
    CapturedTurn,
    QueryShape,
    Recording,
    RequestPlaces,
    parts_of,
)

DECODE_INTERVAL = 16
"""Of this many consecutive decoded tokens one query is kept."""

_MIN_ROWS = 8
_FEW_ROWS = 16
_MANY_REQUESTS = 96
"""If memory is too small to record this many requests, each gets fewer rows, down to ``_FEW_ROWS``. Fewer
rows cost a few percent more bytes; the turn of a request that is not recorded is stored natively."""


@dataclass(frozen=True)
class CapturePlan:
    """What is recorded: ``num_requests`` requests at a time, ``num_rows`` rows each, half of the prompt."""

    num_requests: int
    num_rows: int
    num_bytes: int

    @property
    def num_prompt_rows(self) -> int:
        return self.num_rows // 2

    @property
    def num_decode_rows(self) -> int:
        return self.num_rows - self.num_prompt_rows

    @property
    def num_forward_rows(self) -> int:
        """Most rows that one forward keeps: one of each decoding request, and those of a prompt."""
        return self.num_requests + self.num_prompt_rows

    @classmethod
    def fit(cls, shape: QueryShape, *, max_requests: int, num_rows: int, max_bytes: int) -> CapturePlan:
        """Plan for as many requests as fit ``max_bytes``, with fewer rows each if too few would fit.

        The rows that one forward keeps are added: they are gathered before they go to their places.

        Raises:
            ConfigError: if ``max_bytes`` is too small for one request with the fewest rows.
        """

        def num_requests() -> int:
            # See ``num_forward_rows``.
            return min(max_requests, (max_bytes // shape.row_bytes - num_rows // 2) // (num_rows + 1))

        while num_rows // 2 >= _FEW_ROWS and num_requests() < min(_MANY_REQUESTS, max_requests):
            num_rows //= 2
        while num_rows // 2 >= _MIN_ROWS and num_requests() < 1:
            num_rows //= 2
        if num_requests() < 1:
            least_bytes = (num_rows + 1 + num_rows // 2) * shape.row_bytes
            raise ConfigError(
                f"query_memory = {format_bytes(max_bytes)} is too small: {num_rows} query rows of a request "
                f"need {format_bytes(least_bytes)}"
            )
        num_bytes = (num_requests() * (num_rows + 1) + num_rows // 2) * shape.row_bytes
        return cls(num_requests(), num_rows, num_bytes)


class QueryCapture:
    """Keeps a few rows of each turn that one model runner serves, through hooks on its attention modules.

    A request gets a place of ``num_rows`` rows when its prompt starts to run, if one is free; without one
    it is not recorded. The place stays taken until ``release``, also after the request has ended, so
    that a worker thread can read it.

    Of each prompt chunk rows are kept by ``sample_positions``; chunk ``c`` (from 0) takes every ``c + 1``-th
    of the prompt's rows, so that each chunk of a long prompt ends with about an equal share. Decoded tokens
    go around the remaining rows, one of ``DECODE_INTERVAL``.

    ::

        host, before a forward   tokens [W]   which of the forward's tokens are kept
                                 targets [W]  the row that each of them goes to
        each attention module    staged[layer] = q[tokens]
        host, after it           queries[:, targets] = staged, and every token is the first one

    A captured graph of ``n`` tokens copies the first ``min(n, W)`` entries: a forward never keeps more rows
    than it has tokens, and the entries that it does not use go nowhere from ``staged``.

    In each forward ``begin_forward`` comes first, on the host. Then the modules run, in Python or as a
    replayed graph: in Python ``record`` is called in layer order; a replay repeats the device operations that
    ``record`` gave while the graph was captured. ``end_forward`` comes last, on the host. While suspended,
    modules are not recorded.
    """

    is_suspended = False

    def __init__(self, shape: QueryShape, plan: CapturePlan, *, device: torch.device) -> None:
        self.shape = shape
        self.plan = plan
        num_rows, of_row = plan.num_requests * plan.num_rows, (shape.num_query_heads, shape.head_dim)
        self._queries = torch.zeros(shape.num_layers, num_rows, *of_row, dtype=shape.dtype, device=device)
        self._staged = self._queries.new_zeros(shape.num_layers, plan.num_forward_rows, *of_row)
        # How many tokens each row sees: its position + 1. Zero where nothing is recorded.
        self._num_visible = np.zeros(num_rows, np.int64)
        self._tokens, self._targets = self._kept = torch.zeros(
            2, plan.num_forward_rows, dtype=torch.int64, device=device
        )
        self._device = Device.of(self._queries)
        self._places = RequestPlaces(plan.num_requests)
        self._decode_steps = 0
        self._num_kept = 0
        self._is_captured = False

    def install(self, attention_modules: list[Any]) -> None:
        """Hook the attention modules, one per layer and in layer order."""
        for layer, module in enumerate(attention_modules):
            module.register_forward_pre_hook(self._make_hook(layer))

    @contextmanager
    def recording(self, schedule_batch: Any) -> Iterator[None]:
        """A block inside which the forward of SGLang's ``ScheduleBatch`` runs, eagerly or as a graph.

        It is entered for every forward, also for those of which nothing is recorded.
        """
        self.begin_forward(schedule_batch)
        try:
            yield
        finally:
            self.end_forward()

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """A block inside which forwards are not recorded, because they compute recorded tokens again."""
        self.is_suspended = True
        try:
            yield
        finally:
            self.is_suspended = False

    @property
    def num_heads(self) -> int:
        """The number of heads of the statistics: this rank's query heads."""
        return self.shape.num_query_heads

    def take(self, rid: str, slot: int) -> CapturedRows | None:
        """The recording of a request that has ended in row ``slot`` of SGLang's request pool.

        None if it was not recorded. The caller releases it.
        """
        recording = self._places.take(rid, slot)
        return None if recording is None else CapturedRows(self, recording.place)

    def forget(self, rid: str, slot: int) -> None:
        """Make room if a request was recorded that has ended in this row, and that nobody took."""
        turn = self.take(rid, slot)
        if turn is not None:
            turn.release()

    def read(self, place: int, num_tokens: int | None = None) -> QueryRows:
        """Copies of a place's rows, by position: those among the first ``num_tokens`` tokens, if given. Call
        it after the forwards that wrote them. The positions are on the CPU."""
        rows = self._rows_of(place)
        positions = self._num_visible[rows] - 1
        order = np.argsort(positions)
        most = positions.max() if num_tokens is None else num_tokens - 1
        order = order[(positions[order] >= 0) & (positions[order] <= most)]
        return QueryRows(
            queries=self._queries[:, rows].index_select(1, self._device.from_host(torch.from_numpy(order))),
            positions=torch.from_numpy(positions[order]),
            kv_heads=self.shape.kv_heads(),
            scaling=self.shape.scaling,
        )

    def release(self, place: int) -> None:
        self._places.release(place)

    def begin_forward(self, schedule_batch: Any) -> None:
        """Decide what of this forward is recorded. ``schedule_batch`` is SGLang's ``ScheduleBatch``."""
        mode = schedule_batch.forward_mode
        is_prompt = mode.is_extend_without_speculative()
        keeps_decoded = False
        if mode.is_decode() or (is_prompt and schedule_batch.decoding_reqs):
            self._decode_steps += 1
            keeps_decoded = self._decode_steps % DECODE_INTERVAL == 0 and not self._places.is_empty()
        if is_prompt or keeps_decoded:
            self._keep(self._chosen(parts_of(schedule_batch), keeps_decoded))

    def record(self, layer: int, q: torch.Tensor) -> None:
        """``q``: ``[num_tokens, num_query_heads * head_dim]``, after RoPE. It belongs to the engine."""
        if layer == 0:
            self._is_captured = self._device.is_capturing()
        num_rows = min(len(self._tokens), len(q)) if self._is_captured else self._num_kept
        if num_rows:
            heads = self.shape.split_heads(q).to(self.shape.dtype)
            torch.index_select(heads, 0, self._tokens[:num_rows], out=self._staged[layer, :num_rows])

    def end_forward(self) -> None:
        """Called when the forward is queued on the device, or has failed. Recording pauses until the next."""
        if self._num_kept:
            kept = slice(self._num_kept)
            self._queries.index_copy_(1, self._targets[kept], self._staged[:, kept])
            # A graph that is replayed without new tokens may have fewer.
            self._tokens.zero_()
            self._num_kept = 0

    def _make_hook(self, layer: int) -> Any:
        def hook(module: Any, args: tuple[Any, ...]) -> None:
            if not self.is_suspended:
                self.record(layer, args[0])

        return hook

    def _chosen(self, parts: Sequence[BatchPart], keeps_decoded: bool) -> list[tuple[int, int, int]]:
        """``(token of the forward, row to write, tokens it sees)`` of each row that is kept."""
        decoded, prompts = [], []
        for part in parts:
            if part.phase is Phase.DECODE:
                recording = self._places.find(part.rid, part.slot) if keeps_decoded else None
                if recording is not None:
                    turn = part.end // DECODE_INTERVAL % self.plan.num_decode_rows
                    row = self.plan.num_prompt_rows + turn
                    decoded.append((part.first_row, recording.place * self.plan.num_rows + row, part.end))
            else:
                recording = self._entered(part)
                if recording is not None:
                    prompts.append((part, recording))
        # At least one each: no more requests are recorded than a forward has rows.
        share = (self.plan.num_forward_rows - len(decoded)) // max(1, len(prompts))
        return decoded + [row for prompt in prompts for row in self._of_prompt(*prompt, share)]

    def _of_prompt(self, part: BatchPart, recording: Recording, max_rows: int) -> list[tuple[int, int, int]]:
        entries = range(recording.num_chunks, self.plan.num_prompt_rows, recording.num_chunks + 1)
        entries = entries[:: -(-len(entries) // max_rows)] if entries else entries
        recording.num_chunks += 1
        recording.end = part.end
        if not entries:
            return []
        positions = sample_positions(part.start, part.end, len(entries)).tolist()
        first = recording.place * self.plan.num_rows
        return [
            (part.first_row + position - part.start, first + entry, position + 1)
            for position, entry in zip(positions, entries, strict=False)
        ]

    def _entered(self, part: BatchPart) -> Recording | None:
        recording, is_new = self._places.enter(part.rid, part.slot, part.start)
        if is_new and recording is not None:
            self._num_visible[self._rows_of(recording.place)] = 0
        return recording

    def _keep(self, chosen: Sequence[tuple[int, int, int]]) -> None:
        if chosen:
            tokens, targets, num_visible = zip(*chosen, strict=True)
            self._num_kept = len(chosen)
            # All of it: what comes in one piece is one copy.
            host = self._device.host_empty(self._kept.shape, torch.int64).zero_()
            host[:, : self._num_kept] = torch.tensor([tokens, targets])
            self._device.upload(host, self._kept)
            self._num_visible[list(targets)] = num_visible

    def _rows_of(self, place: int) -> slice:
        return slice(place * self.plan.num_rows, (place + 1) * self.plan.num_rows)


def unrecorded(capture: QueryCapture | None) -> AbstractContextManager[None]:
    """A block inside which nothing is recorded, whether attention is captured at all or not."""
    return nullcontext() if capture is None else capture.suspended()


class CapturedRows(CapturedTurn):
    """The rows in one place of a ``QueryCapture``."""

    def __init__(self, capture: QueryCapture, place: int) -> None:
        super().__init__()
        self._capture = capture
        self._place = place

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        rows = self.rows(num_tokens)
        return None if rows is None else accumulate(rows, read_keys)

    def rows(self, num_tokens: int) -> QueryRows | None:
        rows = self._capture.read(self._place, num_tokens)
        return rows if rows.num_rows else None

    def _give_place_back(self) -> None:
        self._capture.release(self._place)
