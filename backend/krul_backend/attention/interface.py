"""The interface of an attention estimator."""

from __future__ import annotations

from abc import ABC, abstractmethod
from enum import Enum

from krul_backend.attention.rows import QueryRows, ReadKeys
from krul_backend.attention.statistics import AttentionStatistics


class Phase(Enum):
    """Which part of a turn rows come from: the engine's forward mode says it."""

    PREFILL = "prefill"
    DECODE = "decode"


class AttentionEstimator(ABC):
    """Turns the query rows of one conversation's turn into statistics.

    One object per turn: ``add`` as the turn runs, ``finish`` once when it ends. Estimators differ in where
    and when they work, not in what they compute: given the same rows they agree up to rounding, except for
    those that keep only some of the rows.

    All rows of a turn have the layers and heads that the estimator was made for. ``read_keys`` reads the
    sequence's keys on the device of the queries.
    """

    @abstractmethod
    def add(self, rows: QueryRows, phase: Phase, read_keys: ReadKeys) -> None:
        """Take rows whose keys, up to each row's own, are already readable.

        The tensors of ``rows`` belong to the caller again when this returns.
        """

    @abstractmethod
    def finish(self, read_keys: ReadKeys) -> AttentionStatistics:
        """The statistics of all rows of this turn. Call once; ``add`` must not be called afterwards."""
