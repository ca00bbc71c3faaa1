"""The CPU platform's kernels for speculation do what SGLang's own do."""

from __future__ import annotations

from tests.support.triton_runs import run_interpreted


def test_they_write_what_the_triton_kernels_write() -> None:
    run_interpreted("tests/support/interpreted_speculation_cases.py")
