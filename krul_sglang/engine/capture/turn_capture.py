"""Tells which rows of a forward belong to which request, and what is recorded of a request until released."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch

from krul_backend.attention.rows import Phase, QueryRows, ReadKeys
from krul_backend.attention.statistics import AttentionStatistics


@dataclass(frozen=True)
class QueryShape:
    """The shape of one rank's attention.

    ``num_query_heads`` is a multiple of ``num_kv_heads``; ``scaling`` multiplies the scores.
    """

    num_layers: int
    num_query_heads: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype
    scaling: float

    @property
    def row_bytes(self) -> int:
        """Bytes of one kept row: all query heads in all layers, and its position."""
        return self.num_layers * self.num_query_heads * self.head_dim * self.dtype.itemsize + 8

    def split_heads(self, q: torch.Tensor) -> torch.Tensor:
        """``[T, num_query_heads * head_dim]`` -> a view ``[T, num_query_heads, head_dim]``."""
        return q.view(-1, self.num_query_heads, self.head_dim)

    def kv_heads(self) -> torch.Tensor:
        """Which KV head each query head reads: int64 ``[num_query_heads]``, on the CPU."""
        return torch.arange(self.num_query_heads) // (self.num_query_heads // self.num_kv_heads)


@dataclass(frozen=True)
class BatchPart:
    """Tokens ``[start, end)`` of one request in a forward; their queries begin at row ``first_row``.

    ``slot`` is the request's row in SGLang's request pool. A decoding request has one token.
    """

    rid: str
    slot: int
    start: int
    end: int
    first_row: int
    phase: Phase


def parts_of(schedule_batch: Any) -> list[BatchPart]:
    """Split SGLang's ``ScheduleBatch``, ready for its forward, into its requests, in the order of their rows.

    Only host memory is read. A batch that mixes prompt chunks with decoding requests has both phases.
    """
    batch = schedule_batch
    slots = batch.req_pool_indices_cpu.tolist()
    if batch.forward_mode.is_decode():
        # Lengths and slots may be padded at the end, requests are not.
        rows = enumerate(zip(batch.reqs, slots, batch.seq_lens_cpu.tolist(), strict=False))
        return [BatchPart(req.rid, slot, end - 1, end, row, Phase.DECODE) for row, (req, slot, end) in rows]
    decoding = {req.rid for req in batch.decoding_reqs or ()}
    parts = []
    first_row = 0
    for req, slot, start, length in zip(batch.reqs, slots, batch.prefix_lens, batch.extend_lens, strict=True):
        phase = Phase.DECODE if req.rid in decoding else Phase.PREFILL
        if length:
            parts.append(BatchPart(req.rid, slot, start, start + length, first_row, phase))
        first_row += length
    return parts


@dataclass
class Recording:
    """A request that is recorded in ``place``, of which ``end`` tokens have run."""

    rid: str
    place: int
    end: int
    num_chunks: int = 0


class RequestPlaces:
    """Hands ``num_places`` places to requests, which are known by their row in SGLang's request pool.

    A place is taken until it is released, also after its request has ended, so that another thread can read
    what was recorded there.
    """

    def __init__(self, num_places: int) -> None:
        self._lock = threading.Lock()
        self._free = list(range(num_places))
        self._by_slot: dict[int, Recording] = {}

    def is_empty(self) -> bool:
        """Whether no running request is recorded."""
        return not self._by_slot

    def find(self, rid: str, slot: int) -> Recording | None:
        """The recording of a running request."""
        with self._lock:
            return self._find(rid, slot)

    def enter(self, rid: str, slot: int, start: int) -> tuple[Recording | None, bool]:
        """The recording of a request whose tokens from ``start`` on run now, and whether it is a new one.

        It is new when the request starts, or starts over, in ``slot``. It is None when no place is free.
        Tokens that were decoded since the last call need not be counted in its ``end``.
        """
        with self._lock:
            recording = self._find(rid, slot)
            if recording is not None and recording.end <= start:
                return recording, False
            if slot in self._by_slot:
                self._free.append(self._by_slot.pop(slot).place)
            if not self._free:
                return None, True
            recording = Recording(rid, self._free.pop(0), end=start)
            self._by_slot[slot] = recording
            return recording, True

    def take(self, rid: str, slot: int) -> Recording | None:
        """The recording of a request that has ended; None if it has none. The caller releases its place."""
        with self._lock:
            recording = self._find(rid, slot)
            if recording is not None:
                del self._by_slot[slot]
            return recording

    def release(self, place: int) -> None:
        with self._lock:
            self._free.append(place)

    def _find(self, rid: str, slot: int) -> Recording | None:
        recording = self._by_slot.get(slot)
        return recording if recording is not None and recording.rid == rid else None


class CapturedTurn(ABC):
    """The recording of one request, until it is released. Read by one thread."""

    def __init__(self) -> None:
        # Whoever has taken it releases; nobody gives it back.
        self._release_right = threading.Lock()

    @abstractmethod
    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        """This rank's heads over the turn's rows, None without rows. Call it at most once.

        The turn is stored up to ``num_tokens``; ``read_keys`` reads the keys of these tokens. Later rows, of
        an incomplete page, may be left out.
        """

    def rows(self, num_tokens: int) -> QueryRows | None:
        """Some rows among the first ``num_tokens`` tokens; None if none were kept."""
        return None

    def release(self) -> None:
        """Make room for another request. Calling it again, from any thread, does nothing.

        What is read afterwards may be of another request.
        """
        if self._release_right.acquire(blocking=False):
            self._give_place_back()

    @abstractmethod
    def _give_place_back(self) -> None:
        """Called once, on release."""
