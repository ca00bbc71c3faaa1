"""Every row, at once: the reference."""

from __future__ import annotations

from krul_backend.attention.interface import AttentionEstimator, Phase
from krul_backend.attention.rows import QueryRows, ReadKeys, accumulate
from krul_backend.attention.statistics import AttentionStatistics


class ExactEstimator(AttentionEstimator):
    """Reduces every row it is given at once, on the rows' device. Keeps sums only.

    Given all rows of a prompt, its time grows with the square of their number: for tests and short inputs.
    """

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self._total = AttentionStatistics.zero(num_layers, num_heads)

    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        self._total += accumulate(rows, read_keys)

    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        return self._total
