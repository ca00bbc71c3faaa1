"""Predicted damage for the budget rows, and the probes that teach what damage costs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from benchmarks.quality.conversation import Conversation, mean_divergence, segment_bounds
from benchmarks.quality.model import HistoryModel, pooled
from benchmarks.quality.observation import query_rows
from benchmarks.quality.storage import StoredHistory, Unit, concatenate, token_slice
from krul_backend.attention.rows import QueryRows, accumulate
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.interface import LayerKV
from krul_backend.codec.segment_codec import SegmentCodec
from krul_backend.strategy.interface import UnitOption
from krul_backend.strategy.sensitivity import SensitivityTable
from krul_backend.strategy.strategy import Precision, Strategy
from krul_sglang.engine.budget.damage import DamageMeter, MeasuredUnit, nearest_pairs

MAX_PAIRS = 8
"""Pairs whose damage is measured: those with the nearest attention."""

PROBES_PER_CONVERSATION = 16
_CODES = (Precision.INT8, Precision.INT4, Precision.INT2)
_SINGLE_PRECISIONS = (*_CODES, Precision.INT0)
_PAIR_PRECISIONS = (Precision.NATIVE, *_CODES)


class LearnedDamage:
    """Measures options as a server would, and learns from probes before that. Pairs share by ``sharing``.

    A server probes a share of its turns; here all probes come first, on conversations of their own, so that
    every conversation that is scored is judged by the same table.
    """

    def __init__(
        self,
        model: HistoryModel,
        codecs: Mapping[str, SegmentCodec],
        sharing: str,
        page_size: int,
        rows_per_turn: int,
    ) -> None:
        self._model = model
        self._codecs = codecs
        self._sharing = sharing
        self._page_size = page_size
        self._rows_per_turn = rows_per_turn
        self.num_probes = 0
        self.table = SensitivityTable("quality benchmark", model.num_layers)
        self._meter = DamageMeter(
            self.table, single_precisions=_SINGLE_PRECISIONS, pair_precisions=_PAIR_PRECISIONS
        )

    def measure(
        self,
        rows: QueryRows,
        kv: Sequence[LayerKV],
        history: StoredHistory,
        statistics: AttentionStatistics,
    ) -> list[UnitOption]:
        """Options for all segments of ``history``: layers alone and the nearest pairs."""
        return [unit.option for unit in self._measured(rows, kv, history, statistics)]

    def learn(self, conversations: Iterator[Conversation], num_probes: int) -> None:
        """Probes one unit at one precision at a time, the ones that teach most first."""
        while self.num_probes < num_probes:
            conversation = next(conversations)
            run = self._model.run(conversation.history, (), num_logits=1)
            kv = [pooled(layer) for layer in run.kv]
            history = StoredHistory(self._codecs)
            for bounds in segment_bounds(conversation.turn_ends, self._page_size):
                if bounds is not None:
                    history.add_segment(token_slice(kv, *bounds))
            last_start = (0, *conversation.turn_ends)[-2]
            end = len(conversation.history)
            rows = query_rows(self._model, run.queries, last_start, end, num_rows=self._rows_per_turn)
            statistics = accumulate(rows, lambda layer, kv=kv: kv[layer].k)  # type: ignore[misc]
            candidates = self._measured(rows, kv, history, statistics)
            true_answer = conversation.answer(self._model, token_slice(kv, 0, history.num_tokens))
            for _ in range(min(PROBES_PER_CONVERSATION, num_probes - self.num_probes)):
                index = self.table.next_probe([unit.errors for unit in candidates])
                if index is None:
                    break
                probed = candidates.pop(index)
                strategies = [self._alone(probed.option)] * history.num_segments
                restored = history.restore(self._sharing, strategies)
                answer = conversation.answer(self._model, restored.kv)
                divergence = mean_divergence(true_answer.logits, answer.logits)
                self.table.update(probed.errors, divergence)
                self.num_probes += 1

    def _measured(
        self,
        rows: QueryRows,
        kv: Sequence[LayerKV],
        history: StoredHistory,
        statistics: AttentionStatistics,
    ) -> list[MeasuredUnit]:
        num_stored, num_tokens = history.num_tokens, len(kv[0].k)

        def round_trip(
            unit: Unit, precision: Precision, layers: Sequence[LayerKV]
        ) -> tuple[Sequence[LayerKV], float]:
            # The tokens after the last whole page stay exact.
            stored = history.restore_unit(self._sharing, history.num_segments, unit, precision)
            rest = token_slice(layers, num_stored, num_tokens)
            decoded = [concatenate(parts) for parts in zip(stored.layers, rest, strict=True)]
            return decoded, stored.num_bytes / num_stored

        pairs = nearest_pairs(statistics, MAX_PAIRS)
        units = self._meter.units_of(self._model.num_layers, pairs)
        return self._meter.measure(units, rows, lambda layer: kv[layer], round_trip)

    def _alone(self, option: UnitOption) -> Strategy:
        return Strategy.of_unit(self._model.num_layers, option.unit, option.precision)
