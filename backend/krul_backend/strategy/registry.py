"""Makes selectors by the names that a configuration uses."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from krul_backend.errors import StrategyError
from krul_backend.strategy.fixed import FixedSelector, MiniCacheSelector, UnsharedSelector
from krul_backend.strategy.interface import StrategySelector
from krul_backend.strategy.krul import KrulSelector
from krul_backend.strategy.matching import MatchingSelector
from krul_backend.strategy.strategy import Precision


@dataclass(frozen=True)
class SelectorOptions:
    """The options of all selectors; each takes those that it needs.

    ``gamma``: I-R threshold in [0, 1]. ``layer_ratio``: the paper's ``r_l``. ``precision``: of all layers.
    """

    gamma: float
    layer_ratio: float
    precision: Precision


_SELECTORS: Mapping[str, Callable[[SelectorOptions], StrategySelector]] = {
    UnsharedSelector.name: lambda o: UnsharedSelector(o.precision),
    KrulSelector.name: lambda o: KrulSelector(o.gamma, o.layer_ratio, o.precision),
    MatchingSelector.name: lambda o: MatchingSelector(o.gamma, o.layer_ratio, o.precision),
    MiniCacheSelector.name: lambda o: MiniCacheSelector(o.layer_ratio, o.precision),
    FixedSelector.name: lambda o: FixedSelector(o.layer_ratio, o.precision),
}

SELECTOR_NAMES = tuple(_SELECTORS)


def make_selector(name: str, options: SelectorOptions) -> StrategySelector:
    """The selector called ``name``.

    Raises:
        StrategyError: an unknown name, or options that the selector cannot work with.
    """
    if name not in _SELECTORS:
        raise StrategyError(f"strategy {name!r} is unknown (accepted: {', '.join(SELECTOR_NAMES)})")
    return _SELECTORS[name](options)
