from __future__ import annotations

import math
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import StrategyError
from krul_backend.strategy.budget import BudgetSelector, worthwhile_options
from krul_backend.strategy.interface import Evidence, UnitOption
from krul_backend.strategy.strategy import Precision, Strategy
from tests.support.strategy_builders import measured_options

NATIVE_BYTES = 16.0


def native(layer: int) -> UnitOption:
    return UnitOption((layer,), Precision.NATIVE, NATIVE_BYTES, 0.0)


def all_choices(options: list[UnitOption], uncovered: frozenset[int]) -> Iterator[list[UnitOption]]:
    if not uncovered:
        yield []
        return
    first = min(uncovered)
    for option in options:
        if first in option.unit and uncovered.issuperset(option.unit):
            for rest in all_choices(options, uncovered - set(option.unit)):
                yield [option, *rest]


def cost(strategy: Strategy, options: list[UnitOption]) -> tuple[float, float]:
    """Bytes and damage of a strategy: the table says what each of its units costs."""
    table = {(option.unit, option.precision): option for option in options}
    chosen = [table[unit, strategy.layers[unit[0]].precision] for unit in strategy.units]
    return sum(option.num_bytes for option in chosen), sum(option.damage for option in chosen)


@settings(max_examples=150, deadline=None)
@given(st.integers(1, 5).flatmap(lambda n: st.tuples(st.just(n), measured_options(n))), st.integers(0, 24))
def test_the_choice_is_the_best_of_all(case: tuple[int, list[UnitOption]], eighths: int) -> None:
    num_layers, options = case
    limit = eighths / 8
    table = [*options, *(native(layer) for layer in range(num_layers))]
    strategy = BudgetSelector(limit, NATIVE_BYTES).select(Evidence(num_layers, options=options))
    num_bytes, damage = cost(strategy, table)
    best = min(
        sum(option.num_bytes for option in choice)
        for choice in all_choices(table, frozenset(range(num_layers)))
        if sum(option.damage for option in choice) <= limit
    )
    assert damage <= limit
    assert num_bytes == best


def model_options(num_layers: int) -> list[UnitOption]:
    """Layers of very different sensitivity at four precisions, and neighbours shared."""
    options = []
    for layer in range(num_layers):
        sensitivity = math.exp(3 * math.sin(2.4 * layer))
        for precision, num_bytes, error in (
            (Precision.INT8, 260, 1e-7),
            (Precision.INT4, 132, 3e-5),
            (Precision.INT2, 68, 3e-3),
            (Precision.INT0, 4, 3e-2),
        ):
            options.append(UnitOption((layer,), precision, num_bytes, sensitivity * error))
            if layer % 3 == 0 and layer + 1 < num_layers and precision is not Precision.INT0:
                options.append(
                    UnitOption((layer, layer + 1), precision, 1.1 * num_bytes, sensitivity * (error + 1e-3))
                )
    return options


def test_more_damage_allowed_means_fewer_bytes_on_a_large_model() -> None:
    options = model_options(80)
    table = [*options, *(UnitOption((n,), Precision.NATIVE, 512, 0.0) for n in range(80))]
    sizes = []
    for limit in (0.0, 1e-4, 1e-2, 1.0, 1e3):
        strategy = BudgetSelector(limit, 512).select(Evidence(80, options=options))
        num_bytes, damage = cost(strategy, table)
        assert damage <= limit * (1 + 1e-6)
        sizes.append(num_bytes)
    assert sizes == sorted(sizes, reverse=True)
    assert sizes[0] == 80 * 512
    assert sizes[-1] == 80 * 4


def test_a_pair_is_taken_where_it_pays() -> None:
    options = [
        UnitOption((0,), Precision.INT4, 4, 0.5),
        UnitOption((1,), Precision.INT4, 4, 0.5),
        UnitOption((0, 1), Precision.INT4, 5, 0.6),
    ]
    assert BudgetSelector(0.6, 16).select(Evidence(3, options=options)).pairs == ((0, 1),)
    assert BudgetSelector(0.55, 16).select(Evidence(3, options=options)).pairs == ()


def test_options_that_cannot_help_are_left_out() -> None:
    good = UnitOption((0,), Precision.INT4, 4, 0.5)
    partner = UnitOption((1,), Precision.INT8, 8, 0.1)
    options = [
        good,
        partner,
        UnitOption((0,), Precision.INT8, 8, 0.5),
        UnitOption((0,), Precision.INT2, 2, 0.9),
        UnitOption((0,), Precision.INT0, 1, math.inf),
        UnitOption((0, 1), Precision.INT8, 12, 0.6),
        UnitOption((0, 1), Precision.INT4, 11, 0.7),
    ]
    assert worthwhile_options(options, 0.8) == [good, partner, options[-1]]


@pytest.mark.parametrize(
    ("unit", "num_bytes", "damage", "message"),
    [
        ((), 1, 0, "neither"),
        ((1, 0), 1, 0, "neither"),
        ((0, 1, 2), 1, 0, "neither"),
        ((-1,), 1, 0, "neither"),
        ((0,), 0, 0, "stored in 0 bytes"),
        ((0,), 1, -0.1, "damage of -0.1"),
        ((0,), 1, math.nan, "damage of nan"),
    ],
)
def test_impossible_options_are_refused(
    unit: tuple[int, ...], num_bytes: float, damage: float, message: str
) -> None:
    with pytest.raises(StrategyError, match=message):
        UnitOption(unit, Precision.INT4, num_bytes, damage)


def test_options_of_another_model_are_refused() -> None:
    with pytest.raises(StrategyError, match=r"unit \(3,\) for a model of 3 layers"):
        Evidence(3, options=[native(3)])
