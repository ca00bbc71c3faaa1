"""The interface of captures, which record the attention of running requests, and of recorded turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from contextlib import AbstractContextManager
from typing import Any

from krul_backend.attention.rows import QueryRows, ReadKeys
from krul_backend.attention.statistics import AttentionStatistics


class CapturedTurn(ABC):
    """The recording of one request, until it is released. Used by one thread."""

    @abstractmethod
    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        """This rank's heads over the turn's rows, None without rows. Call it at most once.

        The turn is stored up to ``num_tokens``; ``read_keys`` reads the keys of these tokens. Later rows, of
        an incomplete page, may be left out.
        """

    def rows(self, num_tokens: int) -> QueryRows | None:
        """Some rows among the first ``num_tokens`` tokens; None if none were kept."""
        return None

    @abstractmethod
    def release(self) -> None:
        """Make room for another request. Nothing else may be called afterwards."""


class TurnCapture(ABC):
    """Records attention of the requests that one model runner serves.

    The number of requests at a time is bounded; a request that finds no room is not recorded.
    """

    @property
    @abstractmethod
    def num_heads(self) -> int:
        """The number of heads of the statistics: this rank's query heads."""

    @abstractmethod
    def recording(self, schedule_batch: Any) -> AbstractContextManager[None]:
        """A block inside which the forward of SGLang's ``ScheduleBatch`` runs, eagerly or as a graph.

        It is entered for every forward, also for those of which nothing is recorded.
        """

    @abstractmethod
    def take(self, rid: str, slot: int) -> CapturedTurn | None:
        """The recording of a request that has ended in row ``slot`` of SGLang's request pool.

        None if it was not recorded. The caller releases it.
        """

    @abstractmethod
    def suspended(self) -> AbstractContextManager[None]:
        """A block inside which forwards are not recorded, because they compute recorded tokens again."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """The estimator's ``name`` and its counters, as plain values."""

    @abstractmethod
    def close(self) -> None:
        """End the threads and processes of the capture. No forward may run afterwards."""
