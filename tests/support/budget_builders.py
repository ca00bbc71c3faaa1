"""A small model, its pool and what a capture hands over, for tests of the error budget."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.segment import ModelIdentity
from krul_sglang.engine.common.agreement import RankAgreement
from krul_sglang.engine.common.kv_pool import DevicePool
from tests.support.codec_builders import rotary_table

PAGE_SIZE, NUM_LAYERS, NUM_SLOTS, HEAD_DIM = 4, 4, 512, 8
MODEL = ModelIdentity("m", "d" * 64, "float32", NUM_LAYERS, 1, HEAD_DIM, HEAD_DIM, PAGE_SIZE, 0, 1)
ROTARY = rotary_table(HEAD_DIM)


def make_pool() -> DevicePool:
    from sglang.srt.mem_cache.memory_pool import MHATokenToKVPool

    return DevicePool(
        MHATokenToKVPool(
            size=NUM_SLOTS,
            page_size=PAGE_SIZE,
            dtype=torch.float32,
            head_num=1,
            head_dim=HEAD_DIM,
            layer_num=NUM_LAYERS,
            device="cpu",
            enable_memory_saver=False,
        )
    )


class OtherRank(RankAgreement):
    """This rank and one that has what ``answer`` makes of this rank's values."""

    def __init__(self, answer: Any) -> None:
        super().__init__(None, 2)
        self._answer = answer

    def gather(self, values: torch.Tensor | None, shape: Sequence[int]) -> list[torch.Tensor] | None:
        other = self._answer(values)
        return None if values is None or other is None else [values, other]


class RecordedRows:
    """Query rows of a turn, as a capture hands them over."""

    def __init__(self, num_tokens: int) -> None:
        generator = torch.Generator().manual_seed(num_tokens)
        queries = torch.randn(NUM_LAYERS, 6, 1, HEAD_DIM, generator=generator)
        positions = torch.arange(num_tokens - 6, num_tokens)
        self._rows = QueryRows(queries, positions, torch.zeros(1, dtype=torch.int64), HEAD_DIM**-0.5)

    def rows(self, num_tokens: int) -> QueryRows:
        return self._rows

    def release(self) -> None:
        pass
