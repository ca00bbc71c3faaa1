"""How a conversation is stored and asked: its whole history at once, or turn by turn on restored history."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate as accumulate_sums

import torch
from torch import Tensor

from benchmarks.quality.conversation import Answer, Conversation, Samples, segment_bounds
from benchmarks.quality.methods import (
    Eviction,
    Method,
    Stored,
    StoreTurn,
    Turn,
    accumulated_attention,
    num_kept_tokens,
    stored_bytes,
    visible_tokens,
)
from benchmarks.quality.model import HistoryModel, Run, concatenate, token_slice
from krul_backend.attention.rows import QueryRows, accumulate, sample_positions
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.layout import LayerKV
from krul_backend.strategy.strategy import Pair
from krul_sglang.learning.model_kv import pooled

PAGE_SIZE = 16


@dataclass(frozen=True)
class Outcome:
    """One conversation stored by one method: ``num_bytes`` of ``num_tokens`` tokens.

    ``pairs`` counts in how many of the segments a pair was shared. ``expected_kl``: the sum of what the
    turns were expected to cost. That of an older turn weighs less, by the tokens that came after it.
    """

    samples: Samples
    num_tokens: int
    num_bytes: int
    num_segments: int
    pairs: Counter[Pair] = field(default_factory=Counter)
    expected_kl: float | None = None


@dataclass(frozen=True)
class Played:
    """One conversation: outcomes by name of the method, and what the model answers on uncompressed KV."""

    outcomes: dict[str, Outcome]
    uncompressed: Samples


class Protocol:
    """Runs conversations on one model; attention is sampled at ``rows_per_turn`` tokens of each turn."""

    def __init__(self, model: HistoryModel, rows_per_turn: int) -> None:
        self._model = model
        self._rows_per_turn = rows_per_turn

    def full_bytes(self, num_tokens: int) -> int:
        """What the pool itself takes for so many tokens."""
        shape = self._model.shape
        return num_tokens * self._model.num_layers * (shape.k_token_bytes + shape.v_token_bytes)

    def at_once(self, conversation: Conversation, methods: Sequence[Method | Eviction]) -> Played:
        """The history is computed once, on exact KV; each method stores and restores the same KV."""
        run = self._model.run(conversation.history, (), num_logits=1)
        turns = self._turns(conversation, run)
        kv = _joined([turn.segment for turn in turns])
        true_answer = conversation.answer(self._model, kv)
        outcomes = {}
        for method in methods:
            if isinstance(method, Eviction):
                outcomes[method.name] = self._evicted(conversation, run, kv, method, true_answer)
                continue
            store = method.start()
            stored = [store(turn) for turn in turns]
            answer = conversation.answer(self._model, _joined([each.segment for each in stored]))
            outcomes[method.name] = _outcome(conversation.measure(answer, true_answer), stored)
        return Played(outcomes, conversation.measure(true_answer, true_answer))

    def turn_by_turn(self, conversation: Conversation, methods: Sequence[Method]) -> Played:
        """Each turn is computed on what the method restored of the turns before, and then stored: damage adds
        up as it does in a server that loses the conversation from its pool after each turn."""
        true_answer, _ = self._play(conversation, lambda turn: Stored(turn.segment, 0))
        outcomes = {}
        for method in methods:
            answer, stored = self._play(conversation, method.start())
            outcomes[method.name] = _outcome(conversation.measure(answer, true_answer), stored)
        return Played(outcomes, conversation.measure(true_answer, true_answer))

    def _turns(self, conversation: Conversation, run: Run) -> list[Turn]:
        """The turns that store a segment, as they are when the history is computed on exact KV."""
        observer = _Observer(self._model, self._rows_per_turn, conversation)
        kv = [pooled(layer) for layer in run.kv]
        turns = [
            observer.end_turn(
                [layer[:turn_end] for layer in run.queries], token_slice(kv, 0, turn_end), bounds
            )
            for turn_end, bounds in _bounds(conversation)
        ]
        return [turn for turn in turns if turn is not None]

    def _play(self, conversation: Conversation, store: StoreTurn) -> tuple[Answer, list[Stored]]:
        observer = _Observer(self._model, self._rows_per_turn, conversation)
        stored: list[Stored] = []
        restored: tuple[LayerKV, ...] = ()
        for turn_end, bounds in _bounds(conversation):
            num_restored = len(restored[0].k) if restored else 0
            run = self._model.run(conversation.history[num_restored:turn_end], restored, num_logits=1)
            new = tuple(pooled(layer) for layer in run.kv)
            turn = observer.end_turn(run.queries, _joined([restored, new]) if restored else new, bounds)
            if turn is not None:
                stored.append(store(turn))
                restored = _joined([each.segment for each in stored])
        return conversation.answer(self._model, restored), stored

    def _evicted(
        self,
        conversation: Conversation,
        run: Run,
        kv: Sequence[LayerKV],
        method: Eviction,
        true_answer: Answer,
    ) -> Outcome:
        model, num_tokens = self._model, len(kv[0].k)
        shape, num_layers = model.shape, model.num_layers
        num_kept = num_kept_tokens(num_tokens, self.full_bytes(num_tokens) / method.ratio, shape, num_layers)
        queries = [layer[:num_tokens] for layer in run.queries]
        visible = visible_tokens(accumulated_attention(queries, kv, model.kv_heads, model.scaling), num_kept)
        answer = conversation.answer(model, kv, visible)
        return Outcome(
            conversation.measure(answer, true_answer),
            num_tokens,
            stored_bytes(num_kept, shape, num_layers),
            num_segments=1,
        )


class _Observer:
    """Collects what a server would know of one conversation, turn by turn."""

    def __init__(self, model: HistoryModel, rows_per_turn: int, conversation: Conversation) -> None:
        self._model = model
        self._rows_per_turn = rows_per_turn
        self._seed = zlib.crc32(repr(conversation.history).encode())
        self._statistics = AttentionStatistics.zero(model.num_layers, model.num_heads)
        self._history_tokens = conversation.turn_ends[-1]
        self._num_tokens = 0

    def end_turn(
        self, queries: Sequence[Tensor], kv: tuple[LayerKV, ...], bounds: tuple[int, int] | None
    ) -> Turn | None:
        """The turn, if it stores a segment.

        ``kv[l]``: of all tokens up to its end. ``queries[l] [N, H, D]``: of the last ``N`` of them, at least
        the turn's own.
        """
        start, self._num_tokens = self._num_tokens, len(kv[0].k)
        rows = self._query_rows(queries, start, self._num_tokens)
        self._statistics += accumulate(rows, lambda layer: kv[layer].k)
        if bounds is None:
            return None
        return Turn(
            bounds[0], token_slice(kv, *bounds), kv, rows, self._statistics, self._seed, self._history_tokens
        )

    def _query_rows(self, queries: Sequence[Tensor], start: int, end: int) -> QueryRows:
        positions = sample_positions(start, end, self._rows_per_turn)
        index = (positions - (end - len(queries[0]))).to(queries[0].device)
        rows = torch.stack([layer[index] for layer in queries])
        return QueryRows(rows, positions, self._model.kv_heads, self._model.scaling)


def _bounds(conversation: Conversation) -> list[tuple[int, tuple[int, int] | None]]:
    """The end of each turn with the bounds of its segment.

    Raises:
        ValueError: the history is shorter than a page, so that nothing of it is stored.
    """
    ends = conversation.turn_ends
    if ends[-1] < PAGE_SIZE:
        raise ValueError(f"a history of {ends[-1]} tokens is shorter than a page of {PAGE_SIZE}")
    return list(zip(ends, segment_bounds(ends, PAGE_SIZE), strict=True))


def _joined(segments: Sequence[Sequence[LayerKV]]) -> tuple[LayerKV, ...]:
    return tuple(concatenate(parts) for parts in zip(*segments, strict=True))


def _outcome(samples: Samples, stored: Sequence[Stored]) -> Outcome:
    ends = list(accumulate_sums(len(each.segment[0].k) for each in stored))
    damages = [
        each.damage * end / ends[-1]
        for each, end in zip(stored, ends, strict=True)
        if each.damage is not None
    ]
    return Outcome(
        samples,
        num_tokens=ends[-1],
        num_bytes=sum(each.num_bytes for each in stored),
        num_segments=len(stored),
        pairs=Counter(pair for each in stored for pair in each.pairs),
        expected_kl=sum(damages) if damages else None,
    )
