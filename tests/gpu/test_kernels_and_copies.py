from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.gpu.kernels_and_copies import CHECKS
from tests.gpu.stage import Check, LeftOut, Setting

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="these checks need a CUDA device")


@pytest.mark.parametrize("check", [check for _, check in CHECKS], ids=[name for name, _ in CHECKS])
def test_stage_a(check: Check, tmp_path: Path) -> None:
    try:
        assert check(Setting("cuda:0", tmp_path))
    except LeftOut as reason:
        pytest.skip(str(reason))
