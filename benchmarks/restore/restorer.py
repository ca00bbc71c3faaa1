"""One returning turn, from nothing in the pool to its first token, as a plan says."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch

from benchmarks.restore.loader import LayerLoader, Loading
from benchmarks.restore.model import Decoder, KVPool
from benchmarks.restore.stored import StoredConversation
from benchmarks.restore.tiers import Tier
from krul_backend.device import Device, Event
from krul_backend.planner.interface import RestorePlan

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
