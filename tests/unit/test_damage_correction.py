"""Probes make the budget careful at once and less so slowly, for each kind of text on its own."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from krul_backend.segment import TokenIds
from krul_sglang.engine.budget.correction import (
    HISTORIES_TO_LOOSEN,
    LARGEST_RATIO,
    LONG_TOKENS,
    PROBES_TO_TIGHTEN,
    DamageCorrection,
    budget_share,
    kind_of_text,
)

EXPECTED = 2**-7
"""A power of two: ratios are exact."""
CERTAIN = 1e-9
"""What rounding leaves between two predictions of which both are certain."""


@cache
def prose(number: int = 0) -> TokenIds:
    """A history of tokens that hardly repeat."""
    return np.random.default_rng(number).integers(0, 2000, 700, np.int64)


@cache
def loop(number: int = 0) -> TokenIds:
    """A history that repeats ten tokens."""
    return np.resize(np.random.default_rng(number).integers(0, 2000, 10, np.int64), 700)


@cache
def long_prose(number: int = 0) -> TokenIds:
    return np.random.default_rng(number).integers(0, 2000, LONG_TOKENS, np.int64)


KINDS = (prose, loop, long_prose)

Probe = tuple[Callable[[int], TokenIds], int, float]
"""The kind of text, which history of it, and the measured damage over the expected one."""

probes = st.lists(
    st.tuples(st.sampled_from(KINDS), st.integers(0, 40), st.floats(1e-7, 30) | st.just(math.inf)),
    max_size=150,
)


def observe(correction: DamageCorrection, probe: Probe) -> None:
    text, number, ratio = probe
    correction.observe(EXPECTED * ratio, EXPECTED, text(number))


def after(probes: Sequence[Probe]) -> DamageCorrection:
    correction = DamageCorrection()
    for probe in probes:
        observe(correction, probe)
    return correction


def factors(correction: DamageCorrection) -> list[float]:
    return [correction.factor(text()) for text in KINDS]


def many(text: Callable[[int], TokenIds], ratio: float, count: int = 40, first: int = 0) -> list[Probe]:
    """Probes of different histories."""
    return [(text, first + number, ratio) for number in range(count)]


def test_texts_are_told_apart_by_how_many_of_their_last_tokens_differ() -> None:
    assert (kind_of_text(prose()), kind_of_text(loop())) == ("varied", "repetitive")
    assert kind_of_text(np.concatenate([prose(), loop()])) == "repetitive"
    assert kind_of_text(np.concatenate([loop(), prose()])) == "varied"
    assert kind_of_text(long_prose()) == "long"
    assert kind_of_text(long_prose()[1:]) == "varied"
    assert kind_of_text(np.resize(loop(), LONG_TOKENS)) == "repetitive"
    quarter = np.arange(1024, dtype=np.int64) % 128
    assert kind_of_text(quarter) == "varied"
    assert kind_of_text(quarter % 127) == "repetitive"


def test_varied_texts_may_be_expected_to_lose_less_than_their_budget() -> None:
    """What they lose differs most, and the budget is for nearly every conversation, not for their mean."""
    assert [budget_share(text()) for text in KINDS] == [0.75, 1.0, 1.0]


def test_records_of_equal_form_are_repetitive_also_where_numbers_change() -> None:
    generator = np.random.default_rng(0)
    records = np.tile(np.arange(20, dtype=np.int64), (40, 1))
    records[:, [3, 7, 11]] = generator.integers(100, 130, (40, 3))
    assert kind_of_text(records.ravel()) == "repetitive"


@given(probes)
def test_factors_stay_between_what_is_expected_and_the_largest(history: list[Probe]) -> None:
    correction = DamageCorrection()
    for probe in history:
        observe(correction, probe)
        assert all(1.0 <= factor <= LARGEST_RATIO for factor in factors(correction))
    assert correction.largest == max(factors(correction))


@given(probes)
def test_a_factor_falls_only_after_many_histories_since_it_last_changed(history: list[Probe]) -> None:
    """Of each kind's own factor: that of a kind of which little is known is the largest of all."""
    correction, name = DamageCorrection(), kind_of_text
    lower: dict[str, set[int]] = {name(text()): set() for text in KINDS}
    for probe in history:
        text, number, ratio = probe
        kind = name(text())
        before = {each: said["factor"] for each, said in correction.as_dict().items()}
        observe(correction, probe)
        now = {each: said["factor"] for each, said in correction.as_dict().items()}
        assert all(now[each] == before[each] for each in now if each != kind)
        if ratio < before[kind]:
            lower[kind].add(number)
        if now[kind] < before[kind]:
            assert ratio < before[kind]
            assert len(lower[kind]) >= HISTORIES_TO_LOOSEN
        if now[kind] != before[kind]:
            lower[kind].clear()


@given(probes.filter(bool))
def test_one_observation_loosens_nothing(history: list[Probe]) -> None:
    """Without the others, that is: whatever single probe comes after a rise, no factor falls."""
    correction = after(history)
    for text in KINDS:
        for probe in [(text, 99, LARGEST_RATIO)] * PROBES_TO_TIGHTEN:
            observe(correction, probe)
    tightened = factors(correction)
    assert tightened == [LARGEST_RATIO] * len(KINDS)
    observe(correction, (history[-1][0], 100, CERTAIN))
    assert factors(correction) == tightened


@pytest.mark.parametrize("text", KINDS)
def test_few_observations_loosen_nothing(text: Callable[[int], TokenIds]) -> None:
    correction = after(many(text, 4.0))
    for probe in many(text, CERTAIN, HISTORIES_TO_LOOSEN - 1, first=50):
        observe(correction, probe)
        assert correction.factor(text()) == 4.0
    observe(correction, (text, 99, CERTAIN))
    # Half of the last 32 histories at 4, and half at the least that one counts as.
    assert correction.factor(text()) == pytest.approx(2.25)


def test_one_history_loosens_nothing_however_often_it_is_probed() -> None:
    correction = after([*many(prose, 4.0), *[(prose, 99, CERTAIN)] * 100])
    assert correction.factor(prose()) == 4.0


def test_a_long_conversation_is_one_history_while_it_grows_a_little() -> None:
    correction = after(many(long_prose, 4.0))
    for number in range(100):
        grown = np.concatenate([long_prose(99), prose(number)])
        correction.observe(EXPECTED * CERTAIN, EXPECTED, grown)
    assert correction.factor(long_prose()) == 4.0


def test_a_rise_in_between_begins_the_count_again() -> None:
    correction = after(many(prose, 2.0))
    for first, ratio in ((100, 2.0), (200, 4.0), (300, 4.0)):
        for probe in many(prose, ratio, PROBES_TO_TIGHTEN, first=first):
            observe(correction, probe)
        for probe in many(prose, CERTAIN, HISTORIES_TO_LOOSEN - 1, first=first + 50):
            observe(correction, probe)
        assert correction.factor(prose()) == ratio


def test_histories_that_lost_as_much_do_not_count_for_loosening() -> None:
    correction = after(many(prose, LARGEST_RATIO, PROBES_TO_TIGHTEN))
    for number in range(HISTORIES_TO_LOOSEN - 1):
        observe(correction, (prose, 100 + number, CERTAIN))
        observe(correction, (prose, 200 + number, LARGEST_RATIO))
    assert correction.factor(prose()) == LARGEST_RATIO


@given(probes, st.sampled_from(KINDS), st.floats(4.0, LARGEST_RATIO), st.booleans())
def test_few_observations_tighten(
    history: list[Probe], text: Callable[[int], TokenIds], ratio: float, is_one_history: bool
) -> None:
    """Whatever came before, and also if one conversation is probed again and again."""
    correction = after(history)
    for number in range(PROBES_TO_TIGHTEN):
        observe(correction, (text, 50 if is_one_history else 50 + number, ratio))
    assert correction.factor(text()) >= ratio


@pytest.mark.parametrize("ratio", [LARGEST_RATIO, 1e6, math.inf, math.nan])
def test_one_probe_alone_tightens_a_little(ratio: float) -> None:
    """A single one may be odd. What is not finite is taken for damage."""
    assert after([(prose, 0, ratio)]).factor(prose()) == pytest.approx((4 + LARGEST_RATIO) / 5)


def test_what_was_tightened_is_taken_back_after_many_histories() -> None:
    correction = after(many(prose, 4.0, 8))
    assert correction.factor(prose()) == 4.0
    falls = []
    for number in range(100):
        before = correction.factor(prose())
        observe(correction, (prose, 100 + number, 1.0))
        if correction.factor(prose()) < before:
            falls.append(number + 1)
    assert correction.factor(prose()) == 1.0
    assert falls[0] == HISTORIES_TO_LOOSEN
    assert all(later - one >= HISTORIES_TO_LOOSEN for one, later in itertools.pairwise(falls))
    assert falls[-1] >= 2 * HISTORIES_TO_LOOSEN


@given(probes, probes)
def test_how_kinds_alternate_does_not_matter(one: list[Probe], other: list[Probe]) -> None:
    of_prose = [(prose, number, ratio) for _, number, ratio in one]
    of_loops = [(loop, number, ratio) for _, number, ratio in other]
    alternating: list[Probe] = []
    for place in range(max(len(of_prose), len(of_loops))):
        alternating += of_prose[place : place + 1] + of_loops[place : place + 1]
    outcomes = [after([*of_prose, *of_loops]), after([*of_loops, *of_prose]), after(alternating)]
    assert outcomes[0].as_dict() == outcomes[1].as_dict() == outcomes[2].as_dict()
    assert factors(outcomes[0]) == factors(outcomes[1]) == factors(outcomes[2])


@pytest.mark.parametrize("predictable", [loop(7), prose(7)], ids=["a loop", "a text known by heart"])
@pytest.mark.parametrize("times", [1, 20])
def test_a_predictable_history_does_not_loosen_the_budget_of_chats(predictable: TokenIds, times: int) -> None:
    correction, chats = DamageCorrection(), []
    for number in range(100):
        for _ in range(times):
            correction.observe(CERTAIN, EXPECTED, predictable)
        observe(correction, (prose, 1000 + number, 2.0))
        chats.append(correction.factor(prose()))
    assert chats == sorted(chats)
    assert chats[9] > 1.6
    assert chats[-1] == pytest.approx(2.0, rel=0.05)


def test_many_predictable_histories_do_not_loosen_the_budget_of_chats() -> None:
    chats, loops = many(prose, 2.0), many(loop, CERTAIN)
    correction = after([each for pair in zip(chats, loops, strict=True) for each in pair])
    assert factors(correction) == [2.0, 1.0, 2.0]


def test_a_kind_of_which_little_is_known_takes_the_largest_factor() -> None:
    correction = after(many(prose, 3.0))
    assert factors(correction) == [3.0, 3.0, 3.0]
    for probe in many(loop, 1.0, HISTORIES_TO_LOOSEN - 1) + [(loop, 0, 1.0)] * 5:
        observe(correction, probe)
    assert factors(correction) == [3.0, 3.0, 3.0]
    observe(correction, (loop, 99, 1.0))
    assert factors(correction) == [3.0, 1.0, 3.0]


@given(probes)
def test_nothing_is_loosened_when_bases_change(history: list[Probe]) -> None:
    correction = after(history)
    before = factors(correction)
    correction.begin_again()
    assert all(now >= was for now, was in zip(factors(correction), before, strict=True))
    for probe in many(prose, CERTAIN, HISTORIES_TO_LOOSEN - 1):
        observe(correction, probe)
        assert factors(correction) == [correction.largest] * len(KINDS)


def test_a_noisy_ratio_ends_near_its_mean() -> None:
    """A budget limits the mean: being tighter than that costs bytes."""
    generator = np.random.default_rng(0)
    correction, seen = DamageCorrection(), []
    # Measured ratios of dialogues, prose and code spread like this. Their mean is 1.5.
    for number, ratio in enumerate(1.5 * generator.lognormal(-0.18, 0.6, 600)):
        observe(correction, (prose, number, float(ratio)))
        if number >= 50:
            seen.append(correction.factor(prose()))
    assert 1.5 < np.mean(seen) < 1.75


def test_the_numbers_are_plain() -> None:
    correction = after([(prose, 0, 3.0), (prose, 0, 3.0), (prose, 1, 3.0)])
    assert correction.as_dict() == {
        "varied": {"factor": pytest.approx(10 / 6), "histories": 2},
        "long": {"factor": 1.0, "histories": 0},
        "repetitive": {"factor": 1.0, "histories": 0},
    }
    assert all(type(value) in (int, float) for of in correction.as_dict().values() for value in of.values())
