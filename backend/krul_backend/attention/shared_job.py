"""Lays out one reduction in the memory that the client and the worker process share."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, fields
from typing import Any

import torch

from krul_backend.attention.rows import QueryRows
from krul_backend.attention.statistics import AttentionStatistics

_ALIGNMENT_BYTES = 64
_DTYPES = {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}


@dataclass(frozen=True)
class JobLayout:
    """The shapes of a job's tensors, which lie one after the other from ``offset`` on, 64-byte aligned.

    ::

        | queries [L, R, H, D] | keys [L, T, Hkv, D] | positions [R] | kv_heads [H] |
        | squared_distance [H, L, L] | ir_mass [L] |

    The client writes the first four, the worker the last two. Keys are those of ``T`` tokens, enough for the
    last row.

    Raises:
        ValueError: if a size is negative or the dtype is not one that KV pools have.
    """

    offset: int
    num_layers: int
    num_rows: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    num_tokens: int
    queries_dtype: str
    keys_dtype: str
    scaling: float

    def __post_init__(self) -> None:
        for name in ("queries_dtype", "keys_dtype"):
            if getattr(self, name) not in _DTYPES:
                raise ValueError(
                    f"{name} {getattr(self, name)!r} is unknown (accepted: {', '.join(_DTYPES)})"
                )
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name not in ("queries_dtype", "keys_dtype", "scaling") and (
                type(value) is not int or value < 0
            ):
                raise ValueError(f"{field.name} is a count, got {value!r}")

    @classmethod
    def of(cls, rows: QueryRows, keys: torch.Tensor, num_tokens: int, offset: int = 0) -> JobLayout:
        """Layout of ``rows``; ``keys [T', Hkv, D]`` are one layer's, of which ``num_tokens`` are stored."""
        return cls(
            offset=offset,
            num_layers=rows.num_layers,
            num_rows=rows.num_rows,
            num_heads=rows.num_heads,
            num_kv_heads=keys.shape[1],
            head_dim=keys.shape[2],
            num_tokens=num_tokens,
            queries_dtype=str(rows.queries.dtype).removeprefix("torch."),
            keys_dtype=str(keys.dtype).removeprefix("torch."),
            scaling=float(rows.scaling),
        )

    @property
    def num_bytes(self) -> int:
        """Bytes from ``offset`` to the end of the job, a multiple of 64."""
        return sum(_aligned_num_bytes(shape, dtype) for shape, dtype in self._tensors())

    def views(self, memory: torch.Tensor) -> JobViews:
        """The job's tensors in ``memory``, uint8 ``[capacity]``, without a copy.

        Raises:
            ValueError: if the job does not lie inside of the memory.
        """
        if self.offset + self.num_bytes > len(memory):
            raise ValueError(f"{self} ends behind the {len(memory)} bytes of shared memory")
        views = []
        offset = self.offset
        for shape, dtype in self._tensors():
            num_bytes = torch.Size(shape).numel() * dtype.itemsize
            views.append(memory[offset : offset + num_bytes].view(dtype).view(shape))
            offset += _aligned_num_bytes(shape, dtype)
        queries, keys, positions, kv_heads, squared_distance, ir_mass = views
        return JobViews(queries, keys, positions, kv_heads, squared_distance, ir_mass, self.scaling)

    def to_json(self) -> dict[str, Any]:
        return asdict(self)

    @classmethod
    def from_json(cls, values: Mapping[str, Any]) -> JobLayout:
        """The layout that ``to_json`` gave. Raises ValueError or TypeError for anything else."""
        return cls(**values)

    def _tensors(self) -> tuple[tuple[tuple[int, ...], torch.dtype], ...]:
        layers, heads = self.num_layers, self.num_heads
        return (
            ((layers, self.num_rows, heads, self.head_dim), _DTYPES[self.queries_dtype]),
            ((layers, self.num_tokens, self.num_kv_heads, self.head_dim), _DTYPES[self.keys_dtype]),
            ((self.num_rows,), torch.int64),
            ((heads,), torch.int64),
            ((heads, layers, layers), torch.float64),
            ((layers,), torch.float64),
        )


@dataclass(frozen=True, eq=False)
class JobViews:
    """The tensors of a job, as views of the shared memory."""

    queries: torch.Tensor
    keys: torch.Tensor
    positions: torch.Tensor
    kv_heads: torch.Tensor
    squared_distance: torch.Tensor
    ir_mass: torch.Tensor
    scaling: float

    def rows(self) -> QueryRows:
        return QueryRows(self.queries, self.positions, self.kv_heads, self.scaling)

    def read_keys(self, layer: int) -> torch.Tensor:
        return self.keys[layer]

    def write_result(self, statistics: AttentionStatistics) -> None:
        self.squared_distance.copy_(statistics.squared_distance)
        self.ir_mass.copy_(statistics.ir_mass)

    def result(self) -> AttentionStatistics:
        """What ``write_result`` wrote, copied out of the shared memory."""
        return AttentionStatistics(self.squared_distance.clone(), self.ir_mass.clone(), self.queries.shape[1])


def _aligned_num_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    num_bytes = torch.Size(shape).numel() * dtype.itemsize
    return -(-num_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
