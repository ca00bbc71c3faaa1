"""Formats in which the vectors of a group are stored: one for each precision."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from krul_backend.codec.layout import Section, Views
from krul_backend.codec.quantize import (
    dequantize,
    pack,
    packed_width,
    quantize,
    scale_and_offset,
    unpack,
)
from krul_backend.strategy.strategy import Precision

_CHANNEL = 1
_TOKEN = 3
"""The dimension of ``[G, n, H, D]`` over which codes share a scale: all tokens of a channel, or all channels
of a token."""


@dataclass(frozen=True)
class VectorFormat(ABC):
    """Stores vectors ``[G, n, H, D]`` of ``G`` groups of ``n`` tokens in sections of the groups' records.

    ``name`` starts the names of its sections.
    """

    name: str
    num_heads: int
    head_dim: int

    @abstractmethod
    def sections(self) -> tuple[Section, ...]: ...

    @abstractmethod
    def write(self, vectors: torch.Tensor, views: Views) -> None:
        """Store ``vectors`` fp32 in ``views``, sections of ``G`` records."""

    @abstractmethod
    def read(self, views: Views) -> torch.Tensor:
        """fp32 ``[G, n, H, D]``; may be a view of the records, or expanded."""


@dataclass(frozen=True)
class FloatFormat(VectorFormat):
    """Stores the elements themselves, rounded to ``dtype``."""

    dtype: torch.dtype

    def sections(self) -> tuple[Section, ...]:
        return (Section(self.name, self.dtype, (self.num_heads, self.head_dim), per_token=True),)

    def write(self, vectors: torch.Tensor, views: Views) -> None:
        views[self.name].copy_(vectors)

    def read(self, views: Views) -> torch.Tensor:
        return views[self.name].float()


@dataclass(frozen=True)
class CodeFormat(VectorFormat):
    """Stores codes with a scale and an offset, per channel of a group or per token; see ``quantize``."""

    bits: int
    per_channel: bool

    def sections(self) -> tuple[Section, ...]:
        width = packed_width(self.head_dim, self.bits)
        range_shape = (1, self.num_heads, self.head_dim) if self.per_channel else (self.num_heads, 1)
        return (
            Section(f"{self.name}_codes", torch.uint8, (self.num_heads, width), per_token=True),
            Section(f"{self.name}_scale", torch.float16, range_shape, per_token=not self.per_channel),
            Section(f"{self.name}_offset", torch.float16, range_shape, per_token=not self.per_channel),
        )

    def write(self, vectors: torch.Tensor, views: Views) -> None:
        scale, offset = scale_and_offset(vectors, self.bits, _CHANNEL if self.per_channel else _TOKEN)
        views[f"{self.name}_codes"].copy_(pack(quantize(vectors, scale, offset, self.bits), self.bits))
        views[f"{self.name}_scale"].copy_(scale)
        views[f"{self.name}_offset"].copy_(offset)

    def read(self, views: Views) -> torch.Tensor:
        codes = unpack(views[f"{self.name}_codes"], self.bits, self.head_dim)
        return dequantize(codes, views[f"{self.name}_scale"], views[f"{self.name}_offset"])


def vector_format(
    name: str, num_heads: int, head_dim: int, dtype: torch.dtype, precision: Precision, *, per_channel: bool
) -> VectorFormat:
    """The format for ``precision``. ``dtype`` is the pool's. ``per_channel``: one scale per channel."""
    bits = precision.bits
    if bits is None:
        return FloatFormat(name, num_heads, head_dim, dtype)
    return CodeFormat(name, num_heads, head_dim, bits, per_channel)
