"""The benchmark of what a prefix costs the host by its number of segments."""

from __future__ import annotations

import pytest
import torch

from benchmarks.restore.configuration import RestoreBenchmarkError, WrongRestoreError
from benchmarks.restore.segment_cost import (
    SegmentCostConfiguration,
    run_segment_cost,
    summarize_segment_cost,
)
from krul_backend.codec.unit_restore import NativeTails

TINY = SegmentCostConfiguration((1, 5), ("reference:bfloat16",), (70,), repeats=2)


def test_every_number_of_segments_is_measured_over_the_same_bytes() -> None:
    result = run_segment_cost(TINY)
    assert [(row["tokens"], row["segments"]) for row in result["rows"]] == [(70, 1), (70, 5)]
    for row in result["rows"]:
        assert row["num_bytes"] == 70 * 12 * 2 * 2 * 64 * 2
        assert len(row["seconds"]["load"]["samples"]) == 2
        steps = (row["seconds"][step]["samples"] for step in ("lookup", "open", "plan", "load"))
        assert row["seconds"]["total"]["samples"] == pytest.approx(list(map(sum, zip(*steps, strict=True))))
    kept = summarize_segment_cost(result)["rows"][1]["seconds"]
    assert set(kept["open"]) == {"median"}
    assert set(kept["load"]) == {"median", "min", "p90"}


def test_a_row_in_a_wrong_slot_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    restore = NativeTails.restore

    def swapped(
        self: NativeTails, joined: torch.Tensor, k: torch.Tensor, v: torch.Tensor, slots: torch.Tensor
    ) -> None:
        restore(self, joined, k, v, slots.flip(0))

    monkeypatch.setattr(NativeTails, "restore", swapped)
    with pytest.raises(WrongRestoreError, match="layer 0"):
        run_segment_cost(TINY)


@pytest.mark.parametrize(
    ("segments", "shape"), [((0,), "reference:float32"), ((71,), "reference:float32"), ((1,), "gpt:float32")]
)
def test_what_cannot_be_measured_is_refused(segments: tuple[int, ...], shape: str) -> None:
    with pytest.raises(RestoreBenchmarkError):
        SegmentCostConfiguration(segments, (shape,), (70,))
