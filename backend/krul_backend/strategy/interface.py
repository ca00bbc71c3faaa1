"""The interface of strategy selectors, and the evidence that they choose from."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.errors import StrategyError
from krul_backend.strategy.strategy import Precision, Strategy


@dataclass(frozen=True)
class UnitOption:
    """One way to store one unit: a layer alone ``(i,)`` or a pair ``(i, j)``, ``i < j``, at one precision.

    ``num_bytes`` is bytes per token for all layers of the unit. ``damage`` is the predicted KL divergence in
    nats of the next-token distributions, 0 for a native layer alone; infinity rules the option out.

    Raises:
        StrategyError: a unit that is neither, bytes that are not positive, or a damage below 0.
    """

    unit: tuple[int, ...]
    precision: Precision
    num_bytes: float
    damage: float

    def __post_init__(self) -> None:
        is_pair = len(self.unit) == 2 and self.unit[0] < self.unit[1]
        if not (len(self.unit) == 1 or is_pair) or self.unit[0] < 0:
            raise StrategyError(f"unit {self.unit} is neither (layer,) nor (i, j) with i < j")
        if not 0 < self.num_bytes < math.inf:
            raise StrategyError(f"unit {self.unit} stored in {self.num_bytes} bytes per token")
        if not self.damage >= 0:
            raise StrategyError(f"unit {self.unit} has a damage of {self.damage} nats: at least 0 is needed")


@dataclass(frozen=True, eq=False)
class Evidence:
    """The measurements of one conversation from which a strategy is chosen for it.

    ``statistics`` is None when attention was not observed, ``options`` is empty when damage was not measured.

    Raises:
        StrategyError: statistics or options of a model of another number of layers.
    """

    num_layers: int
    statistics: AttentionStatistics | None = None
    options: Sequence[UnitOption] = ()

    def __post_init__(self) -> None:
        if self.statistics is not None and self.statistics.num_layers != self.num_layers:
            raise StrategyError(
                f"attention statistics of {self.statistics.num_layers} layers for a model of "
                f"{self.num_layers} layers"
            )
        for option in self.options:
            if option.unit[-1] >= self.num_layers:
                raise StrategyError(f"unit {option.unit} for a model of {self.num_layers} layers")


class StrategySelector(ABC):
    """Chooses how one conversation is stored. Selectors hold no state and may be shared by threads."""

    name: ClassVar[str]

    @abstractmethod
    def select(self, evidence: Evidence) -> Strategy:
        """A strategy of ``evidence.num_layers`` layers.

        Where evidence that it needs is missing, a selector compresses less; it does not guess.
        """
