"""A bounded number of rows, reduced when the turn ends: the default."""

from __future__ import annotations

from krul_backend.attention.interface import AttentionEstimator, Phase
from krul_backend.attention.rows import QueryRows, ReadKeys, accumulate, concatenate_rows
from krul_backend.attention.statistics import AttentionStatistics


class SampledEstimator(AttentionEstimator):
    """Keeps query vectors, and reduces them in one pass over the keys in ``finish``.

    While the turn runs it only copies. Every ``stride``-th row of the turn is kept, starting with the first;
    the stride doubles whenever more than ``max_rows`` rows would be kept. So the rows kept are always spread
    evenly over the rows given, and more than ``max_rows / 2`` once that many were given.

    Raises:
        ValueError: if ``max_rows`` is not positive.
    """

    def __init__(self, num_layers: int, num_heads: int, max_rows: int) -> None:
        if max_rows <= 0:
            raise ValueError(f"at least one row has to be kept, got max_rows={max_rows}")
        self._zero = AttentionStatistics.zero(num_layers, num_heads)
        self._max_rows = max_rows
        self._kept: list[QueryRows] = []
        self._num_seen = 0
        self._stride = 1

    @property
    def nbytes(self) -> int:
        """Memory of the kept query vectors, in bytes."""
        return sum(part.nbytes for part in self._kept)

    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        num_seen = self._num_seen + rows.num_rows
        thinning = 1
        while -(-num_seen // (self._stride * thinning)) > self._max_rows:
            thinning *= 2
        if thinning > 1:
            self._stride *= thinning
            if self._kept:
                self._kept = [concatenate_rows(self._kept).copy_every(0, thinning)]
        # The first row of these whose number in the turn is a multiple of the stride.
        first = -self._num_seen % self._stride
        if first < rows.num_rows:
            self._kept.append(rows.copy_every(first, self._stride))
        self._num_seen = num_seen

    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        return accumulate(concatenate_rows(self._kept), read_keys) if self._kept else self._zero
