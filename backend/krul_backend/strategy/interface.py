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
class LayerOption:
    """One way to store one layer: alone, at one precision.

    ``num_bytes`` is bytes per token. ``damage`` is the predicted KL divergence in nats of the next-token
    distributions, 0 for a native layer; infinity rules the option out.

    Raises:
        StrategyError: a negative layer, bytes that are not positive, or a damage below 0.
    """

    layer: int
    precision: Precision
    num_bytes: float
    damage: float

    def __post_init__(self) -> None:
        if self.layer < 0:
            raise StrategyError(f"{self.layer} is not a layer")
        if not 0 < self.num_bytes < math.inf:
            raise StrategyError(f"layer {self.layer} stored in {self.num_bytes} bytes per token")
        if not self.damage >= 0:
            raise StrategyError(f"layer {self.layer} has a damage of {self.damage} nats, which is below 0")


@dataclass(frozen=True, eq=False)
class Evidence:
    """The measurements of one conversation from which a strategy is chosen for it.

    ``statistics`` is None when attention was not observed, ``options`` is empty when damage was not measured.

    Raises:
        StrategyError: statistics or options of a model of another number of layers.
    """

    num_layers: int
    statistics: AttentionStatistics | None = None
    options: Sequence[LayerOption] = ()

    def __post_init__(self) -> None:
        if self.statistics is not None and self.statistics.num_layers != self.num_layers:
            raise StrategyError(
                f"attention statistics of {self.statistics.num_layers} layers for a model of "
                f"{self.num_layers} layers"
            )
        for option in self.options:
            if option.layer >= self.num_layers:
                raise StrategyError(f"layer {option.layer} of a model of {self.num_layers} layers")


class StrategySelector(ABC):
    """Chooses how one conversation is stored. Selectors hold no state and may be shared by threads."""

    name: ClassVar[str]

    @abstractmethod
    def select(self, evidence: Evidence) -> Strategy:
        """A strategy of ``evidence.num_layers`` layers.

        Where evidence that it needs is missing, a selector compresses less; it does not guess.
        """
