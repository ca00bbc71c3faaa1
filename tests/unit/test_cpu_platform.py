"""A CPU server's workers sleep soon when they wait for each other, unless the user says otherwise."""

from __future__ import annotations

import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
from sglang.srt.platforms import current_platform


@pytest.mark.parametrize(("given", "expected"), [(None, "1000"), ("77", "77")])
def test_workers_that_start_later_spin_briefly(
    monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str
) -> None:
    monkeypatch.delenv("GOMP_SPINCOUNT", raising=False)
    if given is not None:
        monkeypatch.setenv("GOMP_SPINCOUNT", given)
    current_platform.apply_server_args_defaults(SimpleNamespace(attention_backend=None))
    monkeypatch.setenv("OMP_DISPLAY_ENV", "verbose")
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    worker = subprocess.run(
        [sys.executable, "-c", "import torch"], env=os.environ, capture_output=True, text=True, check=True
    )
    assert f"GOMP_SPINCOUNT = '{expected}'" in worker.stderr
