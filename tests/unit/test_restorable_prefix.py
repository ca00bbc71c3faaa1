"""The longest prefix that all ranks can restore, of what each of them found."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from krul_sglang.adapter.linker_wrapper import KrulLinkerWrapper


@pytest.mark.parametrize(
    ("found", "of_others", "expected"),
    [([7], 9, 7), ([7], 3, 3), ([7], 0, 0), ([], 9, 0), ([7], 2, 0), ([12], 99, 10)],
)
def test_every_rank_restores_as_far_as_the_one_that_found_least(
    found: list[int], of_others: int, expected: int
) -> None:
    def reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MIN
        tensor.clamp_(max=of_others)

    wrapper: Any = KrulLinkerWrapper.__new__(KrulLinkerWrapper)
    wrapper.cache_linker = SimpleNamespace(states=None)
    wrapper.cache = SimpleNamespace(_all_reduce_attn_groups=reduce)
    # Two pages are on the device: no more than these is nothing.
    assert wrapper._sync_restorable_prefix(found, num_pages=10, device_hit_pages=2) == expected
