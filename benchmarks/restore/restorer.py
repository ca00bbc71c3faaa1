"""One returning turn, from nothing in the pool to its first token, as a plan says: both of its streams."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

import torch

from benchmarks.restore.model import Decoder, KVPool
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from krul_backend.codec.unit_restore import restore_layer
from krul_backend.device import Device, Event
from krul_backend.planner.interface import RestorePlan

PendingChecks = dict[tuple[int, int], Future[None]]
"""By segment and layer."""


class Loading:
    """One restore's loads. ``marks[l]``: start and end of layer ``l``; all are there after ``finish``."""

    ended: Future[None]

    def __init__(self, device: Device, num_layers: int) -> None:
        self.marks: list[tuple[Event, Event]] = []
        self.num_bytes = 0
        self._device = device
        self._loaded = [threading.Event() for _ in range(num_layers)]

    def add(self, start: Event, end: Event, num_bytes: int) -> None:
        """The next layer has been loaded, or queued on the load stream."""
        self.num_bytes += num_bytes
        self.marks.append((start, end))
        self._loaded[len(self.marks) - 1].set()

    def fail(self) -> None:
        """Nobody waits any longer; ``wait`` raises."""
        for loaded in self._loaded:
            loaded.set()

    def wait(self, layer: int) -> None:
        """What the current stream is given from now on runs after the load of ``layer``.

        Raises what the loading thread raised.
        """
        self._loaded[layer].wait()
        if layer >= len(self.marks):
            self.finish()
        self._device.wait_for(self.marks[layer][1])

    def finish(self) -> None:
        """Wait until the thread has ended. Raises what it raised."""
        self.ended.result()


class LayerLoader:
    """Loads from one tier into one pool. Blocks are checked ahead of their copies, as the engine does."""

    def __init__(self, device: Device, pool: KVPool) -> None:
        self._device = device
        self._pool = pool
        self._worker = ThreadPoolExecutor(1, "load", initializer=device.bind_thread)
        self._stream = device.new_stream()
        self._checker = ThreadPoolExecutor(1 if device.shares_cores else 4, "check")

    def close(self) -> None:
        self._worker.shutdown(wait=True)
        self._checker.shutdown(wait=True)

    def start(
        self, stored: StoredConversation, tier: Tier, head_ends: Sequence[int], slots: torch.Tensor
    ) -> Loading:
        """Begin to fill ``slots`` (int64, at least the conversation's tokens) from ``head_ends[l]`` on."""
        loading = Loading(self._device, stored.num_layers)
        loading.ended = self._worker.submit(self._load, loading, stored, tier, head_ends, slots)
        return loading

    def _load(
        self,
        loading: Loading,
        stored: StoredConversation,
        tier: Tier,
        head_ends: Sequence[int],
        slots: torch.Tensor,
    ) -> None:
        checks: PendingChecks = {}
        try:
            with torch.inference_mode(), self._device.on_stream(self._stream):
                if tier.lies_in_memory:
                    self._announce(checks, stored, tier, head_ends)
                blocks: list[dict[int, torch.Tensor]] = [{} for _ in stored.segments]
                for layer in range(stored.num_layers):
                    start = self._device.record()
                    num_bytes = sum(
                        self._load_segment(stored, tier, number, layer, head_ends, slots, of_segment, checks)
                        for number, of_segment in enumerate(blocks)
                    )
                    loading.add(start, self._device.record(), num_bytes)
        except BaseException:
            for checked in checks.values():
                checked.cancel()
            loading.fail()
            raise

    def _announce(
        self, checks: PendingChecks, stored: StoredConversation, tier: Tier, head_ends: Sequence[int]
    ) -> None:
        """Begin to check all that will be copied, in that order."""
        for layer in range(stored.num_layers):
            for number in range(len(stored.segments)):
                tail_start = stored.tail_start(number, layer, head_ends[stored.last_use[layer]])
                if tail_start is not None:
                    key = stored.key(number, layer)
                    checks[number, layer] = self._checker.submit(tier.check, key, tail_start)

    def _load_segment(
        self,
        stored: StoredConversation,
        tier: Tier,
        number: int,
        layer: int,
        head_ends: Sequence[int],
        slots: torch.Tensor,
        blocks: dict[int, torch.Tensor],
        checks: PendingChecks,
    ) -> int:
        """One layer of one segment. Returns the bytes copied; ``blocks`` keeps what later layers need.

        ::

            [first_token, h_last)  of the block: not read; h_last is the head of the layer that needs it last
            [h_last, h_l)          read for a later layer
            [h_l, end_token)       read and decoded into the pool
        """
        segment = stored.segments[number]
        num_bytes = 0
        tail_start = stored.tail_start(number, layer, head_ends[stored.last_use[layer]])
        if tail_start is not None:
            if (number, layer) in checks:
                checks[number, layer].result()
            blocks[layer] = tier.read(stored.key(number, layer), tail_start)
            num_bytes = blocks[layer].numel()
        first = max(segment.first_token, head_ends[layer])
        if first < segment.end_token:
            restore_layer(
                segment.decoder,
                layer,
                blocks,
                first - segment.first_token,
                segment.end_token - segment.first_token,
                self._pool.k[layer],
                self._pool.v[layer],
                slots[first : segment.end_token],
            )
        return num_bytes


Span = tuple[float, float]
"""Start and end in seconds from the start of the restore."""

Marks = list[tuple[Event, Event]]


@dataclass(frozen=True, eq=False)
class Turn:
    """Token ids int64 ``[T]`` of history and new tokens, and the request's slots int64 ``[>= T]``."""

    token_ids: torch.Tensor
    slots: torch.Tensor
    history_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.token_ids.numel()


@dataclass(frozen=True, eq=False)
class Measured:
    """``ttft_s``: wall clock until the first token is known on the host. Spans per layer; ``heads`` and
    ``loads`` only of as many layers as there are. ``logits [vocab]`` of the first token.
    """

    ttft_s: float
    heads: tuple[Span, ...]
    loads: tuple[Span, ...]
    own: tuple[Span, ...]
    bytes_loaded: int
    logits: torch.Tensor

    @property
    def length_s(self) -> float:
        """From the start to the end of the request's last layer."""
        return self.own[-1][1]

    @property
    def compute_s(self) -> float:
        return _total(self.heads) + _total(self.own)

    @property
    def load_s(self) -> float:
        """Reading and decoding."""
        return _total(self.loads)


class Restorer:
    """Runs turns on one model, one pool and one load stream."""

    def __init__(self, model: Decoder, pool: KVPool, device: Device, loader: LayerLoader) -> None:
        self.model = model
        self.pool = pool
        self.device = device
        self._loader = loader

    @torch.inference_mode()
    def run(self, turn: Turn, plan: RestorePlan, stored: StoredConversation, tier: Tier) -> Measured:
        """The pool's slots of the turn are written; nothing of it is taken to be there."""
        self.device.synchronize()
        started_s = time.perf_counter()
        start = self.device.record()
        loading = None if plan.is_recompute else self._loader.start(stored, tier, plan.head_ends, turn.slots)
        heads = [] if plan.is_recompute else self.recompute_heads(turn, plan.head_ends)
        num_past = 0 if plan.is_recompute else turn.history_tokens
        logits, own = self.own_forward(turn, num_past, loading)
        logits.argmax().item()
        ttft_s = time.perf_counter() - started_s
        if loading is not None:
            loading.finish()
        return Measured(
            ttft_s,
            self._spans(start, heads),
            self._spans(start, [] if loading is None else loading.marks),
            self._spans(start, own),
            0 if loading is None else loading.num_bytes,
            logits,
        )

    def recompute_heads(self, turn: Turn, head_ends: Sequence[int]) -> Marks:
        """KV of tokens ``[0, head_ends[l])`` of each layer, which never grow; returns a pair of marks each.

        ::

            [0, head_ends[l])             computed in layer l, from hidden states cut to that length
            [head_ends[l], head_ends[0])  not needed from layer l on
        """
        marks: Marks = []
        hidden = self.model.embed(turn.token_ids[: head_ends[0]])
        for layer, head_end in enumerate(head_ends):
            if head_end == 0:
                break
            start = self.device.record()
            hidden = self.model.layer(layer, hidden[:head_end], self.pool, turn.slots)
            marks.append((start, self.device.record()))
        return marks

    def own_forward(
        self, turn: Turn, num_past: int, loading: Loading | None = None
    ) -> tuple[torch.Tensor, Marks]:
        """The engine's forward of tokens ``[num_past, T)``: logits ``[vocab]``, a pair of marks per layer."""
        marks: Marks = []
        hidden = self.model.embed(turn.token_ids[num_past:])
        for layer in range(self.pool.num_layers):
            if loading is not None:
                loading.wait(layer)
            start = self.device.record()
            hidden = self.model.layer(layer, hidden, self.pool, turn.slots, num_past)
            marks.append((start, self.device.record()))
        return self.model.logits(hidden), marks

    def _spans(self, start: Event, marks: Marks) -> tuple[Span, ...]:
        self.device.synchronize()
        return tuple((start.seconds_until(first), start.seconds_until(end)) for first, end in marks)


def _total(spans: Sequence[Span]) -> float:
    return sum(end - start for start, end in spans)
