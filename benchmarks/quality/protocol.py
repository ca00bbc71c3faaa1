"""How a conversation is stored and asked: its whole history at once, or turn by turn on restored history."""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from benchmarks.quality.conversation import Answer, Conversation, Measures, segment_bounds
from benchmarks.quality.eviction import (
    accumulated_attention,
    num_kept_tokens,
    stored_bytes,
    visible_tokens,
)
from benchmarks.quality.methods import Compression, Eviction, Method, reference
from benchmarks.quality.model import HistoryModel, Run, pooled
from benchmarks.quality.observation import MeasureOptions, TurnObserver
from benchmarks.quality.storage import Restored, StoredHistory, concatenate, token_slice
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.interface import Evidence
from krul_backend.strategy.strategy import Pair, Precision, Strategy

PAGE_SIZE = 16


@dataclass(frozen=True)
class Outcome:
    """One conversation stored by one method.

    ``pairs`` and ``precisions`` count segments: how often a pair was shared, and how often a layer had a
    precision. ``num_bytes`` of ``num_tokens`` stored tokens.
    """

    measures: Measures
    num_tokens: int
    num_bytes: int
    num_segments: int
    pairs: Counter[Pair] = field(default_factory=Counter)
    precisions: Counter[Precision] = field(default_factory=Counter)


@dataclass(frozen=True)
class Played:
    """One conversation: outcomes by name of the method, and the attention on its uncompressed KV."""

    outcomes: dict[str, Outcome]
    statistics: AttentionStatistics


class Protocol:
    """Runs conversations on one model. ``codecs`` by name of the way in which pairs are shared."""

    def __init__(
        self,
        model: HistoryModel,
        codecs: Mapping[str, SegmentCodec],
        rows_per_turn: int,
        measure: MeasureOptions,
    ) -> None:
        self._model = model
        self._codecs = codecs
        self._rows_per_turn = rows_per_turn
        self._measure = measure
        shape = model.shape
        self._token_bytes = model.num_layers * (shape.k_token_bytes + shape.v_token_bytes)

    def full_bytes(self, num_tokens: int) -> int:
        """What the pool itself takes for so many tokens."""
        return self._token_bytes * num_tokens

    def at_once(self, conversation: Conversation, methods: Sequence[Method]) -> Played:
        """The history is computed once, on exact KV; each method stores and restores the same KV."""
        run = self._model.run(conversation.history, (), num_logits=1)
        history = StoredHistory(self._codecs)
        evidence = self._observe(conversation, run, history, methods)
        true_answer, full = self._restored_answer(
            conversation, history, reference(), [reference().strategy(each) for each in evidence]
        )
        outcomes = {}
        for method in methods:
            if isinstance(method, Eviction):
                outcomes[method.name] = self._evicted(conversation, run, full, method, true_answer)
                continue
            strategies = [method.strategy(each) for each in evidence]
            answer, restored = self._restored_answer(conversation, history, method, strategies)
            measures = conversation.measure(answer, true_answer)
            outcomes[method.name] = _outcome(measures, restored, strategies)
        return Played(outcomes, _statistics(evidence[-1]))

    def turn_by_turn(self, conversation: Conversation, methods: Sequence[Compression]) -> Played:
        """Each turn is computed on what the method restored of the turns before, and then stored: damage adds
        up as it does in a server that loses the conversation from its pool after each turn."""
        true_answer, _, _, last = self._play(conversation, reference())
        outcomes = {}
        for method in methods:
            answer, restored, strategies, _ = self._play(conversation, method)
            outcomes[method.name] = _outcome(conversation.measure(answer, true_answer), restored, strategies)
        return Played(outcomes, _statistics(last))

    def _observe(
        self,
        conversation: Conversation,
        run: Run,
        history: StoredHistory,
        methods: Sequence[Method],
    ) -> list[Evidence]:
        """Adds all segments to ``history``; returns what is known when each of them is stored."""
        needs_damage = any(isinstance(method, Compression) and method.needs_damage for method in methods)
        observer = self._observer(conversation, needs_damage)
        kv = [pooled(layer) for layer in run.kv]
        evidence = []
        for turn_end, bounds in self._turns(conversation):
            if bounds is not None:
                history.add_segment(token_slice(kv, *bounds))
            queries = [layer[:turn_end] for layer in run.queries]
            known = observer.end_turn(queries, token_slice(kv, 0, turn_end), history)
            if bounds is not None:
                evidence.append(known)
        return evidence

    def _play(
        self, conversation: Conversation, method: Compression
    ) -> tuple[Answer, Restored, list[Strategy], Evidence]:
        history = StoredHistory(self._codecs)
        observer = self._observer(conversation, method.needs_damage)
        strategies: list[Strategy] = []
        restored: Restored | None = None
        for turn_end, bounds in self._turns(conversation):
            before = () if restored is None else restored.kv
            start = history.num_tokens
            run = self._model.run(conversation.history[start:turn_end], before, num_logits=1)
            new = [pooled(layer) for layer in run.kv]
            kv = [concatenate(parts) for parts in zip(before, new, strict=True)] if before else new
            if bounds is not None:
                history.add_segment(token_slice(new, 0, bounds[1] - start))
            known = observer.end_turn(run.queries, kv, history)
            if bounds is not None:
                strategies.append(method.strategy(known))
                restored = history.restore(method.sharing, strategies)
        assert restored is not None, "a history shorter than a page"
        return conversation.answer(self._model, restored.kv), restored, strategies, known

    def _turns(self, conversation: Conversation) -> list[tuple[int, tuple[int, int] | None]]:
        ends = conversation.turn_ends
        return list(zip(ends, segment_bounds(ends, PAGE_SIZE), strict=True))

    def _observer(self, conversation: Conversation, needs_damage: bool) -> TurnObserver:
        seed = zlib.crc32(repr(conversation.history).encode())
        measure = self._measure if needs_damage else None
        return TurnObserver(self._model, self._rows_per_turn, seed, measure)

    def _restored_answer(
        self,
        conversation: Conversation,
        history: StoredHistory,
        method: Compression,
        strategies: Sequence[Strategy],
    ) -> tuple[Answer, Restored]:
        restored = history.restore(method.sharing, strategies)
        return conversation.answer(self._model, restored.kv), restored

    def _evicted(
        self,
        conversation: Conversation,
        run: Run,
        full: Restored,
        method: Eviction,
        true_answer: Answer,
    ) -> Outcome:
        num_tokens, shape, num_layers = full.num_tokens, self._model.shape, self._model.num_layers
        num_kept = num_kept_tokens(num_tokens, full.num_bytes / method.ratio, shape, num_layers)
        queries = [layer[:num_tokens] for layer in run.queries]
        model = self._model
        accumulated = accumulated_attention(queries, full.kv, model.kv_heads, model.scaling)
        visible = visible_tokens(accumulated, num_kept)
        answer = conversation.answer(model, full.kv, visible)
        return Outcome(
            conversation.measure(answer, true_answer),
            num_tokens,
            stored_bytes(num_kept, shape, num_layers),
            num_segments=1,
        )


def _outcome(measures: Measures, restored: Restored, strategies: Sequence[Strategy]) -> Outcome:
    pairs = Counter(pair for strategy in strategies for pair in strategy.pairs)
    precisions = Counter(layer.precision for strategy in strategies for layer in strategy.layers)
    return Outcome(measures, restored.num_tokens, restored.num_bytes, len(strategies), pairs, precisions)


def _statistics(evidence: Evidence) -> AttentionStatistics:
    assert evidence.statistics is not None, "the observer always has statistics"
    return evidence.statistics
