"""A minute of ``python -m tests.soak``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.soak import MOST_GROWTH_BYTES, describe, run_soak


@pytest.mark.parametrize(
    "minutes", [1, pytest.param(10, marks=[pytest.mark.long, pytest.mark.timeout(3600)])]
)
def test_users_faults_and_an_operator_leave_right_answers_and_nothing_else(minutes: int) -> None:
    # Not in tmp_path: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="krul-soak-", dir="/tmp") as directory:
        outcome = run_soak(Path(directory), 60.0 * minutes, seed=3)
    assert outcome.wrong == 0, describe(outcome)
    assert outcome.growth_bytes < MOST_GROWTH_BYTES, describe(outcome)
    # It would prove little if next to nothing came back, or nothing was disturbed.
    assert len(outcome.said) > 20, describe(outcome)
    assert outcome.host_tokens > 0, describe(outcome)
    assert set(outcome.events) == {
        "abort",
        "damaged file",
        "flush",
        "hint",
        "killed daemon",
        "update of weights",
    }
