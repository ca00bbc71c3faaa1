from __future__ import annotations

import itertools
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import StrategyError
from krul_backend.strategy.budget import BudgetSelector
from krul_backend.strategy.interface import Evidence, LayerOption
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.strategy_builders import measured_options

NATIVE_BYTES = 16.0


def native(layer: int, num_bytes: float = NATIVE_BYTES) -> LayerOption:
    return LayerOption(layer, Precision.NATIVE, num_bytes, 0.0)


def cost(strategy: Strategy, options: list[LayerOption]) -> tuple[float, float]:
    """Bytes and damage of a strategy: the table says what each of its layers costs."""
    assert not strategy.pairs
    table = {(option.layer, option.precision): option for option in options}
    chosen = [table[layer, each.precision] for layer, each in enumerate(strategy.layers)]
    return sum(option.num_bytes for option in chosen), sum(option.damage for option in chosen)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), measured_options(n))), st.integers(0, 24))
def test_the_choice_is_the_best_of_all(case: tuple[int, list[LayerOption]], eighths: int) -> None:
    num_layers, options = case
    limit = eighths / 8
    table = [*options, *(native(layer) for layer in range(num_layers))]
    strategy = BudgetSelector(limit, NATIVE_BYTES).select(Evidence(num_layers, options=options))
    num_bytes, damage = cost(strategy, table)
    of_layer = [[option for option in table if option.layer == layer] for layer in range(num_layers)]
    best = min(
        sum(option.num_bytes for option in choice)
        for choice in itertools.product(*of_layer)
        if sum(option.damage for option in choice) <= limit
    )
    assert damage <= limit
    assert num_bytes == best


def model_options(num_layers: int) -> list[LayerOption]:
    """Layers of very different sensitivity at four precisions."""
    return [
        LayerOption(layer, precision, num_bytes, math.exp(3 * math.sin(2.4 * layer)) * error)
        for layer in range(num_layers)
        for precision, num_bytes, error in (
            (Precision.INT8, 260, 1e-7),
            (Precision.INT4, 132, 3e-5),
            (Precision.INT2, 68, 3e-3),
            (Precision.INT0, 4, 3e-2),
        )
    ]


def test_more_damage_allowed_means_fewer_bytes_on_a_large_model() -> None:
    options = model_options(80)
    table = [*options, *(native(layer, 512) for layer in range(80))]
    sizes = []
    for limit in (0.0, 1e-4, 1e-2, 1.0, 1e3):
        strategy = BudgetSelector(limit, 512).select(Evidence(80, options=options))
        num_bytes, damage = cost(strategy, table)
        assert damage <= limit * (1 + 1e-6)
        sizes.append(num_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 80 * 512
    assert sizes[-1] == 80 * 4


def test_options_over_the_limit_are_left_out() -> None:
    options = [LayerOption(0, Precision.INT0, 1, math.inf), LayerOption(1, Precision.INT4, 4, 0.5)]
    strategy = BudgetSelector(0.5, NATIVE_BYTES).select(Evidence(2, options=options))
    assert [layer.precision for layer in strategy.layers] == [Precision.NATIVE, Precision.INT4]


@pytest.mark.parametrize(
    ("layer", "num_bytes", "damage", "message"),
    [
        (-1, 1, 0, "-1 is not a layer"),
        (0, 0, 0, "stored in 0 bytes"),
        (0, math.inf, 0, "stored in inf bytes"),
        (0, 1, -0.1, "damage of -0.1"),
        (0, 1, math.nan, "damage of nan"),
    ],
)
def test_impossible_options_are_refused(layer: int, num_bytes: float, damage: float, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        LayerOption(layer, Precision.INT4, num_bytes, damage)


def test_options_of_another_model_are_refused() -> None:
    with pytest.raises(StrategyError, match="layer 3 of a model of 3 layers"):
        Evidence(3, options=[native(3)])
