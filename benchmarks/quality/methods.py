"""The rows of the benchmark: ways to store a history."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from enum import Enum

from benchmarks.baselines import RandomSelector
from krul_backend.codec.options import Sharing
from krul_backend.strategy.budget import BudgetSelector
from krul_backend.strategy.fixed import FixedSelector, MiniCacheSelector, UnsharedSelector
from krul_backend.strategy.interface import Evidence, StrategySelector
from krul_backend.strategy.krul import KrulSelector
from krul_backend.strategy.matching import MatchingSelector
from krul_backend.strategy.strategy import Precision, Strategy

LAYER_RATIOS = (0.25, 0.5, 0.75)
"""r_l of the sharing rows. r_l = 0 shares nothing: that is the rows `full`, `int8` and `int4`."""

BUDGET_LIMITS = (0.001, 0.01, 0.05)
WIDE_BUDGET_LIMITS = (0.2, 1.0)
"""Predictions are above the truth as a rule: these show what lies behind a budget that sounds too wide."""

PRECISIONS = (Precision.NATIVE, Precision.INT8, Precision.INT4)
EVICTION_RATIOS = (4 / 3, 2.0, 4.0, 8.0, 16.0)
SPLIT_RATIO = 0.5
SLERP = Sharing.SLERP.value


class Region(Enum):
    """Which of the chosen pairs are really shared: with a layer that carries the recall, or with none."""

    ALL = "all"
    INSIDE = "inside"
    APART = "apart"


@dataclass(frozen=True)
class Compression:
    """A selector's pairs at a precision.

    ``precision`` None leaves the selector's own. ``allowed`` are the precisions of measured options that the
    selector may look at. ``sharing`` names a codec.
    """

    name: str
    family: str
    selector: StrategySelector = field(repr=False)
    precision: Precision | None = None
    layer_ratio: float | None = None
    limit: float | None = None
    sharing: str = SLERP
    region: Region = Region.ALL
    recall_layers: frozenset[int] = frozenset()
    allowed: tuple[Precision, ...] | None = None

    @property
    def needs_damage(self) -> bool:
        return self.limit is not None

    def strategy(self, evidence: Evidence) -> Strategy:
        if self.allowed is not None:
            options = [option for option in evidence.options if option.precision in self.allowed]
            evidence = replace(evidence, options=options)
        chosen = self.selector.select(evidence)
        if self.precision is None:
            return chosen
        pairs = [pair for pair in chosen.pairs if self._is_shared(pair)]
        return Strategy.from_pairs(evidence.num_layers, pairs, self.precision)

    def _is_shared(self, pair: tuple[int, int]) -> bool:
        is_inside = not self.recall_layers.isdisjoint(pair)
        return self.region is Region.ALL or is_inside == (self.region is Region.INSIDE)


@dataclass(frozen=True)
class Eviction:
    """Keeps so many tokens that the bytes are those of a compression by ``ratio``."""

    name: str
    ratio: float
    family: str = "h2o"


Method = Compression | Eviction


def reference() -> Compression:
    """The lossless row, which the others are compared with."""
    return Compression("full", "full", UnsharedSelector(), Precision.NATIVE)


def all_methods(
    native_token_bytes: float,
    gamma: float,
    recall_layers: Collection[int],
    sharings: Sequence[str],
    more_limits: Sequence[float] = (),
) -> list[Method]:
    """All rows. ``native_token_bytes``: of one layer. ``recall_layers``: may be empty, then no row is split.
    ``sharings``: the codecs' names; those beyond SLERP get rows with the pairs of Algorithm 1, and the budget
    chooses among pairs that share by the last one. ``more_limits``: budgets beside the usual ones."""
    alone = [
        Compression(precision.value, precision.value, UnsharedSelector(), precision)
        for precision in (Precision.INT8, Precision.INT4, Precision.INT2)
    ]
    return [
        reference(),
        *alone,
        *_sharing_rows(gamma, sharings),
        *_split_rows(gamma, sharings, recall_layers),
        *_budget_rows(native_token_bytes, sharings[-1], more_limits),
        *(Eviction(f"h2o {ratio:.2f}x", ratio) for ratio in EVICTION_RATIOS),
    ]


def _selectors(gamma: float, layer_ratio: float) -> dict[str, StrategySelector]:
    return {
        "minicache": MiniCacheSelector(layer_ratio),
        "krul-fixed": FixedSelector(layer_ratio),
        "krul": KrulSelector(gamma, layer_ratio),
        "matching": MatchingSelector(gamma, layer_ratio),
        "random": RandomSelector(layer_ratio),
    }


def _sharing_rows(gamma: float, sharings: Sequence[str]) -> list[Compression]:
    rows = []
    for layer_ratio in LAYER_RATIOS:
        selectors = _selectors(gamma, layer_ratio)
        if layer_ratio > 0.5:
            # it shares only the deep half, so this would be the row before
            del selectors["minicache"]
        families = [(name, selector, SLERP) for name, selector in selectors.items()]
        families += [(name, selectors["krul"], name) for name in sharings if name != SLERP]
        rows += [
            Compression(
                name=f"{family} r={layer_ratio} {precision.value}",
                family=family,
                selector=selector,
                precision=precision,
                layer_ratio=layer_ratio,
                sharing=sharing,
            )
            for family, selector, sharing in families
            for precision in PRECISIONS
        ]
    return rows


def _split_rows(gamma: float, sharings: Sequence[str], recall_layers: Collection[int]) -> list[Compression]:
    if not recall_layers:
        return []
    return [
        replace(
            row,
            name=f"{row.name}, {region.value}",
            region=region,
            recall_layers=frozenset(recall_layers),
        )
        for row in _sharing_rows(gamma, sharings)
        if row.layer_ratio == SPLIT_RATIO and row.precision is Precision.NATIVE
        for region in (Region.INSIDE, Region.APART)
    ]


def _budget_rows(native_token_bytes: float, sharing: str, more_limits: Sequence[float]) -> list[Compression]:
    """Each limit with all precisions, and with none below the one named."""
    coarser = [None, *PRECISIONS]
    return [
        Compression(
            name=f"budget {limit}" + ("" if least is None else f" {least.value}"),
            family="budget",
            selector=BudgetSelector(limit, native_token_bytes),
            limit=limit,
            sharing=sharing,
            allowed=None if least is None else PRECISIONS[: PRECISIONS.index(least) + 1],
        )
        for limit in sorted({*BUDGET_LIMITS, *WIDE_BUDGET_LIMITS, *more_limits})
        for least in (coarser if limit in BUDGET_LIMITS else [None])
    ]
