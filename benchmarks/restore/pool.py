"""A paged KV pool, as engines have it."""

from __future__ import annotations

import torch

from krul_backend.codec.layout import LayerKV, LayerShape


class KVPool:
    """``k[l]`` and ``v[l]`` ``[num_slots, num_kv_heads, head_dim]``, one pair of buffers per layer."""

    def __init__(self, shape: LayerShape, num_layers: int, num_slots: int, device: torch.device) -> None:
        def buffers(head_dim: int) -> list[torch.Tensor]:
            size = (num_slots, shape.num_kv_heads, head_dim)
            return [torch.zeros(size, dtype=shape.dtype, device=device) for _ in range(num_layers)]

        self.num_slots = num_slots
        self.k = buffers(shape.k_head_dim)
        self.v = buffers(shape.v_head_dim)

    @property
    def device(self) -> torch.device:
        return self.k[0].device

    @property
    def num_layers(self) -> int:
        return len(self.k)

    def fill(self, value: float) -> None:
        """Overwrite everything. NaN, and whatever is read without having been written shows in the result."""
        for buffer in (*self.k, *self.v):
            buffer.fill_(value)

    def write(self, layer: int, slots: torch.Tensor, kv: LayerKV) -> None:
        """``slots`` int64 ``[T]``, all different."""
        self.k[layer].index_copy_(0, slots, kv.k)
        self.v[layer].index_copy_(0, slots, kv.v)

    def gather(self, layer: int, slots: torch.Tensor) -> LayerKV:
        """Copies of the rows at ``slots`` int64 ``[T]``."""
        return LayerKV(self.k[layer].index_select(0, slots), self.v[layer].index_select(0, slots))


def scattered_slots(num_slots: int, page_size: int, seed: int, device: torch.device) -> torch.Tensor:
    """All slots, int64 ``[num_slots]``, whole pages in random order, as a pool that has been used gives them.

    ``num_slots`` is a multiple of ``page_size``.
    """
    generator = torch.Generator().manual_seed(seed)
    pages = torch.randperm(num_slots // page_size, generator=generator)
    slots = pages[:, None] * page_size + torch.arange(page_size)
    return slots.flatten().to(device)
