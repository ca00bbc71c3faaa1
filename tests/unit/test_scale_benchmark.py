"""The benchmark of the SSD tier's space, on a small cap."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.scale import run, scale_table
from krul_backend.tiers.ssd.room import Room


def test_the_cap_is_filled_and_what_is_in_the_index_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("benchmarks.scale._NUM_RANKS", 2)
    result = run(tmp_path, 32 << 20, 3000, seed=1)
    written, used, ready_s, memory_gb, per_s, cores, requests = (row["value"] for row in result["rows"])
    assert 0.5 < used <= 1
    # The index of a small tier is much of it.
    assert written < 1.5
    assert min(ready_s, memory_gb, per_s, cores, requests) > 0
    assert "| share of the cap in use, at most |" in scale_table(result, None)
    assert list(tmp_path.iterdir()) == []


def test_a_tier_that_gives_nothing_back_does_not_pass(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Room, "make", lambda *given: False)
    with pytest.raises(Exception, match="not written"):
        run(tmp_path, 32 << 20, 3000, seed=1)
