"""What a server would know of a conversation when one of its turns ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from benchmarks.baselines import SeededEvidence
from benchmarks.quality.model import HistoryModel
from benchmarks.quality.storage import StoredHistory
from krul_backend.attention.rows import QueryRows, accumulate, sample_positions
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import LayerKV
from krul_backend.strategy.interface import Evidence, UnitOption

MeasureOptions = Callable[
    [QueryRows, Sequence[LayerKV], StoredHistory, AttentionStatistics], Sequence[UnitOption]
]
"""Predicts the damage of ways to store a history, from the last turn's query rows, the true KV up to the
turn's end, the segments so far, and the statistics so far."""


class TurnObserver:
    """Follows the turns of one conversation.

    Attention is sampled at ``rows_per_turn`` tokens of each turn; damage is measured if ``measure`` is given.
    """

    def __init__(
        self,
        model: HistoryModel,
        rows_per_turn: int,
        conversation_seed: int,
        measure: MeasureOptions | None,
    ) -> None:
        self._model = model
        self._rows_per_turn = rows_per_turn
        self._conversation_seed = conversation_seed
        self._measure = measure
        self._statistics = AttentionStatistics.zero(model.num_layers, model.num_heads)
        self._num_tokens = 0

    def end_turn(self, queries: Sequence[Tensor], kv: Sequence[LayerKV], history: StoredHistory) -> Evidence:
        """The evidence of all turns so far.

        ``kv[l]``: of all tokens up to the turn's end. ``queries[l] [N, H, D]``: of the last ``N`` of them, at
        least the turn's own. ``history``: the segments, this turn's included.
        """
        rows = query_rows(self._model, queries, self._num_tokens, len(kv[0].k), num_rows=self._rows_per_turn)
        self._num_tokens = len(kv[0].k)
        self._statistics += accumulate(rows, lambda layer: kv[layer].k)
        options = self._measure(rows, kv, history, self._statistics) if self._measure else ()
        return SeededEvidence(self._model.num_layers, self._statistics, options, self._conversation_seed)


def query_rows(
    model: HistoryModel, queries: Sequence[Tensor], start: int, end: int, *, num_rows: int
) -> QueryRows:
    """Sampled rows of ``[start, end)``; ``queries[l] [N, H, D]`` are those of ``[end - N, end)``."""
    positions = sample_positions(start, end, num_rows)
    index = (positions - (end - len(queries[0]))).to(queries[0].device)
    rows = torch.stack([layer[index] for layer in queries])
    return QueryRows(rows, positions, model.kv_heads, model.scaling)
