"""Small random sequences for the tests of attention."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.attention.statistics import AttentionStatistics


@dataclass(frozen=True, eq=False)
class Sequence:
    """Random queries ``[L, T, H, D]`` and keys ``[L, T, Hkv, D]`` of every token of one sequence."""

    queries: torch.Tensor
    keys: torch.Tensor
    kv_heads: torch.Tensor

    @classmethod
    def random(
        cls,
        num_layers: int = 3,
        num_tokens: int = 30,
        num_heads: int = 4,
        num_kv_heads: int = 2,
        head_dim: int = 8,
        dtype: torch.dtype = torch.float32,
        seed: int = 0,
    ) -> Sequence:
        generator = torch.Generator().manual_seed(seed)

        def normal(*shape: int) -> torch.Tensor:
            return torch.randn(shape, generator=generator).to(dtype)

        return cls(
            normal(num_layers, num_tokens, num_heads, head_dim),
            normal(num_layers, num_tokens, num_kv_heads, head_dim),
            torch.arange(num_heads) * num_kv_heads // num_heads,
        )

    @property
    def num_layers(self) -> int:
        return self.queries.shape[0]

    @property
    def num_tokens(self) -> int:
        return self.queries.shape[1]

    @property
    def num_heads(self) -> int:
        return self.queries.shape[2]

    def rows(self, start: int = 0, end: int | None = None) -> QueryRows:
        positions = torch.arange(start, self.num_tokens if end is None else end)
        return self.rows_at(positions)

    def rows_at(self, positions: torch.Tensor) -> QueryRows:
        return QueryRows(self.queries[:, positions], positions, self.kv_heads, 0.5)

    def read_keys(self, layer: int) -> torch.Tensor:
        return self.keys[layer]


def assert_same(actual: AttentionStatistics, expected: AttentionStatistics) -> None:
    """The same rows, and the same sums but for rounding."""
    assert actual.num_rows == expected.num_rows
    torch.testing.assert_close(actual.squared_distance, expected.squared_distance, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(actual.ir_mass, expected.ir_mass, rtol=1e-5, atol=1e-5)
