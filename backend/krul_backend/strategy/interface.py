"""The interface of strategy selectors, and the evidence that they choose from."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.errors import StrategyError
from krul_backend.strategy.strategy import Strategy


@dataclass(frozen=True, eq=False)
class Evidence:
    """The measurements of one conversation from which a strategy is chosen for it.

    ``statistics`` is None when attention was not observed.

    Raises:
        StrategyError: statistics of a model of another number of layers.
    """

    num_layers: int
    statistics: AttentionStatistics | None = None

    def __post_init__(self) -> None:
        if self.statistics is not None and self.statistics.num_layers != self.num_layers:
            raise StrategyError(
                f"attention statistics of {self.statistics.num_layers} layers for a model of "
                f"{self.num_layers} layers"
            )


class StrategySelector(ABC):
    """Chooses how one conversation is stored. Selectors hold no state and may be shared by threads."""

    name: ClassVar[str]

    @abstractmethod
    def select(self, evidence: Evidence) -> Strategy:
        """A strategy of ``evidence.num_layers`` layers.

        Where evidence that it needs is missing, a selector compresses less; it does not guess.
        """
