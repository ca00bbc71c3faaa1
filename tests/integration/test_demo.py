"""``krul-sglang demo`` from end to end: three real servers, the bundled model and conversations."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest

ROW_FIELDS = {
    "conversation",
    "turn",
    "prompt_tokens",
    "device_tokens",
    "host_tokens",
    "computed_tokens",
    "ttft_s",
    "baseline_ttft_s",
    "answer_equal",
}
SUMMARY_FIELDS = {
    "restored_turns",
    "host_hit_tokens",
    "answers_equal",
    "recall",
    "baseline_recall",
    "median_ttft_s",
    "baseline_median_ttft_s",
    "bytes_stored",
    "tokens_stored",
}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> tuple[subprocess.CompletedProcess[str], dict[str, Any]]:
    path = tmp_path_factory.mktemp("demo") / "out.json"
    command = [
        *(sys.executable, "-m", "krul_sglang.cli", "demo"),
        *("--num-conversations", "4"),
        *("--turns", "3"),
        *("--raw", str(path)),
    ]
    result = subprocess.run(command, capture_output=True, text=True, timeout=1200)
    assert path.exists(), result.stdout + result.stderr
    return result, json.loads(path.read_text())


def test_it_passes_and_says_so(demo: tuple[subprocess.CompletedProcess[str], dict[str, Any]]) -> None:
    result, measured = demo
    assert result.returncode == 0, result.stdout
    assert result.stdout.strip().splitlines()[-1] == measured["summary"]["verdict"]


def test_every_answer_is_equal_and_returning_turns_were_restored(
    demo: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, measured = demo
    rows, summary = measured["rows"], measured["summary"]
    assert len(rows) == 12
    assert all(set(row) >= ROW_FIELDS for row in rows)
    assert set(summary) >= SUMMARY_FIELDS
    assert all(row["answer_equal"] for row in rows)
    for row in rows:
        assert row["prompt_tokens"] == row["device_tokens"] + row["host_tokens"] + row["computed_tokens"]
    assert summary["restored_turns"] == sum(row["host_tokens"] > 0 for row in rows) > 0
    assert summary["host_hit_tokens"] == sum(row["host_tokens"] for row in rows)
    assert summary["bytes_stored"] > summary["tokens_stored"] > 0


def test_the_baseline_had_to_compute_what_krul_restored(
    demo: tuple[subprocess.CompletedProcess[str], dict[str, Any]],
) -> None:
    _, measured = demo
    baseline = {(turn["conversation"], turn["turn"]): turn for turn in measured["samples"]["baseline"]}
    restored = [row for row in measured["rows"] if row["host_tokens"] > 0]
    for row in restored:
        assert baseline[row["conversation"], row["turn"]]["host_tokens"] == 0
        assert baseline[row["conversation"], row["turn"]]["device_tokens"] < row["host_tokens"]
