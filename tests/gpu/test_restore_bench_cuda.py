"""The restore benchmark on a GPU: pinned memory, a load stream, events; every restore is checked."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from benchmarks.restore.__main__ import run
from benchmarks.restore.configuration import Configuration, TierSpec
from benchmarks.restore.setting import METHODS

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="the load stream needs a CUDA device")


@pytest.mark.parametrize("shape", ["small-mha", "small-gqa"])
def test_every_method_restores_what_it_has_to(shape: str, tmp_path: Path) -> None:
    result = run(
        Configuration(
            shapes=(shape,),
            tiers=(TierSpec("dram"), TierSpec("ssd"), TierSpec("dram", 0.05)),
            history_tokens=(256,),
            repeats=2,
            device="cuda",
            ssd_folder=tmp_path,
        )
    )
    assert len(result["rows"]) == 3 * len(METHODS)
    for row in result["rows"]:
        assert row["relative_error"] <= result["models"][0]["tolerance"]
        for stage in ("head", "load", "own"):
            spans = row["timeline"][stage]
            assert all(start <= end for start, end in spans)
        for load, own in zip(row["timeline"]["load"], row["timeline"]["own"], strict=False):
            assert load[1] <= own[0] + 1e-6
