from __future__ import annotations

import itertools
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.baselines import FixedSelector, MatchingSelector, RandomSelector, SeededEvidence
from krul_backend.attention.statistics import AttentionStatistics
from krul_backend.codec.pairs.selectors import (
    SELECTORS,
    Evidence,
    KrulSelector,
    MiniCacheSelector,
    UnsharedSelector,
    make_selector,
)
from krul_backend.errors import StrategyError
from krul_backend.strategy.strategy import Pair, Precision
from tests.support.strategy_builders import attention_evidence, make_statistics

RATIOS = st.sampled_from([0.25, 1 / 3, 0.5, 0.75, 1.0])


def algorithm_1(
    distances: list[list[float]], mass: list[float], gamma: float, layer_ratio: float
) -> set[Pair]:
    """The listing of the paper, line by line (line 20 tests after a pair has been added)."""
    num_layers = len(mass)
    non_initial_recent: set[int] = set()
    for i in range(num_layers):
        if mass[i] < gamma:
            non_initial_recent |= {i}
    remaining = [i for i in range(num_layers) if i not in non_initial_recent]
    all_distances = [(distances[i][j], j, i) for i in remaining for j in remaining if i > j]
    all_distances.sort()
    shared: set[int] = set()
    pairs: set[Pair] = set()
    for _, j, i in all_distances:
        if i not in shared and j not in shared:
            shared |= {i, j}
            pairs |= {(j, i)}
        else:
            continue
        if len(shared) >= num_layers * layer_ratio:
            break
    return pairs


def test_krul_is_algorithm_1_on_1000_random_matrices() -> None:
    rng = random.Random(1)
    num_pairs_seen = set()
    for _ in range(1000):
        num_layers = rng.randint(2, 16)
        # Few distinct values: ties must be broken in one way.
        distances = [[rng.randint(1, 40) / 8 for _ in range(num_layers)] for _ in range(num_layers)]
        for i in range(num_layers):
            for j in range(i):
                distances[i][j] = distances[j][i]
        mass = [rng.random() for _ in range(num_layers)]
        gamma, layer_ratio = rng.choice([0.0, 0.3, 0.6]), rng.choice([0.125, 0.25, 0.5, 0.75, 1.0])
        evidence = Evidence(num_layers, make_statistics(distances, mass))
        strategy = KrulSelector(layer_ratio, gamma=gamma).select(evidence)
        assert set(strategy.pairs) == algorithm_1(distances, mass, gamma, layer_ratio)
        num_pairs_seen.add(len(strategy.pairs))
    assert num_pairs_seen >= {0, 1, 2, 3, 4, 5, 6}


def test_krul_shares_only_layers_at_or_above_gamma() -> None:
    distances = [[0.0, 1.0, 2.0], [1.0, 0.0, 3.0], [2.0, 3.0, 0.0]]
    evidence = Evidence(3, make_statistics(distances, [0.5, 0.49, 0.9]))
    assert KrulSelector(gamma=0.5, layer_ratio=0.5).select(evidence).pairs == ((0, 2),)


def total_distance(evidence: Evidence, pairs: tuple[Pair, ...]) -> float:
    assert evidence.statistics is not None
    distances = evidence.statistics.distances()
    return sum(float(distances[i, j]) for i, j in pairs)


@settings(max_examples=60)
@given(attention_evidence(max_layers=7), RATIOS)
def test_matching_has_the_least_sum_of_all_choices_of_as_many_pairs(
    evidence: Evidence, layer_ratio: float
) -> None:
    assert evidence.statistics is not None
    strategy = MatchingSelector(gamma=0.5, layer_ratio=layer_ratio).select(evidence)
    mass = evidence.statistics.initial_recent_mass().tolist()
    layers = [layer for layer in range(evidence.num_layers) if mass[layer] >= 0.5]
    num_pairs = len(KrulSelector(gamma=0.5, layer_ratio=layer_ratio).select(evidence).pairs)
    assert len(strategy.pairs) == num_pairs
    assert {layer for pair in strategy.pairs for layer in pair} <= set(layers)
    choices = [
        pairs
        for pairs in itertools.combinations(itertools.combinations(layers, 2), num_pairs)
        if len({layer for pair in pairs for layer in pair}) == 2 * num_pairs
    ]
    best = min(total_distance(evidence, pairs) for pairs in choices)
    assert total_distance(evidence, strategy.pairs) == pytest.approx(best, abs=1e-9)


def test_matching_sees_what_the_greedy_search_misses() -> None:
    # The nearest pair (1, 2) leaves 0 and 3 to each other.
    distances = [[0.0, 2.0, 9.0, 9.0], [2.0, 0.0, 1.0, 9.0], [9.0, 1.0, 0.0, 2.0], [9.0, 9.0, 2.0, 0.0]]
    evidence = Evidence(4, make_statistics(distances, [1.0] * 4))
    assert KrulSelector(gamma=0.5, layer_ratio=1.0).select(evidence).pairs == ((0, 3), (1, 2))
    assert MatchingSelector(gamma=0.5, layer_ratio=1.0).select(evidence).pairs == ((0, 1), (2, 3))


@pytest.mark.parametrize(
    ("num_layers", "layer_ratio", "pairs"),
    [
        (12, 0.5, ((6, 7), (8, 9), (10, 11))),
        (12, 0.25, ((8, 9), (10, 11))),
        (12, 0.0, ()),
        (12, 1.0, ((6, 7), (8, 9), (10, 11))),
        (13, 0.5, ((6, 7), (8, 9), (10, 11))),
        (1, 1.0, ()),
    ],
)
def test_minicache_shares_the_deepest_pairs_of_the_deep_half(
    num_layers: int, layer_ratio: float, pairs: tuple[Pair, ...]
) -> None:
    assert MiniCacheSelector(layer_ratio).select(Evidence(num_layers)).pairs == pairs


@pytest.mark.parametrize(
    ("layer_ratio", "pairs"),
    [(0.5, ((3, 4), (5, 6), (7, 8))), (0.0, ()), (1.0, ((0, 1), (2, 3), (4, 5), (6, 7), (8, 9), (10, 11)))],
)
def test_fixed_shares_neighbours_around_the_middle(layer_ratio: float, pairs: tuple[Pair, ...]) -> None:
    assert FixedSelector(layer_ratio).select(Evidence(12)).pairs == pairs


def test_random_pairs_depend_on_the_conversation_and_on_nothing_else() -> None:
    strategies = [RandomSelector(0.5).select(SeededEvidence(16, conversation_seed=n)) for n in range(50)]
    assert strategies[3] == RandomSelector(0.5).select(SeededEvidence(16, conversation_seed=3))
    assert all(len(strategy.pairs) == 4 for strategy in strategies)
    assert len({strategy.pairs for strategy in strategies}) > 45
    shared = {layer for strategy in strategies for pair in strategy.pairs for layer in pair}
    assert shared == set(range(16))


@settings(max_examples=60)
@given(st.integers(1, 40), st.integers(0, 100))
def test_all_selectors_share_as_many_layers_as_asked_for(num_layers: int, percent: int) -> None:
    zeros = [[0.0] * num_layers for _ in range(num_layers)]
    evidence = Evidence(num_layers, make_statistics(zeros, [1.0] * num_layers))
    ratio = percent / 100
    # |S| >= N r_l with whole pairs, in exact arithmetic
    asked = -(-num_layers * percent // 200)
    expected = min(asked, num_layers // 2)
    selectors = [KrulSelector(gamma=0.5, layer_ratio=ratio), RandomSelector(ratio), FixedSelector(ratio)]
    if num_layers <= 20:
        selectors.append(MatchingSelector(gamma=0.5, layer_ratio=ratio))
    for selector in selectors:
        assert len(selector.select(evidence).pairs) == expected, selector.name
    minicache = MiniCacheSelector(ratio).select(evidence)
    assert len(minicache.pairs) == min(asked, (num_layers - num_layers // 2) // 2)


@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_without_statistics_no_pairs_are_matched(num_layers: int) -> None:
    selector = MatchingSelector(layer_ratio=0.5, gamma=0.5, precision=Precision.INT8)
    strategy = selector.select(Evidence(num_layers))
    assert strategy == UnsharedSelector(precision=Precision.INT8).select(Evidence(num_layers))


@pytest.mark.parametrize("name", SELECTORS)
@pytest.mark.parametrize("num_layers", [1, 2, 7])
def test_without_evidence_nothing_is_guessed(name: str, num_layers: int) -> None:
    selector = make_selector(name, layer_ratio=0.5, gamma=0.5, precision=Precision.INT8)
    strategy = selector.select(Evidence(num_layers))
    assert selector.name == name
    assert len(strategy.layers) == num_layers
    if name == "krul":
        assert strategy.pairs == ()
    assert {layer.precision for layer in strategy.layers} == {Precision.INT8}


@pytest.mark.parametrize("kind", [KrulSelector, MatchingSelector])
def test_statistics_without_a_row_share_nothing(kind: type[KrulSelector]) -> None:
    selector = kind(layer_ratio=1.0)
    evidence = Evidence(4, AttentionStatistics.zero(4, 2))
    assert selector.select(evidence).is_lossless


def test_unshared_is_lossless_at_native_precision() -> None:
    assert UnsharedSelector().select(Evidence(3)).is_lossless
    assert not UnsharedSelector(precision=Precision.INT4).select(Evidence(3)).is_lossless


def test_an_unknown_selector_is_answered_with_the_names() -> None:
    with pytest.raises(StrategyError, match=r"'crul' is unknown \(accepted: none, krul, minicache"):
        make_selector("crul", layer_ratio=0.5, gamma=0.5, precision=Precision.NATIVE)


@pytest.mark.parametrize(
    ("name", "gamma", "layer_ratio", "message"),
    [
        ("krul", 1.5, 0.5, "gamma is 1.5"),
        ("minicache", 0.5, -0.1, "r_l is -0.1"),
        ("minicache", 0.5, float("nan"), "r_l is nan"),
    ],
)
def test_options_out_of_range_are_refused(name: str, gamma: float, layer_ratio: float, message: str) -> None:
    with pytest.raises(StrategyError, match=message):
        make_selector(name, layer_ratio=layer_ratio, gamma=gamma, precision=Precision.NATIVE)


def test_statistics_of_another_model_are_refused() -> None:
    with pytest.raises(StrategyError, match="statistics of 2 layers for a model of 3 layers"):
        Evidence(3, make_statistics([[0.0, 1.0], [1.0, 0.0]], [1.0, 1.0]))
