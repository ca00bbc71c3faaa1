"""Quantizes numbers to packed min-max codes of 8, 4 or 2 bits, with scale and offset in fp16."""

from __future__ import annotations

import torch

FP16_MAX = 65504.0


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
