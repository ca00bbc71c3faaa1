"""Chooses which layers of a conversation share their KV: the selectors, by the names of the option."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.errors import StrategyError
from krul_backend.strategy import Pair, Precision, Strategy


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
    """Chooses how one conversation is stored. Selectors hold no state and may be shared by threads.

    Args:
        layer_ratio: the paper's ``r_l``, the share of layers in pairs.
        gamma: the I-R threshold. Each selector takes of both what it needs.
        precision: that of all layers, shared or not.

    Raises:
        StrategyError: gamma or the ratio is out of [0, 1].
    """

    name: ClassVar[str]

    def __init__(
        self, layer_ratio: float = 0.0, *, gamma: float = 0.0, precision: Precision = Precision.NATIVE
    ) -> None:
        for what, value in (("I-R threshold gamma", gamma), ("share of layers r_l", layer_ratio)):
            if not 0 <= value <= 1:
                raise StrategyError(f"the {what} is {value}: a number from 0 to 1 is needed")
        self._layer_ratio = layer_ratio
        self._gamma = gamma
        self._precision = precision

    @abstractmethod
    def select(self, evidence: Evidence) -> Strategy:
        """A strategy of ``evidence.num_layers`` layers.

        Where evidence that it needs is missing, a selector compresses less; it does not guess.
        """


def num_shared_pairs(num_layers: int, layer_ratio: float) -> int:
    """The smallest number of pairs whose layers reach ``|S| >= N * r_l`` (Krul, Algorithm 1, line 20).

    ``N`` counts all layers, not only those that may be shared. A ratio of 0 asks for no pair at all; the
    listing, which tests after it has added a pair, would share one.
    """
    # Without rounding, 50 * 0.56 = 28.000000000000004 would ask for a pair too many.
    return math.ceil(round(num_layers * layer_ratio, 9) / 2)


class UnsharedSelector(StrategySelector):
    """Stores every layer alone, all at one precision."""

    name = "none"

    def select(self, evidence: Evidence) -> Strategy:
        return Strategy.from_pairs(evidence.num_layers, precision=self._precision)


class MiniCacheSelector(StrategySelector):
    """Shares neighbours ``(m, m + 1), (m + 2, m + 3), ...`` from the middle layer ``m = N // 2`` to the last.

    MiniCache (Liu et al., 2024) shares from a start layer, the middle of the model, to the last layer. To be
    comparable at equal bytes, at most as many pairs are taken as ``r_l`` asks for, the deepest first: that is
    MiniCache with a later start layer. The deep half sets the upper bound, about ``r_l = 0.5``.
    """

    name = "minicache"

    def select(self, evidence: Evidence) -> Strategy:
        num_layers = evidence.num_layers
        deep_pairs = [(i, i + 1) for i in range(num_layers // 2, num_layers - 1, 2)]
        num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), len(deep_pairs))
        return Strategy.from_pairs(num_layers, deep_pairs[len(deep_pairs) - num_pairs :], self._precision)


class KrulSelector(StrategySelector):
    """Chooses pairs by Krul's Algorithm 1, preemptive compression strategy selection.

    Layers below the I-R threshold ``gamma`` are left out; ``initial_recent_layers`` states which queries
    that mean is taken over. All pairs of the others are visited by ascending attention distance, ties by
    ``(i, j)``; a pair is taken if neither layer is in one yet, until ``|S| >= N * r_l``. If the I-R layers
    run out first, fewer layers are shared. Without statistics nothing is shared.
    """

    name = "krul"

    def select(self, evidence: Evidence) -> Strategy:
        num_layers, statistics = evidence.num_layers, evidence.statistics
        pairs: list[Pair] = []
        if statistics is not None:
            layers = initial_recent_layers(statistics, self._gamma)
            num_pairs = min(num_shared_pairs(num_layers, self._layer_ratio), len(layers) // 2)
            pairs = self._choose_pairs(pair_distances(statistics, layers), layers, num_pairs)
        return Strategy.from_pairs(num_layers, pairs, self._precision)

    def _choose_pairs(
        self, distances: list[tuple[float, Pair]], layers: list[int], num_pairs: int
    ) -> list[Pair]:
        """Choose ``num_pairs`` disjoint pairs of ``layers``; at most half as many as there are layers."""
        pairs: list[Pair] = []
        shared: set[int] = set()
        for _, (i, j) in distances:
            if len(pairs) == num_pairs:
                break
            if i not in shared and j not in shared:
                pairs.append((i, j))
                shared |= {i, j}
        return pairs


def initial_recent_layers(statistics: AttentionStatistics, gamma: float) -> list[int]:
    """Layers whose mean attention on the first and last 10% of tokens is at least ``gamma``, ascending.

    Krul, section 4.2 and Algorithm 1, lines 1 to 9: a layer is left out if that mean is below gamma. The
    paper averages over all heads and all positions of the conversation. Here the mean runs over all heads
    and over the query rows that were kept, and the 10% are those of the tokens that the row sees. The mean
    depends strongly on which rows these are, so a threshold holds only for one way of keeping rows.
    Without any row the list is empty.
    """
    if statistics.num_rows == 0:
        return []
    mass = statistics.initial_recent_mass().tolist()
    return [layer for layer, share in enumerate(mass) if share >= gamma]


def pair_distances(statistics: AttentionStatistics, layers: list[int]) -> list[tuple[float, Pair]]:
    """``(distance, (i, j))`` of all pairs ``i < j`` of the given layers, in ascending order.

    Equal distances are ordered by ``i``, then by ``j``, so that every rank takes the same pairs. Empty if no
    query row was kept.
    """
    if statistics.num_rows == 0:
        return []
    distances = statistics.distances().tolist()
    return sorted((distances[i][j], (i, j)) for i in layers for j in layers if i < j)


SELECTORS: dict[str, type[StrategySelector]] = {
    kind.name: kind for kind in (UnsharedSelector, KrulSelector, MiniCacheSelector)
}


def make_selector(name: str, *, layer_ratio: float, gamma: float, precision: Precision) -> StrategySelector:
    """The selector called ``name``.

    Raises:
        StrategyError: an unknown name, or options that are out of range.
    """
    if name not in SELECTORS:
        raise StrategyError(f"strategy {name!r} is unknown (accepted: {', '.join(SELECTORS)})")
    return SELECTORS[name](layer_ratio, gamma=gamma, precision=precision)
