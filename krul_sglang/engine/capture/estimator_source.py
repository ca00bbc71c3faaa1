"""Where the estimators of running requests come from: one configured kind for the whole server."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import asdict
from typing import Any

from krul_backend.attention.exact import ExactEstimator
from krul_backend.attention.heterogeneous import HeterogeneousEstimator
from krul_backend.attention.interface import AttentionEstimator
from krul_backend.attention.similarity_worker import SimilarityWorker


class EstimatorSource(ABC):
    """Makes one estimator for each turn, and owns what they share."""

    @abstractmethod
    def make(self) -> AttentionEstimator:
        """A fresh estimator."""

    @abstractmethod
    def stats(self) -> dict[str, Any]:
        """The estimator's ``name`` and the counters of what its turns share, as plain values."""

    @abstractmethod
    def close(self) -> None:
        """End what the estimators share. None of them may be given rows afterwards."""


class ExactSource(EstimatorSource):
    """Every row is reduced at its step, on the device."""

    def __init__(self, num_layers: int, num_heads: int) -> None:
        self._shape = (num_layers, num_heads)

    def make(self) -> AttentionEstimator:
        return ExactEstimator(*self._shape)

    def stats(self) -> dict[str, Any]:
        return {"name": "exact"}

    def close(self) -> None:
        """Its estimators share nothing."""


class HeterogeneousSource(EstimatorSource):
    """Prompts go to one worker process for all turns; ``worker`` is this object's from now on."""

    def __init__(self, num_layers: int, num_heads: int, worker: SimilarityWorker) -> None:
        self._shape = (num_layers, num_heads)
        self._worker = worker

    def make(self) -> AttentionEstimator:
        return HeterogeneousEstimator(*self._shape, self._worker)

    def stats(self) -> dict[str, Any]:
        return {"name": "heterogeneous", **asdict(self._worker.stats())}

    def close(self) -> None:
        self._worker.close()


def make_source(name: str, num_layers: int, num_heads: int) -> EstimatorSource:
    """The source of "exact" or "heterogeneous" estimators."""
    if name == "exact":
        return ExactSource(num_layers, num_heads)
    if name == "heterogeneous":
        return HeterogeneousSource(num_layers, num_heads, SimilarityWorker())
    raise ValueError(f"{name!r} is no estimator that takes every row")
