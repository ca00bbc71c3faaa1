"""Broken messages against a real daemon: some of the cases of ``python -m tests.fuzz``."""

from __future__ import annotations

import pytest

from krul_backend.daemon.client.daemon_store import DaemonStore
from tests.crash.conversing import converse
from tests.fuzz.messages import MODEL
from tests.fuzz.run import run_cases
from tests.support.daemon_process import running_daemon


@pytest.mark.parametrize(
    "num_cases", [2000, pytest.param(100_000, marks=[pytest.mark.long, pytest.mark.timeout(7200)])]
)
def test_a_daemon_stands_whatever_it_is_sent(num_cases: int) -> None:
    with running_daemon("--host-memory", "64MiB") as (runtime_dir, process):
        run_cases(runtime_dir, process.pid, num_cases=num_cases)
        assert process.poll() is None
        store = DaemonStore(runtime_dir, model=MODEL)
        assert len(converse(store, MODEL, "after all that", num_turns=4)) == 4
        store.close()
