"""Formats in which the vectors of a group are stored: the elements themselves, or packed min-max codes."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from krul_backend.codec.layout import LayerShape, Section, Views
from krul_backend.strategy import Precision

FP16_MAX = 65504.0

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


def key_and_value_formats(shape: LayerShape, precision: Precision) -> tuple[VectorFormat, VectorFormat]:
    """The formats "k" of keys and "v" of values. Codes of keys have one scale per channel, those of values
    one per token."""
    bits = precision.bits
    k, v = ("k", shape.num_kv_heads, shape.k_head_dim), ("v", shape.num_kv_heads, shape.v_head_dim)
    if bits is None:
        return FloatFormat(*k, shape.dtype), FloatFormat(*v, shape.dtype)
    return CodeFormat(*k, bits, per_channel=True), CodeFormat(*v, bits, per_channel=False)


def fp16_at_most(x: torch.Tensor) -> torch.Tensor:
    """The largest fp16 that is not above ``x`` (fp32); outside fp16's range, its nearest finite end."""
    x = x.clamp(-FP16_MAX, FP16_MAX)
    nearest = x.half()
    # Neighbouring floats of one sign have neighbouring bit patterns; below either zero lies 0x8001.
    bits = nearest.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, torch.where(nearest == 0, -0x7FFF, bits + 1)).to(torch.int16)
    return torch.where(nearest.float() > x, below, bits).view(torch.float16)


def fp16_at_least(x: torch.Tensor) -> torch.Tensor:
    """The smallest fp16 that is not below ``x`` (fp32); outside fp16's range, its nearest finite end."""
    return -fp16_at_most(-x)


def scale_and_offset(x: torch.Tensor, bits: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Scale and offset, fp16, of ``x`` fp32 over dimension ``dim``, which stays with size 1.

    The offset is the minimum rounded down and the scale is rounded up, so that ``offset + code * scale`` with
    codes 0 to ``2^bits - 1`` still covers every element. Numbers beyond fp16 (65504) saturate.
    """
    low, high = torch.aminmax(x, dim=dim, keepdim=True)
    offset = fp16_at_most(low)
    scale = fp16_at_least((high - offset.float()) / (2**bits - 1))
    return scale, offset


def quantize(x: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor, bits: int) -> torch.Tensor:
    """Nearest codes of ``x`` fp32, uint8 of the same shape; ``scale`` and ``offset`` broadcast over it.

    With ``scale_and_offset`` of the same ``x``: ``|x - dequantize(codes)| <= scale / 2``, up to the rounding
    of fp32.
    """
    scale = scale.float()
    inverse = torch.where(scale > 0, 1 / scale, 0)
    return ((x - offset.float()) * inverse).round_().clamp_(0, 2**bits - 1).to(torch.uint8)


def dequantize(codes: torch.Tensor, scale: torch.Tensor, offset: torch.Tensor) -> torch.Tensor:
    """``offset + code * scale`` in fp32."""
    return torch.addcmul(offset.float(), codes.float(), scale.float())


def packed_width(num_codes: int, bits: int) -> int:
    """Bytes of ``num_codes`` codes of 8, 4 or 2 bits."""
    codes_per_byte = 8 // bits
    return -(-num_codes // codes_per_byte)


def pack(codes: torch.Tensor, bits: int) -> torch.Tensor:
    """``codes`` uint8 ``[..., D]`` below ``2^bits`` as bytes ``[..., W]``, ``W = packed_width(D, bits)``.

    Byte ``w`` holds the codes ``w``, ``w + W``, ``w + 2 W`` ..., the first in its lowest bits: channels that
    a rotary embedding of the neox kind turns together share a byte.
    """
    if bits == 8:
        return codes
    width = packed_width(codes.shape[-1], bits)
    packed = codes[..., :width].clone()
    for plane in range(1, 8 // bits):
        part = codes[..., plane * width : (plane + 1) * width]
        packed[..., : part.shape[-1]] |= part << (bits * plane)
    return packed


def unpack(packed: torch.Tensor, bits: int, num_codes: int) -> torch.Tensor:
    """Inverse of ``pack``: uint8 ``[..., num_codes]``."""
    if bits == 8:
        return packed
    planes = [(packed >> (bits * plane)) & (2**bits - 1) for plane in range(8 // bits)]
    return torch.cat(planes, dim=-1)[..., :num_codes]
