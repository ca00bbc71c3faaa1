"""The arguments that kernels of several codecs have in common."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import torch

from krul_backend.codec.rotary import RotaryTable


def target_arguments(k_buffer: torch.Tensor, v_buffer: torch.Tensor, slots: torch.Tensor) -> dict[str, Any]:
    """The arguments of a kernel that say where it writes in one layer of the pool."""
    return {
        "k_buffer": k_buffer,
        "k_slot_stride": k_buffer.stride(0),
        "k_head_stride": k_buffer.stride(1),
        "v_buffer": v_buffer,
        "v_slot_stride": v_buffer.stride(0),
        "v_head_stride": v_buffer.stride(1),
        "slots": slots,
    }


def rotary_arguments(rotary: RotaryTable | None, device: torch.device) -> dict[str, Any]:
    """The arguments of a kernel that say how it rotates keys. Without rotation the tables are never read."""
    cos, sin = _rotary_on(rotary, device)
    return {
        "cos_table": cos,
        "sin_table": sin,
        "angle_stride": cos.stride(0),
        "rotary_half": 0 if rotary is None else rotary.rotary_dim // 2,
        "is_neox": rotary is None or rotary.is_neox,
    }


@lru_cache(maxsize=4)
def _rotary_on(rotary: RotaryTable | None, device: torch.device) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosines and sines on ``device``, with equal strides and angles next to each other; copied once.

    The copy comes from pageable memory and has ended when this returns, so any stream may read it.
    """
    if rotary is None:
        empty = torch.empty(1, 1, device=device)
        return empty, empty
    cos, sin = rotary.cos, rotary.sin
    if cos.stride() != sin.stride() or cos.stride(1) != 1:
        cos, sin = cos.cpu().contiguous(), sin.cpu().contiguous()
    return cos.to(device), sin.to(device)
