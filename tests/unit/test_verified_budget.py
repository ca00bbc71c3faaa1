from __future__ import annotations

import math

import pytest

from krul_backend.strategy.interface import Evidence, UnitOption
from krul_backend.strategy.strategy import Precision, Strategy
from krul_backend.strategy.verified import select_verified

DAMAGE = {Precision.NATIVE: 0.0, Precision.INT8: 0.001, Precision.INT4: 0.01, Precision.INT2: 0.1}
NUM_BYTES = {Precision.INT8: 8, Precision.INT4: 4, Precision.INT2: 2}
EVIDENCE = Evidence(
    4, options=[UnitOption((n,), p, NUM_BYTES[p], DAMAGE[p]) for n in range(4) for p in NUM_BYTES]
)


def predicted(strategy: Strategy) -> float:
    return sum(DAMAGE[layer.precision] for layer in strategy.layers)


def test_a_prediction_that_holds_is_probed_once() -> None:
    choice = select_verified(0.04, 16, EVIDENCE, predicted)
    assert {layer.precision for layer in choice.strategy.layers} == {Precision.INT4}
    assert choice.measured == ((choice.strategy, pytest.approx(0.04)),)


@pytest.mark.parametrize("factor", [2.0, 5.0, 30.0])
def test_a_conversation_dearer_than_predicted_is_compressed_less(factor: float) -> None:
    choice = select_verified(0.04, 16, EVIDENCE, lambda strategy: factor * predicted(strategy))
    assert len(choice.measured) == 2
    assert choice.measured[0][1] == pytest.approx(factor * 0.04)
    assert choice.measured[1] == (choice.strategy, pytest.approx(factor * predicted(choice.strategy)))
    assert 0 < factor * predicted(choice.strategy) <= 0.04


@pytest.mark.parametrize("kl", [1.0, math.inf, math.nan])
def test_what_never_passes_is_stored_natively(kl: float) -> None:
    choice = select_verified(0.04, 16, EVIDENCE, lambda strategy: kl)
    assert choice.strategy.is_lossless
    assert 1 <= len(choice.measured) <= 3


def test_the_number_of_probes_is_bounded() -> None:
    choice = select_verified(0.04, 16, EVIDENCE, lambda strategy: 0.041, max_probes=2)
    assert choice.strategy.is_lossless
    assert len(choice.measured) == 2


def test_nothing_to_compress_needs_no_probe() -> None:
    choice = select_verified(0.0, 16, EVIDENCE, predicted)
    assert choice.strategy.is_lossless
    assert choice.measured == ()
