"""The interface of captures, which record the attention of running requests, and of recorded turns."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
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

    @abstractmethod
    def rows(self, num_tokens: int) -> QueryRows | None:
        """Some rows among the first ``num_tokens`` tokens; None if none were kept."""

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


class PairedCapture(TurnCapture):
    """Takes statistics from one capture and rows from another, for decisions that need both."""

    def __init__(self, of_statistics: TurnCapture, of_rows: TurnCapture) -> None:
        self._of_statistics = of_statistics
        self._of_rows = of_rows

    @property
    def num_heads(self) -> int:
        return self._of_statistics.num_heads

    @contextmanager
    def recording(self, schedule_batch: Any) -> Iterator[None]:
        with self._of_statistics.recording(schedule_batch), self._of_rows.recording(schedule_batch):
            yield

    def take(self, rid: str, slot: int) -> CapturedTurn | None:
        """None unless both have recorded the request."""
        of_statistics = self._of_statistics.take(rid, slot)
        of_rows = self._of_rows.take(rid, slot)
        if of_statistics is not None and of_rows is not None:
            return _PairedTurn(of_statistics, of_rows)
        for taken in (of_statistics, of_rows):
            if taken is not None:
                taken.release()
        return None

    @contextmanager
    def suspended(self) -> Iterator[None]:
        with self._of_statistics.suspended(), self._of_rows.suspended():
            yield

    def stats(self) -> dict[str, Any]:
        return self._of_statistics.stats()

    def close(self) -> None:
        self._of_statistics.close()
        self._of_rows.close()


class _PairedTurn(CapturedTurn):
    def __init__(self, of_statistics: CapturedTurn, of_rows: CapturedTurn) -> None:
        self._of_statistics = of_statistics
        self._of_rows = of_rows

    def statistics(self, read_keys: ReadKeys, num_tokens: int) -> AttentionStatistics | None:
        return self._of_statistics.statistics(read_keys, num_tokens)

    def rows(self, num_tokens: int) -> QueryRows | None:
        return self._of_rows.rows(num_tokens)

    def release(self) -> None:
        self._of_statistics.release()
        self._of_rows.release()
