from __future__ import annotations

import json
import math
import random
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from krul_backend.errors import SensitivityError, StrategyError
from krul_backend.strategy.sensitivity import (
    KL_SATURATED_NATS,
    START_SENSITIVITY,
    DamageKind,
    LayerError,
    SensitivityTable,
)
from krul_backend.strategy.strategy import Precision

ROUNDING, MERGING = DamageKind.ROUNDING, DamageKind.MERGING
NUM_LAYERS = 6


def truth(layer: int, kind: DamageKind) -> float:
    """From 0.0025 to 0.16 nats per unit of error, as on a small trained model."""
    return 0.005 * 2 ** (layer - 1) * (2.0 if kind is MERGING else 1.0)


def learned(num_probes: int, layers_per_probe: int, noise: float = 0.0, seed: int = 0) -> SensitivityTable:
    """A table after probes of an additive truth, with a common factor of noise per probe."""
    rng = random.Random(seed)
    table = SensitivityTable("m", NUM_LAYERS)
    for _ in range(num_probes):
        errors = [
            LayerError(layer, rng.choice(list(DamageKind)), rng.lognormvariate(-3, 1))
            for layer in rng.sample(range(NUM_LAYERS), layers_per_probe)
        ]
        kl = sum(truth(error.layer, error.kind) * error.error for error in errors)
        table.update(errors, kl * math.exp(rng.gauss(0, noise)))
    return table


def worst_factor(table: SensitivityTable) -> float:
    """How far off the worst sensitivity is, as a factor."""
    logs = [
        math.log(table.predict(LayerError(layer, kind, 1.0)) / truth(layer, kind))
        for layer in range(NUM_LAYERS)
        for kind in DamageKind
    ]
    return math.exp(max(map(abs, logs)))


def test_probes_of_single_layers_teach_each_sensitivity() -> None:
    assert worst_factor(learned(0, 1)) > 100
    assert worst_factor(learned(400, 1)) < 1.1


def test_probes_of_whole_strategies_teach_each_sensitivity() -> None:
    assert worst_factor(learned(600, NUM_LAYERS)) < 1.5


def test_noise_between_conversations_is_averaged_and_reported() -> None:
    table = learned(1500, 1, noise=1.0)
    assert worst_factor(table) < 2
    assert 0.75 < table.spread < 1.3
    assert learned(400, 1).spread < 0.2


def test_deviations_bound_the_damage_of_most_conversations() -> None:
    table = learned(1500, 1, noise=1.0)
    rng = random.Random(7)
    error = LayerError(3, ROUNDING, 0.1)
    above = sum(
        truth(3, ROUNDING) * 0.1 * math.exp(rng.gauss(0, 1)) > table.predict(error, deviations=1.64)
        for _ in range(2000)
    )
    # 5% of a normal distribution lie above 1.64 standard deviations.
    assert 0.01 < above / 2000 < 0.12


def test_a_layer_that_was_never_probed_starts_dear() -> None:
    table = learned(100, 1)
    fresh = SensitivityTable("m", NUM_LAYERS)
    assert fresh.predict(LayerError(0, ROUNDING, 0.25)) == 0.25 * START_SENSITIVITY
    assert fresh.predict(LayerError(0, ROUNDING, 0.25)) > table.predict(LayerError(5, MERGING, 0.25))
    # What is not known widens the margin too.
    assert fresh.predict(LayerError(0, ROUNDING, 1.0), 1.0) > 5 * START_SENSITIVITY


def test_an_outlier_moves_a_known_layer_little() -> None:
    table = learned(400, 1)
    error = LayerError(2, ROUNDING, 0.1)
    before = table.predict(error)
    table.update([error], before * 1e5)
    assert before < table.predict(error) < 2 * before


def test_a_probe_moves_the_unknown_layer_and_not_the_known_one() -> None:
    table = SensitivityTable("m", 2)
    for _ in range(50):
        table.update([LayerError(0, ROUNDING, 0.1)], 0.1)
    known, unknown = LayerError(0, ROUNDING, 0.1), LayerError(1, ROUNDING, 0.1)
    table.update([known, unknown], 0.3)
    assert table.predict(known) == pytest.approx(0.1, rel=0.02)
    assert table.predict(unknown) > 0.11
    assert table.confidence(0, ROUNDING) == pytest.approx(50.5, abs=0.1)
    assert table.confidence(1, ROUNDING) == pytest.approx(0.5, abs=0.1)
    assert table.confidence(1, MERGING) == 0


def test_a_saturated_probe_does_not_make_a_layer_cheaper() -> None:
    table = SensitivityTable("m", 1)
    error = LayerError(0, MERGING, 4.0)
    table.update([error], 2 * KL_SATURATED_NATS)
    assert table.predict(error) == 4.0
    table.update([error], 6.0)
    assert table.predict(error) > 4.0


def test_noise_of_the_model_itself_teaches_nothing() -> None:
    table = SensitivityTable("m", 1)
    for kl in (-1e-7, 0.0, 1e-8):
        table.update([LayerError(0, ROUNDING, 1e-7)], kl)
    table.update([LayerError(0, ROUNDING, 0.0)], 0.1)
    assert table.predict(LayerError(0, ROUNDING, 1.0)) == START_SENSITIVITY
    assert table.confidence(0, ROUNDING) == 0


def test_absurd_probes_do_not_break_the_table() -> None:
    table = SensitivityTable("m", 1)
    for _ in range(2000):
        table.update([LayerError(0, ROUNDING, 5e-324)], 1e300)
    assert 1 < table.predict(LayerError(0, ROUNDING, 1.0), 3.0) < math.inf


probes = st.lists(
    st.tuples(
        st.dictionaries(
            st.integers(0, 2), st.tuples(st.sampled_from(DamageKind), st.floats(0, 1e6)), max_size=3
        ),
        st.floats(0, 1e3),
    ),
    max_size=12,
)


@settings(max_examples=150, deadline=None)
@given(probes, st.floats(0, 1e3), st.floats(1, 10), st.floats(0, 3))
def test_whatever_was_probed_predictions_are_positive_and_grow_with_the_error(
    history: list[tuple[dict[int, tuple[DamageKind, float]], float]],
    size: float,
    factor: float,
    deviations: float,
) -> None:
    table = SensitivityTable("m", 3)
    for errors, kl in history:
        table.update([LayerError(layer, *error) for layer, error in errors.items()], kl)
    for layer in range(3):
        for kind in DamageKind:
            small = table.predict(LayerError(layer, kind, size))
            assert 0 <= small < math.inf
            assert table.predict(LayerError(layer, kind, size * factor)) >= small
            assert table.predict(LayerError(layer, kind, size), deviations) >= small
            assert table.predict(LayerError(layer, kind, 0.0)) == 0
            assert table.predict(LayerError(layer, kind, math.inf)) == math.inf


def test_the_least_known_layer_is_probed_first() -> None:
    table = SensitivityTable("m", 3)
    candidates = [
        [LayerError(layer, kind, error)]
        for layer in range(3)
        for kind in DamageKind
        for error in (1e-9, 0.5, 0.1)
    ]
    asked: list[LayerError] = []
    for _ in range(18):
        index = table.next_probe(candidates)
        assert index is not None
        asked += candidates[index]
        table.update(candidates[index], 0.01)
    cells = [(error.layer, error.kind) for error in asked]
    assert len(set(cells[:6])) == 6
    assert {cells.count(cell) for cell in cells} == {3}
    # 1e-9 cannot be measured; of the others the one closer to a typical budget is asked.
    assert {error.error for error in asked} == {0.1}


def test_no_probe_is_worth_it_without_a_measurable_candidate() -> None:
    table = SensitivityTable("m", 1)
    assert table.next_probe([]) is None
    assert table.next_probe([[], [LayerError(0, ROUNDING, 1e-9)]]) is None
    table.update([LayerError(0, ROUNDING, 0.1)], 0.1)
    assert table.next_probe([[LayerError(0, ROUNDING, 100.0)]]) is None


def test_kinds_of_damage() -> None:
    assert DamageKind.of(Precision.INT4) is ROUNDING
    assert DamageKind.of(Precision.INT0) is MERGING


@pytest.mark.parametrize(
    ("errors", "kl", "message"),
    [
        ([LayerError(6, ROUNDING, 0.1)], 0.1, "layer 6 of a table of 6"),
        ([LayerError(-1, ROUNDING, 0.1)], 0.1, "layer -1"),
        ([LayerError(0, ROUNDING, -0.1)], 0.1, "error of -0.1"),
        ([LayerError(0, ROUNDING, math.nan)], 0.1, "error of nan"),
        ([LayerError(0, ROUNDING, math.inf)], 0.1, "errors"),
        ([LayerError(0, ROUNDING, 0.1)] * 2, 0.1, "twice"),
        ([LayerError(0, ROUNDING, 0.1)], math.nan, "KL of nan"),
        ([LayerError(0, ROUNDING, 0.1)], math.inf, "KL of inf"),
        ([LayerError(0, ROUNDING, 0.1)], -0.1, "KL of -0.1"),
    ],
)
def test_impossible_probes_are_refused(errors: list[LayerError], kl: float, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        SensitivityTable("m", NUM_LAYERS).update(errors, kl)


def test_a_saved_table_predicts_and_learns_as_before(tmp_path: Path) -> None:
    table = learned(100, 3, noise=0.5)
    path = tmp_path / "table.json"
    table.save(path)
    table.save(path)
    assert list(tmp_path.iterdir()) == [path]
    again = SensitivityTable.parse(path.read_bytes(), "m", NUM_LAYERS)
    for _ in range(2):
        for layer in range(NUM_LAYERS):
            for kind in DamageKind:
                error = LayerError(layer, kind, 0.3)
                assert again.predict(error, 1.0) == table.predict(error, 1.0)
                assert again.confidence(layer, kind) == table.confidence(layer, kind)
        for one in (table, again):
            one.update([LayerError(2, MERGING, 0.5)], 0.02)


def test_files_that_are_not_this_table_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "table.json"
    learned(10, 1).save(path)
    content = json.loads(path.read_text())
    for model, num_layers in (("other", NUM_LAYERS), ("m", NUM_LAYERS + 1)):
        with pytest.raises(SensitivityError):
            SensitivityTable.parse(path.read_bytes(), model, num_layers)
    first_row = content["sensitivities"]["rounding"][0]
    damaged = [
        "",
        "[]",
        json.dumps(content)[:-20],
        json.dumps(content | {"format": "krul sensitivity 0"}),
        json.dumps({key: value for key, value in content.items() if key != "spread_variance"}),
        json.dumps(content | {"spread_variance": 0}),
        json.dumps(content | {"sensitivities": {}}),
        json.dumps(content | {"sensitivities": [1, 2]}),
        json.dumps(content | {"sensitivities": content["sensitivities"] | {"merging": None}}),
    ]
    for change in ({"mean": "0"}, {"mean": True}, {"variance": -1.0}, {"num_probes": None}):
        rows = [first_row | change, *content["sensitivities"]["rounding"][1:]]
        damaged.append(json.dumps(content | {"sensitivities": content["sensitivities"] | {"rounding": rows}}))
    for text in damaged:
        path.write_text(text)
        with pytest.raises(SensitivityError, match="the sensitivity table"):
            SensitivityTable.parse(path.read_bytes(), "m", NUM_LAYERS)
