"""Kill -9 of daemon, engine and both under load: a few of the rounds of ``python -m tests.crash``."""

from __future__ import annotations

import tempfile
from pathlib import Path

import pytest

from tests.crash.rounds import run_rounds


@pytest.mark.parametrize(
    "num_rounds", [9, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_nothing_wrong_is_found_whatever_is_killed(num_rounds: int) -> None:
    # Not in tmp_path: the path of a socket holds 107 bytes.
    with tempfile.TemporaryDirectory(prefix="krul-crash-", dir="/tmp") as directory:
        outcome = run_rounds(Path(directory), num_rounds=num_rounds, seed=7)
    assert outcome.rounds == num_rounds
    assert len(outcome.kills) == 3
    # It would prove little if next to nothing was stored, flushed and found again.
    assert outcome.found > 100
    assert outcome.durable > 50
